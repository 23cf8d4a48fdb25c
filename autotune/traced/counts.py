"""What a kernel runs how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Weight = Any
"""Executions per grid step: an int, or an int64 array of the grid's rank."""


@dataclass(slots=True)
class Counts:
    """What ran how often, per grid step (arrays of the grid's rank, or ints).

    Attributes:
      scopes: named scope -> times it is entered.
      regions: named scope -> times it stands in the program text (unrolled loops included).
      loops: named scope -> per level of rolled loops inside it, their iterations and how many
        stand in the program text.
      branches: per cond equation, executions of each branch; None where the predicate is unknown.
      flops: named scope -> FLOPs of its dots ("" outside any scope).
      hand_copies, hand_bytes: copies from or to HBM that the kernel starts itself, and their bytes.
      unsure: scopes whose count rests on a predicate or trip count that is unknown.
    """

    scopes: dict[str, Weight] = field(default_factory=dict)
    regions: dict[str, int] = field(default_factory=dict)
    loops: dict[str, list[tuple[Weight, int]]] = field(default_factory=dict)
    branches: dict[int, list[Weight | None]] = field(default_factory=dict)
    flops: dict[str, Weight] = field(default_factory=dict)
    hand_copies: Weight = 0
    hand_bytes: Weight = 0
    unsure: set[str] = field(default_factory=set)

    def enter(self, scope: str, weight: Weight, copies: int, sure: bool) -> None:
        """A named scope begins: `weight` times a step, `copies` times in the text."""
        add(self.scopes, scope, weight)
        self.regions[scope] = self.regions.get(scope, 0) + copies
        if not sure:
            self.unsure.add(scope)

    def loop(self, scope: str, level: int, trips: Weight, copies: int) -> None:
        """A rolled loop of a scope, `level` loops around it: `trips` a step, `copies` in the text.

        A loop that comes by again, followed turn by turn, has 0 copies.
        """
        levels = self.loops.setdefault(scope, [])
        levels += [(0, 0)] * (level + 1 - len(levels))
        old_trips, old_copies = levels[level]
        levels[level] = (old_trips + trips, old_copies + copies)


def add(totals: dict[str, Weight], name: str, weight: Weight) -> None:
    totals[name] = totals[name] + weight if name in totals else weight
