"""Runs a kernel on the CPU as a TPU would, and plants faults into it.

TPU interpret mode simulates the memories and their copies: races between a copy and a use are
detected, and memory that nothing wrote reads as NaN, past the edge of an array included.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import device as devices
from autotune.candidate import Candidate, Config
from autotune.compiler.environment import unavailable
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.kernels.base import Kernel
from autotune.problem import Problem

jax.config.update("jax_platforms", "cpu")  # else JAX looks for a TPU, and libtpu complains

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

DRAWN: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "phases": [Phase.generate],  # a run takes a second: shrinking a failure would take minutes
}
"""Hypothesis settings of the drawn problems."""

F32_TOLERANCE, BF16_TOLERANCE = 2e-6, 2e-2
"""Largest difference from the float64 reference, as a share of its largest magnitude."""


@contextlib.contextmanager
def _fewest_optimizations() -> Iterator[None]:
    """XLA's CPU optimizations take longer than the small problems here."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a kernel gave on drawn inputs, and what its float64 reference gives."""

    got: tuple[np.ndarray, ...]
    want: tuple[np.ndarray, ...]

    def error(self) -> float:
        """Largest difference, as a share of that output's largest live magnitude; NaN is inf."""
        return max(map(_error, self.got, self.want))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    dead = want < -1e38  # lse and max of a fully masked row: MASK_VALUE, in float32
    if not np.array_equal(dead, got < -1e38):
        return np.inf
    got, want = np.where(dead, 0.0, got), np.where(dead, 0.0, want)
    error = np.abs(got - want).max() / max(1e-30, np.abs(want).max())
    return float(error) if np.isfinite(error) else np.inf


def run(
    kernel: Kernel, problem: Problem, config: Config, *, seed: int = 0, gain: float = 1.0
) -> Run:
    """Runs `kernel` in TPU interpret mode on inputs drawn with `seed`.

    `gain` multiplies the first input: a large one makes attention's logits large.
    """
    fn, arguments = kernel.build(problem, config)
    key = jax.random.key(seed)
    if kernel.inputs is not None:
        inputs = kernel.inputs(problem, key)
    else:
        keys = jax.random.split(key, len(arguments))
        drawn = zip(keys, arguments, strict=True)
        inputs = tuple(jax.random.normal(k, a.shape, jnp.float32).astype(a.dtype) for k, a in drawn)
    inputs = (inputs[0] * jnp.asarray(gain, inputs[0].dtype), *inputs[1:])
    assert kernel.reference is not None
    got = interpret(fn, *inputs)
    return Run(got=_outputs(got), want=_outputs(kernel.reference(problem, *inputs)))


def _as_a_chip() -> dict[str, Callable[[], Any]]:
    """What JAX looks a device up in: a kernel with a pipeline of its own asks for its chip."""
    asked = getattr(pltpu.get_tpu_info, "__wrapped__", pltpu.get_tpu_info)
    known: dict[str, Callable[[], Any]] = sys.modules[asked.__module__].registry
    return known


_as_a_chip()["cpu"] = lambda: pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1)


def interpret(fn: Callable[..., Any], *inputs: Any) -> Any:
    """`fn(*inputs)` in TPU interpret mode.

    A pipeline within a kernel copies whole tiles, which an array on the chip has: what lies past
    its edge reads as NaN. Writing there is an error here, unlike on the chip.
    """
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
    )
    with _fewest_optimizations(), pltpu.force_tpu_interpret_mode(params):
        outputs = jax.block_until_ready(fn(*inputs))
    # JAX only prints a race it finds; there is no public name for its verdict.
    assert not interpret_pallas_call.races.races_found, "a copy races with a use of its memory"
    return outputs


@contextlib.contextmanager
def plainly_interpreted() -> Iterator[None]:
    """Pallas's plain interpreter, whatever the call: that of the TPU knows no `vmap`ped axes.

    Libraries jit their kernels: what is traced in here is not found again outside, or the reverse.
    """
    real = pl.pallas_call
    jax.clear_caches()
    try:
        with pytest.MonkeyPatch.context() as patch, _fewest_optimizations():
            patch.setattr(pl, "pallas_call", lambda *a, **k: real(*a, **{**k, "interpret": True}))
            yield
    finally:
        jax.clear_caches()


def _outputs(outputs: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(output).astype(np.float64) for output in jax.tree.leaves(outputs))


def plant(
    patch: pytest.MonkeyPatch, module: types.ModuleType, right: str, wrong: str, name: str
) -> None:
    """Puts the fault `wrong` where `module` says `right`, and its function or class in place."""
    assert module.__file__
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times"
    faulty = types.ModuleType(module.__name__)
    faulty.__file__ = module.__file__
    with patch.context() as temporary:
        # Dataclasses look their module up by name while they are made.
        temporary.setitem(sys.modules, module.__name__, faulty)
        exec(compile(source.replace(right, wrong), module.__file__, "exec"), faulty.__dict__)
    patch.setattr(module, name, getattr(faulty, name))


def spread(kernel: Kernel, problem: Problem, count: int) -> list[Config]:
    """The default and `count` legal candidates, evenly spread over the searched space."""
    chip = devices.get(problem.device)
    tunables = kernel.tunables(problem, chip)
    points = itertools.product(*(tunable.values for tunable in tunables.values()))
    configs = [dict(zip(tunables, point, strict=True)) for point in points]
    legal = [config for config in configs if kernel.illegal(problem, config, chip) is None]
    assert kernel.default is not None
    chosen = legal[:: max(1, len(legal) // count)][:count]
    return [kernel.default(problem, chip), *chosen]


def assert_compiles_or_lacks_vmem(
    kernel: Kernel, problem: Problem, configs: Sequence[Config]
) -> None:
    """The compiler takes each config, or refuses it for VMEM; the first one it takes."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    tasks = [Task(problem=problem, candidate=Candidate.of(config)) for config in configs]
    with CompilePool(jobs=1, timeout_s=900) as pool:
        verdicts = [(task.candidate.json, compiled) for task, compiled in pool.run(tasks)]
    assert len(verdicts) == len(configs)
    for config, compiled in verdicts:
        assert compiled.status in ("ok", "oom"), f"{config}: {compiled.status}, {compiled.reason}"
    first = next(c for json, c in verdicts if json == tasks[0].candidate.json)
    assert first.status == "ok", first.reason
