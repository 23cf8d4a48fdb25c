"""Leaderboards: one Parquet file a problem, one row a candidate. No jax import.

Written by temporary file, fsync and rename under a lock, so that a killed or a second sweep loses
nothing.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from filelock import FileLock

from autotune import board_file, results_folder
from autotune.board_file import SCHEMA_VERSION, Board, read
from autotune.errors import DamagedFileError, InputError
from autotune.row import EVIDENCE, IDENTITY, STATUSES, Row

__all__ = [
    "Board", "boards", "check_mergeable", "check_writable", "merge", "named", "path_of", "ranked",
    "read", "strength",
]  # fmt: skip

_TIMERS = ("replay", "host_clock", "device_profile")


def path_of(results: Path, device: str, kernel: str, problem_key: str) -> Path:
    """`results/<device>/<kernel>/<problem key>.parquet`."""
    return results / device / kernel.replace(":", ".") / f"{problem_key}.parquet"


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Rows with `latency_ms`, `rank` and `is_best` filled in, best first, unranked ones last.

    Only `ok` rows of the strongest evidence any of them has are ranked: ranks never mix kinds of
    evidence, nor times of a device with those of a host's clock or a recording. Ties go to the
    config that leaves more to the kernel (nulls), then to the smaller text, so that equal inputs
    give equal boards.
    """
    rows = [replace(r, latency_ms=_latency_ms(r), rank=None, is_best=False) for r in rows]
    usable = [r for r in rows if r.status == "ok" and r.latency_ms is not None]
    strongest = max(map(strength, usable), default=None)
    contest = sorted(
        (r for r in usable if strength(r) == strongest),
        key=lambda r: (r.latency_ms, r.config.count("null") * -1, r.config),
    )
    taken = {id(r) for r in contest}
    rest = sorted(
        (r for r in rows if id(r) not in taken),
        key=lambda r: (STATUSES.index(r.status), r.latency_ms or float("inf"), r.config),
    )
    return [
        replace(r, rank=place, is_best=place == 1) for place, r in enumerate(contest, start=1)
    ] + rest


