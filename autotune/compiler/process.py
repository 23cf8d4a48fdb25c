"""One compile worker and its limits: what it dies of becomes the candidate's verdict."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from autotune import evidence
from autotune.child import Child, EndedError, StartError, StoppedError
from autotune.compiler.environment import versions, worker_environment
from autotune.compiler.task import Task
from autotune.compiler.verdict import Verdict, crash
from autotune.errors import NoCompilerError
from autotune.evidence import Compiled

START_SECONDS = 120  # importing jax and loading libtpu takes 2 s; longer on a machine that swaps
_PREFIX = "autotune-compile-"


class WorkerProcess:
    """A worker that is started when first needed, and again after it died.

    For one thread at a time, except `stop` and `resume`.
    """

    def __init__(self, *, timeout_s: float, memory_limit_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.memory_limit_bytes = memory_limit_bytes
        self._child = Child(memory_limit_bytes=memory_limit_bytes)
        self._dump: Path | None = None

    def evaluate(self, task: Task) -> Compiled:
        """Compiles `task`; never raises for what the candidate does.

        Raises NoCompilerError when the worker itself cannot start, StoppedError after `stop`.
        """
        if self._child.ended:
            self._reap()  # it was killed while it had nothing to do
        if not self._child.started:
            self._start(task)
        started = time.perf_counter()
        try:
            self._child.send(task.to_json())
            answer = self._child.receive(self.timeout_s)
        except EndedError:
            verdict = crash(self._child.stderr_text(), self._reap())
            return self._lost(started, verdict)
        except json.JSONDecodeError:
            self.kill()
            reason = "the worker's answer was overwritten by something else"
            return self._lost(started, Verdict(status="crashed", reason=reason))
        except TimeoutError:
            self.kill()
            reason = f"tracing and compiling took longer than {self.timeout_s:g} s"
            verdict = Verdict(status="timeout", reason=reason)
            return self._lost(started, verdict, limit_s=self.timeout_s)
        except MemoryError as error:
            self.kill()
            verdict = Verdict(status="failed", reason=f"tracing and compiling took {error}")
            return self._lost(started, verdict, limit_bytes=self.memory_limit_bytes)
        except StoppedError:
            self.kill()
            raise
        if self._child.rss() > self.memory_limit_bytes / 2:
            self.kill()  # what earlier candidates left behind must not count against the next
        return evidence.from_json(answer)

    def kill(self) -> None:
        """Ends the worker and everything it started; the next task gets a fresh one."""
        self._child.kill()
        self._remove_dump()

    def stop(self) -> None:
        """Makes `evaluate`, in another thread too, give up soon."""
        self._child.stop()

    def resume(self) -> None:
        """Takes `stop` back."""
        self._child.resume()

    def _start(self, task: Task) -> None:
        self._dump = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        try:
            self._child.start(
                "autotune.compiler.worker",
                [str(self._dump)],
                worker_environment(os.environ, str(self._dump)),
                {"device": task.problem.device if task.kind == "compile" else None},
                timeout_s=START_SECONDS,
            )
        except StartError as error:
            self._remove_dump()
            raise NoCompilerError(f"the compile worker does not start: {error}") from None
        except StoppedError:
            self._remove_dump()
            raise

    def _reap(self) -> int:
        code = self._child.reap()
        self._remove_dump()
        return code

    def _remove_dump(self) -> None:
        if self._dump is not None:
            shutil.rmtree(self._dump, ignore_errors=True)

    def _lost(self, started: float, verdict: Verdict, **limit: Any) -> Compiled:
        found = versions()
        return Compiled(
            status=verdict.status,
            reason=verdict.reason,
            repeatable=verdict.repeatable,
            **limit,
            compile_seconds=time.perf_counter() - started,
            jax_version=found["jax"],
            libtpu_version=found["libtpu"],
        )


def remove_stale_dumps() -> None:
    """Removes the dump folders of processes that were killed before they could."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            shutil.rmtree(path, ignore_errors=True)
