"""The mask language in Tokamax's own masks, aligned as those are: top-left (`top_left.py`)."""

from __future__ import annotations

import functools
import operator
from typing import Any

from autotune.errors import InputError
from autotune.kernels import tokamax_library
from autotune.kernels.masks import AllOf, Causal, Documents, Full, Local, Mask, document_lengths
from autotune.kernels.top_left import rows_of

MAX_DENSE = 2**28
"""Documents have no form of their own there and are given as one bool a pair: 256 MiB at most."""


def check_dense(mask: Mask, q_len: int, kv_len: int) -> None:
    """Raises InputError for documents of too many pairs."""
    if document_lengths(mask) and q_len * kv_len > MAX_DENSE:
        raise InputError(
            f"documents over {q_len} x {kv_len} pairs; Tokamax takes them as a dense mask, of at "
            f"most {MAX_DENSE} pairs here",
            path=("options", "mask"),
        )


def tokamax_mask(mask: Mask, q_len: int, kv_len: int) -> Any:
    """`mask` as one of Tokamax's."""
    library = tokamax_library.module(tokamax_library.SPLASH + "splash_attention_mask")
    shape = (q_len, kv_len)
    if isinstance(mask, Full):
        return library.FullMask(shape)
    if isinstance(mask, Causal):
        return library.CausalMask(shape, offset=mask.offset)
    if isinstance(mask, Local):
        return library.LocalMask(shape, window_size=(mask.left, mask.right), offset=0)
    if isinstance(mask, Documents):
        return library.NumpyMask(rows_of(mask, q_len, kv_len).dense())
    parts = [tokamax_mask(part, q_len, kv_len) for part in mask.parts]
    joined = operator.and_ if isinstance(mask, AllOf) else operator.or_
    return functools.reduce(joined, parts)
