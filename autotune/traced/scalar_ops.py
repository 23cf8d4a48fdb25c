"""NumPy's functions for JAX's elementwise primitives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def _divide(a: np.ndarray, b: np.ndarray) -> Any:
    if not np.issubdtype(a.dtype, np.integer):
        return a / b
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _select(which: np.ndarray, *cases: np.ndarray) -> Any:
    result: Any = cases[0]
    for n, case in enumerate(cases[1:], 1):
        result = np.where(which.astype(np.int64) == n, case, result)
    return result


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "div": _divide, "rem": np.fmod, "max": np.maximum, "min": np.minimum, "abs": np.abs,
    "sign": np.sign, "floor": np.floor, "ceil": np.ceil,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "not": operator.invert, "select_n": _select,
    "shift_left": operator.lshift, "shift_right_arithmetic": operator.rshift,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "stop_gradient": lambda x: x, "copy": lambda x: x, "copy_p": lambda x: x,
}  # fmt: skip
"""JAX primitive -> the NumPy function of the same meaning on scalars of the kernel."""


def vanishes(eqn: Any, name: str, values: list[np.ndarray]) -> bool:
    """Whether the compiler folds an integer operation to 0, so that no dependence is left.

    x - x, x · 0, x & 0 and x % 1; not x // 8 or min(x, 0), even where they never change (one
    buffer against two in the allocation dumps of both supported compilers).
    """
    if name == "sub":
        return eqn.invars[0] is eqn.invars[1]
    if name in ("mul", "and"):
        return any(value.size == 1 and not value.any() for value in values)
    return name == "rem" and values[1].size == 1 and bool((values[1] == 1).all())
