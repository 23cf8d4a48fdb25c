"""Right or wrong without a chip: a candidate in interpret mode, in a worker process of its own.

Interpret mode proves numerics only: nothing here is a time, and the hardware may differ still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.candidate import Candidate, Config
from autotune.compiler.task import Task
from autotune.errors import NoTpuError
from autotune.measure.check import Checked, uncheckable
from autotune.measure.process import DeviceProcess, LostError
from autotune.problem import Problem

if TYPE_CHECKING:
    from autotune.kernels.base import Kernel


class Interpreter:
    """A CPU worker that checks one candidate after the other. Use as a context manager."""

    def __init__(self, *, timeout_s: float = 300.0, seed: int = 0) -> None:
        self.seed = seed
        self._process = DeviceProcess(platform="cpu", timeout_s=timeout_s)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker."""
        self._process.kill()

    def stop(self) -> None:
        """Makes `check`, in another thread, give up soon, with StoppedError."""
        self._process.stop()

    def check(self, problem: Problem, config: Config) -> Checked:
        """The verdict on `config`, at a reduced problem with the same block structure.

        `wrong` with the error found; `timeout`, `crashed` and so on where there is no verdict.
        Never raises for what the candidate does.
        """
        task = Task(problem=problem, candidate=Candidate.of(config))
        job = {"do": "interpret", "task": task.to_json(), "seed": self.seed}
        try:
            self._process.ready()
            answer = self._process.ask(job, ["interpreted"])
        except LostError as lost:
            return Checked(status=lost.status, reason=lost.reason, how="in interpret mode")
        except NoTpuError as error:
            return Checked(status="failed", reason=str(error), how="in interpret mode")
        return Checked.from_json(answer["checked"])


def check_interpreted(
    kernel: Kernel, problem: Problem, config: Config, *, timeout_s: float = 300.0, seed: int = 0
) -> Checked:
    """`Interpreter.check` of one candidate, in a process that ends with it.

    A kernel without a reference is `ok` with `how` saying that nothing was checked (`error` None).
    """
    if (told := uncheckable(kernel)) is not None:
        return told
    with Interpreter(timeout_s=timeout_s, seed=seed) as interpreter:
        return interpreter.check(problem, config)
