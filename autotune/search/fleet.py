"""Who is at work on a storage, and whether they still live.

A sweep has a seat in the storage and counts it up every few seconds. Others look whether the count
moves, by their own clock: hosts need not agree on the time. On one host the process itself is asked
after, so that what a killed sweep had begun is free at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import InputError
from autotune.search.storage import Storage, faults

SEATS = "autotune hosts"
"""Name of the study whose attributes are the seats; it has no trials."""
BEAT_S = 5.0
GRACE_S = 45.0
"""Without a beat for that long, what a sweep had begun goes back to the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A process among those of all hosts. `host` tells containers on one machine apart."""

    host: str
    pid: int
    started: float

    @classmethod
    def own(cls) -> Identity:
        parts = [platform.node()]
        with contextlib.suppress(OSError):  # not on macOS
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8])
            parts.append(os.readlink("/proc/self/ns/pid"))
        return cls(host=" ".join(parts), pid=os.getpid(), started=_started(os.getpid()))

    @classmethod
    def from_text(cls, text: str) -> Identity:
        host, pid, started = json.loads(text)
        return cls(host=host, pid=pid, started=started)

    @property
    def text(self) -> str:
        return json.dumps([self.host, self.pid, self.started])

    def runs_here(self, own_host: str) -> bool | None:
        """Whether the process runs; None for one of another host."""
        if self.host != own_host:
            return None
        try:
            ended = psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            return not ended and abs(_started(self.pid) - self.started) < 1
        except psutil.Error:
            return False


def _started(pid: int) -> float:
    """When a process began, so that another one with its number is not taken for it.

    Clock ticks since boot on Linux (proc(5), field 22 of stat): no step of the clock moves them.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return float(psutil.Process(pid).create_time())
    return float(text.rpartition(")")[2].split()[19])


class Fleet:
    """This process's seat among the sweeps on a storage; see `joined`."""

    def __init__(
        self,
        storage: Storage,
        *,
        identity: Identity | None = None,
        beat_s: float = BEAT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.storage = storage
        self.identity = identity or Identity.own()
        self._beat_s, self._grace_s = beat_s, grace_s
        self._count = 0
        self._measures: list[str] = []
        self._seen: dict[str, tuple[int, float]] = {}
        self._left = threading.Event()
        with storage.exclusive():
            self._study = study_id(storage, SEATS)
            self._seat = self._free_seat()
            self._write()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()

    def leave(self) -> None:
        """Gives the seat up; what this process still has is free from now on."""
        self._left.set()
        self._thread.join()
        with self.storage.exclusive():
            self.storage.backend.set_study_user_attr(self._study, self._seat, None)

    def measures(self, keys: Iterable[str]) -> None:
        """Tells the others which problems (their keys) are still to be timed here."""
        self._measures = sorted(keys)
        with self.storage.exclusive():
            self._write()

    def measured(self, key: str) -> None:
        """Tells the others that nothing more of the problem will be timed here."""
        self.measures(k for k in self._measures if k != key)

    def is_measured(self, key: str) -> bool:
        """Whether a living sweep is going to time the problem."""
        return self._timing(key) > 0

    def part(self, key: str, count: int) -> int:
        """How many of `count` candidates one host should time, so that all have some."""
        return -(-count // max(1, self._timing(key)))

    def _timing(self, key: str) -> int:
        seats = self._seats().values()
        return sum(key in seat["measures"] and self.alive(seat["who"]) for seat in seats)

    def alive(self, who: str | None) -> bool:
        """Whether the process called `who` (`Identity.text`) is still at work on the storage."""
        if who is None or who == self.identity.text:
            return who is not None
        seat = next((s for s in self._seats().values() if s["who"] == who), None)
        if seat is None or Identity.from_text(who).runs_here(self.identity.host) is False:
            return False
        now = time.monotonic()
        count, since = self._seen.get(who, (None, now))
        if count != seat["beat"]:
            self._seen[who] = (seat["beat"], now)
            return True
        return now - since < self._grace_s

    def _seats(self) -> dict[str, dict[str, Any]]:
        attributes = self.storage.backend.get_study_user_attrs(self._study)
        return {name: seat for name, seat in attributes.items() if seat}

    def _free_seat(self) -> str:
        """A seat nobody has, or whose holder's process is gone from this host."""
        attributes = self.storage.backend.get_study_user_attrs(self._study)
        for name, seat in sorted(attributes.items()):
            here = seat and Identity.from_text(seat["who"]).runs_here(self.identity.host)
            if not seat or here is False:
                return str(name)
        return f"host {len(attributes) + 1:04d}"

    def _write(self) -> None:
        seat = {"who": self.identity.text, "beat": self._count, "measures": self._measures}
        self.storage.backend.set_study_user_attr(self._study, self._seat, seat)

    def _beat(self) -> None:
        while not self._left.wait(self._beat_s):
            self._count += 1
            # A storage out of reach for a moment is no reason to stop; the work itself will say so.
            with (
                contextlib.suppress(InputError),
                faults(self.storage.label),
                self.storage.exclusive(),
            ):
                self._write()


@contextmanager
def joined(storage: Storage, *, grace_s: float = GRACE_S) -> Iterator[Fleet]:
    """A seat for as long as the context is open."""
    with faults(storage.label):
        fleet = Fleet(storage, grace_s=grace_s)
        try:
            yield fleet
        finally:
            fleet.leave()


def study_id(storage: Storage, name: str) -> int:
    """The study called `name`, made where it is new. To be called in `storage.exclusive()`."""
    import optuna

    try:
        number: int = storage.backend.get_study_id_from_name(name)
    except KeyError:
        minimize = [optuna.study.StudyDirection.MINIMIZE]
        number = storage.backend.create_new_study(minimize, name)
    return number
