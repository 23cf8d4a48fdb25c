"""`autotune best`."""

from __future__ import annotations

import enum
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.app import app, device_called
from autotune.errors import InputError, NoResultError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autotune.lookup import BestConfig


class OnMiss(enum.StrEnum):
    error = "error"
    default = "default"
    nearest = "nearest"


@app.command(epilog="Example: autotune best matmul --shape m=4096,k=7168,n=18432 --device tpu7x")
def best(
    kernel: Annotated[
        str,
        typer.Argument(
            help="Kernel, as in the config file: matmul, jax.splash ...; your own as "
            "package.module:ATTRIBUTE, or as its folder under the results is called."
        ),
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Axes as m=4096,k=7168,n=18432; one left out has its default size, else 1.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The device it was tuned for: tpu7x, v6e ...")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help="A kernel option as NAME=VALUE, the value in JSON (causal=true, "
            "'mask={\"causal\": {}}') or a bare word; again for more. Defaults may be left out.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Operand dtype.")] = "bfloat16",
    problem: Annotated[
        str | None, typer.Option(help="Name or key of a stored problem, in place of --shape.")
    ] = None,
    on_miss: Annotated[
        OnMiss,
        typer.Option(help="error, nearest (shape) or default (the kernel's own, imports jax)."),
    ] = OnMiss.error,
    results: Annotated[
        str | None,
        typer.Option(
            "--results",
            help="Directory or file of leaderboards, or package:your_package.folder; else "
            "$AUTOTUNE_RESULTS, else results.",
        ),
    ] = None,
) -> None:
    """Print the stored best config of a problem as JSON.

    Exit status: 0; 4 when there is none; 2 for bad input.
    """
    if (problem is None) == (shape is None):
        raise InputError("best needs one of --shape AXIS=SIZE,... and --problem NAME")
    if problem is not None and option:
        raise InputError("--option belongs to --shape; a named problem has its own")
    with _one_line_warnings():
        if problem is not None:
            found = _named(kernel, problem, device, results)
        else:
            found = _asked(kernel, shape or [], device, option or [], dtype, on_miss.value, results)
    if found.found.stale:
        print(f"autotune: {found.found.stale}", file=sys.stderr)
    write(found)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings as the lines of this command, that of staleness aside: it has one of its own."""
    import warnings

    from autotune.lookup import StaleResultsWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for warning in caught:
                if not issubclass(warning.category, StaleResultsWarning):
                    print(f"autotune: {warning.message}", file=sys.stderr)


def write(found: BestConfig) -> None:
    """One JSON document: the config, and what it was found for."""
    from dataclasses import asdict

    record = {"config": dict(found), **asdict(found.found)}
    json.dump(record, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def _asked(
    kernel: str,
    shape: Sequence[str],
    device: str | None,
    options: Sequence[str],
    dtype: str,
    on_miss: str,
    results: str | None,
) -> BestConfig:
    from autotune.lookup import best_config

    if device is None:
        raise InputError("best needs --device, e.g. --device tpu7x")
    return best_config(
        kernel,
        {axis: _size(axis, size) for axis, size in _pairs("--shape", shape, split=True)},
        device=device,
        options={name: _value(text) for name, text in _pairs("--option", options)},
        dtype=dtype,
        on_miss=on_miss,  # type: ignore[arg-type]
        results=results,
    )


def _named(kernel: str, name: str, device: str | None, results: str | None) -> BestConfig:
    """The best config of the stored problem called `name`, or with that key."""
    from autotune.lookup import best, library, names, sources

    chip = device_called(device)
    shelf = library.opened(sources.source_of(results))
    kernel = names.kernel_called(kernel, shelf.axes)
    found = {
        (s.row.device, s.row.problem_key): s
        for s in reversed(shelf.stored)  # so that the first, of the strongest evidence, stays
        if s.row.kernel == kernel
        and name in (s.row.problem_name, s.row.problem_key)
        and chip in (None, s.row.device)
    }
    if not found:
        where = f" on {chip}" if chip else ""
        known = sorted({s.row.problem_name or s.row.problem_key for s in shelf.stored
                        if s.row.kernel == kernel})  # fmt: skip
        listed = ", ".join(known) or "none"
        raise NoResultError(
            f"no stored result in {shelf.source} for {kernel} {name!r}{where} (stored: {listed})"
        )
    if len(found) > 1:
        where = ", ".join(f"{key} on {chip}" for chip, key in sorted(found))
        several = len({chip for chip, _ in found}) > 1
        narrower = f"{'--device or ' if several else ''}--problem KEY"
        raise InputError(
            f"--problem {name!r} is not one problem but {len(found)}, of which {narrower} picks "
            f"one: {where}"
        )
    (stored,) = found.values()
    return best.BestConfig(stored.config, best.match_of(stored))


def _pairs(flag: str, texts: Sequence[str], *, split: bool = False) -> list[tuple[str, str]]:
    """(name, value) of each NAME=VALUE. Raises InputError for another form or a name twice."""
    words = [word for text in texts for word in (text.split(",") if split else [text])]
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip()
        if not name.isidentifier() or not equals or not value.strip():
            raise InputError(f"{flag} {word!r} is not allowed; NAME=VALUE")
        if name in found:
            raise InputError(f"{flag} {word!r} is not allowed; {name} is given twice")
        found[name] = value.strip()
    return list(found.items())


def _size(axis: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InputError(f"--shape {axis}={text} is not allowed; a whole number from 1")
    return int(text)


def _value(text: str) -> Any:
    """A JSON value; a bare word is text, and True, False and None are Python's."""
    python = {"True": True, "False": False, "None": None}
    if text in python:
        return python[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
