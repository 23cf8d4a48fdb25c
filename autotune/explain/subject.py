"""Which problem and which config the user means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A problem, its kernel, and the board it has in the results, if any."""

    problem: Problem
    kernel: Kernel
    board: Board | None


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
    found = [s.problem for s in specs if not name or name in _names(s.problem)]
    problem = _only(found, f"problem {name!r} in {path}" if name else f"problem in {path}",
                    {f"{p.name or p.key} ({p.kernel} on {p.device})": p for p in
                     (s.problem for s in specs)})  # fmt: skip
    kept = leaderboard.path_of(results, problem.device, problem.kernel, problem.key)
    board = leaderboard.read(kept) if kept.is_file() else None
    return Subject(problem=problem, kernel=base.load(problem.kernel), board=board)


def _from_board(board: Board) -> Subject:
    kernel, problem = stored.problem_of(board.rows[0])
    return Subject(problem=problem, kernel=kernel, board=board)


def _from_results(text: str, results: Path, device: str | None) -> Subject:
    boards = [b for b in leaderboard.boards(results) if not isinstance(b, AutotuneError)]
    if device is not None:
        devices.get(device)
        boards = [b for b in boards if b.rows[0].device == device]
    named = {f"{b.title} ({b.rows[0].kernel} on {b.rows[0].device})": b for b in boards}
    keyed = {
        f"{b.rows[0].problem_key} ({b.rows[0].kernel} on {b.rows[0].device})": b for b in boards
    }
    exact = [b for b in boards if text in (b.rows[0].problem_name, b.rows[0].problem_key)]
    found = exact or [b for b in boards if stored.names_kernel(text, b.rows[0].kernel)]
    if len(found) > 1:  # several may share a name: their keys tell them apart
        named = {key: board for key, board in keyed.items() if board in found}
    return _from_board(_only(found, f"problem {text!r} in {results}", named))


def _names(problem: Problem) -> tuple[str | None, ...]:
    return (problem.name, problem.key, problem.kernel)


def _only(found: list[Any], what: str, known: Mapping[str, Any]) -> Any:
    if len(found) == 1:
        return found[0]
    listed = ", ".join(known) or "none; `autotune sweep CONFIG` makes leaderboards"
    several = "several answer" if found else "none answers"
    raise InputError(f"{what}: {several}; name one (known: {listed})")


def candidate(subject: Subject, text: str | None) -> Candidate:
    """The candidate that `text` names.

    `best` (also None) is the board's winner, else the default; `default` the kernel's; otherwise
    JSON or `name=value` pairs, comma or blank between, and the rest as in the best.

    Raises:
      InputError: no such tunable, an illegal value, or no best and no default to start from.
    """
    kernel, problem = subject.kernel, subject.problem
    device = devices.get(problem.device)
    if text == "default":
        return _default(subject)
    start = _best(subject)
    if text is None or text == "best":
        return start
    given = _parsed(text)
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    for name, value in given.items():
        if name not in tunables:
            raise UnknownNameError(f"tunable of {kernel.name}", name, tunables)
        if allowed := base.ask(kernel, "check", tunables[name].check, value):
            raise InputError(f"{name}: {shown(value)} is not allowed; {allowed}")
    config = {**start.config, **given}
    config = base.ask(kernel, "canonical", kernel.canonical, problem, config)
    if reason := base.ask(kernel, "illegal", kernel.illegal, problem, config, device):
        raise InputError(f"config {json.dumps(config, sort_keys=True)} is not allowed; {reason}")
    return Candidate.of(config)


def _best(subject: Subject) -> Candidate:
    best: Row | None = subject.board.best if subject.board else None
    if best is None:
        return _default(subject)
    return stored.candidate_of(best)


def _default(subject: Subject) -> Candidate:
    kernel, problem = subject.kernel, subject.problem
    if kernel.default is None:
        raise InputError(
            f"{kernel.name} states no default config, and nothing is stored; give CONFIG in full"
        )
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
