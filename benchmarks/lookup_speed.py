"""Times `autotune.best_config` on the shipped leaderboards, once they are read; target 1 ms a call.

    python benchmarks/lookup_speed.py

Prints what the first call takes, which reads them, and then the median of each kind of answer.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import autotune
from autotune.errors import NoResultError

RESULTS = Path(__file__).parent.parent / "results"
STORED = {"m": 4096, "k": 7168, "n": 18432}
CALLS = 1001

Miss = Literal["error", "default", "nearest"]


def main() -> None:
    started = time.perf_counter()
    _ask(STORED, "error")
    print(f"{'first, which reads the leaderboards':<40} {time.perf_counter() - started:>9.2f} s")
    kinds: list[tuple[str, list[int], Miss]] = [
        ("exact", [4096] * CALLS, "error"),
        ("miss: error", [256] * CALLS, "error"),
        ("miss: the kernel's default", [256] * CALLS, "default"),
        ("nearest, another shape each time", [2048 * n for n in range(3, 53)], "nearest"),
    ]
    for what, sizes, on_miss in kinds:
        calls = [partial(_ask, {**STORED, "m": m}, on_miss) for m in sizes]
        median_ms = statistics.median(map(_seconds, calls)) * 1e3
        print(f"{what:<40} {median_ms:>9.3f} ms")


def _ask(shape: Mapping[str, int], on_miss: Miss) -> None:
    with contextlib.suppress(NoResultError):
        autotune.best_config("matmul", shape, device="tpu7x", on_miss=on_miss, results=RESULTS)


def _seconds(call: partial[None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
