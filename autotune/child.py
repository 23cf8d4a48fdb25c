"""An expendable child process that answers in JSON lines, within limits of time and memory.

Both ends: `Child` starts and ends it, `serve` is what runs in it. No jax import.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

POLL_SECONDS = 0.05
STDERR_KEPT = 64 * 1024


class EndedError(Exception):
    """The process ended while it was waited for."""


class StoppedError(Exception):
    """`stop` was called while an answer was awaited."""


class StartError(Exception):
    """The process did not come up; its own last words."""


class Child:
    """One process at a time, with a pipe of its own for answers: what it runs may print.

    For one thread at a time, except `stop` and `resume`.
    """

    def __init__(self, *, memory_limit_bytes: int | None = None) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._answers = -1
        self._stderr = b""
        self._unread = b""

    @property
    def started(self) -> bool:
        """Whether there is a process, alive or not yet reaped."""
        return self._process is not None

    @property
    def ended(self) -> bool:
        """Whether there is a process to reap."""
        return self._process is not None and self._process.poll() is not None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        hello: Mapping[str, Any],
        *,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Runs `python -m module PIPE *arguments`, sends `hello` and returns its first answer.

        Raises StartError when it does not come up, StoppedError after `stop`.
        """
        self._answers, write_end = os.pipe()
        self._stderr = self._unread = b""
        # -P: the folder autotune runs in must not shadow modules; `sys_path` below brings it back.
        command = [sys.executable, "-P", "-m", module, str(write_end), *arguments]
        roots = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(write_end,),
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, roots))},
                start_new_session=True,  # a group to kill, and no Ctrl-C of the terminal
            )
        finally:
            os.close(write_end)
        try:
            self.send({"sys_path": sys.path, **hello})
            return self.receive(timeout_s)
        except EndedError:
            lines = self.stderr_text().strip().splitlines()
            self.reap()
            raise StartError(lines[-1] if lines else "it says nothing") from None
        except (TimeoutError, MemoryError) as error:
            self.kill()
            raise StartError(str(error)) from None
        except StoppedError:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the process and everything it started."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self.reap()

    def stop(self) -> None:
        """Makes `receive`, in another thread too, give up within `POLL_SECONDS`."""
        self._stopped = True

    def resume(self) -> None:
        """Takes `stop` back."""
        self._stopped = False

    def send(self, record: Mapping[str, Any]) -> None:
        """Writes one line to the process. Raises EndedError where nobody reads."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise EndedError from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises EndedError, TimeoutError, MemoryError with the numbers, StoppedError, or
        json.JSONDecodeError where something else wrote to the pipe.
        """
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
                self._read(selector)
                if ended and b"\n" not in self._unread:
                    raise EndedError  # a process it left behind may hold the pipe open
                self._check_memory()
                # An answer that is being written is an answer: only its reading is late.
                if time.monotonic() > deadline and not self._unread:
                    raise TimeoutError(f"no answer in {timeout_s:g} s")
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(POLL_SECONDS):
            data = os.read(key.fd, 1 << 16)
            if key.fd == self._answers:
                if not data:
                    raise EndedError
                self._unread += data
            else:
                self._stderr = (self._stderr + data)[-STDERR_KEPT:]
                if not data:
                    selector.unregister(key.fd)

    def _check_memory(self) -> None:
        limit = self.memory_limit_bytes
        if limit is not None and (rss := self.rss()) > limit:
            raise MemoryError(
                f"{rss / 2**30:.2f} GiB of host memory, "
                f"the limit of a worker is {limit / 2**30:.2f} GiB"
            )

    def rss(self) -> int:
        """Resident host memory of the process, in bytes; 0 where there is none."""
        try:
            assert self._process is not None
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def stderr_text(self) -> str:
        """What the process last wrote, the rest in the pipe included."""
        assert self._process is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self._stderr = (self._stderr + data)[-STDERR_KEPT:]
        return self._stderr.decode(errors="replace")

    def reap(self) -> int:
        """Waits for the ended process, ends what it started, and returns its exit code."""
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
        return code


Answer = Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def serve(
    answers_fd: int, *, at_end: Callable[[], None] = lambda: None
) -> Iterator[tuple[Callable[[], dict[str, Any]], Answer]]:
    """`(next_job, answer)` of a child process; the first job is the hello, and sets `sys.path`.

    The process ends, whatever it is doing, when its parent is gone; `at_end` runs before.
    """
    os.dup2(2, 1)  # kernels and libtpu print: the answers have a pipe of their own
    os.set_inheritable(answers_fd, False)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, jobs, at_end), daemon=True).start()
    lock = threading.Lock()
    with os.fdopen(answers_fd, "w", encoding="utf-8") as answers:

        def next_job() -> dict[str, Any]:
            job: dict[str, Any] = json.loads(jobs.get())
            if "sys_path" in job:
                sys.path[:] = job["sys_path"]
            return job

        def answer(record: Mapping[str, Any]) -> None:
            with lock:
                answers.write(json.dumps(record) + "\n")
                answers.flush()

        yield next_job, answer


def _read(stream: BinaryIO, jobs: queue.SimpleQueue[bytes], at_end: Callable[[], None]) -> None:
    for line in stream:
        jobs.put(line)
    at_end()
    os._exit(0)
