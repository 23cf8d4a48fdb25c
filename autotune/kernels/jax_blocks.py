"""Block rules of JAX's own attention kernels, and which of the legal blocks are searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.candidate import Config, Scalar
from autotune.kernels.attention import LANES
from autotune.kernels.base import Tunable

MOST_BLOCKS, LARGEST = 256, 8192
"""Blocks searched are at most this many a length and at most this long: a grid of smaller ones is
nothing but overhead, larger ones do not fit a core."""


def divisors(length: int, tile: int = LANES) -> tuple[int, ...]:
    """The divisors of `length` that are multiples of `tile`, ascending; `length` where none is."""
    found = tuple(d for d in range(tile, length + 1, tile) if length % d == 0)
    return found or (length,)


def searched(length: int, tile: int = LANES) -> tuple[int, ...]:
    """The dividing blocks that are worth a trial, ascending: all of them up to 8192 elements."""
    legal = divisors(length, tile)
    kept = tuple(d for d in legal if d <= LARGEST and length // d <= MOST_BLOCKS)
    return kept or (max((d for d in legal if d <= LARGEST), default=legal[0]),)


def tiles(length: int, most: int = 1024) -> tuple[int, ...]:
    """The dividing blocks that are worth a trial as one side of a tile of scores.

    A tile of 2048 x 2048 takes the compiler half a minute and spills; a side over 1024 is tried
    where the length leaves none from 512 on.
    """
    found = tuple(d for d in searched(length) if d <= most)
    if found and found[-1] >= min(512, length):
        return found
    return tuple(d for d in searched(length) if d <= 2 * most) or searched(length)[:1]


def middle(length: int, least: int, most: int) -> tuple[int, ...]:
    """The dividing blocks from `least` to `most`; where there are none, the largest below."""
    legal = divisors(length)
    below = max((d for d in legal if d <= most), default=legal[0])
    return tuple(d for d in legal if least <= d <= most) or (below,)


def why_not_dividing(name: str, block: Scalar, axis: str, length: int) -> str | None:
    """Why a block is illegal where it has to divide its axis, with both numbers; None if legal."""
    if (reason := why_no_size(name, block)) is not None:
        return reason
    if length % int(block or 1):
        return f"{name} {block} does not divide {axis} {length}"
    return None


def why_no_size(name: str, block: Scalar) -> str | None:
    """Why `block` is no size at all; None where it is."""
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        return f"{name} {block!r} is not a positive whole number"
    return None


def why_not_inside(name: str, block: Scalar, outer: str, size: int, tile: int) -> str | None:
    """Why a block inside another is illegal: no divisor of it, or no multiple of `tile`."""
    if (reason := why_no_size(name, block)) is not None:
        return reason
    if size % int(block or 1):
        return f"{name} {block} does not divide {outer} {size}"
    if int(block or 1) % tile:
        return f"{name} {block} is not a multiple of {tile}"
    return None


def clamped(config: Config, lengths: Mapping[str, int]) -> Config:
    """`config` with blocks over their axis cut to it; `lengths`: tunable -> length of its axis."""
    return {
        name: min(value, lengths[name])
        if name in lengths and isinstance(value, int) and not isinstance(value, bool)
        else value
        for name, value in config.items()
    }


def block(values: tuple[Scalar, ...], length: int, *, tile: int = 1, null: bool = False) -> Tunable:
    """A tunable block that divides `length` and is a multiple of `tile`; `null`: or null.

    A larger one is allowed: a `space:` may serve several lengths, and it is `clamped`.
    """
    allowed = f"a divisor of {length}" + (f" that is a multiple of {tile}" if tile > 1 else "")

    def check(value: Scalar) -> str | None:
        if value is None:
            return None if null else allowed
        if why_no_size("", value) is None and int(value) >= length:
            return None
        legal = why_not_dividing("", value, "", length) is None and int(value) % tile == 0
        return None if legal else allowed

    return Tunable(values=values, check=check)


def one_of(*names: Scalar, values: tuple[Scalar, ...] | None = None) -> Tunable:
    """A tunable out of a few; `values` are the ones searched, all of them unless given."""
    listed = ", ".join(map(str, names))
    check: Callable[[Scalar], str | None] = lambda value: (
        None
        if any(value is n or (type(value) is type(n) and value == n) for n in names)
        else f"one of {listed}"
    )
    return Tunable(values=names if values is None else values, check=check)
