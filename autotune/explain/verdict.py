"""What limits a candidate, in one sentence and in parts."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cost_model import Latency
from autotune.device import Device
from autotune.explain.facts import Part, ScopeLine
from autotune.row import Row

_SAYS = {
    "compute": "compute",
    "memory": "copies between HBM and VMEM",
    "overhead": "the fixed cost of its launch and grid steps, and their scalar code",
}
ISSUE_BOUND = 0.9
"""Share of a unit's slots from which the unit, not the order of instructions, is the limit."""


def parts(latency: Latency | None, device: Device) -> tuple[Part, ...]:
    """Compute, copies, XLA's own operations around the kernels, the fixed cost of grid steps with
    their scalar code, and that of the launch, each as if nothing else took time."""
    if latency is None:
        return ()
    named = (
        ("compute", latency.compute_s),
        ("HBM copies", max(0.0, latency.transfer_s - latency.around_s)),
        ("around the kernels", latency.around_s),
        ("grid steps and scalar code", max(0.0, latency.overhead_s - device.launch_s)),
        ("launch", device.launch_s),
    )
    return tuple(Part(name=name, time_ms=time_s * 1e3) for name, time_s in named)


def limits(row: Row, latency: Latency | None, scopes: Sequence[ScopeLine]) -> str:
    """One sentence on what holds the candidate back."""
    if row.status != "ok":
        return f"it does not run: {row.status}, {row.reason}"
    if latency is None:
        return "unknown"
    sentence = f"bound by {_SAYS[latency.bound]}"
    if latency.bound == "overhead" and (row.grid_steps or 0) > 1:
        sentence += ": larger blocks make fewer steps"
    largest = max(scopes, key=lambda line: line.share or 0.0, default=None)
    if latency.bound != "compute" or largest is None or not largest.units:
        return sentence
    name = f"`{largest.scope}` ({largest.share:.0%} of the cycles)"
    if largest.mxu_share is not None and largest.mxu_share >= ISSUE_BOUND:
        return f"{sentence}: {name} keeps the MXU {largest.mxu_share:.0%} busy"
    unit, busy = max(largest.units.items(), key=lambda item: item[1])
    if busy >= ISSUE_BOUND:
        return f"{sentence}: {name} fills the {unit} slots ({busy:.0%})"
    spills = (largest.spill_loads or 0) + (largest.spill_stores or 0)
    why = f"{spills} spills" if spills else "waits between instructions"
    return (
        f"{sentence}: {name} reaches {largest.mxu_share or 0:.0%} of the MXU limit; busiest unit "
        f"{unit} at {busy:.0%}, {why}"
    )
