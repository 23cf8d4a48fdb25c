"""Loops of a kernel's scalar code: which must be followed turn by turn, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.traced.jaxprs import adds_one, has_branches, open_jaxpr
from autotune.traced.values import UNKNOWN, Value


def turns_matter(body: Any, split: int, carry: Sequence[Value]) -> bool:
    """Whether a loop must be followed turn by turn: for its branches, or a scalar it computes."""
    jaxpr = open_jaxpr(body)[0]
    computed = [
        new
        for old, new, value in zip(jaxpr.invars[split:], jaxpr.outvars, carry, strict=True)
        if isinstance(value, np.ndarray) and old is not new and not adds_one(jaxpr, old, new)
    ]
    return bool(computed) or has_branches(body)


def kept(body: Any, split: int, carry: Sequence[Value]) -> list[Value]:
    """A loop's carry for all turns at once, and after it: what the body changes is unknown."""
    jaxpr = open_jaxpr(body)[0]
    same = [a is b for a, b in zip(jaxpr.invars[split:], jaxpr.outvars, strict=True)]
    return [value if keep else UNKNOWN for value, keep in zip(carry, same, strict=True)]
