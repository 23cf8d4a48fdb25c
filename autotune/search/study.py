"""Which survivors are worth an expensive evaluation: all of them, or Optuna's choice.

The only user of Optuna. Candidates are asked and told in batches of a fixed size, whatever
the number of workers and the order in which they finish: same seed, same candidates.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.candidate import Candidate, Scalar
from autotune.row import Row
from autotune.search.evaluate import Judged

if TYPE_CHECKING:
    import optuna

BATCH = 8
REASKS = 4
"""How often a point outside the survivors or already known is asked again before the model's
next best is taken instead."""

Evaluate = Callable[[Sequence[Judged], Callable[[], bool]], dict[Candidate, Row]]
"""`(batch, out_of_time) -> rows`: of the whole batch, or of what was begun before time was out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits for one problem: distinct candidates evaluated, and seconds spent on them."""

    trials: int
    seconds: float | None = None


def explore(
    survivors: Sequence[Judged], evaluate: Evaluate, *, budget: Budget, seed: int
) -> dict[Candidate, Row]:
    """Rows of the survivors evaluated within `budget`; the default and the model's best first.

    A space no larger than `budget.trials` is exhausted. In a larger one, half the trials follow
    the model's order and the rest are TPE's, over the positions of the tunables' values. The first
    candidate, the default where it survived, is evaluated whatever `budget.seconds` says.
    """
    search = _Search(survivors, evaluate, budget)
    exhaustive = len(search.order) <= budget.trials
    first = search.order if exhaustive else search.order[: max(1, budget.trials // 2)]
    for start in range(0, len(first), BATCH):
        search.run(first[start : start + BATCH])
    if not exhaustive and search.room():
        _continue_with_tpe(search, seed)
    while not search.usable() and search.room() and (judged := search.next_best(())):
        search.run([judged])
    return search.rows


class _Search:
    """The candidates known so far, and the budget they used."""

    def __init__(self, survivors: Sequence[Judged], evaluate: Evaluate, budget: Budget) -> None:
        self.order = _model_order(survivors)
        self.rows: dict[Candidate, Row] = {}
        self._evaluate = evaluate
        self._budget = budget
        self._started = time.monotonic()

    def usable(self) -> bool:
        """Whether any candidate so far could win."""
        return any(row.status == "ok" for row in self.rows.values())

    def out_of_time(self) -> bool:
        """Whether `seconds` are over; never before the first candidate is known."""
        limit_s = self._budget.seconds
        return bool(
            self.rows and limit_s is not None and time.monotonic() - self._started >= limit_s
        )

    def room(self) -> int:
        """How many more candidates the budget allows now.

        A few more, one by one, while none was usable: a refused default must not be all there is.
        """
        left = self._budget.trials - len(self.rows)
        if left <= 0 and not self.usable():
            left = int(left > -BATCH)
        return 0 if self.out_of_time() else max(0, left)

    def run(self, batch: Sequence[Judged]) -> None:
        """Evaluates as much of `batch` as the budget allows; never one twice.

        Rows are kept in the order of the batch, not in that of finishing: it is what TPE sees.
        """
        fresh = [j for j in batch if j.candidate not in self.rows][: self.room()]
        first = [] if self.rows else fresh[:1]
        for part in filter(None, (first, fresh[len(first) :])):
            if self.out_of_time():
                return
            found = self._evaluate(part, self.out_of_time)
            self.rows |= {j.candidate: found[j.candidate] for j in part if j.candidate in found}

    def next_best(self, taken: Iterable[Candidate]) -> Judged | None:
        """The model's best candidate not known and not in `taken`."""
        known = self.rows.keys() | set(taken)
        return next((j for j in self.order if j.candidate not in known), None)


