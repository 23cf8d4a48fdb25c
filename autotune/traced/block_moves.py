"""Which blocks a pipeline copies: index maps over the grid, and the "same index, no copy" rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.traced.jaxprs import open_jaxpr
from autotune.traced.scalar_code import ScalarCode, Value

LANES = 128
ROW_BYTES = 512


@dataclass(frozen=True, slots=True)
class BlockAxis:
    """One axis of a block: `size` elements from `index · unit` on; `kept`: the kernel sees it."""

    size: int
    unit: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """The block indices of one operand over the grid.

    Attributes:
      changed: bool[steps]: the block differs from the step before (the first always does).
      elements: int64[steps] or an int: elements of the block that exist in the array.
      tiled: the same in whole native tiles, which is what a DMA moves.
      constant: the index map depends on no grid axis, as the compiler sees it.
      exact: the index map rests on known values only; else every step counts as a change.
      revisited: grid axes along which the same block comes again.
      last_of_run: bool[steps]: the last step with its block; then an output is written back.
    """

    changed: np.ndarray
    elements: np.ndarray | int
    tiled: np.ndarray | int
    constant: bool
    exact: bool
    revisited: frozenset[int]
    last_of_run: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_of_run", np.append(self.changed[1:], True))


def block_axis(dim: Any) -> BlockAxis:
    """One entry of a traced block shape: Blocked, Element, BoundedSlice, Squeezed, int or None."""
    size = getattr(dim, "block_size", dim)
    if not isinstance(size, int):
        return BlockAxis(1, 1, False)
    return BlockAxis(size, 1 if type(dim).__name__ in ("Element", "BoundedSlice") else size, True)


def sublane_rows(rows: int, bits: int) -> int:
    """Rows that `rows` second-minor elements take on the chip.

    Up to 8: the next power of two, at least one packed register row; above: multiples of 8.
    """
    packed = max(1, 32 // bits)
    if rows <= 8:
        return max(packed, 1 << (max(rows, 1) - 1).bit_length())
    return -(-rows // 8) * 8


def tile_bytes(shape: Sequence[int], bits: int) -> int:
    """VMEM or SMEM bytes of an array in its native tiles.

    The last axis takes whole lanes, the one before whole sublane tiles; an array of one axis is
    packed into 512-byte rows. Source: windows, scratch and prefetched tables in the compiler's
    allocation dumps: f32, bf16, int8, fp8; v5e, v6e, tpu7x; both supported compilers. A test
    compares the rule with the compiler.
    """
    if len(shape) < 2:
        return max(1, -(-math.prod(shape) * bits // (8 * ROW_BYTES))) * ROW_BYTES
    *outer, rows, columns = shape
    padded = math.prod(outer) * sublane_rows(rows, bits) * (-(-columns // LANES) * LANES)
    return padded * bits // 8


def block_moves(
    code: ScalarCode, index_map: Any, tables: Sequence[Value],
    block: Sequence[BlockAxis], array_shape: Sequence[int], bits: int,
) -> Moves:  # fmt: skip
    """Evaluates an index map over the grid, row by row, last axis fastest.

    Args:
      index_map: jaxpr of (program ids…, prefetched tables…) -> one index per array axis.
      tables: the prefetch operands, UNKNOWN where their values are.
    """
    steps = math.prod(code.grid)
    ids = len(open_jaxpr(index_map)[0].invars) - len(tables)  # none for an empty grid
    results = code.run(index_map, [*map(code.axis, range(ids)), *tables])
    known = all(isinstance(index, np.ndarray) for index in results)
    if not known or len(results) != len(block):  # a bounded slice gives a start and a size
        extents = [min(a.size, n) for a, n in zip(block, array_shape, strict=True)]
        changed = np.ones(steps, bool)
        return Moves(
            changed, math.prod(extents), _tiled(extents, bits), steps == 1, False, frozenset()
        )  # fmt: skip
    indices = [index for index in results if index.size > 1]
    changed = np.zeros(steps, bool)
    for index in indices:
        flat = np.broadcast_to(index, code.grid).reshape(-1)
        changed[1:] |= flat[1:] != flat[:-1]
    changed[0] = True
    extents = [
        a.size if n % a.size == 0 and a.unit == a.size
        else np.clip(n - index.astype(np.int64) * a.unit, 0, a.size)
        for a, n, index in zip(block, array_shape, results, strict=True)
    ]  # fmt: skip
    return Moves(
        changed, _flat(_product(extents), code.grid), _flat(_tiled(extents, bits), code.grid),
        not indices, True, _revisited(indices, code.grid),
    )  # fmt: skip


def _product(extents: Sequence[Any]) -> Any:
    total: Any = 1
    for extent in extents:
        total = total * extent
    return total


def _tiled(extents: Sequence[Any], bits: int) -> Any:
    """Elements in whole tiles: lanes by 128, second-minor rows by 8 (packed rows below that)."""
    *outer, rows, columns = (1, 1, *extents)
    packed = max(1, 32 // bits)
    by = packed if isinstance(rows, int) and rows < 8 else 8
    padded_rows = -(-rows // by) * by
    return _product(outer) * padded_rows * (-(-columns // LANES) * LANES)


def _flat(value: Any, grid: Sequence[int]) -> np.ndarray | int:
    if np.size(value) == 1:
        return int(np.reshape(value, -1)[0])
    return np.ascontiguousarray(np.broadcast_to(value, grid)).reshape(-1)


def _revisited(indices: Sequence[np.ndarray], grid: Sequence[int]) -> frozenset[int]:
    """Grid axes along which two neighbouring steps have the same block."""
    axes = set()
    for axis, extent in enumerate(grid):
        if extent == 1:
            continue
        moving = [index for index in indices if index.shape[axis] > 1]
        same: Any = np.ones((1,) * len(grid), bool)
        for index in moving:
            same = same & (np.diff(index, axis=axis) == 0)
        if np.any(same):
            axes.add(axis)
    return frozenset(axes)


def distinct_rows(columns: Sequence[np.ndarray | int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """First position and number of every distinct row of a table, in order of first position.

    Args:
      columns: integers[steps] each, or an int for a column that never changes.
    """
    key, span = np.zeros(steps, np.int64), 1
    for column in columns:
        if isinstance(column, int):
            continue
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        if high - low >= 2**20:  # byte counts: few values, far apart
            column = np.unique(column, return_inverse=True)[1]
            low, high = 0, int(column.max())
        if span * (high - low + 1) >= 2**40:
            key = np.unique(key, return_inverse=True)[1]
            span = int(key.max()) + 1
        key *= high - low + 1
        key += column
        key -= low
        span *= high - low + 1
    if span > max(1024, steps):
        key = np.unique(key, return_inverse=True)[1]
        span = int(key.max()) + 1
    firsts = np.full(span, -1, np.int64)
    firsts[key[::-1]] = np.arange(steps - 1, -1, -1)  # the last write stays: the first position
    counts = np.bincount(key, minlength=span)
    firsts, counts = firsts[counts > 0], counts[counts > 0]
    order = np.argsort(firsts)
    return firsts[order], counts[order]
