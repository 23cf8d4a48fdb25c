"""VMEM that a kernel's values need beyond windows and scratch: a measured lower bound."""

from __future__ import annotations

from typing import Any

from autotune.device import Device
from autotune.traced.measured_spills import measured_bytes
from autotune.traced.tile_formulas import Use, tile_uses

REGISTERS_BYTES = 64 * 8 * 128 * 4
"""The vector registers of a TensorCore: 64 of 8 × 128 words."""
STREAMED_DEPTH = 512
"""A contraction below this goes through the matrix unit in one pass, and nothing is kept."""

HELD_WHOLE = (2**20, 8 * 2**20)
"""Sizes of a held tile, measured, of which next to nothing stays in registers."""


def temporaries_bytes(body: Any, device: Device) -> int:
    """VMEM the compiler cannot avoid for the dot results of `body` that feed other dots.

    What was measured of tiles of the same formula and size (`measured_spills`); of all others by
    a rule, for a result of T bytes (attention's score tile):

    * its own reduction goes back into it before the second dot (online softmax), or another
      whole dot result meets it (dS = P · (dP - di) of a backward pass): 0.7 T from 2 MiB (of 8 at
      most), 0.6 T from 1 MiB, else T / 2 less the registers;
    * it only streams through (a constant in place of the maximum) and the second dot contracts at
      least 512 of it: T / 2 less three times the registers;
    * anything else (a matmul adding into its accumulator, a sum of exponentials): nothing.

    The rule was measured on 57 compiled kernels of JAX and of this package and on 40 bare ones, T
    of 0.25 to 8 MiB, on v5e, v6e and tpu7x, jax 0.10.2, some on 0.12.0.1, and held against those
    of `measured_spills`. From 1 MiB online softmax spills 0.78 (tpu7x), 0.65 (v6e; 0.92 from 2
    MiB), 0.94 T (v5e) and more, a backward step 0.84 T and more; below, 0.08 MiB of a tile of
    0.25; 0.74 T of one of 16 MiB. The streaming form spills nothing up to 1 MiB or where 128 or 256
    are contracted, and 0.23 - 0.95 T otherwise. A matmul's accumulation needed 0 - 2 T, by no rule
    that could be trusted. `tests/test_allocations.py` repeats it in small.
    """
    uses = tile_uses(body)
    ruled = max(map(_needed, uses), default=0)
    return max(ruled, measured_bytes(uses, device))


def _needed(use: Use) -> int:
    """The rule of `temporaries_bytes` for one operand of a dot."""
    held = len(use.tiles) > 1 or use.reduced
    if not held and use.depth < STREAMED_DEPTH:
        return 0
    return max(_least(tile.size, held) for tile in use.tiles)


def _least(size: int, held: bool) -> int:
    half = max(0, size // 2 - (REGISTERS_BYTES if held else 3 * REGISTERS_BYTES))
    low, high = HELD_WHOLE
    tenths = 7 if size >= 2 * low else 6
    return max(half, min(size, high) * tenths // 10) if held and size >= low else half
