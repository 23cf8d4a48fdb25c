"""One leaderboard as a Parquet file. No jax import.

The schema is always explicit, so that a column of nulls keeps its type.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from autotune import results_folder, whole_file
from autotune.errors import DamagedFileError, InputError
from autotune.row import EVIDENCE, IDENTITY, SCHEMA, STATUSES, Row, checked, contradiction

SCHEMA_VERSION = 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_VERSION, _CONVENTION = b"autotune_schema", b"flop_convention"
_COMPACT: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 15,  # 10 % under the default's size; 19 takes four times as long for 0.5 %
    "use_dictionary": False,  # zstd finds what repeats; a dictionary page a column only adds to it
    "write_statistics": False,
    "store_schema": False,  # a second schema, Arrow's; Parquet's own says all types of a row
    "write_page_checksum": True,  # zstd notices few flipped bits, and what is plain none
}
"""A board has few rows and many columns, so as it comes a Parquet file of one is half footer:
41 rows take 8.6 kB this way, and 21 kB by pyarrow's defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The leaderboard of one problem, best first; it has at least one row.

    Attributes:
      flop_convention: what `flops` counts.
      others: columns that are none of a row's, as they were found in the file; in its order.
    """

    path: Path
    rows: tuple[Row, ...]
    flop_convention: str | None = None
    others: pa.Table | None = field(default=None, repr=False, compare=False)
    schema_version: int = field(default=SCHEMA_VERSION, compare=False)

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


def read(path: Path) -> Board:
    """The leaderboard in one file.

    Raises:
      DamagedFileError: what is in the file is no leaderboard, or one that contradicts itself.
      InputError: the file cannot be opened, or is of a schema that only a newer release reads.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise results_folder.unreadable(path, error) from None
    try:
        table = table_of(content)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedFileError(
            f"{path}: not a readable leaderboard ({first_line(error)})", file=path
        ) from None
    try:
        return _board(path, table)
    except (ValueError, TypeError, OverflowError, KeyError, pa.ArrowException) as error:
        fault = f"{path}: not a leaderboard ({first_line(error)})"
        if _schema_version(table) > SCHEMA_VERSION:
            newer = f"{fault}, to this release; a newer one wrote it"
            raise InputError(newer, file=path) from None
        raise DamagedFileError(fault, file=path) from None


def table_of(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """A leaderboard's table, or those of `columns` that it has.

    Raises OSError, ValueError and pa.ArrowException for what is no Parquet file.
    """
    source = pa.BufferReader(content)
    # As a dataset, one so small takes thrice the time.
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        if columns is not None:
            present = set(file.schema_arrow.names)
            columns = [name for name in columns if name in present]
        return file.read(columns=columns, use_threads=False)


def _board(path: Path, table: pa.Table) -> Board:
    """Raises ValueError, KeyError and their like for what is no leaderboard's."""
    names = table.column_names
    if missing := {"problem_key", "kernel", "device", "config", "status"} - set(names):
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"has the column {twice[0]} more than once")
    if not table.num_rows:
        raise ValueError("holds no rows")
    known = [name for name in SCHEMA.names if name in names]
    more = [name for name in names if name not in known]
    for name, lost in itertools.product(more, set(SCHEMA.names) - set(known)):
        # No checksum covers names. What is one bit away from a lost one was that one.
        if len(name) == len(lost) and sum(a != b for a, b in zip(name, lost, strict=True)) == 1:
            raise ValueError(f"lacks {lost}, and has {name!r}")
    rows = tuple(checked(Row(**record)) for record in records(table.select(known)))
    identities = {name: {getattr(row, name) for row in rows} for name in IDENTITY}
    if fault := contradiction(path.stem, identities, ((r.rank, r.is_best) for r in rows)):
        raise ValueError(f"contradicts itself: {fault}")
    convention = (table.schema.metadata or {}).get(_CONVENTION)
    return Board(
        path=path,
        rows=rows,
        flop_convention=convention.decode() if convention else None,
        others=table.select(more) if more else None,
        schema_version=_schema_version(table),
    )


def records(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table whose columns are some of `SCHEMA`'s, in the types of that.

    Raises OverflowError and pa.ArrowException for values that are not of its type.
    """
    schema = pa.schema([SCHEMA.field(name) for name in table.column_names])
    if not table.schema.equals(schema):  # for a file of its own form it is work for nothing
        table = table.cast(schema)
    if "created_at" not in table.column_names:
        return table.to_pylist()  # type: ignore[no-any-return]
    place = table.column_names.index("created_at")
    # As a number: to make a time of Python's, pyarrow imports all of pandas.
    counts = table.column(place).cast(pa.int64())
    found: list[dict[str, Any]] = table.set_column(place, "created_at", counts).to_pylist()
    for record in found:
        if (count := record["created_at"]) is not None:
            record["created_at"] = _EPOCH + timedelta(microseconds=count)
    return found


def _schema_version(table: pa.Table) -> int:
    told = (table.schema.metadata or {}).get(_VERSION, b"")
    return int(told) if told.isdigit() else 0


def write(board: Board) -> None:
    """Replaces the file at `board.path`. Raises OSError."""
    table = pa.table({n: [getattr(r, n) for r in board.rows] for n in SCHEMA.names}, schema=SCHEMA)
    if board.others is not None:
        for named, column in zip(board.others.schema, board.others.columns, strict=True):
            table = table.append_column(named, column)
    content = io.BytesIO()
    with pq.ParquetWriter(content, table.schema, **_COMPACT) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(
            {_VERSION: str(SCHEMA_VERSION), _CONVENTION: board.flop_convention or ""}
        )
    whole_file.write(board.path, content.getvalue())


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
