"""Leaderboards: one Parquet file a problem, one row a candidate. No jax import.

Written by temporary file, fsync and rename under a lock, so that a killed or a second
sweep loses nothing; the schema is always explicit, so that a column of nulls keeps its type.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from autotune import whole_file
from autotune.errors import DamagedFileError, InputError
from autotune.row import EVIDENCE, SCHEMA, STATUSES, Row, checked

SCHEMA_VERSION = "1"
_CONVENTION = b"flop_convention"
_COMPACT: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 15,  # 10 % under the default's size; 19 takes four times as long for 0.5 %
    "use_dictionary": False,  # zstd finds what repeats; a dictionary page a column only adds to it
    "write_statistics": False,
    "store_schema": False,  # a second schema, Arrow's; Parquet's own says all types of a row
}
"""A board has few rows and many columns, so as it comes a Parquet file of one is half footer:
41 rows take 8.6 kB this way, and 21 kB by pyarrow's defaults."""
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
    strongest = max(map(_strength, usable), default=None)
    contest = sorted(
        (r for r in usable if _strength(r) == strongest),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The leaderboard of one problem, best first; `flop_convention` says what `flops` counts."""

    path: Path
    rows: tuple[Row, ...]
    flop_convention: str | None = None

    @property
    def best(self) -> Row | None:
        return next((r for r in self.rows if r.is_best), None)

    @property
    def default(self) -> Row | None:
        return next((r for r in self.rows if r.is_default), None)

    @property
    def title(self) -> str:
        first = self.rows[0]
        return first.problem_name or f"{first.kernel} {first.problem_key}"

    @property
    def counts(self) -> dict[str, int]:
        """Candidates by how they ended: statuses, `ranked`, and `not_evaluated` for the `ok` rows
        whose evidence is weaker than that of the ranked ones (they were beyond the budget)."""
        statuses = Counter(r.status for r in self.rows)
        ranked_rows = sum(r.rank is not None for r in self.rows)
        waiting = statuses["ok"] - ranked_rows
        ended = {s: statuses[s] for s in STATUSES if statuses[s] and s != "ok"}
        return {
            "candidates": len(self.rows),
            **ended,
            **({"not_evaluated": waiting} if waiting else {}),
            "ranked": ranked_rows,
        }

    @property
    def gain(self) -> float | None:
        """Default latency over best latency, both ranked (so of one kind of evidence)."""
        best, default = self.best, self.default
        if best is None or default is None or not default.rank:
            return None
        return (default.latency_ms or 0.0) / (best.latency_ms or 1.0)

    @property
    def strength(self) -> int:
        """Index in `EVIDENCE` of the strongest evidence an `ok` row has; -1 for none."""
        return max((EVIDENCE.index(r.evidence) for r in self.rows if r.status == "ok"), default=-1)


def merge(
    path: Path,
    rows: Sequence[Row],
    *,
    flop_convention: str,
    replace_stored: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> Board:
    """Writes `rows` into the board at `path` and returns the whole board, ranked.

    A board accumulates: stored rows made in the same way stay, the one with the stronger evidence
    where both have the config. Rows made with other versions, flags or sources are dropped, since a
    rank over both would compare unlike things; but a sweep that went no further than the model
    never costs a board its stronger evidence: then the file stays and only `rows` come back.
    A damaged file is kept aside, and `warn` is told so.

    Raises:
      InputError: the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.stem}.lock")):
            stored = None if replace_stored else _stored(path, warn)
            new = Board(path=path, rows=tuple(ranked(rows)), flop_convention=flop_convention)
            comparable = stored is None or stored.rows[0].made_with == rows[0].made_with
            untried = all(r.evidence == "model" and r.status in ("ok", "pruned") for r in rows)
            if stored and not comparable and untried and stored.strength > new.strength:
                return new
            merged = ranked(_merged(stored.rows if stored and comparable else (), rows))
            board = replace(new, rows=tuple(merged))
            _write(board)
    except OSError as error:
        raise InputError(f"results directory {path.parent} cannot be written: {error}") from None
    return board


