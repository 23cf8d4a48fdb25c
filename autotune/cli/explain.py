"""`autotune explain`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.app import (
    Jobs,
    Results,
    Timeout,
    Until,
    app,
    device_called,
    opened,
    positive,
    progress_bars,
)
from autotune.errors import InputError


class ExplainFormat(enum.StrEnum):
    table = "table"
    json = "json"
    html = "html"


EXAMPLE = "autotune explain q-up bm=1024,bn=512 --device v6e --format html --output why.html"
"""Of a problem that the repository's own results have."""


@app.command(epilog=f"Example: {EXAMPLE}")
def explain(
    problem: Annotated[
        str,
        typer.Argument(
            help="A problem's name, key or kernel in the results (your own kernel is "
            "package.module:ATTRIBUTE), a leaderboard file, or CONFIG.yaml:NAME."
        ),
    ],
    config: Annotated[
        str | None,
        typer.Argument(
            help="best (the stored one), default (the kernel's own), JSON, or name=value pairs "
            "with commas between them. What is not given is as in the best or, where none is "
            "stored, the default, and the output says so."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The device, where several have the problem.")
    ] = None,
    until: Annotated[
        Until | None,
        typer.Option(help="model or compile; as far as possible unless given."),
    ] = None,
    neighbours: Annotated[
        bool, typer.Option(help="Also evaluate the next larger and smaller value of each tunable.")
    ] = True,
    results: Results = Path("results"),
    jobs: Jobs = None,
    timeout: Timeout = 300.0,
    format: Annotated[ExplainFormat, typer.Option("--format", help="Output format.")] = (
        ExplainFormat.table
    ),
    output: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
) -> None:
    """Say why a candidate is as fast as it is: VMEM bill, roofline, timeline, cycles and spills
    per scope, what limits it, and what the next larger and smaller blocks would change.

    Exit status: 0, also for a candidate that does not fit; 2 for bad input, and for `best` where
    none is stored.
    """
    from autotune.explain import collect, facts, subject

    positive("--timeout", timeout)
    if until is Until.measure:
        raise InputError("--until 'measure' is not allowed; model or compile")
    about = subject.find(problem, results, device=device_called(device))
    chosen = subject.candidate(about, config)
    with progress_bars() as progress:
        explanation = collect.explain(
            about,
            chosen,
            until=until.value if until else None,
            neighbours=neighbours,
            jobs=jobs,
            timeout_s=timeout,
            progress=progress,
        )
    with opened(output) as file:
        if format is ExplainFormat.json:
            import json

            json.dump(facts.to_json(explanation), file, indent=2, sort_keys=True)
            print(file=file)
        elif format is ExplainFormat.html:
            from autotune.explain import picture

            picture.write(explanation, file)
        else:
            from autotune.explain import terminal

            terminal.write(explanation, file)
