"""Reads the `pallas_call`s of a traced function into the records of `call_record`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from autotune.call_record import PallasCall, Program, Scratch, StepClass, Window
from autotune.device import Device
from autotune.errors import KernelError
from autotune.traced import state
from autotune.traced.block_moves import block_axis, block_moves, tile_bytes
from autotune.traced.capture import capture
from autotune.traced.counts import Weight
from autotune.traced.dots import dots
from autotune.traced.inner_pipeline import inner_pipeline, kept, loses_pipeline
from autotune.traced.jaxprs import open_jaxpr
from autotune.traced.outer_code import FoundCall, as_array, find_calls
from autotune.traced.scalar_code import UNKNOWN, ScalarCode, Table, Value
from autotune.traced.scratch_use import is_carried
from autotune.traced.surroundings import Surroundings, surroundings
from autotune.traced.temporaries import temporaries_bytes
from autotune.traced.timeline import Operand, timeline

__all__ = [
    "PallasCall", "Program", "Scratch", "StepClass", "Window", "semantics_reason", "trace",
]  # fmt: skip

MAX_GRID_STEPS = 2**23
"""Some arrays have an element a grid step. A kernel of more steps takes seconds on the fixed cost
of a step alone."""
SEMANTICS = ("parallel", "arbitrary", "core_parallel", "subcore_parallel")


def trace(fn: Callable[..., Any], args: Sequence[Any], device: Device) -> Program:
    """Reads every `pallas_call` of `fn(*args)` without running it.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s.
      device: what a kernel that asks for the chip while it is traced is told.

    Raises:
      KernelError: `fn` raised, holds no `pallas_call`, or a call's grid or dimension semantics
        cannot be read.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        found, how, around = _found(fn, args, device)
    except KernelError:
        raise
    except Exception as error:  # whatever somebody's kernel raises
        raise KernelError(f"{name} raised {type(error).__name__}: {_one_line(error)}") from error
    if not found:
        raise KernelError(f"{name} holds no pallas_call: there is nothing to tune")
    return Program(calls=tuple(_read_call(call, device, how, around) for call in found))


def _found(
    fn: Callable[..., Any], args: Sequence[Any], device: Device
) -> tuple[list[FoundCall], dict[int, str], Surroundings]:
    """The calls, who named the parts of each kernel's body (`Marked.how`), and what is around them.

    Inner pipelines are kept as one equation where all of them can be read so.
    """
    with contextlib.suppress(Exception), kept():  # what is wrong without as well is told below
        marked = capture(fn, args, device).marked
        found = find_calls(marked.jaxpr)
        if not any(loses_pipeline(call.eqn, _body_operands(call)) for call in found):
            return found, marked.how, surroundings(marked.jaxpr)
    marked = capture(fn, args, device).marked
    return find_calls(marked.jaxpr), marked.how, surroundings(marked.jaxpr)


def _one_line(error: Exception) -> str:
    """An exception's text without JAX's notes below the rule, on one line of at most 300."""
    lines = [line.strip() for line in str(error).split("\n----", 1)[0].splitlines()]
    text = " ".join(line for line in lines if line) or "no message"
    return text if len(text) <= 300 else text[:297] + "..."


