"""What attention kernels are checked and timed on: normals whose logits a soft cap bends."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from autotune.kernels.attention import AttentionShape
from autotune.problem import Problem


def logit_gain(soft_cap: float | None, spread: float, *, most: float = 8.0) -> float:
    """What q of standard normals is multiplied by, at least 1, so that a soft cap bends the logits.

    `spread` is the logits' standard deviation without it, `most` the largest wanted. An eighth of
    the cap: the largest logits of a row, some 3 to 5 of that, lose 5 to 11 % to tanh, and a kernel
    that forgot the cap is far off. Beyond 8 a softmax is its one largest logit, and a row's maximum
    leaves the range in which `anchored_softmax` need not rescale.
    """
    return 1.0 if soft_cap is None else max(1.0, min(soft_cap / 8, most) / spread)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "gain"))
def draw_qkv(
    key: jax.Array, *, shape: AttentionShape, dtype: Any, gain: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [b, hq, lq, d], k [b, hkv, lkv, d], v [b, hkv, lkv, dv]: standard normals, q times gain."""
    keys, kv = jax.random.split(key, 3), (shape.batch, shape.kv_heads, shape.kv_len)
    q = (shape.batch, shape.q_heads, shape.q_len, shape.head_dim_qk)
    return (
        (jax.random.normal(keys[0], q) * gain).astype(dtype),
        jax.random.normal(keys[1], (*kv, shape.head_dim_qk)).astype(dtype),
        jax.random.normal(keys[2], (*kv, shape.head_dim_v)).astype(dtype),
    )


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v of a problem with the options `scale` and `logit_soft_cap`: standard normals, q
    times `logit_gain`."""
    shape, dtype = AttentionShape.of(problem), jnp.dtype(problem.dtype)
    return draw_qkv(key, shape=shape, dtype=dtype, gain=gain_of(problem))  # type: ignore[no-any-return]


def gain_of(problem: Problem) -> float:
    """`logit_gain` of a problem with the options `scale` and `logit_soft_cap`."""
    shape, options = AttentionShape.of(problem), problem.options
    spread = shape.scale(options["scale"]) * shape.head_dim_qk**0.5
    return logit_gain(options["logit_soft_cap"], spread)
