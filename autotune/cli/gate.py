"""`autotune gate`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.app import Jobs, Timeout, Until, app, positive, progress_bars


class GateFormat(enum.StrEnum):
    table = "table"
    json = "json"


@app.command(epilog="Example: autotune gate results --tolerance 0.02")
def gate(
    baseline: Annotated[
        Path, typer.Argument(help="Stored leaderboards to hold today's kernels against.")
    ] = Path("results"),
    against: Annotated[
        Until, typer.Option(help="Evidence to compare: model, compile or measure.")
    ] = Until.compile,
    tolerance: Annotated[
        float, typer.Option(help="Relative slowdown that still passes, e.g. 0.02.", min=0.0)
    ] = 0.02,
    jobs: Jobs = None,
    timeout: Timeout = 300.0,
    format: Annotated[GateFormat, typer.Option("--format", help="Output format.")] = (
        GateFormat.table
    ),
) -> None:
    """Re-evaluate the stored best configs with today's kernel, jax and libtpu.

    Exit status: 0 pass; 1 a regression; 3 inconclusive or nothing to compare; 2 for bad input.
    """
    from autotune import gate as gates

    positive("--timeout", timeout)
    with progress_bars() as progress:
        verdicts = gates.check(
            baseline,
            against=against.value,
            tolerance=tolerance,
            jobs=jobs,
            timeout_s=timeout,
            progress=progress,
        )
    writer = gates.write_json if format is GateFormat.json else gates.write_table
    writer(verdicts, sys.stdout)
    raise typer.Exit(gates.exit_status(verdicts))
