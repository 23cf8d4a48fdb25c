"""JAX's flash attention as three kernels to tune: forward, dq and dkv.

The calls are those of `flash_attention` and of its backward pass, which has no public entry of its
own. Causal attention is aligned top-left: query i sees keys up to i, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels import attention as at
from autotune.kernels import jax_blocks as blocks
from autotune.kernels import reference as references
from autotune.kernels import top_left
from autotune.kernels.attention import LANES, AttentionShape, check_heads
from autotune.kernels.attention_inputs import draw
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.flash_bwd_problem import draw_backward
from autotune.kernels.masks import Causal, Full, Intervals, Mask
from autotune.kernels.options import factor, flag
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
FORWARD = ("block_q", "block_k_major", "block_k", "block_b")
DQ = ("block_q_dq", "block_k_major_dq", "block_k_dq")
DKV = ("block_q_major_dkv", "block_q_dkv", "block_k_major_dkv", "block_k_dkv")


def _check(problem: Problem) -> None:
    """Raises InputError for shapes that `flash_attention` does not take."""
    check_heads(problem)
    shape = AttentionShape.of(problem)
    if shape.group != 1:
        raise InputError(
            f"kv_heads {shape.kv_heads} is not q_heads {shape.q_heads}; JAX's flash attention "
            "needs one key head a query head (its callers repeat k and v)",
            path=("shape", "kv_heads"),
        )
    if shape.head_dim_qk != shape.head_dim_v:
        raise InputError(
            f"head_dim_v {shape.head_dim_v} is not head_dim_qk {shape.head_dim_qk}; JAX's flash "
            "attention needs both alike",
            path=("shape", "head_dim_v"),
        )
    top_left.check(problem, _mask(problem), "JAX's flash attention")


def _mask(problem: Problem) -> Mask:
    return Causal() if problem.options["causal"] else Full()


def _rows(problem: Problem) -> Intervals:
    return top_left.rows_of(_mask(problem), problem.shape["q_len"], problem.shape["kv_len"])


def _flops(problem: Problem, per_pair: int) -> int:
    s = AttentionShape.of(problem)
    return per_pair * int(_rows(problem).pairs) * s.batch * s.q_heads


def _arrays(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, do, l, m: one query array's shape, one key array's, one row array's."""
    s, dtype = AttentionShape.of(problem), jnp.dtype(problem.dtype)
    q = abstract((s.batch, s.q_heads, s.q_len, s.head_dim_qk), dtype)
    k = abstract((s.batch, s.q_heads, s.kv_len, s.head_dim_qk), dtype)
    return q, k, abstract(q.shape[:3], jnp.float32)


# Forward


