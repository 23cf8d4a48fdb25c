"""JAX's splash attention as a kernel to tune: forward, or forward and backward with `grad`.

The call is the one its users write: `make_splash_mha` vmapped over the batch, on q, k and v in
[batch, heads, length, head_dim]. It scales nothing: q comes scaled. Layouts other than
HEAD_DIM_MINOR are transposed by XLA around the kernel, which is part of the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as jax_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks

from autotune.candidate import Config
from autotune.kernels import attention as at
from autotune.kernels import jax_splash_space as space
from autotune.kernels import reference as references
from autotune.kernels.attention import AttentionShape
from autotune.kernels.attention_inputs import draw, logit_gain
from autotune.kernels.base import Call, Kernel
from autotune.kernels.jax_masks import jax_mask
from autotune.kernels.masks import Mask
from autotune.kernels.top_left import rows_of
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct


@functools.lru_cache(maxsize=8)
def _jax_kernel(
    mask: Mask,
    heads: int,
    q_len: int,
    kv_len: int,
    block_sizes: Any,
    *,
    is_mqa: bool,
    save_residuals: bool,
    soft_cap: float | None,
) -> Any:
    """JAX's kernel with its mask tables: seconds of NumPy for 100,000 queries, so they are kept."""
    make = jax_splash.make_splash_mqa if is_mqa else jax_splash.make_splash_mha
    return make(
        jax_masks.MultiHeadMask([jax_mask(mask, q_len, kv_len)] * heads),
        block_sizes=block_sizes,
        save_residuals=save_residuals,
        attn_logits_soft_cap=soft_cap,
        head_shards=1,
        q_seq_shards=1,
    )


def _forward(problem: Problem, config: Config) -> Callable[..., Any]:
    """`(q, k, v, *ids) -> out`, or `(out, logsumexp)` with `save_residuals`."""
    shape, options = AttentionShape.of(problem), problem.options
    is_mqa = options["is_mqa"]
    kernel = _jax_kernel(
        space.mask_of(problem),
        shape.group if is_mqa else shape.q_heads,
        shape.q_len,
        shape.kv_len,
        space.block_sizes(problem, config),
        is_mqa=is_mqa,
        save_residuals=options["save_residuals"],
        soft_cap=options["attn_logits_soft_cap"],
    )

    def one(q: Any, k: Any, v: Any, *ids: Any) -> Any:  # of one batch element
        segments = jax_splash.SegmentIds(*ids) if ids else None
        if not is_mqa:
            return kernel(q, k, v, segment_ids=segments)
        grouped = q.reshape(shape.kv_heads, shape.group, *q.shape[1:])
        found = jax.vmap(lambda *qkv: kernel(*qkv, segment_ids=segments))(grouped, k, v)
        return jax.tree.map(lambda x: x.reshape(shape.q_heads, *x.shape[2:]), found)

    def forward(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        found = jax.vmap(one)(q, k, v, *ids)
        return (found[0], *found[1]) if options["save_residuals"] else found

    return forward


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract q, k, v, with `grad` the output's gradient, and segment ids.

    With `grad` it gives (out, dq, dk, dv). Raises ValueError for a config that JAX refuses.
    """
    options, forward = problem.options, _forward(problem, config)

    def splash_and_gradients(q: Any, k: Any, v: Any, do: Any, *ids: Any) -> Any:
        out, pull = jax.vjp(lambda *qkv: forward(*qkv, *ids), q, k, v)
        return out, *pull(do)

    def splash(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return forward(q, k, v, *ids)

    return (splash_and_gradients if options["grad"] else splash), _arguments(problem)


def _arguments(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape, options, dtype = AttentionShape.of(problem), problem.options, jnp.dtype(problem.dtype)
    queries, keys = (shape.batch, shape.q_heads, shape.q_len), (shape.batch, shape.kv_heads)
    arguments = [
        abstract((*queries, shape.head_dim_qk), dtype),
        abstract((*keys, shape.kv_len, shape.head_dim_qk), dtype),
        abstract((*keys, shape.kv_len, shape.head_dim_v), dtype),
    ]
    if options["grad"]:
        arguments.append(abstract((*queries, shape.head_dim_v), dtype))
    if options["segment_ids"]:
        arguments += [abstract((shape.batch, n), jnp.int32) for n in (shape.q_len, shape.kv_len)]
    return tuple(arguments)


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Standard normals, q scaled as users scale it, by 1/sqrt(head_dim), and times `logit_gain`.

    Segment ids are of packed documents of about 1/8 of the keys; query i has the id of key i, so
    that it sees itself.
    """
    arguments = _arguments(problem)
    count = 2 * problem.options["segment_ids"]
    arrays, ids = arguments[: len(arguments) - count], arguments[len(arguments) - count :]
    # Gradients are made from an output rounded to bf16: at 4 that error alone is all that is
    # allowed.
    most = 2.0 if problem.options["grad"] else 8.0
    gain = logit_gain(problem.options["attn_logits_soft_cap"], 1.0, most=most)
    return draw(key, arrays=arrays, ids=ids, scale=gain * problem.shape["head_dim_qk"] ** -0.5)


def reference(problem: Problem, q: Any, k: Any, v: Any, *more: Any) -> Any:
    """What `build`'s function gives, in float64 under the dense mask."""
    q, k, v = references.f64(q, k, v)
    shape, options = AttentionShape.of(problem), problem.options
    seen = rows_of(space.mask_of(problem), shape.q_len, shape.kv_len).dense()
    if options["segment_ids"]:
        q_ids, kv_ids = (np.asarray(i)[:, None] for i in more[-2:])
        seen = seen & (q_ids[..., :, None] == kv_ids[..., None, :])
    cap = options["attn_logits_soft_cap"]
    out, lse, _ = references.attention(q, k, v, scale=1.0, soft_cap=cap, mask=seen)
    if options["grad"]:
        gradients = references.attention_gradients(
            q, k, v, more[0], scale=1.0, soft_cap=cap, mask=seen
        )
        return out, *gradients
    return (out, lse) if options["save_residuals"] else out


KERNEL = Kernel(
    name="jax.splash",
    axes=at.AXES,
    axis_defaults=at.AXIS_DEFAULTS,
    build=build,
    tunables=space.tunables,
    flops=space.flops,
    flop_convention=(
        "2·(d + dv) per (query, key) pair the mask shows and q head: QKᵀ and PV; with grad also "
        "dq's QKᵀ, dO·Vᵀ, dS·K and dkv's QKᵀ, dO·Vᵀ, Pᵀ·dO, dSᵀ·Q, 2·(5d + 4dv) in all, though "
        "a fused backward makes QKᵀ and dO·Vᵀ once; pairs that segment ids hide are counted"
    ),
    options=space.options(),
    check=space.check,
    illegal=space.illegal,
    canonical=space.canonical,
    default=space.default,
    inputs=inputs,
    reference=reference,
)
