"""A kernel that is one `pltpu.emit_pipeline`: its inner grid and windows stand for the call's own.

JAX can keep such a pipeline as one equation, which holds a grid mapping like a `pallas_call`'s;
unfolded it would be loops of copies by computed indices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autotune.call_record import Dot
from autotune.traced.counts import Counts
from autotune.traced.dots import dots
from autotune.traced.jaxprs import inner_jaxprs, open_jaxpr

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


def inner_pipeline(body: Any, grid: tuple[int, ...]) -> InnerPipeline | None:
    """The pipeline that a kernel body consists of; None where it is not the whole of it.

    It must be the only equation, under a grid of one step, with a grid and index maps that depend
    on nothing from outside.
    """
    eqns = open_jaxpr(body)[0].eqns
    if len(eqns) != 1 or eqns[0].primitive.name != PRIMITIVE or math.prod(grid) != 1:
        return None
    params = eqns[0].params
    mapping = params["grid_mapping"]
    shared = params["core_axis"] is not None or params["core_axis_name"] is not None
    if shared or params["no_pipelining"] or mapping.num_dynamic_grid_bounds or _offset(eqns[0]):
        return None
    inner = open_jaxpr(params["body_jaxpr"])[0]
    return InnerPipeline(tuple(map(int, mapping.grid)), mapping, Body(inner))


def loses_pipeline(eqn: Any) -> bool:
    """Whether a `pallas_call` holds a kept pipeline that `inner_pipeline` cannot follow."""
    body, grid = eqn.params["jaxpr"], eqn.params["grid_mapping"].grid
    static = tuple(extent if isinstance(extent, int) else 0 for extent in grid)
    return _holds(body) and inner_pipeline(body, static) is None


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
    """Operands before those the body closes over: what index maps close over."""
    blocks = eqn.params["grid_mapping"].block_mappings
    return sum(len(open_jaxpr(block.index_map_jaxpr)[1]) for block in blocks)
