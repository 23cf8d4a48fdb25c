"""Times `autotune.best_config` on the shipped leaderboards, once they are read; target 1 ms a call.

    python benchmarks/lookup_speed.py

Asks of the kernel and device with the most of them. Prints what the first call takes, which reads
them all, and then CPU times a call: the best, and the median. On a machine that does other work the
best says what a lookup costs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import autotune
from autotune.errors import NoResultError
from autotune.lookup import library
from autotune.lookup.library import Stored

RESULTS = Path(__file__).parent.parent / "results"
CALLS = 500

Miss = Literal["error", "default", "nearest"]


def main() -> None:
    (read,) = _cpu_ms([lambda: library.opened(str(RESULTS))])
    shelves = library.opened(str(RESULTS)).shelves
    most = max(shelves.values(), key=len)
    stored, count = most[0], sum(map(len, shelves.values()))
    print(f"reading {count} leaderboards: {read:.0f} ms of CPU")
    asked = f"{stored.row.kernel}, {stored.row.device}, {stored.dtype}, of {len(most)} leaderboards"
    print(f"{asked:<40} {'best ms':>9} {'median':>9}")
    axis = max(stored.shape, key=stored.shape.__getitem__)
    size = stored.shape[axis]
    kinds: list[tuple[str, list[int], Miss]] = [
        ("exact", [size] * CALLS, "error"),
        ("miss, as before", [size + 1] * CALLS, "error"),
        ("miss, another shape each time", [size + n for n in range(2, CALLS)], "error"),
        ("nearest, another shape each time", [size * n for n in range(2, CALLS)], "nearest"),
        (
            "nearest that none fits, likewise",
            [size * 8 + 2 * n + 1 for n in range(CALLS)],
            "nearest",
        ),
        ("the kernel's default, as before", [size + 1] * CALLS, "default"),
    ]
    for what, sizes, on_miss in kinds:
        _ask(stored, stored.shape[axis], axis, on_miss)  # the kernel's source is read once
        spent = _cpu_ms([partial(_ask, stored, n, axis, on_miss) for n in sizes])
        print(f"{what:<40} {min(spent):>9.3f} {statistics.median(spent):>9.3f}")


def _ask(stored: Stored, size: int, axis: str, on_miss: Miss) -> None:
    with contextlib.suppress(NoResultError):
        autotune.best_config(
            stored.row.kernel,
            {**stored.shape, axis: size},
            device=stored.row.device,
            options=stored.options,
            dtype=stored.dtype,
            on_miss=on_miss,
            results=RESULTS,
        )


def _cpu_ms(calls: list[Callable[[], object]]) -> list[float]:
    spent = []
    for call in calls:
        started = time.process_time_ns()
        call()
        spent.append((time.process_time_ns() - started) / 1e6)
    return spent


if __name__ == "__main__":
    main()
