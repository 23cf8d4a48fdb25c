"""Optuna's TPE over the candidates of a problem, whose parameters are positions of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autotune.candidate import Candidate, Scalar
from autotune.search.ledger import axes

REASKS = 4
"""How often a point that is no open candidate is asked again, for each one that is wanted."""


class Tpe:
    """A seeded sampler that is told of points and asked for more.

    Args:
      candidates: the points there are; TPE may propose others, which then count as failures.
    """

    def __init__(self, candidates: Iterable[Candidate], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._candidates = list(candidates)
        self._known = set(self._candidates)
        self._axes = axes(self._candidates)
        self._asked: dict[Candidate, Any] = {}
        self._study = optuna.create_study(
            direction="minimize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
        )

    def tell(self, latencies_ms: Mapping[Candidate, float | None]) -> None:
        """What candidates took; None for those that failed."""
        from optuna.distributions import BaseDistribution, IntDistribution
        from optuna.trial import TrialState, create_trial

        axes: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1) for name, values in self._axes.items()
        }
        for candidate, latency_ms in latencies_ms.items():
            state = TrialState.FAIL if latency_ms is None else TrialState.COMPLETE
            trial = self._asked.pop(candidate, None)
            if trial is not None:
                self._study.tell(trial, latency_ms, state=state)
                continue
            params = {n: _position(self._axes[n], v) for n, v in candidate.items}
            self._study.add_trial(
                create_trial(state=state, value=latency_ms, params=params, distributions=axes)
            )

    def ask(self, count: int, closed: Iterable[Candidate] = ()) -> list[Candidate]:
        """Up to `count` distinct candidates that are not `closed`; fewer where TPE finds no more.

        Each is to be told of before the next question.
        """
        from optuna.trial import TrialState

        closed = set(closed)
        for trial in self._asked.values():
            self._study.tell(trial, state=TrialState.FAIL)
        self._asked = {}
        for _ in range(count * REASKS):
            if len(self._asked) == count:
                break
            trial = self._study.ask()
            point = {n: v[trial.suggest_int(n, 0, len(v) - 1)] for n, v in self._axes.items()}
            candidate = Candidate.of(point)
            if candidate not in self._known or candidate in closed or candidate in self._asked:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._asked[candidate] = trial
        return list(self._asked)


def _position(values: list[Scalar], value: Scalar) -> int:
    """Python's `index` would take True for 1."""
    return next(i for i, other in enumerate(values) if repr(other) == repr(value))
