"""What a splash kernel is told of its mask: the code of each step, the key bounds of each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.kernels.attention import LANES
from autotune.kernels.mask_table import EMPTY, FULL, PARTIAL, MaskTable, Table32, padded_rows
from autotune.kernels.masks import Intervals

MAX_MASKED = 4
"""Codes of partial blocks: each costs compile time. Blocks that differ only within tiles share."""

FIRST, LAST, CODE_SHIFT = 1, 2, 2
"""Bits of an action word: the step opens its query block, closes it; the code stands above."""

IDLE, UNMASKED, MASKED = 0, 1, 2
"""Codes: nothing to see; a full block; a partial one is MASKED + n, for the kind of its tiles."""

NOWHERE = 2**30
"""First key of a row that sees none: past every key."""

Tiles = Table32
"""int32[row tiles, key tiles] of EMPTY, PARTIAL, FULL, or of halves of tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One bound key positions are compared with: the `first` key of an interval, or its end."""

    interval: int
    first: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bounds:
    """The bounds some row needs; those of interval 0 come first, its first key before its end.

    A row that sees nothing has first key NOWHERE and end 0, so every key is hidden from it.

    Attributes:
      sides: what each bound is.
      values: int32[sides, rows], rows padded to whole blocks.
    """

    sides: tuple[Side, ...]
    values: Table32


def row_bounds(rows: Intervals, block_q: int, block_kv: int) -> Bounds:
    """The comparisons that tell what each row of `rows` sees, and no more of them."""
    rows = padded_rows(rows, block_q)
    live = rows.hi > rows.lo
    padded = bool(rows.kv_len % block_kv)
    sides: list[Side] = []
    values: list[npt.NDArray[np.int64]] = []
    for k in range(len(rows.lo)):
        first = bool((rows.lo[k] > 0)[live[k]].any())
        end = padded or bool((rows.hi[k] < rows.kv_len)[live[k]].any())
        if not live[k].all() and not first:
            end = True  # something must hide every key of the rows without this interval
        if first:
            sides.append(Side(interval=k, first=True))
            values.append(np.where(live[k], rows.lo[k], NOWHERE))
        if end:
            sides.append(Side(interval=k, first=False))
            values.append(np.where(live[k], rows.hi[k], 0))
    shape = (len(sides), rows.rows)
    return Bounds(sides=tuple(sides), values=np.array(values, dtype=np.int32).reshape(shape))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Codes:
    """The code of each step, and the tiles of every code that occurs (IDLE left out)."""

    steps: Table32
    tiles: dict[int, Tiles]


def assign(table: MaskTable, q_tile: int, kv_tile: int, *, all_cut: bool) -> Codes:
    """Gives partial blocks whose tiles are alike one code.

    They are compared by halves of tiles or, where that makes more than MAX_MASKED kinds, by tiles.
    Where these are still more, the kinds whose empty tiles save the least share the last code,
    which leaves out what is empty in all of them.

    Args:
      all_cut: run-time ids may hide any pair, so that no tile is FULL.
    """
    halves = [tile // 2 if tile % (2 * LANES) == 0 else tile for tile in (q_tile, kv_tile)]
    if table.patterns and len(np.unique(_pattern_tiles(table, *halves), axis=0)) <= MAX_MASKED:
        q_tile, kv_tile = halves
    partial = table.kinds == PARTIAL
    shape = (table.block_q // q_tile, table.block_kv // kv_tile)
    steps = np.where(table.kinds == FULL, UNMASKED, IDLE)
    tiles: dict[int, Tiles] = {}
    if (steps == UNMASKED).any():
        tiles[UNMASKED] = np.full(shape, PARTIAL if all_cut else FULL)
    if not partial.any():
        return Codes(steps=steps.astype(np.int32), tiles=tiles)
    kinds = _pattern_tiles(table, q_tile, kv_tile).reshape(table.patterns, -1)
    if all_cut or len(np.unique(kinds, axis=0)) > MAX_MASKED:
        kinds = np.where(kinds == FULL, PARTIAL, kinds)
    alike, kind_of = np.unique(kinds, axis=0, return_inverse=True)
    step_kinds = kind_of.reshape(-1)[table.mask_next[partial]]
    saved = np.bincount(step_kinds, minlength=len(alike)) * (alike == EMPTY).sum(axis=1)
    rank = np.zeros(len(alike), np.int64)
    rank[np.argsort(-saved, kind="stable")] = np.arange(len(alike))
    code_of = MASKED + np.minimum(rank, MAX_MASKED - 1)
    steps[partial] = code_of[step_kinds]
    for code in np.unique(code_of).tolist():
        own = alike[code_of == code]
        same = np.where((own == own[0]).all(axis=0), own[0], PARTIAL)
        tiles[code] = same.reshape(shape)
    return Codes(steps=steps.astype(np.int32), tiles=tiles)


def actions(table: MaskTable, codes: Table32) -> Table32:
    """int32[steps]: what each step does, in one word."""
    word = codes << CODE_SHIFT | LAST * table.bounds_end | FIRST * table.bounds_start
    return np.asarray(word, dtype=np.int32)


def _pattern_tiles(table: MaskTable, q_tile: int, kv_tile: int) -> Tiles:
    """int32[patterns, row tiles, key tiles] of EMPTY, PARTIAL, FULL, from the rows' bounds."""
    columns = []
    for start in range(0, table.block_kv, kv_tile):
        lo, hi = (np.clip(bound - start, 0, kv_tile) for bound in (table.lo, table.hi))
        per_row = (hi - lo).sum(axis=1)  # [patterns, block_q]
        columns.append(per_row.reshape(len(per_row), -1, q_tile).sum(axis=2))
    seen = np.stack(columns, axis=2)
    kinds = np.where(seen == q_tile * kv_tile, FULL, PARTIAL)
    return np.asarray(np.where(seen == 0, EMPTY, kinds), dtype=np.int32)


def unseen_codes(table: MaskTable, codes: Table32, rows: Intervals) -> frozenset[int]:
    """Codes of steps after which some row of the query block has not seen any key yet."""
    rows = padded_rows(rows, table.block_q)
    first = np.where(rows.hi[0] > rows.lo[0], rows.lo[0], NOWHERE)
    latest = first.reshape(-1, table.block_q).max(axis=1)
    late = latest[table.rows] >= (table.cols.astype(np.int64) + 1) * table.block_kv
    return frozenset(np.unique(codes[late & (codes != IDLE)]).tolist())