def _read_call(
    call: FoundCall, device: Device, how: Mapping[int, str], around: Surroundings
) -> PallasCall:
    params = call.eqn.params
    mapping, body, compiler = (
        params["grid_mapping"], params["jaxpr"], params["compiler_params"],
    )  # fmt: skip
    name = params.get("name") or body.debug_info.func_name
    if params.get("interpret"):
        raise KernelError(f"{name} is called with interpret=True: the TPU compiler never sees it")
    dynamic = mapping.num_dynamic_grid_bounds
    grid = _grid(name, mapping.grid, call.operands[:dynamic])
    _check_steps(name, grid)
    index_count = mapping.num_index_operands
    tables = [_table(value()) for value in call.operands[dynamic : dynamic + index_count]]
    scratch = _scratch(mapping, body, index_count)
    semantics = _semantics(name, compiler, grid, mapping.vmapped_dims)
    if (inner := inner_pipeline(body, grid, _body_operands(call))) is not None:
        grid, mapping, body, tables = inner.grid, inner.mapping, inner.body, []
        _check_steps(name, grid)
        semantics = None  # one core runs all of an inner pipeline
    axes = tuple(n for n in range(len(grid)) if n not in mapping.vmapped_dims)
    make = partial(ScalarCode, grid=grid or (1,), program_axes=axes)
    rest = [UNKNOWN] * (len(open_jaxpr(body)[0].invars) - len(tables))
    code, fixed = state.run(make, body, tables, rest)
    first = dynamic + index_count
    operands = [
        _operand(
            make(), block, _tables(block) if inner else fixed, n, mapping.num_inputs,
            parkable=around.parkable(
                call.eqn, first + n if n < mapping.num_inputs and not inner else None
            ),
        )
        for n, block in enumerate(mapping.block_mappings)
    ]  # fmt: skip
    if inner is not None:
        inner.count_own_scopes(code.counts)
    steps = math.prod(grid)
    scopes = {"": steps} | {
        scope: None if scope in code.counts.unsure else _total(count, grid)
        for scope, count in code.counts.scopes.items()
    }
    flops = {scope: _total(count, grid) for scope, count in code.counts.flops.items()}
    classes, fill, drain = timeline(code, operands, steps)
    return PallasCall(
        name=name, grid=grid, grid_steps=steps, dimension_semantics=semantics,
        vmem_limit_bytes=getattr(compiler, "vmem_limit_bytes", None),
        windows=tuple(operand.window for operand in operands),
        scratch=scratch, temporaries_bytes=0 if inner else temporaries_bytes(body, device),
        scopes=scopes, scope_flops=flops, executed_flops=sum(flops.values()),
        classes=classes, fill_bytes=fill, drain_bytes=drain,
        parallel_splits=_splits(semantics, grid, device),
        core_steps=_core_steps(semantics, grid, device), repeats=call.repeats,
        scope_regions=dict(code.counts.regions),
        loops={
            scope: tuple((_total(trips, grid), copies) for trips, copies in levels)
            for scope, levels in code.counts.loops.items()
        },
        hand_copies=_total(code.counts.hand_copies, grid),
        hand_bytes=_total(code.counts.hand_bytes, grid),
        revisited_axes=_revisited(operands, grid, axes),
        branches=_branches(code, grid), dots=inner.dots() if inner else dots(body),
        marking=how[id(params["jaxpr"])],
    )  # fmt: skip


def _tables(block: Any) -> list[Value]:
    """What the index map of an inner pipeline's block takes after the program ids."""
    return [Table(values) for values in block.tables]


def _body_operands(call: FoundCall) -> Sequence[Callable[[], Any]]:
    return call.operands[call.eqn.params["grid_mapping"].num_dynamic_grid_bounds :]


def _branches(code: ScalarCode, grid: tuple[int, ...]) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(None if weight is None else _total(weight, grid) for weight in weights)
        for weights in code.counts.branches.values()
    )


def _grid(
    name: str, extents: Sequence[Any], bounds: Sequence[Callable[[], Any]]
) -> tuple[int, ...]:
    known = iter(bounds)
    grid = []
    for extent in extents:
        value = extent if isinstance(extent, int | np.integer) else as_array(next(known)())
        if value is None:
            raise KernelError(f"the grid of {name} depends on run-time data: {tuple(extents)}")
        if int(value) < 1:
            raise KernelError(f"the grid of {name} has an axis of {int(value)}: {tuple(extents)}")
        grid.append(int(value))
    return tuple(grid)


def _check_steps(name: str, grid: tuple[int, ...]) -> None:
    if (steps := math.prod(grid)) > MAX_GRID_STEPS:
        raise KernelError(
            f"the grid of {name} has {steps} steps; at most {MAX_GRID_STEPS} are followed"
        )


def _table(value: Any) -> Value:
    array = as_array(value)
    return UNKNOWN if array is None else Table(array)


def _memory(space: Any) -> str:
    """`vmem`, `smem` or `hbm`, of a Ref's memory space (default: VMEM, any: left in HBM)."""
    text = "vmem" if space is None else str(getattr(space, "value", space))
    return {"default": "vmem", "any": "hbm", "device": "vmem"}.get(text, text)


def _bits(dtype: Any) -> int:
    name = str(dtype)
    if name.startswith(("int4", "uint4", "float4")):
        return 4
    if name.startswith(("int2", "uint2")):
        return 2
    return int(getattr(dtype, "itemsize", 0)) * 8


