"""Many candidates on a few expendable compile workers; each verdict as soon as it is there."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

from autotune.compiler.environment import unavailable
from autotune.compiler.process import WorkerProcess, remove_stale_dumps
from autotune.compiler.task import Task
from autotune.errors import InputError, NoCompilerError
from autotune.evidence import Compiled

GIB = 2**30
# A sweep keeps under 8 GiB: half a GiB for the parent, the rest shared by the workers. A worker
# holds about half a GiB at rest, so more than six would have no room to compile in.
WORKERS_BYTES = 15 * GIB // 2
MAX_DEFAULT_JOBS = 6
# Whoever asks for more workers than that has the memory: each gets what it needs to compile in.
LEAST_WORKER_BYTES = 5 * GIB // 4


def default_jobs() -> int:
    """One worker a core that this process may use, as far as memory goes."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, where only tracing runs
        cores = os.cpu_count() or 1
    return max(1, min(cores, MAX_DEFAULT_JOBS))


class CompilePool:
    """Workers that trace and compile, as a context manager. They start when first needed.

    Args:
      jobs: worker processes; None is `default_jobs()`.
      timeout_s: of one candidate's trace, lowering and compile together.
      memory_limit_bytes: resident host memory of one worker; None shares 7.5 GiB out.

    Raises:
      InputError: for a number of jobs or a limit that is not positive.
    """

    def __init__(
        self,
        *,
        jobs: int | None = None,
        timeout_s: float = 120.0,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self.jobs = default_jobs() if jobs is None else jobs
        if self.jobs < 1:
            raise InputError(f"jobs: {self.jobs} is not allowed; a whole number of at least 1")
        share = max(WORKERS_BYTES // self.jobs, LEAST_WORKER_BYTES)
        limit = share if memory_limit_bytes is None else memory_limit_bytes
        if timeout_s <= 0 or limit <= 0:
            raise InputError("the time and memory limits of a compile must be positive")
        self.timeout_s, self.memory_limit_bytes = timeout_s, limit
        remove_stale_dumps()
        self._workers = [
            WorkerProcess(timeout_s=timeout_s, memory_limit_bytes=limit) for _ in range(self.jobs)
        ]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.jobs, thread_name_prefix="compile")

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers, those at work too."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Compiled]]:
        """Each task with its verdict, in the order they finish.

        Tasks are pulled in the caller's thread, one for each free worker and no more, so a
        generator may decide late. Leaving the loop early ends what is still being compiled.

        Raises:
          NoCompilerError: a `compile` task where there is no libtpu (`unavailable`).
        """
        waiting: dict[Future[Compiled], Task] = {}
        source = iter(tasks)
        try:
            while True:
                while len(waiting) < self.jobs:
                    task = next(source, None)
                    if task is None:
                        break
                    if task.kind == "compile" and (missing := unavailable()):
                        raise NoCompilerError(missing)
                    waiting[self._threads.submit(self._evaluate, task)] = task
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(done), done.result()
        finally:
            if waiting:
                self._abandon(waiting)

    def _abandon(self, futures: Iterable[Future[Compiled]]) -> None:
        for worker in self._workers:
            worker.stop()
        wait([future for future in futures if not future.cancel()])
        for worker in self._workers:
            worker.resume()

    def _evaluate(self, task: Task) -> Compiled:
        worker = self._idle.get()
        try:
            return worker.evaluate(task)
        finally:
            self._idle.put(worker)
