"""A leaderboard's row: one candidate's record, and its Parquet columns. No jax import."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NoReturn

import pyarrow as pa

from autotune.errors import printable

STATUSES = ("ok", "pruned", "oom", "unsupported", "failed", "timeout", "crashed", "wrong")
EVIDENCE = ("model", "compiled", "measured")
"""Kinds of evidence, weakest first."""

_TEXT, _FLAG, _LONG, _REAL = pa.string(), pa.bool_(), pa.int64(), pa.float64()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One candidate's record; columns as in the design, null where not known.

    `method_fingerprint` stands for what turned evidence into numbers: the models, the parser of the
    compiler's dumps, and the user's compiler flags. `latency_low_ms` to `latency_high_ms` is the
    band of `latency_ms`. `vmem` is JSON: allocation -> bytes, the compiler's where it compiled.
    `measurement` is JSON: what the samples span, error and tolerance of the check before them, the
    seed of the inputs (`measure.record.Measured.details`).
    """

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
    latency_low_ms: float | None = None
    latency_high_ms: float | None = None
    latency_model_ms: float | None = None
    latency_compiled_ms: float | None = None
    latency_measured_ms: float | None = None
    samples_ms: list[float] | None = None
    timer: str | None = None
    measurement: str | None = None
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
    vmem: str | None = None
    compile_seconds: float | None = None
    jax_version: str | None = None
    libtpu_version: str | None = None
    autotune_version: str | None = None
    kernel_fingerprint: str | None = None
    method_fingerprint: str | None = None
    created_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(STATUSES)}")
        if self.evidence not in EVIDENCE:
            raise ValueError(f"evidence {self.evidence!r} is not one of {', '.join(EVIDENCE)}")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a row of status {self.status!r} needs a reason")
        # They stand in comments of code, in tables and on terminals.
        for field in ("problem_name", "reason"):
            text = getattr(self, field)
            if text is not None and not text.isprintable():
                object.__setattr__(self, field, printable(text))

    def latency_ms_of(self, evidence: str) -> float | None:
        """The latency that `evidence` (`model`, `compiled`, `measured`) gave; None where none."""
        return {
            "model": self.latency_model_ms,
            "compiled": self.latency_compiled_ms,
            "measured": self.latency_measured_ms,
        }[evidence]

    @property
    def made_with(self) -> tuple[str | None, ...]:
        """What a row must share with another to be ranked beside it."""
        return (
            self.jax_version,
            self.libtpu_version,
            self.kernel_fingerprint,
            self.method_fingerprint,
        )


def indistinguishable(one: Row, other: Row) -> bool:
    """Whether two rows of one problem cannot be told apart: one's latency lies within the other's
    band. False where a row has no band, or they rest on different evidence."""
    if one.evidence != other.evidence:
        return False
    return _within(one, other) or _within(other, one)


def _within(row: Row, other: Row) -> bool:
    low, high, latency = other.latency_low_ms, other.latency_high_ms, row.latency_ms
    if low is None or high is None or latency is None:
        return False
    return low <= latency <= high


def checked(row: Row) -> Row:
    """`row` as it was read, or ValueError for what no sweep writes and no reader could use."""
    for name in ("problem_key", "kernel", "device", "problem", "config"):
        if not getattr(row, name):
            raise ValueError(f"a row lacks {name}")
    for name in _PRINTED:
        text = getattr(row, name)
        if text is not None and not text.isprintable():
            raise ValueError(f"{name} is not one line of text: {text!r:.60}")
    _check_problem(row.problem)
    for name, value in _object(row.config, "config").items():
        if isinstance(value, dict | list):
            raise ValueError(f"config has no plain value at {name}")
    for scope in _object(row.scopes, "scopes").values():
        if not isinstance(scope, dict):
            raise ValueError("scopes is not an object of objects")
        for name in _COUNTS:
            count = scope.get(name)
            if count is not None and type(count) not in (int, float):
                raise ValueError(f"scopes has {name} = {str(count)[:40]}")
    if not all(type(size) is int and size >= 0 for size in _object(row.vmem, "vmem").values()):
        raise ValueError("vmem is not an object of bytes")
    _object(row.measurement, "measurement")
    _check_numbers(row)
    return row


