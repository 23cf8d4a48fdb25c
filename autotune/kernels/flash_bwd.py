"""What flash_dq and flash_dkv share: a block's tiles under the mask, and p and ds of one tile.

With s = q·k · scale, p = exp(s - lse), dp = do·v and di = sum(o · do):
ds = p · (dp - di), dq = scale · ds·k, dk = scale · dsᵀ·q, dv = pᵀ·do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autotune.kernels.attention import (
    LANES,
    LOG2_E,
    AttentionShape,
    is_cut,
    is_visible,
    round_up,
    shape_of,
)

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct  # annotated, for mypy

NT = (((1,), (1,)), ((), ()))  # x · yᵀ
NN = (((1,), (0,)), ((), ()))  # x · y

PADDED_LSE = 1e30
"""lse of a padded query row: its probabilities are exp(-1e30) = 0, so it adds nothing to dk, dv."""

_DIAGONAL_STRIP = 256
"""Output rows that share one extent in a block cut by the diagonal: the width of an MXU."""

_MOST_CUTS = 2
"""Different diagonals a kernel spells out; with more, one step masks whatever comes."""


class Tile(NamedTuple):
    """Queries [q, q + q_size) and keys [kv, kv + kv_size) of a block."""

    q: int
    q_size: int
    kv: int
    kv_size: int
    masked: bool

    @property
    def queries(self) -> slice:
        return slice(self.q, self.q + self.q_size)

    @property
    def keys(self) -> slice:
        return slice(self.kv, self.kv + self.kv_size)


class Cut(NamedTuple):
    """How the mask cuts a block: query r sees key c (both counted from the block's corner) where
    c - r <= delta on the diagonal, c <= delta at the padded edge of the keys."""

    diagonal: bool
    delta: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks (grid) and tiles (dots) of one attention problem."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    tile_q: int
    tile_kv: int
    causal: bool

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len

    def _delta(self, q_block: Any, kv_block: Any) -> Any:
        return q_block * self.block_q + self.offset - kv_block * self.block_kv

    def has_full_block(self) -> bool:
        """Whether the causal mask leaves any block whole."""
        return bool(self._delta(self.q_blocks - 1, 0) >= self.block_kv - 1)

    def cut_deltas(self) -> tuple[int, ...] | None:
        """The diagonals that cut a block of the grid, or None where they are more than two."""
        deltas: set[int] = set()
        for i in range(self.q_blocks):
            # Keys 1 - block_q <= delta <= block_kv - 2 from the block's corner: visible and cut.
            most = i * self.block_q + self.offset + self.block_q - 1
            for j in range(min(self.kv_blocks - 1, most // self.block_kv), -1, -1):
                delta = self._delta(i, j)
                if delta >= self.block_kv - 1:
                    break
                deltas.add(delta)
            if len(deltas) > _MOST_CUTS:
                return None
        return tuple(sorted(deltas))

    def dispatch(self, step: Callable[[Cut | None], None], q_block: Any, kv_block: Any) -> None:
        """Runs `step(cut)` where the causal mask leaves anything of the block; None is no cut.

        A known diagonal makes a step of its own, which leaves out the tiles that it hides.
        """
        if not self.causal:
            with jax.named_scope("step"):
                step(None)
            return
        sizes = (self.block_q, self.block_kv, self.offset)
        cut = is_cut(q_block, kv_block, *sizes)
        if self.has_full_block():

            @pl.when(jnp.logical_not(cut))
            def _() -> None:
                with jax.named_scope("step"):
                    step(None)

        delta = self._delta(q_block, kv_block)
        known = self.cut_deltas()
        if known is None:
            visible = is_visible(q_block, kv_block, *sizes)
            _masked_when(jnp.logical_and(cut, visible), step, Cut(True, delta))
        for each in known or ():
            _masked_when(delta == each, step, Cut(True, each))

    def dispatch_edge(self, step: Callable[[Cut | None], None], kv_block: Any) -> None:
        """As `dispatch`, for a kernel without causal mask that must not see padded keys."""
        last = self.kv_blocks - 1
        valid = self.kv_len - last * self.block_kv
        if valid == self.block_kv:
            with jax.named_scope("step"):
                step(None)
            return
        if last:

            @pl.when(kv_block < last)
            def _() -> None:
                with jax.named_scope("step"):
                    step(None)

        _masked_when(kv_block == last, step, Cut(False, valid - 1))

    def strips(self, output: str, cut: Cut | None) -> list[list[Tile]]:
        """A step's tiles, one list for each strip of the output axis, `q` or `kv`."""
        on_q = output == "q"
        block, width = (self.block_q, self.tile_q) if on_q else (self.block_kv, self.tile_kv)
        depth, chunk = (self.block_kv, self.tile_kv) if on_q else (self.block_q, self.tile_q)
        known = cut is not None and isinstance(cut.delta, int)
        if known:
            width = min(width, _DIAGONAL_STRIP if width % _DIAGONAL_STRIP == 0 else LANES)
        strips = []
        for at in range(0, block, width):
            if known:
                spans = self._seen(on_q, at, width, cut)
            else:
                spans = [(low, chunk, cut is not None) for low in range(0, depth, chunk)]
            tiles = [
                Tile(at, width, low, size, masked) if on_q else Tile(low, size, at, width, masked)
                for low, size, masked in spans
            ]
            if tiles:
                strips.append(tiles)
        return strips

    def _seen(self, on_q: bool, at: int, width: int, cut: Any) -> list[tuple[int, int, bool]]:
        """What of the reduction axis [at, at + width) of the output axis sees: start, size, masked.

        One tile a strip, masked as a whole: two, of which one needs no mask, took 8 % more cycles,
        strips of 512 1 to 3 % and of 128 over 20 % (1024 x 1024, v6e).
        """
        first, last = (at, at + width - 1) if cut.diagonal else (0, 0)
        if on_q:
            low, high = 0, round_up(min(self.block_kv, max(0, last + cut.delta + 1)), LANES)
            masked = high > first + cut.delta + 1
        else:
            low = min(self.block_q, max(0, at - cut.delta)) // LANES * LANES
            high = self.block_q
            masked = low < at + width - 1 - cut.delta
        return [(low, high - low, masked)] if low < high else []


def _masked_when(condition: Any, step: Callable[[Cut | None], None], cut: Cut) -> None:
    @pl.when(condition)
    def _() -> None:
        with jax.named_scope("masked_step"):
            step(cut)


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

    def residuals(self) -> tuple[jax.Array, jax.Array]:
        """lse and di as the layout of the scores needs them."""
        lse, di = self.softmax.exponent(self.lse[...]), self.di[...]
        return (lse, di) if self.q_in_lanes else (_column(lse), _column(di))

    def gradients(
        self, tile: Tile, cut: Cut | None, residuals: tuple[jax.Array, jax.Array]
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

    def _visible(self, tile: Tile, cut: Cut, shape: tuple[int, ...]) -> jax.Array:
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
