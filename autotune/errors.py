"""The exception tree. Every error a user can cause is an `AutotuneError`.

AutotuneError
├── InputError           bad usage or bad input: exit status 2
│   ├── UnknownNameError     a kernel, device, option … that does not exist
│   └── DamagedFileError     a stored file that cannot be read
├── NoTpuError           a TPU was asked for and none is attached: exit status 2
│   └── DeviceBusyError      there is one, and another process has it
├── NoCompilerError      libtpu was asked for and is not installed: exit status 2
├── NoResultError        no stored leaderboard answers: exit status 4
└── KernelError          a kernel broke its contract: one clear line, never a traceback
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable


class AutotuneError(Exception):
    """Anything autotune reports in one line; `exit_status` is the process's."""

    exit_status = 2


class InputError(AutotuneError):
    """Bad input. Says what, which value, and what is allowed.

    Attributes:
      path: where in the input, e.g. `("shape", "m")`; `config.py` turns it into a line number.
      file: the stored file or folder that is at fault, with which the message begins.
    """

    def __init__(
        self, message: str, *, path: tuple[str | int, ...] = (), file: object = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.file = None if file is None else str(file)


class UnknownNameError(InputError):
    """A name that does not exist; the message lists the known ones and the nearest."""

    def __init__(
        self, what: str, name: str, known: Iterable[str], *, path: tuple[str | int, ...] = ()
    ) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(known) or "none"
        super().__init__(f"unknown {what} {name!r}{hint} (known: {listed})", path=path)


class DamagedFileError(InputError):
    """A stored file (Parquet, cache entry) that exists and cannot be read."""


class NoTpuError(AutotuneError):
    """Measuring was asked for on a machine with no TPU attached."""


class DeviceBusyError(NoTpuError):
    """Another process has this machine's TPU. Its lock is that process's to remove."""


class NoCompilerError(AutotuneError):
    """Compiling was asked for where libtpu is not installed."""


class NoResultError(AutotuneError, LookupError):
    """No stored leaderboard has what was asked for; the message says what there is instead."""

    exit_status = 4


class KernelError(AutotuneError):
    """A kernel's function raised or returned something outside the contract."""


def shown(value: object) -> str:
    """`value` as an error message quotes it: YAML's spelling of it, cut to 60 characters."""
    text = (
        repr(value)
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=repr)
    )
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """`text`, such as a file's name, on one line and without what a terminal would obey."""
    if text.isprintable():
        return text
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words) or ascii(text)
