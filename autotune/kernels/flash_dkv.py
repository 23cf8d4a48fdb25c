"""Attention backward for keys and values: dk and dv, summed over heads and query blocks in VMEM."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autotune.candidate import Config
from autotune.kernels.attention import AttentionShape, pair_flops, window
from autotune.kernels.base import Call, Kernel
from autotune.kernels.flash_bwd import (
    NN,
    Operands,
    Softmax,
    abstract,
    backward_call,
    checked_shape,
    dot,
    q_head,
)
from autotune.kernels.flash_bwd_problem import (
    MajorMinor,
    keywords,
    operands,
    reference_gradients,
    shared_entries,
    transposes_output,
)
from autotune.kernels.flash_bwd_tiles import Blocks, Cut, Place, keys_at
from autotune.problem import Problem

_STRIP = 256
"""Keys whose gradients one dot makes. A tile of 1024 x 1024 takes 3,562 cycles in strips and 4,296
whole on tpu7x (head_dim 192 and 128), 3,620 and 3,525 on v6e (128)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(MajorMinor):
    """Blocks of the grid (major) and of the dots (minor), in rows."""

    block_q_major: int
    block_kv_major: int
    block_q: int
    block_kv: int


def _kernel(
    q_ref: Any,  # [block_q_major, head_dim_qk]
    k_ref: Any,  # [block_kv_major, head_dim_qk]
    v_ref: Any,  # [block_kv_major, head_dim_v]
    do_ref: Any,  # [block_q_major, head_dim_v]
    lse_ref: Any,  # [1, block_q_major] f32
    di_ref: Any,  # [1, block_q_major] f32
    dk_ref: Any,  # [block_kv_major, head_dim_qk]
    dv_ref: Any,  # [block_kv_major, head_dim_v]
    dk_acc_ref: Any,  # [head_dim_qk, block_kv_major] f32, or not transposed
    dv_acc_ref: Any,  # [head_dim_v, block_kv_major] f32, or not transposed
    *,
    blocks: Blocks,
    group: int,
    softmax: Softmax,
    transposed: bool,
) -> None:
    kv_block, member, q_block = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    # dkᵀ = qᵀ·ds and dvᵀ = doᵀ·p stream head_dim rows past 256 x 256 weights of scores, where
    # dk = dsᵀ·q streams 256: 3,072 instead of 4,096 MXU cycles at 1024 x 1024 x 128 on v6e. It
    # wants scores laid out [q, kv]; from [kv, q] the weights are loaded transposed, which took
    # 3,852 cycles where this takes 3,538 and dsᵀ·q 4,248.
    refs = Operands(
        q=q_ref,
        k=k_ref,
        v=v_ref,
        do=do_ref,
        lse=lse_ref,
        di=di_ref,
        softmax=softmax,
        q_in_lanes=not transposed,
    )

    @pl.when(jnp.logical_and(member == 0, q_block == 0))
    def _() -> None:
        with jax.named_scope("init"):
            dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
            dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    def step(place: Place, cut: Cut | None) -> None:
        tile = refs.at(place, blocks)
        keys = keys_at(place, blocks)
        at = (slice(None), keys) if transposed else keys
        dk_acc, dv_acc = dk_acc_ref.at[at], dv_acc_ref.at[at]
        residuals = tile.residuals()
        q, do = (tile.q[...].T, tile.do[...].T) if transposed else (tile.q, tile.do)
        for dots in blocks.dots("kv", cut):
            p, ds = tile.gradients(dots, cut, residuals)
            p, ds = p.astype(do_ref.dtype), ds.astype(q_ref.dtype)
            if transposed:
                dv_acc[:, dots.keys] += dot(do[:, dots.queries], p, NN)
                dk_acc[:, dots.keys] += dot(q[:, dots.queries], ds, NN)
            else:
                dv_acc[dots.keys] += dot(p, do[dots.queries], NN)
                dk_acc[dots.keys] += dot(ds, q[dots.queries], NN)

    # Padded rows need no mask: those of q have p = 0, those of k and v are cut off at the end.
    blocks.each_tile(step, q_block, kv_block, output="kv", hide_padded_keys=False)

    @pl.when(jnp.logical_and(member == group - 1, q_block == blocks.q_blocks - 1))
    def _() -> None:
        with jax.named_scope("finalize"):
            dk, dv = dk_acc_ref[...], dv_acc_ref[...]
            dk, dv = (dk.T, dv.T) if transposed else (dk, dv)
            dk_ref[...] = softmax.scaled(dk).astype(dk_ref.dtype)
            dv_ref[...] = dv.astype(dv_ref.dtype)


