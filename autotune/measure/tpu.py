"""Measures candidates on the attached TPU: a worker process owns it, and may be lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.task import Task
from autotune.errors import NoTpuError
from autotune.measure.check import Checked
from autotune.measure.lock import DeviceLock
from autotune.measure.process import DeviceProcess, LostError
from autotune.measure.record import Measured
from autotune.measure.timing import Effort
from autotune.problem import Problem

GROUP = 32
"""Candidates timed interleaved in one trace; more would make it long."""
MAX_THREADS = 8
STALLS = 3
"""Losses in a row, of no candidate's making, after which the device is given up."""


@dataclass(kw_only=True)
class _Group:
    """Candidates on their way through compile, check and timing.

    Attributes:
      candidates: by program name; `pending` are those without a record.
      twins: program -> the identical one that runs for both.
      checked: verdicts so far; they outlive the worker.
      alone: those to be handled one by one, as a worker died of one of several.
    """

    problem: Problem
    candidates: Mapping[str, Candidate]
    pending: list[str]
    twins: dict[str, str] = field(default_factory=dict)
    checked: dict[str, Checked] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.perf_counter)

    def originals(self) -> list[str]:
        return [name for name in self.pending if name not in self.twins]


class TpuMeasurer:
    """The `Measurer` of a machine with a TPU. Use as a context manager.

    Args:
      timer: `device_profile`, or `host_clock` where the user asked for it.
      seed: of the inputs and of the order of runs.
      timeout_s: of one candidate's compile, of its check, and of the timing of a group.
      threads: compiles at a time; None is one a core, at most `MAX_THREADS`.
      wait_s: how long to wait for another process that times on this machine.
      platform: `tpu`; `cpu` exercises the same code in interpret mode, and its records
        (`device_kind` cpu) never become a leaderboard's times.
    """

    def __init__(
        self,
        *,
        timer: str = "device_profile",
        seed: int = 0,
        timeout_s: float = 300.0,
        threads: int | None = None,
        effort: Effort | None = None,
        wait_s: float = 0.0,
        lock_folder: Path | None = None,
        platform: str = "tpu",
    ) -> None:
        self.timer, self.seed, self.timeout_s = timer, seed, timeout_s
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._effort = effort or Effort()
        self._wait_s = wait_s
        self._process = DeviceProcess(platform=platform, timeout_s=timeout_s)
        self._lock = DeviceLock(folder=lock_folder)
        self._locked = False

    def __enter__(self) -> TpuMeasurer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and gives the device back."""
        self._process.kill()
        if self._locked:
            self._lock.release()
            self._locked = False

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Each candidate with its record, as soon as it is known; failures come first.

        All are compiled, each is run once and checked, then those that are right are timed
        interleaved. A candidate that ends the worker costs itself only.

        Raises:
          DeviceBusyError: another process is timing on this machine.
          NoTpuError: there is no TPU, another kind than the problem's, or it does not come back.
        """
        if not self._locked:
            self._lock.acquire(wait_s=self._wait_s)
            self._locked = True
        for start in range(0, len(candidates), GROUP):
            part = candidates[start : start + GROUP]
            named = {f"autotune_{start + n:05}": c for n, c in enumerate(part)}
            yield from self._group(_Group(problem=problem, candidates=named, pending=list(named)))

    def _group(self, group: _Group) -> Iterator[tuple[Candidate, Measured]]:
        stalls = 0
        while group.pending:
            before = len(group.pending), len(group.alone)
            try:
                self._ready(group.problem)
                self._process.ask({"do": "clear"}, ())
                yield from self._compile(group)
                yield from self._check(group)
                yield from self._time(group)
            except LostError as lost:
                if len(lost.suspects) == 1:
                    yield from self._end(group, *lost.suspects, lost.status, lost.reason)
                group.alone.update(lost.suspects)
                stalls = 0 if before != (len(group.pending), len(group.alone)) else stalls + 1
                if stalls == STALLS:
                    raise NoTpuError(f"the device does not stay up: {lost.reason}") from lost

    def _ready(self, problem: Problem) -> None:
        self._process.ready()
        kind, wanted = self._process.device_kind, devices.get(problem.device)
        if self._process.platform == "tpu" and kind != wanted.kind:
            raise NoTpuError(
                f"{wanted.name} ({wanted.kind}) is not attached: this machine has {kind}"
            )

    def _compile(self, group: _Group) -> Iterator[tuple[Candidate, Measured]]:
        """Compiles what is pending; yields those that do not, and their twins with them."""
        group.twins.clear()
        together = [name for name in group.pending if name not in group.alone]
        jobs = [together, *([name] for name in group.pending if name in group.alone)]
        verdicts = [v for names in jobs if names for v in self._compiled(group, names)]
        group.twins |= {v["done"]: v["twin"] for v in verdicts if v["twin"] is not None}
        for verdict in verdicts:
            if verdict["status"] != "ok":
                yield from self._end(group, verdict["done"], verdict["status"], verdict["reason"])

    def _compiled(self, group: _Group, names: Sequence[str]) -> list[dict[str, Any]]:
        """The verdict on each compile. Raises LostError naming those that were at it."""
        tasks = {
            name: Task(problem=group.problem, candidate=group.candidates[name]).to_json()
            for name in names
        }
        begun: dict[str, float] = {}
        verdicts: list[dict[str, Any]] = []
        job = {"do": "compile", "tasks": tasks, "threads": self._threads}
        answer = self._process.ask(job, names)
        while "end" not in answer:
            if "begun" in answer:
                begun[answer["begun"]] = time.monotonic()
            else:
                begun.pop(answer["done"])
                verdicts.append(answer)
            oldest = min(begun, key=lambda name: begun[name], default=None)
            spent_s = time.monotonic() - begun[oldest] if oldest else 0.0
            try:
                answer = self._process.answer(list(begun) or names, self.timeout_s - spent_s)
            except LostError as lost:
                late = [oldest] if lost.status == "timeout" and oldest else lost.suspects
                raise LostError(late, lost.status, lost.reason) from None
        return verdicts

    def _check(self, group: _Group) -> Iterator[tuple[Candidate, Measured]]:
        """Runs and checks what was compiled; yields those that are wrong or do not run."""
        for name in group.originals():
            if name in group.checked:
                continue
            answer = self._process.ask({"do": "check", "name": name, "seed": self.seed}, [name])
            checked = group.checked[name] = Checked.from_json(answer["checked"])
            if checked.status != "ok":
                yield from self._end(group, name, checked.status, checked.reason, checked)
            if answer["tainted"]:
                self._process.kill()
                raise LostError((), "failed", "restarted after an error of the device")

    def _time(self, group: _Group) -> Iterator[tuple[Candidate, Measured]]:
        """Times what is right, together; those that ended a worker one by one."""
        originals = group.originals()
        together = [name for name in originals if name not in group.alone]
        for names in filter(None, [together, *([n] for n in originals if n in group.alone)]):
            answer = self._process.ask(
                {"do": "time", "names": names, "timer": self.timer, "seed": self.seed,
                 "effort": asdict(self._effort)},
                names,
            )  # fmt: skip
            if answer["tainted"]:
                self._process.kill()
                first = next(iter(answer["failed"].values()))
                raise LostError(names, first["status"], first["reason"])
            for name in names:
                checked = group.checked[name]
                if verdict := answer["failed"].get(name):
                    yield from self._end(group, name, **verdict, checked=checked)
                else:
                    samples = tuple(answer["samples"][name])
                    yield from self._end(group, name, "ok", None, checked, samples)

    def _end(
        self,
        group: _Group,
        name: str,
        status: str,
        reason: str | None,
        checked: Checked | None = None,
        samples: tuple[float, ...] = (),
    ) -> Iterator[tuple[Candidate, Measured]]:
        """The record of a candidate, and of those that are the same program."""
        original = group.candidates[name]
        for one in [name, *(n for n, twin in group.twins.items() if twin == name)]:
            if one not in group.pending:
                continue
            group.pending.remove(one)
            yield (
                group.candidates[one],
                Measured(
                    status=status,
                    reason=reason,
                    samples_ms=samples,
                    timer=self.timer,
                    error=checked.error if checked else None,
                    tolerance=checked.tolerance if checked else None,
                    checked=checked.how if checked else None,
                    seed=self.seed,
                    shared_with=original.json if one != name else None,
                    seconds=time.perf_counter() - group.started,
                    device_kind=self._process.device_kind,
                ),
            )
