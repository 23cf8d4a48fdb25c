"""The seam of the measuring stage: who answers what a candidate's time is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from autotune.candidate import Candidate
from autotune.measure.record import Measured
from autotune.problem import Problem


class Measurer(Protocol):
    """Measures candidates: `tpu.TpuMeasurer` on a chip, a recording, or a test's fake."""

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Each candidate once, with its record, as soon as it is known.

        Those of one call are timed interleaved, so that drift of the clock hits all alike.
        """

    def close(self) -> None:
        """Gives the device back."""
