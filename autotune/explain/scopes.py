"""Cycles, spills and unit use of each named scope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune import cost_model
from autotune.explain.facts import ScopeLine

if TYPE_CHECKING:
    from autotune.call_record import PallasCall, Program
    from autotune.device import Device
    from autotune.evidence import Schedule

PIPELINE = "(pipeline)"


def lines(
    program: Program,
    schedules: Sequence[Schedule],
    device: Device,
    counts: Mapping[str, int],
) -> tuple[ScopeLine, ...]:
    """One line a scope of each call; only executions where nothing was compiled."""
    if not schedules:
        return tuple(
            ScopeLine(call=call.name, scope=name or PIPELINE, executions=_runs(call, name, counts))
            for call in program.calls
            for name in call.scopes
        )
    found: list[ScopeLine] = []
    spent: list[float] = []
    for call, schedule in cost_model.matched(program, schedules):
        cycles = cost_model.run_cycles(call, schedule, device)
        for name, use in schedule.scopes.items():
            runs = call.grid_steps if not name else _runs(call, name, counts)
            once, text_cycles = cycles[name], max(1, cost_model.scope_cycles(use, device))
            spent.append(once * (runs or 0) * call.repeats)
            found.append(
                ScopeLine(
                    call=call.name,
                    scope=name or PIPELINE,
                    executions=runs,
                    bundles=use.bundles,
                    cycles_once=once,
                    mxu_share=cost_model.mxu_limit_cycles(use, device) / text_cycles,
                    spill_loads=use.spill_loads,
                    spill_stores=use.spill_stores,
                    units={
                        unit: slots / (schedule.capacity[unit] * text_cycles)
                        for unit, slots in use.units.items()
                        if schedule.capacity.get(unit)
                    },
                )
            )
    total = sum(spent) or 1.0
    return tuple(_with_share(line, s / total) for line, s in zip(found, spent, strict=True))


def split(program: Program) -> tuple[str, ...]:
    """How each call's text was told apart, one sentence a call."""
    return tuple(f"{call.name}: {_SPLIT[call.marking]}" for call in program.calls)


_MARKED = (
    "autotune named each branch and each run of matrix products in the traced kernel before it was "
    "compiled, by what they do"
)
_SPLIT = {
    "named": "scopes are the kernel's own (`jax.named_scope`)",
    "marked": f"the kernel names no scopes: {_MARKED}",
    "named and marked": f"scopes are the kernel's own; where it names none, {_MARKED}",
    "none": "the kernel is one part, which every grid step runs",
}


def _runs(call: PallasCall, scope: str, counts: Mapping[str, int]) -> int | None:
    traced = call.scopes.get(scope)
    return counts.get(scope) if traced is None else traced


def _with_share(line: ScopeLine, share: float) -> ScopeLine:
    from dataclasses import replace

    return replace(line, share=share)
