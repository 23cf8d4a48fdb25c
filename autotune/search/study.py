"""Which survivors are worth an expensive evaluation: all of them, or Optuna's choice.

Candidates are asked and told in batches of a fixed size, whatever the number of workers, of hosts
that share them, and the order in which they finish: same seed, same candidates.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autotune.candidate import Candidate
from autotune.row import Row
from autotune.search.evaluate import Judged
from autotune.search.tpe import Tpe

BATCH = 8

Evaluate = Callable[[Sequence[Judged], Callable[[], bool]], dict[Candidate, Row]]
"""`(batch, out_of_time) -> rows`: of the whole batch, or of what was begun before time was out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits for one problem: distinct candidates evaluated, and seconds spent on them."""

    trials: int
    seconds: float | None = None


def explore(
    survivors: Sequence[Judged],
    evaluate: Evaluate,
    *,
    budget: Budget,
    seed: int,
    first: frozenset[Candidate] = frozenset(),
) -> dict[Candidate, Row]:
    """Rows of the survivors evaluated within `budget`; the default and the model's best first.

    Those of `first`, which only a recording can time, come before them all.

    A space no larger than `budget.trials` is exhausted. In a larger one, half the trials follow
    the model's order and the rest are TPE's, over the positions of the tunables' values. The first
    candidate, the default where it survived, is evaluated whatever `budget.seconds` says.
    """
    search = Search(_model_order(survivors, first), evaluate, budget)
    exhaustive = len(search.order) <= budget.trials
    wanted = sum(j.candidate in first for j in search.order)
    count = wanted + max(1, (budget.trials - wanted) // 2)
    search.run(search.order if exhaustive else search.order[:count])
    if not exhaustive and search.room():
        _continue_with_tpe(search, seed)
    while not search.usable() and search.room() and (judged := search.next_best(())):
        search.run([judged])
    return search.rows


class Search:
    """The candidates known so far, and the budget they used."""

    def __init__(self, order: Sequence[Judged], evaluate: Evaluate, budget: Budget) -> None:
        self.order = order
        self.rows: dict[Candidate, Row] = {}
        self._evaluate = evaluate
        self._budget = budget
        self._started = time.monotonic()

    def usable(self) -> bool:
        """Whether any candidate so far could win: beside the default, where others were tried."""
        alone = len(self.rows) == 1
        return any(r.status == "ok" and (alone or not c.is_default) for c, r in self.rows.items())

    def out_of_time(self) -> bool:
        """Whether `seconds` are over; never before the first candidate is known."""
        limit_s = self._budget.seconds
        return bool(
            self.rows and limit_s is not None and time.monotonic() - self._started >= limit_s
        )

    def room(self) -> int:
        """How many more candidates the budget allows now.

        A few more, one by one, while none was usable: a default, refused or not, beside nothing but
        refused candidates must not be all there is.
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

    def latencies_ms(self) -> dict[Candidate, float | None]:
        """What is known; None for a candidate that failed."""
        return {candidate: objective_ms(row) for candidate, row in self.rows.items()}

    def next_best(self, taken: Iterable[Candidate]) -> Judged | None:
        """The model's best candidate not known and not in `taken`."""
        known = self.rows.keys() | set(taken)
        return next((j for j in self.order if j.candidate not in known), None)


def _model_order(survivors: Sequence[Judged], first: frozenset[Candidate]) -> list[Judged]:
    """Those of `first`, the default, then the model's order.

    One of each set of twins comes before any second one.

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
        late = judged.candidate not in first
        keyed.append(((late, not judged.candidate.is_default, seen[twins], latency_ms), judged))
        seen[twins] += 1
    return [judged for _, judged in sorted(keyed, key=lambda pair: pair[0])]


def _continue_with_tpe(search: Search, seed: int) -> None:
    tpe = Tpe((j.candidate for j in search.order), seed)
    by_candidate = {j.candidate: j for j in search.order}
    tpe.tell(search.latencies_ms())
    while room := search.room():
        count = min(BATCH, room)
        asked = tpe.ask(count, closed=search.rows)
        while len(asked) < count and (judged := search.next_best(asked)):
            asked.append(judged.candidate)
        if not asked:
            return
        search.run([by_candidate[candidate] for candidate in asked])
        known = search.latencies_ms()
        tpe.tell({c: known[c] for c in asked if c in known})


def objective_ms(row: Row) -> float | None:
    """A finite positive latency, or None: a failure must never look like a fast candidate."""
    latency_ms = {
        "model": row.latency_model_ms,
        "compiled": row.latency_compiled_ms,
        "measured": row.latency_measured_ms,
    }[row.evidence]
    usable = row.status == "ok" and latency_ms is not None and 0 < latency_ms < float("inf")
    return latency_ms if usable else None
