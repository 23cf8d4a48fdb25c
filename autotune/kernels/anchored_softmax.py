"""Attention forward, block by block: a softmax that rescales only when it has to.

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
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.kernels.attention import LANES, MASK_VALUE, round_up
from autotune.kernels.flash_fwd_plan import Refs, SoftmaxPlan

CONTRACT_LAST = (((1,), (1,)), ((), ()))
SUM_RANGE = (2.0**-64, 2.0**64)


class Masking(Protocol):
    """What a block hides. Starts of rows and keys count from the block's own."""

    def shows(self, rows: slice, keys: slice) -> tuple[bool, bool]:
        """Whether any pair of a tile or of half a tile may be visible; may be hidden. Static."""

    def mask(self, rows: Any, keys: Any) -> jax.Array | None:
        """bool[rows, keys] of two `pl.ds`, True where visible; None where nothing is hidden."""

    def exempt(self, rows: slice) -> jax.Array | None:
        """bool[rows, 128]: rows whose sum needs no check, for they count not or saw no key yet."""

    def touched(self, rows_start: Any) -> jax.Array | None:
        """Whether the row tile has any visible pair; None where all row tiles do."""


def scratch(plan: SoftmaxPlan) -> dict[str, Any]:
    """`Refs` field -> scratch operand, only those the plan uses."""
    acc = pltpu.VMEM((plan.block_q, plan.acc_width), jnp.float32)
    lanes = pltpu.VMEM((plan.block_q, LANES), jnp.float32)
    used = {"acc": acc}
    if plan.guarded:
        used |= {"backup": acc, "anchor": lanes, "bad": pltpu.SMEM((1,), jnp.int32)}
    if plan.track_top:
        used["top"] = lanes
    if not plan.spare_columns:
        used |= {"total": lanes, **({"total_backup": lanes} if plan.guarded else {})}
    return used


def _precision(dtype: Any) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def wide(column: jax.Array, width: int) -> jax.Array:
    """[rows, 128] with equal lanes, repeated to [rows, width]: no data moves."""
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _logits(plan: SoftmaxPlan, q: jax.Array, k: jax.Array) -> jax.Array:
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


def _values(plan: SoftmaxPlan, v: jax.Array, valid: jax.Array | None) -> jax.Array:
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
    plan: SoftmaxPlan, refs: Refs, rows: slice, keys: slice, mask: Any, valid: Any, *, first: bool
) -> None:
    """Adds one tile to the accumulator; the row tile's `first` one also backs it up."""
    x = _logits(plan, refs.q[rows, :], refs.k[keys, :])
    if mask is not None:
        x = jnp.where(mask, x, MASK_VALUE)
    if plan.track_top:
        refs.top[rows, :] = jnp.maximum(refs.top[rows, :], _fold(x, jnp.maximum))
    exp = jnp.exp2 if plan.use_exp2 else jnp.exp
    if plan.shift is not None:
        p = exp(x - plan.shift * plan.unit)
    elif plan.guarded:
        p = exp(x - wide(refs.anchor[rows, :], x.shape[1]))
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


def _row_sums(plan: SoftmaxPlan, acc: Any, total: Any, rows: Any) -> jax.Array:
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


def _out_of_range(
    plan: SoftmaxPlan, refs: Refs, rows: slice, exempt: jax.Array | None
) -> jax.Array:
    """1.0 where any row that counts has an l outside SUM_RANGE or NaN, else 0.0."""
    total = _row_sums(plan, refs.acc, refs.total, rows)
    low, high = SUM_RANGE
    good = (total >= low) & (total <= high)
    return jnp.max(jnp.where(good if exempt is None else good | exempt, 0.0, 1.0))


def start(plan: SoftmaxPlan, refs: Refs) -> None:
    """Readies the scratch for a query block."""
    refs.acc[...] = jnp.zeros_like(refs.acc)
    if not plan.spare_columns:
        refs.total[...] = jnp.zeros_like(refs.total)
    if plan.guarded:
        refs.anchor[...] = jnp.zeros_like(refs.anchor)
    if plan.track_top:
        refs.top[...] = jnp.full_like(refs.top, MASK_VALUE)


def attempt(plan: SoftmaxPlan, refs: Refs, kv_block: Any, masking: Masking) -> None:
    """One block with the anchors as they are; leaves the verdict in `bad`."""
    verdicts = []
    for a in range(0, plan.block_q, plan.q_tile):
        rows, first = slice(a, a + plan.q_tile), True
        for b in range(0, plan.block_kv, plan.kv_tile):
            keys = slice(b, b + plan.kv_tile)
            visible, cut = masking.shows(rows, keys)
            if not visible:
                continue
            pieces = _halves(masking, rows, keys) if cut else [(rows, keys)]
            for part, seen in pieces:
                if seen.start < seen.stop:
                    _add_part(plan, refs, part, seen, kv_block, masking, cut=cut, first=first)
                elif plan.guarded and first:
                    _back_up(plan, refs, part)
            first = False
        if plan.guarded and not first:
            verdicts.append(_out_of_range(plan, refs, rows, masking.exempt(rows)))
    if plan.guarded:
        worst = functools.reduce(jnp.maximum, verdicts)
        refs.bad[0] = jnp.where(worst > 0, 1, 0)


