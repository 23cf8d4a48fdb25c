"""A kernel that is one `pltpu.emit_pipeline`: its inner grid and windows stand for the call's own.

JAX can keep such a pipeline as one equation, which holds a grid mapping like a `pallas_call`'s;
unfolded it would be loops of copies by computed indices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autotune.call_record import Dot
from autotune.traced.counts import Counts
from autotune.traced.dots import dots
from autotune.traced.jaxprs import inner_jaxprs, open_jaxpr
from autotune.traced.outer_code import Operand, as_array

PRIMITIVE = "emit_pipeline"
_FLAG = "jax_use_emit_pipeline_primitive"

# What emit_pipeline itself runs, by the scopes it names (jax 0.10.2 and 0.12.0.1).
_EVERY_STEP = ("ep_copy_in", "ep_wait_in", "ep_run_kernel", "ep_copy_out", "ep_wait_out")


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """While this lasts, traced pipelines stay one equation each."""
    config: Any = jax.config
    before = getattr(config, _FLAG)
    config.update(_FLAG, True)
    try:
        yield
    finally:
        config.update(_FLAG, before)


@dataclass(frozen=True, slots=True)
class Body:
    """The kernel of a pipeline without what it closes over, as `open_jaxpr` reads it."""

    jaxpr: Any
    consts: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class IndexMap:
    """An index map that takes the tables it closes over after the program ids, as a jaxpr reads."""

    invars: Sequence[Any]
    eqns: Sequence[Any]
    outvars: Sequence[Any]
    constvars: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class InnerBlock:
    """A block mapping whose index map takes the `tables` it closes over as its last arguments;
    the other fields as JAX names them."""

    array_aval: Any
    transformed_block_aval: Any
    block_shape: Any
    pipeline_mode: Any
    index_map_jaxpr: Any
    tables: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class InnerMapping:
    """A pipeline's grid mapping, with its blocks; fields as JAX names them."""

    num_inputs: int
    vmapped_dims: tuple[int, ...]
    block_mappings: tuple[InnerBlock, ...]


@dataclass(frozen=True, slots=True)
class InnerPipeline:
    """The pipeline of a kernel whose own grid is a single step.

    Attributes:
      grid, mapping, body: what a `pallas_call` has under the same names.
    """

    grid: tuple[int, ...]
    mapping: Any
    body: Body

    def dots(self) -> tuple[Dot, ...]:
        """The products, none of them known to keep its left block in registers.

        Under a `pallas_call`'s own pipeline the compiler keeps it and spills it; here it loads it
        again: no spill at 1024 cubed on tpu7x, a third of the block on v6e.
        """
        return tuple(dataclasses.replace(dot, loaded=False) for dot in dots(self.body))

    def count_own_scopes(self, counts: Counts) -> None:
        """Counts the scopes that the pipeline adds; the text has one region of each.

        A copy that a step leaves out is charged for its few scalar instructions all the same.
        """
        first, last = (np.zeros(self.grid, np.int64) for _ in range(2))
        first.flat[0] = last.flat[-1] = 1
        stages = max(2, *(buffers(block) for block in self.mapping.block_mappings))
        for scope in _EVERY_STEP:
            counts.enter(scope, 1, 1, True)
        for stage in range(stages - 1):
            counts.enter(f"ep_initialize_{stage}", first, 1, True)
        for scope in ("ep_finalize", *(f"ep_finalize_{lag}" for lag in range(stages))):
            counts.enter(scope, last, 1, True)


def buffers(block: Any) -> int:
    """Buffering levels of a block mapping."""
    return int(getattr(getattr(block, "pipeline_mode", None), "buffer_count", 2))


