"""Float64 NumPy references of the kernels: the mathematical definitions, written plainly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autotune.kernels.attention import MASK_VALUE, AttentionShape
from autotune.problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]


def f64(*arrays: Any) -> list[Array]:
    """The arrays in float64.

    A reference does this first: tracers, by which its shapes are asked, end here, before a mask of
    [q_len, kv_len] is made for nothing (16 GiB at 131072).
    """
    return [np.asarray(array).astype(np.float64) for array in arrays]


def matmul(problem: Problem, x: Any, y: Any) -> Array:
    """epilogue(x · y) [m, n] in float64, of x [m, k] and y [k, n] or, transposed, [n, k]."""
    x, y = f64(x, y)
    return _epilogue(
        problem.options["epilogue"], x @ (y.T if problem.options["transpose_rhs"] else y)
    )


def _epilogue(name: str, z: Array) -> Array:
    if name == "relu":
        return np.maximum(z, 0.0)
    if name == "gelu":
        return 0.5 * z * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    if name == "silu":
        # 1 / (1 + exp(-z)) overflows for very negative z, where the product is 0.
        with np.errstate(over="ignore"):
            return z / (1.0 + np.exp(-z))
    return z


def causal_mask(q_len: int, kv_len: int) -> Array:
    """[q_len, kv_len] bools, bottom-right aligned: query i sees keys j <= i + kv_len - q_len."""
    return np.arange(kv_len)[None, :] <= np.arange(q_len)[:, None] + (kv_len - q_len)


def logits(
    q: Any, k: Any, *, scale: float, soft_cap: float | None = None, mask: Array | None = None
) -> Array:
    """Scaled, capped and masked logits [b, hq, lq, lkv]; MASK_VALUE where masked."""
    q, k = f64(q, k)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if soft_cap is not None:
        s = soft_cap * np.tanh(s / soft_cap)
    return s if mask is None else np.where(mask, s, MASK_VALUE)


def softmax(s: Array) -> tuple[Array, Array, Array]:
    """Probabilities, lse and max over the last axis; 0 and MASK_VALUE twice where all is masked."""
    top = s.max(axis=-1)
    live = top > MASK_VALUE
    p = np.exp(s - np.where(live, top, 0.0)[..., None]) * (s > MASK_VALUE)
    total = p.sum(axis=-1)
    safe = np.where(live, total, 1.0)
    return p / safe[..., None], np.where(live, top + np.log(safe), MASK_VALUE), top


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    soft_cap: float | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Output [b, hq, lq, dv], lse and max [b, hq, lq] of attention under `mask` [lq, lkv]."""
    p, lse, top = softmax(logits(q, k, scale=scale, soft_cap=soft_cap, mask=mask))
    (v,) = f64(v)
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    return np.einsum("bhqk,bhkd->bhqd", p, v), lse, top


def attention_gradients(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    scale: float,
    soft_cap: float | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """dq, dk, dv of `attention`, do the output's gradient: its derivative in closed form."""
    q, k, v, do = f64(q, k, v, do)
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    s = logits(q, k, scale=scale, soft_cap=soft_cap)
    p = softmax(s if mask is None else np.where(mask, s, MASK_VALUE))[0]
    dp = np.einsum("bhqd,bhkd->bhqk", do, np.repeat(v, group, axis=1))
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) * scale
    if soft_cap is not None:
        ds *= 1.0 - (s / soft_cap) ** 2
    dq = np.einsum("bhqk,bhkd->bhqd", ds, np.repeat(k, group, axis=1))
    dk = np.einsum("bhqk,bhqd->bhkd", ds, q)
    dv = np.einsum("bhqk,bhqd->bhkd", p, do)
    # A key head's gradient is the sum over the query heads it serves.
    return dq, *(g.reshape(len(g), heads, group, *g.shape[2:]).sum(axis=2) for g in (dk, dv))


def flash_fwd(problem: Problem, q: Any, k: Any, v: Any) -> Any:
    """The output, or (output, lse, max) with `residuals`."""
    q, k, v = f64(q, k, v)
    shape, options = AttentionShape.of(problem), problem.options
    mask = causal_mask(shape.q_len, shape.kv_len) if options["causal"] else None
    out, lse, top = attention(
        q,
        k,
        v,
        scale=shape.scale(options["scale"]),
        soft_cap=options["logit_soft_cap"],
        mask=mask,
    )
    return (out, lse, top) if options["residuals"] else out
