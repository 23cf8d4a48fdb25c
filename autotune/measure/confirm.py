"""The end of a search: its leaders timed once more, side by side, so that no drift crowns one."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.candidate import Candidate
from autotune.measure.record import Measured
from autotune.measure.stage import Measurer
from autotune.problem import Problem

TOP = 4


def confirm(
    measurer: Measurer,
    problem: Problem,
    measured: Mapping[Candidate, Measured],
    *,
    top: int = TOP,
) -> dict[Candidate, Measured]:
    """New records of the leaders of `measured`, to take the place of those they had.

    The `top` fastest are timed again in one interleaved call, and again with whoever is among them
    then, until all of them have been: a candidate that was timed while the clock was fast cannot
    stay ahead of those timed later. At the worst every candidate is timed once more.
    """
    known = {c: m for c, m in measured.items() if m.status == "ok"}
    again: dict[Candidate, Measured] = {}
    while True:
        leaders = sorted(known, key=lambda c: (known[c].median_ms, c.json))[:top]
        if len(leaders) < 2 or all(candidate in again for candidate in leaders):
            return again
        for candidate, record in measurer.measure(problem, leaders):
            again[candidate] = record
            known.pop(candidate, None)
            if record.status == "ok":
                known[candidate] = record
