"""Options of kernels: what values they take. No jax import: lookups check them too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.kernels import masks


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a kernel: its default, and a check that says what is allowed.

    `parse` returns the normalised JSON value or raises ValueError(what is allowed).
    """

    default: Any = None
    parse: Callable[[Any], Any] = lambda value: value


def flag(default: bool = False) -> Option:
    """An option that is true or false."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value

    return Option(default=default, parse=parse)


def choice(default: str | None, *names: str) -> Option:
    """An option that is one of `names`, or null where `default` is None."""

    def parse(value: Any) -> str | None:
        if value in names or (value is None and default is None):
            return value  # type: ignore[no-any-return]
        raise ValueError("one of " + ", ".join(names))

    return Option(default=default, parse=parse)


def number(*, positive: bool) -> Option:
    """An option that is a finite number, or null for off.

    `positive`: zero is off, less is an error.
    """

    def parse(value: Any) -> float | None:
        if value is None:
            return None
        if not _is_finite(value):
            raise ValueError("a finite number, or null")
        if positive and value < 0:
            raise ValueError("a positive number, or 0 or null for off")
        return None if positive and value == 0 else float(value)

    return Option(parse=parse)


def factor() -> Option:
    """An option that is multiplied by, such as JAX's `sm_scale`: above 0, and 1 unless given."""

    def parse(value: Any) -> float:
        if not _is_finite(value) or not 0 < value < 1e30:
            raise ValueError("a finite number above 0")
        return float(value)

    return Option(default=1.0, parse=parse)


def key_count() -> Option:
    """An option that is a count of keys, or null."""

    def parse(value: Any) -> int | None:
        if value is None or (_is_whole(value) and 1 <= value < 2**31):
            return value  # type: ignore[no-any-return]
        raise ValueError("a whole number of keys from 1 and below 2^31, or null")

    return Option(parse=parse)


def row_counts() -> Option:
    """An option that lists the rows of each group, or null."""

    def parse(value: Any) -> list[int] | None:
        if value is None:
            return None
        whole = isinstance(value, list | tuple) and all(_is_whole(n) and n >= 0 for n in value)
        if not whole or not value:
            raise ValueError("a list of whole numbers of at least 0, one a group, or null")
        return list(value)

    return Option(parse=parse)


def attention_mask() -> Option:
    """An option that is a mask (`masks.parse`), causal unless given."""
    return Option(default={"causal": {"offset": 0}}, parse=masks.parse)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -sys.float_info.max <= value <= sys.float_info.max
