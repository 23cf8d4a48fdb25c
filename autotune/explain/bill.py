"""The VMEM bill: what the model counts beside what the compiler allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune import cost_model, latency
from autotune.explain.facts import VmemLine

if TYPE_CHECKING:
    from autotune.call_record import Program
    from autotune.device import Device
    from autotune.evidence import Schedule

HELD = "no window in the compiled program, since XLA holds the operand in VMEM already"
MERGED = "the compiler merged this call with another"
_NAMES = {"scratch": "scratch", "temporary": "register spills"}


def lines(program: Program, schedules: Sequence[Schedule], device: Device) -> tuple[VmemLine, ...]:
    """Per call: windows one by one; scratch, and what only one side knows, as sums. Bytes."""
    by_call = {id(c): s for c, s in cost_model.matched(program, schedules)} if schedules else {}
    found: list[VmemLine] = []
    for call in program.calls:
        named = {window.name: tag for tag, window in call.allocations().items()}
        model: dict[str, int] = {}
        for a in cost_model.vmem_bill(call, device).allocations:
            name = _NAMES.get(a.kind) or named[a.name.partition(",")[0]]
            model[name] = model.get(name, 0) + a.bytes
        schedule = by_call.get(id(call))
        compiled = dict(schedule.vmem) if schedule else {}
        held = latency.held_windows(call, schedule) if schedule else frozenset()
        without = {tag: HELD for n, tag in enumerate(call.allocations()) if n in held}
        if schedules and schedule is None:
            without = dict.fromkeys(model, MERGED)
        names = [*model, *(n for n in compiled if n not in model)]
        found.extend(
            VmemLine(
                call=call.name,
                allocation=name,
                model_bytes=model.get(name),
                compiled_bytes=compiled.get(name),
                without=None if compiled.get(name) else without.get(name),
            )
            for name in names
            if model.get(name) or compiled.get(name)
        )
    return tuple(found)
