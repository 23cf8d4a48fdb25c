"""What lookups know of stored leaderboards: the best row of each, read again where it changed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute  # else at first use, and a fork meanwhile would keep that import's lock

from autotune import results_folder
from autotune.board_file import first_line, records, table_of
from autotune.lookup import sources
from autotune.row import EVIDENCE, IDENTITY, Row, checked, contradiction
from autotune.stored import statement_of

Stamp = tuple[int, int, int, int] | None
"""Times of modification and change, size and inode of a file; None in an archive."""
_COLUMNS = (
    "problem_key", "problem_name", "kernel", "device", "problem", "config", "status", "evidence",
    "is_best", "rank", "latency_ms", "latency_model_ms", "latency_compiled_ms",
    "latency_measured_ms", "timer", "mfu", "jax_version", "libtpu_version",
    "kernel_fingerprint", "created_at",
)  # fmt: skip
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, OverflowError, pa.ArrowException)


class StaleResultsWarning(UserWarning):
    """A config was made with another release of jax or libtpu than the one here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The best row of one leaderboard.

    Attributes:
      row: its columns that lookups need; the others are null.
      shape, options, dtype: the problem, options filled in as stored (nulls left out).
      path: the file, as shown.
      stamp: of the file, from before it was read.
    """

    row: Row
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    dtype: str
    config: Mapping[str, Any]
    path: str
    stamp: Stamp

    @property
    def unchanged(self) -> bool:
        """Whether the file is still the one that was read."""
        return self.stamp is None or _stamp(self.path) == self.stamp


@dataclass(kw_only=True, slots=True)
class Library:
    """The best rows under one source.

    Attributes:
      stored: strongest evidence first, then the newest.
      shelves: (kernel, device, dtype) -> those of `stored`, in its order.
      axes: kernel -> the axes that any of its problems has.
      read: file -> (its stamp, what was read: None where no row is the best, and one sentence where
        it could not be read).
      folders: as in `sources.Listed`.
      watched: file -> its stamp, of those whose change no folder tells.
      answers: what was asked before, with what was found.
      alike: shelf and options that were asked for -> what there has the same.
    """

    source: str
    stored: tuple[Stored, ...]
    shelves: Mapping[tuple[str, str, str], Sequence[Stored]]
    axes: Mapping[str, Set[str]]
    read: Mapping[str, tuple[Stamp, Stored | str | None]]
    folders: Mapping[str, int | None]
    watched: Mapping[str, Stamp]
    answers: dict[Any, Any] = field(default_factory=dict)
    alike: dict[Any, Sequence[Stored]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether there may be other files by now, or a damaged one was mended. Reads no file."""
        if any(since is None or _changed_ns(f) != since for f, since in self.folders.items()):
            return True
        return any(_stamp(path) != stamp for path, stamp in self.watched.items())


_libraries: dict[str, Library] = {}
_lock = threading.RLock()


def _unlock() -> None:
    """In the child of a fork nobody is left to release what another thread held."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def opened(source: str, *, fresh: bool = False, rewritten: bool = False) -> Library:
    """The library of a source: read once a process, and again the files that changed, where `fresh`
    and a folder says that some did, or where one is known to be `rewritten` in place.

    Raises:
      InputError: a source other than the default one does not exist, or cannot be looked into.
    """
    with _lock:
        known = _libraries.get(source)
        if known is not None and not rewritten and not (fresh and known.changed):
            return known
        library = _libraries[source] = _read(source, known)
        for path, (_, what) in library.read.items():
            before = known.read.get(path) if known is not None else None
            if isinstance(what, str) and (before is None or before[1] != what):
                warnings.warn(f"skipped {what}", stacklevel=4)
        return library


def forget(source: str | None = None) -> None:
    """Drops what was read, so that the next lookup reads its results anew."""
    with _lock:
        if source is None:
            _libraries.clear()
        else:
            _libraries.pop(source, None)


def _read(source: str, before: Library | None) -> Library:
    """Lists first and reads then, so that what is written meanwhile has another stamp."""
    read: dict[str, tuple[Stamp, Stored | str | None]] = {}
    listed = sources.listed(source)
    for file in listed.files:
        path = str(file)
        stamp = _stamp(path) if isinstance(file, Path) else None
        known = before.read.get(path) if before is not None else None
        same = known is not None and stamp is not None and known[0] == stamp
        read[path] = known if known and same else (stamp, _what(file, stamp))
    read |= {str(error): (None, str(error)) for error in listed.unreadable}
    stored = sorted((s for _, s in read.values() if isinstance(s, Stored)), key=_preference)
    shelves: dict[tuple[str, str, str], list[Stored]] = {}
    axes: dict[str, set[str]] = {}
    for each in stored:
        axes.setdefault(each.row.kernel, set()).update(each.shape)
        shelves.setdefault((each.row.kernel, each.row.device, each.dtype), []).append(each)
    return Library(
        source=source,
        stored=tuple(stored),
        shelves=shelves,
        axes=axes,
        read=read,
        folders=listed.folders,
        watched={
            path: stamp
            for path, (stamp, what) in read.items()
            if isinstance(what, str) or not listed.folders
        },
    )


def _preference(stored: Stored) -> tuple[int, float, str]:
    made = stored.row.created_at.timestamp() if stored.row.created_at else 0.0
    return -EVIDENCE.index(stored.row.evidence), -made, stored.path


def _what(file: Traversable, stamp: Stamp) -> Stored | str | None:
    """The best row of a file, None where no candidate was ranked, or why it cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        return str(results_folder.unreadable(file, error))
    try:
        return _best_of(file, content, stamp)
    except _UNREADABLE as error:
        return f"{file}: not a readable leaderboard ({first_line(error)})"


def _best_of(file: Traversable, content: bytes, stamp: Stamp) -> Stored | None:
    table = table_of(content, _COLUMNS)
    columns = table.column_names
    if missing := {"problem", "config", *IDENTITY, "is_best"} - set(columns):
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    if not table.num_rows:
        raise ValueError("holds no rows")
    marks = table.column("is_best").to_pylist()
    ranks = table.column("rank").to_pylist() if "rank" in columns else [None] * len(marks)
    identities = {name: table.column(name).unique().to_pylist() for name in IDENTITY}
    stem = Path(file.name).stem
    if fault := contradiction(stem, identities, zip(ranks, marks, strict=True)):
        raise ValueError(f"contradicts itself: {fault}")
    if True not in marks:
        return None
    (record,) = records(table.slice(marks.index(True), 1))
    row = checked(Row(**record))
    stated = statement_of(row)
    return Stored(
        row=row,
        shape=stated.shape,
        options=stated.options,
        dtype=stated.dtype,
        config=json.loads(row.config),
        path=str(file),
        stamp=stamp,
    )


def _changed_ns(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return None


def _stamp(path: str) -> Stamp:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
    return None
