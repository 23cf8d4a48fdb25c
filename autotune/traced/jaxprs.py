"""Shapes of traced code: what an equation calls, which loops count, what a dot costs.

No jax import: equations are only looked at. Both supported JAX versions differ here only in that
the newer has no closed jaxpr apart from the open one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The equations' jaxpr and its constants, of a closed or an open jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def called_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr an equation calls once with its own operands (jit, custom_vjp, closed_call …)."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None and hasattr(open_jaxpr(inner)[0], "eqns"):
            return inner
    return None


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Every jaxpr an equation holds."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def call_names(jaxpr: Any) -> Iterator[str]:
    """`name=` of every `pallas_call`, else its function's, in the order of the trace."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name
            continue
        for inner in inner_jaxprs(eqn):
            yield from call_names(inner)


def has_branches(jaxpr: Any) -> bool:
    """Whether a loop body's work can differ from iteration to iteration."""
    return any(
        eqn.primitive.name in ("cond", "while") or any(map(has_branches, inner_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def counted(cond: Any, body: Any, n_body: int) -> tuple[int, int] | None:
    """Carry positions (counter, bound) of `while counter < bound: …; counter += 1`, else None."""
    test, step = open_jaxpr(cond)[0], open_jaxpr(body)[0]
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return None
    start = len(test.invars) - (len(step.invars) - n_body)
    positions = {var: n - start for n, var in enumerate(test.invars) if n >= start}
    try:
        counter, bound = (positions[atom] for atom in test.eqns[0].invars)
    except (KeyError, TypeError):  # a literal, or a constant of the loop
        return None
    by_one = adds_one(step, step.invars[n_body + counter], step.outvars[counter])
    keeps_bound = step.outvars[bound] is step.invars[n_body + bound]
    return (counter, bound) if by_one and keeps_bound else None


def adds_one(jaxpr: Any, old: Any, new: Any) -> bool:
    """Whether the jaxpr computes `new` as `old` + 1, as a loop counter."""
    makers = [eqn for eqn in jaxpr.eqns if new in eqn.outvars]
    if len(makers) != 1 or makers[0].primitive.name != "add":
        return False
    left, right = makers[0].invars
    return left is old and bool(np.all(getattr(right, "val", 0) == 1))


def dot_flops(eqn: Any) -> int:
    """2 · batch · m · n · k of a `dot_general`."""
    left, right = (atom.aval.shape for atom in eqn.invars[:2])
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    own = [size for n, size in enumerate(right) if n not in (*contracted, *batch)]
    return 2 * int(math.prod(left)) * int(math.prod(own))
