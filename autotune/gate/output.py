"""Verdicts for people, for programs, and as annotations of a GitHub run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO

from autotune.gate.verdict import (
    EXIT_STATUS,
    INCONCLUSIVE,
    REFRESH,
    REGRESSION,
    Verdict,
    exit_status,
)

_LEVELS = {REGRESSION: "error", INCONCLUSIVE: "warning"}


def write_table(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """One line a verdict, and a last line that counts them."""
    for v in verdicts:
        print(f"{v.outcome:<12}  {_line(v)}", file=file)
    counts = [f"{sum(v.outcome == o for v in verdicts)} {o}" for o in EXIT_STATUS]
    updated = sum(v.updated for v in verdicts)
    print(", ".join(counts + ([f"{updated} updated"] if updated else [])), file=file)


def write_json(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """One JSON document: `exit_status` and the verdicts."""
    records = [asdict(v) | {"config": json.loads(v.config) if v.config else None} for v in verdicts]
    json.dump({"exit_status": exit_status(verdicts), "verdicts": records}, file, indent=2)
    file.write("\n")


def annotate(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """A workflow command a verdict that somebody must look at, which GitHub shows on the run.

    Form: docs.github.com, "Workflow commands for GitHub Actions", setting an error message.
    """
    for v in verdicts:
        level = _LEVELS.get(v.outcome, "notice" if REFRESH in v.reason else None)
        if level is None or v.updated:
            continue
        text = _line(v).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::{level} title=autotune gate {v.outcome}::{text}", file=file)


def _line(v: Verdict) -> str:
    where = f" on {v.device}" if v.device else ""
    told = [v.reason]
    if v.checked:
        told.append(v.checked)
    if v.stale:
        told.append(f"baseline {v.stale}")
    if v.updated:
        told.append("accepted as the new baseline")
    return f"{v.problem}{where}: {'; '.join(told)}"
