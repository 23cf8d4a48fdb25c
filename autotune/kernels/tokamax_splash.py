"""`tokamax.splash`: Tokamax's splash attention on TPU, forward, backward, or both.

Called as `tokamax.dot_product_attention` calls it, which is what public measurements timed: arrays
are [batch, length, heads, head_dim], q is scaled and all are brought to [batch, heads, length,
head_dim] outside the kernel, and the batch is `vmap`ped. The option `operand_layout: bhtd` leaves
out the change of layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autotune.candidate import Config
from autotune.errors import InputError
from autotune.kernels import attention as at
from autotune.kernels import reference as references
from autotune.kernels import tokamax_masks, top_left
from autotune.kernels import tokamax_splash_data as data
from autotune.kernels import tokamax_splash_space as space
from autotune.kernels.attention import AttentionShape
from autotune.kernels.attention_inputs import draw, logit_gain
from autotune.kernels.base import Call, Kernel
from autotune.kernels.options import Option, attention_mask, choice, flag, number
from autotune.kernels.tokamax_splash_space import library
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
LAYOUTS = ("bthd", "bhtd")


def options() -> dict[str, Option]:
    """`pass` is null for the forward pass; `scale` null is 1/sqrt(head_dim_qk)."""
    return {
        "mask": attention_mask(),
        "residuals": flag(),
        "grad": flag(),
        "pass": choice(None, "backward"),
        "scale": number(positive=True),
        "attn_logits_soft_cap": number(positive=True),
        "max_logit_const": number(positive=False),
        "operand_layout": choice("bthd", *LAYOUTS),
    }


def check(problem: Problem) -> None:
    """Raises InputError for heads that do not group, a mask that hides a whole row, and options
    that exclude each other."""
    at.check_heads(problem)
    chosen = [n for n in ("residuals", "grad", "pass") if problem.options[n]]
    if len(chosen) > 1:
        raise InputError(
            f"{' and '.join(chosen)} exclude each other; at most one of residuals, grad and pass",
            path=("options", chosen[1]),
        )
    mask = space.mask_of(problem)
    top_left.check(problem, mask, "Tokamax's splash attention")
    tokamax_masks.check_dense(mask, problem.shape["q_len"], problem.shape["kv_len"])


def flops(problem: Problem) -> int:
    """FLOPs per visible pair and head, of the passes that run."""
    s = AttentionShape.of(problem)
    d, dv = s.head_dim_qk, s.head_dim_v
    forward = 2 * (d + dv) if space.has_forward(problem) else 0
    backward = 2 * (3 * d + 2 * dv) if space.has_backward(problem) else 0
    pairs = top_left.rows_of(space.mask_of(problem), s.q_len, s.kv_len).pairs
    return (forward + backward) * pairs * s.batch * s.q_heads


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract q, k, v, with `grad` also d out; `pass: backward` takes q, k, v, out,
    lse, d out. Raises ValueError for a config that Tokamax refuses."""
    s, opts = AttentionShape.of(problem), problem.options
    mask = tokamax_masks.tokamax_mask(space.mask_of(problem), s.q_len, s.kv_len)
    is_mqa = s.kv_heads == 1
    make = (
        library.make_splash_mqa_single_device if is_mqa else library.make_splash_mha_single_device
    )
    backward_alone = opts["pass"] == "backward"
    kernel = make(
        mask,
        config=space.splash_config(problem, config),
        save_residuals=opts["residuals"] or backward_alone,
    )
    swapped = opts["operand_layout"] == "bthd"
    scale = s.scale(opts["scale"])

    def inner(array: Any) -> Any:
        return jnp.swapaxes(array, 1, 2) if swapped else array

    def heads(k: Any) -> Any:
        return jnp.squeeze(k, axis=1) if is_mqa else k

    def forward(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (inner(x) for x in (q * scale, k, v))
        out = jax.vmap(kernel)(q, heads(k), heads(v))
        if not opts["residuals"]:
            return inner(out)
        return inner(out[0]), out[1]["logsumexp"], out[1]["max_logits"]

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(dout)

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        q, k, v, out, dout = (inner(x) for x in (q * scale, k, v, out, dout))
        dq, dk, dv = _backward(kernel, is_mqa, q, heads(k), heads(v), out, lse, dout)
        dk, dv = ((x[:, None] if is_mqa else x) for x in (dk, dv))
        return inner(dq) * scale, inner(dk), inner(dv)

    q, k, v, out, lse = _arguments(problem)
    if backward_alone:
        return backward, (q, k, v, out, lse, out)
    return (both, (q, k, v, out)) if opts["grad"] else (forward, (q, k, v))


def _backward(
    kernel: Any, is_mqa: bool, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any
) -> tuple[Any, Any, Any]:
    """dq, dk, dv of arrays [batch, heads, length, head_dim], lse [batch, heads, length] natural.

    The backward pass is no public function: this is how `tokamax.dot_product_attention` calls it.
    """
    own = kernel.kwargs
    if own["config"].use_base2_exp:
        lse = lse * library.LOG2E
    # Later releases take a key for dropout after the mask.
    takes_key = "prng_key" in inspect.signature(library._splash_attention_fwd).parameters
    more = (None,) if takes_key else ()

    def one(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        residuals = (q, k, v, None, None, out, lse, kernel.dkv_mask_info, *more)
        stats = {"logsumexp": None, "max_logits": None}
        return library._splash_attention_bwd(
            True, own["mask_value"], is_mqa, own["config"], own["mask_function"],
            own["fwd_mask_sparsity"], own["dkv_mask_sparsity"], residuals, (dout, stats),
        )[2:5]  # fmt: skip

    dq, dk, dv = jax.vmap(one)(q, k, v, out, lse, dout)
    return dq, dk, dv


def _arguments(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, out (d out is alike) and lse."""
    s, dtype = AttentionShape.of(problem), jnp.dtype(problem.dtype)
    swapped = problem.options["operand_layout"] == "bthd"

    def array(heads: int, length: int, head_dim: int) -> jax.ShapeDtypeStruct:
        middle = (length, heads) if swapped else (heads, length)
        return abstract((s.batch, *middle, head_dim), dtype)

    return (
        array(s.q_heads, s.q_len, s.head_dim_qk),
        array(s.kv_heads, s.kv_len, s.head_dim_qk),
        array(s.kv_heads, s.kv_len, s.head_dim_v),
        array(s.q_heads, s.q_len, s.head_dim_v),
        abstract((s.batch, s.q_heads, s.q_len), jnp.float32),
    )


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Standard normals, q times `logit_gain`; for `pass: backward` out and lse are what a forward
    pass leaves."""
    s, opts = AttentionShape.of(problem), problem.options
    scale = s.scale(opts["scale"])
    # q · scale is rounded to bf16, and gradients are made from a rounded output: at 4 these errors
    # alone are more than is allowed.
    most = 1.5 if space.has_backward(problem) else 2.5
    gain = logit_gain(opts["attn_logits_soft_cap"], scale * s.head_dim_qk**0.5, most=most)
    q, k, v, dout = draw(key, arrays=_arguments(problem)[:4], scale=gain)
    if not space.has_backward(problem):
        return q, k, v
    if opts["grad"]:
        return q, k, v, dout
    rows = top_left.rows_of(space.mask_of(problem), s.q_len, s.kv_len)
    lo, hi = (jnp.asarray(x, jnp.int32) for x in (rows.lo, rows.hi))
    ordered = (_heads_first(problem, x) for x in (q, k, v))
    out, lse = data.out_and_lse(
        *ordered, lo, hi, scale=scale, soft_cap=opts["attn_logits_soft_cap"]
    )
    return q, k, v, _heads_first(problem, out), lse, dout


def reference(problem: Problem, *arrays: Any) -> Any:
    """What `build`'s function returns, in float64 under the dense mask."""
    s, opts = AttentionShape.of(problem), problem.options
    q, k, v = (_heads_first(problem, np.asarray(x)) for x in arrays[:3])
    how: dict[str, Any] = {
        "scale": s.scale(opts["scale"]),
        "soft_cap": opts["attn_logits_soft_cap"],
        "mask": top_left.rows_of(space.mask_of(problem), s.q_len, s.kv_len).dense(),
    }
    found: tuple[Any, ...] = ()
    if space.has_forward(problem):
        out, lse, top = references.attention(q, k, v, **how)
        out = _heads_first(problem, out)
        if not space.has_backward(problem):
            return (out, lse, top) if opts["residuals"] else out
        found = (out,)
    dout = _heads_first(problem, np.asarray(arrays[-1]))
    grads = data.gradients(s, q, k, v, dout, **how)
    return (*found, *(_heads_first(problem, g) for g in grads))


def _heads_first(problem: Problem, array: Any) -> Any:
    """[batch, heads, length, head_dim] of an operand, or back: the exchange is its own inverse."""
    return array.swapaxes(1, 2) if problem.options["operand_layout"] == "bthd" else array


KERNEL = Kernel(
    name="tokamax.splash",
    axes=at.AXES,
    axis_defaults=at.AXIS_DEFAULTS,
    build=build,
    tunables=space.tunables,
    flops=flops,
    flop_convention=(
        "per (query, key) pair the mask shows and q head: 2·(d + dv) forward, 2·(3d + 2dv) "
        "backward (QKᵀ, dO·Vᵀ, Pᵀ·dO, dSᵀ·Q, dS·K); queries and keys aligned top-left"
    ),
    options=options(),
    check=check,
    illegal=space.illegal,
    canonical=space.canonical,
    default=space.default,
    inputs=inputs,
    reference=reference,
)
