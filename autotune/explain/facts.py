"""What is known of one candidate, as plain values for the terminal, JSON and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class VmemLine:
    """One kind of allocation of a call: the model's bytes beside the compiler's.

    `model_bytes` is None for what only the compiler knows (register spills, its own scratch),
    `compiled_bytes` where nothing was compiled or the compiler did without; `without` says why, if
    that is known.
    """

    call: str
    allocation: str
    model_bytes: int | None
    compiled_bytes: int | None
    without: str | None = None


def without(lines: Sequence[VmemLine]) -> list[str]:
    """A sentence a call and reason for which allocations have no bytes of the compiler's."""
    named: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.without:
            named.setdefault((line.call, line.without), []).append(line.allocation)
    return [f"{call}: {', '.join(names)}: {why}" for (call, why), names in named.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeLine:
    """One named scope of a call.

    Attributes:
      executions: over the whole grid; None where only run-time data can tell.
      bundles, cycles_once: of one run; None without the compiler.
      share: of the cycles of the whole program, 0 to 1.
      mxu_share: cycles that the matrix units need for the scope's rows / its cycles.
      units: unit -> slots that the compiler's own table has filled / (capacity · cycles), 0 to 1.
    """

    call: str
    scope: str
    executions: int | None
    bundles: int | None = None
    cycles_once: float | None = None
    share: float | None = None
    mxu_share: float | None = None
    spill_loads: int | None = None
    spill_stores: int | None = None
    units: dict[str, float] | None = None


SHARES = (
    "MXU: cycles that the matrix units need for the rows / cycles. Units: slots filled / slots, as "
    "the compiler counts them, fewer of the MXU than its rows need "
    "(docs/vmem-and-latency-model.md)"
)
"""What two columns of a table of scopes count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Where the candidate stands under its device's roofline.

    Attributes:
      intensity: executed FLOPs per byte of HBM traffic; None without traffic.
      ridge: FLOPs per byte from which the chip's peak is the limit, not its memory.
      attainable_tflops: min(peak, intensity · bandwidth), in 10^12 per second.
      executed_tflops: what the prediction reaches, in executed FLOPs.
    """

    executed_flops: int
    hbm_bytes: int
    intensity: float | None
    ridge: float
    peak_tflops: float
    attainable_tflops: float
    executed_tflops: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One bar of the timeline strip: microseconds since the strip's own start."""

    call: str
    part: str
    lane: str
    label: str
    start_us: float
    duration_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """The same candidate with the next larger or smaller value of one tunable.

    `change` is its latency over the candidate's, less 1, by the same evidence.
    """

    tunable: str
    value: int | float | str | bool | None
    direction: str
    status: str
    reason: str | None
    evidence: str
    latency_ms: float | None
    change: float | None
    vmem_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A share of the predicted time: what it is spent on, as if nothing overlapped."""

    name: str
    time_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """All of it. `limits` says in one sentence what holds the candidate back, `config_origin` where
    the config comes from: the stored best, the kernel's default and why, or as given."""

    problem: str
    kernel: str
    device: str
    shape: dict[str, int]
    options: dict[str, Any]
    dtype: str
    config: dict[str, Any]
    config_origin: str
    status: str
    reason: str | None
    evidence: str
    latency_ms: float | None
    latency_low_ms: float | None
    latency_high_ms: float | None
    latency_model_ms: float | None
    latency_compiled_ms: float | None
    mfu: float | None
    effective_tflops: float | None
    flops: int
    flop_convention: str
    limits: str
    parts: tuple[Part, ...]
    vmem_limit_bytes: int | None
    vmem: tuple[VmemLine, ...]
    roofline: Roofline | None
    scopes: tuple[ScopeLine, ...]
    scopes_split: tuple[str, ...]
    timeline: tuple[Segment, ...]
    neighbours: tuple[Neighbour, ...]
    mask: dict[str, Any] | None
    notes: tuple[str, ...]


def to_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain JSON values."""
    return asdict(explanation)
