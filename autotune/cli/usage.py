"""Errors of the command line in one line of ours: what, which value, what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from typer.exceptions import TyperException

from autotune.errors import UnknownNameError

CHOICE = re.compile(r"('.*') is not one of ('.*')\.?$")
ALLOWED = (
    (re.compile(r"Input should be a valid integer\b.*"), "a whole number"),
    (re.compile(r"Input should be a valid number\b.*"), "a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"at least \1"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"at most \1"),
    (re.compile(r"Input should be greater than (\S+)"), r"above \1"),
    (re.compile(r"Input should be less than (\S+)"), r"below \1"),
)
"""Pydantic's words for a number, and ours."""


def line(error: TyperException, words: Sequence[str]) -> str:
    """What is wrong with the command line `words`, with the nearest name that is allowed."""
    if hasattr(error, "possibilities"):  # an option that does not exist
        command = error.ctx.command  # type: ignore[attr-defined]
        known = [o for p in command.params for o in (*p.opts, *p.secondary_opts) if o[:1] == "-"]
        whose = f"{command.name} option" if command.name in words else "option"
        return str(UnknownNameError(whose, error.option_name, {*known, "--help"}))  # type: ignore[attr-defined]
    if hasattr(error, "option_name") and error.message.endswith("requires an argument."):
        return f"{error.option_name} needs a value"
    param: Any = getattr(error, "param", None)
    said = error.message.removeprefix("Value error, ").rstrip(".")
    if param is None or not said:  # as for a missing argument
        return error.format_message()
    name = next((o for o in param.opts if o.startswith("--")), param.name)
    if choice := CHOICE.match(said):
        value = choice[1][1:-1]
        return f"{name} {value!r} is not allowed; {_choices(value, choice[2])}"
    for pattern, ours in ALLOWED:
        said = pattern.sub(ours, said)
    value = _value(param.opts, words)
    return error.format_message() if value is None else f"{name} {value!r} is not allowed; {said}"


def _choices(value: str, listed: str) -> str:
    known = re.findall(r"'([^']*)'", listed)
    near = difflib.get_close_matches(value.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}(allowed: {', '.join(known)})" if hint else f"one of {', '.join(known)}"


def _value(options: Sequence[str], words: Sequence[str]) -> str | None:
    """What the command line gives one of `options`, which Typer leaves out for numbers."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else "".join(words[i + 1 : i + 2])
    return None