def _build_forward(problem: Problem, config: Config) -> Call:
    shape, options = problem.shape, problem.options
    named: dict[str, Any] = {name: config[name] for name in FORWARD}
    sizes = jax_flash.BlockSizes(**named)
    (q, k, _), keywords = _arrays(problem), (options["causal"], options["sm_scale"], sizes, False)
    ids: tuple[Any, ...] = ()
    if options["segment_ids"]:
        ids = tuple(abstract((shape["batch"], shape[n]), jnp.int32) for n in ("q_len", "kv_len"))

    def flash(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        segments = jax_flash.SegmentIds(*ids) if ids else None
        if options["save_residuals"]:  # as the forward half of a training step calls it
            return jax_flash._flash_attention(q, k, v, None, segments, True, *keywords)
        causal, sm_scale, block_sizes, debug = keywords
        return jax_flash.flash_attention(
            q, k, v, None, segments,
            causal=causal, sm_scale=sm_scale, block_sizes=block_sizes, debug=debug,
        )  # fmt: skip

    return flash, (q, k, k, *ids)


def _forward_tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    q_len, kv_len, batch = (problem.shape[axis] for axis in ("q_len", "kv_len", "batch"))
    powers = (128, 256, 512, 1024, 2048)  # block_q need not divide
    queries = {b for b in powers if b <= q_len <= b * blocks.MOST_BLOCKS}

    def size(value: Scalar) -> str | None:
        return "a whole number from 1" if blocks.why_no_size("", value) else None

    keys = blocks.searched(kv_len)
    return {
        "block_q": Tunable(
            values=tuple(sorted(queries | set(blocks.tiles(q_len, most=2048)))), check=size
        ),
        "block_k_major": blocks.block(keys, kv_len),
        "block_k": blocks.block(blocks.tiles(kv_len), kv_len),
        "block_b": Tunable(values=(1, 2) if batch > 1 else (1,), check=size),
    }


def _canonical(problem: Problem, config: Config) -> Config:
    """Blocks over their axis are the axis."""
    shape = problem.shape

    def axis(name: str) -> str:
        return "batch" if name == "block_b" else "q_len" if "_q" in name else "kv_len"

    return blocks.clamped(config, {name: shape[axis(name)] for name in config})


def _forward_illegal(problem: Problem, config: Config, device: Device) -> str | None:
    for name, axis in (("block_q", "q_len"), ("block_b", "batch")):
        if reason := blocks.why_no_size(name, config.get(name)):
            return reason
        if config[name] > problem.shape[axis]:  # type: ignore[operator]
            return f"{name} {config[name]} is larger than {axis} {problem.shape[axis]}"
    kv_len, block_k = problem.shape["kv_len"], config.get("block_k")
    # One step over all keys has no running sums, whose tiles are 128 wide.
    tile = 1 if block_k == kv_len and not problem.options["segment_ids"] else LANES
    return _why_not_nested(config, "block_k_major", "block_k", "kv_len", kv_len, tile)


def _why_not_nested(
    config: Config, outer: str, inner: str, axis: str, length: int, tile: int
) -> str | None:
    size = config.get(outer)
    if reason := blocks.why_not_dividing(outer, size, axis, length):
        return reason
    assert isinstance(size, int)
    return blocks.why_not_inside(inner, config.get(inner), outer, size, tile)


def _forward_inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    (_, arguments) = _build_forward(problem, dict.fromkeys(FORWARD, 1))
    return draw(key, arrays=arguments[:3], ids=arguments[3:], scale=_gain(problem))


def _gain(problem: Problem) -> float:
    """What keeps logits near 1: q comes scaled where `sm_scale` does not do it."""
    return float(problem.shape["head_dim_qk"] ** -0.5 / problem.options["sm_scale"])


def _forward_reference(problem: Problem, q: Any, k: Any, v: Any, *ids: Any) -> Any:
    q, k, v = references.f64(q, k, v)
    seen = _rows(problem).dense()
    if ids:
        q_ids, kv_ids = (np.asarray(i)[:, None] for i in ids)
        seen = seen & (q_ids[..., :, None] == kv_ids[..., None, :])
    out, lse, top = references.attention(q, k, v, scale=problem.options["sm_scale"], mask=seen)
    return (out, np.exp(lse - top), top) if problem.options["save_residuals"] else out


def _default(names: tuple[str, ...]) -> Callable[[Problem, Device], Config]:
    """`BlockSizes.get_default()` of the installed JAX."""

    def default(problem: Problem, device: Device) -> Config:
        axes = ("batch", "q_heads", "q_len", "kv_len", "head_dim_qk")
        shape = (problem.shape[axis] for axis in axes)
        sizes: Any = jax_flash.BlockSizes.get_default(*shape)  # type: ignore[no-untyped-call]
        return {name: getattr(sizes, name) for name in names}

    return default


FLASH = Kernel(
    name="jax.flash",
    axes=at.AXES,
    axis_defaults=at.AXIS_DEFAULTS,
    build=_build_forward,
    tunables=_forward_tunables,
    flops=lambda problem: _flops(problem, 4 * problem.shape["head_dim_qk"]),
    flop_convention="QKᵀ and PV: 2·(d + dv) per visible (query, key) pair and head",
    options={
        "causal": flag(),
        "sm_scale": factor(),
        "segment_ids": flag(),
        "save_residuals": flag(),
    },
    check=_check,
    illegal=_forward_illegal,
    canonical=_canonical,
    default=_default(FORWARD),
    inputs=_forward_inputs,
    reference=_forward_reference,
)


# Backward


def _backward(name: str, names: tuple[str, ...], function: str) -> dict[str, Any]:
    """What the two backward kernels share; `names` are their tunables, `function` JAX's own."""

    def keywords(config: Config) -> dict[str, Scalar]:
        plain = {n: n.removesuffix("_dq").removesuffix("_dkv") for n in names}
        if "block_q_dq" in plain:
            plain["block_q_dq"] = "block_q_major"  # dq walks its queries whole
        return {plain[n]: config[n] for n in names}

    def build(problem: Problem, config: Config) -> Call:
        q, k, rows = _arrays(problem)
        options = {key: problem.options[key] for key in ("causal", "sm_scale")}

        def gradients(q: Any, k: Any, v: Any, l: Any, m: Any, do: Any, di: Any) -> Any:
            first, second = getattr(jax_flash, function)(
                q, k, v, None, None, l, m, do, di, **keywords(config), **options,
                mask_value=jax_flash.DEFAULT_MASK_VALUE, debug=False,
            )  # fmt: skip
            return first if names == DQ else (first, second)

        gradients.__name__ = name
        return gradients, (q, k, k, rows, rows, q, rows)

    def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
        q, k, rows = _arrays(problem)
        drawn = draw_backward(
            key, (q, k, k, q, rows, rows), scale=problem.options["sm_scale"], soft_cap=None,
            causal=problem.options["causal"], offset=0, gain=_gain(problem),
        )  # fmt: skip
        q, k, v, do, lse, di = drawn
        # p = exp(s - m) / l, whatever the split of exp(lse) = l·exp(m).
        return q, k, v, jnp.ones_like(lse), lse, do, di

    def reference(problem: Problem, *arrays: Any) -> Any:
        q, k, v, _, _, do, _ = references.f64(*arrays)
        dq, dk, dv = references.attention_gradients(
            q, k, v, do, scale=problem.options["sm_scale"], mask=_rows(problem).dense()
        )
        return dq if names == DQ else (dk, dv)

    return {
        "name": name,
        "axes": at.AXES,
        "axis_defaults": at.AXIS_DEFAULTS,
        "build": build,
        "options": {"causal": flag(), "sm_scale": factor()},
        "check": _check,
        "canonical": _canonical,
        "default": _default(names),
        "inputs": inputs,
        "reference": reference,
    }


def _backward_tunables(names: tuple[str, ...]) -> Callable[..., Mapping[str, Tunable]]:
    """Blocks of 512 to 2048, tiles of 512 and 1024: every tile of a block is unrolled text."""

    def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
        found = {}
        for name in names:
            length = problem.shape["q_len" if "_q_" in name else "kv_len"]
            major = "major" in name or name == "block_q_dq"
            values = blocks.middle(length, 512, 2048 if major else 1024)
            found[name] = blocks.block(values, length, tile=LANES if "_k_" in name else 1)
        return found

    return tunables


def _dq_illegal(problem: Problem, config: Config, device: Device) -> str | None:
    kv_len, q_len = problem.shape["kv_len"], problem.shape["q_len"]
    return blocks.why_not_dividing(
        "block_q_dq", config.get("block_q_dq"), "q_len", q_len
    ) or _why_not_nested(config, "block_k_major_dq", "block_k_dq", "kv_len", kv_len, LANES)


def _dkv_illegal(problem: Problem, config: Config, device: Device) -> str | None:
    q_major, q, k_major, k = DKV
    kv_len, q_len = problem.shape["kv_len"], problem.shape["q_len"]
    return _why_not_nested(config, q_major, q, "q_len", q_len, 1) or _why_not_nested(
        config, k_major, k, "kv_len", kv_len, LANES
    )


FLASH_DQ = Kernel(
    **_backward("jax.flash_dq", DQ, "_flash_attention_bwd_dq"),
    tunables=_backward_tunables(DQ),
    illegal=_dq_illegal,
    flops=lambda problem: _flops(problem, 6 * problem.shape["head_dim_qk"]),
    flop_convention="QKᵀ, dO·Vᵀ and dS·K: 2·(2d + dv) per visible (query, key) pair and head",
)
FLASH_DKV = Kernel(
    **_backward("jax.flash_dkv", DKV, "_flash_attention_bwd_dkv"),
    tunables=_backward_tunables(DKV),
    illegal=_dkv_illegal,
    flops=lambda problem: _flops(problem, 8 * problem.shape["head_dim_qk"]),
    flop_convention=(
        "QKᵀ, dO·Vᵀ, Pᵀ·dO and dSᵀ·Q: 2·(2d + 2dv) per visible (query, key) pair and head"
    ),
)
