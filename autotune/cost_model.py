"""Predicted time: roofline plus a fixed overhead per grid step; or a compiled schedule instead.

Pure arithmetic on a traced call, a schedule and a device; no jax import. Formulas, constants and
how well they predict silicon: docs/vmem-and-latency-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune import latency
from autotune.device import Device
from autotune.errors import KernelError
from autotune.latency import PIPELINE, Latency, Work, skipped
from autotune.vmem_model import (
    Allocation,
    VmemBill,
    rejection,
    vmem_bill,
    vmem_limit_bytes,
)

if TYPE_CHECKING:
    from autotune.call_record import Dot, PallasCall, Program
    from autotune.evidence import Schedule, ScopeUse, XlaOp

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
    "work",
]  # fmt: skip

INNER_PIPELINE = "ep_"  # what the scopes of `pltpu.emit_pipeline`'s own code begin with


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
    return latency.summed(
        latency.of_call(call, work(call, None, device), device, scope_counts or {})
        for call in program.calls
    )


def work(call: PallasCall, schedule: Schedule | None, device: Device) -> Work:
    """What runs of the call's scopes cost: by its schedule, else by FLOPs / peak."""
    if schedule is None:
        return Work(
            run_s=flop_seconds(call, device), scalar_s={},
            step_s=device.step_overhead_s, skip_s=device.skip_overhead_s,
        )  # fmt: skip
    cycles = run_cycles(call, schedule, device)
    scalar = run_cycles(call, schedule, device, cost=scalar_cycles)
    return Work(
        run_s={name: n / device.clock_hz for name, n in cycles.items()},
        scalar_s={name: n / device.clock_hz for name, n in scalar.items()},
        step_s=device.issued_step_s,
        skip_s=device.issued_step_s,
        prologue_s=schedule.prologue_bundles / device.clock_hz,
        held=latency.held_windows(call, schedule),
    )


def compiled_latency(
    program: Program,
    schedules: Iterable[Schedule],
    device: Device,
    *,
    scope_counts: Mapping[str, int] | None = None,
    xla_ops: Iterable[XlaOp] = (),
) -> Latency:
    """The same timeline with the compiler's own cycles in place of FLOPs / peak.

    A scope costs `scope_cycles` each time it runs, and what its scalar code adds; the pipeline's
    own code runs every step. What XLA runs around the kernels comes on top.

    Args:
      schedules: one per call, in program order; of calls the compiler merged, one.
      scope_counts: as in `model_latency`.
      xla_ops: of the same compiled program.

    Raises:
      KernelError: the schedules are not those of the program's calls.
    """
    parts = [
        latency.of_call(call, work(call, schedule, device), device, scope_counts or {})
        for call, schedule in matched(program, schedules)
    ]
    cycles_in_all = round(math.fsum(p.compute_s for p in parts) * device.clock_hz)
    around_s = latency.around_seconds(xla_ops, device)
    total = latency.summed(parts, around_s=around_s, launch_s=device.launch_s)
    return replace(total, cycles=cycles_in_all)


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


def scalar_cycles(use: ScopeUse, device: Device) -> float:
    """Cycles that scalar code takes beyond its bundles: so many for each slot of the scalar unit.

    Source: `Device.scalar_cycles`. Vector code of attention kernels has next to no scalar slots;
    the pipeline's own code, and branches on prefetched tables, are little else.
    """
    return device.scalar_cycles * use.units.get("SALU", 0)


def run_cycles(
    call: PallasCall,
    schedule: Schedule,
    device: Device,
    cost: Callable[[ScopeUse, Device], float] | None = None,
) -> dict[str, float]:
    """Cycles of one run of each scope, and under `PIPELINE` of one step outside any.

    `cost` is that of a scope's text run once, `scope_cycles` unless given.

    A scope that stands in the text several times (unrolled, or in both branches of a condition)
    costs its share; what lies in a rolled loop runs as often as the trace says, the rest once.
    """
    cost = cost or scope_cycles
    runs = _runs(call)
    cycles: dict[str, float] = {}
    for name, use in schedule.scopes.items():
        outside = use.outside_loops()
        once = float(cost(outside, device))
        if name == PIPELINE and outside.bundles:
            once *= max(0.0, 1 - schedule.prologue_bundles / outside.bundles)
        cycles[name] = once / max(1, call.scope_regions.get(name, 1))
        levels = call.loops.get(name, ())
        for level, loop in enumerate(use.loops):
            # A loop that no trace knows of is one the compiler made of straight code.
            trips, copies = levels[level] if level < len(levels) else (runs.get(name, 0), 1)
            turn = cost(loop, device) / max(1, copies)
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
