"""The pipeline: problems → candidates → model → compile → measure → leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune import leaderboard
from autotune.candidate import Candidate
from autotune.config import Config, ProblemSpec
from autotune.errors import InputError
from autotune.kernels import base
from autotune.leaderboard import Board
from autotune.measure.replay import Replay
from autotune.plan import Plan, Reach, reached
from autotune.problem import Problem
from autotune.progress import Progress
from autotune.row import EVIDENCE, Row
from autotune.search import crew as crews
from autotune.search import shared
from autotune.search.crew import Crew
from autotune.search.evaluate import Judge, Judged
from autotune.search.order import time_survivors
from autotune.search.prune import Stages
from autotune.search.space import Space
from autotune.search.space import of as space_of
from autotune.search.study import explore


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """One problem on its way down the pipeline."""

    spec: ProblemSpec
    space: Space
    judge: Judge
    rows: dict[Candidate, Row]

    @property
    def survivors(self) -> list[Judged]:
        """The `ok` candidates of the strongest evidence there is."""
        usable = {c: row for c, row in self.rows.items() if row.status == "ok"}
        strongest = max((EVIDENCE.index(row.evidence) for row in usable.values()), default=0)
        return [
            Judged(candidate=candidate, row=row)
            for candidate, row in usable.items()
            if EVIDENCE.index(row.evidence) == strongest
        ]


def run(configs: Sequence[Config], plan: Plan, progress: Progress) -> list[Board]:
    """Sweeps every problem of `configs` and returns their leaderboards.

    Raises:
      NoCompilerError, NoTpuError: a stage was asked for that this machine cannot run.
      InputError: the results directory, the storage or the recording cannot be used.
    """
    leaderboard.check_writable(plan.results)
    replay = None if plan.replay is None else Replay(plan.replay)
    reach = reached(plan, progress)
    spaces = _spaces(configs, replay, progress)
    if not plan.fresh:
        for spec, _ in spaces:
            leaderboard.check_mergeable(_place(plan, spec.problem))
    with (
        crews.gathered(
            storage_url=None if reach.last == "model" else plan.storage,
            results=plan.results,
            replay=replay if reach.last == "measure" else None,
            attached=reach.attached,
            timer=plan.timer,
            seed=plan.seed,
            timeout_s=plan.timeout_s,
        ) as crew,
        Stages.open(
            jobs=plan.jobs, timeout_s=plan.timeout_s, fresh=plan.fresh, progress=progress
        ) as stages,
    ):
        crew.announce([spec.problem for spec, _ in spaces])
        works = (_compiled(spec, space, plan, stages, crew, reach) for spec, space in spaces)
        # A host that can time nothing does all of its own work before it waits for those that can;
        # where nobody times, each leaderboard is written as soon as it is made.
        waits = reach.last == "measure" and not crew.times
        ready = list(works) if waits else works
        return [_measured(work, plan, stages, crew, reach) for work in ready]


def _place(plan: Plan, problem: Problem) -> Path:
    return leaderboard.path_of(plan.results, problem.device, problem.kernel, problem.key)


def _spaces(
    configs: Sequence[Config], replay: Replay | None, progress: Progress
) -> list[tuple[ProblemSpec, Space]]:
    """Each distinct problem with its space, all made before the first candidate is judged."""
    specs: dict[Problem, ProblemSpec] = {}
    for config in configs:
        for sentence in config.duplicates:
            progress.note(f"autotune: {sentence}")
        for spec in config.problems:
            first = specs.setdefault(spec.problem, spec)
            if first is not spec:
                progress.note(f"autotune: {spec.where} equals {first.where}; it runs once")
            asked, before = ((s.space, s.trials, s.seconds) for s in (spec, first))
            if asked != before:
                raise InputError(
                    f"{spec.where}: the same problem with another space or budget is at "
                    f"{first.where}"
                )
    spaces = {spec.problem.key: space_of(spec) for spec in specs.values()}
    if replay is not None:
        replay.check_answers(list(specs))
        spaces = {p.key: spaces[p.key].joined(replay.samples(p)) for p in specs}
    return [(spec, spaces[spec.problem.key]) for spec in specs.values()]


def _compiled(
    spec: ProblemSpec, space: Space, plan: Plan, stages: Stages, crew: Crew, reach: Reach
) -> _Work:
    kernel = base.load(spec.problem.kernel)
    judge = stages.judge(kernel, spec.problem)
    judged = stages.model(judge, space)
    rows = {j.candidate: j.row for j in judged}
    if reach.compiles:
        survivors, budget = [j for j in judged if j.survives], plan.budget(spec)
        with shared.compiling(
            stages, judge, space, survivors, trials=budget.trials,
            fleet=crew.fleet if crew.shares_compiling else None,
        ) as evaluate:  # fmt: skip
            rows |= explore(
                survivors, evaluate, budget=budget, seed=plan.seed,
                first=frozenset(crew.recorded(spec.problem)),
            )  # fmt: skip
    return _Work(spec=spec, space=space, judge=judge, rows=rows)


def _measured(work: _Work, plan: Plan, stages: Stages, crew: Crew, reach: Reach) -> Board:
    """The leaderboard, with measured rows where anything could be timed."""
    problem, rows = work.spec.problem, work.rows
    if reach.last == "measure" and crew.fleet is not None:
        survivors = crew.measurable(problem, work.survivors, stages.progress)
        if survivors:
            budget = plan.budget(work.spec)
            with shared.Timing(
                stages, work.judge, work.space, survivors, trials=budget.trials,
                fleet=crew.fleet, measurer=crew.measurer(problem), source=crew.source,
            ) as timing:  # fmt: skip
                timed = time_survivors(survivors, timing, budget=budget, seed=plan.seed)
                rows |= timed
                rows |= {} if crew.replay else timing.confirmed()
            if not timed:
                stages.progress.note(
                    f"autotune: {problem.label}: not timed, as no host that could is at work on "
                    "the storage; the same command takes its times over once one has been"
                )
        crew.fleet.measured(problem.key)
    kernel = base.load(problem.kernel)
    return leaderboard.merge(
        _place(plan, problem),
        list(rows.values()),
        flop_convention=kernel.flop_convention,
        replace_stored=plan.fresh,
        warn=lambda text: stages.progress.note(f"autotune: {text}"),
    )
