"""Is the output right: against an independent reference, within a tolerance that is stated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from autotune.kernels.base import Kernel

Array = np.ndarray[Any, np.dtype[Any]]

_F32 = 2.0**-24
_SENTINEL = 1e30
"""Beyond this a value is a marker (a masked row's lse), not a result."""
_F32_PRODUCT = {"HIGHEST": 0.0, "HIGH": 2.0**-16, "DEFAULT": 2.0**-8}
"""Roundoff of f32 operands on the MXU: split into three bf16 parts, two, or rounded to one."""

NO_REFERENCE = "the kernel has no reference: not checked"
NOT_INTERPRETABLE = "interpret mode cannot run this kernel: not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The verdict on one candidate's output.

    Attributes:
      status: `ok`, `wrong`, or what kept it from being checked (`failed`, `timeout`, `crashed`,
        `oom`, `unsupported`); `reason` for every status but `ok`.
      error: the largest error found (`error_of`); inf for a NaN or a wrong shape.
      tolerance: what was allowed; None where nothing was compared.
      how: in words: the size, and whether on a device or in interpret mode.
    """

    status: str
    reason: str | None = None
    error: float | None = None
    tolerance: float | None = None
    how: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: an infinite error is the text `inf`."""
        infinite = self.error is not None and not math.isfinite(self.error)
        return asdict(self) | ({"error": "inf"} if infinite else {})

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Checked:
        error = record.get("error")
        return cls(**{**record, "error": None if error is None else float(error)})


def uncheckable(kernel: Kernel) -> Checked | None:
    """The verdict on a kernel whose output interpret mode can say nothing of; None for others."""
    if kernel.reference is None:
        return Checked(status="ok", how=NO_REFERENCE)
    return None if kernel.interpretable else Checked(status="ok", how=NOT_INTERPRETABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What a program's arithmetic rounds to, as unit roundoffs (half the spacing at 1).

    `rounding`: the coarsest type any floating value is rounded to; `accumulating`: that of the
    matrix products' results. 0 for whole numbers, which are exact.
    """

    rounding: float
    accumulating: float


def tolerance(precision: Precision, contraction: float) -> float:
    """The error allowed where products of `contraction` terms are summed.

    8 roundoffs of the coarsest type: values rounded at random leave a largest error of some 5 of
    them (5 standard deviations of 1/√3 roundoff, twice, and the output's own). 32 · (1 + √K) of the
    accumulator's: a random walk of K roundings, with room for another order of summation and
    transcendental functions a few roundoffs off. Never above a tenth, but for output types so
    coarse that rounding alone is more.

    Measured, this package's kernels in interpret mode: bf16 0.003 (matmul) to 0.008 (attention)
    of 0.031 allowed; f32 1e-6 to 6e-6 of 2e-5 to 2e-4.
    """
    wanted = 8 * precision.rounding
    wanted += 32 * precision.accumulating * (1 + math.sqrt(max(0.0, contraction)))
    return min(wanted, max(0.1, 1.25 * precision.rounding))


def error_of(got: Array, want: Array) -> float:
    """Largest |got - want| / (|want| + scale); inf for a NaN, or another shape.

    The scale is the root mean square of `want` over its last axis, or over all of it where that is
    more: rounding is relative to the terms of a sum, which a result near 0 does not show. A NaN
    never equals anything; an infinity or a marker (above 1e30) must be met as such.
    """
    if got.shape != want.shape:
        return math.inf
    if not got.size:
        return 0.0
    marked = ~(np.abs(want) < _SENTINEL)
    if marked.any():
        met = np.isclose(got, want, rtol=1e-3, atol=0.0)  # NaN is close to nothing
        if not met[marked].all() or (np.abs(got[~marked]) >= _SENTINEL).any():
            return math.inf
        got, want = np.where(marked, 0.0, got), np.where(marked, 0.0, want)
    square = want * want
    overall = math.sqrt(square.mean())
    scale = np.maximum(np.sqrt(square.mean(axis=-1, keepdims=True)), overall)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(got - want) / (np.abs(want) + scale)
    error = np.where(got == want, 0.0, error)  # 0 against 0
    largest = float(error.max())
    return largest if math.isfinite(largest) else math.inf


def judge(got: Sequence[Any], want: Sequence[Any], allowed: float, *, how: str) -> Checked:
    """The verdict on the outputs of a program, each against its reference."""
    if len(got) != len(want):
        reason = f"{len(got)} outputs, the reference has {len(want)}"
        return Checked(status="wrong", reason=reason, error=math.inf, tolerance=allowed, how=how)
    wanted = [_f64(array) for array in want]
    if any(np.isnan(array).any() for array in wanted):
        return Checked(status="failed", reason="the reference gives NaN", how=how)
    errors = [error_of(_f64(one), other) for one, other in zip(got, wanted, strict=True)]
    largest = max(errors, default=0.0)
    if largest <= allowed:
        return Checked(status="ok", error=largest, tolerance=allowed, how=how)
    worst = errors.index(largest)
    if got[worst].shape != wanted[worst].shape:
        said = f"has shape {got[worst].shape}, the reference {wanted[worst].shape}"
    elif math.isinf(largest):
        said = "is not finite where the reference is, or the other way round"
    else:
        said = f"is off by {largest:.3g}, {allowed:.3g} is allowed"
    reason = f"{f'output {worst}' if len(errors) > 1 else 'the output'} {said} ({how})"
    return Checked(status="wrong", reason=reason, error=largest, tolerance=allowed, how=how)


def _f64(array: Any) -> Array:
    return np.asarray(array).astype(np.float64)


_MOVES = frozenset({
    "get", "swap", "load", "masked_load", "masked_swap", "broadcast_in_dim", "reshape", "squeeze",
    "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "gather", "concatenate", "pad",
    "iota", "copy", "select_n", "rev", "bitcast_convert_type", "pvary", "split", "expand_dims",
})  # fmt: skip
"""Primitives that move values and round nothing."""


def precision_of(jaxpr: Any) -> Precision:
    """What the traced program rounds to. Operands are exact, whatever their type.

    Sums outside matrix products are taken to be in f32. An f32 product that asks for no more than
    one pass is one of bf16 operands on a TPU.
    """
    rounding = _output_roundoff(jaxpr)
    accumulating = min(rounding, _F32)
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        if name in _MOVES or any(True for _ in _inner(eqn)):
            continue
        own = max((_roundoff(var.aval) for var in eqn.outvars), default=0.0)
        if name == "convert_element_type":
            own = own if own > _roundoff(eqn.invars[0].aval) else 0.0
        if name == "dot_general":
            accumulating = max(accumulating, own)
            own = max(own, _operand_roundoff(eqn))
        rounding = max(rounding, own)
    return Precision(rounding=rounding, accumulating=accumulating)


def _operand_roundoff(eqn: Any) -> float:
    widths = {str(getattr(atom.aval, "dtype", "")) for atom in eqn.invars[:2]}
    precision = eqn.params.get("precision") or ()
    named = {getattr(p, "name", str(p)) for p in precision if p is not None}
    passes = next((name for name in ("HIGHEST", "HIGH") if name in named), "DEFAULT")
    return _F32_PRODUCT[passes] if "float32" in widths else 0.0


def _output_roundoff(jaxpr: Any) -> float:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return max((_roundoff(var.aval) for var in inner.outvars), default=0.0)


def _roundoff(aval: Any) -> float:
    """Unit roundoff of a value's type; 0 for whole numbers and what has no type."""
    from jax import numpy as jnp

    finfo: Any = jnp.finfo
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return float(finfo(dtype).eps) / 2


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in _inner(eqn):
            yield from _equations(inner)


def _inner(eqn: Any) -> Iterator[Any]:
    from autotune.traced.jaxprs import inner_jaxprs

    yield from inner_jaxprs(eqn)
