"""Which problem and which config the user means."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autotune import config as configs
from autotune import device as devices
from autotune import leaderboard, stored
from autotune.candidate import Candidate, Scalar
from autotune.errors import AutotuneError, InputError, UnknownNameError, shown
from autotune.kernels import base
from autotune.kernels.base import Kernel
from autotune.leaderboard import Board
from autotune.problem import Problem
from autotune.row import Row

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A problem, its kernel, the board it has in the results, if any, and where that would be."""

    problem: Problem
    kernel: Kernel
    board: Board | None
    place: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The candidate to explain, and in words where it comes from."""

    candidate: Candidate
    origin: str


def find(text: str, results: Path, *, device: str | None = None) -> Subject:
    """The problem that `text` names.

    `text` is a leaderboard file; a config file, with `:NAME` behind it where it has several
    problems; or a name, key or kernel of the boards in `results`. `device` picks among several.
    A user's kernel is named `package.module:ATTRIBUTE`, or as its folder under the results is.

    Raises:
      InputError: nothing or several things answer to `text`; the message lists them.
    """
    path, _, name = text.partition(":")
    if path.endswith((".yaml", ".yml")):
        return _from_config(Path(path), name, results, device)
    if path.endswith(".parquet"):
        return _from_board(leaderboard.read(Path(text)))
    return _from_results(text, results, device)


def _from_config(path: Path, name: str, results: Path, device: str | None) -> Subject:
    specs = configs.load(path, devices=[device] if device else None).problems
    named = [(s.problem, f"{s.problem.name or s.problem.key} ({s.problem.kernel} on "
              f"{s.problem.device})") for s in specs]  # fmt: skip
    found = [(p, label) for p, label in named if not name or name in (p.name, p.key, p.kernel)]
    what = f"problem {name!r} in {path}" if name else f"problem in {path}"
    problem = _only(found, name, what, named, devices_of=lambda p: p.device)
    kept = leaderboard.path_of(results, problem.device, problem.kernel, problem.key)
    board = leaderboard.read(kept) if kept.is_file() else None
    return Subject(problem=problem, kernel=base.load(problem.kernel), board=board, place=kept)


def _from_board(board: Board) -> Subject:
    kernel, problem = stored.problem_of(board.rows[0])
    return Subject(problem=problem, kernel=kernel, board=board, place=board.path)


def _from_results(text: str, results: Path, device: str | None) -> Subject:
    boards = [b for b in leaderboard.boards(results) if not isinstance(b, AutotuneError)]
    if device is not None:
        chip = devices.get(device).name
        boards = [b for b in boards if b.rows[0].device == chip]
    exact = [b for b in boards if text in (b.rows[0].problem_name, b.rows[0].problem_key)]
    found = exact or [b for b in boards if stored.names_kernel(text, b.rows[0].kernel)]
    # Several may share a name: their keys tell them apart.
    answering = [(b, b.rows[0].problem_key) for b in found]
    known = [(b, f"{b.title} ({b.rows[0].kernel} on {b.rows[0].device})") for b in boards]
    board = _only(
        answering, text, f"problem {text!r} in {results}", known,
        devices_of=lambda b: b.rows[0].device,
    )  # fmt: skip
    return _from_board(board)


LISTED = 3
"""Problems that a message names."""


def _only(
    found: Sequence[tuple[T, str]],
    name: str,
    what: str,
    known: Sequence[tuple[T, str]],
    *,
    devices_of: Callable[[T], str],
) -> T:
    """The one that is `found` for `name`; each has its label in messages.

    Raises InputError where there are several, saying what would leave one, or none."""
    if len(found) == 1:
        return found[0][0]
    if not found:
        labels = [label for _, label in known]
        near = difflib.get_close_matches(name, labels, max(1, len(labels)), 0.0)
        listed = _some(near) or "none; `autotune sweep CONFIG` makes leaderboards"
        raise InputError(f"{what}: none answers; name one (known: {listed})")
    chips = sorted({devices_of(one) for one, _ in found})
    narrowed = f"--device narrows it ({', '.join(chips)}); " if len(chips) > 1 else ""
    told = _some([label for _, label in found])
    raise InputError(f"{what}: several answer; {narrowed}name one (known: {told})")


def _some(labels: Sequence[str]) -> str:
    labels = list(dict.fromkeys(labels))
    more = [f"{len(labels) - LISTED} more"] if len(labels) > LISTED else []
    return ", ".join([*labels[:LISTED], *more])


def candidate(subject: Subject, text: str | None) -> Chosen:
    """The candidate that `text` names, and where it comes from.

    `best` is the board's winner; None too, or the kernel's default where there is none; `default`
    the kernel's; otherwise JSON or `name=value` pairs, comma or blank between, and the rest as for
    None.

    Raises:
      InputError: no such tunable, an illegal value, no stored best that was asked for, or no best
        and no default to start from.
    """
    if text == "default":
        return Chosen(candidate=_default(subject), origin="the kernel's default")
    if text is None:
        return _start(subject)
    if text == "best":
        if (best := _best(subject)) is None:
            raise InputError(
                f"config 'best': {_none_stored(subject)}; `autotune sweep` stores one, 'default' "
                "explains the kernel's own"
            )
        return best
    return _changed(subject, _parsed(text))


def _changed(subject: Subject, given: dict[str, Scalar]) -> Chosen:
    """`given`, and for tunables that it leaves out what explain starts from."""
    kernel, problem = subject.kernel, subject.problem
    device = devices.get(problem.device)
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    for name, value in given.items():
        if name not in tunables:
            raise UnknownNameError(f"tunable of {kernel.name}", name, tunables)
        if allowed := base.ask(kernel, "check", tunables[name].check, value):
            raise InputError(f"{name}: {shown(value)} is not allowed; {allowed}")
    config, origin = given, "as given"
    if tunables.keys() - given.keys():
        start = _start(subject)
        config = {**start.candidate.config, **given}
        origin = f"{', '.join(given)} as given, the rest {start.origin}" if given else start.origin
    config = base.ask(kernel, "canonical", kernel.canonical, problem, config)
    if reason := base.ask(kernel, "illegal", kernel.illegal, problem, config, device):
        raise InputError(f"config {json.dumps(config, sort_keys=True)} is not allowed; {reason}")
    return Chosen(candidate=Candidate.of(config), origin=origin)


def _start(subject: Subject) -> Chosen:
    """The best, else the default and why it is not the best."""
    if (best := _best(subject)) is not None:
        return best
    origin = f"the kernel's default: {_none_stored(subject)}"
    return Chosen(candidate=_default(subject), origin=origin)


def _best(subject: Subject) -> Chosen | None:
    best: Row | None = subject.board.best if subject.board else None
    if best is None:
        return None
    return Chosen(candidate=stored.candidate_of(best), origin="the stored best")


def _none_stored(subject: Subject) -> str:
    if subject.board is None:
        return f"no best is stored, {subject.place} does not exist"
    return f"no candidate of {subject.place} survived"


def _default(subject: Subject) -> Candidate:
    kernel, problem = subject.kernel, subject.problem
    if kernel.default is None:
        raise InputError(f"{kernel.name} states no default config; give CONFIG in full")
    config = base.ask(kernel, "default", kernel.default, problem, devices.get(problem.device))
    config = base.ask(kernel, "canonical", kernel.canonical, problem, config)
    return Candidate.of(config, is_default=True)


def _parsed(text: str) -> dict[str, Scalar]:
    if text.lstrip().startswith("{"):
        try:
            loaded = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"config {shown(text)} is no JSON: {error}") from None
        if not all(v is None or isinstance(v, int | float | str | bool) for v in loaded.values()):
            raise InputError(f"config {shown(text)} is not allowed; values are scalars")
        return dict(loaded)
    given: dict[str, Scalar] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(
                f"config {shown(text)} is not allowed; best, default, JSON, or name=value pairs"
            )
        try:
            given[name] = json.loads(value)
        except json.JSONDecodeError:
            given[name] = value
    return given
