"""Inputs and float64 references of `tokamax.splash`, in [batch, heads, length, head_dim]."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autotune.kernels import reference as references
from autotune.kernels.attention import MASK_VALUE, AttentionShape

ROWS = 1024
"""Queries whose logits are held at once while a backward pass's inputs are made."""

Array = np.ndarray[Any, np.dtype[Any]]


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap"))
def out_and_lse(
    q: Any, k: Any, v: Any, lo: Any, hi: Any, *, scale: float, soft_cap: float | None
) -> tuple[Any, Any]:
    """What a forward pass leaves a backward pass, in plain jnp: head by head, `ROWS` at once.

    lo, hi are int32[intervals, q_len]: the keys each query sees.
    """
    keys, group = jnp.arange(k.shape[2]), q.shape[1] // k.shape[1]
    rows = ROWS if q.shape[2] % ROWS == 0 else q.shape[2]

    def one_head(index: Any) -> tuple[Any, Any]:
        batch, head = index // q.shape[1], index % q.shape[1]
        kh, vh = (x[batch, head // group].astype(jnp.float32) for x in (k, v))

        def chunk(start: Any) -> tuple[Any, Any]:
            qh = lax.dynamic_slice_in_dim(q[batch, head], start, rows).astype(jnp.float32)
            s = (qh @ kh.T) * scale
            s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
            low, high = (lax.dynamic_slice_in_dim(x, start, rows, axis=1) for x in (lo, hi))
            seen = ((keys >= low[..., None]) & (keys < high[..., None])).any(axis=0)
            s = jnp.where(seen, s, MASK_VALUE)
            lse = jax.nn.logsumexp(s, axis=-1)
            return jnp.exp(s - lse[:, None]) @ vh, lse

        out, lse = lax.map(chunk, jnp.arange(0, q.shape[2], rows))
        return out.reshape(-1, v.shape[-1]), lse.reshape(-1)

    out, lse = lax.map(one_head, jnp.arange(q.shape[0] * q.shape[1]))
    return out.reshape(*q.shape[:3], -1).astype(q.dtype), lse.reshape(q.shape[:3])


def gradients(
    shape: AttentionShape, q: Any, k: Any, v: Any, dout: Any, *, scale: float,
    soft_cap: float | None, mask: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk, dv in float64: the derivative of `references.attention` in closed form."""
    q, k, v, dout = (np.asarray(x).astype(np.float64) for x in (q, k, v, dout))
    s = references.logits(q, k, scale=scale, soft_cap=soft_cap, mask=mask)
    p = references.softmax(s)[0]
    kx, vx = (np.repeat(x, shape.group, axis=1) for x in (k, v))
    dp = np.einsum("bhqd,bhkd->bhqk", dout, vx)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * scale
    if soft_cap is not None:
        ds = np.where(mask, ds * (1 - (s / soft_cap) ** 2), 0.0)
    dq = np.einsum("bhqk,bhkd->bhqd", ds, kx)
    dk, dv = np.einsum("bhqk,bhqd->bhkd", ds, q), np.einsum("bhqk,bhqd->bhkd", p, dout)
    grouped = (shape.batch, shape.kv_heads, shape.group, shape.kv_len, -1)
    return dq, dk.reshape(grouped).sum(axis=2), dv.reshape(grouped).sum(axis=2)
