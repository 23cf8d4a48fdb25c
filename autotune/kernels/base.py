"""The kernel contract: what no trace can know of a kernel, as one frozen value.

A kernel is a `Kernel`: how to build its call, its tunables, its FLOP count.
Grid, windows, VMEM, traffic, executed FLOPs and how often each named scope runs
are read from the traced call (`pallas_call.py`), for anybody's kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from autotune import device as devices
from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import AutotuneError, InputError, KernelError, UnknownNameError, shown
from autotune.kernels.options import Option as Option  # users' kernels take all four from here
from autotune.kernels.options import choice as choice
from autotune.kernels.options import flag as flag
from autotune.kernels.options import number as number
from autotune.kernels.registry import REGISTRY, place_of
from autotune.problem import MAX_AXIS, Problem

MAX_FLOPS = 2**60
"""Traffic and executed FLOPs, some multiples of this, must fit the leaderboard's int64 columns."""

Call = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tunable:
    """One tunable of a kernel on a problem.

    Attributes:
      values: what is searched when the config does not say, in ascending order.
      check: why a value the user asks for is illegal, as "a multiple of 128" (what is
        allowed), or None when it is legal.
    """

    values: tuple[Scalar, ...]
    check: Callable[[Scalar], str | None] = lambda value: None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A tunable kernel: `docs/your-own-kernel.md` shows one of 30 lines.

    The functions take an `autotune.problem.Problem` (`shape`, `options`, `dtype`, `device`), a
    config (a dict, tunable name -> value) and an `autotune.device.Device` (peaks, VMEM, MXU size).

    Attributes:
      name: registry name; of a user's kernel any text, its address stands in for it.
      axes: shape entries a problem must have, in documentation order.
      build: `(problem, config) -> (fn, args)`: `fn(*args)` holds the `pallas_call`; `args`
        are `jax.ShapeDtypeStruct` at the problem's true size. Raises ValueError for a config it
        cannot run.
      tunables: `(problem, device) -> {name: Tunable}`.
      flops: `problem -> int`: FLOPs of the mathematical definition, unmasked pairs only.
      flop_convention: that count in words, printed with every table.
      axis_defaults: axes that may be left out, with their size.
      options: option name -> Option.
      dtypes: operand dtypes the kernel is written for.
      check: `problem -> None`, raises InputError(path=…) for an impossible problem.
      illegal: `(problem, config, device) -> reason | None` for rules over several tunables.
      canonical: `(problem, config) -> config`: the configuration that really runs (blocks
        clamped to the axis, nulls resolved), so that equal runs are one candidate.
      default: `(problem, device) -> config` users have today without tuning.
      inputs: `(problem, jax.random key) -> arrays`; standard normals where None.
      reference: `(problem, *arrays) -> output(s)` in float64 NumPy or jnp.
      interpretable: whether JAX's TPU interpret mode can run it; where not, a gate without a TPU
        passes it with its output unchecked.
      output: `problem -> output(s)` as the call should return them, anything with a `shape`. Where
        None, shapes are compared with those of a reference that JAX can trace.
      multiplied_dtype: the dtype the MXU multiplies, whose peak MFU is against.
      scope_counts: `(problem, config) -> {scope: executions}` where it depends on run-time data.
    """

    name: str
    axes: tuple[str, ...]
    build: Callable[[Problem, Config], Call]
    tunables: Callable[[Problem, Device], Mapping[str, Tunable]]
    flops: Callable[[Problem], int]
    flop_convention: str = "stated by the kernel"
    axis_defaults: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    check: Callable[[Problem], None] = lambda problem: None
    illegal: Callable[[Problem, Config, Device], str | None] = lambda problem, config, device: None
    canonical: Callable[[Problem, Config], Config] = lambda problem, config: config
    default: Callable[[Problem, Device], Config] | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    reference: Callable[..., Any] | None = None
    interpretable: bool = True
    output: Callable[[Problem], Any] | None = None
    multiplied_dtype: Callable[[Problem], str] = lambda problem: problem.dtype
    scope_counts: Callable[[Problem, Config], Mapping[str, int]] | None = None

    def __post_init__(self) -> None:
        for what in ("axes", "dtypes"):
            names = getattr(self, what)
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise KernelError(
                    f"kernel {self.name}: {what} is {shown(names)}, not a tuple of names"
                )
        for name, option in self.options.items():
            if not isinstance(option, Option):
                raise KernelError(
                    f"kernel {self.name}: option {name} is {shown(option)}, not an Option"
                )


def make_problem(
    kernel: Kernel,
    *,
    device: str,
    shape: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    name: str | None = None,
) -> Problem:
    """The checked problem, options filled in with the kernel's defaults.

    Raises:
      InputError: with `path` naming the entry, for anything a kernel cannot run: a missing,
        unknown or impossible axis, an unknown option or option value, a dtype that the kernel or
        the chip does not have.
    """
    given = dict(options or {})
    for option in given:
        if option not in kernel.options:
            raise UnknownNameError(
                f"option of {kernel.name}", option, kernel.options, path=("options", option)
            )
    full = {k: _parse_option(kernel, k, given) for k in kernel.options}
    problem = Problem(
        kernel=kernel.name,
        device=devices.get(device).name,
        shape=_checked_shape(kernel, shape),
        options=full,
        dtype=_checked_dtype(kernel, devices.get(device), dtype),
        name=name,
        defaults=frozenset(k for k, o in kernel.options.items() if full[k] == o.default),
    )
    ask(kernel, "check", kernel.check, problem)
    flops = ask(kernel, "flops", kernel.flops, problem)
    if isinstance(flops, bool) or not isinstance(flops, int) or flops < 1:
        raise KernelError(
            f"kernel {kernel.name}: flops gave {shown(flops)}, not a whole number of at least 1"
        )
    if flops >= MAX_FLOPS:
        raise InputError(
            f"shape: {flops:.2e} FLOPs is not allowed; less than 2^60, to be counted in 64 bits",
            path=("shape",),
        )
    return problem


def ask(kernel: Kernel, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, one of the kernel's own functions.

    Raises KernelError, in one line, for whatever it raises that is no AutotuneError, and for an
    answer of another kind than it should be: a kernel may be the user's, and its faults are no
    reason for a traceback of ours.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            answer = function(*args)
    except AutotuneError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise KernelError(
            f"kernel {kernel.name}: {what} raised {type(error).__name__}: {text}"
        ) from error
    if (fault := _fault(what, answer)) is not None:
        raise KernelError(f"kernel {kernel.name}: {fault}")
    return answer


def _fault(what: str, answer: Any) -> str | None:
    """Why `answer` is none that the kernel's function `what` may give; None where it may."""
    if what == "illegal" and not (answer is None or isinstance(answer, str)):
        return f"illegal gave {shown(answer)}, not a reason or None"
    if what not in ("tunables", "canonical", "default", "scope_counts"):
        return None
    if not isinstance(answer, Mapping):
        return f"{what} gave {shown(answer)}, not a mapping"
    for name, value in answer.items():
        if not isinstance(name, str):
            return f"{what} gave the name {shown(name)}, not text"
        if what == "tunables" and not isinstance(value, Tunable):
            return f"tunable {name} is {shown(value)}, not a Tunable(values=(…))"
        if what == "scope_counts" and (isinstance(value, bool) or not isinstance(value, int)):
            return f"scope_counts gave {shown(value)} for {name}, not a whole number"
    return None


