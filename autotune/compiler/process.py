"""One worker process and its limits: what it dies of becomes the candidate's verdict."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from autotune import evidence
from autotune.compiler.environment import versions, worker_environment
from autotune.compiler.task import Task
from autotune.compiler.verdict import Verdict, crash
from autotune.errors import NoCompilerError
from autotune.evidence import Compiled

START_SECONDS = 120  # importing jax and loading libtpu takes 2 s; longer on a machine that swaps
POLL_SECONDS = 0.05
STDERR_KEPT = 64 * 1024
_PREFIX = "autotune-compile-"


class _EndedError(Exception):
    """The worker process ended while it was waited for."""


class StoppedError(Exception):
    """`stop` was called while a candidate was being compiled."""


class WorkerProcess:
    """A worker that is started when first needed, and again after it died.

    For one thread at a time, except `stop` and `resume`.
    """

    def __init__(self, *, timeout_s: float, memory_limit_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.memory_limit_bytes = memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._answers = -1
        self._dump: Path | None = None
        self._stderr = b""
        self._unread = b""

    def evaluate(self, task: Task) -> Compiled:
        """Compiles `task`; never raises for what the candidate does.

        Raises NoCompilerError when the worker itself cannot start, StoppedError after `stop`.
        """
        if self._process is not None and self._process.poll() is not None:
            self._reap()  # it was killed while it had nothing to do
        if self._process is None:
            self._start(task)
        started = time.perf_counter()
        try:
            self._send(task.to_json())
            answer = self._receive(self.timeout_s)
        except _EndedError:
            verdict = crash(self._stderr_text(), self._reap())
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
            verdict = Verdict(status="failed", reason=str(error))
            return self._lost(started, verdict, limit_bytes=self.memory_limit_bytes)
        except StoppedError:
            self.kill()
            raise
        if self._rss() > self.memory_limit_bytes / 2:
            self.kill()  # what earlier candidates left behind must not count against the next
        return evidence.from_json(answer)

    def kill(self) -> None:
        """Ends the worker and everything it started; the next task gets a fresh one."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self._reap()

    def stop(self) -> None:
        """Makes `evaluate`, in another thread too, give up within `POLL_SECONDS`."""
        self._stopped = True

    def resume(self) -> None:
        """Takes `stop` back."""
        self._stopped = False

    def _start(self, task: Task) -> None:
        self._dump = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._answers, write_end = os.pipe()
        self._stderr = self._unread = b""
        # -P: the folder autotune runs in must not shadow modules; `sys_path` below brings it back.
        module = ["-P", "-m", "autotune.compiler.worker"]
        command = [sys.executable, *module, str(write_end), str(self._dump)]
        environment = worker_environment(os.environ, str(self._dump))
        roots = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(write_end,),
                env=environment,
                start_new_session=True,  # a group to kill, and no Ctrl-C of the terminal
            )
        finally:
            os.close(write_end)
        try:
            device = task.problem.device if task.kind == "compile" else None
            self._send({"sys_path": sys.path, "device": device})
            self._receive(START_SECONDS)
        except _EndedError:
            lines = self._stderr_text().strip().splitlines()
            self._reap()
            told = lines[-1] if lines else "it says nothing"
            raise NoCompilerError(f"the compile worker does not start: {told}") from None
        except (TimeoutError, MemoryError) as error:
            self.kill()
            raise NoCompilerError(f"the compile worker does not start: {error}") from None
        except StoppedError:
            self.kill()
            raise

    def _send(self, record: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise _EndedError from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises _EndedError, TimeoutError, or MemoryError with the numbers."""
        assert self._process is not None
        assert self._process.stderr is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(self._process.stderr.fileno(), selectors.EVENT_READ)
            while b"\n" not in self._unread:
                ended = self._process.poll() is not None
                if self._stopped:
                    raise StoppedError
                for key, _ in selector.select(POLL_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    if key.fd == self._answers:
                        if not data:
                            raise _EndedError
                        self._unread += data
                    else:
                        self._stderr = (self._stderr + data)[-STDERR_KEPT:]
                        if not data:
                            selector.unregister(key.fd)
                if ended and b"\n" not in self._unread:
                    raise _EndedError  # a process it left behind may hold the pipe open
                rss = self._rss()
                if rss > self.memory_limit_bytes:
                    raise MemoryError(
                        f"tracing and compiling took {rss / 2**30:.2f} GiB of host memory, "
                        f"the limit of a worker is {self.memory_limit_bytes / 2**30:.2f} GiB"
                    )
                # An answer that is being written is an answer: only its reading is late.
                if time.monotonic() > deadline and not self._unread:
                    raise TimeoutError(f"no answer in {timeout_s:g} s")
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _rss(self) -> int:
        try:
            assert self._process is not None
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _stderr_text(self) -> str:
        """What the worker last wrote, the rest in the pipe included."""
        assert self._process is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self._stderr = (self._stderr + data)[-STDERR_KEPT:]
        return self._stderr.decode(errors="replace")

    def _reap(self) -> int:
        """Waits for the ended worker, frees what was its, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        code = process.wait()
        # What it started is of the same group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        os.close(self._answers)
        if self._dump is not None:
            shutil.rmtree(self._dump, ignore_errors=True)
        return code

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
