"""Where stored best configs are found: a directory, an environment variable, a package's data."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from autotune.errors import InputError
from autotune.row import EVIDENCE, SCHEMA, Row, checked
from autotune.stored import statement_of

VARIABLE = "AUTOTUNE_RESULTS"
PACKAGE = "package:"
DEFAULT = "results"
_COLUMNS = (
    "problem_key", "problem_name", "kernel", "device", "problem", "config", "status", "evidence",
    "is_best", "rank", "latency_ms", "timer", "mfu", "jax_version", "libtpu_version",
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
      stamp: modification time and size of the file when read; None for one inside an archive.
    """

    row: Row
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    dtype: str
    config: Mapping[str, Any]
    path: str
    stamp: tuple[int, int] | None

    @property
    def unchanged(self) -> bool:
        """Whether the file is still the one that was read."""
        return self.stamp is None or _stamp(Path(self.path)) == self.stamp


@dataclass(kw_only=True, slots=True)
class Library:
    """The best rows under one source.

    Attributes:
      stored: strongest evidence first, then the newest.
      damaged: one sentence a file that could not be read.
      answers: what was asked before, with what was found.
    """

    source: str
    stored: tuple[Stored, ...]
    damaged: tuple[str, ...] = ()
    files: frozenset[tuple[str, tuple[int, int] | None]] = frozenset()
    answers: dict[Any, Any] = field(default_factory=dict)


_lock = threading.RLock()
_libraries: dict[str, Library] = {}


def source_of(results: str | Path | None) -> str:
    """`results`, else $AUTOTUNE_RESULTS, else `results` in the current directory."""
    if results is not None:
        return os.fspath(results)
    return os.environ.get(VARIABLE) or DEFAULT


def opened(source: str, *, fresh: bool = False) -> Library:
    """The library of a source: read once a process, and again when `fresh` and files changed.

    Raises:
      InputError: a source other than the default one does not exist.
    """
    with _lock:
        known = _libraries.get(source)
        if known is not None and not (fresh and _listed(source) != known.files):
            return known
        library = _read(source)
        for sentence in library.damaged:
            warnings.warn(sentence, stacklevel=5)
        _libraries[source] = library
        return library


def forget() -> None:
    """Drops what was read, so that the next lookup reads its results anew."""
    with _lock:
        _libraries.clear()


def _read(source: str) -> Library:
    stored: list[Stored] = []
    damaged: list[str] = []
    for file in _files(source):
        try:
            best = _best_of(file)
        except _UNREADABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            damaged.append(f"skipped {file}: not a readable leaderboard ({reason})")
            continue
        if best is not None:
            stored.append(best)
    stored.sort(key=_preference)
    return Library(
        source=source, stored=tuple(stored), damaged=tuple(damaged), files=_listed(source)
    )


def _preference(stored: Stored) -> tuple[int, float, str]:
    made = stored.row.created_at.timestamp() if stored.row.created_at else 0.0
    return -EVIDENCE.index(stored.row.evidence), -made, stored.path


def _best_of(file: Traversable) -> Stored | None:
    """The best row of a file; None where no candidate was ranked."""
    with resources.as_file(file) as path:
        stamp = _stamp(path) if isinstance(file, Path) else None
        with pq.ParquetFile(path) as opened_file:
            present = set(opened_file.schema_arrow.names)
            if missing := {"problem", "config", "kernel", "device", "is_best"} - present:
                raise ValueError(f"lacks {', '.join(sorted(missing))}")
            columns = [name for name in _COLUMNS if name in present]
            table = opened_file.read(columns=columns, use_threads=False)
    marks = table.column("is_best").to_pylist()
    if True not in marks:
        return None
    best = table.select(columns).slice(marks.index(True), 1)
    (record,) = best.cast(pa.schema([SCHEMA.field(n) for n in columns])).to_pylist()
    row = checked(Row(**record))
    stated = statement_of(row)
    if row.status != "ok":
        return None
    return Stored(
        row=row,
        shape=stated.shape,
        options=stated.options,
        dtype=stated.dtype,
        config=json.loads(row.config),
        path=str(file),
        stamp=stamp,
    )


def _listed(source: str) -> frozenset[tuple[str, tuple[int, int] | None]]:
    return frozenset((str(f), _stamp(f) if isinstance(f, Path) else None) for f in _files(source))


def _files(source: str) -> list[Traversable]:
    """Every leaderboard file of a source, in path order."""
    if source.startswith(PACKAGE):
        return sorted(_walk(_package_data(source.removeprefix(PACKAGE))), key=str)
    root = Path(source)
    if not root.exists():
        if source == DEFAULT:
            return []
        raise InputError(
            f"results {source!r} do not exist; a directory of leaderboards, or "
            f"{PACKAGE}your_package.folder"
        )
    return [root] if root.is_file() else sorted(_walk(root), key=str)


def _walk(folder: Traversable) -> Iterator[Traversable]:
    for entry in folder.iterdir():
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _walk(entry)
        elif entry.name.endswith(".parquet"):
            yield entry


def _package_data(name: str) -> Traversable:
    """The folder of a package, or of a plain folder inside one. Imports the package."""
    try:
        return resources.files(importlib.import_module(name))
    except (ImportError, TypeError, ValueError) as error:
        raise InputError(
            f"results {PACKAGE + name!r}: {error}; {PACKAGE}your_package.folder names a folder of "
            "an importable package"
        ) from None


def _stamp(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return None