def check_writable(results: Path) -> None:
    """Raises InputError where `results` cannot be made or written, before any work is spent."""
    there = next(p for p in (results, *results.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "may not be written to" if there.is_dir() else "is not a directory"
        raise InputError(f"results directory {results} cannot be written: {there} {what}")


def read(path: Path) -> Board:
    """The leaderboard in one file. Raises DamagedFileError naming the file."""
    try:
        with pq.ParquetFile(path) as file:  # as a dataset, one so small takes thrice the time
            table = file.read(use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DamagedFileError(
            f"{path}: not a readable leaderboard ({_first_line(error)})"
        ) from None
    missing = {"problem_key", "kernel", "device", "config", "status"} - set(table.column_names)
    if missing:
        raise DamagedFileError(f"{path}: not a leaderboard, lacks {', '.join(sorted(missing))}")
    known = [f.name for f in fields(Row) if f.name in table.column_names]
    convention = (table.schema.metadata or {}).get(_CONVENTION)
    try:
        cast = table.select(known).cast(pa.schema([SCHEMA.field(n) for n in known]))
        return Board(
            path=path,
            rows=tuple(checked(Row(**record)) for record in cast.to_pylist()),
            flop_convention=convention.decode() if convention else None,
        )
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise DamagedFileError(f"{path}: not a leaderboard ({_first_line(error)})") from None


def boards(results: Path) -> Iterator[Board | DamagedFileError]:
    """Every leaderboard under `results` (a directory or one file), in path order.

    A damaged file is yielded as its error, so that one does not hide the others.

    Raises:
      InputError: `results` does not exist.
    """
    if not results.exists():
        raise InputError(f"no results at {results}; `autotune sweep CONFIG` makes them")
    paths = [results] if results.is_file() else sorted(results.glob("**/*.parquet"))
    for path in paths:
        if path.name.startswith((".", "_")):
            continue
        try:
            board = read(path)
        except DamagedFileError as error:
            yield error
            continue
        if board.rows:
            yield board


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


def _strength(row: Row) -> tuple[int, int]:
    """Of a row's evidence, and of its timer where measured; the device's own is strongest."""
    timer = _TIMERS.index(row.timer) if row.timer in _TIMERS else -1
    return EVIDENCE.index(row.evidence), timer if row.evidence == "measured" else -1


def _latency_ms(row: Row) -> float | None:
    latency = {
        "model": row.latency_model_ms,
        "compiled": row.latency_compiled_ms,
        "measured": row.latency_measured_ms,
    }[row.evidence]
    return latency if row.status == "ok" else None


def _merged(stored: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    name = new[0].problem_name  # the latest name is the board's
    kept = {r.config: replace(r, problem_name=name) for r in stored}
    for row in new:
        old = kept.get(row.config)
        if old is None or _strength(row) >= _strength(old):
            kept[row.config] = row
    return list(kept.values())


def _stored(path: Path, warn: Callable[[str], None]) -> Board | None:
    """The board already at `path`; None for none, an empty one, or a damaged one, now aside."""
    try:
        board = read(path) if path.exists() else None
    except DamagedFileError as error:
        aside = path.with_name(f".{path.name}.damaged")
        path.replace(aside)
        warn(f"{error}; kept as {aside.name}, written anew")
        return None
    return board if board is not None and board.rows else None


def _write(board: Board) -> None:
    columns = {f.name: [getattr(r, f.name) for r in board.rows] for f in fields(Row)}
    about = {b"autotune_schema": SCHEMA_VERSION, _CONVENTION: board.flop_convention or ""}
    content = io.BytesIO()
    with pq.ParquetWriter(content, SCHEMA, **_COMPACT) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
        writer.add_key_value_metadata(about)
    whole_file.write(board.path, content.getvalue())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
