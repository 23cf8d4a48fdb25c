"""Numbers as people read them."""

from __future__ import annotations

import math


def milliseconds(value_ms: float) -> str:
    """Four significant digits: `203.4 ms`, `1.069 ms`, `0.001403 ms`."""
    digits = 3 - math.floor(math.log10(value_ms)) if value_ms > 0 else 0
    return f"{value_ms:.{max(0, digits)}f} ms"


def counted(number: int, noun: str) -> str:
    """`1 candidate`, `2 candidates`."""
    return f"{number} {noun}{'s' * (number != 1)}"
