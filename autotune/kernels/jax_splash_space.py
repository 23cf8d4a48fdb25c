"""The problem and blocks of JAX's splash attention: options, JAX's own rules, what is searched."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as jax_splash

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels import jax_blocks as blocks
from autotune.kernels import masks, top_left
from autotune.kernels.attention import LANES, AttentionShape, check_heads
from autotune.kernels.base import Tunable
from autotune.kernels.options import Option, attention_mask, flag, number
from autotune.problem import Problem

FORWARD = ("block_q", "block_kv", "block_kv_compute")
DKV = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
DQ = ("block_q_dq", "block_kv_dq")
LAYOUTS = ("q_layout", "k_layout", "v_layout")
HEAD_DIM_MINOR, SEQ_MINOR = (layout.name for layout in jax_splash.QKVLayout)


def options() -> dict[str, Option]:
    """Those of `make_splash_mha`, under its names; `grad` adds the backward pass.

    With `segment_ids`, q and kv ids are two more inputs; as in JAX, ids only compare equal, so
    that padding of one id sees itself. With `is_mqa` the kernel is `make_splash_mqa`, vmapped over
    the key heads.
    """
    return {
        "grad": flag(),
        "mask": attention_mask(),
        "attn_logits_soft_cap": number(positive=True),
        "segment_ids": flag(),
        "save_residuals": flag(),
        "is_mqa": flag(),
    }


def mask_of(problem: Problem) -> masks.Mask:
    return masks.of(problem.options["mask"])


def check(problem: Problem) -> None:
    """Raises InputError for heads that do not group, and a mask JAX's splash cannot run."""
    check_heads(problem)
    if problem.options["grad"] and problem.options["save_residuals"]:
        raise InputError(
            "save_residuals: true is not allowed with grad; the backward pass saves its own",
            path=("options", "save_residuals"),
        )
    top_left.check(problem, mask_of(problem), "JAX's splash attention")


def flops(problem: Problem) -> int:
    """2·(d + dv) a visible pair and head; with `grad` those of dq and dkv as well."""
    shape = AttentionShape.of(problem)
    pairs = top_left.rows_of(mask_of(problem), shape.q_len, shape.kv_len).pairs
    d, dv = shape.head_dim_qk, shape.head_dim_v
    products = 2 * (d + dv)
    if problem.options["grad"]:
        products += 2 * (2 * d + dv) + 2 * (2 * d + 2 * dv)
    return products * pairs * shape.batch * shape.q_heads


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """The fields of `BlockSizes`, those of the backward pass with `grad` only.

    The k and v layouts are tried where `space:` asks for it.
    """
    q_len, kv_len = problem.shape["q_len"], problem.shape["kv_len"]
    grad = problem.options["grad"]
    q_layout = {"values": (HEAD_DIM_MINOR,)} if grad else {}
    layouts = {
        "q_layout": blocks.one_of(HEAD_DIM_MINOR, SEQ_MINOR, **q_layout),
        "k_layout": blocks.one_of(HEAD_DIM_MINOR, SEQ_MINOR, values=(HEAD_DIM_MINOR,)),
        "v_layout": blocks.one_of(HEAD_DIM_MINOR, SEQ_MINOR, values=(HEAD_DIM_MINOR,)),
    }
    if not grad:
        keys, compute = blocks.searched(kv_len), blocks.tiles(kv_len)
        queries = blocks.tiles(q_len, most=2048)
        return {**_pass(FORWARD, problem, queries, keys, compute), **layouts}
    # Two or three values each: the three kernels' blocks multiply.
    few = functools.partial(blocks.middle, least=512)
    queries, keys, compute = few(q_len, most=1024), few(kv_len, most=1024), few(kv_len, most=512)
    dq = {
        "block_q_dq": blocks.block(queries, q_len, null=True),
        "block_kv_dq": blocks.block(keys, kv_len, tile=LANES, null=True),
    }
    return {
        **_pass(FORWARD, problem, few(q_len, most=2048), few(kv_len, most=2048), compute),
        **_pass(DKV, problem, queries, keys, compute),
        "use_fused_bwd_kernel": blocks.one_of(False, True),
        **dq,
        **layouts,
    }


