"""The two clocks: the device's own, by profiler trace, and the host's where it is asked for."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.measure.trace import TraceError, durations_ms


def empty_program() -> Any:
    """A program that takes what any program takes and does nothing."""
    import jax
    from jax import numpy as jnp

    return jax.jit(lambda *arrays: jnp.zeros((), jnp.float32))


class _Runs:
    """Runs programs one after the other, each on its next set of inputs.

    Outputs are new with every run and nothing is donated, so no run sees another's memory as its.
    """

    def __init__(self, runs: Mapping[str, Any], sets: Mapping[str, list[tuple[Any, ...]]]) -> None:
        self._runs, self._sets = runs, sets
        self._count = dict.fromkeys(runs, 0)
        self._any = next(iter(sets.values()))

    def once(self, name: str) -> None:
        import jax

        sets = self._sets.get(name, self._any)
        arrays = sets[self._count[name] % len(sets)]
        self._count[name] += 1
        waits: Any = jax.block_until_ready
        waits(self._runs[name](*arrays))


class Profile(_Runs):
    """Device time, by a profiler trace of each round."""

    def run(self, order: Sequence[str]) -> Mapping[str, list[float] | TraceError]:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory(prefix="autotune-trace-") as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                for name in order:
                    self.once(name)
            found = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
            if len(found) != 1:
                raise TraceError(f"the profiler left {len(found)} traces")
            profile = jax.profiler.ProfileData.from_file(found[0])
        runs = {f"jit_{name}": order.count(name) for name in dict.fromkeys(order)}
        times = durations_ms(profile, runs)
        return {name.removeprefix("jit_"): found for name, found in times.items()}


class HostClock(_Runs):
    """The host's clock around a run and the wait for it."""

    def run(self, order: Sequence[str]) -> Mapping[str, list[float] | TraceError]:
        times: dict[str, list[float] | TraceError] = {}
        if not any(self._count.values()):
            for name in self._runs:
                self.once(name)  # the empty program's compile, and each one's first dispatch
        for name in order:
            started = time.perf_counter()
            self.once(name)
            taken = times.setdefault(name, [])
            assert isinstance(taken, list)
            taken.append((time.perf_counter() - started) * 1e3)
        return times
