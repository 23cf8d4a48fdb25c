"""The scalar part of a traced kernel, interpreted once for the whole grid with NumPy.

A scalar of the kernel is an array here, of the grid's rank and of extent 1 along every axis it
does not depend on, so that a value of one axis costs that axis and not the grid. What only a run
can know is `UNKNOWN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autotune.traced.counts import Counts, Weight, add
from autotune.traced.hand_copies import hbm_bytes
from autotune.traced.jaxprs import (
    called_jaxpr,
    counted,
    dot_flops,
    open_jaxpr,
)
from autotune.traced.loops import kept, turns_matter
from autotune.traced.scalar_ops import ELEMENTWISE, vanishes
from autotune.traced.values import UNKNOWN, Cells, Table, Value, cell_of, merge

__all__ = ["UNKNOWN", "Cells", "ScalarCode", "Table", "Value"]

MAX_TURNS = 10_000
"""Turns of loops that are followed in all; beyond them what a loop does counts as unknown."""


@dataclass(frozen=True, slots=True)
class _Where:
    """Where in the program the interpreter is.

    `weight`: executions per grid step; `copies`: times this text stands in the program, 0 when a
    loop comes by again; `stack`: named scopes around it; `sure`: no unknown predicate above it;
    `level`: rolled loops between here and the innermost of those scopes.
    """

    weight: Weight
    copies: int
    stack: tuple[str, ...]
    sure: bool
    level: int = 0

    def times(
        self, factor: Weight, *, copies: int = 1, sure: bool = True, deeper: bool = False
    ) -> _Where:
        return _Where(
            self.weight * factor, self.copies * copies, self.stack, self.sure and sure,
            self.level + deeper,
        )  # fmt: skip


@dataclass(slots=True)
class ScalarCode:
    """Runs jaxprs for all grid steps at once.

    Attributes:
      grid: grid extents.
      program_axes: the grid axes `program_id` counts (all but those that `vmap` added).
      counts: filled while `run` meets scopes and dots.
      turns: turns of loops followed so far.
      written: `id` of each `Table` that the code writes.
    """

    grid: tuple[int, ...]
    program_axes: tuple[int, ...]
    counts: Counts = field(default_factory=Counts)
    turns: int = 0
    written: set[int] = field(default_factory=set)

    def axis(self, n: int) -> np.ndarray:
        """int32 positions along grid axis `n`, of the grid's rank."""
        shape = [1] * len(self.grid)
        shape[n] = self.grid[n]
        return np.arange(self.grid[n], dtype=np.int32).reshape(shape)

    def scalar(self, value: Any, dtype: Any = None) -> np.ndarray:
        """A scalar that is the same at every step."""
        return np.asarray(value, dtype=dtype).reshape((1,) * len(self.grid))

    def run(self, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        """Values of the jaxpr's results over the grid; counts what it meets on the way."""
        with np.errstate(all="ignore"):
            return self._run(jaxpr, args, _Where(1, 1, (), True))

    def _run(
        self,
        jaxpr: Any,
        args: Sequence[Value],
        where: _Where,
        known: dict[Any, Value] | None = None,
    ) -> list[Value]:
        jaxpr, consts = open_jaxpr(jaxpr)
        env: dict[Any, Value] = dict(known or {})
        for var, const in zip(jaxpr.constvars, consts if known is None else (), strict=False):
            env[var] = self.scalar(const) if np.ndim(const) == 0 else UNKNOWN
        env.update(zip(jaxpr.invars, args, strict=True))
        stack = where.stack
        for eqn in jaxpr.eqns:
            inner = self._enter(eqn, stack, where)
            stack = inner.stack
            results = self._equation(eqn, env, inner)
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._read(env, var) for var in jaxpr.outvars]

    def _read(self, env: dict[Any, Value], atom: Any) -> Value:
        if hasattr(atom, "val"):
            if np.ndim(atom.val):
                return UNKNOWN
            return self.scalar(atom.val, atom.aval.dtype)
        return env.get(atom, UNKNOWN)

    def _enter(self, eqn: Any, stack: tuple[str, ...], where: _Where) -> _Where:
        """Counts the scopes that begin at `eqn`, as the TPU lowering places its markers."""
        own = tuple(scope.name for scope in eqn.source_info.name_stack.stack)
        new = where.stack + own
        if new != stack:
            same = 0
            while same < min(len(new), len(stack)) and new[same] == stack[same]:
                same += 1
            for name in new[same:]:
                self.counts.enter(name, where.weight, where.copies, where.sure)
        return _Where(where.weight, where.copies, new, where.sure, 0 if own else where.level)

    def _equation(self, eqn: Any, env: dict[Any, Value], where: _Where) -> Sequence[Value]:
        name = eqn.primitive.name
        special = _SPECIAL.get(name)
        unknown = [UNKNOWN] * len(eqn.outvars)
        if special is not None:
            values = [self._read(env, atom) for atom in eqn.invars]
            return special(self, eqn, values, where)
        inner = called_jaxpr(eqn)
        if inner is not None:
            values = [self._read(env, atom) for atom in eqn.invars]
            return self._call(eqn, inner, values, where)
        if len(unknown) != 1 or getattr(eqn.outvars[0].aval, "shape", None) != ():
            return unknown
        values = [self._read(env, atom) for atom in eqn.invars]
        if not values or any(not isinstance(value, np.ndarray) for value in values):
            return unknown
        return [self._scalar_op(eqn, name, values)]

    def _scalar_op(self, eqn: Any, name: str, values: list[np.ndarray]) -> Value:
        function = ELEMENTWISE.get(name)
        if vanishes(eqn, name, values):
            return self.scalar(0, eqn.outvars[0].aval.dtype)
        if function is not None:
            return np.asarray(function(*values))
        if name == "convert_element_type":
            return values[0].astype(eqn.params["new_dtype"])
        if name == "integer_pow":
            return np.asarray(values[0] ** eqn.params["y"])
        if name in ("broadcast_in_dim", "reshape", "squeeze"):
            return values[0]
        return self._bind(eqn, values)

    def _bind(self, eqn: Any, values: list[np.ndarray]) -> Value:
        """Any other primitive, by JAX itself, elementwise over the steps that differ."""
        arrays = np.broadcast_arrays(*values)
        bound: Any = jax.vmap(lambda *args: eqn.primitive.bind(*args, **eqn.params))
        try:
            result = np.asarray(bound(*(array.reshape(-1) for array in arrays)))
        except (TypeError, ValueError, NotImplementedError):
            return UNKNOWN  # a primitive of kernels only
        return result.reshape(arrays[0].shape)

    def _call(self, eqn: Any, inner: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        jaxpr = open_jaxpr(inner)[0]
        if len(jaxpr.invars) == len(values):
            results = self._run(inner, values, where)
        else:  # run_scoped: operands are its constants, its arguments the Refs it makes
            own = [UNKNOWN] * len(jaxpr.invars)
            results = self._run(inner, own, where, dict(zip(jaxpr.constvars, values, strict=False)))
        return results if len(results) == len(eqn.outvars) else [UNKNOWN] * len(eqn.outvars)

    def _cond(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        which, *args = values
        branches = eqn.params["branches"]
        totals = self.counts.branches.setdefault(id(eqn), [0] * len(branches))
        if not isinstance(which, np.ndarray) or not where.sure:
            totals[:] = [None] * len(branches)
        if not isinstance(which, np.ndarray):
            for branch in branches:
                self._run(branch, args, where.times(1, sure=False))
            return [UNKNOWN] * len(eqn.outvars)
        index = np.clip(which.astype(np.int64), 0, len(branches) - 1)
        taken = [index == n for n in range(len(branches))]
        for n, mask in enumerate(taken):
            total = totals[n]
            totals[n] = None if total is None else total + where.weight * mask.astype(np.int64)
        results = [
            self._run(branch, args, where.times(mask.astype(np.int64)))
            for branch, mask in zip(branches, taken, strict=True)
        ]
        return [
            merge(index, [values for values, mask in zip(cases, taken, strict=True) if mask.any()],
                   [n for n, mask in enumerate(taken) if mask.any()])
            for cases in zip(*results, strict=True)
        ]  # fmt: skip

    def _scan(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        body, length = eqn.params["jaxpr"], int(eqn.params["length"])
        unroll = min(max(int(eqn.params.get("unroll", 1)), 1), max(length, 1))
        carried = len(open_jaxpr(body)[0].outvars)  # in a kernel scans have no xs and no ys
        split = len(values) - carried
        consts, carry = values[:split], values[split:]
        rolled = unroll < length
        if rolled:
            self._loop(where, length // unroll)
        if self.turns + length > MAX_TURNS or not turns_matter(body, split, carry):
            same = kept(body, split, carry)
            inside = where.times(length, copies=unroll, deeper=rolled)
            self._run(body, [*consts, *same], inside)
            return same
        self.turns += length
        for n in range(length):
            inside = where.times(1, copies=0 if n else unroll, deeper=rolled)
            carry = self._run(body, [*consts, *carry], inside)
        return carry

    def _while(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, values = values[:n_cond], values[n_cond:]
        consts, carry = values[:n_body], values[n_body:]
        counter = None if turns_matter(body, n_body, carry) else counted(cond, body, n_body)
        if counter is not None and all(isinstance(carry[n], np.ndarray) for n in counter):
            first, last = (carry[n].astype(np.int64) for n in counter)
            trips = np.maximum(last - first, 0)
            self._loop(where, trips)
            same = kept(body, n_body, carry)
            self._run(body, [*consts, *same], where.times(trips, deeper=True))
            return same
        return self._follow(cond, body, cond_consts, consts, carry, where)

    def _follow(
        self, cond: Any, body: Any, cond_consts: Sequence[Value], consts: Sequence[Value],
        carry: list[Value], where: _Where,
    ) -> Sequence[Value]:  # fmt: skip
        """A while loop iteration by iteration, each grid step leaving when its own test fails."""
        going: Any = np.ones((1,) * len(self.grid), np.int64)
        outside = _Where(0, 0, where.stack, True)
        for n in range(MAX_TURNS - self.turns):
            self.turns += 1
            (test,) = self._run(cond, [*cond_consts, *carry], outside)
            if not isinstance(test, np.ndarray):
                break
            going = going * test.astype(np.int64)
            if not going.any():
                return carry
            inside = where.times(going, copies=0 if n else 1, deeper=True)
            self._loop(where.times(1, copies=0 if n else 1), going)
            new = self._run(body, [*consts, *carry], inside)
            carry = [
                merge(going, [old, value], [0, 1]) for old, value in zip(carry, new, strict=True)
            ]
        unknown = [UNKNOWN] * len(carry)
        self._loop(where, 1)
        self._run(body, [*consts, *unknown], where.times(1, sure=False, deeper=True))
        return unknown

    def _loop(self, where: _Where, trips: Weight) -> None:
        scope = where.stack[-1] if where.stack else ""
        self.counts.loop(scope, where.level, where.weight * trips, where.copies)

    def _program_id(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        return [self.axis(self.program_axes[eqn.params["axis"]])]

    def _num_programs(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        return [self.scalar(self.grid[self.program_axes[eqn.params["axis"]]], np.int32)]

    def _get(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        table, *leaves = values
        if isinstance(table, Cells):
            cell = cell_of(eqn, leaves)
            return [UNKNOWN if cell is None else table.values[cell]]
        if not isinstance(table, Table) or eqn.outvars[0].aval.shape != ():
            return [UNKNOWN]
        transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
        indices = getattr(transforms[0], "indices", None) if len(transforms) == 1 else None
        if indices is None or len(indices) != table.values.ndim:
            return [UNKNOWN]
        if any(not isinstance(index, np.ndarray | int) for index in indices):
            return [UNKNOWN]
        inside = [
            np.clip(np.asarray(index), 0, size - 1)  # inactive steps may point anywhere
            for index, size in zip(indices, table.values.shape, strict=True)
        ]
        found = np.asarray(table.values[tuple(inside)])
        return [found if found.ndim == len(self.grid) else self.scalar(found)]

    def _write(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        """A write to a table's cell, where this step comes by; what it held before."""
        cells, new, *leaves = values
        if isinstance(cells, Table):
            self.written.add(id(cells))
        if not isinstance(cells, Cells):
            return [UNKNOWN] * len(eqn.outvars)
        cell = cell_of(eqn, leaves) if eqn.primitive.name == "swap" else None
        if cell is None:
            cells.values[:] = [UNKNOWN] * len(cells.values)
            return [UNKNOWN] * len(eqn.outvars)
        old = cells.values[cell]
        taken = np.asarray(where.weight).reshape(np.shape(where.weight) or (1,) * len(self.grid))
        known = isinstance(new, np.ndarray) and isinstance(old, np.ndarray) and where.sure
        if isinstance(new, np.ndarray) and where.sure and (taken > 0).all():
            cells.values[cell] = new
        else:
            cells.values[cell] = np.where(taken > 0, new, old) if known else UNKNOWN
        return [old]

    def _copy(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        if (size := hbm_bytes(eqn, values)) is not None:
            self.counts.hand_bytes = self.counts.hand_bytes + where.weight * size
            self.counts.hand_copies = self.counts.hand_copies + where.weight
        return [UNKNOWN] * len(eqn.outvars)

    def _dot(self, eqn: Any, values: list[Value], where: _Where) -> Sequence[Value]:
        scope = where.stack[-1] if where.stack else ""
        add(self.counts.flops, scope, where.weight * dot_flops(eqn))
        return [UNKNOWN]


_SPECIAL: dict[str, Callable[[ScalarCode, Any, list[Value], _Where], Sequence[Value]]] = {
    "program_id": ScalarCode._program_id,
    "num_programs": ScalarCode._num_programs,
    "get": ScalarCode._get,
    "swap": ScalarCode._write,
    "addupdate": ScalarCode._write,
    "dma_start": ScalarCode._copy,
    "cond": ScalarCode._cond,
    "scan": ScalarCode._scan,
    "while": ScalarCode._while,
    "dot_general": ScalarCode._dot,
}
