"""The body of flash_fwd: the anchored softmax over a dense grid, with the diagonal spelled out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autotune.kernels import anchored_softmax as softmax
from autotune.kernels.anchored_softmax import Masking
from autotune.kernels.attention import LANES
from autotune.kernels.flash_fwd_plan import Plan, Refs


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmasked:
    """A block in which every pair is visible, padding rows aside."""

    plan: Plan
    q_block: Any

    def shows(self, rows: slice, keys: slice) -> tuple[bool, bool]:
        return True, False

    def mask(self, rows: Any, keys: Any) -> jax.Array | None:
        return None

    def exempt(self, rows: slice) -> jax.Array | None:
        """Rows past the end, and under a causal mask those before the first key."""
        plan = self.plan
        dead_rows = plan.causal and plan.offset < 0
        if not dead_rows and not plan.q_uneven:
            return None
        row = self.q_block * plan.block_q + rows.start
        row += lax.broadcasted_iota(jnp.int32, (plan.q_tile, LANES), 0)
        past: jax.Array = row >= plan.shape.q_len
        return past | (row + plan.offset < 0) if dead_rows else past

    def touched(self, rows_start: Any) -> jax.Array | None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class CutByDiagonal(Unmasked):
    """A block the diagonal cuts; tiles on one side of a static position are exempt.

    `position` is kv start - q start - offset: row r of the block sees keys c <= r - position.
    """

    position: Any

    def shows(self, rows: slice, keys: slice) -> tuple[bool, bool]:
        if not isinstance(self.position, int):
            return True, True
        seen = rows.stop - 1 - keys.start >= self.position
        return seen, keys.stop - 1 - rows.start > -self.position

    def mask(self, rows: Any, keys: Any) -> jax.Array | None:
        tile = (rows.size, keys.size)
        row, column = (lax.broadcasted_iota(jnp.int32, tile, axis) for axis in (0, 1))
        seen: jax.Array = column - row <= rows.start - keys.start - self.position
        return seen

    def touched(self, rows_start: Any) -> jax.Array | None:
        seen: jax.Array = self.position <= rows_start + self.plan.q_tile - 1
        return seen


@dataclass(frozen=True, kw_only=True, slots=True)
class CutByEnd(Unmasked):
    """The last key block, where the keys end within it; as a mask, any block."""

    kv_block: Any

    @property
    def edge(self) -> int:
        return self.plan.shape.kv_len - (self.plan.kv_blocks - 1) * self.plan.block_kv

    def shows(self, rows: slice, keys: slice) -> tuple[bool, bool]:
        return keys.start < self.edge, keys.stop > self.edge

    def mask(self, rows: Any, keys: Any) -> jax.Array | None:
        first = self.kv_block * self.plan.block_kv + keys.start
        column = lax.broadcasted_iota(jnp.int32, (rows.size, keys.size), 1)
        seen: jax.Array = first + column < self.plan.shape.kv_len
        return seen


def kernel(refs: Refs, *, plan: Plan) -> None:
    """One grid step (batch, q head, q block, kv block)."""
    q_block, kv_block = pl.program_id(2), pl.program_id(3)
    position = kv_block * plan.block_kv - q_block * plan.block_q - plan.offset
    unmasked = Unmasked(plan=plan, q_block=q_block)

    def step(when: Any, scope: str, masking: Masking) -> None:
        @pl.when(when)
        def _() -> None:
            with jax.named_scope(scope):
                softmax.attempt(plan, refs, kv_block, masking)

    @pl.when(kv_block == 0)
    def _() -> None:
        with jax.named_scope("init"):
            softmax.start(plan, refs)

    if plan.causal:
        full = position + plan.block_kv <= 1
        dynamic: Masking = CutByDiagonal(plan=plan, q_block=q_block, position=position)
        step(full, "step", unmasked)
        patterns = plan.cut_patterns()
        if patterns is None:
            step((position < plan.block_q) & ~full, "masked_step", dynamic)
        for index, static in enumerate(patterns or []):
            scope = "masked_step" if index == 0 else f"masked_step_{index}"
            masking = CutByDiagonal(plan=plan, q_block=q_block, position=static)
            step(position == static, scope, masking)
    else:
        last = plan.kv_blocks - 1
        dynamic = unmasked
        if plan.kv_uneven:
            dynamic = CutByEnd(plan=plan, q_block=q_block, kv_block=kv_block)
            step(kv_block < last, "step", unmasked)
            step(kv_block == last, "masked_step", dynamic)
        else:
            with jax.named_scope("step"):
                softmax.attempt(plan, refs, kv_block, unmasked)

    def rescale_if_bad() -> None:
        @pl.when(refs.bad[0] != 0)
        def _() -> None:
            with jax.named_scope("rescale_step"):
                softmax.rescale(plan, refs, kv_block, dynamic)

    if plan.guarded and plan.causal:
        pl.when(position < plan.block_q)(rescale_if_bad)
    elif plan.guarded:
        rescale_if_bad()

    @pl.when(kv_block == plan.kv_blocks - 1)
    def _() -> None:
        with jax.named_scope("finalize"):
            softmax.finalize(plan, refs)
