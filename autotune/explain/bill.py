"""The VMEM bill: what the model counts beside what the compiler allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune import cost_model
from autotune.explain.facts import VmemLine

if TYPE_CHECKING:
    from autotune.call_record import Program
    from autotune.device import Device
    from autotune.evidence import Schedule

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
        names = [*model, *(n for n in compiled if n not in model)]
        found.extend(
            VmemLine(
                call=call.name,
                allocation=name,
                model_bytes=model.get(name),
                compiled_bytes=compiled.get(name),
            )
            for name in names
            if model.get(name) or compiled.get(name)
        )
    return tuple(found)
