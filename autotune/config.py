"""YAML configs: from a file to checked problems with their spaces and budgets.

Every fault is one `InputError` line: file, line, key path, value, what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autotune import config_schema, matrix, overrides, strict_yaml
from autotune import device as chips
from autotune.config_schema import ProblemEntry
from autotune.device import Device
from autotune.errors import AutotuneError, InputError, KernelError, shown
from autotune.matrix import Point
from autotune.overrides import Overrides
from autotune.problem import Problem
from autotune.strict_yaml import Document, Keys, dotted

if TYPE_CHECKING:
    from autotune.kernels.base import Kernel

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSpec:
    """One problem to tune.

    Attributes:
      space: the user's values of some tunables, each legal by itself, in ascending order.
      trials, seconds: the problem's budget, else the file's; None where neither says.
      where: file, line and key path of its `space:`, else of the problem; for error messages.
    """

    problem: Problem
    space: Overrides = field(default_factory=dict)
    trials: int | None = None
    seconds: float | None = None
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A loaded file.

    Attributes:
      problems: distinct ones, device by device, in the file's order.
      duplicates: one sentence for each problem that equals an earlier one and so runs once.
    """

    path: str
    problems: tuple[ProblemSpec, ...]
    duplicates: tuple[str, ...] = ()


def load(path: str | Path, *, devices: Sequence[str] | None = None) -> Config:
    """The checked config of a file. `devices` (names, or `auto`) replace the file's.

    Problems with equal keys run once, under the first one's name; equal problems that ask for
    different spaces or budgets are an error.

    Raises:
      InputError: anything wrong in the file; nothing is half loaded.
      KernelError: a kernel broke its contract.
    """
    document = strict_yaml.read(path)
    reader = _Reader(document=document, file=config_schema.parse(document))
    seen: dict[str, tuple[Keys, ProblemSpec]] = {}
    duplicates: list[str] = []
    for device in reader.devices(devices):
        for keys, spec in reader.specs(device):
            first_keys, first = seen.setdefault(spec.problem.key, (keys, spec))
            if first is spec:
                continue
            same = f"the same problem as {dotted(first_keys)} on line {document.line(first_keys)}"
            if (first.space, first.trials, first.seconds) != (
                spec.space,
                spec.trials,
                spec.seconds,
            ):
                raise document.error(keys, f"{same}, with another space or budget; drop one")
            duplicates.append(f"{document.where(keys)}: {spec.problem.label}: {same}; it runs once")
    return Config(
        path=str(path),
        problems=tuple(spec for _, spec in seen.values()),
        duplicates=tuple(duplicates),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """The file's entries as checked values, each fault with its place in the file."""

    document: Document
    file: config_schema.File

    def devices(self, override: Sequence[str] | None) -> tuple[Device, ...]:
        """The devices to tune for, each once."""
        given = self.file.device
        names = given if isinstance(given, list) else [given]
        allowed = f"{', '.join(chips.DEVICES)}, auto, or a list of them"
        if "device" not in self.file.model_fields_set:
            if not override:
                raise self.document.error((), f"lacks the key 'device'; {allowed}")
        elif not names or not all(isinstance(name, str) for name in names):
            raise self.document.error(("device",), f"{shown(given)} is not allowed; {allowed}")
        else:  # a misspelled name is one even where --device takes its place
            for name in names:
                self._ask((), partial(_known, name))
        if not override:
            return self._ask((), partial(_resolved, names))
        try:
            return _resolved(override)
        except InputError as error:
            raise InputError(f"--device: {error}") from None

    def specs(self, device: Device) -> Iterator[tuple[Keys, ProblemSpec]]:
        """Every problem for one device, in the file's order, with its place."""
        for i, entry in enumerate(self.file.problems):
            keys: Keys = ("problems", i)
            for spec in self._expanded(keys, entry, device):
                yield keys, spec

    def _expanded(self, keys: Keys, entry: ProblemEntry, device: Device) -> Iterator[ProblemSpec]:
        from autotune.kernels import base  # imports jax, once the file is known to be well formed

        folder = str(Path(self.document.path).resolve().parent)
        kernel = self._ask(keys, partial(base.load, entry.kernel, beside=folder))
        given: set[Keys] = {("shape", axis) for axis in entry.shape}
        given |= {("options", option) for option in entry.options}
        given |= {("dtype",)} if "dtype" in entry.model_fields_set else set()
        limits = self.file.budget.model_dump(exclude_unset=True)
        limits |= entry.budget.model_dump(exclude_unset=True)
        where = self.document.where((*keys, "space") if entry.space else keys)
        for point in self._ask(keys, partial(matrix.points, entry.matrix, kernel, given)):
            problem, space = self._ask(keys, partial(_problem, kernel, entry, device, point), point)
            yield ProblemSpec(problem=problem, space=space, where=where, **limits)

    def _ask(self, keys: Keys, make: Callable[[], T], point: Point | None = None) -> T:
        """`make()`, its errors with file, line, key path and the matrix's combination."""
        try:
            return make()
        except AutotuneError as error:
            local: Keys = getattr(error, "path", ())
            message = str(error).removeprefix(f"{dotted(local)}: ")
            if point is not None and point.suffix:
                message += f" (combination {point.suffix})"
                local = point.origins.get(local, local)
            if isinstance(error, KernelError):
                raise KernelError(f"{self.document.where((*keys, *local))}: {message}") from error
            raise self.document.error((*keys, *local), message) from None


def _known(name: str) -> None:
    """Raises UnknownNameError for the name of no device."""
    if name != "auto":
        chips.get(name)


def _resolved(names: Sequence[str]) -> tuple[Device, ...]:
    """The devices, each once, in the order named."""
    found: dict[str, Device] = {}
    for name in names:
        device = chips.attached() if name == "auto" else chips.get(name)
        if device is None:
            raise InputError(
                f"'auto' is not allowed here; no TPU is attached, so name one of "
                f"{', '.join(chips.DEVICES)}",
                path=("device",),
            )
        found[device.name] = device
    return tuple(found.values())


def _problem(
    kernel: Kernel, entry: ProblemEntry, device: Device, point: Point
) -> tuple[Problem, Overrides]:
    """The problem and space of an entry at one point of its matrix."""
    from autotune.kernels import base

    sections: dict[str, dict[str, Any]] = {"shape": {**entry.shape}, "options": {**entry.options}}
    dtype = entry.dtype
    for target, value in point.values.items():
        if target == ("dtype",):
            dtype = value
        else:
            section, name = target
            sections[str(section)][str(name)] = value
    name_ = f"{entry.name or entry.kernel} {point.suffix}" if point.suffix else entry.name
    problem = base.make_problem(kernel, device=device.name, dtype=dtype, name=name_, **sections)
    if "space" in entry.model_fields_set and not entry.space:
        raise InputError(
            "space: {} is not allowed; values of at least one tunable, or no space at all",
            path=("space",),
        )
    return problem, overrides.checked(kernel, problem, device, entry.space)
