"""How a sweep is to run, and how far it can go on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.compiler import environment
from autotune.config import ProblemSpec
from autotune.device import Device
from autotune.errors import NoCompilerError, NoTpuError
from autotune.progress import Progress
from autotune.search.crew import attached_tpu
from autotune.search.study import Budget

DEFAULT_TRIALS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a sweep is to run. `trials` and `seconds` override the configs' budgets.

    Attributes:
      until: last stage, `model`, `compile` or `measure`; None for as far as the machine can.
      jobs: worker processes; None for the pool's own choice.
      timeout_s: what one candidate may take to trace and compile, and again to be measured.
      fresh: ignore cached evidence, stored leaderboards and finished trials.
      storage: URL of the storage shared with other sweeps; None for one of its own.
      replay: recorded measurements that answer for a TPU.
      timer: `device` or `host`.
    """

    until: str | None
    results: Path
    jobs: int | None
    timeout_s: float
    seed: int = 0
    trials: int | None = None
    seconds: float | None = None
    fresh: bool = False
    storage: str | None = None
    replay: Path | None = None
    timer: str = "device"

    def budget(self, spec: ProblemSpec) -> Budget:
        """Of one problem and stage."""
        return Budget(
            trials=self.trials or spec.trials or DEFAULT_TRIALS,
            seconds=self.seconds or spec.seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """The last stage of a sweep here, whether it compiles before, and the TPU it times on."""

    last: str
    compiles: bool
    attached: Device | None


def reached(plan: Plan, progress: Progress) -> Reach:
    """How far this sweep goes here. Says so where that is not as far as it could elsewhere.

    Raises:
      NoCompilerError, NoTpuError: a stage was asked for that this machine cannot run.
    """
    obstacle = environment.unavailable()
    if plan.until == "compile" and obstacle:
        raise NoCompilerError(f"--until compile is not possible here: {obstacle}")
    measures = plan.until in (None, "measure")
    attached = attached_tpu() if measures and plan.replay is None else None
    if plan.until == "measure" and not (plan.replay or attached):
        raise NoTpuError(
            "--until measure needs a TPU attached to this machine, and there is none; "
            "use --until compile, or --replay FILE"
        )
    compiles = plan.until != "model" and not obstacle
    timed = measures and bool(plan.replay or attached or plan.storage)
    last = "measure" if timed else "compile" if compiles else "model"
    if measures and obstacle:
        end = "the model's order is timed" if timed else "this sweep ends at model evidence"
        progress.note(f"autotune: {obstacle}; {end}")
    return Reach(last=last, compiles=compiles, attached=attached)
