"""Which tiles of a block a backward kernel computes, and how the mask cuts them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autotune.kernels.attention import LANES, is_cut, is_visible, round_up

_STRIP = 256
"""Output rows that share one extent in a tile cut by the diagonal: the width of an MXU."""

_MOST_CUTS = 2
"""Different diagonals a kernel spells out; with more, one step masks whatever comes."""


class Dot(NamedTuple):
    """Queries [q, q + q_size) and keys [kv, kv + kv_size) of a tile, multiplied at once."""

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
    """How the mask cuts a tile: query r sees key c (both counted from the tile's corner) where
    c - r <= delta on the diagonal, c <= delta at the padded edge of the keys."""

    diagonal: bool
    delta: Any


class Place(NamedTuple):
    """A tile of the grid step: its corner within the block, and its index in the whole array."""

    q_start: Any
    kv_start: Any
    q_tile: Any
    kv_tile: Any


Step = Callable[[Place, "Cut | None"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks (grid) of one attention problem, and the tiles that a grid step loops over.

    A tile is unrolled code, a block is not: large blocks save grid steps, each worth 700 to 1,500
    cycles, at the compile time of a tile.

    Attributes:
      strip: rows of the output axis that a dot takes at a time; None is all of a tile.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    tile_q: int
    tile_kv: int
    causal: bool
    strip: int | None = None

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def q_tiles(self) -> int:
        """Tiles that hold any query; a block at the edge may have more."""
        return -(-self.q_len // self.tile_q)

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.tile_kv)

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len

    def _delta(self, q_tile: Any, kv_tile: Any) -> Any:
        return q_tile * self.tile_q + self.offset - kv_tile * self.tile_kv

    def has_full_tile(self) -> bool:
        """Whether the causal mask leaves any tile whole."""
        return bool(self._delta(self.q_tiles - 1, 0) >= self.tile_kv - 1)

    def cut_deltas(self) -> tuple[int, ...] | None:
        """The diagonals that cut a tile, from its corner, or None where they are more than two."""
        deltas: set[int] = set()
        for i in range(self.q_tiles):
            last = self._delta(i, 0) + self.tile_q - 1  # last key that the tile's last query sees
            for j in range(min(self.kv_tiles - 1, last // self.tile_kv), -1, -1):
                delta = self._delta(i, j)
                if delta >= self.tile_kv - 1:
                    break
                deltas.add(delta)
            if len(deltas) > _MOST_CUTS:
                return None
        return tuple(sorted(deltas))

    def each_tile(
        self, step: Step, q_block: Any, kv_block: Any, *, output: str, hide_padded_keys: bool
    ) -> None:
        """Runs `step(place, cut)` for the tiles of a block that hold a visible pair.

        The tiles of one part of the output axis, `q` or `kv`, follow one another.
        """
        n_q, n_kv = self.block_q // self.tile_q, self.block_kv // self.tile_kv

        def turn(n: Any) -> None:
            inner = n_kv if output == "q" else n_q
            high, low = (n, 0) if inner == 1 else (lax.div(n, inner), lax.rem(n, inner))
            q, kv = (high, low) if output == "q" else (low, high)
            place = Place(
                q_start=q * self.tile_q,
                kv_start=kv * self.tile_kv,
                q_tile=q_block * n_q + q,
                kv_tile=kv_block * n_kv + kv,
            )
            if self.causal:
                self._causal(step, place)
            else:
                self._whole(step, place, hide_padded_keys)

        if n_q * n_kv == 1:
            turn(0)
        else:

            def counted(n: Any, carry: int) -> int:
                turn(n)
                return carry

            lax.fori_loop(0, n_q * n_kv, counted, 0)

    def _causal(self, step: Step, place: Place) -> None:
        """A known diagonal makes a step of its own, which leaves out what it hides."""
        sizes = (self.tile_q, self.tile_kv, self.offset)
        cut = is_cut(place.q_tile, place.kv_tile, *sizes)
        held = self._held(place, self.q_tiles, self.kv_tiles)
        if self.has_full_tile():
            _when([jnp.logical_not(cut), *held], "step", step, place, None)
        delta = self._delta(place.q_tile, place.kv_tile)
        known = self.cut_deltas()
        if known is None:
            visible = is_visible(place.q_tile, place.kv_tile, *sizes)
            _when([cut, visible, *held], "masked_step", step, place, Cut(True, delta))
        for each in known or ():
            _when([delta == each, *held], "masked_step", step, place, Cut(True, each))

    def _whole(self, step: Step, place: Place, hide_padded_keys: bool) -> None:
        """Without causal mask: only the last tile of keys may need one, for its padded edge."""
        valid = self.kv_len - (self.kv_tiles - 1) * self.tile_kv
        if not hide_padded_keys or valid == self.tile_kv:
            held = self._held(place, self.q_tiles, self.kv_tiles)
            _when(held, "step", step, place, None)
            return
        held = self._held(place, self.q_tiles, None)
        last = self.kv_tiles - 1
        if last:
            _when([place.kv_tile < last, *held], "step", step, place, None)
        _when([place.kv_tile == last, *held], "masked_step", step, place, Cut(False, valid - 1))

    def _held(self, place: Place, q_tiles: int | None, kv_tiles: int | None) -> list[Any]:
        """Conditions that the tile is not all padding; none where no tile can be."""
        conditions = []
        if q_tiles is not None and q_tiles * self.tile_q < self.q_blocks * self.block_q:
            conditions.append(place.q_tile < q_tiles)
        if kv_tiles is not None and kv_tiles * self.tile_kv < self.kv_blocks * self.block_kv:
            conditions.append(place.kv_tile < kv_tiles)
        return conditions

    def dots(self, output: str, cut: Cut | None) -> list[Dot]:
        """The dots of a tile, strip by strip of the output axis, where a strip sees anything.

        On a known diagonal a strip takes what it sees at once, masked as a whole: splitting off
        what needs no mask took 8 % more cycles, strips of 512 1 to 3 % and of 128 over 20 % more
        (1024 x 1024, v6e).
        """
        on_q = output == "q"
        block, depth = (self.tile_q, self.tile_kv) if on_q else (self.tile_kv, self.tile_q)
        width = self.strip or block
        known = cut is not None and isinstance(cut.delta, int)
        if known:
            width = min(width, _STRIP)
        if block % width:
            width = block if not known else LANES
        found = []
        for at in range(0, block, width):
            low, high, masked = (
                self._seen(on_q, at, width, cut) if known else (0, depth, cut is not None)
            )
            if low < high:
                size = high - low
                found.append(
                    Dot(at, width, low, size, masked) if on_q else Dot(low, size, at, width, masked)
                )
        return found

    def _seen(self, on_q: bool, at: int, width: int, cut: Any) -> tuple[int, int, bool]:
        """What [at, at + width) of the output axis sees of the other: low, high, masked."""
        first, last = (at, at + width - 1) if cut.diagonal else (0, 0)
        if on_q:
            high = round_up(min(self.tile_kv, max(0, last + cut.delta + 1)), LANES)
            return 0, high, high > first + cut.delta + 1
        low = min(self.tile_q, max(0, at - cut.delta)) // LANES * LANES
        return low, self.tile_q, low < at + width - 1 - cut.delta


def _when(conditions: list[Any], scope: str, step: Step, place: Place, cut: Cut | None) -> None:
    """`step` in its named scope where all conditions hold."""

    def run() -> None:
        with jax.named_scope(scope):
            step(place, cut)

    if conditions:
        pl.when(functools.reduce(jnp.logical_and, conditions))(run)
    else:
        run()


def largest_tile(block: int, most: int = 1024) -> int:
    """The largest divisor of `block` that is a multiple of 128 and at most `most`."""
    return max(t for t in range(LANES, min(block, most) + 1, LANES) if block % t == 0)


def queries_at(place: Place, blocks: Blocks) -> Any:
    """The tile's rows of a block of queries."""
    return pl.ds(pl.multiple_of(place.q_start, LANES), blocks.tile_q)


def keys_at(place: Place, blocks: Blocks) -> Any:
    """The tile's rows of a block of keys."""
    return pl.ds(pl.multiple_of(place.kv_start, LANES), blocks.tile_kv)
