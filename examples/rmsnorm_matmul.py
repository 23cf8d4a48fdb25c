"""A kernel of one's own for autotune: RMSNorm fused into the matmul that follows it.

    out = (x / sqrt(mean(x², last axis) + eps) · weight) @ w        x [m, k], w [k, n]

Each grid step reads whole rows of x, normalises them, and multiplies them with a block of columns
of w; what a block of rows gives normalised is kept for the other columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.kernels.base import Kernel, Tunable

EPS = 1e-6


def kernel(x_ref, weight_ref, w_ref, o_ref, normed_ref):
    """x [bm, k], weight [1, k], w [k, bn] -> o [bm, bn]; normed [bm, k] lives across columns."""

    @pl.when(pl.program_id(1) == 0)
    def normalise():
        x = x_ref[...].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
        normed_ref[...] = (x * scale * weight_ref[...].astype(jnp.float32)).astype(normed_ref.dtype)

    product = jnp.dot(normed_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = product.astype(o_ref.dtype)


def rmsnorm_matmul(x, weight, w, *, block_m, block_n):
    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel,
        name="rmsnorm_matmul",
        grid=(m // block_m, n // block_n),
        in_specs=[
            pl.BlockSpec((block_m, k), lambda i, j: (i, 0)),
            pl.BlockSpec((1, k), lambda i, j: (0, 0)),
            pl.BlockSpec((k, block_n), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((block_m, k), x.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(x, weight.reshape(1, k), w)


# What autotune has to be told. All else it reads from the call.


def build(problem, config):
    m, k, n = (problem.shape[axis] for axis in ("m", "k", "n"))
    shapes = (m, k), (k,), (k, n)
    call = functools.partial(rmsnorm_matmul, **config)
    return call, tuple(jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes)


def block(size, tile):
    def refused(value):
        good = value % tile == 0 and size % value == 0
        return None if good else f"a multiple of {tile} that divides {size}"

    return Tunable(values=tuple(b for b in (128, 256, 512, 1024) if not refused(b)), check=refused)


def tunables(problem, device):
    return {"block_m": block(problem.shape["m"], 8), "block_n": block(problem.shape["n"], 128)}


def inputs(problem, key):
    """Rows of x of sizes from 1/4 to 4: those of standard normals all have a mean square near 1,
    and a kernel that forgot to normalise them would pass."""
    m, k, n = (problem.shape[axis] for axis in ("m", "k", "n"))
    shapes, keys = ((m, k), (k,), (k, n)), jax.random.split(key, 4)
    x, weight, w = (jax.random.normal(*each) for each in zip(keys, shapes, strict=False))
    size = jnp.exp2(jax.random.uniform(keys[3], (m, 1), minval=-2, maxval=2))
    return tuple(a.astype(problem.dtype) for a in (x * size, weight, w))


def reference(problem, x, weight, w):
    x, weight, w = (a.astype(jnp.float32) for a in (x, weight, w))
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
    return jnp.dot(x * scale * weight, w, precision="highest")


KERNEL = Kernel(
    name="rmsnorm_matmul",
    axes=("m", "k", "n"),
    build=build,
    tunables=tunables,
    flops=lambda problem: 2 * problem.shape["m"] * problem.shape["k"] * problem.shape["n"],
    flop_convention="2·m·k·n: the matmul alone",
    default=lambda problem, device: {"block_m": 128, "block_n": 128},
    inputs=inputs,
    reference=reference,
)
