"""Where studies live: SQLite or an Optuna journal file on one host, PostgreSQL for a fleet.

Optuna's storages survive `kill -9`; what they lack is that one process at a time decides who works
on what. `Storage.exclusive` is that: a file lock, or PostgreSQL's advisory lock, and the system
drops either when its holder dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from autotune.errors import InputError, shown

ALLOWED = "postgresql://user:password@host/database, sqlite:///path or journal://path"
BUSY_S = 60
"""How long SQLite waits for another program, a dashboard say, that has the file."""
CONNECT_S = 10
HOLD_S = 30
"""After that long PostgreSQL takes the lock from a host that went silent while it had it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """An open storage.

    Attributes:
      label: its URL without the password.
      backend: the Optuna storage.
      exclusive: a context that one process on the storage is in at a time. All that is written
        is written in it: SQLite allows one writer, and Optuna's own check of a trial's state is
        no lock there.
      close: lets its connections go; `contextlib.closing` calls it.
    """

    label: str
    backend: Any
    exclusive: Callable[[], AbstractContextManager[object]]
    close: Callable[[], None] = lambda: None


def check(url: str) -> None:
    """Raises InputError for a `--storage` that cannot be one; opens and writes nothing."""
    kind, path = _parts(url)
    if kind == "postgresql":
        if importlib.util.find_spec("psycopg") is None:
            raise InputError(
                "--storage postgresql:// needs psycopg, which is not installed; "
                "pip install '.[fleet]' in autotune's checkout"
            )
        return
    assert path is not None
    if kind == "sqlite" and ("?" in path.name or path.name == ":memory:"):
        raise InputError(f"--storage {shown(url)} is not allowed; a file, without ?options")
    if not path.parent.is_dir() or path.is_dir():
        fault = "is a directory" if path.is_dir() else f"{path.parent} does not exist"
        raise InputError(f"--storage {shown(url)} is not allowed; {fault}")


def opened(url: str) -> Storage:
    """The storage at `url`, its tables made where it is new.

    Raises:
      InputError: another kind of URL, no driver for it, or no connection; never shows a password.
    """
    check(url)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kind, path = _parts(url)
    if kind == "postgresql":
        return _postgresql(url)
    assert path is not None
    lock_path = path.with_name(f".{path.name}.lock")
    lock = FileLock(lock_path)
    label = f"{kind} {path}"
    try:
        lock_path.touch()  # FileLock waits for ever where it cannot make its file
        with faults(label), lock:
            if kind == "journal":
                return Storage(label=label, backend=_journal(path, lock), exclusive=lambda: lock)
            rdb = _sqlite(path)
            return _relational(rdb, label, lambda: lock)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise InputError(f"storage {label} cannot be used: {error}") from None


@contextmanager
def faults(label: str) -> Iterator[None]:
    """Errors of the database under it as one line: what, where, and its own first words."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        text = str(getattr(cause, "orig", None) or cause or error).strip().splitlines() or [""]
        raise InputError(f"storage {label} cannot be used: {text[0]}") from None


def _parts(url: str) -> tuple[str, Path | None]:
    """(kind, path of a file's). Raises InputError for what is no storage."""
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgresql", "postgresql+psycopg") and rest:
        return "postgresql", None
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return "sqlite", Path(rest[1:])
    if scheme == "journal" and rest:
        return "journal", Path(rest)
    kind = f"{scheme}://…" if separator else shown(url)  # what follows may hold a password
    raise InputError(f"--storage {kind} is not allowed; {ALLOWED}")


def _journal(path: Path, lock: FileLock) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if file.read(2) not in (b"", b"{", b'{"'):  # somebody's file, whose end is not ours to cut
            raise ValueError("it is no journal")
    own_lock: Any = _JournalLock(path, lock)  # optuna is not imported where it would be its base
    return JournalStorage(JournalFileBackend(str(path), own_lock))


def _sqlite(path: Path) -> Any:
    from optuna.storages import RDBStorage

    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as first:
        first.execute("PRAGMA schema_version")  # raises for what is no database
    patience = {"connect_args": {"timeout": BUSY_S}}
    return RDBStorage(f"sqlite:///{path}", engine_kwargs=patience)


def _relational(
    rdb: Any, label: str, exclusive: Callable[[], AbstractContextManager[object]], *engines: Any
) -> Storage:
    from optuna.storages import get_storage

    def close() -> None:
        rdb.remove_session()
        for engine in (rdb.engine, *engines):
            engine.dispose()

    return Storage(label=label, backend=get_storage(rdb), exclusive=exclusive, close=close)


def _postgresql(url: str) -> Storage:
    import optuna
    import sqlalchemy

    try:
        address = sqlalchemy.make_url(url).set(drivername="postgresql+psycopg")
    except (sqlalchemy.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
        raise InputError(f"--storage postgresql://… is not allowed; {ALLOWED}") from None
    label = address.set(drivername="postgresql").render_as_string(hide_password=True)
    patience = {} if "connect_timeout" in address.query else {"connect_timeout": CONNECT_S}
    options = {"pool_pre_ping": True, "connect_args": patience}
    with faults(label):
        engine = sqlalchemy.create_engine(address, **options)

    def exclusive() -> AbstractContextManager[None]:
        return _advisory_lock(engine)

    with faults(label), exclusive():  # two that make the tables at once fail
        rdb = optuna.storages.RDBStorage(
            address.render_as_string(hide_password=False), engine_kwargs=options
        )
    return _relational(rdb, label, exclusive, engine)


_KEY = int.from_bytes(hashlib.sha256(b"autotune").digest()[:7], "big")


@contextmanager
def _advisory_lock(engine: Any) -> Iterator[None]:
    """One holder in a database; let go at the end of its transaction, or of its connection."""
    import sqlalchemy

    with engine.begin() as connection:
        connection.execute(
            sqlalchemy.text(f"SET LOCAL idle_in_transaction_session_timeout = '{HOLD_S}s'")
        )
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _KEY})
        yield


class _JournalLock:
    """Optuna's own journal locks outlive a killed holder by half a minute; this one does not.

    A holder killed in the middle of a line leaves a torn one, on which every later reader would
    fail: it is cut off before the next line is written.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self._path, self._lock = path, lock

    def acquire(self) -> bool:
        self._lock.acquire()
        with self._path.open("rb+") as file:
            end = file.seek(0, 2)
            while end and _last_byte(file, end) != b"\n":
                end -= 1
            file.truncate(end)
        return True

    def release(self) -> None:
        self._lock.release()


def _last_byte(file: Any, end: int) -> bytes:
    file.seek(end - 1)
    last: bytes = file.read(1)
    return last
