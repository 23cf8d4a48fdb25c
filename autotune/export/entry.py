"""What is exported: the best row of a board, and what became of it."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autotune.errors import shown
from autotune.leaderboard import Board
from autotune.report.units import milliseconds
from autotune.row import Row
from autotune.stored import candidate_of, statement_of

WIDTH = 88
"""Of a line of comment, as of Python that is formatted the usual way."""


T = TypeVar("T")


class CannotExpressError(Exception):
    """Why a target has no form for a config; ends as one of `Export.refused`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The best config of one problem.

    Attributes:
      shape, options, dtype: the problem, options as stored (filled in, nulls left out).
      apart: what tells it from others of its name, in messages; nothing where there is none.
    """

    row: Row
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    dtype: str
    config: Mapping[str, Any]
    apart: str = ""

    @property
    def name(self) -> str:
        """`attention (jax.splash) on v6e`."""
        row = self.row
        return f"{row.problem_name or row.problem_key} ({row.kernel}) on {row.device}"

    @property
    def told(self) -> str:
        """The name as messages have it."""
        return f"{self.name} [{self.apart}]" if self.apart else self.name

    @property
    def sizes(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.shape.items())

    @property
    def problem(self) -> str:
        options = " ".join(f"{k}={json.dumps(v)}" for k, v in self.options.items())
        return " ".join(filter(None, (self.sizes, self.dtype, options)))

    @property
    def comments(self) -> list[str]:
        """Lines of `#` comments: what was tuned, in which time, on what evidence, by which
        compiler; and the problem."""
        row = self.row
        time = milliseconds(row.latency_ms) if row.latency_ms else "?"
        made = f"{time} {row.evidence}, jax {row.jax_version}, libtpu {row.libtpu_version}"
        return [*_wrapped(f"{self.name}: {made}", "# "), *_wrapped(self.problem, "#   ")]

    def block(self, name: str, axis: str | None = None) -> int:
        """A block size of the config; one that must divide `axis` where that is given.

        Raises CannotExpressError for a null, or a block that does not divide.
        """
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CannotExpressError(f"its {name} is {shown(value)}, not a block size")
        if axis is not None and self.size(axis) % value:
            raise CannotExpressError(
                f"its {name} {value} does not divide {axis} {self.size(axis)}, as it must there"
            )
        return value

    def size(self, axis: str) -> int:
        """Raises CannotExpressError where the problem has no such axis."""
        if axis not in self.shape:
            raise CannotExpressError(f"its problem has no {axis}")
        return self.shape[axis]

    def one_of(self, name: str, values: Mapping[Any, T]) -> T:
        """What `values` has for a tunable. Raises CannotExpressError where it has nothing."""
        value = self.config.get(name)
        if value not in values:
            raise CannotExpressError(f"its {name} is {shown(value)}, which is unknown there")
        return values[value]

    def must_be(self, name: str, *values: Any, why: str) -> None:
        """Raises CannotExpressError where the config has another value, which would be lost."""
        if name in self.config and self.config[name] not in values:
            raise CannotExpressError(f"its {name} is {json.dumps(self.config[name])}; {why}")

    def has_only(self, names: Iterable[str], *, why: str) -> None:
        """Raises CannotExpressError for a tunable that has a value and is none of `names`: it would
        be lost."""
        for name in sorted(self.config.keys() - set(names)):
            self.must_be(name, None, why=why)

    def asks_only(self, names: Iterable[str], *, of: str) -> None:
        """Raises CannotExpressError for an option of the problem that is on and none of `names`:
        `of` cannot be asked that."""
        known = {*names, *(["out_dtype"] if self.options.get("out_dtype") == self.dtype else [])}
        for name, value in self.options.items():
            if name not in known and value is not None and value is not False:
                raise CannotExpressError(
                    f"its problem has {name}={json.dumps(value)}; {of} has not"
                )


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
    names = Counter(entry.name for entry in found)
    shapes = Counter((entry.name, entry.sizes) for entry in found)
    return [
        entry
        if names[entry.name] == 1
        else replace(
            entry, apart=entry.sizes if shapes[entry.name, entry.sizes] == 1 else entry.problem
        )
        for entry in found
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    """`text` over lines of at most `WIDTH`, broken at blanks only."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
