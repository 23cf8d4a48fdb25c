"""The worker process that holds a device: asked for one thing at a time, and expendable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.child import Child, EndedError, StartError
from autotune.compiler.verdict import crash
from autotune.errors import NoTpuError
from autotune.measure.environment import measuring_environment

START_SECONDS = 300
RESTARTS_S = (0.0, 2.0, 10.0, 30.0)
"""Waits before the tries to have the device back: a chip is not free at once when its process
was killed."""


class LostError(Exception):
    """The worker was ended; `suspects` are the candidates it was busy with."""

    def __init__(self, suspects: Sequence[str], status: str, reason: str) -> None:
        super().__init__(reason)
        self.suspects, self.status, self.reason = tuple(suspects), status, reason


class DeviceProcess:
    """A worker on the first device of `platform`; `device_kind` is known once it was ready."""

    def __init__(self, *, platform: str, timeout_s: float) -> None:
        self.platform, self.timeout_s = platform, timeout_s
        self.device_kind: str | None = None
        self._child = Child()

    def ready(self) -> None:
        """Makes sure of a worker that holds the device and has shown that it computes.

        Raises NoTpuError with what JAX says where there is none, or none any more.
        """
        if self._child.ended:
            self._child.reap()
        if self._child.started:
            return
        for wait_s in RESTARTS_S:
            time.sleep(wait_s)
            hello = self._start()
            if "ready" in hello:
                self.device_kind = hello["device_kind"]
                return
            self._child.kill()
            if self.device_kind is None and "in use" not in hello["failed"]:
                break  # a device that was never there is not waited for
        name = "TPU" if self.platform == "tpu" else self.platform
        raise NoTpuError(f"the {name} cannot be used: {hello['failed']}")

    def _start(self) -> dict[str, Any]:
        try:
            return self._child.start(
                "autotune.measure.worker",
                [],
                measuring_environment(os.environ, platform=self.platform),
                {"platform": self.platform},
                timeout_s=START_SECONDS,
            )
        except StartError as error:
            return {"failed": str(error)}

    def ask(self, job: Mapping[str, Any], suspects: Sequence[str]) -> dict[str, Any]:
        """The first answer to a job. Raises LostError as `answer` does."""
        try:
            self._child.send(job)
        except EndedError:
            raise self._lost(suspects) from None
        return self.answer(suspects, self.timeout_s)

    def answer(self, suspects: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises LostError where the worker ends (`crashed`) or nothing comes in time (`timeout`),
        after which there is no worker.
        """
        try:
            return self._child.receive(timeout_s)
        except EndedError:
            raise self._lost(suspects) from None
        except TimeoutError:
            self.kill()
            reason = f"took longer than {self.timeout_s:g} s in the measuring worker"
            raise LostError(suspects, "timeout", reason) from None
        except json.JSONDecodeError:
            self.kill()
            reason = "the worker's answer was overwritten by something else"
            raise LostError(suspects, "crashed", reason) from None

    def kill(self) -> None:
        """Ends the worker and gives the device back."""
        self._child.kill()

    def stop(self) -> None:
        """Makes `ready` and `answer`, in another thread, give up soon, with StoppedError."""
        self._child.stop()

    def _lost(self, suspects: Sequence[str]) -> LostError:
        text = self._child.stderr_text()
        verdict = crash(text, self._child.reap(), busy="measuring", what="program")
        return LostError(suspects, "crashed", verdict.reason)
