"""What a splash kernel is told of its mask: the code of each step, the key bounds of each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.kernels.mask_table import EMPTY, FULL, PARTIAL, MaskTable, Table32, padded_rows
from autotune.kernels.masks import Intervals

MAX_PATTERNS = 4
"""Patterns that get code of their own; a mask with more runs one code that masks every tile."""

FIRST, LAST, CODE_SHIFT = 1, 2, 2
"""Bits of an action word: the step opens its query block, closes it; the code stands above."""

IDLE, UNMASKED, MASKED = 0, 1, 2
"""Codes: nothing to see; a full block; a partial one, MASKED + n where pattern n has its own."""

NOWHERE = 2**30
"""First key of a row that sees none: past every key."""

Tiles = Table32
"""int32[row tiles, key tiles] of EMPTY, PARTIAL, FULL."""


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


def step_codes(table: MaskTable) -> Table32:
    """int32[steps]: the code of each step."""
    own = table.mask_next if table.patterns <= MAX_PATTERNS else np.zeros_like(table.mask_next)
    partial = np.where(table.kinds == PARTIAL, MASKED + own, IDLE)
    return np.where(table.kinds == FULL, UNMASKED, partial).astype(np.int32)


def actions(table: MaskTable, codes: Table32) -> Table32:
    """int32[steps]: what each step does, in one word."""
    word = codes << CODE_SHIFT | LAST * table.bounds_end | FIRST * table.bounds_start
    return np.asarray(word, dtype=np.int32)


def code_tiles(
    table: MaskTable, codes: Table32, q_tile: int, kv_tile: int, *, all_cut: bool
) -> dict[int, Tiles]:
    """The tiles of every code that occurs, IDLE left out.

    `all_cut`: run-time ids may hide any pair, so that no tile is FULL.
    """
    shape = (table.block_q // q_tile, table.block_kv // kv_tile)
    found = {}
    for code in np.unique(codes[codes != IDLE]).tolist():
        if code == UNMASKED:
            tiles = np.full(shape, FULL, np.int32)
        elif table.patterns > MAX_PATTERNS:
            tiles = np.full(shape, PARTIAL, np.int32)
        else:
            tiles = _tiles(table, code - MASKED, q_tile, kv_tile)
        found[code] = np.where(tiles == FULL, PARTIAL, tiles) if all_cut else tiles
    return found


def _tiles(table: MaskTable, pattern: int, q_tile: int, kv_tile: int) -> Tiles:
    """EMPTY, PARTIAL or FULL for each tile of a pattern, counted from its rows' bounds."""
    starts = np.arange(0, table.block_kv, kv_tile)[:, None, None]
    lo, hi = (np.clip(a[pattern] - starts, 0, kv_tile) for a in (table.lo, table.hi))
    per_row = (hi - lo).sum(axis=1)  # [key tiles, block_q]
    seen = per_row.reshape(len(starts), -1, q_tile).sum(axis=2).T
    kinds = np.where(seen == q_tile * kv_tile, FULL, PARTIAL)
    return np.asarray(np.where(seen == 0, EMPTY, kinds), dtype=np.int32)


def unseen_codes(table: MaskTable, codes: Table32, rows: Intervals) -> frozenset[int]:
    """Codes of steps after which some row of the query block has not seen any key yet."""
    rows = padded_rows(rows, table.block_q)
    first = np.where(rows.hi[0] > rows.lo[0], rows.lo[0], NOWHERE)
    latest = first.reshape(-1, table.block_q).max(axis=1)
    late = latest[table.rows] >= (table.cols.astype(np.int64) + 1) * table.block_kv
    return frozenset(np.unique(codes[late & (codes != IDLE)]).tolist())
