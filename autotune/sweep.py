"""The pipeline: problems → candidates → model → compile → leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune import leaderboard
from autotune.compiler import environment
from autotune.config import Config, ProblemSpec
from autotune.errors import InputError, NoCompilerError, NoTpuError
from autotune.kernels import base
from autotune.leaderboard import Board
from autotune.problem import Problem
from autotune.progress import Progress
from autotune.search.prune import Stages
from autotune.search.space import Space
from autotune.search.space import of as space_of
from autotune.search.study import Budget, explore

DEFAULT_TRIALS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a sweep is to run. `trials` and `seconds` override the configs' budgets.

    Attributes:
      until: last stage, `model`, `compile` or `measure`; None for as far as the machine can.
      jobs: worker processes; None for the pool's own choice.
      timeout_s: what one candidate may take to trace and compile.
      fresh: ignore cached evidence and stored leaderboards.
    """

    until: str | None
    results: Path
    jobs: int | None
    timeout_s: float
    seed: int = 0
    trials: int | None = None
    seconds: float | None = None
    fresh: bool = False


def run(configs: Sequence[Config], plan: Plan, progress: Progress) -> list[Board]:
    """Sweeps every problem of `configs` and returns their leaderboards.

    Raises:
      NoCompilerError, NoTpuError: a stage was asked for that this machine cannot run.
      InputError: the results directory cannot be written.
    """
    leaderboard.check_writable(plan.results)
    compiling = _reach(plan, progress) == "compile"
    spaces = _spaces(configs, progress)
    with Stages.open(jobs=plan.jobs, timeout_s=plan.timeout_s, fresh=plan.fresh,
                     progress=progress) as stages:  # fmt: skip
        return [_sweep(spec, space, plan, stages, compiling=compiling) for spec, space in spaces]


def _spaces(configs: Sequence[Config], progress: Progress) -> list[tuple[ProblemSpec, Space]]:
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
    return [(spec, space_of(spec)) for spec in specs.values()]


def _sweep(
    spec: ProblemSpec, space: Space, plan: Plan, stages: Stages, *, compiling: bool
) -> Board:
    kernel = base.load(spec.problem.kernel)
    judge = stages.judge(kernel, spec.problem)
    judged = stages.model(judge, space)
    rows = {j.candidate: j.row for j in judged}
    if compiling:
        budget = Budget(
            trials=plan.trials or spec.trials or DEFAULT_TRIALS,
            seconds=plan.seconds or spec.seconds,
        )
        survivors = [j for j in judged if j.survives]
        rows |= explore(
            survivors,
            stages.compile(judge, min(len(survivors), budget.trials)),
            budget=budget,
            seed=plan.seed,
        )
    path = leaderboard.path_of(plan.results, spec.problem.device, kernel.name, spec.problem.key)
    return leaderboard.merge(
        path,
        list(rows.values()),
        flop_convention=kernel.flop_convention,
        replace_stored=plan.fresh,
        warn=lambda text: stages.progress.note(f"autotune: {text}"),
    )


def _reach(plan: Plan, progress: Progress) -> str:
    """The last stage to run here: `model` or `compile`."""
    obstacle = environment.unavailable()
    if plan.until == "measure":
        raise NoTpuError(
            "--until measure needs a TPU attached to this machine, and there is none; "
            "use --until compile"
        )
    if plan.until == "compile" and obstacle:
        raise NoCompilerError(f"--until compile is not possible here: {obstacle}")
    if plan.until is None and obstacle:
        progress.note(f"autotune: {obstacle}; this sweep ends at model evidence")
    return "model" if obstacle else plan.until or "compile"
