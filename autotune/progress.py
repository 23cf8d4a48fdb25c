"""What long work tells a person while it runs. Bars go to stderr, and only on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol


class Progress(Protocol):
    """The seam between the pipeline and a terminal."""

    def start(self, problem: str, stage: str, total: int) -> None:
        """A stage of a problem begins; `total` candidates are to be done."""

    def advance(self, *, best_ms: float | None = None) -> None:
        """One more candidate is done; `best_ms` is the lowest latency so far."""

    def note(self, text: str) -> None:
        """One line a person should see, on a terminal or not."""


class Quiet:
    """No bars; notes go to stderr as plain lines. What a pipe or CI gets."""

    def start(self, problem: str, stage: str, total: int) -> None:
        return

    def advance(self, *, best_ms: float | None = None) -> None:
        return

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


class Bars:
    """A bar a stage: candidates done, best so far, time left. Use as a context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self._console = Console(stderr=True)
        self._bars = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task: Any = None

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def start(self, problem: str, stage: str, total: int) -> None:
        label = problem if len(problem) <= 20 else problem[:19] + "…"
        self._task = self._bars.add_task(f"{label:<20} {stage:<7}", total=total, best="")

    def advance(self, *, best_ms: float | None = None) -> None:
        if best_ms is not None:
            self._bars.update(self._task, best=f"best {best_ms:.4g} ms")
        self._bars.advance(self._task)

    def note(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False)
