"""The space of a problem: the product of its tunables, split into legal and illegal points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune import device as devices
from autotune.candidate import Candidate, Config, Scalar
from autotune.errors import InputError, KernelError, shown
from autotune.overrides import Overrides, ordered

if TYPE_CHECKING:
    from autotune.config import ProblemSpec
    from autotune.device import Device
    from autotune.kernels.base import Kernel
    from autotune.problem import Problem

MAX_POINTS = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Illegal:
    """A point that no compiler is asked about, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """All candidates of a problem; each canonical, each once, in a fixed order.

    Attributes:
      legal: the default first, where the kernel has one and it is legal; then the product.
      illegal: points against a rule of the kernel; each becomes a row with its reason.
    """

    legal: tuple[Candidate, ...]
    illegal: tuple[Illegal, ...] = ()

    def joined(self, more: Iterable[Candidate]) -> Space:
        """This space with legal candidates from elsewhere, each once."""
        known = {*self.legal, *(i.candidate for i in self.illegal)}
        return Space(
            legal=(*self.legal, *(c for c in more if c not in known)), illegal=self.illegal
        )


def of(spec: ProblemSpec) -> Space:
    """The space of a config's problem; an error names the file and line."""
    from autotune.kernels import base

    device = devices.get(spec.problem.device)
    try:
        return candidates(base.load(spec.problem.kernel), spec.problem, device, spec.space)
    except (InputError, KernelError) as error:
        raise type(error)(f"{spec.where}: {str(error).removeprefix('space: ')}") from error


def candidates(
    kernel: Kernel, problem: Problem, device: Device, overrides: Overrides | None = None
) -> Space:
    """The product of the tunables, with the user's values where `overrides` has any.

    Points are made canonical first, so that equal runs are one candidate, and judged by
    `kernel.illegal` after. The default stays a candidate when the overrides leave it out. A value
    of the user's that suits no other value of the kernel's (a block that none of the usual
    sub-blocks divides) is tried with the default's as well.

    Raises:
      InputError: a product above `MAX_POINTS`, or overrides that leave no legal candidate.
      KernelError: a function of the kernel raised, or a config misses a tunable.
    """
    from autotune.kernels import base

    overrides = overrides or {}
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    choices = {name: overrides.get(name, tunable.values) for name, tunable in tunables.items()}
    if empty := [name for name, values in choices.items() if not values]:
        raise InputError(f"space: no legal candidate, {empty[0]} has no values", path=("space",))
    points = _Points(kernel, problem, device, names=choices.keys())
    points.add_product(choices)
    default = points.default()
    if default is not None:
        wider = {
            name: values if name in overrides else ordered((*values, default.config[name]))
            for name, values in choices.items()
        }
        for name, value in points.stranded(overrides):
            points.add_product({**wider, name: (value,)})
    if overrides and all(points.reasons.values()):
        raise InputError(_none_left(overrides, points.reasons), path=("space",))
    if default is not None:
        points.put_first(default)
    return points.space()


class _Points:
    """The canonical points of a problem, each once, and why the illegal ones are."""

    def __init__(
        self, kernel: Kernel, problem: Problem, device: Device, *, names: Collection[str]
    ) -> None:
        self._kernel, self._problem, self._device = kernel, problem, device
        self._names = set(names)
        self._candidates: dict[str, Candidate] = {}
        self.reasons: dict[str, str | None] = {}
        self._served: set[tuple[str, str]] = set()

    def add_product(self, choices: Mapping[str, tuple[Scalar, ...]]) -> None:
        """The product of `choices`, the last tunable fastest. Raises InputError when too large."""
        _check_size(choices)
        for values in itertools.product(*choices.values()):
            config = dict(zip(choices, values, strict=True))
            candidate = self._canonical("canonical", config, is_default=False)
            if self._add(candidate) is None:
                self._served.update((name, repr(value)) for name, value in config.items())

    def stranded(self, overrides: Overrides) -> list[tuple[str, Scalar]]:
        """The user's values that no legal point has."""
        given = [(name, value) for name, values in overrides.items() for value in values]
        return [(name, value) for name, value in given if (name, repr(value)) not in self._served]

    def default(self) -> Candidate | None:
        """What users have without tuning; None where the kernel does not say."""
        if self._kernel.default is None:
            return None
        config = self._ask("default", self._kernel.default, self._problem, self._device)
        return self._canonical("default", config, is_default=True)

    def put_first(self, candidate: Candidate) -> None:
        self._add(candidate)
        self._candidates = {candidate.json: candidate} | self._candidates
        self._candidates[candidate.json] = candidate  # the one that is marked

    def space(self) -> Space:
        judged = [(c, self.reasons[key]) for key, c in self._candidates.items()]
        return Space(
            legal=tuple(c for c, reason in judged if reason is None),
            illegal=tuple(
                Illegal(candidate=c, reason=reason) for c, reason in judged if reason is not None
            ),
        )

    def _add(self, candidate: Candidate) -> str | None:
        """Why the candidate is illegal; None where it is not. Asked once a candidate."""
        key = candidate.json
        if key not in self._candidates:
            self._candidates[key] = candidate
            reason = self._ask(
                "illegal", self._kernel.illegal, self._problem, candidate.config, self._device
            )
            self.reasons[key] = None if reason is None else str(reason)
        return self.reasons[key]

    def _canonical(self, what: str, config: Config, *, is_default: bool) -> Candidate:
        config = self._ask("canonical", self._kernel.canonical, self._problem, config)
        if config.keys() != self._names:
            raise KernelError(
                f"kernel {self._kernel.name}: {what} gave {sorted(config)}, its tunables are "
                f"{sorted(self._names)}"
            )
        try:
            return Candidate.of(config, is_default=is_default)
        except TypeError as error:
            raise KernelError(f"kernel {self._kernel.name}: {error}") from None

    def _ask(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        from autotune.kernels import base

        return base.ask(self._kernel, what, function, *args)


def _check_size(choices: Mapping[str, tuple[Scalar, ...]]) -> None:
    """Raises InputError, before anything is made, for a product above `MAX_POINTS`."""
    count = math.prod(map(len, choices.values()))
    if count > MAX_POINTS:
        counts = " x ".join(f"{name} {len(values)}" for name, values in choices.items())
        raise InputError(
            f"space: {count} combinations ({counts}); at most {MAX_POINTS}: narrow a tunable",
            path=("space",),
        )


def _none_left(overrides: Overrides, reasons: Mapping[str, str | None]) -> str:
    """The message for overrides that only combine to illegal points: the first, and how many."""
    given = " ".join(f"{name}={','.join(map(shown, values))}" for name, values in overrides.items())
    first = next(iter(reasons.values()), None) or "a tunable has no values"
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"space: leaves no legal candidate: {given}: {first}{more}"


def recorded(problem: Problem, config: Config) -> Candidate | None:
    """The candidate of a config written elsewhere; None where it is none, or illegal here.

    A tunable that is left out is null, as those are that the others leave without a meaning.
    """
    from autotune import overrides
    from autotune.kernels import base

    device, kernel = devices.get(problem.device), base.load(problem.kernel)
    names = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    if not config.keys() <= names.keys():
        return None
    given = {name: value for name, value in config.items() if value is not None}
    whole = dict.fromkeys(names) | given
    try:
        overrides.checked(kernel, problem, device, given)
        candidate = Candidate.of(base.ask(kernel, "canonical", kernel.canonical, problem, whole))
        illegal = base.ask(kernel, "illegal", kernel.illegal, problem, candidate.config, device)
    except (InputError, KernelError, TypeError):
        return None
    return candidate if illegal is None else None
