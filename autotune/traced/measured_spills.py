"""Register spills that the compiler was seen to need for tiles of known formulas.

The data, `measured_spills.json`, is written by `benchmarks/tile_spills.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.device import KIB, Device
from autotune.traced.tile_formulas import Use
from autotune.versions import installed

DATA = Path(__file__).with_name("measured_spills.json")
ALIKE = {"v4": "v5e", "v5p": "v5e"}
"""Chips that have the registers and MXUs of another, and are billed by its compiles."""
NEAR = 0.97
"""Share of the other chip's spills that counts: of 18 kernels compiled for v4 or v5p as well none
spilled less than 0.977 of what it spills on v5e."""


@dataclass(frozen=True, slots=True)
class Size:
    """What of a kernel's tiles decides, with their formulas, how much is spilled.

    Nothing is concluded from one size for another: a deeper product may spill less (flash_dkv on
    v5e 1.36 MiB with a head_dim of 192, where it spills 1.72 with 128), and a wider tile too.

    Attributes:
      rows, columns, depth: of the largest tile, and what its product contracts.
      width: the largest side that a product of such a tile adds.
    """

    rows: int
    columns: int
    depth: int
    width: int


def formulas(uses: Sequence[Use]) -> tuple[str, ...]:
    """Those of a kernel's tiles, each once, sorted: what measurements are filed under."""
    return tuple(sorted({use.formula for use in uses}))


def size_of(uses: Sequence[Use]) -> Size:
    """The `Size` of a kernel's tiles; there must be one."""
    largest = max((tile for use in uses for tile in use.tiles), key=lambda tile: tile.size)
    width = max(use.width for use in uses if any(tile.size == largest.size for tile in use.tiles))
    return Size(largest.rows, largest.columns, largest.depth, width)


def measured_bytes(uses: Sequence[Use], device: Device) -> int:
    """What a kernel of the same formulas and size surely spills; 0 where there was none.

    Only the compilers that were asked are answered for: with another libtpu installed it is 0.
    """
    compilers, table = _data()
    if not uses or installed()["libtpu"] not in (None, *compilers):
        return 0
    chip = ALIKE.get(device.name, device.name)
    share = 1.0 if chip == device.name else NEAR
    return int(share * table.get((chip, formulas(uses), size_of(uses)), 0))


def fingerprint() -> str:
    """Hash of the data, for the keys of what is stored of traced calls."""
    return hashlib.sha256(DATA.read_bytes()).hexdigest()[:16]


Table = dict[tuple[str, tuple[str, ...], Size], int]


@functools.cache
def _data() -> tuple[tuple[str, ...], Table]:
    """(versions of libtpu, chip, formulas and size -> bytes)."""
    stored = json.loads(DATA.read_text("utf-8"))
    table = {
        (chip, tuple(entry["formulas"]), Size(*size)): kib * KIB
        for entry in stored["tiles"]
        for chip, rows in entry["kib"].items()
        for *size, kib in rows
    }
    return tuple(stored["libtpu"]), table
