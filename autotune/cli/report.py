"""`autotune report`."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.app import Boards, OnlyDevice, OnlyProblem, app, device_called, opened, stored
from autotune.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.leaderboard import Board


class Format(enum.StrEnum):
    table = "table"
    markdown = "markdown"
    json = "json"
    csv = "csv"
    html = "html"


@app.command(epilog="Example: autotune report results --format markdown --top 5")
def report(
    results: Boards = Path("results"),
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.table,
    problem: OnlyProblem = None,
    device: OnlyDevice = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Ranked rows of each problem; without it tables tell many problems in a line "
            "each, json, csv and html all rows.",
            min=1,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
) -> None:
    """Print the leaderboards: rank, blocks, latency and its evidence, MFU, VMEM, gain.

    A line a problem closes the tables of several, and stands for them where there are many.
    Exit status: 0; 2 for bad input.
    """
    boards = chosen(results, problem, device)
    if not boards:
        about = f" matching --problem {problem!r}" if problem else ""
        about += f" of --device {device}" if device else ""
        raise InputError(f"no leaderboard{about} in {results}; `autotune sweep CONFIG` makes them")
    boards.sort(key=lambda board: _natural(str(board.path)))
    write(boards, format, top=top, output=output)


def _natural(text: str) -> list[tuple[str, int]]:
    """For sorting: numbers in `text` by their value, so that q_len512 comes before q_len1024."""
    return [(word, int(n or 0)) for word, n in re.findall(r"(\D*)(\d*)", text)]


def chosen(results: Path, problem: str | None, device: str | None) -> list[Board]:
    """The boards in `results` that `--problem` and `--device` leave, in path order.

    Raises InputError for a device that does not exist."""
    from autotune import leaderboard

    chip = device_called(device)
    found = [b for b in stored(results) if chip in (None, b.rows[0].device)]
    return found if problem is None else leaderboard.named(found, problem)


def write(
    boards: Sequence[Board], format: Format, *, top: int | None, output: Path | None, usual: int = 5
) -> None:
    """Writes `boards`. A table shows `top` ranked rows of each problem; where the user says
    nothing, `usual` of a few problems and the winner only of many."""
    from autotune.report import document, table

    with opened(output) as file:
        if format is Format.json:
            document.write_json(boards, top=top, file=file)
        elif format is Format.csv:
            document.write_csv(boards, top=top, file=file)
        elif format is Format.html:
            from autotune.report import html

            html.write(boards, top=top, file=file)
        else:
            from autotune.report import summary

            many = top is None and len(boards) > summary.FEW
            if format is Format.markdown and many:
                summary.write_markdown(boards, file=file)
            elif format is Format.markdown:
                table.write_markdown(boards, top=top or usual, file=file)
            else:
                if not many:
                    table.write_terminal(boards, top=top or usual, file=file)
                if len(boards) > 1:
                    summary.write_terminal(boards, many=many, file=file)
