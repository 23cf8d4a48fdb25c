"""The stages' evaluations that `study` searches with, shared with the other sweeps on a storage."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from autotune import evidence, versions
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.measure import record
from autotune.measure.record import Measured
from autotune.measure.stage import Measurer
from autotune.row import Row
from autotune.search.evaluate import Judge, Judged
from autotune.search.fleet import Fleet
from autotune.search.ledger import Codec, Ledger, Topic
from autotune.search.prune import Stages
from autotune.search.space import Space
from autotune.search.study import Evaluate, objective_ms


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


@contextmanager
def measuring(
    stages: Stages,
    judge: Judge,
    space: Space,
    judged: Sequence[Judged],
    *,
    trials: int,
    fleet: Fleet,
    measurer: Measurer | None,
    source: str,
) -> Iterator[Evaluate]:
    """Times candidates of `judged`, each on one host of the fleet.

    Without a measurer, this host takes over what living others find.

    Args:
      source: whose times they are: the timer's, or a recording's.
    """
    problem, progress = judge.problem, stages.progress
    rows = {j.candidate: j.row for j in judged}
    progress.start(problem.label, "measure", min(len(rows), trials))
    codec = Codec(
        encode=record.to_json,
        decode=record.from_json,
        latency_ms=lambda c, measured: objective_ms(judge.measured(rows[c], measured)),
    )
    flags = environment.compile_flags(os.environ)
    topic = _topic("measure", judge, space, f"{source} method {record.METHOD} {flags}")
    best_ms: float | None = None

    def evaluate(batch: Sequence[Judged], out_of_time: Callable[[], bool]) -> dict[Candidate, Row]:
        nonlocal best_ms

        def work(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, Measured]]:
            """What this host gets is timed together; it takes no more than its part of a batch."""
            part = fleet.part(problem.key, len(batch))
            while measurer and (mine := list(itertools.islice(candidates, part))):
                yield from measurer.measure(problem, mine)

        def stop() -> bool:
            return out_of_time() or not (measurer or fleet.is_measured(problem.key))

        found = {}
        for candidate, measured in ledger.share([j.candidate for j in batch], work, stop):
            row = found[candidate] = judge.measured(rows[candidate], measured)
            best_ms = min(filter(None, (best_ms, objective_ms(row))), default=None)
            progress.advance(best_ms=best_ms)
        return found

    with Ledger(fleet, topic, codec, fresh=stages.fresh) as ledger:
        yield evaluate


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
