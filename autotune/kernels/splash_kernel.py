"""The body of splash: one active block of the mask a step, following prefetched tables.

A step's action word says whether it opens and closes its query block, and which code it runs: the
unmasked step, or one of a few masked steps, which leave out the tiles that are empty in all of
their blocks and mask only those that are cut in some.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.kernels import anchored_softmax as softmax
from autotune.kernels.attention import LANES, MASK_VALUE
from autotune.kernels.flash_fwd_plan import Refs, SoftmaxPlan
from autotune.kernels.mask_table import EMPTY, FULL
from autotune.kernels.splash_codes import CODE_SHIFT, FIRST, LAST, MASKED, UNMASKED, Side, Tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class SplashPlan(SoftmaxPlan):
    """Adds what the mask needs.

    Attributes:
      sides: the bounds of a row that are compared with key positions.
      stored: whether partial blocks read their pattern; else they compare positions and bounds.
      segment_ids: whether run-time ids are compared as well.
      codes: code -> its tiles or halves of tiles, for the codes that occur.
      unseen: codes after which some row may not have seen any key yet.
    """

    sides: tuple[Side, ...]
    stored: bool
    segment_ids: bool
    codes: Mapping[int, Tiles]
    unseen: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplashRefs(Refs):
    """Adds bounds i32[sides, block_q], pattern i8[block_q, block_kv], q_ids i32[1, block_q], kv_ids
    i32[1, block_kv] and the scratch marks i32[sides + ids, block_q, 128]: bounds and ids per row.
    """

    bounds: Any
    pattern: Any
    q_ids: Any
    kv_ids: Any
    marks: Any


def scratch(plan: SplashPlan) -> dict[str, Any]:
    """`SplashRefs` field -> scratch operand, only those the plan uses."""
    marks = len(plan.sides) + plan.segment_ids
    per_row = {"marks": pltpu.VMEM((marks, plan.block_q, LANES), jnp.int32)} if marks else {}
    return {**softmax.scratch(plan), **per_row}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMask:
    """What the block of one step hides, for one code."""

    plan: SplashPlan
    refs: SplashRefs
    code: int
    q_block: Any
    kv_block: Any

    @property
    def _cells(self) -> Tiles:
        return self.plan.codes[self.code]

    def shows(self, rows: slice, keys: slice) -> tuple[bool, bool]:
        row_cells, key_cells = self._cells.shape
        height, width = self.plan.block_q // row_cells, self.plan.block_kv // key_cells
        part = self._cells[
            rows.start // height : -(-rows.stop // height),
            keys.start // width : -(-keys.stop // width),
        ]
        return bool((part != EMPTY).any()), bool((part != FULL).any())

    def mask(self, rows: Any, keys: Any) -> jax.Array | None:
        seen: list[jax.Array] = []
        if self.code == UNMASKED:
            pass
        elif self.plan.stored:
            seen.append(self.refs.pattern[rows, keys].astype(jnp.int32) != 0)
        else:
            seen.append(self._within_bounds(rows, keys))
        if self.plan.segment_ids:
            own = softmax.wide(self.refs.marks[len(self.plan.sides), rows, :], keys.size)
            seen.append(own == self.refs.kv_ids[:, keys])
        return functools.reduce(operator.and_, seen) if seen else None

    def _within_bounds(self, rows: Any, keys: Any) -> jax.Array:
        first = self.kv_block * self.plan.block_kv + keys.start
        position = first + lax.broadcasted_iota(jnp.int32, (rows.size, keys.size), 1)
        intervals: dict[int, jax.Array] = {}
        for n, side in enumerate(self.plan.sides):
            bound = softmax.wide(self.refs.marks[n, rows, :], keys.size)
            inside = position >= bound if side.first else position < bound
            known = intervals.get(side.interval)
            intervals[side.interval] = inside if known is None else known & inside
        seen: jax.Array = functools.reduce(operator.or_, intervals.values())
        return seen

    def exempt(self, rows: slice) -> jax.Array | None:
        reasons = []
        if self.plan.q_uneven:
            row = self.q_block * self.plan.block_q + rows.start
            row += lax.broadcasted_iota(jnp.int32, (self.plan.q_tile, LANES), 0)
            reasons.append(row >= self.plan.shape.q_len)
        if self.code in self.plan.unseen:
            reasons.append(self._saw_nothing(rows))
        return functools.reduce(operator.or_, reasons) if reasons else None

    def _saw_nothing(self, rows: slice) -> jax.Array:
        """bool[rows, 128]: no key up to the end of this block."""
        if self.plan.segment_ids:
            top = jnp.max(self.refs.top[rows, :], axis=1, keepdims=True)
            nothing: jax.Array = jnp.broadcast_to(top, (self.plan.q_tile, LANES)) == MASK_VALUE
        elif self.plan.sides[0].first:
            end = (self.kv_block + 1) * self.plan.block_kv
            nothing = self.refs.marks[0, rows, :] >= end
        else:
            nothing = self.refs.marks[0, rows, :] == 0
        return nothing

    def touched(self, rows_start: Any) -> jax.Array | None:
        tiles = self.plan.block_q // self.plan.q_tile
        visible = (self._cells != EMPTY).reshape(tiles, -1).any(axis=1)
        if visible.all():
            return None
        starts = (np.flatnonzero(visible) * self.plan.q_tile).tolist()
        any_of: jax.Array = functools.reduce(operator.or_, [rows_start == s for s in starts])
        return any_of


def kernel(tables: tuple[Any, ...], refs: SplashRefs, *, plan: SplashPlan) -> None:
    """One grid step (batch, q head, active block); `tables` are rows, columns and actions."""
    rows, cols, actions = tables[:3]
    step = pl.program_id(2)
    q_block, kv_block, action = rows[step], cols[step], actions[step]

    @pl.when(action & FIRST != 0)
    def _() -> None:
        with jax.named_scope("init"):
            softmax.start(plan, refs)
            marked = [refs.bounds[n : n + 1, :] for n in range(len(plan.sides))]
            marked += [refs.q_ids[...]] if plan.segment_ids else []
            for n, row in enumerate(marked):
                refs.marks[n] = jnp.broadcast_to(row, (LANES, plan.block_q)).T

    for code in plan.codes:
        block = BlockMask(plan=plan, refs=refs, code=code, q_block=q_block, kv_block=kv_block)
        pl.when(action >> CODE_SHIFT == code)(functools.partial(_step, plan, refs, block))

    @pl.when(action & LAST != 0)
    def _() -> None:
        with jax.named_scope("finalize"):
            softmax.finalize(plan, refs)


def scope_name(code: int) -> str:
    """`step`, `masked_step`, `masked_step_1`, …"""
    if code == UNMASKED:
        return "step"
    return "masked_step" if code == MASKED else f"masked_step_{code - MASKED}"


def _step(plan: SplashPlan, refs: SplashRefs, block: BlockMask) -> None:
    with jax.named_scope(scope_name(block.code)):
        softmax.attempt(plan, refs, block.kv_block, block)
    if plan.guarded:

        @pl.when(refs.bad[0] != 0)
        def _() -> None:
            with jax.named_scope("rescale_step"):
                softmax.rescale(plan, refs, block.kv_block, block)
