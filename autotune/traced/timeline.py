"""The pipeline's timeline: grid steps grouped by what they do and what is copied meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.call_record import StepClass, Window
from autotune.traced.block_moves import Moves, distinct_rows
from autotune.traced.counts import Weight
from autotune.traced.scalar_code import ScalarCode


@dataclass(frozen=True, slots=True)
class Operand:
    """A window with its moves over the grid (None where it stays in HBM)."""

    window: Window
    moves: Moves | None

    @property
    def copied(self) -> np.ndarray:
        """bool[steps]: copied in before the step, or written back after it."""
        assert self.moves is not None
        return self.moves.last_of_run if self.window.role == "output" else self.moves.changed

    def bytes_at(self, step: int) -> int:
        """Bytes its copy of one step moves."""
        assert self.moves is not None
        tiled = self.moves.tiled
        return (tiled if isinstance(tiled, int) else int(tiled[step])) * self.window.bits // 8


def timeline(
    code: ScalarCode, operands: Sequence[Operand], steps: int
) -> tuple[tuple[StepClass, ...], int, int]:
    """Step classes, and the bytes moved before the first step and after the last."""
    names = list(code.counts.scopes)
    counts = [_flat(code.counts.scopes[name], code.grid) for name in names]
    moving = [operand for operand in operands if operand.moves is not None]
    flops = _flat(sum(code.counts.flops.values()), code.grid)
    columns = [*counts, flops]
    columns += [column for operand in moving for column in _neighbour_columns(operand)]
    totals: dict[tuple[Any, ...], int] = {}
    for first, number in zip(*map(np.ndarray.tolist, distinct_rows(columns, steps)), strict=True):
        ran = tuple(c if isinstance(c, int) else int(c[first]) for c in (*counts, flops))
        after = _moved(operands, "input", first + 1) if first + 1 < steps else (0, ())
        before = _moved(operands, "output", first - 1) if first else (0, ())
        key = (ran, *after, *before)
        totals[key] = totals.get(key, 0) + number
    classes = tuple(
        StepClass(
            steps=number, scopes={n: c for n, c in zip(names, ran[:-1], strict=True) if c},
            next_in_bytes=in_bytes, next_in_copies=len(ins), next_in_windows=ins,
            prev_out_bytes=out_bytes, prev_out_copies=len(outs), prev_out_windows=outs,
            flops=ran[-1],
        )
        for (ran, in_bytes, ins, out_bytes, outs), number in totals.items()
    )  # fmt: skip
    return classes, _moved(operands, "input", 0)[0], _moved(operands, "output", steps - 1)[0]


def _neighbour_columns(operand: Operand) -> list[np.ndarray | int]:
    """What tells steps apart: is the neighbour's block copied, and how much of it exists."""
    assert operand.moves is not None
    ahead = operand.window.role == "input"
    copied = operand.copied
    columns: list[np.ndarray | int] = [
        np.append(copied[1:], False) if ahead else np.append(False, copied[:-1])
    ]
    if not isinstance(operand.moves.tiled, int):
        sizes = operand.moves.tiled * copied
        columns.append(np.append(sizes[1:], 0) if ahead else np.append(0, sizes[:-1]))
    return columns


def _moved(operands: Sequence[Operand], role: str, step: int) -> tuple[int, tuple[int, ...]]:
    """(bytes, windows) of the inputs copied in before a step, or the outputs written after it."""
    happen = [
        (number, operand)
        for number, operand in enumerate(operands)
        if operand.moves is not None and operand.window.role == role and operand.copied[step]
    ]
    return sum(operand.bytes_at(step) for _, operand in happen), tuple(n for n, _ in happen)


def _flat(count: Weight, grid: tuple[int, ...]) -> np.ndarray | int:
    if isinstance(count, int):
        return count
    return np.broadcast_to(count, grid).reshape(-1)
