"""The worker's side: candidates as compiled programs, run, checked and timed on one device.

jax is imported when a `Bench` is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune import device as devices
from autotune.candidate import Config
from autotune.compiler.task import Task
from autotune.errors import NoTpuError
from autotune.kernels import base
from autotune.kernels.base import Kernel
from autotune.measure import check, inputs
from autotune.measure.check import NO_REFERENCE, Checked, Precision
from autotune.measure.clocks import HostClock, Profile, empty_program
from autotune.measure.reduce import in_whole_tiles, lightened, reduced
from autotune.measure.timing import EMPTY, Effort, time_on_device, time_on_host
from autotune.measure.trace import TraceError
from autotune.problem import Problem
from autotune.traced.capture import as_on, asked_for_chip

HOST_SHARE = 0.25
"""Of the host's free memory, what a reference may take."""
OUTSIDE = "Out-of-bounds"
"""How JAX's interpreter begins to say that an access lies outside its array."""
PAST_THE_EDGE = "Out-of-bounds write"
"""What JAX's interpreter says of a copy of whole tiles to an array that ends within one, which
the chip allows: there arrays are whole tiles. A kernel with a pipeline of its own makes such."""
INTERPRETED_FLOPS = 5 * 10**9
"""Of a run in interpret mode: some seconds on two cores."""


class OversizeError(Exception):
    """A candidate whose arrays no device memory holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Program:
    """A candidate on a problem, compiled.

    `run(*arrays)` gives its outputs; `arguments` and `outputs` are abstract arrays.
    """

    problem: Problem
    run: Any
    arguments: tuple[Any, ...]
    outputs: tuple[Any, ...]
    precision: Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lowered:
    """A candidate before it is compiled; `text` is a hash of it without its name."""

    problem: Problem
    lowered: Any
    arguments: tuple[Any, ...]
    precision: Precision
    text: str

    @property
    def outputs(self) -> tuple[Any, ...]:
        return _leaves(self.lowered.out_info)

    def compile(self) -> _Program:
        return _Program(
            problem=self.problem,
            run=self.lowered.compile(),
            arguments=self.arguments,
            outputs=self.outputs,
            precision=self.precision,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A compiled candidate: the program to time, and the one to check where that is another."""

    task: Task
    timed: _Program
    checked: _Program


