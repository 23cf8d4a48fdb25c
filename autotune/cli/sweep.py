"""`autotune sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.app import Jobs, Results, Timeout, Until, app, positive, progress_bars
from autotune.cli.report import Format, write
from autotune.errors import InputError


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
        int | None, typer.Option(help="Candidates to compile per problem; the config's otherwise.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Time for compiling per problem; the config's otherwise.")
    ] = None,
    jobs: Jobs = None,
    timeout: Timeout = 300.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
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

    positive("--trials", trials)
    positive("--seconds", seconds)
    positive("--timeout", timeout)
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed} is not allowed; a whole number from 0 to 2^32 - 1")
    loaded = [configs.load(path, devices=device or None) for path in config]
    plan = pipeline.Plan(
        until=until.value if until else None,
        results=results,
        jobs=jobs,
        timeout_s=timeout,
        seed=seed,
        trials=trials,
        seconds=seconds,
        fresh=fresh,
    )
    with progress_bars() as progress:
        boards = pipeline.run(loaded, plan, progress)
    write(boards, Format.table, top=3, output=None)
    if any(board.best is None for board in boards):
        raise typer.Exit(1)
