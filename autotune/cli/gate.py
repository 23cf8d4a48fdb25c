"""`autotune gate`."""

from __future__ import annotations

import enum
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.app import Jobs, Timeout, Until, app, positive, progress_bars
from autotune.errors import AutotuneError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.gate.verdict import Verdict

INCONCLUSIVE = 3
"""As `gate.verdict` has it, whose import may be the very thing that failed."""


class GateFormat(enum.StrEnum):
    table = "table"
    json = "json"


@app.command(epilog="Example: autotune gate results/tpu7x/matmul --tolerance 0.02")
def gate(
    baseline: Annotated[
        Path,
        typer.Argument(
            help="Stored leaderboards to hold today's kernels against: a results directory, a "
            "folder in it, or one file."
        ),
    ] = Path("results"),
    against: Annotated[
        Until, typer.Option(help="Evidence to compare: model, compile or measure.")
    ] = Until.compile,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative slowdown that still passes; 0.02, and 0.05 for measure, unless given. "
            "Of fresh times a pass needs it ruled out; a regression needs half of it at least, and "
            "significance.",
            min=0.0,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="With --against measure: a CSV or Parquet of recorded times, in place of a TPU."
        ),
    ] = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Accept today's figures as the new baseline; never those of a wrong output.",
        ),
    ] = False,
    jobs: Jobs = None,
    timeout: Timeout = 300.0,
    format: Annotated[GateFormat, typer.Option("--format", help="Output format.")] = (
        GateFormat.table
    ),
) -> None:
    """Re-evaluate the stored best configs with today's kernel, jax and libtpu.

    Every best below BASELINE is compiled anew and its output checked: seconds each,
    and hours for all of autotune's own results. To narrow it, give a folder or file.

    Exit status: 0 pass; 1 a regression; 3 inconclusive or nothing to compare; 2 for bad input.
    """
    if replay is not None and against is not Until.measure:
        raise InputError("--replay goes with --against measure only")
    positive("--timeout", timeout)
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance {tolerance:g} is not allowed; a share such as 0.02")
    try:
        from autotune import gate as gates

        request = gates.Request(
            against=against.value,
            tolerance=tolerance,
            update=update,
            measurer=gates.opener(replay),
        )
        with progress_bars() as bars:
            verdicts = gates.check(baseline, request, jobs=jobs, timeout_s=timeout, progress=bars)
        _tell(verdicts, as_json=format is GateFormat.json)
        status = gates.exit_status(verdicts)
    except (AutotuneError, OSError):
        raise
    except Exception:  # a fault of autotune's own, which Python would end with a regression's 1
        traceback.print_exc()
        status = INCONCLUSIVE
    raise typer.Exit(status)


def _tell(verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    from autotune import gate as gates

    writer = gates.write_json if as_json else gates.write_table
    writer(verdicts, sys.stdout)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        gates.annotate(verdicts, sys.stderr if as_json else sys.stdout)
