"""The body of flash_fwd: an online softmax that rescales only when it has to.

Any per-row shift gives the exact softmax as long as the row's sum l stays well inside f32's range.
So instead of the running maximum, whose reduction stands between the two matrix products, each row
subtracts an anchor, 0 at first, and a step ends with a check that every l is within [2^-64, 2^64].
If one is not, the step is done again from a backup of the accumulator, this time with the running
maximum, which becomes the row's anchor (scope `rescale_step`; needs logits beyond ±44 nats). l is
summed by the MXU, as columns of ones beside V, wherever V leaves part of the MXU's width idle.

Measured, v6e, bf16, 2048 x 2048 block, head_dim 128, MXU limit 8192 cycles: running maximum
12,843 to 14,857 with scores transposed and 12,548 without; anchored, 512 x 512 tiles, 8,358.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autotune.kernels.attention import LANES, MASK_VALUE, round_up
from autotune.kernels.flash_fwd_plan import Plan, Refs

CONTRACT_LAST = (((1,), (1,)), ((), ()))
SUM_RANGE = (2.0**-64, 2.0**64)


Mask = Callable[[], jax.Array] | None
"""What makes a [q_tile, kv_tile] bool mask; None where every pair is visible."""


def _precision(dtype: Any) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _wide(column: jax.Array, width: int) -> jax.Array:
    """[rows, 128] with equal lanes, repeated to [rows, width]: no data moves."""
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _logits(plan: Plan, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled and capped logits [q_tile, kv_tile] in `plan.unit`s.

    The scale is applied in f32: folded into a bf16 q it would cost up to 2^-9 of every logit.
    """
    s = lax.dot_general(
        q, k, CONTRACT_LAST, precision=_precision(q.dtype), preferred_element_type=jnp.float32
    )
    if plan.soft_cap is not None:
        cap = plan.soft_cap
        return jnp.tanh(s * (plan.scale / cap)) * (cap * plan.unit)
    return s * (plan.scale * plan.unit)


def _values(plan: Plan, v: jax.Array, valid: jax.Array | None) -> jax.Array:
    """V [kv_tile, acc_width]: zero in rows that are not `valid`, ones in the spare columns."""
    if valid is not None:
        v = jnp.where(valid, v, jnp.zeros((), v.dtype))
    spare = plan.acc_width - v.shape[1]
    if not plan.spare_columns:
        return v
    return jnp.concatenate([v, jnp.ones((v.shape[0], spare), v.dtype)], axis=1)


def _weighted(p: jax.Array, v: jax.Array) -> jax.Array:
    product: jax.Array = jnp.dot(
        p.astype(v.dtype), v, precision=_precision(v.dtype), preferred_element_type=jnp.float32
    )
    return product


def _fold(x: jax.Array, combine: Callable[..., jax.Array]) -> jax.Array:
    """[rows, n·128] combined to [rows, 128], lane by lane."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    return functools.reduce(combine, parts)


def _add_tile(
    plan: Plan, refs: Refs, rows: slice, keys: slice, mask: Mask, valid: Any, *, first: bool
) -> None:
    """Adds one tile to the accumulator; the row tile's `first` one also backs it up."""
    x = _logits(plan, refs.q[rows, :], refs.k[keys, :])
    if mask is not None:
        x = jnp.where(mask(), x, MASK_VALUE)
    if plan.residuals:
        refs.top[rows, :] = jnp.maximum(refs.top[rows, :], _fold(x, jnp.maximum))
    exp = jnp.exp2 if plan.use_exp2 else jnp.exp
    if plan.shift is not None:
        p = exp(x - plan.shift * plan.unit)
    elif plan.guarded:
        p = exp(x - _wide(refs.anchor[rows, :], x.shape[1]))
    else:
        p = exp(x)
    old = refs.acc[rows, :]
    if plan.guarded and first:
        refs.backup[rows, :] = old
    refs.acc[rows, :] = old + _weighted(p, _values(plan, refs.v[keys, :], valid))
    if not plan.spare_columns:
        total = refs.total[rows, :]
        if plan.guarded and first:
            refs.total_backup[rows, :] = total
        refs.total[rows, :] = total + _fold(p, jnp.add)


