"""`autotune calibrate`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.app import Jobs, Timeout, app, positive, progress_bars


class CalibrateFormat(enum.StrEnum):
    table = "table"
    json = "json"


EXAMPLE = "autotune calibrate measured.csv --evaluate other.csv"


@app.command(epilog=f"Example: {EXAMPLE}")
def calibrate(
    data: Annotated[
        list[Path],
        typer.Argument(
            help="Measured rows to fit: leaderboards, results directories, or CSVs with the "
            "columns kernel, device, problem, config, latency_ms (problem and config are JSON as "
            "in a leaderboard; docs/measuring.md, Times from elsewhere, has a file to copy)."
        ),
    ],
    evaluate: Annotated[
        list[Path] | None,
        typer.Option(help="Measured rows to report on and not to fit (may be repeated)."),
    ] = None,
    format: Annotated[CalibrateFormat, typer.Option("--format", help="Output format.")] = (
        CalibrateFormat.table
    ),
    output: Annotated[
        Path | None,
        typer.Option(
            help="Calibration file to write; $AUTOTUNE_CALIBRATION, else one in the user's "
            "config folder, both of which sweep reads."
        ),
    ] = None,
    jobs: Jobs = None,
    timeout: Timeout = 900.0,
) -> None:
    """Fit a device's constants to measurements, and say how far predictions can be trusted.

    Needs no TPU: every row is compiled ahead of time, once, and kept in the cache. A device needs
    three such rows to be fitted. Rows that cannot be predicted are listed with the reason.

    Exit status: 0, also where nothing could be fitted; 2 for bad input.
    """
    from autotune import constants
    from autotune.calibration import data as measured
    from autotune.calibration import output as outputs
    from autotune.calibration.run import calibrate as fitted
    from autotune.search.prune import Stages

    positive("--timeout", timeout)
    rows = measured.read(data, measured.FIT) + measured.read(evaluate or (), measured.EVALUATE)
    target = output or constants.default_path()
    with (
        progress_bars() as progress,
        Stages.open(
            jobs=jobs, timeout_s=timeout, fresh=False, progress=progress, calibrations={}
        ) as stages,
    ):
        result = fitted(rows, stages)
    if result.calibrations:
        constants.write(target, result.calibrations)
    written = target if result.calibrations else None
    writer = outputs.write_json if format is CalibrateFormat.json else outputs.write_table
    writer(result, written, sys.stdout)
