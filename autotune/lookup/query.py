"""What is asked of the stored results, and what of them answers: exactly, or nearest."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune import device as devices
from autotune.errors import InputError, shown
from autotune.kernels import masks
from autotune.lookup import names
from autotune.lookup.built_in import BUILT_IN, size_of
from autotune.lookup.library import Library, Stored
from autotune.problem import MAX_AXIS, Problem

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

    def checked(self, shelf: Library) -> Query:
        """This query with the kernel's name as it is stored, and a built-in one's options
        normalised as the kernel does it.

        Raises InputError for no kernel's name, and for an axis, an option, a value of one or a
        dtype that the kernel does not have.
        """
        kernel = names.kernel_called(self.kernel, shelf.axes)
        axes = shelf.axes.get(kernel, frozenset())
        if kernel not in BUILT_IN:
            names.check_axes(kernel, self.shape, axes)
            return replace(self, kernel=kernel)
        names.check_axes(kernel, self.shape, axes | set(BUILT_IN[kernel].axes))
        options = names.parsed(kernel, self.options)
        names.check_dtype(kernel, devices.get(self.device), self.dtype)
        return replace(self, options=options)

    @property
    def text(self) -> str:
        """As an error message names it."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.shape.items())
        options = " ".join(f"{k}={shown(v)}" for k, v in self.options.items())
        return " ".join(filter(None, (self.kernel, sizes, self.dtype, options, "on", self.device)))

    @property
    def place(self) -> tuple[str, str, str]:
        """Where in a library what answers it stands."""
        return self.kernel, self.device, self.dtype

    def beside(self, stored: Iterable[Stored]) -> Iterator[tuple[Mapping[str, int], Stored]]:
        """Those of `stored` that have the axes asked for, each with the full shape asked for: an
        axis left out is of the kernel's default size, else 1."""
        left_out = BUILT_IN[self.kernel].axis_defaults if self.kernel in BUILT_IN else {}
        full: dict[tuple[str, ...], dict[str, int]] = {}
        for each in stored:
            axes = tuple(each.shape)
            if axes not in full:
                full[axes] = {**dict.fromkeys(axes, 1), **left_out, **self.shape}
            if full[axes].keys() == each.shape.keys():
                yield full[axes], each

    def same_options(self, stored: Stored) -> bool:
        """Whether the options mean those of `stored`, which has them with defaults filled in."""
        facts = BUILT_IN.get(self.kernel)
        if facts is not None:
            return facts.filled_in(self.options) == facts.filled_in(stored.options)
        return self._makes_the_key_of(stored)

    def _makes_the_key_of(self, stored: Stored) -> bool:
        """`same_options` of a user's kernel, whose defaults only its import would tell.

        A row's key is over the options that are not at the default. So of the options given here,
        all of which must have the stored values, some subset must make that key: what the subset
        lacks is given at its default.
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


def distance(shape: Mapping[str, int], stored: Stored) -> float:
    """Euclidean distance of `stored` from a shape of the same axes, in powers of two."""
    there = stored.shape
    return math.hypot(
        *(math.log2(size / there[axis]) for axis, size in shape.items() if size != there[axis])
    )


def misfit(shape: Mapping[str, int], stored: Stored) -> str | None:
    """Why the config of `stored` may be illegal for a shape of the same axes; None where it is
    legal, by what `built_in.py` knows, or where the kernel is a user's and nothing is known.

    An axis of the stored size keeps its blocks.
    """
    facts = BUILT_IN.get(stored.row.kernel)
    if facts is None:
        return None
    for name, block in facts.blocks.items():
        value, size = stored.config.get(name), size_of(block.axis, shape)
        if size is None or not isinstance(value, int) or size == size_of(block.axis, stored.shape):
            continue
        if reason := block.misfit(name, value, size):
            return reason
    return facts.misfit(shape, stored.config, stored.row.device)


def _size(axis: str, size: Any) -> int:
    try:
        whole = operator.index(size)
    except TypeError:
        whole = 0
    if isinstance(size, bool) or not 1 <= whole <= MAX_AXIS:
        told = shown(size) if whole < 2**64 else f"a number of {whole.bit_length()} bits"
        raise InputError(f"shape.{axis}: {told} is not allowed; a whole number from 1 to 2^31")
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
