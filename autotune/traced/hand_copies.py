"""Copies that a kernel starts itself (`make_async_copy`), whose bytes no window tells of."""

from __future__ import annotations

import math
from typing import Any

import jax


def hbm_bytes(eqn: Any) -> int:
    """Bytes a `dma_start` moves between HBM and the core; 0 for another copy.

    The equation's operands are the source and the target, each a Ref or one with transforms.
    """
    src, dst, *_ = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
    if _in_hbm(src) == _in_hbm(dst):
        return 0
    return _bytes(src if _in_hbm(src) else dst)


def _ref(operand: Any) -> Any:
    return getattr(operand, "ref", operand)


def _in_hbm(operand: Any) -> bool:
    space = getattr(_ref(operand).aval, "memory_space", None)
    return str(getattr(space, "value", space)) in ("any", "hbm")


def _bytes(operand: Any) -> int:
    aval = _ref(operand).aval
    shape = aval.shape
    for transform in getattr(operand, "transforms", ()):
        if hasattr(transform, "get_indexer_shape"):
            shape = transform.get_indexer_shape()
    return int(math.prod(shape)) * int(aval.dtype.itemsize)
