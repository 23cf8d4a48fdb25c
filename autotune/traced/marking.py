"""Gives the unnamed parts of traced kernels names, which the compiler turns into markers.

Mosaic writes a marker wherever the name stack of two consecutive equations differs. A kernel
without `jax.named_scope`s is rewritten, before it is lowered, as if its author had named each part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.traced.jaxprs import inner_jaxprs, open_jaxpr
from autotune.traced.regions import (
    Region,
    author_scopes,
    holds_pipeline,
    own_names,
    regions,
    roles,
    words,
)

NAMED, MARKED, BOTH, PLAIN = "named", "marked", "named and marked", "none"
"""Who told a kernel's parts apart: its author, autotune, both; or it has no parts."""


@dataclass(slots=True)
class Marked:
    """A traced function whose kernels have names for their parts.

    Attributes:
      jaxpr: the closed jaxpr; the same object where nothing had to be named.
      how: id of a kernel's body -> `NAMED`, `MARKED`, `BOTH` or `PLAIN`.
    """

    jaxpr: Any
    how: dict[int, str] = field(default_factory=dict)


def mark(closed: Any) -> Marked:
    """Names the parts of every `pallas_call` of a traced function; nothing else changes."""
    marked = Marked(closed)
    done: dict[int, tuple[Any, Any]] = {}

    def program(jaxpr: Any) -> Any:
        return _rebuilt(jaxpr, equation, done)

    def equation(number: int, eqn: Any) -> Any:
        if eqn.primitive.name != "pallas_call":
            return _with_inner(eqn, program)
        body = eqn.params["jaxpr"]
        if id(body) not in done:
            new, how = _marked_body(body, eqn.params["grid_mapping"])
            marked.how[id(new)] = how
            done[id(body)] = (body, new)
        new = done[id(body)][1]
        return eqn if new is body else eqn.replace(params={**eqn.params, "jaxpr": new})

    marked.jaxpr = program(closed)
    return marked


def _marked_body(body: Any, grid_mapping: Any) -> tuple[Any, str]:
    if holds_pipeline(body):  # it names its own stages
        return body, NAMED
    authors = author_scopes(body)
    vmapped = grid_mapping.vmapped_dims
    grid = [extent for axis, extent in enumerate(grid_mapping.grid) if axis not in vmapped]
    found = regions(body, roles(body, grid_mapping), grid)
    names: dict[int, list[tuple[Region, str]]] = {}
    for region, word in zip(found, words(found, authors), strict=True):
        names.setdefault(id(region.jaxpr), []).append((region, word))
    how = {(True, True): BOTH, (True, False): NAMED, (False, True): MARKED}.get(
        (bool(authors), bool(found)), PLAIN
    )
    done: dict[int, tuple[Any, Any]] = {}

    def renamed(jaxpr: Any) -> Any:
        inner, _ = open_jaxpr(jaxpr)
        here = names.get(id(inner), ())

        def equation(number: int, eqn: Any) -> Any:
            word = next((w for r, w in here if r.start <= number < r.stop), None)
            stack = own_names(eqn) if word is None else (word,)
            return _with_stack(_with_inner(eqn, renamed), stack)

        return _rebuilt(jaxpr, equation, done)

    return renamed(body), how


def _rebuilt(
    jaxpr: Any, equation: Callable[[int, Any], Any], done: dict[int, tuple[Any, Any]]
) -> Any:
    """A jaxpr with every equation replaced; itself where none changes, and the same one again."""
    if id(jaxpr) not in done:
        inner, _ = open_jaxpr(jaxpr)
        eqns = [equation(n, eqn) for n, eqn in enumerate(inner.eqns)]
        new = jaxpr
        if any(a is not b for a, b in zip(eqns, inner.eqns, strict=True)):
            changed = inner.replace(eqns=eqns)
            new = changed if inner is jaxpr else jaxpr.replace(jaxpr=changed)
        done[id(jaxpr)] = (jaxpr, new)
    return done[id(jaxpr)][1]


def _with_inner(eqn: Any, new: Callable[[Any], Any]) -> Any:
    if not any(True for _ in inner_jaxprs(eqn)):
        return eqn
    params = {name: _value(value, new) for name, value in eqn.params.items()}
    changed = any(params[name] is not eqn.params[name] for name in params)
    return eqn.replace(params=params) if changed else eqn


def _value(value: Any, new: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        items = type(value)(_value(item, new) for item in value)
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return new(value) if hasattr(getattr(value, "jaxpr", value), "eqns") else value


def _with_stack(eqn: Any, names: tuple[str, ...]) -> Any:
    info = eqn.source_info
    if tuple(scope.name for scope in info.name_stack.stack) == names:
        return eqn
    stack = type(info.name_stack)()
    for name in names:
        stack = stack.extend(name)
    return eqn.replace(source_info=info.replace(name_stack=stack))
