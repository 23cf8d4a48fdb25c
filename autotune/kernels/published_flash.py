"""The attention kernel of the published Ironwood timings: online softmax over the whole block.

Slower than `flash_fwd`, and here for one reason only: its measured times say how well a schedule
predicts silicon. `autotune calibrate` builds it for rows of `flash_fwd` that name `block_q` and
`block_kv` and nothing else, which this package's own kernel never does. Written after the
description in CMU 11-868 (spring 2026), lecture 13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.candidate import Config
from autotune.kernels import attention
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.options import Option, choice, number
from autotune.problem import Problem

LANES = 128
abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct


def _kernel(
    q_ref: Any,  # [1, block_q, d]
    k_ref: Any,  # [1, block_kv, d]
    v_ref: Any,  # [1, block_kv, dv]
    o_ref: Any,  # [1, block_q, dv]
    acc_ref: Any,  # [block_q, dv] f32
    max_ref: Any,  # [block_q, 128] f32
    sum_ref: Any,  # [block_q, 128] f32
    *,
    constant: float | None,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        with jax.named_scope("init"):
            acc_ref[...] = jnp.zeros_like(acc_ref)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            max_ref[...] = jnp.full_like(max_ref, -1e30)

    with jax.named_scope("step"):
        scores = lax.dot_general(
            q_ref[0], k_ref[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        if constant is not None:
            p = jnp.exp(scores - constant)
            sum_ref[...] += p.sum(axis=1, keepdims=True)
            acc_ref[...] += dot(p.astype(v_ref.dtype), v_ref[0])
        else:
            old = max_ref[...][:, :1]
            new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
            p, alpha = jnp.exp(scores - new), jnp.exp(old - new)
            sum_ref[...] = sum_ref[...] * alpha + p.sum(axis=1, keepdims=True)
            max_ref[...] = jnp.broadcast_to(new, max_ref.shape)
            acc_ref[...] = acc_ref[...] * alpha + dot(p.astype(v_ref.dtype), v_ref[0])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        with jax.named_scope("finalize"):
            o_ref[0] = (acc_ref[...] / sum_ref[...][:, :1]).astype(o_ref.dtype)


def build(problem: Problem, config: Config) -> Call:
    """The call on q, k [heads, length, d] and v [heads, length, dv]. Scores are not scaled."""
    s, dtype = problem.shape, jnp.dtype(problem.dtype)
    heads, block_q, block_kv = s["q_heads"], int(config["block_q"]), int(config["block_kv"])  # type: ignore[arg-type]
    d, dv = s["head_dim_qk"], s["head_dim_v"]
    by_q = lambda h, i, j: (h, i, 0)
    by_kv = lambda h, i, j: (h, j, 0)
    call = pl.pallas_call(
        functools.partial(_kernel, constant=problem.options["max_logit_const"]),
        name="published_flash",
        grid=(heads, s["q_len"] // block_q, s["kv_len"] // block_kv),
        in_specs=[
            pl.BlockSpec((1, block_q, d), by_q),
            pl.BlockSpec((1, block_kv, d), by_kv),
            pl.BlockSpec((1, block_kv, dv), by_kv),
        ],
        out_specs=pl.BlockSpec((1, block_q, dv), by_q),
        out_shape=abstract((heads, s["q_len"], dv), jnp.dtype(problem.options["out_dtype"])),
        scratch_shapes=[
            pltpu.VMEM((block_q, dv), jnp.float32),
            pltpu.VMEM((block_q, LANES), jnp.float32),
            pltpu.VMEM((block_q, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )
    shapes = ((s["q_len"], d), (s["kv_len"], d), (s["kv_len"], dv))
    return call, tuple(abstract((heads, *shape), dtype) for shape in shapes)


def _uncausal(value: Any) -> bool:
    if value is not False:
        raise ValueError("false: the published kernel has no mask")
    return False


FLASH = Kernel(
    name="autotune.kernels.published_flash:FLASH",
    axes=attention.AXES,
    axis_defaults=attention.AXIS_DEFAULTS,
    build=build,
    tunables=lambda problem, device: {
        "block_q": Tunable(values=(1024, 2048)), "block_kv": Tunable(values=(2048,)),
    },
    flops=lambda problem: attention.pair_flops(
        problem, 2 * (problem.shape["head_dim_qk"] + problem.shape["head_dim_v"])
    ),
    options={
        "causal": Option(default=False, parse=_uncausal),
        "out_dtype": choice("float32", "float32", "bfloat16"),
        "max_logit_const": number(positive=False),
    },
)  # fmt: skip