def _pass(
    names: tuple[str, str, str],
    problem: Problem,
    queries: tuple[Scalar, ...],
    keys: tuple[Scalar, ...],
    compute: tuple[Scalar, ...],
) -> dict[str, Tunable]:
    """The three blocks of the forward kernel or of dkv."""
    block_q, block_kv, block_kv_compute = names
    q_len, kv_len = problem.shape["q_len"], problem.shape["kv_len"]
    return {
        block_q: blocks.block(queries, q_len),
        block_kv: blocks.block(keys, kv_len, tile=LANES),
        block_kv_compute: blocks.block(compute, kv_len, tile=LANES, null=True),
    }


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """The rule of JAX's splash attention that a config breaks, with both numbers; None if none."""
    reasons = [_why_not(problem, config, *FORWARD)]
    if problem.options["grad"]:
        reasons += [_why_not(problem, config, *DKV), _why_no_dq(problem, config)]
    return next((reason for reason in reasons if reason), None)


def _why_not(problem: Problem, config: Config, q: str, kv: str, compute: str) -> str | None:
    q_len, kv_len = problem.shape["q_len"], problem.shape["kv_len"]
    size = config.get(kv)
    if reason := blocks.why_not_dividing(q, config.get(q), "q_len", q_len):
        return reason
    if reason := blocks.why_not_dividing(kv, size, "kv_len", kv_len):
        return reason
    inner = config.get(compute)
    name, inner = (kv, size) if inner is None else (compute, inner)
    assert isinstance(size, int)
    return blocks.why_not_inside(name, inner, kv, size, LANES)


def _why_no_dq(problem: Problem, config: Config) -> str | None:
    given = [name for name in DQ if config.get(name) is not None]
    if config.get("use_fused_bwd_kernel"):
        return f"{given[0]} belongs to no kernel: the backward pass is fused" if given else None
    if missing := [name for name in DQ if name not in given]:
        return f"{missing[0]} is needed: the backward pass is not fused"
    q, kv = (config[name] for name in DQ)
    if reason := blocks.why_not_dividing(DQ[0], q, "q_len", problem.shape["q_len"]):
        return reason
    kv_len = problem.shape["kv_len"]
    return blocks.why_not_inside(DQ[1], kv, "kv_len", kv_len, LANES)


def _lengths(problem: Problem) -> dict[str, int]:
    names = (*FORWARD, *DKV, *DQ)
    return {n: problem.shape["q_len" if n.startswith("block_q") else "kv_len"] for n in names}


def canonical(problem: Problem, config: Config) -> Config:
    """Nulls and entries left out as `BlockSizes` fills them in; no dq blocks with a fused pass;
    blocks over their axis are the axis."""
    config = blocks.clamped(config, _lengths(problem))
    layouts = {name: config.get(name, HEAD_DIM_MINOR) for name in LAYOUTS}
    full = {**{name: config.get(name) for name in FORWARD}, **layouts}
    compute = [("block_kv_compute", "block_kv")]
    if problem.options["grad"]:
        fused = config.get("use_fused_bwd_kernel", False)
        full |= {name: config.get(name) for name in DKV}
        full |= {name: None if fused is True else config.get(name) for name in DQ}
        full["use_fused_bwd_kernel"] = fused
        compute.append(("block_kv_dkv_compute", "block_kv_dkv"))
    for inner, outer in compute:
        if full[inner] is None:
            full[inner] = full[outer]
    return full


def block_sizes(problem: Problem, config: Config) -> Any:
    """The config as JAX's `BlockSizes`. Raises ValueError for a rule that is broken, or JAX's."""
    full = canonical(problem, config)
    entries: dict[str, Any] = {
        name: jax_splash.QKVLayout[str(value)] if name in LAYOUTS else value
        for name, value in full.items()
    }
    return jax_splash.BlockSizes(**entries)


def default(problem: Problem, device: Device) -> Config:
    """`BlockSizes.get_default()` of the installed JAX."""
    sizes: Any = jax_splash.BlockSizes.get_default()  # type: ignore[no-untyped-call]
    names = FORWARD + ((*DKV, *DQ) if problem.options["grad"] else ())
    found: dict[str, Scalar] = {name: getattr(sizes, name) for name in names}
    found |= {name: getattr(sizes, name).name for name in LAYOUTS}
    if problem.options["grad"]:
        found["use_fused_bwd_kernel"] = sizes.use_fused_bwd_kernel
    return canonical(problem, found)
