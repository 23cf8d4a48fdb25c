"""Time from a timeline: steps that overlap their copies, several calls, and XLA between them.

Arithmetic on records, no jax import; the constants are those of the `Device` that is handed in.
Formulas and how well they hold on silicon: docs/vmem-and-latency-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.device import Device

if TYPE_CHECKING:
    from autotune.call_record import PallasCall, StepClass, Window
    from autotune.evidence import Schedule, XlaOp

PIPELINE = ""  # the scope of code outside any named scope


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """A predicted time, in seconds, on one JAX device.

    Attributes:
      total_s: what is predicted: per step the longer of compute and transfer, plus overhead,
        plus the first copy in and the last copy out, plus what XLA runs around the kernels.
      compute_s, transfer_s: all compute, and all HBM traffic, as if nothing else took time.
      overhead_s: the fixed cost of all grid steps, and of starting the program.
      cycles: cycles of a TensorCore for the whole problem; None without a schedule.
      assumed: scopes whose executions the trace cannot tell (run-time data): every step is
        assumed to run them.
      around_s: of `total_s`, what XLA's operations around the kernels take.
    """

    total_s: float
    compute_s: float
    transfer_s: float
    overhead_s: float
    cycles: int | None = None
    assumed: tuple[str, ...] = ()
    around_s: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.total_s, self.compute_s, self.transfer_s, self.overhead_s, self.around_s)
        if not all(math.isfinite(part) and part >= 0 for part in parts):
            raise ValueError(f"a latency is finite and not negative: {parts}")

    @property
    def bound(self) -> str:
        """`compute`, `memory` or `overhead`: the largest of the three parts."""
        parts = {
            "compute": self.compute_s, "memory": self.transfer_s, "overhead": self.overhead_s,
        }  # fmt: skip
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one run of each scope of a call costs, in seconds; `PIPELINE` of one step outside any.

    Attributes:
      run_s: compute.
      scalar_s: what the scalar unit adds to that (`Device.scalar_cycles`).
      step_s, skip_s: fixed cost of a step, and of a step that does nothing.
      prologue_s: code ahead of the grid's loop.
      held: windows whose operand XLA keeps in VMEM: no copy of theirs moves HBM bytes.
    """

    run_s: Mapping[str, float]
    step_s: float
    skip_s: float
    scalar_s: Mapping[str, float]
    prologue_s: float = 0.0
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One grid step of a class, in seconds.

    Attributes:
      by_scope: compute of each scope that runs, its scalar code included; `PIPELINE` among them.
      scalar_s: of that, what the scalar unit adds.
      fixed_s: the fixed cost of the step.
      copies_s: what its copies need beside all that (`copy_seconds`).
    """

    by_scope: Mapping[str, float]
    scalar_s: float
    fixed_s: float
    copies_s: float

    @property
    def total_s(self) -> float:
        """The longer of compute and copies."""
        return max(math.fsum(self.by_scope.values()) + self.fixed_s, self.copies_s)


def step_time(
    call: PallasCall, step: StepClass, work: Work, device: Device, scope_counts: Mapping[str, int]
) -> StepTime:
    """What a step of the class takes. `scope_counts` as in `of_call`."""
    known = _known(call, scope_counts)
    runs = {PIPELINE: 1.0} | {s: known.get(s, n) for s, n in step.scopes.items()}
    scalar = {s: n * work.scalar_s.get(s, 0.0) for s, n in runs.items()}
    return StepTime(
        by_scope={s: n * work.run_s.get(s, 0.0) + scalar[s] for s, n in runs.items()},
        scalar_s=math.fsum(scalar.values()),
        fixed_s=work.skip_s if skipped(call, step) else work.step_s,
        copies_s=copy_seconds(call, moved(call, step, work.held), device),
    )


def _known(call: PallasCall, scope_counts: Mapping[str, int]) -> dict[str, float]:
    """Runs a step of scopes that rest on run-time data and that `scope_counts` tells."""
    told = {s: n for s, n in scope_counts.items() if call.scopes.get(s, 0) is None}
    return {scope: n / call.grid_steps for scope, n in told.items()}


def of_call(
    call: PallasCall, work: Work, device: Device, scope_counts: Mapping[str, int]
) -> Latency:
    """The pipeline's timeline: a step's work overlaps the next copy in and the last copy out.

    Along parallel axes the cores of a device share the steps, and its bandwidth.

    Args:
      scope_counts: executions over the grid of scopes that rest on run-time data.
    """
    known = _known(call, scope_counts)
    total = compute = transfer = overhead = 0.0
    for step in call.classes:
        time = step_time(call, step, work, device, scope_counts)
        total += step.steps * time.total_s
        compute += step.steps * (math.fsum(time.by_scope.values()) - time.scalar_s)
        transfer += step.steps * time.copies_s
        overhead += step.steps * (time.fixed_s + time.scalar_s)
    # Copies by hand run beside everything else, as far as the HBM lets them.
    transfer += call.hand_bytes / device.copy_bytes_per_s * call.parallel_splits
    total = max(total, transfer)
    edges_s = math.fsum(edge_seconds(call, device, work.held))
    share = call.repeats * (call.core_steps or call.grid_steps) / max(1, call.grid_steps)
    return Latency(
        total_s=total * share + (edges_s + work.prologue_s) * call.repeats,
        compute_s=compute * share + work.prologue_s * call.repeats,
        transfer_s=transfer * share + edges_s * call.repeats,
        overhead_s=overhead * share,
        assumed=tuple(sorted(n for n, r in call.scopes.items() if r is None and n not in known)),
    )


def moved(call: PallasCall, step: StepClass, held: frozenset[int]) -> StepClass:
    """`step` without the copies of windows whose operand XLA holds in VMEM."""
    if not held.intersection((*step.next_in_windows, *step.prev_out_windows)):
        return step
    ins = tuple(n for n in step.next_in_windows if n not in held)
    outs = tuple(n for n in step.prev_out_windows if n not in held)
    kept_in = (call.windows[n] for n in step.next_in_windows if n in held)
    kept_out = (call.windows[n] for n in step.prev_out_windows if n in held)
    return replace(
        step,
        next_in_windows=ins,
        next_in_copies=len(ins),
        next_in_bytes=max(0, step.next_in_bytes - round(math.fsum(map(_copy_bytes, kept_in)))),
        prev_out_windows=outs,
        prev_out_copies=len(outs),
        prev_out_bytes=max(0, step.prev_out_bytes - round(math.fsum(map(_copy_bytes, kept_out)))),
    )


def copy_seconds(call: PallasCall, step: StepClass, device: Device) -> float:
    """Seconds a step's copies need: all bytes at the HBM's rate, or the slowest single copy.

    Where the device's `dma_bytes_per_s` is known, a copy takes latency + bytes / rate however idle
    the HBM is. An input copy has the steps its window has buffers ahead; an output copy has until
    the next one of its window.
    """
    moved_bytes = step.next_in_bytes + step.prev_out_bytes
    slowest = moved_bytes / device.copy_bytes_per_s * call.parallel_splits
    if device.dma_bytes_per_s is None:
        return slowest
    for window in (call.windows[n] for n in step.next_in_windows):
        slowest = max(slowest, _alone(window, device) / max(1, window.buffers - 1))
    for window in (call.windows[n] for n in step.prev_out_windows):
        slowest = max(slowest, _alone(window, device) * window.copies / call.grid_steps)
    return slowest


def _alone(window: Window, device: Device) -> float:
    """Seconds one copy of a window takes on its own."""
    assert device.dma_bytes_per_s is not None
    return device.dma_latency_s + _copy_bytes(window) / device.dma_bytes_per_s


def _copy_bytes(window: Window) -> float:
    return window.bytes_moved / window.copies if window.copies else 0.0


def edge_seconds(
    call: PallasCall, device: Device, held: frozenset[int] = frozenset()
) -> tuple[float, float]:
    """Seconds of the copies in before the first step, and of those out after the last."""
    kept = {"input": 0.0, "output": 0.0}
    for window in (call.windows[n] for n in held):
        kept[window.role] += _copy_bytes(window)
    fill = max(0.0, call.fill_bytes - kept["input"])
    drain = max(0.0, call.drain_bytes - kept["output"])
    return fill / device.copy_bytes_per_s, drain / device.copy_bytes_per_s


def skipped(call: PallasCall, step: StepClass) -> bool:
    """Whether the step does nothing, in a call that does something: no named scope and no dot."""
    works = bool(call.executed_flops) or any(name != PIPELINE for name in call.scopes)
    return works and not step.scopes and not step.flops


def held_windows(call: PallasCall, schedule: Schedule) -> frozenset[int]:
    """Windows of `call` that the compiler gave no VMEM: XLA holds their operand there already.

    A schedule without any window's allocation, or with one that is none of the call's, says nothing
    of them.
    """
    named = call.allocations()
    allocated = {tag for tag in schedule.vmem if " window " in tag}
    if not allocated or allocated - named.keys():
        return frozenset()
    held = (tag not in allocated and w.memory == "vmem" and w.copies for tag, w in named.items())
    return frozenset(n for n, is_held in enumerate(held) if is_held)


def around_seconds(ops: Iterable[XlaOp], device: Device) -> float:
    """Seconds of what XLA runs around the kernels.

    An operation takes the longer of two: its HBM bytes at the rate copies reach, and all its bytes,
    HBM's and VMEM's alike, at the rate they pass through a core (`vmem_bytes_per_s`); plus
    `op_overhead_s`. A copy in the background passes through no core and costs its HBM bytes. XLA's
    own `estimated_cycles` are left out: for the fusions around attention they are 3 to 30 times
    the cycles of the fusion's own schedule (docs/vmem-and-latency-model.md).
    """
    total = 0.0
    for op in ops:
        hbm_bytes = op.bytes_read + op.bytes_written
        hbm_s = hbm_bytes / device.copy_bytes_per_s
        if op.asynchronous:
            total += op.repeats * hbm_s
            continue
        core_s = (hbm_bytes + op.vmem_bytes) / device.vmem_bytes_per_s
        total += op.repeats * (max(hbm_s, core_s) + device.op_overhead_s)
    return total


def summed(parts: Iterable[Latency], *, around_s: float = 0.0, launch_s: float = 0.0) -> Latency:
    """Calls of a program run one after the other, and what comes with the program."""
    parts = tuple(parts)
    total = Latency(
        total_s=math.fsum(p.total_s for p in parts),
        compute_s=math.fsum(p.compute_s for p in parts),
        transfer_s=math.fsum(p.transfer_s for p in parts),
        overhead_s=math.fsum(p.overhead_s for p in parts),
        assumed=tuple(sorted({name for p in parts for name in p.assumed})),
    )
    return replace(
        total,
        total_s=total.total_s + around_s + launch_s,
        transfer_s=total.transfer_s + around_s,
        overhead_s=total.overhead_s + launch_s,
        around_s=around_s,
    )
