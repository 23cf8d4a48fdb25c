"""Predicted time: roofline plus a fixed overhead per grid step; or a compiled schedule instead.

Pure arithmetic on a traced call, a schedule and a device; no jax import. Formulas, constants and
how well they predict silicon: docs/vmem-and-latency-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.device import Device
from autotune.errors import KernelError
from autotune.vmem_model import (
    Allocation,
    VmemBill,
    rejection,
    vmem_bill,
    vmem_limit_bytes,
)

if TYPE_CHECKING:
    from autotune.call_record import Dot, PallasCall, Program, StepClass, Window
    from autotune.evidence import Schedule, ScopeUse

__all__ = [
    "PIPELINE",
    "Allocation",
    "Latency",
    "VmemBill",
    "compiled_latency",
    "effective_tflops",
    "flop_seconds",
    "matched",
    "mfu",
    "model_latency",
    "mxu_limit_cycles",
    "mxu_utilization",
    "rejection",
    "run_cycles",
    "scope_cycles",
    "skipped",
    "suspect_reason",
    "vmem_bill",
    "vmem_limit_bytes",
]  # fmt: skip

PIPELINE = ""  # the scope of code outside any named scope
INNER_PIPELINE = "ep_"  # what the scopes of `pltpu.emit_pipeline`'s own code begin with


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """A predicted time, in seconds, on one JAX device.

    Attributes:
      total_s: what is predicted: per step the longer of compute and transfer, plus overhead,
        plus the first copy in and the last copy out.
      compute_s, transfer_s: all compute, and all HBM traffic, as if nothing else took time.
      overhead_s: the fixed cost of all grid steps.
      cycles: cycles of a TensorCore for the whole problem; None without a schedule.
      assumed: scopes whose executions the trace cannot tell (run-time data): every step is
        assumed to run them.
    """

    total_s: float
    compute_s: float
    transfer_s: float
    overhead_s: float
    cycles: int | None = None
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts = (self.total_s, self.compute_s, self.transfer_s, self.overhead_s)
        if not all(math.isfinite(part) and part >= 0 for part in parts):
            raise ValueError(f"a latency is finite and not negative: {parts}")

    @property
    def bound(self) -> str:
        """`compute`, `memory` or `overhead`: the largest of the three parts."""
        parts = {
            "compute": self.compute_s, "memory": self.transfer_s, "overhead": self.overhead_s,
        }  # fmt: skip
        return max(parts, key=lambda part: parts[part])


def model_latency(
    program: Program, device: Device, *, scope_counts: Mapping[str, int] | None = None
) -> Latency:
    """Roofline plus step overhead, from the traced calls alone.

    A step costs the longer of its copies and of FLOPs / peak + overhead; one that runs no scope
    has `skip_overhead_s` instead of `step_overhead_s`.

    Args:
      scope_counts: executions over the grid of scopes that rest on run-time data
        (`Kernel.scope_counts`); without, every step is assumed to run them.
    """
    return _sum(
        _on_timeline(call, flop_seconds(call, device), device, scope_counts or {})
        for call in program.calls
    )


def compiled_latency(
    program: Program,
    schedules: Iterable[Schedule],
    device: Device,
    *,
    scope_counts: Mapping[str, int] | None = None,
) -> Latency:
    """The same timeline with the compiler's own cycles in place of FLOPs / peak.

    A scope costs `scope_cycles` each time it runs; the pipeline's own bundles run every step.

    Args:
      schedules: one per call, in program order; of calls the compiler merged, one.
      scope_counts: as in `model_latency`.

    Raises:
      KernelError: the schedules are not those of the program's calls.
    """
    parts = []
    for call, schedule in matched(program, schedules):
        seconds = {n: c / device.clock_hz for n, c in run_cycles(call, schedule, device).items()}
        prologue_s = schedule.prologue_bundles / device.clock_hz
        parts.append(_on_timeline(call, seconds, device, scope_counts or {}, prologue_s=prologue_s))
    total = _sum(parts)
    return replace(total, cycles=round(total.compute_s * device.clock_hz))


def _on_timeline(
    call: PallasCall,
    run_s: Mapping[str, float],
    device: Device,
    scope_counts: Mapping[str, int],
    *,
    prologue_s: float = 0.0,
) -> Latency:
    """The pipeline's timeline: a step's work overlaps the next copy in and the last copy out.

    `run_s` is the time of one run of each scope; `PIPELINE` of one step outside any scope. Along
    parallel axes the cores of a device share the steps, and its bandwidth.
    """
    known = {
        s: n / call.grid_steps for s, n in scope_counts.items() if call.scopes.get(s, 0) is None
    }
    total = compute = transfer = overhead = 0.0
    for step in call.classes:
        busy = run_s.get(PIPELINE, 0.0) + sum(
            known.get(scope, runs) * run_s.get(scope, 0.0) for scope, runs in step.scopes.items()
        )
        moved = _copy_seconds(call, step, device)
        fixed = device.skip_overhead_s if skipped(call, step) else device.step_overhead_s
        total += step.steps * max(busy + fixed, moved)
        compute += step.steps * busy
        transfer += step.steps * moved
        overhead += step.steps * fixed
    edges_s = (call.fill_bytes + call.drain_bytes) / device.copy_bytes_per_s
    share = call.repeats * (call.core_steps or call.grid_steps) / max(1, call.grid_steps)
    return Latency(
        total_s=total * share + (edges_s + prologue_s) * call.repeats,
        compute_s=compute * share + prologue_s * call.repeats,
        transfer_s=transfer * share + edges_s * call.repeats,
        overhead_s=overhead * share,
        assumed=tuple(sorted(n for n, r in call.scopes.items() if r is None and n not in known)),
    )


def _copy_seconds(call: PallasCall, step: StepClass, device: Device) -> float:
    """Seconds a step's copies need: all bytes at the HBM's rate, or the slowest single copy.

    Where the device's `dma_bytes_per_s` is known, a copy takes latency + bytes / rate however idle
    the HBM is. An input copy has the steps its window has buffers ahead; an output copy has until
    the next one of its window.
    """
    shared = (step.next_in_bytes + step.prev_out_bytes) / device.copy_bytes_per_s
    slowest = shared * call.parallel_splits
    if device.dma_bytes_per_s is None:
        return slowest
    for window in _moving(call, "input", step.next_in_copies):
        size = min(step.next_in_bytes, window.bytes_moved / window.copies)
        time_s = device.dma_latency_s + size / device.dma_bytes_per_s
        slowest = max(slowest, time_s / max(1, window.buffers - 1))
    for window in _moving(call, "output", step.prev_out_copies):
        size = min(step.prev_out_bytes, window.bytes_moved / window.copies)
        time_s = device.dma_latency_s + size / device.dma_bytes_per_s
        slowest = max(slowest, time_s * window.copies / call.grid_steps)
    return slowest


def _moving(call: PallasCall, role: str, number: int) -> list[Window]:
    """The `number` windows of a role that are copied most often."""
    copied = [w for w in call.windows if w.role == role and w.memory != "hbm" and w.copies]
    return sorted(copied, key=lambda w: -w.copies)[:number]


def skipped(call: PallasCall, step: StepClass) -> bool:
    """Whether the step does nothing, in a call that does something: no named scope and no dot."""
    works = bool(call.executed_flops) or any(name != PIPELINE for name in call.scopes)
    return works and not step.scopes and not step.flops


def _sum(parts: Iterable[Latency]) -> Latency:
    """Calls of a program run one after the other."""
    parts = tuple(parts)
    return Latency(
        total_s=math.fsum(p.total_s for p in parts),
        compute_s=math.fsum(p.compute_s for p in parts),
        transfer_s=math.fsum(p.transfer_s for p in parts),
        overhead_s=math.fsum(p.overhead_s for p in parts),
        assumed=tuple(sorted({name for p in parts for name in p.assumed})),
    )


def _runs(call: PallasCall) -> dict[str, int]:
    """Executions of each scope over the grid; every step where the trace cannot tell."""
    runs = {PIPELINE: call.grid_steps}
    for step in call.classes:
        for scope, count in step.scopes.items():
            runs[scope] = runs.get(scope, 0) + step.steps * count
    return runs


def flop_seconds(call: PallasCall, device: Device) -> dict[str, float]:
    """Seconds of one run of each scope at the peak of one core."""
    runs = _runs(call)
    flop_s = _seconds_per_flop(call.dots, device) * device.cores
    return {
        scope: flops / runs[scope] * flop_s
        for scope, flops in call.scope_flops.items()
        if runs.get(scope)
    }


def _seconds_per_flop(dots: Iterable[Dot], device: Device) -> float:
    """1 / peak of the JAX device, with what the MXU adds to the products: zero padding and passes.

    The MXU multiplies by tiles of its own size, so [m, k] · [k, n] costs as much as k and n rounded
    up to it. JAX's table has no f32 peak: a f32 product is as many bf16 products as its precision
    asks for (`Dot.passes`; the schedules' MXU rows agree).
    """
    useful = spent = 0.0
    for dot in dots:
        rounded = [-(-size // device.mxu_size) * device.mxu_size for size in (dot.k, dot.n)]
        peak = device.peak(dot.dtype) or device.peak_ops_per_s["bfloat16"]
        useful += 2 * dot.m * dot.k * dot.n * dot.count
        spent += 2 * dot.m * math.prod(rounded) * dot.passes * dot.count / peak
    return spent / useful if useful else 1 / device.peak_ops_per_s["bfloat16"]


def mxu_limit_cycles(use: ScopeUse, device: Device) -> int:
    """Cycles the matrix units need for a scope's rows: rows / (rows per cycle · MXUs), rounded up.

    Source: the compiler's simulator; a padded row costs as much as a full one.
    """
    return -(-use.mxu_rows // (device.mxu_rows_per_cycle * device.num_mxus))


def scope_cycles(use: ScopeUse, device: Device) -> int:
    """Cycles of a scope's text run once: one bundle a cycle, unless the matrix units are slower."""
    return max(use.bundles, mxu_limit_cycles(use, device))


def run_cycles(call: PallasCall, schedule: Schedule, device: Device) -> dict[str, float]:
    """Cycles of one run of each scope, and under `PIPELINE` of one step outside any.

    A scope that stands in the text several times (unrolled, or in both branches of a condition)
    costs its share; what lies in a rolled loop runs as often as the trace says, the rest once.
    """
    runs = _runs(call)
    cycles: dict[str, float] = {}
    for name, use in schedule.scopes.items():
        once: float = scope_cycles(use.outside_loops(), device)
        if name == PIPELINE:
            once = max(0.0, once - schedule.prologue_bundles)
        cycles[name] = once / max(1, call.scope_regions.get(name, 1))
        levels = call.loops.get(name, ())
        for level, loop in enumerate(use.loops):
            # A loop that no trace knows of is one the compiler made of straight code.
            trips, copies = levels[level] if level < len(levels) else (runs.get(name, 0), 1)
            turn = scope_cycles(loop, device) / max(1, copies)
            cycles[name] += turn * trips / max(1, runs.get(name, 0))
    return cycles


def matched(program: Program, schedules: Iterable[Schedule]) -> list[tuple[PallasCall, Schedule]]:
    """Calls with their schedules, in order. A call the compiler merged with another has none.

    Raises:
      KernelError: a schedule belongs to no call.
    """
    left = list(schedules)
    pairs = [(call, left.pop(0)) for call in program.calls if left and left[0].name == call.name]
    if left:
        raise KernelError(
            f"the compiler's schedules {[s.name for s in left]} are of no traced call; those are"
            f" {[call.name for call in program.calls]}"
        )
    return pairs


def mxu_utilization(
    program: Program,
    schedules: Iterable[Schedule],
    device: Device,
    *,
    scope_counts: Mapping[str, int] | None = None,
) -> float | None:
    """MXU limit / cycles of the steady step: the scope with the most cycles over the program.

    1.0 is a step that keeps every matrix unit busy. None where no scope was compiled.
    `scope_counts` and errors as in `compiled_latency`.
    """
    shares = {}
    for call, schedule in matched(program, schedules):
        counts = {s: n for s, n in (scope_counts or {}).items() if call.scopes.get(s, 0) is None}
        runs = _runs(call) | counts
        cycles = run_cycles(call, schedule, device)
        for name, use in schedule.scopes.items():
            # The pipeline's own code is no step, however short the steps are beside it.
            own = name == PIPELINE or name.startswith(INNER_PIPELINE)
            if not own and scope_cycles(use, device):
                spent = cycles[name] * runs.get(name, 0) * call.repeats
                shares[spent] = mxu_limit_cycles(use, device) / scope_cycles(use, device)
    return shares[max(shares)] if shares else None


def effective_tflops(flops: int, latency_s: float) -> float:
    """`flops` of the mathematical definition per second, in 1e12."""
    return flops / latency_s / 1e12


def mfu(flops: int, latency_s: float, device: Device | None, dtype: str) -> float | None:
    """flops / latency / peak of the JAX device; None where device or peak is unknown.

    More than 1 cannot be: see `suspect_reason`.
    """
    peak = device.peak(dtype) if device else None
    return flops / latency_s / peak if peak else None


def suspect_reason(mfu: float | None) -> str | None:
    """Why a latency cannot be right, or None: it would beat the chip's peak."""
    if mfu is None or mfu <= 1:
        return None
    return f"suspect: MFU {mfu:.0%} is more than the chip's peak allows"
