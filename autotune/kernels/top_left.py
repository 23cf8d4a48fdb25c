"""Masks as JAX's and Tokamax's attention kernels align them: query i stands at position i.

Whatever the lengths: with `causal` query i sees keys up to i + offset. `masks.py` itself aligns
bottom-right, as this project's own kernels do.
"""

from __future__ import annotations

import functools
import json

import numpy as np

from autotune.errors import InputError
from autotune.kernels import masks
from autotune.kernels.masks import Intervals, Mask
from autotune.problem import Problem


@functools.lru_cache(maxsize=16)
def rows_of(mask: Mask, q_len: int, kv_len: int) -> Intervals:
    """The keys each query sees, top-left aligned. Raises ValueError for lengths over the limit."""
    if max(q_len, kv_len) > masks.MAX_LENGTH:
        raise ValueError(
            f"masks go up to {masks.MAX_LENGTH} queries and keys, not {q_len} x {kv_len}"
        )
    return mask.intervals(np.arange(q_len, dtype=np.int64), kv_len)


def check(problem: Problem, mask: Mask, whose: str) -> None:
    """Raises InputError for a mask that `whose` kernel cannot run: documents of another length, or
    a query that sees no key."""
    q_len, kv_len = problem.shape["q_len"], problem.shape["kv_len"]
    for lengths in masks.document_lengths(mask):
        if sum(lengths) != kv_len:
            raise InputError(
                f"document lengths sum to {sum(lengths)}, not kv_len {kv_len}",
                path=("options", "mask"),
            )
    try:
        rows = rows_of(mask, q_len, kv_len)
    except ValueError as error:
        raise InputError(str(error), path=("shape",)) from None
    blind = int((rows.hi <= rows.lo).all(axis=0).sum())
    if blind:
        raise InputError(
            f"mask {json.dumps(mask.json())} hides every key from {blind} of {q_len} queries; "
            f"{whose} needs one at least (query i stands at position i)",
            path=("options", "mask"),
        )
