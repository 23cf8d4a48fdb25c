"""Files written whole or not at all, against `kill -9` and a second writer."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from pathlib import Path

ABANDONED_SECONDS = 3600  # no write takes that long
_PREFIX = ".autotune-"  # where others keep `.*.tmp` too, theirs are left alone


def write(path: Path, content: bytes) -> None:
    """Replaces `path`, whose folder is made where there is none.

    By a temporary file beside it, of the old one's mode, fsync and rename; what earlier writers
    left half written there goes too.

    Raises OSError; what was at `path` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_PREFIX}{secrets.token_hex(8)}.tmp")
    try:
        # Not by `tempfile`: its files are for their owner's eyes only, and stay so when renamed.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _remove_abandoned(path.parent)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
