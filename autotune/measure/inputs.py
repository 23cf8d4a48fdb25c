"""What candidates are run on: drawn on the device, never constant, never more than fits."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.candidate import Candidate
from autotune.errors import KernelError
from autotune.problem import Problem

if TYPE_CHECKING:
    from autotune.kernels.base import Kernel

SETS = 4
"""Sets of inputs that runs take in turn, where HBM holds them: none stays in a cache."""
GIB = 2**30


class UnfitError(Exception):
    """Inputs that no time may be taken on."""


def check_seed(seed: int, candidate: Candidate) -> int:
    """The seed of a candidate's own inputs: what another run left in memory is wrong for it."""
    return zlib.crc32(f"{seed} {candidate.json}".encode())


def total_bytes(arrays: Sequence[Any]) -> int:
    """Bytes of arrays or of `jax.ShapeDtypeStruct`s."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def preflight(arguments: Sequence[Any], outputs: Sequence[Any], hbm_bytes: int) -> str | None:
    """Why one run does not fit into HBM; None where it does. Asked before anything is made."""
    needed = total_bytes(arguments) + total_bytes(outputs)
    if needed <= hbm_bytes:
        return None
    return (
        f"HBM: inputs and output need {needed / GIB:.2f} GiB, the device has "
        f"{hbm_bytes / GIB:.2f} GiB"
    )


def sets_that_fit(arguments: Sequence[Any], outputs: Sequence[Any], hbm_bytes: int) -> int:
    """How many sets of inputs there may be: half the HBM that one run leaves is for more."""
    own = max(1, total_bytes(arguments))
    left = hbm_bytes - own - total_bytes(outputs)
    return max(1, min(SETS, 1 + left // (2 * own)))


def draw(kernel: Kernel, problem: Problem, arguments: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """The kernel's inputs for `seed`, made on the default device by one jitted call.

    One call, so that no wider copy of an array exists beside it. A generator that JAX cannot trace
    (one of NumPy's) is called as it is.

    Raises:
      KernelError: the generator raised, or made other arrays than the candidate takes.
      UnfitError: an array is constant: zeros and ones run faster than data, and pass through broken
        kernels unchanged.
    """
    import jax
    from jax import numpy as jnp

    from autotune.kernels import base

    def standard_normals(key: Any) -> tuple[Any, ...]:
        keys = jax.random.split(key, len(arguments))
        drawn = zip(keys, arguments, strict=True)
        return tuple(jax.random.normal(k, a.shape, jnp.float32).astype(a.dtype) for k, a in drawn)

    def generate(key: Any) -> tuple[Any, ...]:
        made = standard_normals(key) if kernel.inputs is None else kernel.inputs(problem, key)
        return tuple(made)

    def call() -> tuple[Any, ...]:
        key = jax.random.key(seed)
        try:
            return tuple(jax.jit(generate)(key))
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
            return tuple(jnp.asarray(array) for array in generate(key))

    arrays: tuple[Any, ...] = base.ask(kernel, "inputs", call)
    wanted = [(tuple(a.shape), str(a.dtype)) for a in arguments]
    made = [(tuple(a.shape), str(a.dtype)) for a in arrays]
    if made != wanted:
        raise KernelError(f"kernel {kernel.name}: inputs are {made}, its call takes {wanted}")
    if reason := constant(arrays, problem.dtype):
        raise UnfitError(reason)
    return arrays


def constant(arrays: Sequence[Any], dtype: str) -> str | None:
    """Which array has one value throughout; None where none has.

    Arrays of whole numbers other than `dtype` may (segment ids): they choose, and are not computed
    with. So may those of less than a sixteenth of the largest one (scales, residuals).
    """
    import jax
    from jax import numpy as jnp

    @jax.jit
    def ends(array: Any) -> tuple[Any, Any]:
        wide = array.astype(jnp.float32)
        return wide.min(), wide.max()

    large = max((array.size for array in arrays), default=0) / 16
    for number, array in enumerate(arrays):
        computed = jnp.issubdtype(array.dtype, jnp.floating) or str(array.dtype) == dtype
        if not computed or array.size < 2:
            continue
        low, high = (float(end) for end in ends(array))
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"input {number} is not finite throughout"
        if low == high and array.size >= large:
            return f"input {number} is {low:g} throughout; times are taken on drawn values only"
    return None
