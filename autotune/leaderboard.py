"""Leaderboards: one Parquet file a problem, one row a candidate. No jax import.

Written by temporary file, fsync and rename under a lock, so that a killed or a second
sweep loses nothing; the schema is always explicit, so that a column of nulls keeps its type.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from autotune.errors import DamagedFileError, InputError

SCHEMA_VERSION = "1"
STATUSES = ("ok", "pruned", "oom", "unsupported", "failed", "timeout", "crashed", "wrong")
EVIDENCE = ("model", "compiled", "measured")
"""Kinds of evidence, weakest first."""

_TEXT, _FLAG, _LONG, _REAL = pa.string(), pa.bool_(), pa.int64(), pa.float64()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One candidate's record; columns as in the design, null where not known."""

    problem_key: str
    problem_name: str | None = None
    kernel: str
    device: str
    problem: str
    config: str
    status: str
    reason: str | None = None
    evidence: str = "model"
    is_default: bool = False
    is_best: bool = False
    rank: int | None = None
    latency_ms: float | None = None
    latency_model_ms: float | None = None
    latency_compiled_ms: float | None = None
    latency_measured_ms: float | None = None
    samples_ms: list[float] | None = None
    timer: str | None = None
    flops: int | None = None
    executed_flops: int | None = None
    mfu: float | None = None
    effective_tflops: float | None = None
    hbm_bytes: int | None = None
    dma_count: int | None = None
    grid_steps: int | None = None
    vmem_model_bytes: int | None = None
    vmem_compiled_bytes: int | None = None
    vmem_limit_bytes: int | None = None
    cycles: int | None = None
    bundles: int | None = None
    spill_loads: int | None = None
    spill_stores: int | None = None
    mxu_utilization: float | None = None
    scopes: str | None = None
    compile_seconds: float | None = None
    jax_version: str | None = None
    libtpu_version: str | None = None
    autotune_version: str | None = None
    kernel_fingerprint: str | None = None
    created_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(STATUSES)}")
        if self.evidence not in EVIDENCE:
            raise ValueError(f"evidence {self.evidence!r} is not one of {', '.join(EVIDENCE)}")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a row of status {self.status!r} needs a reason")

    @property
    def made_with(self) -> tuple[str | None, ...]:
        """What a row must share with another to be ranked beside it."""
        return (self.jax_version, self.libtpu_version, self.kernel_fingerprint)


_TYPES = {
    "is_default": _FLAG,
    "is_best": _FLAG,
    "rank": pa.int32(),
    "samples_ms": pa.list_(_REAL),
    "created_at": pa.timestamp("us", tz="UTC"),
    **dict.fromkeys(
        ("latency_ms", "latency_model_ms", "latency_compiled_ms", "latency_measured_ms", "mfu",
         "effective_tflops", "mxu_utilization", "compile_seconds"),
        _REAL,
    ),
    **dict.fromkeys(
        ("flops", "executed_flops", "hbm_bytes", "dma_count", "grid_steps", "vmem_model_bytes",
         "vmem_compiled_bytes", "vmem_limit_bytes", "cycles", "bundles", "spill_loads",
         "spill_stores"),
        _LONG,
    ),
}  # fmt: skip
SCHEMA = pa.schema([(f.name, _TYPES.get(f.name, _TEXT)) for f in fields(Row)])


