"""Verdicts for people, for programs, and as annotations of a GitHub run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

from autotune.errors import printable
from autotune.gate.verdict import (
    EXIT_STATUS,
    INCONCLUSIVE,
    OK,
    REFRESH,
    REGRESSION,
    Verdict,
    exit_status,
)

_LEVELS = {REGRESSION: "error", INCONCLUSIVE: "warning"}


def write_table(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """One line a verdict, and a last line that counts them."""
    for v, line in zip(verdicts, _lines(verdicts), strict=True):
        print(f"{v.outcome:<12}  {line}", file=file)
    counts = [f"{sum(v.outcome == o for v in verdicts)} {o}" for o in EXIT_STATUS]
    updated = sum(v.updated for v in verdicts)
    print(", ".join(counts + ([f"{updated} updated"] if updated else [])), file=file)


def write_json(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """One JSON document: `exit_status` and the verdicts. What is no number is null."""
    records = [
        asdict(v)
        | {"config": json.loads(v.config) if v.config else None}
        | {"baseline_ms": _number(v.baseline_ms), "today_ms": _number(v.today_ms)}
        for v in verdicts
    ]
    document = {"exit_status": exit_status(verdicts), "verdicts": records}
    json.dump(document, file, indent=2, allow_nan=False)
    file.write("\n")


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def annotate(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """A workflow command a verdict that somebody must look at, which GitHub shows on the run.

    Form: docs.github.com, "Workflow commands for GitHub Actions", setting an error message.
    """
    for v, line in zip(verdicts, _lines(verdicts), strict=True):
        level = _LEVELS.get(v.outcome, "notice" if REFRESH in v.reason else None)
        if level is None or v.updated:
            continue
        text = line.replace("%", "%25")
        print(f"::{level} title=autotune gate {v.outcome}::{text}", file=file)


def _lines(verdicts: Sequence[Verdict]) -> list[str]:
    """A line each: whose it is, in as many words as tell it from the others, and what was found.
    Files may be called anything; a line of theirs may not begin with what GitHub obeys."""
    ways: list[Callable[[Verdict], str]] = [
        _name,
        lambda v: f"{_name(v)} ({' '.join(f'{a}={n}' for a, n in (v.shape or {}).items())})",
        lambda v: f"{_name(v)} ({v.problem_key})",
        lambda v: f"{_name(v)} ({v.path})",
    ]
    counts = [Counter(map(way, verdicts)) for way in ways]
    lines = []
    for v in verdicts:
        alone = (way(v) for way, count in zip(ways, counts, strict=True) if count[way(v)] == 1)
        name = next(alone, ways[-1](v)) if v.path else _name(v)
        lines.append(printable(f"{name}: {_told(v)}"))
    return lines


def _name(v: Verdict) -> str:
    return f"{v.problem} on {v.device}" if v.device else v.problem


def _told(v: Verdict) -> str:
    told = [v.reason]
    if v.checked and v.checked not in v.reason:
        told.append(f"output right, {v.checked}" if v.output == OK else v.checked)
    if v.stale:
        told.append(f"baseline stale: {v.stale}")
    if v.updated:
        told.append("accepted as the new baseline")
    return "; ".join(told)
