"""A candidate: one point of a kernel's space, a frozen mapping of scalars."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass

Scalar = int | float | str | bool | None
Config = Mapping[str, Scalar]


def _plain(name: str, value: object) -> Scalar:
    """`value` as a plain Python scalar (numpy integers included), or TypeError."""
    if value is None or isinstance(value, bool | str | float):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"config entry {name}={value!r} is not a scalar") from None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """Tunable values in name order. Two candidates are equal when their `json` is.

    `is_default` marks the block sizes a user would have without tuning; it is
    not part of the identity.
    """

    items: tuple[tuple[str, Scalar], ...]
    is_default: bool = False

    @classmethod
    def of(cls, config: Config, *, is_default: bool = False) -> Candidate:
        """The candidate of a mapping. Raises TypeError for a value that is no scalar."""
        items = tuple(sorted((k, _plain(k, v)) for k, v in config.items()))
        return cls(items=items, is_default=is_default)

    @property
    def config(self) -> dict[str, Scalar]:
        return dict(self.items)

    @property
    def json(self) -> str:
        """Canonical JSON text: sorted keys; tells True from 1 and 128 from "128"."""
        return json.dumps(self.config, sort_keys=True)

    def __eq__(self, other: object) -> bool:
        # Python's True == 1 would make two candidates of one.
        return self.json == other.json if isinstance(other, Candidate) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.json)