class Bench:
    """Compiled candidates of one problem, on this process's first device of `platform`."""

    def __init__(self, platform: str) -> None:
        import jax

        self.interprets = platform == "cpu"
        try:
            self.device = jax.devices(platform)[0]
        except RuntimeError as error:
            raise NoTpuError(" ".join(str(error).split())) from error
        settings: Any = jax.config
        settings.update("jax_default_device", self.device)
        self._candidates: dict[str, _Candidate] = {}
        self._by_text: dict[str, str] = {}
        self._lock = threading.Lock()
        self._sets: list[tuple[Any, ...]] = []
        self._sets_of: tuple[object, ...] = ()

    def verify(self) -> None:
        """Raises NoTpuError unless the device computes a small known product."""
        import jax
        from jax import numpy as jnp

        x = jnp.arange(256 * 256, dtype=jnp.int32).reshape(256, 256) % 7
        got = np.asarray(jax.jit(lambda a: a @ a)(x))
        own = np.asarray(x)
        if not np.array_equal(got, own @ own):
            raise NoTpuError(f"{self.device.device_kind} computes a small product wrongly")

    def hbm_bytes(self, problem: Problem) -> int:
        """Memory for arrays: what the device says it has, else its kind's."""
        stats = None if self.interprets else self.device.memory_stats()
        limit = (stats or {}).get("bytes_limit")
        return int(limit or devices.get(problem.device).hbm_bytes)

    def clear(self) -> None:
        """Frees all programs and inputs."""
        self._candidates.clear()
        self._by_text.clear()
        self._sets, self._sets_of = [], ()

    def compile(self, name: str, task: Task) -> str | None:
        """Compiles a candidate as `name`; the name of an identical one where there is any.

        Raises whatever the candidate raises, OversizeError before any work on the device.
        """
        kernel = base.load(task.problem.kernel)
        config = task.candidate.config
        lowered = self._lower(kernel, task.problem, config, name)
        memory = self.hbm_bytes(task.problem)
        if reason := inputs.preflight(lowered.arguments, lowered.outputs, memory):
            raise OversizeError(reason)
        with self._lock:
            twin = self._by_text.setdefault(lowered.text, name)
        if twin != name:
            return twin
        timed = checked = lowered.compile()
        if kernel.reference is not None and not _reference_fits(kernel, timed):
            smaller = reduced(kernel, task.problem, config)
            checked = self._lower(kernel, smaller, config, f"{name}_reduced").compile()
        self._candidates[name] = _Candidate(task=task, timed=timed, checked=checked)
        return None

    def check(self, name: str, seed: int) -> Checked:
        """Runs a candidate once, untimed, and compares its output with the reference's."""
        import jax

        one = self._candidates[name]
        kernel = base.load(one.task.problem.kernel)
        if one.checked is not one.timed or kernel.reference is None:
            waits: Any = jax.block_until_ready
            waits(one.timed.run(*self._inputs(one.timed, seed)[0]))
        if kernel.reference is None:
            return Checked(status="ok", how=NO_REFERENCE)
        where = f"on {self.device.device_kind}"
        return _check(kernel, one, inputs.check_seed(seed, one.task.candidate), where)

    def time(
        self, names: Sequence[str], *, timer: str, effort: Effort, seed: int
    ) -> dict[str, list[float] | TraceError]:
        """Samples in ms of each candidate, interleaved; or why it has none."""
        sets = {name: self._inputs(self._candidates[name].timed, seed) for name in names}
        runs = {name: self._candidates[name].timed.run for name in names}
        if timer == "host_clock":
            runner = HostClock(runs | {EMPTY: empty_program()}, sets)
            return time_on_host(runner, names, effort=effort, seed=seed)
        return time_on_device(Profile(runs, sets), names, effort=effort, seed=seed)

    def interpret(self, task: Task, seed: int) -> Checked:
        """The verdict on a candidate in interpret mode: numerics only, never a time.

        A kernel that reads or writes outside its arrays is wrong, which no chip would say.
        """
        kernel = base.load(task.problem.kernel)
        if (told := check.uncheckable(kernel)) is not None:
            return told
        problem, config = lightened(
            kernel, task.problem, task.candidate.config, max_flops=INTERPRETED_FLOPS
        )
        where = "in interpret mode"
        if config != task.candidate.config:
            where += " with blocks " + " ".join(f"{k}={v}" for k, v in config.items())

        def verdict(problem: Problem) -> Checked:
            program = self._lower(kernel, problem, config, "interpreted").compile()
            one = _Candidate(task=task, timed=program, checked=program)
            return _check(kernel, one, inputs.check_seed(seed, task.candidate), where)

        try:
            try:
                return verdict(problem)
            except Exception as error:
                whole = in_whole_tiles(kernel, problem) if PAST_THE_EDGE in str(error) else None
                if whole is None:
                    raise
                return verdict(whole)
        except Exception as error:
            outside = next((t for t in str(error).splitlines() if OUTSIDE in t), None)
            if outside is None:
                raise
            reason = "it reads or writes outside its arrays: " + outside[outside.index(OUTSIDE) :]
            return Checked(status="wrong", reason=reason, error=math.inf, how=where)

    def _lower(self, kernel: Kernel, problem: Problem, config: Config, name: str) -> _Lowered:
        """The candidate as the program `jit_NAME`, for this device."""
        import jax

        with _interpreted() if self.interprets else contextlib.nullcontext():
            function, arguments = kernel.build(problem, config)

            def program(*arrays: Any) -> Any:
                return function(*arrays)

            program.__name__ = name
            traced = self._trace(jax.jit(program), arguments, problem)
            lowered = traced.lower()
        text = lowered.as_text()
        # What a program calls back on the host is not in its text: such programs are all different.
        named = text if "callback" in text else text.replace(name, "program")
        digest = hashlib.sha256(named.encode())
        for constant in getattr(traced.jaxpr, "consts", ()):
            digest.update(np.asarray(constant).tobytes())
        return _Lowered(
            problem=problem,
            lowered=lowered,
            arguments=tuple(arguments),
            precision=check.precision_of(traced.jaxpr),
            text=digest.hexdigest(),
        )

    def _trace(self, program: Any, arguments: Sequence[Any], problem: Problem) -> Any:
        """The jitted program, traced; in interpret mode as on its own chip where it asks for it."""
        try:
            return program.trace(*arguments)
        except Exception as error:
            if not (self.interprets and asked_for_chip(error)):
                raise
            with as_on(devices.get(problem.device)):
                return program.trace(*arguments)

    def _inputs(self, program: _Program, seed: int) -> list[tuple[Any, ...]]:
        """Sets of inputs to run in turn, drawn once for all candidates that take the same."""
        kernel = base.load(program.problem.kernel)
        taken = tuple((a.shape, str(a.dtype)) for a in program.arguments)
        if self._sets_of != (program.problem.key, taken, seed):
            self._sets, self._sets_of = [], ()  # freed before as much is drawn again
            limit = self.hbm_bytes(program.problem)
            count = inputs.sets_that_fit(program.arguments, program.outputs, limit)
            self._sets = [
                inputs.draw(kernel, program.problem, program.arguments, seed + n)
                for n in range(count)
            ]
            self._sets_of = (program.problem.key, taken, seed)
        return self._sets


