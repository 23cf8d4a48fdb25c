"""`space:` of a problem: the user's values of tunables, checked against a kernel's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.candidate import Scalar
from autotune.errors import InputError, UnknownNameError, shown

if TYPE_CHECKING:
    from autotune.device import Device
    from autotune.kernels.base import Kernel, Tunable
    from autotune.problem import Problem

Overrides = Mapping[str, tuple[Scalar, ...]]


def checked(
    kernel: Kernel, problem: Problem, device: Device, space: Mapping[str, Any]
) -> Overrides:
    """Each named tunable's values, distinct and in ascending order; a scalar pins it.

    Raises InputError with `path` for an unknown tunable, an empty list, and a value that is
    illegal by itself: of another kind than the tunable's own, or refused by its `check`.
    """
    from autotune.kernels import base  # imports jax

    if not space:
        return {}
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    overrides: dict[str, tuple[Scalar, ...]] = {}
    for name, given in space.items():
        if name not in tunables:
            raise UnknownNameError(
                f"tunable of {kernel.name}", name, tunables, path=("space", name)
            )
        if given == []:
            raise InputError(
                "[] is not allowed; a value or a list of at least one", path=("space", name)
            )
        values = given if isinstance(given, list) else [given]
        for i, value in enumerate(values):
            if allowed := base.ask(kernel, f"check of {name}", _refusal, tunables[name], value):
                path = ("space", name, i) if isinstance(given, list) else ("space", name)
                raise InputError(f"{shown(value)} is not allowed; {allowed}", path=path)
        overrides[name] = ordered([_as_own(tunables[name], value) for value in values])
    return overrides


def ordered(values: Iterable[Scalar]) -> tuple[Scalar, ...]:
    """Distinct values (True is not 1) in one order for any order they are written in."""
    distinct = {_rank(value): value for value in values}
    return tuple(distinct[rank] for rank in sorted(distinct))


def _rank(value: Scalar) -> tuple[int, float, str]:
    if value is None:
        return 0, 0, ""
    if isinstance(value, bool):
        return 1, value, ""
    return (3, 0, value) if isinstance(value, str) else (2, value, type(value).__name__)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a whole number" if float(value).is_integer() else "a number"
    return "a word" if isinstance(value, str) else "null" if value is None else "a scalar"


def _refusal(tunable: Tunable, value: Any) -> str | None:
    """What is allowed instead of `value`; None where it is legal."""
    own = {_kind(v): v for v in tunable.values}
    like = " or ".join(sorted(own)) + f", such as {', '.join(map(shown, tunable.values[:3]))}"
    try:
        # Null is the check's to judge: it often means "the default" though no search tries it.
        allowed = tunable.check(value) if not isinstance(value, list | dict) else like
    except (TypeError, ValueError):  # a rule for numbers, asked about a word
        return like
    if allowed is None and value is not None and _kind(value) not in own:
        fraction_fits = "a number" in own and _kind(value) == "a whole number"
        return None if fraction_fits or not own else like
    return allowed


def _as_own(tunable: Tunable, value: Scalar) -> Scalar:
    """The tunable's own spelling of an equal number (1 for 1.0), so that both are one candidate."""
    numbers = (v for v in tunable.values if isinstance(v, int | float) and not isinstance(v, bool))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return next((v for v in numbers if v == value), value)