def flash_dkv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    di: jax.Array,
    *,
    block_sizes: BlockSizes,
    causal: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    use_exp2: bool = True,
    out_dtype: Any = None,
    transposed: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of attention for k and v, of their shapes, in `out_dtype` or k's and v's.

    Operands and options as in `flash_dq`. The q heads of a kv head are part of the reduction: its
    gradients leave VMEM once, already summed. A key that no query sees gets zeros.

    `transposed` accumulates dkᵀ and dvᵀ: less MXU work where a head_dim is no multiple of 256 and
    the MXU is 256 wide.

    Raises:
      ValueError: for operands that do not belong together, or blocks that do not suit them.
    """
    shape = checked_shape(q, k, v, do, lse, di)
    b = block_sizes.clamped(shape.q_len, shape.kv_len)
    blocks = Blocks(
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        block_q=b.block_q_major,
        block_kv=b.block_kv_major,
        tile_q=b.block_q,
        tile_kv=b.block_kv,
        causal=causal,
        strip=_STRIP,
    )

    def seen(i: Any, j: Any) -> Any:
        """q block of step i: a skipped one asks for the first that sees kv block j, in advance."""
        if not causal:
            return i
        # Not `//`: both are whole numbers from 0, and its lowering asks for an attached chip.
        first = lax.div(jnp.maximum(j * blocks.block_kv - blocks.offset, 0), blocks.block_q)
        return jnp.maximum(i, first)

    def q_at(batch: Any, kv_head: Any, j: Any, member: Any, i: Any) -> tuple[Any, Any, Any]:
        return batch, q_head(kv_head, member, shape.group), seen(i, j)

    def kv_at(batch: Any, kv_head: Any, j: Any, member: Any, i: Any) -> tuple[Any, Any, Any]:
        return batch, kv_head, j

    d, dv, rows = shape.head_dim_qk, shape.head_dim_v, blocks.kv_blocks * blocks.block_kv
    softmax = Softmax(scale=shape.scale(scale), soft_cap=logit_soft_cap or None, use_exp2=use_exp2)
    call = backward_call(
        functools.partial(
            _kernel, blocks=blocks, group=shape.group, softmax=softmax, transposed=transposed
        ),
        name="flash_dkv",
        shape=shape,
        blocks=blocks,
        grid=(shape.batch, shape.kv_heads, blocks.kv_blocks, shape.group, blocks.q_blocks),
        reduced_axes=2,
        q_at=q_at,
        kv_at=kv_at,
        out_specs=[window(blocks.block_kv, size, kv_at) for size in (d, dv)],
        out_shape=[
            abstract((shape.batch, shape.kv_heads, rows, size), out_dtype or array.dtype)
            for size, array in ((d, k), (dv, v))
        ],
        accumulators=[
            (size, blocks.block_kv) if transposed else (blocks.block_kv, size) for size in (d, dv)
        ],
    )
    dk, dv_ = call(q, k, v, do, lse, di)
    return dk[:, :, : shape.kv_len], dv_[:, :, : shape.kv_len]


def _build(problem: Problem, config: Config) -> Call:
    options = keywords(problem)
    fn = functools.partial(
        flash_dkv,
        block_sizes=BlockSizes(**config),  # type: ignore[arg-type]
        transposed=transposes_output(
            problem, problem.shape["head_dim_qk"], problem.shape["head_dim_v"]
        ),
        **options,
    )
    return fn, operands(problem)


def _flops(problem: Problem) -> int:
    s = AttentionShape.of(problem)
    return pair_flops(problem, 2 * (2 * s.head_dim_qk + 2 * s.head_dim_v))


KERNEL = Kernel(
    name="flash_dkv",
    build=_build,
    flops=_flops,
    flop_convention=(
        "QKᵀ, dO·Vᵀ, Pᵀ·dO and dSᵀ·Q: 2·(2d + 2dv) per visible (query, key) pair and q head"
    ),
    reference=lambda problem, *arrays: reference_gradients(problem, *arrays)[1:],
    **shared_entries(BlockSizes),
)