def path_of(results: Path, device: str, kernel: str, problem_key: str) -> Path:
    """`results/<device>/<kernel>/<problem key>.parquet`."""
    return results / device / kernel.replace(":", ".") / f"{problem_key}.parquet"


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Rows with `latency_ms`, `rank` and `is_best` filled in, best first, unranked ones last.

    Only `ok` rows of the strongest evidence any of them has are ranked: ranks never mix kinds
    of evidence. Ties go to the smaller config text, so that equal inputs give equal boards.
    """
    rows = [replace(r, latency_ms=_latency_ms(r), rank=None, is_best=False) for r in rows]
    usable = [r for r in rows if r.status == "ok" and r.latency_ms is not None]
    strongest = max((EVIDENCE.index(r.evidence) for r in usable), default=-1)
    contest = sorted(
        (r for r in usable if EVIDENCE.index(r.evidence) == strongest),
        key=lambda r: (r.latency_ms, r.config),
    )
    taken = {id(r) for r in contest}
    rest = sorted(
        (r for r in rows if id(r) not in taken),
        key=lambda r: (STATUSES.index(r.status), r.latency_ms or float("inf"), r.config),
    )
    return [
        replace(r, rank=place, is_best=place == 1) for place, r in enumerate(contest, start=1)
    ] + rest


def merge(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Writes `rows` into the board at `path` and returns the whole board, ranked.

    A stored row of the same config stays when it was made with the same versions and has
    stronger evidence. Stored rows made with other versions or another kernel source are
    dropped: a rank over both would compare unlike things.

    Raises:
      InputError: the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.stem}.lock")):
            board = ranked(_merged(_stored_or_nothing(path), rows))
            _write(path, board)
    except OSError as error:
        raise InputError(f"results directory {path.parent} cannot be written: {error}") from None
    return board


def read(path: Path) -> list[Row]:
    """The rows of one leaderboard file. Raises DamagedFileError naming it."""
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise DamagedFileError(f"{path}: not a readable leaderboard ({_first_line(error)})") from None
    missing = {"problem_key", "kernel", "device", "config", "status"} - set(table.column_names)
    if missing:
        raise DamagedFileError(f"{path}: not a leaderboard, lacks {', '.join(sorted(missing))}")
    known = [f.name for f in fields(Row) if f.name in table.column_names]
    try:
        cast = table.select(known).cast(pa.schema([SCHEMA.field(n) for n in known]))
        return [Row(**record) for record in cast.to_pylist()]
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DamagedFileError(f"{path}: not a leaderboard ({_first_line(error)})") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The leaderboard of one problem, best first."""

    path: Path
    rows: tuple[Row, ...]

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
        """Status -> rows, in the order of the pipeline; unranked `ok` rows as `not compiled`."""
        statuses = Counter(r.status for r in self.rows)
        waiting = sum(r.status == "ok" and r.rank is None for r in self.rows)
        return {
            "candidates": len(self.rows),
            **{s: statuses[s] for s in STATUSES if statuses[s] and s != "ok"},
            "ranked": statuses["ok"] - waiting,
            **({"ok, weaker evidence": waiting} if waiting else {}),
        }

    @property
    def gain(self) -> float | None:
        """Default latency over best latency, both ranked (so of one kind of evidence)."""
        best, default = self.best, self.default
        if best is None or default is None or default.rank is None:
            return None
        assert default.latency_ms is not None
        assert best.latency_ms is not None
        return default.latency_ms / best.latency_ms


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
            rows = read(path)
        except DamagedFileError as error:
            yield error
            continue
        if rows:
            yield Board(path=path, rows=tuple(rows))


def installed_versions() -> dict[str, str | None]:
    """Versions of jax, libtpu and autotune here, without importing them."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "jax": version("jax"),
        "libtpu": version("libtpu"),
        "autotune": version("pallas-autotune"),
    }


def stale_reason(row: Row) -> str | None:
    """Why a stored row may no longer hold here: another jax or libtpu than it was made with."""
    here = installed_versions()
    changed = [
        f"{package} {made} → {here[package]}"
        for package, made in (("jax", row.jax_version), ("libtpu", row.libtpu_version))
        if made and here[package] and made != here[package]
    ]
    return "stale: " + ", ".join(changed) if changed else None


def _latency_ms(row: Row) -> float | None:
    latency = {
        "model": row.latency_model_ms,
        "compiled": row.latency_compiled_ms,
        "measured": row.latency_measured_ms,
    }[row.evidence]
    return latency if row.status == "ok" else None


def _merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    versions = {r.made_with for r in new}
    kept = {r.config: r for r in old if r.made_with in versions}
    for row in new:
        stored = kept.get(row.config)
        if stored is None or EVIDENCE.index(row.evidence) >= EVIDENCE.index(stored.evidence):
            kept[row.config] = row
    return list(kept.values())


def _stored_or_nothing(path: Path) -> list[Row]:
    try:
        return read(path) if path.exists() else []
    except DamagedFileError:
        path.replace(path.with_name(f".{path.name}.damaged"))  # kept for whoever wants to look
        return []


def _write(path: Path, rows: Sequence[Row]) -> None:
    columns = {f.name: [getattr(r, f.name) for r in rows] for f in fields(Row)}
    table = pa.table(columns, schema=SCHEMA.with_metadata({"autotune_schema": SCHEMA_VERSION}))
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
