"""The Typer application and what its commands share; nothing heavy is imported before its use."""

from __future__ import annotations

import enum
import errno
import io
import os
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from autotune import whole_file
from autotune.cli import usage
from autotune.errors import AutotuneError, InputError, UnknownNameError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autotune.leaderboard import Board
    from autotune.progress import Progress

INTERRUPTED = 130
CLOSED_PIPE = 141
"""Of a program that wrote to a closed pipe, as in `git log | head`: 128 + SIGPIPE."""
IN_ORDER = (
    "sweep", "report", "explain", "gate", "best", "export", "calibrate", "kernels", "devices",
)  # fmt: skip
"""Of `--help`: the order in which a user comes to need them."""


class _Closed(io.TextIOBase):
    """Stands for a stdout that was closed before the start, which Python leaves None."""

    def write(self, text: str) -> int:
        raise OSError("stdout is closed")


class _OneLineErrors(TyperGroup):
    """Every error a user can cause is one line on stderr and the exit status of its kind."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            raise UnknownNameError("command", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=IN_ORDER.index)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **more: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        sys.stdout = sys.stdout or _Closed()
        if isinstance(sys.stdout, io.TextIOWrapper):  # a charset without arrows is no failure
            sys.stdout.reconfigure(errors="replace")
        try:
            _check_said(words)
            status = super().main(words, prog_name, standalone_mode=False, **more)
            sys.stdout.flush()  # what is buffered: its errors are this command's too
        except TyperException as error:
            _complain(usage.line(error, words))
            status = error.exit_code
        except AutotuneError as error:
            _complain(str(error))
            status = error.exit_status
        except OSError as error:  # a closed pipe, or a full disk, behind stdout
            status = _unwritable(error)
        except SystemExit as end:  # Typer's own answer to a closed pipe
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            status = _unwritable(end.__context__)
        if status == INTERRUPTED:  # Typer's own answer to Ctrl-C
            _complain("interrupted; the same command goes on from here")
        if standalone_mode:
            sys.exit(status or 0)
        return status


def _check_said(words: Sequence[str]) -> None:
    """Raises InputError for an empty word, such as of a shell's variable that is not set: as a path
    it would be the current folder."""
    for before, word in zip(["autotune", *words], words, strict=False):
        if not word or (word[:2] == "--" and word[-1:] == "=" and word.count("=") == 1):
            raise InputError(f"{word or before} '' is not allowed; leave it out, or say what")


def _unwritable(error: OSError) -> int:
    """The status after an error of writing to stdout, which takes no more from here on."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC):  # of something else
        _complain(str(error))
        return AutotuneError.exit_status
    with suppress(OSError, ValueError):  # a stdout that is no file, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    _complain(str(error))
    return AutotuneError.exit_status


def _complain(text: str) -> None:
    if text:
        print(f"autotune: {printable(' '.join(text.split()))}", file=sys.stderr)


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


Results = Annotated[Path, typer.Option("--results", help="Where leaderboards are kept.")]
Boards = Annotated[Path, typer.Argument(help="A results directory or one leaderboard file.")]
OnlyProblem = Annotated[
    str | None,
    typer.Option(
        "--problem",
        help="Only the problem of this name or key; those whose name, kernel "
        "or key has it, where there is none.",
    ),
]
OnlyDevice = Annotated[
    str | None, typer.Option("--device", help="Only those tuned for this device.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", help="Worker processes; one per core, at most 6, unless given.", min=1),
]
Timeout = Annotated[
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


def positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"{option} {value:g} is not allowed; a number above 0")


def device_called(text: str | None) -> str | None:
    """The device's own name; JAX's name for its kind will do too. Raises InputError for no
    device's."""
    from autotune import device as devices

    return None if text is None else (devices.of_kind(text) or devices.get(text)).name


def progress_bars() -> AbstractContextManager[Progress]:
    from autotune.progress import Bars, Quiet

    return Bars() if sys.stderr.isatty() else nullcontext(Quiet())


def stored(results: Path) -> list[Board]:
    from autotune import leaderboard

    found = list(leaderboard.boards(results))
    damaged = [f for f in found if isinstance(f, AutotuneError)]
    if damaged and results.is_file():
        raise damaged[0]
    for error in damaged:
        _complain(f"skipped {error}")
    return [f for f in found if not isinstance(f, AutotuneError)]


@contextmanager
def opened(output: Path | None) -> Iterator[IO[str]]:
    """What `--output` names, stdout where it names nothing.

    A file is written whole once all is said, or stays as it was; a pipe or a device takes it as it
    comes.

    Raises InputError where it cannot be written, or is a leaderboard.
    """
    if output is None:
        yield sys.stdout
        return
    with _naming(output):
        file = _stream(output) or _replacement(output)
    with file:
        yield file
        if not isinstance(file, io.StringIO):
            return
        content = file.getvalue().encode()
    with _naming(output):
        whole_file.write(output.resolve(), content)  # of a link, what it leads to
    if sys.stderr.isatty():
        _complain(f"wrote {output}")


@contextmanager
def _naming(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"--output {output} cannot be written: {error.strerror}") from None


def _stream(output: Path) -> IO[str] | None:
    """What takes text as it comes; None for a file, or where none is yet."""
    folder = output.parent.resolve()
    ours = folder == Path("/dev") or folder.is_relative_to("/proc")  # stdout may be a file
    if output.exists() and (ours or not output.is_file()):
        return output.open("a", encoding="utf-8")
    return None


def _replacement(output: Path) -> IO[str]:
    """Where text is collected; `output` itself where nothing can be put beside it.

    Raises OSError as opening `output` for writing would, InputError for a leaderboard.
    """
    folder = output.resolve().parent
    os.listdir(folder)
    exists, beside = output.exists(), os.access(folder, os.W_OK)
    if not os.access(output if exists else folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if exists:
        with output.open("rb") as file:
            if file.read(4) == b"PAR1":
                raise InputError(f"--output {output} is not allowed; that is a leaderboard")
    return io.StringIO() if beside else output.open("w", encoding="utf-8")
