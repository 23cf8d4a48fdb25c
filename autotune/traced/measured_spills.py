"""Register spills that the compiler was seen to need for tiles of known formulas.

The data, `measured_spills.json`, is written by `benchmarks/tile_spills.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from autotune.device import KIB, Device
from autotune.traced.tile_formulas import Use
from autotune.versions import installed

DATA = Path(__file__).with_name("measured_spills.json")
ALIKE = {"v4": "v5e", "v5p": "v5e"}
"""Chips measured by another's compiles: the same MXUs and registers, and equal spills wherever both
were compiled."""
TRUSTED = 0.95
"""Share of the measured spills that is relied upon. Where both supported compilers were asked, they
spilled within 5 % of each other."""


@dataclass(frozen=True, slots=True)
class Size:
    """What of a kernel's tiles decides, with their formulas, how much is spilled.

    Attributes:
      rows, columns, depth: of the largest tile, and what its product contracts.
      width: the largest side that a product of such a tile adds.
      copies: how often the commonest formula stands in the text, unrolled loops in full.
    """

    rows: int
    columns: int
    depth: int
    width: int
    copies: int

    def covers(self, other: Size) -> bool:
        """Whether this is at least `other` in every respect."""
        return all(a >= b for a, b in zip(astuple(self), astuple(other), strict=True))


def formulas(uses: Sequence[Use]) -> tuple[str, ...]:
    """Those of a kernel's tiles, each once, sorted: what measurements are filed under."""
    return tuple(sorted({use.formula for use in uses}))


def size_of(uses: Sequence[Use]) -> Size:
    """The `Size` of a kernel's tiles; there must be one."""
    largest = max((tile for use in uses for tile in use.tiles), key=lambda tile: tile.size)
    width = max(use.width for use in uses if any(tile.size == largest.size for tile in use.tiles))
    copies = max(Counter(use.formula for use in uses).values())
    return Size(largest.rows, largest.columns, largest.depth, width, copies)


def measured_bytes(uses: Sequence[Use], device: Device) -> int:
    """Spills of the largest tile measured that the kernel's own covers; 0 where there is none.

    Only the compilers that were asked are answered for: with another libtpu installed it is 0.
    """
    compilers, table = _data()
    if not uses or installed()["libtpu"] not in (None, *compilers):
        return 0
    entries = table.get((ALIKE.get(device.name, device.name), formulas(uses)), ())
    own = size_of(uses)
    least = max((spilled for size, spilled in entries if own.covers(size)), default=0)
    return int(TRUSTED * least)


def fingerprint() -> str:
    """Hash of the data, for the keys of what is stored of traced calls."""
    return hashlib.sha256(DATA.read_bytes()).hexdigest()[:16]


Table = dict[tuple[str, tuple[str, ...]], tuple[tuple[Size, int], ...]]


@functools.cache
def _data() -> tuple[tuple[str, ...], Table]:
    """(versions of libtpu, chip and formulas -> measured sizes with their spills in bytes)."""
    stored = json.loads(DATA.read_text("utf-8"))
    table = {
        (chip, tuple(entry["formulas"])): tuple((Size(*row[:-1]), row[-1] * KIB) for row in rows)
        for entry in stored["tiles"]
        for chip, rows in entry["kib"].items()
    }
    return tuple(stored["libtpu"]), table
