"""Tables that a kernel writes: what one grid step leaves in SMEM, the next one reads.

A kernel that copies by hand keeps there which buffer is next, or where it is in its work. All steps
are interpreted at once, so this is a fixed point: what the steps were assumed to find is replaced
by what the steps before them left, until both agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autotune.traced.scalar_code import UNKNOWN, Cells, ScalarCode, Table, Value

MAX_PASSES = 12
"""Every pass makes one more step right; a cell that still changes after these is unknown."""
MAX_CELLS = 16
"""Larger tables that a kernel writes are data, not state."""

State = dict[int, list[Value]]


def run(
    make: Callable[[], ScalarCode], body: Any, tables: Sequence[Value], rest: Sequence[Value]
) -> tuple[ScalarCode, list[Value]]:
    """The interpreter that `make` gave, after it has run `body` over the grid.

    Args:
      tables: `body`'s first operands, the contents of prefetched tables; `rest` are the others.

    Returns:
      The interpreter, and the tables, unknown where the kernel writes them.
    """
    code = make()
    code.run(body, [*tables, *rest])
    changing = [n for n, table in enumerate(tables) if id(table) in code.written]
    if not changing:
        return code, list(tables)
    fixed = [UNKNOWN if n in changing else table for n, table in enumerate(tables)]
    small = [
        n for n in changing if tables[n].values.ndim == 1 and tables[n].values.size <= MAX_CELLS
    ]
    state: State = {n: [code.scalar(value) for value in tables[n].values] for n in small}
    passes = 0
    while True:
        code, passes = make(), passes + 1
        cells = {n: Cells(list(values)) for n, values in state.items()}
        code.run(body, [*(cells.get(n, table) for n, table in enumerate(fixed)), *rest])
        found = {n: _left(code.grid, cells[n], tables[n]) for n in small}
        if all(_same(*pair) for n in small for pair in zip(state[n], found[n], strict=True)):
            return code, fixed
        state = {
            n: [
                new if passes < MAX_PASSES or _same(old, new) else UNKNOWN
                for old, new in zip(state[n], found[n], strict=True)
            ]
            for n in small
        }


def _left(grid: tuple[int, ...], cells: Cells, table: Table) -> list[Value]:
    """What each step finds in the cells: what the step before left, the first step the table's."""
    found: list[Value] = []
    for value, first in zip(cells.values, table.values, strict=True):
        if not isinstance(value, np.ndarray):
            found.append(UNKNOWN)
            continue
        flat = np.broadcast_to(value, grid).reshape(-1)
        shifted = np.concatenate([np.asarray([first], flat.dtype), flat[:-1]])
        found.append(shifted.reshape(grid))
    return found


def _same(assumed: Value, found: Value) -> bool:
    if isinstance(assumed, np.ndarray) and isinstance(found, np.ndarray):
        return np.array_equal(np.broadcast_to(assumed, found.shape), found)
    return assumed is UNKNOWN  # once unknown, always
