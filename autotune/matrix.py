"""`matrix:` of a problem: the product of its lists, each point with a readable suffix.

A key is an axis, an option or `dtype` (`shape.x` or `options.x` where a kernel has both); keys
joined by `+` vary together: `q_len+kv_len: [1024, 2048]` gives both the same value,
`q_heads+kv_heads: [[32, 8], [32, 4]]` one each.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError, UnknownNameError, shown
from autotune.strict_yaml import Keys, dotted

if TYPE_CHECKING:
    from autotune.kernels.base import Kernel

MAX_POINTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of a problem's matrix.

    Attributes:
      values: where in the problem (`("shape", "m")`) -> value.
      origins: the same -> where in the matrix it was written (`("matrix", "m", 1)`).
      suffix: `m=512 causal=true`; empty without a matrix.
    """

    values: Mapping[Keys, Any]
    origins: Mapping[Keys, Keys]
    suffix: str


def points(
    matrix: Mapping[str, Sequence[Any]], kernel: Kernel, given: Container[Keys]
) -> Iterator[Point]:
    """The points in the order written, the last key fastest; one empty point for no matrix.

    `given` are the places the problem sets by itself. Raises InputError, before any point is
    made, for a key that is none or is given already, an empty list, joined values that do not
    match their keys, and a product above `MAX_POINTS`.
    """
    count = math.prod(len(values) for values in matrix.values())
    if count > MAX_POINTS:
        raise InputError(f"{count} combinations; at most {MAX_POINTS}", path=("matrix",))
    axes: list[list[Point]] = []
    taken: set[Keys] = set()
    for key, values in matrix.items():
        targets = [_target(kernel, key, part.strip()) for part in key.split("+")]
        for target in targets:
            if target in taken or target in given:
                raise InputError(f"{dotted(target)} is given twice", path=("matrix", key))
            taken.add(target)
        if not values:
            raise InputError(
                "[] is not allowed; a list of at least one value", path=("matrix", key)
            )
        axes.append([_axis_point(key, targets, values, i) for i in range(len(values))])
    return (_joined(parts) for parts in itertools.product(*axes))


def _target(kernel: Kernel, key: str, part: str) -> Keys:
    """Where in the problem a matrix key points to."""
    places: dict[str, Keys] = {"dtype": ("dtype",)}
    for section, names in (("shape", kernel.axes), ("options", kernel.options)):
        places |= {f"{section}.{name}": (section, name) for name in names}
    if part in places:
        return places[part]
    dotless = [place for place in places.values() if place[-1] == part]
    if len(dotless) > 1:
        both = " or ".join(dotted(place) for place in dotless)
        raise InputError(f"{part} is ambiguous; write {both}", path=("matrix", key))
    if not dotless:
        known = {str(place[-1]) for place in places.values()}
        raise UnknownNameError(f"matrix key of {kernel.name}", part, known, path=("matrix", key))
    return dotless[0]


def _axis_point(key: str, targets: Sequence[Keys], values: Sequence[Any], i: int) -> Point:
    value = values[i]
    parts = value if len(targets) > 1 and isinstance(value, list) else [value] * len(targets)
    if len(parts) != len(targets):
        raise InputError(
            f"{shown(value)} is not allowed; one value, or a list of {len(targets)}",
            path=("matrix", key, i),
        )
    texts = (
        f"{name.strip()}={_text(part, i)}" for name, part in zip(key.split("+"), parts, strict=True)
    )
    return Point(
        values=dict(zip(targets, parts, strict=True)),
        origins=dict.fromkeys(targets, ("matrix", key, i)),
        suffix=" ".join(texts),
    )


def _text(value: Any, i: int) -> str:
    """A value inside a name: JSON without quotes and spaces; its position where that is long."""
    text = json.dumps(value, ensure_ascii=False).replace('"', "").replace(" ", "")
    return text if len(text) <= 40 else f"#{i}"


def _joined(parts: Sequence[Point]) -> Point:
    return Point(
        values={target: value for part in parts for target, value in part.values.items()},
        origins={target: place for part in parts for target, place in part.origins.items()},
        suffix=" ".join(part.suffix for part in parts),
    )
