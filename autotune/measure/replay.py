"""Measurements recorded elsewhere, answered as if they were taken now; labelled `replay`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import AutotuneError, InputError, shown
from autotune.measure.record import Measured
from autotune.problem import Problem
from autotune.search import space

COLUMNS = ("kernel", "device", "problem", "config", "latency_ms")
Samples = dict[Candidate, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One row of the file; `where` is its line or row."""

    kernel: str
    device: str
    problem: dict[str, Any]
    config: dict[str, Any]
    samples_ms: tuple[float, ...]
    where: str


class Replay:
    """A recording as a `Measurer`. Several rows of one configuration are its samples.

    Attributes:
      path: the CSV or Parquet file.
      source: what stands for it in names of studies: its content, wherever the file lies.
    """

    def __init__(self, path: Path) -> None:
        """Reads the whole file. Raises InputError naming the file and the line."""
        self.path = path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"--replay {path} cannot be read: {error.strerror}") from None
        self.source = f"replay {hashlib.sha256(content).hexdigest()[:16]}"
        records = _parquet(path) if content.startswith(b"PAR1") else _csv(path, content)
        self._entries = [e for where, record in records if (e := _entry(path, where, record))]
        self._known: dict[str, Samples] = {}
        self._made: dict[str, Problem | None] = {}

    def problems(self) -> list[Problem]:
        """The recorded problems of kernels known here, each once, in the file's order."""
        found = [self._problem(entry) for entry in self._entries]
        return list({p.key: p for p in found if p is not None}.values())

    @property
    def held(self) -> str:
        """What the file has rows of, in words."""
        kinds = sorted({f"{entry.kernel} on {entry.device}" for entry in self._entries})
        more = f" and {len(kinds) - 6} more" if len(kinds) > 6 else ""
        return (", ".join(kinds[:6]) + more) or "nothing"

    def check_answers(self, problems: Sequence[Problem]) -> None:
        """Raises InputError, naming what the file has, where no row of it answers to any problem:
        a sweep would time nothing, which nobody who gives a recording means."""
        if any(self.samples(problem) for problem in problems):
            return
        recorded = self.problems()
        if same := [p for p in recorded if p in problems]:
            raise InputError(
                f"--replay {self.path}: its rows of {same[0].label} are of configs that are not "
                "legal there; nothing could be timed"
            )
        labels = [f"{p.label} on {p.device}" for p in recorded]
        more = f" and {len(labels) - 6} more" if len(labels) > 6 else ""
        has = "; ".join(labels[:6]) + more if labels else self.held
        raise InputError(
            f"--replay {self.path}: no row is of a problem of the configs; it has {has}"
        )

    def samples(self, problem: Problem) -> Samples:
        """Each recorded candidate of the problem that is legal here, with its times in ms."""
        if problem.key not in self._known:
            found: dict[Candidate, tuple[float, ...]] = {}
            for entry in self._entries:
                if (entry.kernel, entry.device) != (problem.kernel, problem.device):
                    continue
                same = self._problem(entry) == problem
                candidate = space.recorded(problem, entry.config) if same else None
                if candidate is not None:
                    found[candidate] = found.get(candidate, ()) + entry.samples_ms
            self._known[problem.key] = found
        return self._known[problem.key]

    def _problem(self, entry: _Entry) -> Problem | None:
        """Made once for all entries of the same text."""
        text = json.dumps([entry.kernel, entry.device, entry.problem], sort_keys=True)
        if text not in self._made:
            self._made[text] = _problem(entry)
        return self._made[text]

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """The recorded times of each candidate, which must be among `samples`."""
        samples = self.samples(problem)
        for candidate in candidates:
            yield (
                candidate,
                Measured(
                    status="ok",
                    samples_ms=samples[candidate],
                    timer="replay",
                    scope="recorded",
                    checked="not checked: recorded elsewhere",
                ),
            )

    def close(self) -> None:
        """Nothing is held."""


def _problem(entry: _Entry) -> Problem | None:
    """An entry's problem, options filled in; None for what is none here."""
    from autotune.kernels import base

    given = entry.problem
    try:
        return base.make_problem(
            base.load(entry.kernel),
            device=entry.device,
            shape=given.get("shape", {}),
            options=given.get("options", {}),
            dtype=given.get("dtype", "bfloat16"),
        )
    except AutotuneError:
        return None


def _csv(path: Path, content: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        _check_columns(path, reader.fieldnames or ())
        for record in reader:
            yield f"line {reader.line_num}", record
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--replay {path}: neither CSV nor Parquet ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        first = (str(error).splitlines() or [""])[0]
        raise InputError(f"--replay {path}: not a readable Parquet file ({first})") from None
    _check_columns(path, table.column_names)
    wanted = (*COLUMNS, "evidence", "status", "samples_ms")
    records = table.select([n for n in wanted if n in table.column_names]).to_pylist()
    for number, record in enumerate(records, start=1):
        yield f"row {number}", record


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if missing := [name for name in COLUMNS if name not in names]:
        raise InputError(
            f"--replay {path}: lacks {', '.join(missing)}; its columns must be {', '.join(COLUMNS)}"
        )


def _entry(path: Path, where: str, record: Mapping[str, Any]) -> _Entry | None:
    """A row as an entry; None for a leaderboard's row that was not measured or has no time."""
    if record.get("evidence", "measured") != "measured" or record.get("status", "ok") != "ok":
        return None
    place = f"--replay {path}, {where}"
    samples = record.get("samples_ms")
    times = samples if isinstance(samples, list) and samples else [record["latency_ms"]]
    return _Entry(
        kernel=str(record["kernel"]),
        device=str(record["device"]),
        problem=_stated(place, record["problem"]),
        config=_mapping(place, "config", record["config"]),
        samples_ms=tuple(_milliseconds(place, time) for time in times),
        where=where,
    )


def _stated(place: str, text: Any) -> dict[str, Any]:
    """The problem of a row, which may still be none of a kernel known here."""
    problem = {k: v for k, v in _mapping(place, "problem", text).items() if v is not None}
    kinds = {"shape": dict, "options": dict, "dtype": str}
    for name, kind in kinds.items():
        if not isinstance(problem.get(name, kind()), kind):
            allowed = "a text" if kind is str else "a JSON object"
            raise InputError(
                f"{place}: problem.{name} {shown(problem[name])} is not allowed; {allowed}"
            )
    return problem


def _mapping(place: str, name: str, text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{place}: {name} {shown(text)} is not allowed; a JSON object")
    return value


def _milliseconds(place: str, value: Any) -> float:
    """A number; one that is no time (0, inf, missing) fails its candidate, not the sweep."""
    if value is None or value == "":
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(
            f"{place}: latency_ms {shown(value)} is not allowed; a number of milliseconds"
        ) from None
