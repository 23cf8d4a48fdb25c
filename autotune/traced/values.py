"""What a scalar of a kernel may be while its code is interpreted for the whole grid at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


class _Unknown:
    """A value only a run can know."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Table:
    """A Ref whose contents are known: a scalar-prefetch operand."""

    values: np.ndarray


@dataclass(slots=True)
class Cells:
    """A small table of one axis that the kernel writes: what each cell holds, step by step."""

    values: list[Value]


Value = Any  # an np.ndarray of the grid's rank, a Table, Cells, or UNKNOWN


def cell_of(eqn: Any, leaves: Sequence[Value]) -> int | None:
    """The one cell that a `get` or `swap` is about at every step; None where that is not known."""
    transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
    indices: Sequence[Any] = getattr(transforms[0], "indices", ()) if len(transforms) == 1 else ()
    if len(indices) != 1 or not isinstance(indices[0], np.ndarray | int) or np.size(indices[0]) > 1:
        return None
    return int(np.asarray(indices[0]).reshape(-1)[0])


def merge(index: np.ndarray, cases: Sequence[Value], numbers: Iterable[int]) -> Value:
    """`cases[i]` where `index == numbers[i]`; UNKNOWN when any case is."""
    if not all(isinstance(case, np.ndarray) for case in cases):
        same = bool(cases) and all(case is cases[0] for case in cases)
        return cases[0] if same else UNKNOWN
    result = cases[0]
    for number, case in list(zip(numbers, cases, strict=True))[1:]:
        result = np.where(index == number, case, result)
    return result
