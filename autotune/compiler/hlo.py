"""What XLA runs around the kernels, read from the text of a compiled, scheduled HLO module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.evidence import XlaOp

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_BITS = re.compile(r"(?:bf|f|s|u|c)(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:body|to_apply|calls|\w+_computations?)=(?:%([\w.\-]+)|\{([^}]*)\})")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')

NO_WORK = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "domain",
})  # fmt: skip
"""Opcodes that move and compute nothing."""
KERNEL = "tpu_custom_call"
NO_WORK_TARGETS = frozenset({KERNEL, "ConcatBitcast", "AllocateBuffer", "Sharding"})
"""Custom calls that are the kernels themselves, or names for memory."""
_PICKS = frozenset({"slice", "dynamic-slice", "gather"})
_VMEM = "S(1)"


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a value in its layout, by where it lies."""

    hbm: int = 0
    vmem: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.hbm + other.hbm, self.vmem + other.vmem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      type_text: the result's shape, or tuple of shapes, with layouts.
      operands: names of the instructions it uses.
      rest: its attributes.
    """

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations it names."""
        found = (one or several for one, several in _CALLED.findall(self.rest))
        return tuple(part.strip().lstrip("%") for text in found for part in text.split(","))


def computation_lines(text: str) -> tuple[str, dict[str, list[str]]]:
    """(entry computation, computation -> its lines) of a module."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None:
            current.append(line)
    return entry, bodies


def xla_ops(text: str) -> tuple[XlaOp, ...]:
    """Every instruction of a module that moves or computes data, kernels left out.

    Loops whose trip count XLA does not know are entered once; of a conditional, every branch.
    """
    entry, bodies = computation_lines(text)
    module = {name: _instructions(lines) for name, lines in bodies.items()}
    return tuple(_ops(module.get(entry, ()), module, 1))


def kernel_shapes(text: str) -> dict[str, tuple[str, ...]]:
    """Kernel instruction -> its result's, then its operands' shapes, with layouts and memories.

    The compiler compiles equal kernels once: instructions of one function with the same shapes.
    """
    found = {}
    for lines in computation_lines(text)[1].values():
        body = _instructions(lines)
        types = {line.name: line.type_text for line in body}
        for line in body:
            target = _TARGET.search(line.rest)
            if line.opcode == "custom-call" and target and target[1] == KERNEL:
                operands = (types.get(name, "") for name in line.operands)
                found[line.name] = (line.type_text, *operands)
    return found


def _ops(
    body: Sequence[Instruction], module: Mapping[str, Sequence[Instruction]], repeats: int
) -> Iterator[XlaOp]:
    types = {line.name: line.type_text for line in body}
    for line in body:
        if line.opcode in ("while", "conditional", "call"):
            turns = repeats * _trips(line, body, module) if line.opcode == "while" else repeats
            for name in line.called:
                yield from _ops(module.get(name, ()), module, turns)
        elif _works(line):
            op = _op(line, body, types, module, repeats)
            if op.bytes_read or op.bytes_written or op.vmem_bytes or op.estimated_cycles:
                yield op


def _trips(
    loop: Instruction, around: Sequence[Instruction], module: Mapping[str, Sequence[Instruction]]
) -> int:
    """Turns of a while loop: XLA's own figure, or those of a counter; 1 where neither is known.

    A counter starts at a constant, grows by one and is compared with a constant.
    """
    if told := _TRIPS.search(loop.rest):
        return int(told[1])
    condition = re.search(r"condition=%([\w.\-]+)", loop.rest)
    test = {i.name: i for i in module.get(condition[1] if condition else "", ())}
    root = next((i for i in test.values() if i.root and i.opcode == "compare"), None)
    if root is None or "direction=LT" not in root.rest:
        return 1
    counter, bound = (test.get(name) for name in root.operands)
    place = re.search(r"index=(\d+)", counter.rest) if counter else None
    body = {i.name: i for i in module.get(loop.called[0], ())}
    result = next((i for i in body.values() if i.root), None)
    start = next((i for i in around if i.name in loop.operands), None)
    if place is None or bound is None or result is None or start is None:
        return 1
    number = int(place[1])
    outer = {i.name: i for i in around}
    first = _constant(_element(start, number, outer))
    last = _constant(bound)
    grows = _element(result, number, body)
    steps = [_constant(body.get(name)) for name in grows.operands] if grows else []
    by_one = grows is not None and grows.opcode == "add" and 1 in steps
    return max(1, last - first) if by_one and first is not None and last is not None else 1


def _element(
    value: Instruction, number: int, lines: Mapping[str, Instruction]
) -> Instruction | None:
    known = value.opcode == "tuple" and number < len(value.operands)
    found = lines.get(value.operands[number]) if known else None
    while found is not None and found.opcode == "copy":
        found = lines.get(found.operands[0])
    return found


def _constant(line: Instruction | None) -> int | None:
    text = line.rest.partition(")")[0] if line and line.opcode == "constant" else ""
    return int(text) if text.lstrip("-").isdigit() else None


def _works(line: Instruction) -> bool:
    if line.opcode in NO_WORK or line.opcode.endswith(("-done", "-update")):
        return False
    target = _TARGET.search(line.rest)
    return line.opcode != "custom-call" or target is None or target[1] not in NO_WORK_TARGETS


def _op(
    line: Instruction, body: Sequence[Instruction], types: Mapping[str, str],
    module: Mapping[str, Sequence[Instruction]], repeats: int,
) -> XlaOp:  # fmt: skip
    started = line.opcode.endswith("-start")
    opcode = line.opcode.removesuffix("-start")
    result = line.type_text
    if started:  # the start's own type names operands and semaphores too
        done = (
            d.type_text for d in body if d.opcode == f"{opcode}-done" and line.name in d.operands
        )
        result = next(done, line.type_text)
    inner = next((module[name] for name in line.called if name in module), ())
    whole = inner if opcode in ("fusion", "async") else ()
    read = sum(
        (_read(line, n, types.get(name, ""), result, whole) for n, name in _data(line, opcode)),
        Size(),
    )
    written = _written(line, types, result, whole)
    cycles = [int(n) for n in _CYCLES.findall(line.rest)]
    known = bool(cycles) and 0 < cycles[0] < 2**62
    return XlaOp(
        name=line.name, opcode=opcode, bytes_read=read.hbm, bytes_written=written.hbm,
        estimated_cycles=cycles[0] if known else None, repeats=repeats,
        vmem_bytes=read.vmem + written.vmem, asynchronous=started,
    )  # fmt: skip


def _data(line: Instruction, opcode: str) -> Iterator[tuple[int, str]]:
    """Positions and names of the operands that are read: what an update replaces is not."""
    for number, name in enumerate(line.operands):
        if not (opcode == "dynamic-update-slice" and number == 0):
            yield number, name


def _read(
    line: Instruction, number: int, type_text: str, result: str, inner: Sequence[Instruction]
) -> Size:
    """Bytes read of one operand: of one that is only picked from, what is picked."""
    opcode = line.opcode.removesuffix("-start")
    if opcode in _PICKS and number == 0:
        return _like(size(result), size(type_text))
    parameter = next(
        (i.name for i in inner if i.opcode == "parameter" and i.rest.startswith(f"{number})")), None
    )
    users = [i for i in inner if parameter in i.operands] if parameter else []
    picked = Size()
    for user in users:
        first_only = user.operands[0] == parameter and parameter not in user.operands[1:]
        if user.opcode in _PICKS and first_only:
            picked += _like(size(user.type_text), size(type_text))
        elif not (user.opcode == "dynamic-update-slice" and first_only):
            return size(type_text)
    return picked if users else size(type_text)


def _written(
    line: Instruction, types: Mapping[str, str], result: str, inner: Sequence[Instruction]
) -> Size:
    """Bytes written: an update in place writes what it replaces."""
    root, known = line, types
    if inner:
        root = next((i for i in inner if i.root), line)
        known = {i.name: i.type_text for i in inner}
    if root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
        return _like(size(known.get(root.operands[1], "")), size(result))
    return size(result)


def _like(part: Size, whole: Size) -> Size:
    """`part`, in the memory that the value it is a part of lies in."""
    total = part.hbm + part.vmem
    return Size(vmem=total) if whole.vmem and not whole.hbm else Size(hbm=total)


def size(type_text: str) -> Size:
    """Bytes of a shape, or of all shapes of a tuple, each in its tiles.

    A layout like `{1,0:T(8,128)(2,1)S(1)}` lists axes from the minor one on, the tile of the minor
    axes, its packing, and the memory: `S(1)` is VMEM, none is HBM, others hold no data.
    """
    total = Size()
    for dtype, extents, order, tiling in _SHAPE.findall(type_text):
        bits = 8 if dtype == "pred" else int(found[1]) if (found := _BITS.match(dtype)) else 0
        dims = [int(n.lstrip("<=")) for n in extents.split(",") if n]
        minor_first = [int(n) for n in order.split(",") if n]
        if len(minor_first) == len(dims):
            dims = [dims[axis] for axis in reversed(minor_first)]
        bytes_ = math.prod(_padded(dims, tiling)) * bits // 8
        space = re.search(r"S\((\d+)\)", tiling)
        if space is None:
            total += Size(hbm=bytes_)
        elif space[0] == _VMEM:
            total += Size(vmem=bytes_)
    return total


def _padded(dims: Sequence[int], tiling: str) -> list[int]:
    tile = _TILE.search(tiling)
    if tile is None:
        return list(dims)
    wanted = [1 if n == "*" else int(n) for n in tile[1].split(",")]
    padded = [1] * (len(wanted) - len(dims)) + list(dims)
    for place, multiple in enumerate(wanted, len(padded) - len(wanted)):
        padded[place] = -(-padded[place] // multiple) * multiple
    return padded


def _instructions(lines: Sequence[str]) -> tuple[Instruction, ...]:
    whole: list[str] = []
    for line in lines:
        if _INSTRUCTION.match(line):
            whole.append(line)
        elif whole:  # an attribute may hold line breaks
            whole[-1] += line
    return tuple(found for line in whole if (found := _instruction(line)) is not None)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close - 1]
    # A parameter's number, or a constant's value, stands where others have operands.
    own = opcode[1] in ("parameter", "constant")
    rest = f"{inside}){line[close:]}" if own else line[close:]
    return Instruction(
        name=head[2], opcode=opcode[1], type_text=line[start:end],
        operands=tuple(_OPERAND.findall(inside)), rest=rest, root=bool(head[1]),
    )  # fmt: skip


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)
