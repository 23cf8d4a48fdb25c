"""Copies that a kernel starts itself (`make_async_copy`), whose bytes no window tells of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autotune.traced.counts import Weight


def hbm_bytes(eqn: Any, values: Sequence[Any]) -> Weight | None:
    """Bytes that a `dma_start` moves between HBM and the core each time; None for another copy.

    The equation's operands are the source and the target, each a Ref or one with transforms;
    `values` are those operands over the grid. Where a size is not known before a run, the bytes
    are the most that fit the slice of either side.
    """
    src, dst, *_ = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
    if _in_hbm(src) == _in_hbm(dst):
        return None
    known = {
        id(var): value.astype(np.int64)
        for var, value in zip(eqn.invars, values, strict=True)
        if isinstance(value, np.ndarray)
    }
    sides = [_bytes(side, known) for side in (src, dst)]
    exact = [size for size, sure in sides if sure]
    return exact[0] if exact else np.minimum(sides[0][0], sides[1][0])


def _ref(operand: Any) -> Any:
    return getattr(operand, "ref", operand)


def _in_hbm(operand: Any) -> bool:
    space = getattr(_ref(operand).aval, "memory_space", None)
    return str(getattr(space, "value", space)) in ("any", "hbm")


def _bytes(operand: Any, known: Mapping[int, np.ndarray]) -> tuple[Weight, bool]:
    """Bytes of a Ref or a slice of it, and whether no size of it had to be taken whole."""
    aval = _ref(operand).aval
    elements: Weight = math.prod(aval.shape)
    sure = True
    for transform in getattr(operand, "transforms", ()):
        if not hasattr(transform, "get_indexer_shape"):
            continue
        sizes = [_known(size, known) for size in _sizes(transform)]
        sure = all(size is not None for size in sizes)
        if not sure:
            whole = [_known(extent, known) for extent in _extents(transform)]
            sizes = [w if s is None else s for s, w in zip(sizes, whole, strict=True)]
        if all(size is not None for size in sizes):  # else at most what is sliced once more
            elements = math.prod(sizes)
    return elements * int(aval.dtype.itemsize), sure


def _sizes(indexer: Any) -> list[Any]:
    """Sizes of what an indexer takes: a number, or a value of the kernel."""
    slices = [index.size for index in indexer.indices if hasattr(index, "stride")]
    return [*indexer.int_indexer_shape, *slices]


def _extents(indexer: Any) -> list[Any]:
    """The most each of `_sizes` can be."""
    pairs = zip(indexer.indices, indexer.shape, strict=True)
    slices = [extent for index, extent in pairs if hasattr(index, "stride")]
    return [*indexer.int_indexer_shape, *slices]


def _known(size: Any, known: Mapping[int, np.ndarray]) -> Weight | None:
    if isinstance(size, int | np.integer):
        return int(size)
    value = known.get(id(size))
    return None if value is None else np.maximum(value, 0)
