"""An explanation for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table

from autotune.errors import printable
from autotune.explain.facts import SHARES, Explanation, Segment, without
from autotune.report.facts import options_on
from autotune.report.units import milliseconds

MIB = 2**20
INKS = "█▒▓░▚▞"
STRIP = 64
"""Characters of a timeline strip."""


def write(explanation: Explanation, file: IO[str]) -> None:
    """Headline, parts, VMEM bill, scopes, roofline, timeline, mask and neighbours."""
    width = None if file.isatty() else 120
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    for line in headline(explanation):
        console.print(line)
    for part in (_parts, _vmem, _scopes, _roofline, _timeline, _mask, _neighbours):
        part(explanation, console)
    for note in explanation.notes:
        console.print(f"note: {note}")


def headline(e: Explanation) -> list[str]:
    """The problem, the config, the verdict: what fits a few lines."""
    shape = " ".join(f"{axis}={size}" for axis, size in e.shape.items())
    options = " ".join(f"{k}={v}" for k, v in options_on(e.options).items())
    config = " ".join(f"{k}={v}" for k, v in e.config.items() if v is not None)
    lines = [
        f"{e.problem}: {e.kernel} on {e.device} ({shape}) {e.dtype}",
        *([f"options {options}"] if options else []),
        f"config  {config}",
        f"        {e.config_origin}",
    ]
    lines = [printable(line) for line in lines]
    if e.latency_ms is None:
        return [*lines, f"{e.status}: {e.reason}"]
    band = ""
    if e.latency_low_ms is not None and e.latency_high_ms is not None:
        band = f" ({milliseconds(e.latency_low_ms)} to {milliseconds(e.latency_high_ms)})"
    rate = f", MFU {e.mfu:.1%}" if e.mfu is not None else ""
    tflops = f", {e.effective_tflops:.1f} TFLOP/s" if e.effective_tflops is not None else ""
    return [*lines, f"{milliseconds(e.latency_ms)} {e.evidence}{band}{rate}{tflops}", e.limits]


def _table(title: str, columns: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def _parts(e: Explanation, console: Console) -> None:
    if e.parts:
        text = ", ".join(f"{p.name} {milliseconds(p.time_ms)}" for p in e.parts)
        console.print(f"as if nothing overlapped: {text}\n")


def _vmem(e: Explanation, console: Console) -> None:
    if not e.vmem:
        return
    several = len({line.call for line in e.vmem}) > 1
    limit = f" (limit {e.vmem_limit_bytes / MIB:.0f} MiB)" if e.vmem_limit_bytes else ""
    table = _table(f"VMEM{limit}", ("allocation", "model", "compiler"), left=("allocation",))
    for call in dict.fromkeys(line.call for line in e.vmem):
        own = [line for line in e.vmem if line.call == call]
        for line in own:
            name = f"{call}: {line.allocation}" if several else line.allocation
            table.add_row(name, _mib(line.model_bytes), _mib(line.compiled_bytes))
        sides = ([line.model_bytes for line in own], [line.compiled_bytes for line in own])
        sums = [None if set(side) == {None} else sum(n or 0 for n in side) for side in sides]
        table.add_row(f"{call}: sum" if several else "sum", *map(_mib, sums), style="bold")
    console.print(table)
    for sentence in without(e.vmem):
        console.print(f"  {sentence}")


def _scopes(e: Explanation, console: Console) -> None:
    if not e.scopes:
        return
    several = len({line.call for line in e.scopes}) > 1
    columns = ("scope", "runs", "cycles each", "share", "MXU", "spills", "busiest units")
    table = _table("scopes", columns, left=("scope", "busiest units"))
    for line in e.scopes:
        busiest = sorted((line.units or {}).items(), key=lambda item: -item[1])[:3]
        spills = None if line.spill_loads is None else line.spill_loads + (line.spill_stores or 0)
        table.add_row(
            f"{line.call}: {line.scope}" if several else line.scope,
            "run-time data" if line.executions is None else f"{line.executions:,}",
            "–" if line.cycles_once is None else f"{line.cycles_once:,.0f}",
            "–" if line.share is None else f"{line.share:.1%}",
            "–" if not line.mxu_share else f"{line.mxu_share:.0%}",
            "–" if spills is None else f"{spills:,}",
            ", ".join(f"{unit} {share:.0%}" for unit, share in busiest if share >= 0.005),
        )
    console.print(table)
    if any(line.units for line in e.scopes):
        console.print(f"  {SHARES}")
    for sentence in e.scopes_split:
        console.print(f"  {sentence}")
    console.print()


def _roofline(e: Explanation, console: Console) -> None:
    r = e.roofline
    if r is None:
        return
    # The headline's TFLOP/s count the mathematical definition's: fewer where blocks are masked.
    intensity = (
        "no traffic" if r.intensity is None else f"{r.intensity:,.0f} executed FLOP per byte"
    )
    reached = "" if r.executed_tflops is None else f"; predicted {r.executed_tflops:,.0f} executed"
    console.print(
        f"roofline: {intensity} (ridge {r.ridge:,.0f}), attainable {r.attainable_tflops:,.0f} of "
        f"{r.peak_tflops:,.0f} TFLOP/s{reached}\n"
    )


def _timeline(e: Explanation, console: Console) -> None:
    for call in dict.fromkeys(s.call for s in e.timeline):
        own = [s for s in e.timeline if s.call == call]
        for part in dict.fromkeys(s.part for s in own):
            bars = [s for s in own if s.part == part]
            end_us = max(s.start_us + s.duration_us for s in bars)
            console.print(f"{call}: {part} ({end_us:.2f} µs)")
            for lane in dict.fromkeys(s.lane for s in bars):
                inked = _inked([s for s in bars if s.lane == lane])
                console.print(f"  {lane:<9}│{_strip(inked, end_us)}│", no_wrap=True)
                legend = {f"{ink} {bar.label}": None for ink, bar in inked}
                console.print("            " + "  ".join(legend))
        console.print()


def _inked(bars: Sequence[Segment]) -> list[tuple[str, Segment]]:
    """Each bar with the character it is drawn in; bars of one label share it."""
    ink = dict(zip(dict.fromkeys(b.label for b in bars), itertools.cycle(INKS), strict=False))
    return [(ink[bar.label], bar) for bar in bars]


def _strip(inked: Sequence[tuple[str, Segment]], end_us: float) -> str:
    cells = [" "] * STRIP
    for ink, bar in inked:
        first = int(bar.start_us / end_us * STRIP) if end_us else 0
        last = max(first + 1, round((bar.start_us + bar.duration_us) / end_us * STRIP))
        for i in range(first, min(last, STRIP)):
            cells[i] = ink
    return "".join(cells)


def _mask(e: Explanation, console: Console) -> None:
    if e.mask:
        m = e.mask
        console.print(
            f"mask: {m['active']} of {m['blocks']} blocks active ({m['full']} full, {m['partial']} "
            f"partial in {m['patterns']} patterns); {m['visible_share_of_active']:.1%} of the "
            "pairs in active blocks are visible\n"
        )


def _neighbours(e: Explanation, console: Console) -> None:
    if not e.neighbours:
        return
    columns = ("change", "latency", "against this", "VMEM", "ends as")
    table = _table("one step away", columns, left=("change", "ends as"))
    for n in e.neighbours:
        here = e.config.get(n.tunable)
        table.add_row(
            f"{n.tunable}: {here} → {n.value}",
            "–" if n.latency_ms is None else milliseconds(n.latency_ms),
            "–" if n.change is None else f"{n.change:+.1%}",
            _mib(n.vmem_bytes),
            f"{n.evidence}" if n.status == "ok" else f"{n.status}: {n.reason}",
        )
    console.print(table)


def _mib(size: int | None) -> str:
    return "–" if size is None else f"{size / MIB:.2f} MiB"
