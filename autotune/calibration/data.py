"""Measured rows in: a leaderboard's, a results directory's, or a CSV's. No jax import."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import leaderboard
from autotune.errors import AutotuneError, DamagedFileError, InputError, shown

COLUMNS = ("kernel", "device", "problem", "config", "latency_ms")
FIT, EVALUATE = "fit", "evaluate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured row, as it stands in its file.

    Attributes:
      problem, config: the leaderboard's JSON objects.
      part: `fit`, what constants may be fitted to, or `evaluate`.
      where: file and line, for messages.
    """

    kernel: str
    device: str
    problem: dict[str, Any]
    config: dict[str, Any]
    measured_ms: float
    part: str
    where: str

    @property
    def group(self) -> tuple[str, str, str]:
        """What is comparable: kernel, device and problem."""
        return self.kernel, self.device, json.dumps(self.problem, sort_keys=True)


def read(paths: Iterable[Path], part: str) -> list[Measured]:
    """Every measured row of the files, in order.

    Raises:
      InputError: a file that does not exist, is of neither form, or holds no measured row.
    """
    rows: list[Measured] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist; a leaderboard, a results directory or a CSV")
        found = list(_csv(path, part) if _is_text(path) else _boards(path, part))
        if not found:
            raise InputError(f"{path} holds no measured row")
        rows += found
    return rows


def _is_text(path: Path) -> bool:
    if path.is_dir():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) != b"PAR1"
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _boards(path: Path, part: str) -> Iterator[Measured]:
    for board in leaderboard.boards(path):
        if isinstance(board, AutotuneError):
            raise board
        for row in board.rows:
            if row.latency_measured_ms is not None and row.status == "ok":
                yield Measured(
                    kernel=row.kernel, device=row.device, problem=json.loads(row.problem),
                    config=json.loads(row.config), measured_ms=row.latency_measured_ms,
                    part=part, where=str(board.path),
                )  # fmt: skip


def _csv(path: Path, part: str) -> Iterator[Measured]:
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
        names = reader.fieldnames or ()
        if missing := [name for name in COLUMNS if name not in names]:
            raise DamagedFileError(
                f"{path}: lacks {', '.join(missing)}; a CSV's columns must be {', '.join(COLUMNS)}"
            )
        for record in reader:
            where = f"{path}:{reader.line_num}"
            yield Measured(
                kernel=_text(where, "kernel", record["kernel"]),
                device=_text(where, "device", record["device"]),
                problem=_object(where, "problem", record["problem"]),
                config=_object(where, "config", record["config"]),
                measured_ms=_milliseconds(where, record["latency_ms"]),
                part=part,
                where=where,
            )
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedFileError(f"{path}: neither CSV nor Parquet ({error})") from None


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DamagedFileError(f"{where}: {name} is missing")
    return value.strip()


def _object(where: str, name: str, text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{where}: {name} {shown(text)} is not allowed; a JSON object")
    return value


def _milliseconds(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise DamagedFileError(
            f"{where}: latency_ms {shown(value)} is not allowed; a number of milliseconds above 0"
        )
    return number
