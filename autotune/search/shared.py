"""The stages' evaluations that `study` searches with, shared with the other sweeps on a storage."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autotune import evidence, versions
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.measure import record
from autotune.measure.confirm import confirm
from autotune.measure.record import Measured
from autotune.measure.stage import Measurer
from autotune.row import Row
from autotune.search.evaluate import Judge, Judged
from autotune.search.fleet import Fleet
from autotune.search.ledger import Codec, Ledger, Topic
from autotune.search.prune import Stages
from autotune.search.space import Space
from autotune.search.study import Evaluate, objective_ms

Samples = dict[Candidate, Measured]


@contextmanager
def compiling(
    stages: Stages,
    judge: Judge,
    space: Space,
    judged: Sequence[Judged],
    *,
    trials: int,
    fleet: Fleet | None,
) -> Iterator[Evaluate]:
    """Compiles candidates of `judged`; with a fleet, each on one of its hosts."""
    total = min(len(judged), trials)
    if fleet is None:
        yield stages.compile(judge, total)
        return
    by_candidate = {j.candidate: j for j in judged}
    limits = stages.pool.timeout_s, stages.pool.memory_limit_bytes
    codec = Codec(
        encode=evidence.to_json,
        decode=evidence.from_json,
        latency_ms=lambda c, compiled: objective_ms(judge.compiled(by_candidate[c], compiled)),
        holds=lambda compiled: compiled.repeatable and compiled.holds_under(*limits),
    )
    topic = _topic("compile", judge, space, str(judge.method_fingerprint))
    with Ledger(fleet, topic, codec, fresh=stages.fresh) as ledger:
        yield stages.compile(judge, total, ledger.share)


class Timing:
    """The measuring stage of one problem, an `Evaluate`: each candidate is timed by one host.

    Without a measurer, this host takes over what living others find.

    Args:
      judged: what can be timed, with the rows it has so far.
      trials: the budget, for the progress shown.
      source: whose times they are: the timer's, or a recording's.
    """

    def __init__(
        self,
        stages: Stages,
        judge: Judge,
        space: Space,
        judged: Sequence[Judged],
        *,
        trials: int,
        fleet: Fleet,
        measurer: Measurer | None,
        source: str,
    ) -> None:
        self._stages, self._judge, self._fleet = stages, judge, fleet
        self._space, self._measurer, self._source = space, measurer, source
        self._rows = {j.candidate: j.row for j in judged}
        self._records: dict[Candidate, Measured] = {}
        self._best_ms: float | None = None
        stages.progress.start(judge.problem.label, "measure", min(len(judged), trials))
        codec = Codec(encode=record.to_json, decode=record.from_json, latency_ms=self._latency_ms)
        self._ledger = Ledger(fleet, self._topic("measure"), codec, fresh=stages.fresh)

    def __enter__(self) -> Timing:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ledger.__exit__(*exception)

    def __call__(
        self, batch: Sequence[Judged], out_of_time: Callable[[], bool]
    ) -> dict[Candidate, Row]:
        problem = self._judge.problem

        def work(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, Measured]]:
            """What this host gets is timed together; it takes no more than its part of a batch."""
            part = self._fleet.part(problem.key, len(batch))
            while self._measurer and (mine := list(itertools.islice(candidates, part))):
                yield from self._measurer.measure(problem, mine)

        def stop() -> bool:
            return out_of_time() or self._in_vain()

        rows = {}
        for candidate, measured in self._ledger.share([j.candidate for j in batch], work, stop):
            self._records[candidate] = measured
            rows[candidate] = self._judge.measured(self._rows[candidate], measured)
            times_ms = (self._best_ms, objective_ms(rows[candidate]))
            self._best_ms = min(filter(None, times_ms), default=None)
            self._stages.progress.advance(best_ms=self._best_ms)
        return rows

    def confirmed(self) -> dict[Candidate, Row]:
        """Rows of the leaders, timed once more side by side on one host: none is ahead by drift."""
        problem, measurer = self._judge.problem, self._measurer
        known = {c: ms for c, m in self._records.items() if (ms := self._latency_ms(c, m))}
        leader = min(known, key=lambda c: (known[c], c.json), default=None)
        if leader is None or len(known) < 2:
            return {}

        def work(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, Samples]]:
            if measurer is not None:
                for candidate in candidates:
                    yield candidate, confirm(measurer, problem, self._records)

        codec: Codec[Samples] = Codec(
            encode=lambda again: {c.json: record.to_json(m) for c, m in again.items()},
            decode=lambda texts: {
                Candidate.of(json.loads(c)): record.from_json(m) for c, m in texts.items()
            },
            latency_ms=lambda candidate, again: known[candidate],
        )
        topic = self._topic(f"confirm {len(self._records)}")
        with Ledger(self._fleet, topic, codec, fresh=self._stages.fresh) as ledger:
            again = dict(ledger.share([leader], work, self._in_vain)).get(leader, {})
        return {c: self._judge.measured(self._rows[c], m) for c, m in again.items()}

    def _in_vain(self) -> bool:
        """Whether nobody is left who could time what is asked for."""
        return not (self._measurer or self._fleet.is_measured(self._judge.problem.key))

    def _latency_ms(self, candidate: Candidate, measured: Measured) -> float | None:
        return objective_ms(self._judge.measured(self._rows[candidate], measured))

    def _topic(self, stage: str) -> Topic:
        flags = environment.compile_flags(os.environ)
        method = f"{self._source} method {record.METHOD} {flags}"
        return _topic(stage, self._judge, self._space, method)


def _topic(stage: str, judge: Judge, space: Space, method: str) -> Topic:
    problem = judge.problem
    here = versions.installed()
    made_with = (judge.kernel_fingerprint, here["jax"], here["libtpu"], method)
    return Topic(
        stage=stage,
        subject=f"{problem.kernel} {problem.device} {problem.key}",
        method=json.dumps(made_with),
        candidates=frozenset(space.legal),
    )
