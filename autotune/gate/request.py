"""What the gate is asked to do, and what it is given to do it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autotune.candidate import Config
from autotune.measure.check import Checked
from autotune.measure.interpreted import Interpreter
from autotune.measure.stage import Measurer
from autotune.problem import Problem

EVIDENCE_OF = {"model": "model", "compile": "compiled", "measure": "measured"}
TOLERANCE = {"model": 0.02, "compile": 0.02, "measure": 0.05}
"""`--against` -> the relative slowdown that passes unless another is asked for."""


class Checker(Protocol):
    """Says whether a config's output is right: `Interpreter`, or a test's fake."""

    def check(self, problem: Problem, config: Config) -> Checked:
        """The verdict at a reduced problem with the same block structure."""

    def stop(self) -> None:
        """Makes `check`, in another thread, give up soon."""

    def close(self) -> None:
        """Ends what was started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the gate is to do.

    Attributes:
      against: `model`, `compile` or `measure`.
      tolerance: relative slowdown that still passes; None is `TOLERANCE`'s.
      update: write today's figures into the leaderboards, those of wrong or failing configs aside.
      checker: makes what checks the output of today's kernel where compiled evidence is compared.
      measurer: opens, at the first board that needs it, what takes fresh times on a device, or
        says why nothing can; used by `measure` only.
    """

    against: str
    tolerance: float | None = None
    update: bool = False
    checker: Callable[[], Checker] = Interpreter
    measurer: Callable[[str], Measurer | str] = lambda device: "nothing here takes times"

    @property
    def evidence(self) -> str:
        return EVIDENCE_OF[self.against]

    @property
    def allowed(self) -> float:
        return TOLERANCE[self.against] if self.tolerance is None else self.tolerance
