"""Device times out of a profiler trace: `jax.profiler.ProfileData` in, durations out. Pure."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TPU_PLANE = re.compile(r"/device:TPU:\d+")
_CPU_PLANE = "/host:CPU"
_MODULES = "XLA Modules"


class TraceError(Exception):
    """The trace does not hold what was run: no time may be guessed from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One execution of a program on one core, in nanoseconds."""

    program: str
    start_ns: float
    duration_ns: float


def durations_ms(profile: Any, runs: Mapping[str, int]) -> dict[str, list[float] | TraceError]:
    """Device time of every run of every program, in the order they ran.

    Args:
      profile: a `jax.profiler.ProfileData`.
      runs: program (HLO module) name -> how often it was run while the trace was taken.

    Returns:
      Per program its times in milliseconds, or the error that takes the place of all of them: on
      each core that ran the program there must be exactly as many events as runs. Of several
      cores, the slowest counts, run by run.

    Raises:
      TraceError: the trace has no plane of a device at all.
    """
    planes = dict(_planes(profile))
    if not planes:
        raise TraceError(
            f"the trace has no device plane (it has {', '.join(_plane_names(profile)) or 'none'})"
        )
    return {program: _of(program, count, planes) for program, count in runs.items()}


def _of(program: str, count: int, planes: Mapping[str, list[_Run]]) -> list[float] | TraceError:
    cores = {
        plane: [run.duration_ns / 1e6 for run in runs if run.program == program]
        for plane, runs in planes.items()
    }
    cores = {plane: times for plane, times in cores.items() if times}
    if not cores:
        return TraceError(f"the trace holds 0 of {count} runs")
    for plane, times in cores.items():
        if len(times) != count:
            return TraceError(f"the trace holds {len(times)} of {count} runs on {plane}")
    slowest = [max(run) for run in zip(*cores.values(), strict=True)]
    if not all(time > 0 for time in slowest):
        return TraceError("the trace holds a run that took no time")
    return slowest


def _planes(profile: Any) -> Iterator[tuple[str, list[_Run]]]:
    """(plane, its runs in order of start): one plane a TPU core, else that of a CPU backend."""
    planes = list(profile.planes)
    tpus = [plane for plane in planes if _TPU_PLANE.fullmatch(plane.name)]
    for plane in tpus:
        yield plane.name, sorted(_module_events(plane), key=lambda run: run.start_ns)
    if not tpus:
        for plane in planes:
            if plane.name == _CPU_PLANE:
                yield plane.name, sorted(_spans(plane), key=lambda run: run.start_ns)


def _module_events(plane: Any) -> Iterator[_Run]:
    """The events of the line XLA Modules; their names are `jit_f(FINGERPRINT)`."""
    for line in plane.lines:
        if line.name == _MODULES:
            for event in line.events:
                yield _Run(
                    program=event.name.partition("(")[0],
                    start_ns=event.start_ns,
                    duration_ns=event.duration_ns,
                )


def _spans(plane: Any) -> Iterable[_Run]:
    """The CPU backend has no event a program: first start to last end of its operations, a run."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for line in plane.lines:
        for event in line.events:
            stats = _stats(event)
            if "hlo_module" not in stats:
                continue
            key = stats["hlo_module"], stats["run_id"]
            end_ns = event.start_ns + event.duration_ns
            first_ns, last_ns = spans.get(key, (event.start_ns, end_ns))
            spans[key] = min(first_ns, event.start_ns), max(last_ns, end_ns)
    return [
        _Run(program=program, start_ns=first_ns, duration_ns=last_ns - first_ns)
        for (program, _), (first_ns, last_ns) in spans.items()
    ]


def _stats(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        # JAX's own: "builtin type event_stats has no __module__ attribute"
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)


def _plane_names(profile: Any) -> list[str]:
    return [plane.name for plane in profile.planes]