def _row_sums(plan: Plan, acc: Any, total: Any, rows: Any) -> jax.Array:
    """l of the rows as [rows, 128], all lanes equal."""
    width = plan.acc_width
    if plan.spare_columns and width - plan.shape.head_dim_v >= LANES:
        equal: jax.Array = acc[rows, width - LANES : width]
        return equal
    if plan.spare_columns:
        column = acc[rows, width - 1 : width]
    else:
        column = jnp.sum(total[rows, :], axis=1, keepdims=True)
    return jnp.broadcast_to(column, (column.shape[0], LANES))


def _out_of_range(plan: Plan, refs: Refs, rows: slice, q_block: Any) -> jax.Array:
    """1.0 where any row that counts has an l outside SUM_RANGE or NaN, else 0.0."""
    total = _row_sums(plan, refs.acc, refs.total, rows)
    low, high = SUM_RANGE
    good = (total >= low) & (total <= high)
    dead_rows = plan.causal and plan.offset < 0
    if dead_rows or plan.shape.q_len % plan.block_q:
        row = q_block * plan.block_q + rows.start + lax.broadcasted_iota(jnp.int32, total.shape, 0)
        good = good | (row >= plan.shape.q_len) | (row + plan.offset < 0 if dead_rows else False)
    return jnp.max(jnp.where(good, 0.0, 1.0))


def _tiles(plan: Plan) -> Iterator[tuple[slice, list[slice]]]:
    """Row tiles, each with the key tiles of the block."""
    keys = [slice(b, b + plan.kv_tile) for b in range(0, plan.block_kv, plan.kv_tile)]
    for a in range(0, plan.block_q, plan.q_tile):
        yield slice(a, a + plan.q_tile), keys


def _attempt(
    plan: Plan,
    refs: Refs,
    q_block: Any,
    masks: Callable[[slice, slice], tuple[bool, Mask, Any]],
) -> None:
    """One block with the anchors as they are; leaves the verdict in `bad`.

    `masks` gives for a tile whether it has any visible pair, its mask, and the valid rows of V.
    """
    verdicts = []
    for rows, all_keys in _tiles(plan):
        first = True
        for keys in all_keys:
            visible, mask, valid = masks(rows, keys)
            if visible:
                _add_tile(plan, refs, rows, keys, mask, valid, first=first)
                first = False
        if plan.guarded and not first:
            verdicts.append(_out_of_range(plan, refs, rows, q_block))
    if plan.guarded:
        worst = functools.reduce(jnp.maximum, verdicts)
        refs.bad[0] = jnp.where(worst > 0, 1, 0)


def _causal_masks(plan: Plan, position: Any, kv_block: Any) -> Callable[..., Any]:
    """Masks of a block the diagonal cuts; tiles on one side of a static `position` are exempt."""

    def masks(rows: slice, keys: slice) -> tuple[bool, Mask, Any]:
        reach = rows.start - keys.start - position  # row r sees keys c <= r + reach
        if isinstance(position, int):
            if plan.q_tile - 1 + reach < 0:
                return False, None, None
            if plan.kv_tile - 1 <= reach:
                return True, None, None
        return True, lambda: _columns_minus_rows(plan) <= reach, _valid(plan, kv_block, keys.start)

    return masks


def _columns_minus_rows(plan: Plan) -> jax.Array:
    tile = (plan.q_tile, plan.kv_tile)
    return lax.broadcasted_iota(jnp.int32, tile, 1) - lax.broadcasted_iota(jnp.int32, tile, 0)


def _valid(plan: Plan, kv_block: Any, start: Any) -> Any:
    """[kv_tile, 1] bools: keys before the end of the array; None where all are."""
    if not plan.kv_uneven:
        return None
    first = kv_block * plan.block_kv + start
    return first + lax.broadcasted_iota(jnp.int32, (plan.kv_tile, 1), 0) < plan.shape.kv_len


