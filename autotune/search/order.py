"""In which order survivors are timed, and when to stop: few trials on a device that is scarce.

Compiled latencies err in ways that repeat: all of a kernel by one factor, those of one layout by
another. So each measurement corrects the predictions of its neighbours, and what is now expected to
be fastest is timed next; every fourth trial is TPE's, which takes the predictions for trials.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autotune.candidate import Candidate
from autotune.row import Row
from autotune.search.evaluate import Judged
from autotune.search.study import Budget, Evaluate, Search
from autotune.search.tpe import Tpe

Floats = npt.NDArray[np.float64]

BATCH = 4
"""Timed interleaved, or shared by the hosts of a fleet."""
TPE_TURN = 4
BAND = 0.25
"""Half a prediction's band where its row has none, as a share of it."""
KINSHIP = 0.5
"""Correlation of the errors of two candidates for each tunable in which they differ."""
SPREAD = 0.1
"""Of the errors (of logarithms) around the one that all have in common."""
NOISE = 0.015
"""Of a measurement: one configuration drifts by 1.5 % between runs (silicon_tokamax_splash.csv)."""


def time_survivors(
    survivors: Sequence[Judged], evaluate: Evaluate, *, budget: Budget, seed: int
) -> dict[Candidate, Row]:
    """Measured rows of the survivors, the default and the predicted best first.

    Ends at the budget, or when no other candidate's corrected prediction, with its band, beats the
    best that was measured.
    """
    order = TimingOrder(survivors, seed)
    by_candidate = {j.candidate: j for j in survivors}
    search = Search(survivors, evaluate, budget)
    while room := search.room():
        batch = order.next(search.latencies_ms(), min(BATCH, room))
        if not batch:
            break
        known = len(search.rows)
        search.run([by_candidate[candidate] for candidate in batch])
        if len(search.rows) == known:
            break
    return search.rows


class TimingOrder:
    """Which candidates to time next, given what others took. A function of those and the seed."""

    def __init__(self, survivors: Sequence[Judged], seed: int) -> None:
        ordered = sorted(survivors, key=lambda j: (_predicted_ms(j.row), j.candidate.json))
        self._seed = seed
        self._candidates = [j.candidate for j in ordered]
        self._predicted: Floats = np.log([_predicted_ms(j.row) for j in ordered])
        self._low: Floats = np.log([_low_share(j.row) for j in ordered])
        self._default = next((c for c in self._candidates if c.is_default), None)
        self._kinship = _kinship(self._candidates)

    def next(self, known_ms: Mapping[Candidate, float | None], count: int) -> list[Candidate]:
        """Up to `count` candidates not in `known_ms` (None: failed), best first; none to stop."""
        expected = self._expected(known_ms)
        times_ms = [t for t in known_ms.values() if t is not None]
        best = math.log(min(times_ms)) if times_ms else math.inf
        hopeful = [
            (candidate != self._default, log_ms, candidate)
            for candidate, log_ms, low in zip(self._candidates, expected, self._low, strict=True)
            if candidate not in known_ms and (candidate == self._default or log_ms + low < best)
        ]
        ranked = [candidate for *_, candidate in sorted(hopeful, key=lambda h: h[:2])]
        chosen: list[Candidate] = []
        for turn in range(len(known_ms), len(known_ms) + min(count, len(ranked))):
            left = [c for c in ranked if c not in chosen]
            asked = turn % TPE_TURN == TPE_TURN - 1 and self._tpe(expected, known_ms, left, turn)
            chosen.append(asked or left[0])
        return chosen

    def _expected(self, known_ms: Mapping[Candidate, float | None]) -> Floats:
        """Logarithms of all latencies: predicted, and corrected by the errors of the known ones.

        The errors are a Gaussian process over the tunables around an unknown common one (simple
        kriging; Rasmussen and Williams, Gaussian Processes for Machine Learning, eq. 2.23).
        """
        times = [(i, t) for i, c in enumerate(self._candidates) if (t := known_ms.get(c))]
        if not times:
            return self._predicted
        at = [i for i, _ in times]
        errors = np.log([t for _, t in times]) - self._predicted[at]
        common = 1.0  # variance of the common error: wide, so that the data decide
        covariance = common + SPREAD**2 * self._kinship
        known = covariance[np.ix_(at, at)] + NOISE**2 * np.eye(len(at))
        corrected: Floats = self._predicted + covariance[:, at] @ np.linalg.solve(known, errors)
        return corrected

    def _tpe(
        self,
        expected: Floats,
        known_ms: Mapping[Candidate, float | None],
        left: Collection[Candidate],
        turn: int,
    ) -> Candidate | None:
        """What TPE would time next among `left`, with expectations for trials where none was."""
        latencies_ms = {
            c: known_ms[c] if c in known_ms else float(np.exp(log_ms))
            for c, log_ms in zip(self._candidates, expected, strict=True)
        }
        tpe = Tpe(self._candidates, self._seed + turn)
        tpe.tell(latencies_ms)
        closed = set(self._candidates) - set(left)
        return next(iter(tpe.ask(1, closed=closed)), None)


def _predicted_ms(row: Row) -> float:
    return row.latency_compiled_ms or row.latency_model_ms or math.inf


def _low_share(row: Row) -> float:
    """The lower end of the band of a prediction, as a share of it."""
    predicted_ms = row.latency_compiled_ms or row.latency_model_ms
    if row.latency_low_ms is None or not predicted_ms:
        return 1 - BAND
    return min(1.0, row.latency_low_ms / predicted_ms)


def _kinship(candidates: Sequence[Candidate]) -> Floats:
    """`KINSHIP` to the power of the number of tunables in which two candidates differ."""
    values = [[repr(value) for _, value in c.items] for c in candidates]
    texts = np.array(values, dtype=object).reshape(len(candidates), -1)
    differing = (texts[:, None, :] != texts[None, :, :]).sum(axis=2)
    kinship: Floats = KINSHIP**differing
    return kinship
