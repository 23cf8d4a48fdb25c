"""The pipeline's first, steady and last grid step as bars: copies beside compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autotune import cost_model
from autotune.explain.facts import Segment

if TYPE_CHECKING:
    from autotune.call_record import PallasCall, Program, StepClass
    from autotune.device import Device
    from autotune.evidence import Schedule

PIPELINE = cost_model.PIPELINE


def segments(
    program: Program,
    schedules: Sequence[Schedule],
    device: Device,
    counts: Mapping[str, int],
) -> tuple[Segment, ...]:
    """Bars of each call, microseconds from the start of each part.

    Parts: the first step behind its own copy in; the steady step, the kind that takes most of the
    grid's time, with its share of the steps; the last step before its own copy out. Copies of a
    step run beside its compute: in for the next step, out for the one before.
    """
    by_call = {id(c): s for c, s in cost_model.matched(program, schedules)} if schedules else {}
    found: list[Segment] = []
    for call in program.calls:
        if not call.classes:
            continue
        run_us = _run_us(call, by_call.get(id(call)), device)
        known = {s: n / call.grid_steps for s, n in counts.items() if call.scopes.get(s, 0) is None}
        step = _Step(call=call, run_us=run_us, known=known, device=device)
        first, last = call.classes[0], _last(call)
        steady = max(call.classes, key=lambda c: c.steps * step.length_us(c))
        fill = call.fill_bytes / device.copy_bytes_per_s * 1e6
        found += step.bars("first step", first, fill_us=fill)
        if call.grid_steps > 1:
            part = f"steady step, {steady.steps:,} of {call.grid_steps:,}"
            found += step.bars(part, steady)
            drain = call.drain_bytes / device.copy_bytes_per_s * 1e6
            found += step.bars("last step", last, drain_us=drain)
    return tuple(found)


def _last(call: PallasCall) -> StepClass:
    """The class of the last step: nothing is copied in behind it. Classes are in order of first
    appearance."""
    ending = [c for c in call.classes if not c.next_in_copies]
    return ending[-1] if ending else call.classes[-1]


def _run_us(call: PallasCall, schedule: Schedule | None, device: Device) -> Mapping[str, float]:
    """Microseconds of one run of each scope."""
    if schedule is None:
        return {n: s * 1e6 for n, s in cost_model.flop_seconds(call, device).items()}
    cycles = cost_model.run_cycles(call, schedule, device)
    return {name: n / device.clock_hz * 1e6 for name, n in cycles.items()}


class _Step:
    """Bars of one grid step of a call."""

    def __init__(
        self,
        *,
        call: PallasCall,
        run_us: Mapping[str, float],
        known: Mapping[str, float],
        device: Device,
    ) -> None:
        self._call, self._run_us, self._known, self._device = call, run_us, known, device

    def length_us(self, step: StepClass) -> float:
        """The longer of compute and copies."""
        copies = max(self._in_us(step), self._out_us(step))
        return max(sum(us for _, us in self._compute(step)), copies)

    def bars(
        self, part: str, step: StepClass, *, fill_us: float = 0.0, drain_us: float = 0.0
    ) -> Iterator[Segment]:
        def bar(lane: str, label: str, start: float, length: float) -> Iterator[Segment]:
            if length > 0:
                yield Segment(
                    call=self._call.name, part=part, lane=lane, label=label,
                    start_us=start, duration_us=length,
                )  # fmt: skip

        yield from bar("copy in", "this step's blocks", 0.0, fill_us)
        yield from bar("copy in", _copies(step.next_in_copies, step.next_in_bytes, "next step"),
                       fill_us, self._in_us(step))  # fmt: skip
        at = fill_us
        for name, us in self._compute(step):
            yield from bar("compute", name, at, us)
            at += us
        written = _copies(step.prev_out_copies, step.prev_out_bytes, "step before")
        yield from bar("copy out", written, fill_us, self._out_us(step))
        yield from bar("copy out", "this step's blocks", fill_us + self.length_us(step), drain_us)

    def _compute(self, step: StepClass) -> list[tuple[str, float]]:
        """Scopes in program order, the pipeline's own code and the fixed cost of a step first."""
        device, call = self._device, self._call
        fixed = device.skip_overhead_s if cost_model.skipped(call, step) else device.step_overhead_s
        done = [("grid step", fixed * 1e6), ("(pipeline)", self._run_us.get(PIPELINE, 0.0))]
        for name in call.scopes:
            runs = self._known.get(name, step.scopes.get(name, 0))
            done.append((name, runs * self._run_us.get(name, 0.0)))
        return [(name, us) for name, us in done if us > 0]

    def _in_us(self, step: StepClass) -> float:
        return step.next_in_bytes / self._device.copy_bytes_per_s * 1e6

    def _out_us(self, step: StepClass) -> float:
        return step.prev_out_bytes / self._device.copy_bytes_per_s * 1e6


def _copies(number: int, size: int, whose: str) -> str:
    return f"{whose}: {number} {'copy' if number == 1 else 'copies'}, {size / 2**10:,.0f} KiB"
