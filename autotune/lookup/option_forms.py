"""What values an option of a built-in kernel takes, as `kernels.base.Option` has it without jax."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.kernels import masks


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """An option's default, and its `parse`: the normalised value, or ValueError(what is allowed).

    A test holds every one of them, texts included, to the kernel's own.
    """

    parse: Callable[[Any], Any]
    default: Any = None


def flag(default: bool = False) -> Form:
    """true or false."""

    def parse(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError("true or false")

    return Form(default=default, parse=parse)


def choice(default: str | None, *names: str) -> Form:
    """One of `names`; null too where that is the default."""

    def parse(value: Any) -> Any:
        if value in names or (value is None and default is None):
            return value
        raise ValueError("one of " + ", ".join(names))

    return Form(default=default, parse=parse)


def number(*, positive: bool) -> Form:
    """A finite number or null; with `positive` 0 is null."""

    def parse(value: Any) -> float | None:
        if value is None:
            return None
        if not _is_finite(value):
            raise ValueError("a finite number, or null")
        if positive and value < 0:
            raise ValueError("a positive number, or 0 or null for off")
        return None if positive and value == 0 else float(value)

    return Form(parse=parse)


def factor() -> Form:
    """A number above 0; 1 unless given."""

    def parse(value: Any) -> float:
        if not _is_finite(value) or not 0 < value < 1e30:
            raise ValueError("a finite number above 0")
        return float(value)

    return Form(default=1.0, parse=parse)


def window() -> Form:
    """A count of keys, or null."""

    def parse(value: Any) -> Any:
        if value is None or (_is_whole(value) and 1 <= value < 2**31):
            return value
        raise ValueError("a whole number of keys from 1 and below 2^31, or null")

    return Form(parse=parse)


def sizes() -> Form:
    """Rows of each group, or null."""

    def parse(value: Any) -> Any:
        listed = isinstance(value, list) and value and all(_is_whole(n) and n >= 0 for n in value)
        if value is None or listed:
            return value
        raise ValueError("a list of whole numbers of at least 0, one a group, or null")

    return Form(parse=parse)


def mask() -> Form:
    """A mask, causal unless given."""
    return Form(default={"causal": {"offset": 0}}, parse=masks.parse)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -sys.float_info.max <= value <= sys.float_info.max