def _edge_masks(plan: Plan) -> Callable[..., Any]:
    """Masks of the last block where the keys end within it."""
    last = plan.kv_blocks - 1
    edge = plan.shape.kv_len - last * plan.block_kv

    def masks(rows: slice, keys: slice) -> tuple[bool, Mask, Any]:
        if keys.start >= edge:
            return False, None, None
        if keys.stop <= edge:
            return True, None, None
        tile = (plan.q_tile, plan.kv_tile)
        column = lambda: lax.broadcasted_iota(jnp.int32, tile, 1) < edge - keys.start
        return True, column, _valid(plan, last, keys.start)

    return masks


def _rescale(plan: Plan, refs: Refs, q_block: Any, kv_block: Any) -> None:
    """The block again, from the backup, with the running maximum as the anchor."""
    exp = jnp.exp2 if plan.use_exp2 else jnp.exp
    position = kv_block * plan.block_kv - q_block * plan.block_q - plan.offset

    def key_tile(keys_start: Any, rows_start: Any) -> None:
        rows, keys = pl.ds(rows_start, plan.q_tile), pl.ds(keys_start, plan.kv_tile)
        x = _logits(plan, refs.q[rows, :], refs.k[keys, :])
        if plan.causal:
            reach = rows_start - keys_start - position
            x = jnp.where(_columns_minus_rows(plan) <= reach, x, MASK_VALUE)
        elif plan.kv_uneven:
            column = kv_block * plan.block_kv + keys_start
            column += lax.broadcasted_iota(jnp.int32, x.shape, 1)
            x = jnp.where(column < plan.shape.kv_len, x, MASK_VALUE)
        old = refs.anchor[rows, :]
        new = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
        usable = jnp.where(new > MASK_VALUE, new, 0.0)  # nothing visible yet: any finite anchor
        alpha = exp(old - usable)
        p = exp(x - _wide(usable, x.shape[1]))
        v = _values(plan, refs.v[keys, :], _valid(plan, kv_block, keys_start))
        acc = refs.acc[rows, :]
        refs.acc[rows, :] = acc * _wide(alpha, acc.shape[1]) + _weighted(p, v)
        if not plan.spare_columns:
            refs.total[rows, :] = refs.total[rows, :] * alpha + _fold(p, jnp.add)
        refs.anchor[rows, :] = new

    def row_tile(rows_start: Any) -> None:
        rows = pl.ds(rows_start, plan.q_tile)
        refs.acc[rows, :] = refs.backup[rows, :]
        if not plan.spare_columns:
            refs.total[rows, :] = refs.total_backup[rows, :]
        sums = _row_sums(plan, refs.backup, refs.total_backup, rows)
        # A row with no sum yet has no maximum yet: its anchor was only the starting 0.
        refs.anchor[rows, :] = jnp.where(sums > 0, refs.anchor[rows, :], MASK_VALUE)

        @pl.loop(0, plan.block_kv, step=plan.kv_tile)
        def _(keys_start: Any) -> None:
            key_tile(keys_start, rows_start)

        anchor = refs.anchor[rows, :]
        refs.anchor[rows, :] = jnp.where(anchor > MASK_VALUE, anchor, 0.0)

    @pl.loop(0, plan.block_q, step=plan.q_tile)
    def _(rows_start: Any) -> None:
        if plan.causal:  # rows that see nothing of this block were left alone, backup included
            pl.when(position <= rows_start + plan.q_tile - 1)(lambda: row_tile(rows_start))
        else:
            row_tile(rows_start)


