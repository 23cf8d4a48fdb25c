"""What attention kernels are checked and timed on: normals whose logits a soft cap bends."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from autotune.kernels.attention import AttentionShape
from autotune.problem import Problem

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def logit_gain(soft_cap: float | None, spread: float, *, most: float = 8.0) -> float:
    """What q of standard normals is multiplied by, at least 1, so that a soft cap bends the logits.

    `spread` is the logits' standard deviation without it, `most` the largest wanted. An eighth of
    the cap: the largest logits of a row, some 3 to 5 of that, lose 5 to 11 % to tanh, and a kernel
    that forgot the cap is far off. Beyond 8 a softmax is its one largest logit, and a row's maximum
    leaves the range in which `anchored_softmax` need not rescale.
    """
    return 1.0 if soft_cap is None else max(1.0, min(soft_cap / 8, most) / spread)


def gain_of(problem: Problem) -> float:
    """`logit_gain` of a problem with the options `scale` and `logit_soft_cap`."""
    shape, options = AttentionShape.of(problem), problem.options
    spread = shape.scale(options["scale"]) * shape.head_dim_qk**0.5
    return logit_gain(options["logit_soft_cap"], spread)


def draw(
    key: jax.Array, *, arrays: Shapes, ids: Shapes = (), scale: float = 1.0
) -> tuple[jax.Array, ...]:
    """Standard normals for `arrays`, the first one (q) times `scale`; then ids, if any, int32.

    `ids` are [batch, q_len] and [batch, kv_len]: packed documents of about 1/8 of the keys. Query i
    has the id of key i, or of the last key, so that under a causal mask it sees a key: itself.
    """
    return _draw(key, arrays=arrays, ids=ids, scale=scale)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnames=("arrays", "ids", "scale"))
def _draw(key: jax.Array, *, arrays: Shapes, ids: Shapes, scale: float) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, len(arrays) + 1)
    drawn = [jax.random.normal(k, a.shape, jnp.float32) for k, a in zip(keys, arrays, strict=False)]
    drawn[0] = drawn[0] * scale
    made = tuple(x.astype(a.dtype) for x, a in zip(drawn, arrays, strict=True))
    if not ids:
        return made
    (_, q_len), (batch, kv_len) = (a.shape for a in ids)
    starts = jax.random.bernoulli(keys[-1], min(1.0, 8 / kv_len), (batch, kv_len))
    kv_ids = jnp.cumsum(starts, axis=1).astype(jnp.int32)
    return *made, kv_ids[:, jnp.minimum(jnp.arange(q_len), kv_len - 1)], kv_ids
