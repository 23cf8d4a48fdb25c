"""`autotune export`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.app import Boards, OnlyDevice, OnlyProblem, app, opened
from autotune.cli.report import chosen
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.export import Export


class Target(enum.StrEnum):
    jax = "jax"
    maxtext = "maxtext"
    tokamax = "tokamax"
    json = "json"


@app.command(epilog="Example: autotune export jax results --problem prefill --device v6e")
def export(
    target: Annotated[Target, typer.Argument(help="Whose form: jax, maxtext, tokamax or json.")],
    results: Boards = Path("results"),
    problem: OnlyProblem = None,
    device: OnlyDevice = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write to this file; for tokamax, below this folder."),
    ] = None,
    tokamax_release: Annotated[
        str | None,
        typer.Option(help="Whose cache form: 0.0.12 or 0.0.17; the installed one's unless given."),
    ] = None,
) -> None:
    """Print the best configs in another project's own form.

    jax is BlockSizes expressions for flash and splash attention; maxtext is YAML of its sa_
    settings; tokamax is its autotuning cache; json is every config as it is. What a target cannot
    express is listed on stderr with the reason.

    Exit status: 0; 2 for bad input, or when nothing can be expressed.
    """
    from autotune import export as exports

    found = exports.entries(chosen(results, problem, device))
    if not found:
        about = [f"--problem {problem!r}"] if problem else []
        about += [f"--device {device!r}"] if device else []
        matching = f" matching {' and '.join(about)}" if about else ""
        raise InputError(
            f"no best config{matching} in {results}; `autotune sweep CONFIG` makes one"
        )
    made = exports.export(target.value, found, tokamax_release=tokamax_release)
    if not made.files:
        raise InputError(_refused(made, target, devices={entry.row.device for entry in found}))
    write(made, target, output)
    for sentence in made.refused:
        print(f"autotune: not exported: {sentence}", file=sys.stderr)


def _refused(made: Export, target: Target, *, devices: set[str]) -> str:
    """One line: why nothing can be exported, the first of many reasons, and what would be fewer."""
    from autotune.export import KERNELS

    told = f"nothing here can be exported to {target.value}: {'; '.join(made.refused[:3])}"
    if len(made.refused) > 3:
        narrower = "--device and --problem" if len(devices) > 1 else "--problem"
        told += f"; and {len(made.refused) - 3} more, of which {narrower} would leave fewer"
    return f"{told}; {target.value} takes {KERNELS[target.value]}"


def write(made: Export, target: Target, output: Path | None) -> None:
    """Raises InputError for several files without a folder, or one that cannot be written."""
    if target is Target.tokamax and output is not None:
        for name, text in made.files.items():
            path = output / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"--output {output} cannot be made: {error.strerror}") from None
            with opened(path) as file:
                file.write(text)
        return
    if len(made.files) > 1:
        raise InputError(
            f"{target.value} takes {len(made.files)} files ({', '.join(made.files)}); give "
            "--output FOLDER, or pick one with --device and --problem"
        )
    (text,) = made.files.values()
    with opened(output) as file:
        file.write(text)
