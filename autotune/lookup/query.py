"""What is asked of the stored results, and what of them answers: exactly, or nearest."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune import device as devices
from autotune.errors import InputError, shown
from autotune.kernels import masks
from autotune.lookup import names
from autotune.lookup.library import Stored
from autotune.problem import Problem

_BLOCKS_OF_AXES = {"m": ("bm",), "k": ("bk",), "n": ("bn",)}
"""Tunables that are a block of an axis but not named `block_…`."""
_LARGEST = 2**63 - 1  # as in a leaderboard
_DTYPES = frozenset(name for chip in devices.DEVICES.values() for name in chip.matmul_dtypes)
"""Of the operands that some device multiplies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A problem as user code states it: options at their defaults and axes of size 1 may be left
    out, since the kernel, which knows its defaults, is not imported."""

    kernel: str
    device: str
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    dtype: str

    @classmethod
    def of(
        cls,
        kernel: str,
        shape: Mapping[str, Any],
        *,
        device: str,
        options: Mapping[str, Any] | None,
        dtype: str,
    ) -> Query:
        """The checked query. Raises InputError for a device, a dtype or a size that does not
        exist."""
        chip = devices.of_kind(device) or devices.get(device)
        for name, given in (("shape", shape), ("options", options or {})):
            if not isinstance(given, Mapping):
                raise InputError(f"{name}: {shown(given)} is not allowed; a mapping")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            allowed = ", ".join(sorted(_DTYPES))
            raise InputError(f"dtype: {shown(dtype)} is not allowed; {allowed}")
        return cls(
            kernel=kernel,
            device=chip.name,
            shape={axis: _size(axis, size) for axis, size in shape.items()},
            options={name: _plain(value) for name, value in (options or {}).items()},
            dtype=dtype,
        )

    def checked(self, stored: Sequence[Stored]) -> Query:
        """This query with the kernel's name as it is stored.

        Raises InputError for no kernel's name, or an axis or option that the kernel does not have.
        """
        kernel = names.kernel_called(self.kernel, stored)
        names.check_names(kernel, self.shape, self.options, stored)
        return self if kernel == self.kernel else replace(self, kernel=kernel)

    @property
    def text(self) -> str:
        """As an error message names it."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.shape.items())
        options = " ".join(f"{k}={shown(v)}" for k, v in self.options.items())
        return " ".join(filter(None, (self.kernel, sizes, self.dtype, options, "on", self.device)))

    def answers(self, stored: Stored) -> bool:
        """Whether `stored` is this very problem."""
        return (
            self.same_kernel(stored)
            and self.shape_beside(stored) == stored.shape
            and self.same_options(stored)
        )

    def same_kernel(self, stored: Stored) -> bool:
        mine = (self.kernel, self.device, self.dtype)
        return mine == (stored.row.kernel, stored.row.device, stored.dtype)

    def shape_beside(self, stored: Stored) -> dict[str, int] | None:
        """The full shape, axes left out being 1; None where the axes are not `stored`'s."""
        if not self.shape.keys() <= stored.shape.keys():
            return None
        return {axis: self.shape.get(axis, 1) for axis in stored.shape}

    def same_options(self, stored: Stored) -> bool:
        """Whether the options mean those of `stored`.

        A row stores its options with defaults filled in, and its key is over those that are not at
        the default. So of the options given here, all of which must have the stored values, some
        subset must make that key: what the subset lacks is given at its default.
        """
        spelled: dict[str, Any] = {}
        for name, value in self.options.items():
            there = stored.options.get(name)
            if not _equal(value, there):
                return False
            spelled[name] = there
        if {k: v for k, v in spelled.items() if v is not None} == stored.options:
            return True
        for count in range(len(spelled), -1, -1):
            for chosen in itertools.combinations(spelled, count):
                options = {name: spelled[name] for name in chosen}
                problem = Problem(
                    kernel=self.kernel,
                    device=self.device,
                    shape=stored.shape,
                    options=options,
                    dtype=self.dtype,
                )
                if problem.key == stored.row.problem_key:
                    return True
        return False

    def distance(self, stored: Stored) -> float | None:
        """Euclidean distance of the shapes in powers of two; None where the axes differ."""
        shape = self.shape_beside(stored)
        if shape is None:
            return None
        return math.hypot(
            *(math.log2(n) - math.log2(stored.shape[axis]) for axis, n in shape.items())
        )

    def misfit(self, stored: Stored) -> str | None:
        """Why the blocks of `stored` may be illegal for this shape; None where they divide it.

        A kernel's own rules need its import. Blocks that divide an axis are legal by the rules of
        every kernel here, and an axis of the stored size keeps its blocks.
        """
        shape = self.shape_beside(stored) or {}
        for name, value in stored.config.items():
            axis = _axis_of(name, shape)
            if axis is None or not isinstance(value, int) or shape[axis] == stored.shape[axis]:
                continue
            if shape[axis] % value:
                return f"its {name} {value} does not divide {axis} = {shape[axis]}"
        return None


def _axis_of(tunable: str, shape: Mapping[str, int]) -> str | None:
    """The axis that a tunable is a block of, by its name: `bm`, `block_q`, `block_kv_dkv` …"""
    for axis in shape:
        if tunable in _BLOCKS_OF_AXES.get(axis, ()):
            return axis
    words = tunable.split("_")
    if words[0] != "block" or len(words) < 2 or words[-1] in ("layout", "sizes"):
        return None
    stem = words[1]
    stem = {"k": "kv", "h": "heads"}.get(stem, stem)
    return next((a for a in shape if a in (stem, f"{stem}_len")), None)


def _size(axis: str, size: Any) -> int:
    try:
        whole = operator.index(size)
    except TypeError:
        whole = 0
    if isinstance(size, bool) or not 1 <= whole <= _LARGEST:
        told = shown(size) if whole <= _LARGEST else f"a number of {whole.bit_length()} bits"
        raise InputError(
            f"shape.{axis}: {told} is not allowed; a whole number from 1 to {_LARGEST}"
        )
    return whole


def _plain(value: Any) -> Any:
    """`value` as JSON has it. Raises InputError for what is no JSON value."""
    try:
        return json.loads(json.dumps(value, default=operator.index))
    except (TypeError, ValueError):
        raise InputError(f"option value {value!r} is not allowed; a JSON value") from None


def _equal(given: Any, stored: Any) -> bool:
    """Whether two option values are the same: 30 is 30.0, but 1 is not true; masks by meaning."""
    if isinstance(given, bool) or isinstance(stored, bool):
        return given is stored
    if given == stored:
        return True
    if isinstance(given, dict) and isinstance(stored, dict):
        try:
            return masks.parse(given) == masks.parse(stored)
        except ValueError:
            return False
    return False