def _halves(masking: Masking, rows: slice, keys: slice) -> list[tuple[slice, slice]]:
    """A cut tile as its two halves of rows, each with the halves of keys it sees, or in one piece.

    A quarter of a tile on the diagonal is empty: 6 % of the masked step's cycles at 1024 and 2048.
    """
    middle_row, middle_key = (rows.start + rows.stop) // 2, (keys.start + keys.stop) // 2
    if (middle_row - rows.start) % LANES or (middle_key - keys.start) % LANES:
        return [(rows, keys)]
    halves = []
    for part in (slice(rows.start, middle_row), slice(middle_row, rows.stop)):
        left, right = (
            masking.shows(part, half)[0]
            for half in (slice(keys.start, middle_key), slice(middle_key, keys.stop))
        )
        start = keys.start if left else middle_key
        halves.append((part, slice(start, keys.stop if right else max(start, middle_key))))
    return [(rows, keys)] if all(seen == keys for _, seen in halves) else halves


def _add_part(
    plan: SoftmaxPlan, refs: Refs, rows: slice, keys: slice, kv_block: Any, masking: Masking,
    *, cut: bool, first: bool,
) -> None:  # fmt: skip
    cut = cut and masking.shows(rows, keys)[1]
    mask = valid = None
    if cut:
        size = keys.stop - keys.start
        mask = masking.mask(pl.ds(rows.start, rows.stop - rows.start), pl.ds(keys.start, size))
        valid = _valid(plan, kv_block, keys.start, size)
    _add_tile(plan, refs, rows, keys, mask, valid, first=first)


def _back_up(plan: SoftmaxPlan, refs: Refs, rows: slice) -> None:
    refs.backup[rows, :] = refs.acc[rows, :]
    if not plan.spare_columns:
        refs.total_backup[rows, :] = refs.total[rows, :]


def _valid(plan: SoftmaxPlan, kv_block: Any, start: Any, size: int) -> Any:
    """[size, 1] bools: keys before the end of the array; None where all are."""
    if not plan.kv_uneven:
        return None
    first = kv_block * plan.block_kv + start
    return first + lax.broadcasted_iota(jnp.int32, (size, 1), 0) < plan.shape.kv_len


def rescale(plan: SoftmaxPlan, refs: Refs, kv_block: Any, masking: Masking) -> None:
    """The block again, from the backup, with the running maximum as the anchor."""
    exp = jnp.exp2 if plan.use_exp2 else jnp.exp

    def key_tile(keys_start: Any, rows_start: Any) -> None:
        rows, keys = pl.ds(rows_start, plan.q_tile), pl.ds(keys_start, plan.kv_tile)
        x = _logits(plan, refs.q[rows, :], refs.k[keys, :])
        mask = masking.mask(rows, keys)
        if mask is not None:
            x = jnp.where(mask, x, MASK_VALUE)
        old = refs.anchor[rows, :]
        new = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
        usable = jnp.where(new > MASK_VALUE, new, 0.0)  # nothing visible yet: any finite anchor
        alpha = exp(old - usable)
        p = exp(x - wide(usable, x.shape[1]))
        v = _values(plan, refs.v[keys, :], _valid(plan, kv_block, keys_start, plan.kv_tile))
        acc = refs.acc[rows, :]
        refs.acc[rows, :] = acc * wide(alpha, acc.shape[1]) + _weighted(p, v)
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
            key_tile(pl.multiple_of(keys_start, LANES), rows_start)

        anchor = refs.anchor[rows, :]
        refs.anchor[rows, :] = jnp.where(anchor > MASK_VALUE, anchor, 0.0)

    @pl.loop(0, plan.block_q, step=plan.q_tile)
    def _(rows_start: Any) -> None:
        rows_start = pl.multiple_of(rows_start, LANES)
        touched = masking.touched(rows_start)  # the others were left alone, backup included
        if touched is None:
            row_tile(rows_start)
        else:
            pl.when(touched)(lambda: row_tile(rows_start))


def finalize(plan: SoftmaxPlan, refs: Refs) -> None:
    """Writes the outputs; a row that saw no key gets 0, and lse = max = MASK_VALUE."""
    dim = plan.shape.head_dim_v
    total = _row_sums(plan, refs.acc, refs.total, slice(None))
    empty = total == 0.0  # no visible key
    inverse = wide(1.0 / jnp.where(empty, 1.0, total), round_up(dim, LANES))[:, :dim]
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