def _model_order(survivors: Sequence[Judged]) -> list[Judged]:
    """The default, then the model's order with one of each set of twins before any second one.

    Twins are candidates that the model cannot tell apart, as two VMEM limits that both suffice:
    trying one of them says most of what trying the others would. The one that leaves most to the
    kernel's own choice (nulls) is the first.
    """

    def plain(judged: Judged) -> tuple[int, str]:
        return sum(v is not None for _, v in judged.candidate.items), judged.candidate.json

    seen: Counter[tuple[object, ...]] = Counter()
    keyed = []
    for judged in sorted(survivors, key=plain):
        row = judged.row
        latency_ms = float("inf") if row.latency_model_ms is None else row.latency_model_ms
        twins = (latency_ms, row.hbm_bytes, row.dma_count, row.grid_steps, row.executed_flops)
        keyed.append(((not judged.candidate.is_default, seen[twins], latency_ms), judged))
        seen[twins] += 1
    return [judged for _, judged in sorted(keyed, key=lambda pair: pair[0])]


def _continue_with_tpe(search: _Search, seed: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    axes = _axes(search.order)
    study = optuna.create_study(
        direction="minimize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
    )
    by_candidate = {j.candidate: j for j in search.order}
    for candidate, row in search.rows.items():
        study.add_trial(_known_trial(optuna, axes, candidate, row))
    while room := search.room():
        asked = _ask(study, axes, search, by_candidate, min(BATCH, room))
        if not asked:
            return
        search.run([judged for judged, _ in asked])
        for judged, trial in asked:
            known = search.rows.get(judged.candidate)
            if trial is None and known is not None:
                study.add_trial(_known_trial(optuna, axes, judged.candidate, known))
            elif trial is not None:
                _tell(optuna, study, trial, known)


def _ask(
    study: optuna.Study,
    axes: dict[str, list[Scalar]],
    search: _Search,
    by_candidate: dict[Candidate, Judged],
    count: int,
) -> list[tuple[Judged, Any]]:
    """Up to `count` new survivors with their trial (None: taken in the model's order)."""
    asked: dict[Candidate, tuple[Judged, Any]] = {}
    for _ in range(count * REASKS):
        if len(asked) == count:
            break
        trial = study.ask()
        point = {n: v[trial.suggest_int(n, 0, len(v) - 1)] for n, v in axes.items()}
        judged = by_candidate.get(Candidate.of(point))
        if judged is None or judged.candidate in search.rows or judged.candidate in asked:
            study.tell(trial, state=_fail_state())
            continue
        asked[judged.candidate] = (judged, trial)
    while len(asked) < count:
        judged = search.next_best(asked)
        if judged is None:
            break
        asked[judged.candidate] = (judged, None)
    return list(asked.values())


def _fail_state() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _axes(survivors: Sequence[Judged]) -> dict[str, list[Scalar]]:
    """Tunable -> its values among the survivors, in a fixed order."""
    values: dict[str, dict[str, Scalar]] = {}
    for judged in survivors:
        for name, value in judged.candidate.items:
            values.setdefault(name, {})[repr(value)] = value
    return {n: sorted(v.values(), key=_value_order) for n, v in sorted(values.items())}


def _value_order(value: Scalar) -> tuple[str, float, str]:
    numeric = isinstance(value, int | float)
    return (type(value).__name__, float(value) if numeric else 0.0, str(value))  # type: ignore[arg-type]


def _known_trial(optuna: Any, axes: dict[str, list[Scalar]], candidate: Candidate, row: Row) -> Any:
    config = candidate.config
    latency_ms = _objective_ms(row)
    return optuna.trial.create_trial(
        params={n: v.index(config[n]) for n, v in axes.items()},
        distributions={
            n: optuna.distributions.IntDistribution(0, len(v) - 1) for n, v in axes.items()
        },
        value=latency_ms,
        state=_fail_state() if latency_ms is None else optuna.trial.TrialState.COMPLETE,
    )


def _tell(optuna: Any, study: optuna.Study, trial: Any, row: Row | None) -> None:
    latency_ms = None if row is None else _objective_ms(row)
    if latency_ms is None:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, latency_ms)


def _objective_ms(row: Row) -> float | None:
    """A finite positive latency, or None: a failure must never look like a fast candidate."""
    latency_ms = row.latency_compiled_ms
    usable = row.status == "ok" and latency_ms is not None and 0 < latency_ms < float("inf")
    return latency_ms if usable else None
