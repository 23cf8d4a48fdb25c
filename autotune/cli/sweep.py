"""`autotune sweep`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.app import Jobs, Results, Timeout, Until, app, positive, progress_bars
from autotune.cli.report import Format, write
from autotune.errors import InputError


class Timer(enum.StrEnum):
    device = "device"
    host = "host"


Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Share the work with every sweep on it: postgresql://user:password@host/database, "
        "sqlite:///path or journal://path.",
    ),
]


@app.command(epilog="Example: autotune sweep configs/dsv3.yaml --trials 24 --jobs 2")
def sweep(
    config: Annotated[list[Path], typer.Argument(help="YAML configs; see configs/.")],
    until: Annotated[
        Until | None,
        typer.Option(help="Last stage to run; as far as this machine can unless given."),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Tune for this device instead (may be repeated).")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Candidates per problem to compile, and to time; else the config's."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time per problem to compile, and again to time; else the config's."),
    ] = None,
    jobs: Jobs = None,
    timeout: Timeout = 300.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    storage: Storage = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take times from a recording (CSV, Parquet), not a TPU."),
    ] = None,
    timer: Annotated[
        Timer, typer.Option(help="The TPU's own clock, or the host's, which is labelled so.")
    ] = Timer.device,
    results: Results = Path("results"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ignore cached evidence and stored leaderboards.")
    ] = False,
) -> None:
    """Run the pipeline on every problem of CONFIG and write a leaderboard for each.

    Exit status: 0; 1 when a problem has no surviving candidate; 2 for bad input.
    """
    from autotune import config as configs
    from autotune import sweep as pipeline
    from autotune.plan import Plan
    from autotune.search import storage as storages

    positive("--trials", trials)
    positive("--seconds", seconds)
    positive("--timeout", timeout)
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed} is not allowed; a whole number from 0 to 2^32 - 1")
    if storage is not None:
        storages.check(storage)
    loaded = [configs.load(path, devices=device or None) for path in config]
    plan = Plan(
        until=until.value if until else None,
        results=results,
        jobs=jobs,
        timeout_s=timeout,
        seed=seed,
        trials=trials,
        seconds=seconds,
        fresh=fresh,
        storage=storage,
        replay=replay,
        timer=timer.value,
    )
    with progress_bars() as progress:
        boards = pipeline.run(loaded, plan, progress)
    write(boards, Format.table, top=None, usual=3, output=None)
    if any(board.best is None for board in boards):
        raise typer.Exit(1)
