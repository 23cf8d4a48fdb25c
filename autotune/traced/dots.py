"""The matrix products that stand in a kernel's text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from autotune.call_record import Dot
from autotune.traced.jaxprs import inner_jaxprs, open_jaxpr

# Products of one f32 product (jax.lax.Precision: HIGHEST is bf16_6x, HIGH is bf16_3x); a default
# one is a single bf16 pass. The schedules agree: 6.0 times the rows for HIGHEST, 1.0 for default.
_F32_PASSES = {"HIGHEST": 6, "HIGH": 3}
# What hands on a block as it was loaded; a widened or scaled operand is a value of its own.
_LOADS = ("get", "masked_load", "load")


def dots(body: Any) -> tuple[Dot, ...]:
    """Every distinct `dot_general` of a kernel's jaxpr, with how often it stands there."""
    found = Counter(_walk(open_jaxpr(body)[0]))
    return tuple(
        Dot(m=m, k=k, n=n, dtype=dtype, bits=bits, passes=passes, loaded=loaded, count=count)
        for (m, k, n, dtype, bits, passes, loaded), count in sorted(found.items())
    )


def _walk(jaxpr: Any) -> Iterator[tuple[int, int, int, str, int, int, bool]]:
    made_by: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield _key(eqn, made_by)
        made_by.update(dict.fromkeys(eqn.outvars, eqn.primitive.name))
        for inner in inner_jaxprs(eqn):
            yield from _walk(open_jaxpr(inner)[0])


def _key(eqn: Any, made_by: dict[Any, str]) -> tuple[int, int, int, str, int, int, bool]:
    left, right = (atom.aval for atom in eqn.invars[:2])
    (contracted, contracted_right), (_, batch_right) = eqn.params["dimension_numbers"]
    k = math.prod(left.shape[axis] for axis in contracted)
    m = math.prod(left.shape) // max(1, k)  # a batch is that many more rows
    own = (n for axis, n in enumerate(right.shape) if axis not in (*contracted_right, *batch_right))
    wider = max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    precision = eqn.params.get("precision") or ()
    names = {getattr(p, "name", "") for p in precision if p is not None}
    passes = max([_F32_PASSES.get(n, 1) for n in names if str(wider) == "float32"], default=1)
    left_atom = eqn.invars[0]
    loaded = not hasattr(left_atom, "val") and made_by.get(left_atom) in _LOADS
    bits = int(left.dtype.itemsize) * 8
    return (m, k, int(math.prod(own)), str(wider), bits, passes, loaded)
