"""What JAX's own attention kernels are given: a scale, seeded normals, ids of packed documents."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from autotune.kernels.base import Option

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def sm_scale() -> Option:
    """The functions' `sm_scale`, a factor on q·k; 1.0 as there, though most callers give one."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ValueError("a finite number above 0")
        return float(value)

    return Option(default=1.0, parse=parse)


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
