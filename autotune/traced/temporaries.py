"""VMEM that a kernel's values need beyond windows and scratch: a measured lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.traced.block_moves import tile_bytes
from autotune.traced.jaxprs import called_jaxpr, open_jaxpr

REGISTERS_BYTES = 64 * 8 * 128 * 4
"""The vector registers of a TensorCore: 64 of 8 × 128 words."""
STREAMED_DEPTH = 512
"""A contraction below this goes through the matrix unit in one pass, and nothing is kept."""

HELD_WHOLE = (2**20, 8 * 2**20)
"""Sizes of a held tile, measured, of which next to nothing stays in registers."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """How a value depends on one dot's result of `size` bytes in VMEM.

    `whole`: element by element; `reduced`: through a reduction over it.
    """

    dot: int
    size: int
    whole: bool
    reduced: bool


_Origins = dict[int, _Origin]


def temporaries_bytes(body: Any) -> int:
    """VMEM the compiler cannot avoid for the largest dot result that feeds another dot.

    The rule, for a result of T bytes (attention's score tile):

    * its own reduction goes back into it before the second dot (online softmax), or another
      whole dot result meets it (dS = P · (dP - di) of a backward pass): 0.7 T from 1 MiB (of 8 at
      most), else T / 2 less the registers;
    * it only streams through (a constant in place of the maximum) and the second dot contracts at
      least 512 of it: T / 2 less three times the registers;
    * anything else (a matmul adding into its accumulator, a sum of exponentials): nothing.

    Measured on 57 compiled kernels of JAX and of this package and on 40 bare ones, T of 0.25 to 8
    MiB, on v5e, v6e and tpu7x, jax 0.10.2, some on 0.12.0.1. From 1 MiB online softmax spills 0.78
    (tpu7x), 0.92 (v6e), 0.94 T (v5e) and more, a backward step 0.84 T and more; below, 0.08 MiB of
    a tile of 0.25; 0.74 T of one of 16 MiB. The streaming form spills nothing up to 1 MiB or where
    128 or 256 are contracted, and 0.23 - 0.95 T otherwise. A matmul's accumulation needed 0 - 2 T,
    by no rule that could be trusted. `tests/test_allocations.py` repeats it in small. Of a batched
    dot T is one member's: the compiler may work through the batch.
    """
    sizes = [0]
    _walk(open_jaxpr(body)[0], [{} for _ in open_jaxpr(body)[0].invars], sizes)
    return max(sizes)


def _walk(jaxpr: Any, args: Sequence[_Origins], sizes: list[int]) -> list[_Origins]:
    env: dict[Any, _Origins] = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> _Origins:
        return {} if hasattr(atom, "val") else env.get(atom, {})

    for eqn in jaxpr.eqns:
        sources = [read(atom) for atom in eqn.invars]
        results: Sequence[_Origins] = [{} for _ in eqn.outvars]
        name = eqn.primitive.name
        if name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0]
            for atom, source, axes in zip(eqn.invars, sources, contracted, strict=True):
                depth = math.prod(atom.aval.shape[axis] for axis in axes)
                sizes.append(_needed(source, depth))
            result = eqn.outvars[0].aval
            batch = len(eqn.params["dimension_numbers"][1][0])
            size = tile_bytes(result.shape[batch:], int(result.dtype.itemsize) * 8)
            results = [{id(eqn): _Origin(id(eqn), size, True, False)}]
        elif name == "cond":
            for branch in eqn.params["branches"]:
                _walk(open_jaxpr(branch)[0], sources[1:], sizes)
        elif name == "while":
            inner = open_jaxpr(eqn.params["body_jaxpr"])[0]
            _walk(inner, sources[eqn.params["cond_nconsts"] :], sizes)
        elif (called := called_jaxpr(eqn)) is not None:
            inner = open_jaxpr(called)[0]
            known = sources if len(sources) == len(inner.invars) else [{} for _ in inner.invars]
            found = _walk(inner, known, sizes)
            results = found if name != "scan" and len(found) == len(results) else results
        elif len(eqn.outvars) == 1 and name != "get":
            results = [_through(name, sources)]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _through(name: str, sources: Sequence[_Origins]) -> _Origins:
    """Origins of an operation's result: a reduction leaves a summary, the rest keeps elements."""
    merged: _Origins = {}
    reduces = name.startswith(("reduce_", "arg")) or name.startswith("cum")
    for source in sources:
        for dot, origin in source.items():
            old = merged.get(dot, _Origin(dot, origin.size, False, False))
            merged[dot] = _Origin(
                dot, origin.size,
                whole=old.whole or (origin.whole and not reduces),
                reduced=old.reduced or origin.reduced or reduces,
            )  # fmt: skip
    return merged


def _needed(operand: _Origins, depth: int) -> int:
    """The rule of `temporaries_bytes` for one operand of a dot that contracts `depth` of it."""
    tiles = [origin for origin in operand.values() if origin.whole]
    held = len(tiles) > 1 or any(tile.reduced for tile in tiles)
    if not held and depth < STREAMED_DEPTH:
        return 0
    return max((_least(tile.size, held) for tile in tiles), default=0)


def _least(size: int, held: bool) -> int:
    half = max(0, size // 2 - (REGISTERS_BYTES if held else 3 * REGISTERS_BYTES))
    low, high = HELD_WHOLE
    return max(half, min(size, high) * 7 // 10) if held and size >= low else half