def inner_pipeline(
    body: Any, grid: tuple[int, ...], operands: Sequence[Operand] = ()
) -> InnerPipeline | None:
    """The pipeline that a kernel body consists of; None where it is not the whole of it.

    It must be the only equation, but for reads of its grid, under a grid of one step. Its grid and
    index maps may rest on tables in SMEM whose values are known.

    Args:
      operands: of the call, in the order of the body's arguments; functions giving their values.
    """
    eqns = open_jaxpr(body)[0].eqns
    if not eqns or eqns[-1].primitive.name != PRIMITIVE or math.prod(grid) != 1:
        return None
    *reads, eqn = eqns
    params = eqn.params
    shared = params["core_axis"] is not None or params["core_axis_name"] is not None
    if shared or params["no_pipelining"] or any(r.primitive.name != "get" for r in reads):
        return None
    mapping = params["grid_mapping"]
    values = _Values(open_jaxpr(body)[0].invars, operands, reads)
    blocks: list[InnerBlock] = []
    start = 0
    for block in mapping.block_mappings:
        index_map = open_jaxpr(block.index_map_jaxpr)[0]
        stop = start + len(index_map.constvars)
        tables = [values.of(atom) for atom in eqn.invars[start:stop]]
        if any(table is None for table in tables):
            return None
        blocks.append(_inner_block(block, index_map, tables))
        start = stop
    bounds = iter(eqn.invars[start : start + mapping.num_dynamic_grid_bounds])
    extents = [n if isinstance(n, int) else values.of(next(bounds)) for n in mapping.grid]
    if any(n is None for n in extents):
        return None
    own = InnerMapping(mapping.num_inputs, tuple(mapping.vmapped_dims), tuple(blocks))
    inner = open_jaxpr(params["body_jaxpr"])[0]
    return InnerPipeline(tuple(int(n) for n in extents), own, Body(inner))


def _inner_block(block: Any, index_map: Any, tables: Sequence[np.ndarray]) -> InnerBlock:
    arguments = [*index_map.invars, *index_map.constvars]
    return InnerBlock(
        block.array_aval,
        block.transformed_block_aval,
        block.block_shape,
        getattr(block, "pipeline_mode", None),
        IndexMap(arguments, index_map.eqns, index_map.outvars),
        tuple(tables),
    )


@dataclass(frozen=True, slots=True)
class _Values:
    """What is known of a kernel's arguments and of single numbers it reads from them."""

    arguments: Sequence[Any]
    operands: Sequence[Operand]
    reads: Sequence[Any]

    def of(self, atom: Any) -> Any:
        """A table or number; None where it is not known."""
        for argument, operand in zip(self.arguments, self.operands, strict=False):
            if argument is atom:
                return as_array(operand())
        for read in self.reads:
            if read.outvars[0] is atom:
                table = self.of(read.invars[0])
                return table.flat[0] if table is not None and table.size == 1 else None
        return None


def loses_pipeline(eqn: Any, operands: Sequence[Operand] = ()) -> bool:
    """Whether a `pallas_call` holds a kept pipeline that `inner_pipeline` cannot follow."""
    body, grid = eqn.params["jaxpr"], eqn.params["grid_mapping"].grid
    static = tuple(extent if isinstance(extent, int) else 0 for extent in grid)
    return _holds(body) and inner_pipeline(body, static, operands) is None


def _holds(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == PRIMITIVE or any(map(_holds, inner_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def closed_over(eqn: Any, ref: Any) -> Any:
    """The variable that stands for `ref` in a pipeline's body; None where it does not occur."""
    inside = open_jaxpr(eqn.params["body_jaxpr"])[0].constvars
    operands = eqn.invars[_offset(eqn) :]
    return next((v for v, atom in zip(inside, operands, strict=False) if atom is ref), None)


def _offset(eqn: Any) -> int:
    """Operands before those the body closes over: what index maps close over, and the grid's."""
    mapping = eqn.params["grid_mapping"]
    tables = sum(len(open_jaxpr(b.index_map_jaxpr)[0].constvars) for b in mapping.block_mappings)
    return tables + int(mapping.num_dynamic_grid_bounds)
