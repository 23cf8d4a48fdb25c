"""How results of a kernel's matrix products come to be operands of its further products.

Attention multiplies q by k, makes probabilities of the scores and multiplies those by v. The tile
of scores is what fills the registers; the formula in between says how long it is kept there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.traced.block_moves import tile_bytes
from autotune.traced.jaxprs import called_jaxpr, open_jaxpr

LONGEST = 400
"""Characters of a formula; a longer one is no formula that anybody measured."""
_LAYOUT = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "expand_dims", "reshape", "slice", "squeeze"}
)
"""Operations that leave no trace in a formula: they move elements, or do not even that."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The result of one product: [rows, columns] of `size` bytes in VMEM, `depth` contracted.

    Of a batched product it is one member's: the compiler may work through the batch.
    """

    rows: int
    columns: int
    depth: int
    size: int


@dataclass(frozen=True, slots=True)
class Origin:
    """How a value depends on a tile: `whole`, by element; `reduced`, through a reduction."""

    tile: Tile
    whole: bool
    reduced: bool


@dataclass(frozen=True, slots=True)
class Use:
    """A product's operand that is made of tiles.

    Attributes:
      formula: the operand in the kernel's own operations: `dot` is a tile, `~` a reduction of the
        tiles it meets, `.` anything else; then `@`, the product, with the other
        operand's dtype on its side.
      tiles: those it holds element by element.
      reduced: whether a reduction of one of them goes into it.
      depth: how many of its elements the product contracts.
      width: the other operand's side of the product's result.
    """

    formula: str
    tiles: tuple[Tile, ...]
    reduced: bool
    depth: int
    width: int


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the kernel: its formula, and its origins by the product they are results of."""

    formula: str = "."
    origins: Mapping[int, Origin] = field(default_factory=dict)

    @property
    def whole(self) -> frozenset[int]:
        return frozenset(dot for dot, origin in self.origins.items() if origin.whole)


_OTHER = _Value()


def tile_uses(body: Any) -> list[Use]:
    """The operands of a kernel's products that earlier products' results go into."""
    uses: list[Use] = []
    jaxpr = open_jaxpr(body)[0]
    _walk(jaxpr, [_OTHER] * len(jaxpr.invars), uses)
    return uses


def _walk(jaxpr: Any, args: Sequence[_Value], uses: list[Use]) -> list[_Value]:
    env: dict[Any, _Value] = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> _Value:
        return _OTHER if hasattr(atom, "val") else env.get(atom, _OTHER)

    for eqn in jaxpr.eqns:
        sources = [read(atom) for atom in eqn.invars]
        results: Sequence[_Value] = [_OTHER for _ in eqn.outvars]
        name = eqn.primitive.name
        if name == "dot_general":
            uses.extend(_uses(eqn, sources))
            results = [_result(eqn)]
        elif name == "cond":
            for branch in eqn.params["branches"]:
                _walk(open_jaxpr(branch)[0], sources[1:], uses)
        elif name == "while":
            inner = open_jaxpr(eqn.params["body_jaxpr"])[0]
            _walk(inner, sources[eqn.params["cond_nconsts"] :], uses)
        elif (called := called_jaxpr(eqn)) is not None:
            inner = open_jaxpr(called)[0]
            known = sources if len(sources) == len(inner.invars) else [_OTHER for _ in inner.invars]
            found = _walk(inner, known, uses)
            results = found if name != "scan" and len(found) == len(results) else results
        elif len(eqn.outvars) == 1 and name != "get":
            results = [_through(eqn, sources)]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _result(eqn: Any) -> _Value:
    """The tile that a product makes, as a value of which nothing else is known."""
    result, (contracted, (batch, _)) = eqn.outvars[0].aval, eqn.params["dimension_numbers"]
    shape = result.shape[len(batch) :]
    left = eqn.invars[0].aval
    depth = math.prod(left.shape[axis] for axis in contracted[0])
    # A product of a vector and a matrix has one row.
    rows, columns = (1, 1, *shape)[-2:]
    tile = Tile(rows, columns, depth, tile_bytes(shape, int(result.dtype.itemsize) * 8))
    return _Value(f"dot[{_dtype(left)}{_precise(eqn)}]", {id(eqn): Origin(tile, True, False)})


def _uses(eqn: Any, sources: Sequence[_Value]) -> list[Use]:
    """The operands of a product that are made of tiles."""
    contracted, batch = eqn.params["dimension_numbers"]
    found = []
    for side, source in enumerate(sources[:2]):
        tiles = tuple(origin.tile for origin in source.origins.values() if origin.whole)
        if not tiles:
            continue
        own, other = eqn.invars[side].aval, eqn.invars[1 - side].aval
        used = (*contracted[1 - side], *batch[1 - side])
        parts = (source.formula, f"{_dtype(other)}{_precise(eqn)}")
        found.append(
            Use(
                formula=_short(" @ ".join(parts if side == 0 else parts[::-1])),
                tiles=tiles,
                reduced=any(o.whole and o.reduced for o in source.origins.values()),
                depth=math.prod(own.shape[axis] for axis in contracted[side]),
                width=math.prod(size for axis, size in enumerate(other.shape) if axis not in used),
            )
        )
    return found


def _dtype(aval: Any) -> str:
    """As a formula has it: `bf16`, `f32`, `int8`."""
    return str(aval.dtype).replace("bfloat", "bf").replace("float", "f")


def _precise(eqn: Any) -> str:
    """How a product's precision shows in a formula: not at all where it is the default."""
    names = {getattr(p, "name", "") for p in eqn.params.get("precision") or () if p is not None}
    return "".join(f" {name.lower()}" for name in sorted(names - {"", "DEFAULT"}))


def _through(eqn: Any, sources: Sequence[_Value]) -> _Value:
    """An operation's result: a reduction leaves a summary, the rest keeps elements."""
    name = eqn.primitive.name
    reduces = name.startswith(("reduce_", "arg", "cum"))
    merged: dict[int, Origin] = {}
    for source in sources:
        for dot, origin in source.origins.items():
            old = merged.get(dot, Origin(origin.tile, False, False))
            merged[dot] = Origin(
                origin.tile,
                whole=old.whole or (origin.whole and not reduces),
                reduced=old.reduced or origin.reduced or reduces,
            )
    value = _Value(origins=merged)
    return _Value(_formula(eqn, sources, value.whole), merged) if merged else _OTHER


def _formula(eqn: Any, sources: Sequence[_Value], whole: frozenset[int]) -> str:
    def shown(source: _Value) -> str:
        if source.whole:
            return source.formula
        return "~" if whole & source.origins.keys() else "."

    name = eqn.primitive.name
    if not whole:
        return "."
    if name in _LAYOUT:
        return next(shown(source) for source in sources if source.whole)
    if name == "convert_element_type":
        name = _dtype(eqn.outvars[0].aval)
    return _short(f"{name}({','.join(map(shown, sources))})")


def _short(formula: str) -> str:
    """`formula`, or what is left of one too long to have been measured."""
    return formula if len(formula) <= LONGEST and "…" not in formula else "…"