def merge(
    path: Path,
    rows: Sequence[Row],
    *,
    flop_convention: str,
    replace_stored: bool = False,
    best: str | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Board:
    """Writes `rows` into the board at `path` and returns the whole board, ranked.

    A board accumulates: stored rows made in the same way stay, the one with the stronger evidence
    where both have the config. Rows made with other versions, flags or sources are dropped, since a
    rank over both would compare unlike things; but a sweep that went no further than the model
    never costs a board its stronger evidence: then the file stays and only `rows` come back.
    A row that says what the stored one says leaves that as it is, and a board of such rows leaves
    the file untouched. Columns of others stay beside the rows that stay.
    A damaged file is kept aside, and `warn` is told so; one of another problem's rows too.

    Args:
      best: the config that must come out best, where one must.

    Raises:
      InputError: the directory cannot be written, the file there cannot be opened, or a newer
        release wrote it; or another config than `best` would be the best. Nothing is written then.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.stem}.lock")):
            stored = None if replace_stored else _stored(path, rows[0], warn)
            new = Board(
                path=path, rows=tuple(ranked(rows)), flop_convention=flop_convention or None
            )
            comparable = stored is None or stored.rows[0].made_with == rows[0].made_with
            untried = all(r.evidence == "model" and r.status in ("ok", "pruned") for r in rows)
            if stored and not comparable and untried and stored.strength > new.strength:
                return new
            board = new
            if stored and comparable:
                board = replace(new, rows=tuple(ranked(_merged(stored.rows, rows))))
                board = replace(board, others=_others(stored, board.rows))
            if best is not None and board.best is not None and board.best.config != best:
                raise InputError(
                    f"{path}: {board.best.config} would be the best, not {best}; "
                    "`autotune sweep` ranks anew"
                )
            if stored != board:
                board_file.write(board)
    except OSError as error:
        raise InputError(f"results directory {path.parent} cannot be written: {error}") from None
    return board


def check_writable(results: Path) -> None:
    """Raises InputError where `results` cannot be made or written, before any work is spent."""
    there = next(p for p in (results, *results.absolute().parents) if os.path.lexists(p))
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "may not be written to" if there.is_dir() else "is not a directory"
        raise InputError(f"results directory {results} cannot be written: {there} {what}")


def boards(results: Path) -> Iterator[Board | InputError]:
    """Every leaderboard under `results` (a directory or one file), in path order.

    What cannot be read, a file or a folder, is yielded as its error, so that one does not hide the
    others.

    Raises:
      InputError: `results` does not exist, or cannot be looked into itself.
    """
    if not os.path.lexists(results):
        raise InputError(f"no results at {results}; `autotune sweep CONFIG` makes them")
    files = [results]
    if not results.is_file():
        found = results_folder.below(results)
        if not found.folders:
            raise found.unreadable[0]
        yield from found.unreadable
        files = found.files
    for path in files:
        try:
            yield read(path)
        except InputError as error:
            yield error


def named(found: Iterable[Board], text: str) -> list[Board]:
    """The boards that `--problem TEXT` asks for: those whose name or key it is; where it is
    nobody's, those whose name, kernel or key has it."""
    found = list(found)
    exact = [b for b in found if text in (b.rows[0].problem_name, b.rows[0].problem_key)]
    return exact or [
        b
        for b in found
        if any(
            text in (field or "")
            for field in (b.rows[0].problem_name, b.rows[0].kernel, b.rows[0].problem_key)
        )
    ]


def strength(row: Row) -> tuple[int, int]:
    """Of a row's evidence, and of its timer where measured; the device's own is strongest."""
    timer = _TIMERS.index(row.timer) if row.timer in _TIMERS else -1
    return EVIDENCE.index(row.evidence), timer if row.evidence == "measured" else -1


def _latency_ms(row: Row) -> float | None:
    return row.latency_ms_of(row.evidence) if row.status == "ok" else None


def _merged(stored: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    name = new[0].problem_name  # the latest name is the board's
    kept = {r.config: replace(r, problem_name=name) for r in stored}
    for row in new:
        old = kept.get(row.config)
        if old is None or (strength(row) >= strength(old) and _said(row) != _said(old)):
            kept[row.config] = row
    return list(kept.values())


def _said(row: Row) -> Row:
    """What a row says of its candidate, whenever and however fast it was found out."""
    return replace(
        row, created_at=None, compile_seconds=None, latency_ms=None, rank=None, is_best=False
    )


def _others(stored: Board, rows: Iterable[Row]) -> pa.Table | None:
    """The columns of others, with nulls beside the rows that are new."""
    if stored.others is None:
        return None
    said = {r.config: (place, _said(r)) for place, r in enumerate(stored.rows)}
    places = []
    for row in rows:
        place, before = said.get(row.config, (None, None))
        same = before and _said(replace(row, problem_name=before.problem_name)) == before
        places.append(place if same else None)
    return stored.others.take(pa.array(places, type=pa.int64()))


def _stored(path: Path, new: Row, warn: Callable[[str], None]) -> Board | None:
    """The board already at `path`; None for none, or for a damaged one, which is now aside, as is
    one of another problem than that of `new`.

    Raises InputError for one that cannot be opened, or that only a newer release may write.
    """
    if not path.exists():
        return None
    try:
        board = read(path)
        for name in IDENTITY:
            there, here = getattr(board.rows[0], name), getattr(new, name)
            if there != here:
                raise DamagedFileError(f"{path}: holds rows of the {name} {there}, not {here}")
    except DamagedFileError as error:
        aside = _free_name(path)
        path.replace(aside)
        warn(f"{error}; kept as {aside.name}, written anew")
        return None
    _check_not_newer(board)
    return board


def _check_not_newer(board: Board) -> None:
    if board.schema_version > SCHEMA_VERSION:
        raise InputError(
            f"{board.path}: a newer release of autotune wrote it (schema {board.schema_version}, "
            f"here {SCHEMA_VERSION}); sweep with that one, or give other --results"
        )


def check_mergeable(path: Path) -> None:
    """Raises InputError where `merge` would refuse what is at `path`, before any work is spent."""
    try:
        if path.exists():
            _check_not_newer(read(path))
    except DamagedFileError:
        return  # set aside when the time comes


def _free_name(path: Path) -> Path:
    """Where a damaged file can be kept, beside those that were set aside before it."""
    names = (f".{path.name}.damaged{f'.{n}' if n else ''}" for n in itertools.count())
    return next(p for p in map(path.with_name, names) if not os.path.lexists(p))
