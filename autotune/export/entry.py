"""What is exported: the best row of a board, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.leaderboard import Board
from autotune.report.units import milliseconds
from autotune.row import Row
from autotune.stored import candidate_of, statement_of


class CannotExpressError(Exception):
    """Why a target has no form for a config; ends as one of `Export.refused`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The best config of one problem.

    Attributes:
      shape, options, dtype: the problem, options as stored (filled in, nulls left out).
    """

    row: Row
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    dtype: str
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """`attention (jax.splash) on v6e`, as messages name it."""
        row = self.row
        return f"{row.problem_name or row.problem_key} ({row.kernel}) on {row.device}"

    @property
    def comment(self) -> str:
        """One line: what was tuned, on what evidence, in which time, by which compiler."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.shape.items())
        options = " ".join(f"{k}={json.dumps(v)}" for k, v in self.options.items())
        row = self.row
        time = milliseconds(row.latency_ms) if row.latency_ms else "?"
        made = f"jax {row.jax_version}, libtpu {row.libtpu_version}"
        problem = " ".join(filter(None, (sizes, self.dtype, options)))
        return f"{self.name}: {problem}: {time} {row.evidence}, {made}"

    def block(self, name: str, axis: str | None = None) -> int:
        """A block size of the config; one that must divide `axis` where that is given.

        Raises CannotExpressError for a null, or a block that does not divide.
        """
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CannotExpressError(f"its {name} is {json.dumps(value)}, not a block size")
        if axis is not None and self.shape[axis] % value:
            raise CannotExpressError(
                f"its {name} {value} does not divide {axis} {self.shape[axis]}, as it must there"
            )
        return value

    def must_be(self, name: str, *values: Any, why: str) -> None:
        """Raises CannotExpressError where the config has another value, which would be lost."""
        if name in self.config and self.config[name] not in values:
            raise CannotExpressError(f"its {name} is {json.dumps(self.config[name])}; {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What a target makes of the configs.

    Attributes:
      files: name -> text. Most targets make one.
      refused: one sentence a config that the target cannot express.
    """

    files: Mapping[str, str]
    refused: tuple[str, ...] = ()


def entries(boards: Iterable[Board]) -> list[Entry]:
    """The best config of each board that has one."""
    found = []
    for row in (board.best for board in boards):
        if row is not None:
            stated = statement_of(row)
            entry = Entry(
                row=row,
                shape=stated.shape,
                options=stated.options,
                dtype=stated.dtype,
                config=candidate_of(row).config,
            )
            found.append(entry)
    return found
