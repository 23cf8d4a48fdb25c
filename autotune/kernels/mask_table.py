"""A mask, block by block: the sparse execution table a splash kernel follows. NumPy only.

Blocks are counted in closed form from each row's key bounds, so cost and memory grow with the
sequence length and the number of blocks, never with their product of elements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.kernels.masks import Intervals, Ints, Mask, rows_of

EMPTY, PARTIAL, FULL = 0, 1, 2
MAX_BLOCKS = 2**26

Table32 = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskTable:
    """The steps of one head, query blocks outer, key blocks inner.

    A query block that sees nothing keeps one step of kind EMPTY, first and last of its row, so that
    its output is written.

    Attributes:
      rows, cols: int32[steps], query and key block of each step.
      kinds: int32[steps]: EMPTY, PARTIAL or FULL.
      bounds_start, bounds_end: bool[steps], first and last step of the query block.
      mask_next: int32[steps]: pattern of this step, or of the next partial step where this one
        needs none, so that the copy runs ahead and no pattern is copied twice in a row.
      lo, hi: int32[patterns, intervals, block_q]: the distinct partial blocks as key bounds
        counted from the block's first key.
      block_q, block_kv: elements.
    """

    rows: Table32
    cols: Table32
    kinds: Table32
    bounds_start: npt.NDArray[np.bool_]
    bounds_end: npt.NDArray[np.bool_]
    mask_next: Table32
    lo: Table32
    hi: Table32
    block_q: int
    block_kv: int

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def active(self) -> int:
        """Blocks in which at least one pair is visible."""
        return int((self.kinds != EMPTY).sum())

    @property
    def partial(self) -> int:
        return int((self.kinds == PARTIAL).sum())

    @property
    def full(self) -> int:
        return int((self.kinds == FULL).sum())

    @property
    def patterns(self) -> int:
        return len(self.lo)


def padded_rows(intervals: Intervals, block_q: int) -> Intervals:
    """Rows up to a whole number of blocks; padding rows repeat the last (their output is cut)."""
    extra = -intervals.rows % block_q
    lo, hi = (np.pad(a, ((0, 0), (0, extra)), mode="edge") for a in (intervals.lo, intervals.hi))
    return Intervals(lo=lo, hi=hi, kv_len=intervals.kv_len)


def block_kinds(mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int) -> Table32:
    """int32[q blocks, kv blocks] of EMPTY, PARTIAL, FULL; one over the end of the keys is not FULL.

    Raises ValueError for more than `MAX_BLOCKS` blocks.
    """
    _check_blocks(q_len, kv_len, block_q, block_kv)
    visible = _visible(padded_rows(rows_of(mask, q_len, kv_len), block_q), block_q, block_kv)
    kinds = np.where(visible == block_q * block_kv, FULL, PARTIAL)
    return np.where(visible == 0, EMPTY, kinds).astype(np.int32)


def _check_blocks(q_len: int, kv_len: int, block_q: int, block_kv: int) -> None:
    if min(block_q, block_kv) < 1:
        raise ValueError(f"blocks of {block_q} x {block_kv} are not allowed; at least 1 x 1")
    blocks = -(-q_len // block_q) * -(-kv_len // block_kv)
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"{block_q} x {block_kv} cuts {q_len} x {kv_len} into {blocks} blocks; "
            f"at most {MAX_BLOCKS} are prepared"
        )


def _visible(rows: Intervals, block_q: int, block_kv: int) -> Ints:
    """Visible pairs per block.

    A bound e in key block j leaves block_kv - e % block_kv keys of that block to its right, and all
    keys of every later block; pairs right of `lo` less pairs right of `hi` are the visible ones.
    """
    q_blocks, kv_blocks = rows.rows // block_q, -(-rows.kv_len // block_kv)
    first = np.arange(rows.rows, dtype=np.int64) // block_q * (kv_blocks + 1)

    def right_of(bounds: Ints) -> Ints:
        cell = (first + bounds // block_kv).ravel()
        size = q_blocks * (kv_blocks + 1)
        count = np.bincount(cell, minlength=size).reshape(q_blocks, kv_blocks + 1)
        left_out = np.bincount(cell, weights=(bounds % block_kv).ravel(), minlength=size)
        whole = np.cumsum(count, axis=1) * block_kv
        return (whole - left_out.reshape(whole.shape).astype(np.int64))[:, :kv_blocks]

    return right_of(rows.lo) - right_of(rows.hi)


@functools.lru_cache(maxsize=32)
def table_of(mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int) -> MaskTable:
    """The execution table of `mask`. Raises ValueError for more than `MAX_BLOCKS` blocks."""
    kinds = block_kinds(mask, q_len, kv_len, block_q, block_kv)
    steps = kinds != EMPTY
    steps[~steps.any(axis=1), 0] = True
    rows, cols = np.nonzero(steps)
    kind = kinds[rows, cols]
    start = np.ones(len(rows), dtype=bool)
    start[1:] = rows[1:] != rows[:-1]
    partial = kind == PARTIAL
    index, lo, hi = _patterns(
        padded_rows(rows_of(mask, q_len, kv_len), block_q),
        rows[partial], cols[partial], block_q, block_kv,
    )  # fmt: skip
    return MaskTable(
        rows=rows.astype(np.int32), cols=cols.astype(np.int32), kinds=kind,
        bounds_start=start, bounds_end=np.append(start[1:], True),
        mask_next=_next_pattern(partial, index), lo=lo, hi=hi,
        block_q=block_q, block_kv=block_kv,
    )  # fmt: skip


def _patterns(
    bounds: Intervals, rows: Ints, cols: Ints, block_q: int, block_kv: int
) -> tuple[Ints, Table32, Table32]:
    """Pattern index of each partial block, and the distinct patterns in order of appearance."""
    seen: dict[bytes, int] = {}
    index = np.zeros(len(rows), dtype=np.int64)
    found: list[tuple[Table32, Table32]] = []
    for n, (row, col) in enumerate(zip(rows.tolist(), cols.tolist(), strict=True)):
        own = slice(row * block_q, (row + 1) * block_q)
        lo, hi = _clipped(bounds.lo[:, own], bounds.hi[:, own], col * block_kv, block_kv)
        index[n] = seen.setdefault(lo.tobytes() + hi.tobytes(), len(seen))
        if len(seen) > len(found):
            found.append((lo, hi))
    if not found:
        none = np.zeros((0, len(bounds.lo), block_q), np.int32)
        return index, none, none
    return index, np.stack([lo for lo, _ in found]), np.stack([hi for _, hi in found])


def _clipped(lo: Ints, hi: Ints, first_key: int, block_kv: int) -> tuple[Table32, Table32]:
    """Bounds counted from the block's first key; equal contents give equal arrays."""
    first = np.clip(lo - first_key, 0, block_kv).astype(np.int32)
    last = np.clip(hi - first_key, 0, block_kv).astype(np.int32)
    empty = last <= first
    first[empty] = last[empty] = block_kv
    if len(first) > 1:
        order = np.argsort(first, axis=0, kind="stable")
        first, last = (np.take_along_axis(a, order, 0) for a in (first, last))
    return first, last


def _next_pattern(partial: npt.NDArray[np.bool_], index: Ints) -> Table32:
    """For each step the pattern of the first partial step at or after it, else the last one."""
    if not len(index):
        return np.zeros(len(partial), np.int32)
    ahead: Ints = np.cumsum(partial) - partial  # partial steps before this one
    return index[np.minimum(ahead, len(index) - 1)].astype(np.int32)