def _parse_option(kernel: Kernel, name: str, given: Mapping[str, Any]) -> Any:
    option = kernel.options[name]
    if name not in given:
        return option.default

    def parse() -> Any:
        try:
            return option.parse(given[name])
        except ValueError as error:
            raise InputError(
                f"options.{name}: {shown(given[name])} is not allowed; {error}",
                path=("options", name),
            ) from None

    return ask(kernel, f"option {name}", parse)


def _checked_shape(kernel: Kernel, shape: Mapping[str, Any]) -> dict[str, int]:
    for axis in shape:
        if axis not in kernel.axes:
            raise UnknownNameError(
                f"shape entry of {kernel.name}", axis, kernel.axes, path=("shape", axis)
            )
    sizes: dict[str, int] = {}
    required = [axis for axis in kernel.axes if axis not in kernel.axis_defaults]
    for axis in kernel.axes:
        if axis not in shape and axis not in kernel.axis_defaults:
            raise InputError(
                f"shape: lacks {axis!r} ({kernel.name} needs {', '.join(required)})",
                path=("shape",),
            )
        size = shape[axis] if axis in shape else kernel.axis_defaults[axis]
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_AXIS:
            raise InputError(
                f"shape.{axis}: {shown(size)} is not allowed; a whole number from 1 to 2^31",
                path=("shape", axis),
            )
        sizes[axis] = size
    return sizes


def _checked_dtype(kernel: Kernel, device: Device, dtype: str) -> str:
    allowed = ", ".join(d for d in kernel.dtypes if d in device.matmul_dtypes) or "another device"
    if dtype not in kernel.dtypes:
        raise InputError(
            f"dtype: {shown(dtype)} is not allowed; {kernel.name} on {device.name} takes {allowed}",
            path=("dtype",),
        )
    if dtype not in device.matmul_dtypes:
        raise InputError(
            f"dtype: {shown(dtype)} is not multiplied by {device.name}; use {allowed}",
            path=("dtype",),
        )
    return dtype


def load(name: str, *, beside: str | None = None) -> Kernel:
    """The kernel called `name`: a built-in's module holds it, as `KERNEL` where not said otherwise.

    `package.module:ATTRIBUTE` is the user's own, found on `sys.path`, in the current folder or in
    the folder `beside`, that of a config; its `name` becomes that text, so that a worker process
    finds it again.

    Raises:
      UnknownNameError: an unknown kernel or attribute; the message lists the known ones.
      InputError: no such module, or the attribute is no `Kernel`; or a built-in of another project,
        which is not installed or lacks it.
      KernelError: the module could not be imported.
    """
    if ":" in name:
        from autotune.kernels import external

        return external.load(name, beside)
    if name not in REGISTRY:
        raise UnknownNameError("kernel", name, REGISTRY, path=("kernel",))
    module, attribute = place_of(name)
    try:
        kernel: Kernel = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise InputError(
            f"kernel {name!r} is not available here: {error}", path=("kernel",)
        ) from error
    return kernel
