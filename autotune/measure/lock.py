"""One timing job a device: a second one waits, or says who has it. The lock is never deleted."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from autotune.errors import DeviceBusyError, NoTpuError


class DeviceLock:
    """The right to time on this machine's TPU; freed when its process ends, however it ends.

    A machine has one: the process that opens a TPU takes all of the machine's chips.
    """

    def __init__(self, *, folder: Path | None = None) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / "autotune-tpu.lock"
        self._owner = self.path.with_suffix(".owner")
        self._lock = FileLock(self.path, mode=0o666)

    def acquire(self, *, wait_s: float) -> None:
        """Takes the lock, waiting up to `wait_s` for it.

        Raises DeviceBusyError naming the process that has it, NoTpuError where the lock cannot be
        opened (another user's).
        """
        try:
            self._lock.acquire(timeout=wait_s, poll_interval=min(0.5, max(0.05, wait_s / 20)))
        except Timeout:
            raise DeviceBusyError(
                f"the TPU is in use: {self._holder()} is timing on it (lock {self.path.name}); "
                "wait for it to end, as two timing jobs would disturb each other"
            ) from None
        except OSError as error:
            raise NoTpuError(
                f"the TPU's lock {self.path} cannot be opened: {error.strerror}"
            ) from None
        with contextlib.suppress(OSError):  # of another user's making: the lock is what counts
            self._owner.write_text(str(os.getpid()))

    def release(self) -> None:
        """Gives the lock back; does nothing where it is not held."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._owner.unlink()
            self._lock.release()

    def _holder(self) -> str:
        try:
            return f"process {int(self._owner.read_text())}"
        except (OSError, ValueError):
            return "another process"
