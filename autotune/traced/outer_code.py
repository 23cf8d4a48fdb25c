"""What surrounds the `pallas_call`s of a traced function: finds them, and works out their operands.

Values are computed on demand and only for what a call's grid or index maps need, so a program may
hold arrays of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autotune.traced.jaxprs import called_jaxpr, inner_jaxprs, open_jaxpr
from autotune.traced.scalar_code import UNKNOWN

MAX_KNOWN_BYTES = 256 * 2**20
"""Larger arrays are not worked out: no scalar memory of a chip could hold them."""

Operand = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A `pallas_call` equation.

    Attributes:
      eqn: the equation.
      operands: per operand, a function giving its value (an array) or UNKNOWN.
      repeats: times one run of the program calls it (a scan's length; 1 where that is unknown).
    """

    eqn: Any
    operands: tuple[Operand, ...]
    repeats: int


@dataclass(slots=True)
class _Frame:
    """One jaxpr of the program, with functions that give its arguments."""

    jaxpr: Any
    consts: Sequence[Any]
    args: Sequence[Operand]
    known: dict[Any, Any] = field(default_factory=dict)
    makers: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known.update(zip(self.jaxpr.constvars, self.consts, strict=False))
        for eqn in self.jaxpr.eqns:
            for var in eqn.outvars:
                self.makers[var] = eqn

    def operand(self, atom: Any) -> Operand:
        return lambda: self.value(atom)

    def value(self, atom: Any) -> Any:
        """The value of a variable or literal, UNKNOWN where it depends on run-time data."""
        if hasattr(atom, "val"):
            return atom.val
        if atom not in self.known:
            if atom in self.makers:
                self._make(self.makers[atom])
            else:
                place = next((n for n, var in enumerate(self.jaxpr.invars) if var is atom), None)
                self.known[atom] = UNKNOWN if place is None else self.args[place]()
        return self.known[atom]

    def _make(self, eqn: Any) -> None:
        self.known.update(zip(eqn.outvars, self._results(eqn), strict=True))

    def _results(self, eqn: Any) -> Sequence[Any]:
        unknown = [UNKNOWN] * len(eqn.outvars)
        if eqn.primitive.name == "pallas_call" or sum(map(_bytes, eqn.outvars)) > MAX_KNOWN_BYTES:
            return unknown
        inner = called_jaxpr(eqn)
        if inner is not None and eqn.primitive.name != "scan":
            frame = self.inside(eqn, inner)
            values = [frame.value(var) for var in frame.jaxpr.outvars]
            return values if len(values) == len(unknown) else unknown
        values = [self.value(atom) for atom in eqn.invars]
        if any(value is UNKNOWN for value in values):
            return unknown
        results = eqn.primitive.bind(*values, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]

    def inside(self, eqn: Any, inner: Any, offset: int | None = 0) -> _Frame:
        """The frame of a jaxpr that `eqn` holds; its arguments are `eqn`'s from `offset` on.

        An argument whose shape differs (a scan's slice, a shard) is unknown.
        """
        jaxpr, consts = open_jaxpr(inner)
        outer = [] if offset is None else eqn.invars[offset:]
        if len(outer) != len(jaxpr.invars):
            return _Frame(jaxpr, consts, [_unknown] * len(jaxpr.invars))
        same = [
            getattr(atom.aval, "shape", None) == getattr(var.aval, "shape", ())
            for atom, var in zip(outer, jaxpr.invars, strict=True)
        ]
        args = [
            self.operand(atom) if fits else _unknown for atom, fits in zip(outer, same, strict=True)
        ]
        return _Frame(jaxpr, consts, args)


def find_calls(closed: Any) -> list[FoundCall]:
    """Every `pallas_call` of a traced function, in program order.

    A call in a loop is listed once, with its repeats. Of a branch whose predicate is known only
    the taken side counts, else both do.
    """
    jaxpr, consts = open_jaxpr(closed)
    return list(_calls(_Frame(jaxpr, consts, [_unknown] * len(jaxpr.invars)), 1))


def _calls(frame: _Frame, repeats: int) -> Iterator[FoundCall]:
    for eqn in frame.jaxpr.eqns:
        name = eqn.primitive.name
        if name == "pallas_call":
            yield FoundCall(eqn, tuple(frame.operand(atom) for atom in eqn.invars), repeats)
        elif name == "cond":
            which = frame.value(eqn.invars[0])
            branches = eqn.params["branches"]
            taken = branches if which is UNKNOWN else [branches[int(which)]]
            for branch in taken:
                yield from _calls(frame.inside(eqn, branch, 1), repeats)
        elif name == "scan":
            inner = _loop_frame(frame, eqn)
            yield from _calls(inner, repeats * int(eqn.params["length"]))
        elif (called := called_jaxpr(eqn)) is not None:
            yield from _calls(frame.inside(eqn, called), repeats)
        else:
            for other in inner_jaxprs(eqn):
                yield from _calls(frame.inside(eqn, other, None), repeats)


def _loop_frame(frame: _Frame, eqn: Any) -> _Frame:
    """A scan's body: constants are known, carries and slices change from turn to turn."""
    body = frame.inside(eqn, eqn.params["jaxpr"])
    consts = eqn.params.get("num_consts")
    if consts is None:  # newer JAX groups the operands in a tree
        consts = len(eqn.params["ft_in"].unpack()[0])
    body.args = [arg if n < consts else _unknown for n, arg in enumerate(body.args)]
    return body


def _unknown() -> Any:
    return UNKNOWN


def _bytes(var: Any) -> int:
    aval = var.aval
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return int(math.prod(aval.shape)) * int(aval.dtype.itemsize)


def as_array(value: Any) -> np.ndarray | None:
    """A known operand as a NumPy array; None for UNKNOWN."""
    if value is UNKNOWN:
        return None
    return np.asarray(jax.device_get(value))
