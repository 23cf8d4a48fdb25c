"""The mask language in JAX's own masks, aligned as JAX aligns them: top-left (`top_left.py`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks

from autotune.kernels import masks
from autotune.kernels.masks import Mask
from autotune.kernels.top_left import rows_of


def jax_mask(mask: Mask, q_len: int, kv_len: int) -> Any:
    """The mask as its users write it: CausalMask, LocalMask, FullMask, `&` and `|` of them.

    JAX has no mask of packed documents; those are a mask of its base class, made block by block.
    """
    shape = (q_len, kv_len)
    if isinstance(mask, masks.Full):
        return jax_masks.FullMask(shape)
    if isinstance(mask, masks.Causal):
        return jax_masks.CausalMask(shape, offset=mask.offset)
    if isinstance(mask, masks.Local):
        return jax_masks.LocalMask(shape, (mask.left, mask.right), offset=0)
    if isinstance(mask, masks.Documents):
        return _Rows(mask, shape)
    parts = [jax_mask(part, q_len, kv_len) for part in mask.parts]
    join: Callable[[Any, Any], Any] = (
        (lambda a, b: a & b) if isinstance(mask, masks.AllOf) else (lambda a, b: a | b)
    )
    return functools.reduce(join, parts)


class _Rows(jax_masks.Mask):
    """Any mask of ours as one of JAX's, read block by block."""

    def __init__(self, mask: Mask, shape: tuple[int, int]) -> None:
        self._mask, self._shape = mask, shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows = rows_of(self._mask, *self._shape)
        queries, keys = index
        columns = np.arange(self._shape[1])[keys]
        lo, hi = rows.lo[:, queries, None], rows.hi[:, queries, None]
        return np.asarray(((columns >= lo) & (columns < hi)).any(axis=0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rows):
            return NotImplemented
        return self._shape == other._shape and self._mask == other._mask

    def __hash__(self) -> int:
        return hash((json.dumps(self._mask.json()), self._shape))
