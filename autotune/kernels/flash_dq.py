"""Attention backward for the queries: dq, summed over key blocks in VMEM."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from autotune.candidate import Config
from autotune.kernels.attention import AttentionShape, is_visible, pair_flops, window
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
from autotune.kernels.flash_bwd_tiles import Blocks, Cut, Place, largest_tile, queries_at
from autotune.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(MajorMinor):
    """Blocks of the grid (major) and of the dots along the keys (minor), in rows."""

    block_q_major: int
    block_kv_major: int
    block_kv: int


def _kernel(
    q_ref: Any,  # [block_q_major, head_dim_qk]
    k_ref: Any,  # [block_kv_major, head_dim_qk]
    v_ref: Any,  # [block_kv_major, head_dim_v]
    do_ref: Any,  # [block_q_major, head_dim_v]
    lse_ref: Any,  # [1, block_q_major] f32
    di_ref: Any,  # [1, block_q_major] f32
    dq_ref: Any,  # [block_q_major, head_dim_qk]
    acc_ref: Any,  # [head_dim_qk, block_q_major] f32, or not transposed
    *,
    blocks: Blocks,
    softmax: Softmax,
    transposed: bool,
) -> None:
    q_block, kv_block = pl.program_id(3), pl.program_id(4)
    # dqᵀ = kᵀ·dsᵀ streams head_dim rows past each 256 x 256 weights of dsᵀ, where dq = ds·k
    # streams 256: 2,560 instead of 3,072 MXU cycles at 1024 x 1024 x 128 on v6e. It wants scores
    # laid out [kv, q], which also spares the columns of lse and di.
    refs = Operands(
        q=q_ref,
        k=k_ref,
        v=v_ref,
        do=do_ref,
        lse=lse_ref,
        di=di_ref,
        softmax=softmax,
        q_in_lanes=transposed,
    )

    @pl.when(kv_block == 0)
    def _() -> None:
        with jax.named_scope("init"):
            acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(place: Place, cut: Cut | None) -> None:
        tile = refs.at(place, blocks)
        queries = queries_at(place, blocks)
        acc = acc_ref.at[:, queries] if transposed else acc_ref.at[queries]
        residuals = tile.residuals()
        k = tile.k[...].T if transposed else tile.k
        for dots in blocks.dots("q", cut):
            ds = tile.gradients(dots, cut, residuals)[1].astype(k_ref.dtype)
            if transposed:
                acc[:, dots.queries] += dot(k[:, dots.keys], ds, NN)
            else:
                acc[dots.queries] += dot(ds, k[dots.keys], NN)

    # With a causal mask, a padded key is a future one: no row that is kept sees it.
    blocks.each_tile(step, q_block, kv_block, output="q", hide_padded_keys=True)

    @pl.when(kv_block == blocks.kv_blocks - 1)
    def _() -> None:
        with jax.named_scope("finalize"):
            acc = acc_ref[...].T if transposed else acc_ref[...]
            dq_ref[...] = softmax.scaled(acc).astype(dq_ref.dtype)


def flash_dq(
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
) -> jax.Array:
    """Gradient of attention for q: [batch, q_heads, q_len, head_dim_qk] in `out_dtype` or q's.

    q [batch, q_heads, q_len, head_dim_qk]; k [batch, kv_heads, kv_len, head_dim_qk]; v
    [batch, kv_heads, kv_len, head_dim_v]; do, the output's gradient, [batch, q_heads, q_len,
    head_dim_v]; lse and di = sum(o · do) over head_dim_v, [batch, q_heads, q_len] f32. di comes
    from outside because flash_dkv needs it as well, there once for every key block: made once, it
    costs one reading of o and do. A query row that sees no key gets zeros, whatever its lse.

    `transposed` accumulates dqᵀ: less MXU work where head_dim_qk is no multiple of 256 and the MXU
    is 256 wide.

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
        tile_q=largest_tile(b.block_q_major),
        tile_kv=b.block_kv,
        causal=causal,
    )

    def q_at(batch: Any, kv_head: Any, member: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        return batch, q_head(kv_head, member, shape.group), i

    def kv_at(batch: Any, kv_head: Any, member: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        # A skipped block asks for block 0, which the next query block starts with.
        sizes = (blocks.block_q, blocks.block_kv, blocks.offset)
        return batch, kv_head, jnp.where(is_visible(i, j, *sizes), j, 0) if causal else j

    d, rows = shape.head_dim_qk, blocks.q_blocks * blocks.block_q
    softmax = Softmax(scale=shape.scale(scale), soft_cap=logit_soft_cap or None, use_exp2=use_exp2)
    call = backward_call(
        functools.partial(_kernel, blocks=blocks, softmax=softmax, transposed=transposed),
        name="flash_dq",
        shape=shape,
        blocks=blocks,
        grid=(shape.batch, shape.kv_heads, shape.group, blocks.q_blocks, blocks.kv_blocks),
        reduced_axes=1,
        q_at=q_at,
        kv_at=kv_at,
        out_specs=window(blocks.block_q, d, q_at),
        out_shape=abstract((shape.batch, shape.q_heads, rows, d), out_dtype or q.dtype),
        accumulators=[(d, blocks.block_q) if transposed else (blocks.block_q, d)],
    )
    dq = call(q, k, v, do, lse, di)
    return dq[:, :, : shape.q_len]  # type: ignore[no-any-return]


def _build(problem: Problem, config: Config) -> Call:
    options = keywords(problem)
    fn = functools.partial(
        flash_dq,
        block_sizes=BlockSizes(**config),  # type: ignore[arg-type]
        transposed=transposes_output(problem, problem.shape["head_dim_qk"]),
        **options,
    )
    return fn, operands(problem)


def _flops(problem: Problem) -> int:
    s = AttentionShape.of(problem)
    return pair_flops(problem, 2 * (2 * s.head_dim_qk + s.head_dim_v))


KERNEL = Kernel(
    name="flash_dq",
    build=_build,
    flops=_flops,
    flop_convention="QKᵀ, dO·Vᵀ and dS·K: 2·(2d + dv) per visible (query, key) pair and q head",
    reference=lambda problem, *arrays: reference_gradients(problem, *arrays)[0],
    **shared_entries(BlockSizes),
)
