"""A PostgreSQL server of the tests' own, on a free loopback port, gone with them."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SERVER = "postgresql://tester:of-no-secret@127.0.0.1:{port}/{database}"


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found and shutil.which("postgres", path=str(Path(found).resolve().parent)):
        return Path(found).resolve().parent
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return packaged[-1].parent if packaged else None


@contextlib.contextmanager
def running() -> Iterator[str]:
    """A server with an empty cluster; gives the URL's text before the database's name."""
    folder = binaries()
    assert folder is not None
    # In /tmp, and not in pytest's folder: the server's user may not look into that one.
    with tempfile.TemporaryDirectory(prefix="autotune-pg-", ignore_cleanup_errors=True) as root:
        user = _other_user(Path(root))
        data, password = Path(root) / "data", Path(root) / "password"
        password.write_text("of-no-secret")
        os.chmod(root, 0o755)
        _run(user, [folder / "initdb", "-D", data, "-U", "tester", "-A", "scram-sha-256",
                    f"--pwfile={password}", "-E", "UTF8", "--no-sync"])  # fmt: skip
        port = _free_port()
        options = (
            f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories= "
            "-c fsync=off -c shared_buffers=16MB"
        )
        _run(user, [folder / "pg_ctl", "-D", data, "-w", "-o", options,
                    "-l", Path(root) / "log", "start"])  # fmt: skip
        try:
            yield SERVER.format(port=port, database="")
        finally:
            _run(user, [folder / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"])


def _other_user(root: Path) -> str | None:
    """PostgreSQL refuses to run as root: the owner of its files then is another."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            os.chown(root, pwd.getpwnam(name).pw_uid, -1)
            return name
    return None


def _run(user: str | None, words: list[object]) -> None:
    done = subprocess.run(
        [str(word) for word in words], user=user, cwd="/", stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60,
        env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
    )  # fmt: skip
    assert done.returncode == 0, f"{words[0]}: {done.stderr}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
