"""A problem: a kernel, its shape, options and dtype, on a device; with its canonical key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import KernelError

MAX_AXIS = 2**31


class Entries(dict[str, Any]):
    """A dict whose missing entries say, in one line, what there is.

    A kernel that asks for an axis or option it does not declare is at fault, not the user.
    """

    def __init__(self, what: str, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._what = what

    def __missing__(self, name: str) -> Any:
        there = ", ".join(map(str, self)) or "nothing"
        raise KernelError(f"the problem's {self._what} has no {name!r}, only {there}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Entries, (self._what, dict(self))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is tuned. Made by `kernels.base.make_problem`, which checks it.

    Attributes:
      kernel: registry name, or `package.module:ATTRIBUTE`.
      device: name of one JAX device kind (`device.DEVICES`).
      shape: axis name -> size.
      options: option name -> JSON value, kernel defaults filled in.
      dtype: operand dtype name.
      name: the user's label; no part of the identity.
      defaults: names of the options that are at the kernel's default. They do not
        enter the key, so a release that adds an option keeps stored keys valid.
    """

    kernel: str
    device: str
    shape: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    name: str | None = field(default=None, compare=False)
    defaults: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("shape", "options"):
            object.__setattr__(self, name, Entries(name, getattr(self, name)))

    @property
    def json(self) -> str:
        """The leaderboard's `problem` column: shape, options (nulls left out), dtype."""
        options = {k: v for k, v in self.options.items() if v is not None}
        return _canonical({"shape": dict(self.shape), "options": options, "dtype": self.dtype})

    @property
    def key(self) -> str:
        """Canonical key: equal problems have equal keys on every machine; safe as a file name."""
        options = {k: v for k, v in self.options.items() if k not in self.defaults}
        identity = {
            "kernel": self.kernel,
            "device": self.device,
            "shape": dict(self.shape),
            "options": options,
            "dtype": self.dtype,
        }
        digest = hashlib.sha256(_canonical(identity).encode()).hexdigest()[:12]
        axes = "-".join(f"{axis}{size}" for axis, size in sorted(self.shape.items()))
        return f"{axes}-{self.dtype}-{digest}"[-200:]

    @property
    def label(self) -> str:
        """What tables show: the user's name, else kernel and shape."""
        return self.name or f"{self.kernel} " + " ".join(f"{a}={n}" for a, n in self.shape.items())

    def __hash__(self) -> int:
        return hash(self.key)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(", ", ": "), allow_nan=False)