def _operand(
    code: ScalarCode, block: Any, tables: Sequence[Value], number: int, inputs: int,
    *, parkable: bool,
) -> Operand:  # fmt: skip
    role, n = ("input", number) if number < inputs else ("output", number - inputs)
    array, ref = block.array_aval, block.transformed_block_aval
    memory, bits = _memory(ref.memory_space), _bits(array.dtype)
    axes = [block_axis(dim) for dim in block.block_shape]
    shape = tuple(axis.size for axis in axes)
    moves = None
    copies = copied = moved = size = 0
    buffers = 1
    if memory in ("vmem", "smem"):
        moves = block_moves(code, block.index_map_jaxpr, tables, axes, array.shape, bits)
        size = tile_bytes(shape, bits)
        happens = moves.changed if role == "input" else moves.last_of_run
        copies = int(np.count_nonzero(happens))
        copied, moved = (_sum(happens, n) * bits // 8 for n in (moves.elements, moves.tiled))
        mode = getattr(block, "pipeline_mode", None)
        buffers = 1 if moves.constant else getattr(mode, "buffer_count", 2)
    window = Window(
        role=role, name=f"{role} {n}", parkable=parkable,
        array_shape=tuple(array.shape), block_shape=shape,
        dtype=str(array.dtype), bits=bits, memory=memory, buffers=buffers, copies=copies,
        bytes_copied=copied, window_bytes=size, bytes_moved=moved,
        exact=moves is None or moves.exact,
    )  # fmt: skip
    return Operand(window, moves)


def _sum(happens: np.ndarray, elements: np.ndarray | int) -> int:
    if isinstance(elements, int):
        return int(np.count_nonzero(happens)) * elements
    return int(elements[happens].sum())


def _scratch(mapping: Any, body: Any, index_count: int) -> tuple[Scratch, ...]:
    """Scratch operands, and the prefetched tables, which live in SMEM for the whole call."""
    tables = [
        Scratch(
            name=f"prefetch {n}", shape=tuple(aval.shape), dtype=str(aval.dtype), memory="smem",
            bytes=tile_bytes(aval.shape, _bits(aval.dtype)), prefetched=True,
        )
        for n, aval in enumerate(var.aval for var in body.invars[:index_count])
    ]  # fmt: skip
    own = []
    operands = body.invars[len(body.invars) - len(mapping.scratch_avals) :]
    for n, (aval, var) in enumerate(zip(mapping.scratch_avals, operands, strict=True)):
        memory = _memory(aval.memory_space)
        held = memory in ("vmem", "smem")  # semaphores are no memory of ours
        own.append(
            Scratch(
                name=f"scratch {n}", shape=tuple(aval.shape), dtype=str(aval.dtype), memory=memory,
                bytes=tile_bytes(aval.shape, _bits(aval.dtype)) if held else 0,
                carried=is_carried(body, var),
            )
        )  # fmt: skip
    return (*tables, *own)


def _semantics(
    name: str, compiler: Any, grid: tuple[int, ...], vmapped: Sequence[int]
) -> tuple[str, ...] | None:
    given = getattr(compiler, "dimension_semantics", None)
    if given is None:
        return None
    words = [str(getattr(word, "value", word)).lower() for word in given]
    for word in words:
        if word not in SEMANTICS:
            raise KernelError(
                f"dimension_semantics of {name}: {word!r} is unknown; use {', '.join(SEMANTICS)}"
            )
    if len(words) != len(grid) - len(vmapped):
        raise KernelError(
            f"dimension_semantics of {name} has {len(words)} entries for a grid of"
            f" {len(grid) - len(vmapped)} axes: {tuple(words)}"
        )
    own = iter(words)
    return tuple("parallel" if n in vmapped else next(own) for n in range(len(grid)))


def semantics_reason(call: PallasCall) -> str | None:
    """Why the call's dimension semantics are unsafe, or None.

    Along an axis where an output block is revisited, steps build on each other (a reduction, a
    scratch carried on); on a chip whose cores share a `parallel` axis they would race.
    """
    for axis in sorted(call.revisited_axes):
        word = (call.dimension_semantics or ("arbitrary",) * len(call.grid))[axis]
        if word != "arbitrary":
            return f"axis {axis} of {call.name} is a reduction and is marked {word}"
    return None


def _revisited(
    operands: Sequence[Operand], grid: Sequence[int], own: Sequence[int]
) -> tuple[int, ...]:
    """Grid axes along which steps build on an output block, by all outputs that are results.

    An output revisited along every axis the kernel knows of (`own`: not those of `vmap`) is
    scratch in disguise, as JAX's splash has it, unless the call has no other output.
    """
    outputs = [o.moves.revisited for o in operands if o.window.role == "output" and o.moves]
    everywhere = {axis for axis in own if grid[axis] > 1}
    results = [axes for axes in outputs if not everywhere <= axes] or outputs
    return tuple(sorted(set().union(*results)))


def _shared(semantics: Sequence[str] | None, grid: Sequence[int]) -> int:
    """Grid points that cores may share out: the product of the parallel axes."""
    pairs = zip(semantics or (), grid, strict=False)
    return math.prod(n for word, n in pairs if word.endswith("parallel"))


def _splits(semantics: Sequence[str] | None, grid: Sequence[int], device: Device) -> int:
    return device.cores if _shared(semantics, grid) > 1 else 1


def _core_steps(semantics: Sequence[str] | None, grid: Sequence[int], device: Device) -> int:
    shared = _shared(semantics, grid)
    return -(-shared // device.cores) * (math.prod(grid) // max(1, shared))


def _total(count: Weight, grid: tuple[int, ...]) -> int:
    steps = math.prod(grid)
    if isinstance(count, int):
        return count * steps
    return int(count.sum(dtype=object)) * (steps // int(count.size))