IDENTITY = ("problem_key", "kernel", "device")
"""What all rows of a board share."""
# These stand in comments of code and lines of a terminal.
_PRINTED = (*IDENTITY, "timer", "jax_version", "libtpu_version", "autotune_version")
_KEY = re.compile(r".+-[0-9a-f]{12}")


def contradiction(
    stem: str, identities: Mapping[str, Collection[Any]], marks: Iterable[tuple[int | None, bool]]
) -> str | None:
    """What in a board contradicts the rest of it, in a few words; None where nothing does.

    Args:
      stem: of the file's name. A problem's key there is that of the rows; any other name is free.
      identities: column of `IDENTITY` -> its distinct values.
      marks: each row's (rank, is_best).
    """
    for name, values in identities.items():
        if len(values) > 1:
            return f"rows of more than one {name}: {', '.join(sorted(map(str, values)))}"
    (key,) = identities["problem_key"]
    if _KEY.fullmatch(stem) and stem != key:
        return f"its rows are of the problem {key}"
    ranked = [mark for mark in marks if mark[0] is not None or mark[1]]
    best = sum(bool(is_best) for _, is_best in ranked)
    first = sum(rank == 1 for rank, _ in ranked)
    if ranked and (best, first) != (1, 1):
        return f"{best} rows are the best, and {first} of rank 1"
    if ranked and (1, True) not in ranked:
        return "the best row is not that of rank 1"
    return None


@functools.lru_cache(maxsize=64)  # every row of a board has the same
def _check_problem(text: str) -> None:
    problem = _object(text, "problem")
    shape, options = problem.get("shape"), problem.get("options") or {}
    if not isinstance(problem.get("dtype", ""), str):
        raise ValueError(f"problem has the dtype {str(problem['dtype'])[:40]}")
    if not isinstance(shape, dict) or not isinstance(options, dict):
        raise ValueError(f"problem has no shape, or odd options: {text[:40]}")
    for axis, size in shape.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"problem has {axis} = {str(size)[:40]}")


def _check_numbers(row: Row) -> None:
    for name in _NUMBERS:
        value = getattr(row, name)
        if value is None:
            continue
        if not 0 <= value < math.inf or (value == 0 and name.startswith("latency")):
            raise ValueError(f"{name} is {value}")
    if not all(time is not None and 0 < time < math.inf for time in row.samples_ms or ()):
        raise ValueError("samples_ms has what is no time")
    if row.mfu is not None and row.mfu > 1:
        raise ValueError(f"mfu is {row.mfu}, more than the device's peak")
    own = row.latency_ms_of(row.evidence)
    if row.latency_ms is not None and own is not None and row.latency_ms != own:
        raise ValueError(f"latency_ms is {row.latency_ms}, latency_{row.evidence}_ms {own}")
    if (row.is_best or row.rank is not None) and (row.status != "ok" or row.latency_ms is None):
        raise ValueError(f"a row of status {row.status} and latency {row.latency_ms} is ranked")


class _NoJson(ValueError):
    """What Python reads in JSON and cannot write as such: NaN, Infinity, 1e400."""


def _refuse(word: str) -> NoReturn:
    raise _NoJson(word)


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits[:40])


# Once: `json.loads` would make one a value.
_JSON = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _object(text: str | None, name: str) -> dict[str, Any]:
    """The JSON object in column `name`; {} for null. NaN and infinities are no JSON."""
    if text is None:
        return {}
    try:
        value = _JSON.decode(text)
    except _NoJson as error:
        raise ValueError(f"{name} has {error} in it") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object: {text[:40]}")
    return value


_COUNTS = ("bundles", "cycles", "executions", "spill_loads", "spill_stores")
"""What a scope counts, each where it is known."""
_TYPES = {
    "is_default": _FLAG,
    "is_best": _FLAG,
    "rank": pa.int32(),
    "samples_ms": pa.list_(_REAL),
    "created_at": pa.timestamp("us", tz="UTC"),
    **dict.fromkeys(
        ("latency_ms", "latency_low_ms", "latency_high_ms", "latency_model_ms",
         "latency_compiled_ms", "latency_measured_ms", "mfu", "effective_tflops",
         "mxu_utilization", "compile_seconds"),
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
_NUMBERS = tuple(
    f.name for f in SCHEMA if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)
)
