"""What flash_dq and flash_dkv share: their call, operands of a tile, and their p and ds.

With s = q·k · scale, p = exp(s - lse), dp = do·v and di = sum(o · do):
ds = p · (dp - di), dq = scale · ds·k, dk = scale · dsᵀ·q, dv = pᵀ·do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.kernels.attention import (
    LANES,
    LOG2_E,
    At,
    AttentionShape,
    row_window,
    shape_of,
    window,
)
from autotune.kernels.flash_bwd_tiles import Blocks, Cut, Dot, Place, keys_at, queries_at

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct  # annotated, for mypy

NT = (((1,), (1,)), ((), ()))  # x · yᵀ
NN = (((1,), (0,)), ((), ()))  # x · y

PADDED_LSE = 1e30
"""lse of a padded query row: its probabilities are exp(-1e30) = 0, so it adds nothing to dk, dv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax:
    """How probabilities come from raw products: scale, soft cap, and the exponential's base."""

    scale: float
    soft_cap: float | None
    use_exp2: bool

    @property
    def _base(self) -> float:
        return LOG2_E if self.use_exp2 else 1.0

    def scaled(self, gradient: jax.Array) -> jax.Array:
        """dq or dk of its sum over ds / scale: the factor once a row, not once a pair."""
        return gradient * self.scale

    def exponent(self, lse: jax.Array) -> jax.Array:
        """lse in the base of the exponential: done once a row, not once a pair."""
        return lse * self._base if self.use_exp2 else lse

    def gradients(
        self, s: jax.Array, dp: jax.Array, lse: jax.Array, di: jax.Array, visible: Any
    ) -> tuple[jax.Array, jax.Array]:
        """p and ds / scale of raw products s = q·k and dp = do·v; lse from `exponent`."""
        if self.soft_cap is None:
            logits = s * (self.scale * self._base)
        else:
            tanh = jnp.tanh(s * (self.scale / self.soft_cap))
            logits = tanh * (self.soft_cap * self._base)
        p = (jnp.exp2 if self.use_exp2 else jnp.exp)(logits - lse)
        if visible is not None:
            p = jnp.where(visible, p, 0.0)  # a select, not a product: a hidden p may be inf
        ds = p * (dp - di)
        return p, ds if self.soft_cap is None else ds * (1.0 - tanh * tanh)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The windows of a step: q, k, v, do [length, head_dim]; lse and di as rows [1, block_q].

    `q_in_lanes` lays scores out as [kv, q], where a row of lse serves as it is; otherwise they are
    [q, kv] and lse and di are turned into columns, once a step.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    di: Any
    softmax: Softmax
    q_in_lanes: bool

    def at(self, place: Place, blocks: Blocks) -> Operands:
        """The same, of one tile."""
        queries, keys = queries_at(place, blocks), keys_at(place, blocks)
        return replace(
            self,
            q=self.q.at[queries],
            k=self.k.at[keys],
            v=self.v.at[keys],
            do=self.do.at[queries],
            lse=self.lse.at[:, queries],
            di=self.di.at[:, queries],
        )

    def residuals(self) -> tuple[jax.Array, jax.Array]:
        """lse and di as the layout of the scores needs them."""
        lse, di = self.softmax.exponent(self.lse[...]), self.di[...]
        return (lse, di) if self.q_in_lanes else (_column(lse), _column(di))

    def gradients(
        self, tile: Dot, cut: Cut | None, residuals: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """p and ds / scale of a tile, f32, in the layout of the scores."""
        q, k, v, do = (
            self.q[tile.queries],
            self.k[tile.keys],
            self.v[tile.keys],
            self.do[tile.queries],
        )
        if self.q_in_lanes:
            s, dp = dot(k, q, NT), dot(v, do, NT)
            lse, di = (r[:, tile.queries] for r in residuals)
        else:
            s, dp = dot(q, k, NT), dot(do, v, NT)
            lse, di = (jnp.tile(r[tile.queries], (1, tile.kv_size // LANES)) for r in residuals)
        visible = self._visible(tile, cut, s.shape) if cut is not None and tile.masked else None
        return self.softmax.gradients(s, dp, lse, di, visible)

    def _visible(self, tile: Dot, cut: Cut, shape: tuple[int, ...]) -> jax.Array:
        kv_axis = 0 if self.q_in_lanes else 1
        key = lax.broadcasted_iota(jnp.int32, shape, kv_axis)
        if not cut.diagonal:
            return key <= cut.delta - tile.kv  # type: ignore[no-any-return]
        query = lax.broadcasted_iota(jnp.int32, shape, 1 - kv_axis)
        return key - query <= cut.delta + tile.q - tile.kv  # type: ignore[no-any-return]


def q_head(kv_head: Any, member: Any, group: int) -> Any:
    """The q head that is the `member`-th of a kv head's group."""
    return kv_head * group + member


def _column(row: jax.Array) -> jax.Array:
    """A row [1, n] as a column repeated over the lanes, [n, 128]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def dot(x: jax.Array, y: jax.Array, contract: Any) -> jax.Array:
    """The product in f32. f32 operands take the passes that keep all their bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)


def checked_shape(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, lse: jax.Array, di: jax.Array
) -> AttentionShape:
    """The shape of a backward pass. Raises ValueError naming both shapes that do not fit."""
    shape = shape_of(q, k, v)
    rows = (shape.batch, shape.q_heads, shape.q_len)
    if tuple(do.shape) != (*rows, shape.head_dim_v):
        raise ValueError(f"do {tuple(do.shape)} is not {(*rows, shape.head_dim_v)}, as o is")
    for name, array in (("lse", lse), ("di", di)):
        if tuple(array.shape) != rows:
            raise ValueError(f"{name} {tuple(array.shape)} is not {rows}, one for each query row")
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}; float32 is needed")
    return shape


def padded(x: jax.Array, length: int, value: float = 0.0) -> jax.Array:
    """x [batch, heads, rows, …] with `value` in rows up to `length`."""
    widths = [(0, length - size if axis == 2 else 0) for axis, size in enumerate(x.shape)]
    return x if length == x.shape[2] else jnp.pad(x, widths, constant_values=value)


def row_vector(x: jax.Array, length: int, value: float = 0.0) -> jax.Array:
    """x [batch, heads, rows], padded, as [batch, heads, 1, length]: rows in the lanes."""
    return padded(x, length, value)[:, :, None, :]


def backward_call(
    kernel: Callable[..., None], *, name: str, shape: AttentionShape, blocks: Blocks,
    grid: tuple[int, ...], reduced_axes: int, q_at: At, kv_at: At,
    out_specs: Any, out_shape: Any, accumulators: Sequence[tuple[int, int]],
) -> Callable[..., Any]:  # fmt: skip
    """`pallas_call` on q, k, v, do, lse and di, which it pads to whole blocks.

    Args:
      reduced_axes: the last grid axes, over which the outputs are sums.
      q_at, kv_at: where the windows of queries (q, do, lse, di) and of keys (k, v) are.
      out_shape: outputs, of whole blocks; cutting off the padding is the caller's.
      accumulators: shapes of f32 scratch.
    """
    d, dv, block_q, block_kv = shape.head_dim_qk, shape.head_dim_v, blocks.block_q, blocks.block_kv
    q_rows, kv_rows = blocks.q_blocks * block_q, blocks.kv_blocks * block_kv

    semantics: Any = ("parallel",) * (len(grid) - reduced_axes) + ("arbitrary",) * reduced_axes
    row = row_window(block_q, q_at)
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=[
            window(block_q, d, q_at), window(block_kv, d, kv_at), window(block_kv, dv, kv_at),
            window(block_q, dv, q_at), row, row,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in accumulators],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )  # fmt: skip

    def run(q: Any, k: Any, v: Any, do: Any, lse: Any, di: Any) -> Any:
        return call(
            padded(q, q_rows), padded(k, kv_rows), padded(v, kv_rows), padded(do, q_rows),
            row_vector(lse, q_rows, PADDED_LSE), row_vector(di, q_rows),
        )  # fmt: skip

    return run