def _check(kernel: Kernel, one: _Candidate, seed: int, where: str) -> Checked:
    """Runs `one.checked` on inputs of its own and judges the outputs."""
    import jax

    assert kernel.reference is not None
    problem, whole = one.checked.problem, one.task.problem
    arrays = inputs.draw(kernel, problem, one.checked.arguments, seed)
    outputs = [np.asarray(o) for o in jax.tree.leaves(one.checked.run(*arrays))]
    host = tuple(np.asarray(array) for array in arrays)
    del arrays
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        wanted = base.ask(kernel, "reference", kernel.reference, problem, *host)
        references = [np.asarray(o) for o in jax.tree.leaves(wanted)]
    elements = sum(output.size for output in outputs)
    contraction = kernel.flops(problem) / (2 * max(1, elements))
    changed = {a: n for a, n in problem.shape.items() if n != whole.shape[a]}
    size = " ".join(f"{a}={n}" for a, n in changed.items())
    how = f"at {size or 'its own size'} {where}"
    allowed = check.tolerance(one.checked.precision, contraction)
    return check.judge(outputs, references, allowed, how=how)


def _reference_fits(kernel: Kernel, program: _Program) -> bool:
    """Whether the host can compute the reference at the problem's own size.

    Arrays in float64, twice, and a byte for 8 FLOPs: what four float64 arrays of attention's
    scores take at head dimensions of 128. Products of large matrices take less.
    """
    import psutil

    elements = sum(math.prod(a.shape) for a in (*program.arguments, *program.outputs))
    needed = 16 * elements + kernel.flops(program.problem) // 8
    return bool(needed <= HOST_SHARE * psutil.virtual_memory().available)


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    """Pallas calls traced in here run on a CPU; memory that nothing wrote, and what lies past an
    array's edge, reads as NaN."""
    from jax.experimental.pallas import tpu as pltpu

    unknown: Any = {"uninitialized_memory": "nan", "out_of_bounds_reads": "uninitialized"}
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**unknown)):
        yield


def _leaves(tree: Any) -> tuple[Any, ...]:
    import jax

    return tuple(jax.tree.leaves(tree))
