"""`jax.matmul`: JAX's example matmul, `jax.experimental.pallas.ops.tpu.matmul.matmul`.

Its argument `block_shape` is the tunables block_m and block_n; `block_k` is its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.jax_blocks import clamped
from autotune.kernels.options import choice
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
BLOCKS = {"block_m": "m", "block_k": "k", "block_n": "n"}
TILE = {"block_m": 8, "block_k": 128, "block_n": 128}
"""block_k is the last axis of x's window and the second last of y's: 128 suits both."""
SEARCHED = (256, 512, 1024, 2048)


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """Blocks that divide their axis, or all of it."""

    def one(name: str, size: int) -> Tunable:
        values = tuple(b for b in SEARCHED if size % b == 0) or (size,)
        return Tunable(values=values, check=functools.partial(_refusal, TILE[name], size))

    return {name: one(name, problem.shape[axis]) for name, axis in BLOCKS.items()}


def _refusal(tile: int, whole: int, value: Scalar) -> str | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if good and (value == whole or value % tile == 0):  # type: ignore[operator]
        return None
    return f"a positive multiple of {tile}, or the whole axis of {whole}"


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why the blocks cannot run: the function leaves out what no whole block covers."""
    for name, axis in BLOCKS.items():
        block, size = config[name], problem.shape[axis]
        assert isinstance(block, int)
        if size % block:
            return f"{name} {block} does not divide {axis} {size}"
    return None


def canonical(problem: Problem, config: Config) -> Config:
    """Blocks over the axis are the axis: with the block asked for, the grid would be empty."""
    return clamped(config, {name: problem.shape[axis] for name, axis in BLOCKS.items()})


def default(problem: Problem, device: Device) -> Config:
    """block_k 256, the function's own default; it has none for block_shape, for which 128 × 128
    stand, the blocks of the matmul in JAX's Pallas TPU guide. The whole axis where they do not
    divide it."""
    sizes = {"block_m": 128, "block_k": 256, "block_n": 128}
    shape = problem.shape
    return {n: sizes[n] if shape[a] % sizes[n] == 0 else shape[a] for n, a in BLOCKS.items()}


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract x [m, k] and y [k, n]."""
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    m, k, n = (problem.shape[axis] for axis in ("m", "k", "n"))
    dtype, out_dtype = jnp.dtype(problem.dtype), problem.options["out_dtype"]

    def run(x: Any, y: Any) -> Any:
        return matmul(
            x,
            y,
            block_shape=(config["block_m"], config["block_n"]),
            block_k=config["block_k"],
            out_dtype=jnp.dtype(out_dtype) if out_dtype else None,
        )

    return run, (abstract((m, k), dtype), abstract((k, n), dtype))


def reference(problem: Problem, x: Any, y: Any) -> Any:
    """x·y [m, n] in float64."""
    x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
    return x @ y


KERNEL = Kernel(
    name="jax.matmul",
    axes=("m", "k", "n"),
    build=build,
    tunables=tunables,
    flops=lambda problem: 2 * problem.shape["m"] * problem.shape["k"] * problem.shape["n"],
    flop_convention="2·m·k·n: x·y",
    options={"out_dtype": choice(None, "bfloat16", "float32")},
    illegal=illegal,
    canonical=canonical,
    default=default,
    reference=reference,
)
