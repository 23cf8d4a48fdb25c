"""Predicted time: roofline plus a fixed overhead per grid step; or a compiled schedule instead.

Pure arithmetic on a traced call, a schedule and a device; no jax import. Formulas, constants and
how well they predict silicon: docs/vmem-and-latency-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    from autotune.call_record import PallasCall, Program, StepClass
    from autotune.compiler.evidence import Schedule, ScopeUse

__all__ = [
    "Allocation", "Latency", "VmemBill", "compiled_latency", "effective_tflops", "mfu",
    "model_latency", "mxu_limit_cycles", "mxu_utilization", "rejection", "scope_cycles",
    "suspect_reason", "vmem_bill", "vmem_limit_bytes",
]  # fmt: skip

PIPELINE = ""  # the scope of code outside any named scope


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


def model_latency(program: Program, device: Device) -> Latency:
    """Roofline plus step overhead, from the traced calls alone.

    A step costs max(FLOPs / peak, HBM bytes / bandwidth) + overhead; a step that runs no scope
    costs `skip_overhead_s` instead of `step_overhead_s`. Source of the form: the public v6e splash
    sweep, where it ranks 16 block choices at Kendall τ 0.83 and the roofline alone at 0.18.
    """
    return _sum(_on_timeline(call, _flop_seconds(call, device), device) for call in program.calls)


def compiled_latency(program: Program, schedules: Iterable[Schedule], device: Device) -> Latency:
    """The same timeline with the compiler's own cycles in place of FLOPs / peak.

    A scope costs `scope_cycles` each time it runs; the pipeline's own bundles run every step.

    Args:
      schedules: one per call, in program order.

    Raises:
      KernelError: the schedules are not those of the program's calls.
    """
    parts = []
    for call, schedule in _matched(program, schedules):
        seconds = {n: c / device.clock_hz for n, c in _run_cycles(call, schedule, device).items()}
        prologue_s = schedule.prologue_bundles / device.clock_hz
        part = _on_timeline(call, seconds, device, prologue_s=prologue_s)
        parts.append((part, round(part.compute_s * device.clock_hz)))
    total = _sum(part for part, _ in parts)
    return Latency(
        total_s=total.total_s,
        compute_s=total.compute_s,
        transfer_s=total.transfer_s,
        overhead_s=total.overhead_s,
        cycles=sum(cycles for _, cycles in parts),
        assumed=total.assumed,
    )


def _on_timeline(
    call: PallasCall, run_s: Mapping[str, float], device: Device, *, prologue_s: float = 0.0
) -> Latency:
    """The pipeline's timeline: compute overlaps the next copy in and the last copy out.

    `run_s` is the time of one run of each scope; `PIPELINE` of one step outside any scope. The
    cores of a device share its bandwidth and, along parallel axes, the steps.
    """
    total = compute = transfer = overhead = 0.0
    for step in call.classes:
        busy = run_s.get(PIPELINE, 0.0) + sum(
            runs * run_s.get(scope, 0.0) for scope, runs in step.scopes.items()
        )
        moved = (step.next_in_bytes + step.prev_out_bytes) / device.copy_bytes_per_s
        moved *= call.parallel_splits
        fixed = device.skip_overhead_s if _skipped(call, step) else device.step_overhead_s
        total += step.steps * (max(busy, moved) + fixed)
        compute += step.steps * busy
        transfer += step.steps * moved
        overhead += step.steps * fixed
    edges_s = (call.fill_bytes + call.drain_bytes) / device.copy_bytes_per_s
    share = call.repeats / call.parallel_splits
    return Latency(
        total_s=total * share + (edges_s + prologue_s) * call.repeats,
        compute_s=compute * share + prologue_s * call.repeats,
        transfer_s=transfer * share + edges_s * call.repeats,
        overhead_s=overhead * share,
        assumed=tuple(sorted(name for name, runs in call.scopes.items() if runs is None)),
    )


def _skipped(call: PallasCall, step: StepClass) -> bool:
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
    """Executions of each scope over the grid; assumed ones where the trace cannot tell."""
    runs = {PIPELINE: call.grid_steps}
    for step in call.classes:
        for scope, count in step.scopes.items():
            runs[scope] = runs.get(scope, 0) + step.steps * count
    return runs


def _flop_seconds(call: PallasCall, device: Device) -> dict[str, float]:
    """Seconds of one run of each scope at peak; cores of a device each have their share of it."""
    peak = _peak(call, device) / device.cores
    runs = _runs(call)
    return {
        scope: flops / runs[scope] / peak
        for scope, flops in call.scope_flops.items()
        if runs.get(scope)
    }


def _peak(call: PallasCall, device: Device) -> float:
    """Peak for the dtype that most input bytes have; f32 as `_F32_PASSES` bf16 passes.

    JAX's table has no f32 peak: the MXU multiplies bf16, and a f32 product at the precision that
    reference numerics need (`HIGHEST`) is decomposed into six bf16 products
    (jax.lax.Precision's documentation: "bf16_6x").
    """
    inputs = [w for w in call.windows if w.role == "input" and w.memory == "vmem"]
    widest = max(inputs, key=lambda w: w.bytes_copied, default=None)
    dtype = widest.dtype if widest else "bfloat16"
    if dtype == "float32":
        return device.peak_ops_per_s["bfloat16"] / _F32_PASSES
    return device.peak(dtype) or device.peak_ops_per_s["bfloat16"]


_F32_PASSES = 6


def mxu_limit_cycles(use: ScopeUse, device: Device) -> int:
    """Cycles the matrix units need for a scope's rows: rows / (rows per cycle · MXUs), rounded up.

    Source: the compiler's simulator; a padded row costs as much as a full one.
    """
    return -(-use.mxu_rows // (device.mxu_rows_per_cycle * device.num_mxus))


def scope_cycles(use: ScopeUse, device: Device) -> int:
    """Cycles of a scope's text run once: one bundle a cycle, unless the matrix units are slower."""
    return max(use.bundles, mxu_limit_cycles(use, device))


def _run_cycles(call: PallasCall, schedule: Schedule, device: Device) -> dict[str, float]:
    """Cycles of one run of each scope, and under `PIPELINE` of one step outside any.

    A scope that stands in the text several times (unrolled, or in both branches of a condition)
    costs its share; one that holds a rolled loop runs it as often as the trace says.
    """
    runs = _runs(call)
    cycles: dict[str, float] = {}
    for name, use in schedule.scopes.items():
        if name == PIPELINE:
            cycles[name] = max(0, scope_cycles(use, device) - schedule.prologue_bundles)
            continue
        once = scope_cycles(use, device) / max(1, call.scope_regions.get(name, 1))
        trips = call.loop_trips.get(name, 0)
        rolled = use.loop_depth >= 2 and trips and runs.get(name)
        cycles[name] = once * max(1.0, trips / runs[name]) if rolled else once
    return cycles


def _matched(program: Program, schedules: Iterable[Schedule]) -> list[tuple[PallasCall, Schedule]]:
    schedules = tuple(schedules)
    names = [call.name for call in program.calls]
    if names != [schedule.name for schedule in schedules]:
        raise KernelError(
            f"the compiler's schedules {[s.name for s in schedules]} are not those of the traced"
            f" calls {names}"
        )
    return list(zip(program.calls, schedules, strict=True))


def mxu_utilization(
    program: Program, schedules: Iterable[Schedule], device: Device
) -> float | None:
    """MXU limit / cycles of the steady step: the scope with the most cycles over the program.

    1.0 is a step that keeps every matrix unit busy. None where no scope was compiled.
    """
    best: tuple[float, float] | None = None
    for call, schedule in _matched(program, schedules):
        runs = _runs(call)
        cycles = _run_cycles(call, schedule, device)
        for name, use in schedule.scopes.items():
            if not scope_cycles(use, device):
                continue
            spent = cycles[name] * runs.get(name, 0) * call.repeats
            share = mxu_limit_cycles(use, device) / scope_cycles(use, device)
            best = max(best or (0.0, 0.0), (spent, share))
    return best[1] if best else None


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
