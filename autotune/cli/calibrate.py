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


ROW = (
    'matmul,v6e,"{""shape"": {""m"": 512, ""k"": 1024, ""n"": 512}}","{""bm"": 256, ""bk"": 1024, '
    '""bn"": 512, ""grid_order"": ""mn"", ""buffers"": 2}",0.0171'
)


@app.command(
    epilog="Example: autotune calibrate measured.csv --evaluate other.csv, where measured.csv has "
    f"the line kernel,device,problem,config,latency_ms and lines like {ROW}"
)
def calibrate(
    data: Annotated[
        list[Path],
        typer.Argument(
            help="Measured rows to fit: leaderboards, results directories, or CSVs with the "
            "columns kernel, device, problem, config, latency_ms."
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

    Needs no TPU: every row is compiled ahead of time, once, and kept in the cache. Rows that cannot
    be predicted are listed with the reason. Exit status: 0; 2 for bad input.
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
