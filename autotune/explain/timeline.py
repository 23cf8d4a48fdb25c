"""The pipeline's first, steady and last grid step as bars: copies beside compute.

The same terms as the predicted latency (`latency.step_time`), so that steps and edges add up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune import cost_model, latency
from autotune.explain.facts import Segment

if TYPE_CHECKING:
    from autotune.call_record import PallasCall, Program, StepClass
    from autotune.device import Device
    from autotune.evidence import Schedule
    from autotune.latency import Work

PIPELINE = cost_model.PIPELINE


def segments(
    program: Program,
    schedules: Sequence[Schedule],
    device: Device,
    counts: Mapping[str, int],
) -> tuple[Segment, ...]:
    """Bars of each call, microseconds from the start of each part.

    Parts: the first step behind its own copy in; the steady step, of the steps between the kind
    that takes most of the time, and how many there are of it; the last step before its own copy
    out. No step is in two parts, so a grid of two steps has no steady one. Copies of a step run
    beside its compute: in for the next step, out for the one before. A call that the compiler
    merged with another has none.
    """
    known = {id(c): s for c, s in cost_model.matched(program, schedules)} if schedules else {}
    found: list[Segment] = []
    for call in program.calls:
        schedule = known.get(id(call))
        if not call.classes or (schedules and schedule is None):
            continue
        work = cost_model.work(call, schedule, device)
        found += _of_call(_Strip(call=call, work=work, device=device, counts=counts))
    return tuple(found)


def _of_call(strip: _Strip) -> Iterator[Segment]:
    call = strip.call
    first, last = call.classes[0], _last(call)
    fill_s, drain_s = latency.edge_seconds(call, strip.device, strip.work.held)
    fill_us, drain_us = fill_s * 1e6, drain_s * 1e6
    if call.grid_steps == 1:
        yield from strip.bars("only step", first, fill_us=fill_us, drain_us=drain_us)
        return
    yield from strip.bars("first step", first, fill_us=fill_us)
    between = [(c, c.steps - (c is first) - (c is last)) for c in call.classes]
    steady, steps = max(between, key=lambda kind: kind[1] * strip.length_us(kind[0]))
    if steps > 0:
        among = f"{steps:,} of {call.grid_steps - 2:,} between first and last"
        yield from strip.bars(f"steady step, {among}", steady)
    yield from strip.bars("last step", last, drain_us=drain_us)


def _last(call: PallasCall) -> StepClass:
    """The class of the last step: nothing is copied in behind it. Classes are in order of first
    appearance."""
    ending = [c for c in call.classes if not c.next_in_copies]
    return ending[-1] if ending else call.classes[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Strip:
    """The bars of a call's grid steps."""

    call: PallasCall
    work: Work
    device: Device
    counts: Mapping[str, int]

    def length_us(self, step: StepClass) -> float:
        """What the prediction takes the step to last."""
        return self._time(step).total_s * 1e6

    def bars(
        self, part: str, step: StepClass, *, fill_us: float = 0.0, drain_us: float = 0.0
    ) -> Iterator[Segment]:
        def bar(lane: str, label: str, start: float, length: float) -> Iterator[Segment]:
            if length > 0:
                yield Segment(
                    call=self.call.name, part=part, lane=lane, label=label,
                    start_us=start, duration_us=length,
                )  # fmt: skip

        moved = latency.moved(self.call, step, self.work.held)
        copies_us = self._time(step).copies_s * 1e6
        in_us = self._copy_us(replace(moved, prev_out_bytes=0, prev_out_windows=()))
        out_us = self._copy_us(replace(moved, next_in_bytes=0, next_in_windows=()))
        yield from bar("copy in", "this step's blocks", 0.0, fill_us)
        copied = _copies(moved.next_in_copies, moved.next_in_bytes, "next step")
        yield from bar("copy in", copied, fill_us, in_us)
        at = fill_us
        for name, us in self._compute(step):
            yield from bar("compute", name, at, us)
            at += us
        written = _copies(moved.prev_out_copies, moved.prev_out_bytes, "step before")
        # They share the HBM: where that is the limit, the one follows the other.
        yield from bar("copy out", written, fill_us + max(0.0, copies_us - out_us), out_us)
        yield from bar("copy out", "this step's blocks", fill_us + self.length_us(step), drain_us)

    def _time(self, step: StepClass) -> latency.StepTime:
        return latency.step_time(self.call, step, self.work, self.device, self.counts)

    def _copy_us(self, step: StepClass) -> float:
        return latency.copy_seconds(self.call, step, self.device) * 1e6

    def _compute(self, step: StepClass) -> list[tuple[str, float]]:
        """Scopes in program order, the fixed cost of a step and the pipeline's own code first."""
        time = self._time(step)
        done = [("grid step", time.fixed_s), ("(pipeline)", time.by_scope.get(PIPELINE, 0.0))]
        done += [(name, time.by_scope.get(name, 0.0)) for name in self.call.scopes if name]
        return [(name, seconds * 1e6) for name, seconds in done if seconds > 0]


def _copies(number: int, size: int, whose: str) -> str:
    return f"{whose}: {number} {'copy' if number == 1 else 'copies'}, {size / 2**10:,.0f} KiB"