def _finalize(plan: Plan, refs: Refs) -> None:
    dim = plan.shape.head_dim_v
    total = _row_sums(plan, refs.acc, refs.total, slice(None))
    empty = total == 0.0  # no visible key
    inverse = _wide(1.0 / jnp.where(empty, 1.0, total), round_up(dim, LANES))[:, :dim]
    refs.out[...] = (refs.acc[:, :dim] * inverse).astype(refs.out.dtype)
    if not plan.residuals:
        return
    total_row = _lane_equal_as_row(total)
    empty_row = total_row == 0.0
    if plan.shift is not None:
        anchor: Any = plan.shift
    else:
        anchor = _lane_equal_as_row(refs.anchor[...]) / plan.unit if plan.guarded else 0.0
    lse = anchor + jnp.log(jnp.where(empty_row, 1.0, total_row))
    refs.lse[...] = jnp.where(empty_row, MASK_VALUE, lse)
    top = jnp.max(refs.top[...].T, axis=0, keepdims=True) / plan.unit
    refs.top_out[...] = jnp.where(empty_row, MASK_VALUE, top)


def _lane_equal_as_row(x: jax.Array) -> jax.Array:
    """[rows, 128] with equal lanes as [1, rows]: the diagonals of its 128 x 128 tiles.

    Selects and adds on the VPU: the transpose unit took four times as long.
    """
    tile = (LANES, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, tile, 0) == lax.broadcasted_iota(jnp.int32, tile, 1)
    tiles = (x[a : a + LANES] for a in range(0, x.shape[0], LANES))
    rows = [jnp.sum(jnp.where(diagonal, t, 0.0), axis=0, keepdims=True) for t in tiles]
    return jnp.concatenate(rows, axis=1)


def kernel(refs: Refs, *, plan: Plan) -> None:
    """One grid step (batch, q head, q block, kv block)."""
    q_block, kv_block = pl.program_id(2), pl.program_id(3)
    position = kv_block * plan.block_kv - q_block * plan.block_q - plan.offset

    def attempt(scope: str, masks: Callable[..., Any]) -> None:
        with jax.named_scope(scope):
            _attempt(plan, refs, q_block, masks)

    def unmasked(rows: slice, keys: slice) -> tuple[bool, Mask, Any]:
        return True, None, None

    @pl.when(kv_block == 0)
    def _() -> None:
        with jax.named_scope("init"):
            refs.acc[...] = jnp.zeros_like(refs.acc)
            if not plan.spare_columns:
                refs.total[...] = jnp.zeros_like(refs.total)
            if plan.guarded:
                refs.anchor[...] = jnp.zeros_like(refs.anchor)
            if plan.residuals:
                refs.top[...] = jnp.full_like(refs.top, MASK_VALUE)

    if plan.causal:
        full = position + plan.block_kv <= 1
        pl.when(full)(lambda: attempt("step", unmasked))
        patterns = plan.cut_patterns()
        if patterns is None:
            dynamic = _causal_masks(plan, position, kv_block)
            cut = (position < plan.block_q) & ~full
            pl.when(cut)(lambda: attempt("masked_step", dynamic))
        for index, static in enumerate(patterns or []):
            scope = "masked_step" if index == 0 else f"masked_step_{index}"
            masks = _causal_masks(plan, static, kv_block)
            pl.when(position == static)(functools.partial(attempt, scope, masks))
    else:
        last = plan.kv_blocks - 1
        if plan.kv_uneven:
            pl.when(kv_block < last)(lambda: attempt("step", unmasked))
            pl.when(kv_block == last)(lambda: attempt("masked_step", _edge_masks(plan)))
        else:
            attempt("step", unmasked)

    def rescale_if_bad() -> None:
        @pl.when(refs.bad[0] != 0)
        def _() -> None:
            with jax.named_scope("rescale_step"):
                _rescale(plan, refs, q_block, kv_block)

    if plan.guarded and plan.causal:
        pl.when(position < plan.block_q)(rescale_if_bad)
    elif plan.guarded:
        rescale_if_bad()

    @pl.when(kv_block == plan.kv_blocks - 1)
    def _() -> None:
        with jax.named_scope("finalize"):
            _finalize(plan, refs)
