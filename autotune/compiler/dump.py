"""Reads the TPU compiler's text dump of one kernel: bundles, unit use, VMEM. Pure functions.

The format is that of libtpu 0.0.42 and 0.0.50 (`final_bundles`, `final_hlo-static-per-bundle-
utilization` and `pre-finalize-registers-and-allocations` files).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autotune.device import Device
from autotune.evidence import Schedule, ScopeUse

OUTSIDE = ""  # the scope of bundles that no named scope holds

# `  0x12 LB: >> {`: an address, a control target, one `>` a loop level. Bundles that the compiler
# adds last (empty delay slots, its own trace points) are written without their level.
_BUNDLE = re.compile(
    r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:((?:\s*>)*)\s*\{(\s*(?:%\d+ = vtrace \d+\s*)?\})?"
)
_MARKER = re.compile(r"/\* (?:TraceMeStart\((.*?)\) \[|\] TraceMeEnd\((.*?)\)) \*/")
_MATMUL = re.compile(r"= vmatmul\S*")
_MATMUL_TYPE = re.compile(r"\.(f32|bf16|[su]8|[su]4|f8e5m2|f8e4m3fn|f8e4m3b11|f8e4m3|bf8)\b")
_REPORT_DATA = re.compile(r"\bDATA\s*=\s*(?=\{)")
_ALLOCATION = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+)\b.*?tag = '(.*)'\]?\s*$", re.M)
_GRID_LOOP = "iteration index, stage"

# type in the instruction -> bits, and the dtype name of `Device.peak_ops_per_s`.
_OPERANDS = {
    "f32": (32, "float32"),
    "bf16": (16, "bfloat16"),
    "s8": (8, "int8"),
    "u8": (8, "int8"),
    "s4": (4, "int4"),
    "u4": (4, "int4"),
    "f8e5m2": (8, "float8_e5m2"),
    "bf8": (8, "float8_e5m2"),
    "f8e4m3": (8, "float8_e4m3fn"),
    "f8e4m3fn": (8, "float8_e4m3fn"),
    "f8e4m3b11": (8, "float8_e4m3b11fnuz"),
}


class DumpError(ValueError):
    """The dump does not have the form this parser knows."""


@dataclass(kw_only=True, slots=True)
class _Bundle:
    depth: int
    mxu_rows: int = 0
    markers: list[tuple[bool, str]] = field(default_factory=list)  # (starts, scope name)


def parse_schedule(
    bundles_text: str,
    utilization_text: str,
    allocations_text: str,
    name: str,
    device: Device,
    *,
    spilled_bytes: int = 0,
) -> Schedule:
    """The schedule of one kernel from its three dump files, and its spills from the VMEM report.

    A bundle belongs to the innermost named scope around it; the one with a scope's start marker
    to the scope outside, the one with its end marker to the scope itself.

    Raises DumpError where the texts do not fit each other or the known format.
    """
    capacity, use = parse_utilization(utilization_text)
    bundles = list(_read_bundles(bundles_text, device))
    if len(bundles) != len(use):
        raise DumpError(f"{name}: {len(bundles)} bundles but {len(use)} rows of unit use")
    in_grid = _GRID_LOOP in bundles_text
    owners = _owners(bundles)
    # Without a loop over the grid the text runs once: it is the body of a grid of one step.
    depths = [b.depth if in_grid else b.depth + 1 for b in bundles]
    members: dict[str, list[int]] = {OUTSIDE: []}
    levels = []  # per bundle: loops between it and its scope
    for index, (owner, start) in enumerate(owners):
        members.setdefault(owner, []).append(index)
        around = 1 if owner == OUTSIDE else start if in_grid else start + 1
        levels.append(max(0, depths[index] - around))
    units = list(capacity)
    vmem = parse_allocations(allocations_text)
    if spilled_bytes:
        vmem["register spills"] = spilled_bytes
    return Schedule(
        name=name,
        bundles=len(bundles),
        prologue_bundles=sum(depths[i] == 0 for i in members[OUTSIDE]),
        capacity=capacity,
        scopes={
            scope: _scope_use(
                units,
                [use[i] for i in indices],
                depths=[depths[i] for i in indices],
                levels=[levels[i] for i in indices],
                rows=[bundles[i].mxu_rows for i in indices],
            )
            for scope, indices in members.items()
        },
        vmem_bytes=sum(vmem.values()),
        vmem=vmem,
    )


def parse_utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """(unit -> slots a bundle, per bundle the slots used in the same order).

    Units are named by the table's own header: generations differ.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        head = next(i for i, line in enumerate(lines) if "," in line)
        units = [unit.strip() for unit in lines[head].split(",")]
        slots = [int(n) for n in lines[head + 1].split()]
        rows = [[int(n) for n in line.split()] for line in lines[head + 3 :]]
    except (StopIteration, IndexError, ValueError) as error:
        raise DumpError(f"the table of unit use cannot be read ({error})") from None
    if len(slots) != len(units) or any(len(row) != len(units) for row in rows):
        raise DumpError("the table of unit use has rows of another width than its header")
    return dict(zip(units, slots, strict=True)), rows


def parse_allocations(text: str) -> dict[str, int]:
    """VMEM bytes by tag: `input window 0`, `output window 0`, `scratch`, `internal scratch`, …"""
    vmem: Counter[str] = Counter()
    for size, tag in _ALLOCATION.findall(text):
        vmem[_short_tag(tag)] += int(size, 0)
    return dict(vmem)


