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

_TAG = {"input": "input window", "output": "output window"}


def lines(program: Program, schedules: Sequence[Schedule], device: Device) -> tuple[VmemLine, ...]:
    """Per call: windows one by one; scratch, and what only one side knows, as sums. Bytes."""
    by_call = {id(c): s for c, s in cost_model.matched(program, schedules)} if schedules else {}
    found: list[VmemLine] = []
    for call in program.calls:
        # The compiler numbers inputs behind the prefetched tables, outputs from 0.
        tables = sum(scratch.name.startswith("prefetch") for scratch in call.scratch)
        model: dict[str, int] = {}
        for a in cost_model.vmem_bill(call, device).allocations:
            name = "register spills" if a.kind == "temporary" else _name(a.name, tables)
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


def _name(allocation: str, tables: int) -> str:
    """The compiler's word for an allocation of the model's bill, behind that many tables."""
    kind, _, number = allocation.partition(" ")
    if kind not in _TAG:
        return kind
    return f"{_TAG[kind]} {int(number) + (tables if kind == 'input' else 0)}"
