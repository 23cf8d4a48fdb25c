"""Typer commands: parse, call, print, exit status. Nothing heavy is imported before it is used."""

from __future__ import annotations

import enum
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from autotune.errors import AutotuneError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autotune.leaderboard import Board
    from autotune.progress import Progress

INTERRUPTED = 130


class _OneLineErrors(TyperGroup):
    """Every error a user can cause is one line on stderr and the exit status of its kind."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **more: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            status = super().main(words, prog_name, standalone_mode=False, **more)
        except TyperException as error:
            _complain(_usage_text(error, words))
            status = error.exit_code
        except AutotuneError as error:
            _complain(str(error))
            status = error.exit_status
        except OSError as error:  # a full disk behind stdout; a closed pipe is Typer's own
            _complain(str(error))
            status = AutotuneError.exit_status
        if status == INTERRUPTED:  # Typer's own answer to Ctrl-C
            _complain("interrupted; the same command goes on from here")
        if standalone_mode:
            sys.exit(status or 0)
        return status


def _complain(text: str) -> None:
    if text:
        print(f"autotune: {' '.join(text.split())}", file=sys.stderr)


def _usage_text(error: TyperException, words: Sequence[str]) -> str:
    """The error of the command line, with the value that Typer leaves out for numbers."""
    options = getattr(getattr(error, "param", None), "opts", [])
    for option in options:
        for i, word in enumerate(words):
            value = word.partition("=")[2] if "=" in word else "".join(words[i + 1 : i + 2])
            if word.partition("=")[0] == option:
                allowed = error.message.removeprefix("Value error, ").rstrip(".")
                return f"{option} {value!r} is not allowed; {allowed}"
    return error.format_message()


app = typer.Typer(
    cls=_OneLineErrors,
    name="autotune",
    help="Find the best block sizes of Pallas TPU kernels, mostly without a TPU.",
    epilog="Example: autotune sweep configs/dsv3.yaml && autotune report",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Until(enum.StrEnum):
    model = "model"
    compile = "compile"
    measure = "measure"


class Format(enum.StrEnum):
    table = "table"
    markdown = "markdown"
    json = "json"
    csv = "csv"


class GateFormat(enum.StrEnum):
    table = "table"
    json = "json"


_Results = Annotated[Path, typer.Option("--results", help="Where leaderboards are kept.")]
_Jobs = Annotated[
    int | None,
    typer.Option("--jobs", help="Worker processes; one per core, at most 6, unless given.", min=1),
]
_Timeout = Annotated[
    float, typer.Option("--timeout", help="Seconds one candidate may take to trace and compile.")
]


def _version(value: bool) -> None:
    if value:
        from autotune import versions

        print(" ".join(f"{k} {v or 'none'}" for k, v in reversed(versions.installed().items())))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", callback=_version)
    ] = False,
) -> None:
    return


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
    jobs: _Jobs = None,
    timeout: _Timeout = 300.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    results: _Results = Path("results"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ignore cached evidence and stored leaderboards.")
    ] = False,
) -> None:
    """Run the pipeline on every problem of CONFIG and write a leaderboard for each.

    Exit status: 0; 1 when a problem has no surviving candidate; 2 for bad input.
    """
    from autotune import config as configs
    from autotune import sweep as pipeline

    _positive("--trials", trials)
    _positive("--seconds", seconds)
    _positive("--timeout", timeout)
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
    with _progress() as progress:
        boards = pipeline.run(loaded, plan, progress)
    _write(boards, Format.table, top=3, output=None)
    if any(board.best is None for board in boards):
        raise typer.Exit(1)


@app.command(epilog="Example: autotune report results --format markdown --top 5")
def report(
    results: Annotated[
        Path, typer.Argument(help="A results directory or one leaderboard file.")
    ] = Path("results"),
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.table,
    problem: Annotated[
        str | None, typer.Option(help="Only problems whose name, kernel or key contains this.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="Ranked rows to show; json and csv show all.", min=1)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
) -> None:
    """Print the leaderboards: rank, blocks, latency and its evidence, MFU, VMEM, gain.

    Exit status: 0; 2 for bad input.
    """
    boards = [b for b in _stored(results) if problem is None or _matches(b, problem)]
    if not boards:
        about = f" matching --problem {problem!r}" if problem else ""
        raise InputError(f"no leaderboard{about} in {results}; `autotune sweep CONFIG` makes them")
    _write(boards, format, top=top, output=output)


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
    jobs: _Jobs = None,
    timeout: _Timeout = 300.0,
    format: Annotated[GateFormat, typer.Option("--format", help="Output format.")] = (
        GateFormat.table
    ),
) -> None:
    """Re-evaluate the stored best configs with today's kernel, jax and libtpu.

    Exit status: 0 pass; 1 a regression; 3 inconclusive or nothing to compare; 2 for bad input.
    """
    from autotune import gate as gates

    _positive("--timeout", timeout)
    with _progress() as progress:
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


@app.command(epilog="Example: autotune kernels")
def kernels() -> None:
    """List the kernels: their shape entries, options and dtypes."""
    from autotune.kernels import base

    for name in base.REGISTRY:
        kernel = base.load(name)
        print(f"{name}\n  shape    {', '.join(kernel.axes)}")
        print(f"  options  {', '.join(kernel.options) or 'none'}")
        print(f"  dtypes   {', '.join(kernel.dtypes)}\n  FLOPs    {kernel.flop_convention}")


@app.command(epilog="Example: autotune devices")
def devices() -> None:
    """List the devices: peaks per JAX device, VMEM per core, overheads and their sources."""
    from autotune.device import DEVICES, MIB

    for d in DEVICES.values():
        peaks = ", ".join(f"{k} {v / 1e12:.0f}" for k, v in d.peak_ops_per_s.items())
        print(f"{d.name}  ({d.kind!r}, {d.cores} TensorCore{'s' * (d.cores > 1)} a JAX device)")
        print(f"  peak TFLOP/s  {peaks}\n  HBM           {d.hbm_bytes / 1e9:.1f} GB, ", end="")
        print(
            f"{d.hbm_bytes_per_s / 1e9:.0f} GB/s\n  VMEM          {d.vmem_bytes // MIB} MiB, ",
            end="",
        )
        print(f"{d.scoped_vmem_bytes // MIB} MiB unless raised")
        print(f"  grid step     {d.step_overhead_s * 1e6:.1f} µs ({d.overhead_source})")


def main() -> None:
    """Entry point of the `autotune` command."""
    app()


def _positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"{option} {value:g} is not allowed; a number above 0")


def _progress() -> AbstractContextManager[Progress]:
    from autotune.progress import Bars, Quiet

    return Bars() if sys.stderr.isatty() else nullcontext(Quiet())


def _stored(results: Path) -> list[Board]:
    from autotune import leaderboard

    found = list(leaderboard.boards(results))
    damaged = [f for f in found if isinstance(f, AutotuneError)]
    if damaged and results.is_file():
        raise damaged[0]
    for error in damaged:
        print(f"autotune: skipped {error}", file=sys.stderr)
    return [f for f in found if not isinstance(f, AutotuneError)]


def _matches(board: Board, text: str) -> bool:
    first = board.rows[0]
    return any(
        text in (field or "") for field in (first.problem_name, first.kernel, board.path.stem)
    )


def _write(
    boards: Sequence[Board], format: Format, *, top: int | None, output: Path | None
) -> None:
    from autotune.report import document, table

    with _opened(output) as file:
        if format is Format.json:
            document.write_json(boards, top=top, file=file)
        elif format is Format.csv:
            document.write_csv(boards, top=top, file=file)
        elif format is Format.markdown:
            table.write_markdown(boards, top=top or 5, file=file)
        else:
            table.write_terminal(boards, top=top or 5, file=file)


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {output} cannot be written: {error.strerror}") from None
    with file:
        yield file