def parse_spilled_bytes(report_html: str) -> dict[str, int]:
    """HLO instruction -> VMEM bytes of its register spills, from the compiler's VMEM report.

    Spills count towards the kernel's limit like any allocation and stand nowhere else.
    """
    data = _REPORT_DATA.search(report_html)
    if data is None:
        raise DumpError("the VMEM report has no data")
    try:
        report, _ = json.JSONDecoder().raw_decode(report_html, data.end())
        return {
            instruction: sum(
                allocation["size"]
                for block in breakdown["blocks"]
                for allocation in block["allocations"]
                if allocation.get("tag") == "SPILL"
            )
            for instruction, breakdown in report["hlo_breakdowns"].items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise DumpError(f"the VMEM report cannot be read ({error})") from None


def _short_tag(tag: str) -> str:
    window = re.match(r"(input|output) window allocation for operator (?:input|output) (\d+)", tag)
    if window:
        return f"{window[1]} window {window[2]}"
    if tag.startswith("scratch operand"):
        return "scratch"
    if tag.startswith("scoped memory"):
        return "scoped"
    return tag.split(". ")[0].removesuffix(".") or "untagged"


def mxu_rows(instruction: str, device: Device) -> int:
    """Rows one matmul instruction streams, counted at the bf16 rate.

    A vector register holds 8 sublanes of 32 bits: 8 rows of f32, 16 of bf16, 32 of 8-bit and 64 of
    4-bit values. A type the MXU takes at k times the bf16 rate (`Device.peak_ops_per_s`, JAX's own
    table) counts 1/k a row; one without a rate of its own streams at that of bf16. f32 takes one
    pass an instruction; the passes of a higher precision are instructions of their own.
    """
    kind = _MATMUL_TYPE.search(instruction)
    if kind is None:
        raise DumpError(f"unknown matmul instruction {instruction.removeprefix('= ')!r}")
    bits, dtype = _OPERANDS[kind[1]]
    rows = 8 * 32 // bits
    peak = device.peak(dtype)
    return rows if peak is None else round(rows * device.peak_ops_per_s["bfloat16"] / peak)


def _read_bundles(text: str, device: Device) -> Iterator[_Bundle]:
    bundle: _Bundle | None = None
    depth = 0
    rows: dict[str, int] = {}
    for line in text.splitlines():
        head = _BUNDLE.match(line)
        if head:
            if bundle is not None:
                yield bundle
            if head[1] or not head[2]:
                depth = head[1].count(">")
            bundle = _Bundle(depth=depth)
        if bundle is None:
            continue
        # A bundle may go on over several lines.
        if "TraceMe" in line:
            bundle.markers += [(end == "", start or end) for start, end in _MARKER.findall(line)]
        if "vmatmul" in line:
            for instruction in _MATMUL.findall(line):
                if instruction not in rows:
                    rows[instruction] = mxu_rows(instruction, device)
                bundle.mxu_rows += rows[instruction]
    if bundle is not None:
        yield bundle


def _owners(bundles: list[_Bundle]) -> list[tuple[str, int]]:
    """Per bundle the innermost scope, and the loop depth of its start.

    Every end closes the nearest open start of its name. The compiler may move or drop a marker.
    An end without a start is ignored; a start without an end holds until its loop is left or the
    scope around it ends, never to the end of the text.
    """
    closed = _closed_starts(bundles)
    open_scopes: list[tuple[str, int, bool]] = []  # (name, depth, has an end)
    owners: list[tuple[str, int]] = []
    for index, bundle in enumerate(bundles):
        while open_scopes and not open_scopes[-1][2] and bundle.depth < open_scopes[-1][1]:
            open_scopes.pop()
        owners.append(open_scopes[-1][:2] if open_scopes else (OUTSIDE, 0))
        for number, (starts, name) in enumerate(bundle.markers):
            if starts:
                open_scopes.append((name, bundle.depth, (index, number) in closed))
                continue
            match = [i for i, scope in enumerate(open_scopes) if scope[0] == name and scope[2]]
            if match:
                del open_scopes[match[-1] :]
    return owners


def _closed_starts(bundles: list[_Bundle]) -> set[tuple[int, int]]:
    """(bundle, marker) of every start that an end belongs to."""
    waiting: dict[str, list[tuple[int, int]]] = {}
    closed: set[tuple[int, int]] = set()
    for index, bundle in enumerate(bundles):
        for number, (starts, name) in enumerate(bundle.markers):
            if starts:
                waiting.setdefault(name, []).append((index, number))
            elif waiting.get(name):
                closed.add(waiting[name].pop())
    return closed


def _scope_use(
    units: list[str], use: list[list[int]], *, rows: list[int], depths: list[int],
    levels: list[int],
) -> ScopeUse:  # fmt: skip
    loops = []
    for level in range(1, max(levels, default=0) + 1):
        inside = [i for i, own in enumerate(levels) if own == level]
        loops.append(
            _total_use(
                units,
                [use[i] for i in inside],
                [rows[i] for i in inside],
                [depths[i] for i in inside],
            )
        )
    return replace(_total_use(units, use, rows, depths), loops=tuple(loops))


def _total_use(
    units: list[str], use: list[list[int]], rows: list[int], depths: list[int]
) -> ScopeUse:
    columns = [sum(column) for column in zip(*use, strict=True)] or [0] * len(units)
    total = dict(zip(units, columns, strict=True))
    return ScopeUse(
        bundles=len(use),
        mxu_rows=sum(rows),
        spill_loads=total.get("VLOAD:FILL", 0),
        spill_stores=total.get("VSTORE:SPILL", 0),
        units=total,
        loop_depth=Counter(depths).most_common(1)[0][0] if depths else 0,
    )
