"""The space of a problem: the product of its tunables, split into legal and illegal points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune import device as devices
from autotune.candidate import Candidate, Scalar
from autotune.errors import InputError, KernelError, shown
from autotune.overrides import Overrides

if TYPE_CHECKING:
    from autotune.config import ProblemSpec
    from autotune.device import Device
    from autotune.kernels.base import Kernel
    from autotune.problem import Problem

MAX_POINTS = 200_000


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
    `kernel.illegal` after. The default stays a candidate when the overrides leave it out.

    Raises:
      InputError: a product above `MAX_POINTS`, or overrides that leave no legal candidate.
      KernelError: a function of the kernel raised, or a config misses a tunable.
    """
    from autotune.kernels import base

    overrides = overrides or {}
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    choices = {name: overrides.get(name, tunable.values) for name, tunable in tunables.items()}
    _check_size(choices)
    asker = _Asker(kernel=kernel, problem=problem, device=device, names=frozenset(choices))
    points = {c.json: c for c in asker.points(choices)}
    judged = {key: asker.illegal(c) for key, c in points.items()}
    if overrides and all(judged.values()):
        raise InputError(_none_left(overrides, judged), path=("space",))
    default = asker.default()
    if default is not None:
        points = {default.json: default} | {k: c for k, c in points.items() if k != default.json}
        judged.setdefault(default.json, asker.illegal(default))
    return Space(
        legal=tuple(c for key, c in points.items() if judged[key] is None),
        illegal=tuple(
            Illegal(candidate=c, reason=reason)
            for key, c in points.items()
            if (reason := judged[key]) is not None
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asker:
    """A kernel's rules on one problem and device, answered as candidates and reasons."""

    kernel: Kernel
    problem: Problem
    device: Device
    names: frozenset[str]

    def points(self, choices: Mapping[str, tuple[Scalar, ...]]) -> Iterator[Candidate]:
        """The canonical product, the last tunable fastest; equal points are repeated."""
        for values in itertools.product(*choices.values()):
            yield self._canonical(dict(zip(choices, values, strict=True)), is_default=False)

    def default(self) -> Candidate | None:
        """What users have without tuning; None where the kernel does not say."""
        if self.kernel.default is None:
            return None
        config = self._ask("default", self.kernel.default, self.problem, self.device)
        return self._canonical(config, is_default=True)

    def illegal(self, candidate: Candidate) -> str | None:
        """Why the candidate is illegal; None where it is not."""
        reason = self._ask(
            "illegal", self.kernel.illegal, self.problem, candidate.config, self.device
        )
        return None if reason is None else str(reason)

    def _canonical(self, config: Mapping[str, Scalar], *, is_default: bool) -> Candidate:
        config = self._ask("canonical", self.kernel.canonical, self.problem, config)
        if config.keys() != self.names:
            raise KernelError(
                f"kernel {self.kernel.name}: {'default' if is_default else 'canonical'} gave "
                f"{sorted(config)}, its tunables are {sorted(self.names)}"
            )
        try:
            return Candidate.of(config, is_default=is_default)
        except TypeError as error:
            raise KernelError(f"kernel {self.kernel.name}: {error}") from None

    def _ask(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        from autotune.kernels import base

        return base.ask(self.kernel, what, function, *args)


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
