"""What a sweep has beside its compile workers: a storage shared with others, and a stopwatch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune import device as chips
from autotune.candidate import Candidate
from autotune.device import Device
from autotune.measure.replay import Replay
from autotune.measure.stage import Measurer
from autotune.problem import Problem
from autotune.progress import Progress
from autotune.search import storage
from autotune.search.evaluate import Judged
from autotune.search.fleet import Fleet, joined

STUDIES = "studies.db"
"""The storage of sweeps that name none, in the results directory."""
QUEUE_S = 24 * 3600.0
"""How long a sweep waits for another that times on this machine; two would disturb each other."""
TIMERS = {"device": "device_profile", "host": "host_clock"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Who compiles and times with this sweep.

    Attributes:
      fleet: the sweeps on one storage; None where nothing is measured and no storage was named.
      shares_compiling: whether compiling is shared too: with a storage that was named.
      replay: the recording that answers for a TPU.
      tpu: the measurer of the TPU that is attached, and which device that is.
      source: whose times they are.
    """

    fleet: Fleet | None = None
    shares_compiling: bool = False
    replay: Replay | None = None
    tpu: tuple[Device, Measurer] | None = None
    source: str = TIMERS["device"]

    def measurer(self, problem: Problem) -> Measurer | None:
        """What can time the problem here; None for nothing."""
        if self.replay is not None:
            return self.replay
        if self.tpu is not None and self.tpu[0].name == problem.device:
            return self.tpu[1]
        return None

    @property
    def times(self) -> bool:
        """Whether anything can be timed here."""
        return self.replay is not None or self.tpu is not None

    def announce(self, problems: Iterable[Problem]) -> None:
        """Tells the fleet what is going to be timed here."""
        if self.fleet is not None and self.times:
            self.fleet.measures([p.key for p in problems if self.measurer(p) is not None])

    def recorded(self, problem: Problem) -> Collection[Candidate]:
        """The candidates that a recording knows; none without one."""
        return () if self.replay is None else self.replay.samples(problem)

    def measurable(
        self, problem: Problem, survivors: Sequence[Judged], progress: Progress
    ) -> list[Judged]:
        """Those that can be timed: with a recording, what is in it. Says how many are not."""
        if self.replay is None:
            return list(survivors)
        recorded = self.recorded(problem)
        if not recorded:
            progress.note(
                f"autotune: {problem.label}: no row for it in {self.replay.path}, which has "
                f"{self.replay.held}; nothing is timed"
            )
            return []
        known = [j for j in survivors if j.candidate in recorded]
        if missing := len(survivors) - len(known):
            progress.note(
                f"autotune: {problem.label}: {missing} of {len(survivors)} candidates are not in "
                f"{self.replay.path}; they keep their compiled evidence"
            )
        return known


def attached_tpu() -> Device | None:
    """The TPU attached to this machine; JAX is only asked where there can be one."""
    devices = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    return chips.attached() if devices or os.environ.get("TPU_NAME") else None


@contextmanager
def gathered(
    *,
    storage_url: str | None,
    results: Path,
    replay: Replay | None,
    attached: Device | None,
    timer: str,
    seed: int,
    timeout_s: float,
) -> Iterator[Crew]:
    """The crew for as long as the context is open. An attached TPU is this sweep's alone.

    Args:
      storage_url: None is a file in `results`, made when something is to be timed.
      attached: the TPU to time on; None where a recording answers or nothing is timed.
      timer: `device` or `host`.
      seed: of the inputs and of the order in which programs run.
      timeout_s: of one candidate.

    Raises:
      InputError: the storage cannot be opened.
    """
    times = replay is not None or attached is not None
    if storage_url is None and not times:
        yield Crew()
        return
    if storage_url is None:
        results.mkdir(parents=True, exist_ok=True)
    source = TIMERS[timer] if replay is None else replay.source
    with ExitStack() as stack:
        url = storage_url or f"sqlite:///{results / STUDIES}"
        opened = stack.enter_context(closing(storage.opened(url)))
        fleet = stack.enter_context(joined(opened))
        tpu = None
        if attached is not None:
            from autotune.measure.tpu import TpuMeasurer

            measurer = TpuMeasurer(
                timer=TIMERS[timer], seed=seed, timeout_s=timeout_s, wait_s=QUEUE_S
            )
            tpu = attached, stack.enter_context(measurer)
        yield Crew(
            fleet=fleet,
            shares_compiling=storage_url is not None,
            replay=replay,
            tpu=tpu,
            source=source,
        )
