"""Flash attention, forward: MHA, GQA and MQA, causal or not, any lengths and head dims.

Conventions (scale, causal alignment, soft cap, lse) are those of `attention.py`; the algorithm is
told in `anchored_softmax.py`. Lengths that no block divides are read past their edge and masked, so
nothing is padded or sliced in HBM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels import anchored_softmax as softmax
from autotune.kernels import attention as at
from autotune.kernels import flash_fwd_kernel, reference
from autotune.kernels.attention import LANES, AttentionShape
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.flash_fwd_call import Outputs, inputs, keywords, operands, plan_entries
from autotune.kernels.flash_fwd_plan import Plan, Refs
from autotune.kernels.matmul_space import limit_reason, vmem_limit_tunable
from autotune.kernels.options import choice, flag, number
from autotune.problem import Problem

OUT_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    """Tiles, all multiples of 128. Raises ValueError, with both numbers, for an impossible one.

    Attributes:
      block_q, block_kv: queries and keys of one grid step.
      block_q_compute, block_kv_compute: of one dot within it; None is all of the block.
      vmem_limit_bytes: the kernel's VMEM limit; None is the compiler's default.
    """

    block_q: int
    block_kv: int
    block_q_compute: int | None = None
    block_kv_compute: int | None = None
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for outer in ("block_q", "block_kv"):
            inner = f"{outer}_compute"
            size = at.check_block(outer, getattr(self, outer))
            if (tile := getattr(self, inner)) is not None:
                at.check_divides(inner, at.check_block(inner, tile), outer, size)

    @property
    def q_tile(self) -> int:
        return self.block_q_compute or self.block_q

    @property
    def kv_tile(self) -> int:
        return self.block_kv_compute or self.block_kv

    def clamped(self, q_len: int, kv_len: int) -> BlockSizes:
        """What runs on these lengths: blocks no longer than the padded length, nulls filled in.

        A dot's tile that no longer divides its clamped block becomes the next smaller that does.
        """
        block_q = at.clamp_block(self.block_q, q_len)
        block_kv = at.clamp_block(self.block_kv, kv_len)
        return BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_compute=_largest_tile(block_q, self.block_q_compute),
            block_kv_compute=_largest_tile(block_kv, self.block_kv_compute),
            vmem_limit_bytes=self.vmem_limit_bytes,
        )


def _largest_tile(block: int, most: int | None) -> int:
    """The largest multiple of 128 up to `most` that divides `block`; all of it where None."""
    if most is None or most >= block:
        return block
    return next(tile for tile in range(most, 0, -LANES) if block % tile == 0)


def flash_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    block_sizes: BlockSizes,
    causal: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    max_logit_const: float | None = None,
    use_exp2: bool = True,
    residuals: bool = False,
    out_dtype: Any = None,
    mxu_size: int = 256,
) -> Any:
    """softmax(mask(cap(q·k · scale)))·v as [batch, q_heads, q_len, head_dim_v].

    q is [batch, q_heads, q_len, head_dim_qk], k [batch, kv_heads, kv_len, head_dim_qk], v [batch,
    kv_heads, kv_len, head_dim_v]. With `residuals` also lse and max, [batch, q_heads, q_len] f32.

    Args:
      scale: None is 1/sqrt(head_dim_qk).
      logit_soft_cap: logits become cap · tanh(logits / cap); None is off.
      max_logit_const: subtracted from the logits in place of anything that depends on them. Right
        as long as every row's largest logit is within `attention.shift_range` of it; outside, rows
        underflow to zero or overflow.
      mxu_size: side of the chip's MXU; decides whether it sums the probabilities on the side.

    Raises:
      ValueError: for shapes that do not belong together, or a constant that a soft cap proves
        unsafe.
    """
    shape = at.shape_of(q, k, v)
    blocks = block_sizes.clamped(shape.q_len, shape.kv_len)
    entries = plan_entries(
        shape,
        blocks,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        max_logit_const=max_logit_const,
        use_exp2=use_exp2,
        residuals=residuals,
        mxu_size=mxu_size,
    )
    plan = Plan(**entries, track_top=residuals, causal=causal)
    return _call(plan, out_dtype or q.dtype, blocks.vmem_limit_bytes)(q, k, v)


def _call(plan: Plan, out_dtype: Any, vmem_limit_bytes: int | None) -> Callable[..., Any]:
    shape, scratch = plan.shape, softmax.scratch(plan)

    def q_at(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        return b, h, i

    def kv_at(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        if plan.causal:
            # Stay at the last visible block: a block index that does not change is not copied.
            seen = at.last_kv_block(i, plan.block_q, plan.block_kv, plan.offset)
            j = jnp.minimum(j, seen)
        return b, at.quotient(h, shape.group), j

    outputs = Outputs.of(plan, out_dtype, q_at)
    names = ("q", "k", "v", *outputs.names, *scratch)
    unused = dict.fromkeys(Refs.__dataclass_fields__)

    def body(*refs: Any) -> None:
        flash_fwd_kernel.kernel(
            Refs(**{**unused, **dict(zip(names, refs, strict=True))}), plan=plan
        )

    call = pl.pallas_call(
        body,
        name="flash_fwd",
        grid=(shape.batch, shape.q_heads, plan.q_blocks, plan.kv_blocks),
        in_specs=[
            at.window(plan.block_q, shape.head_dim_qk, q_at),
            at.window(plan.block_kv, shape.head_dim_qk, kv_at),
            at.window(plan.block_kv, shape.head_dim_v, kv_at),
        ],
        out_specs=outputs.specs,
        out_shape=outputs.shapes,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
    )
    return lambda *arrays: outputs.results(call(*arrays))


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract q, k and v. Raises ValueError for a config that suits no chip."""
    fn = functools.partial(
        flash_fwd,
        block_sizes=BlockSizes(**config),  # type: ignore[arg-type]
        causal=problem.options["causal"],
        **keywords(problem),
    )
    return fn, operands(problem)


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """Blocks of 512 to 2048, dots of 256 to 1024 within them.

    Below 512 the fixed cost of a grid step outweighs its arithmetic; above 2048 the accumulator and
    its backup only cost VMEM. Which dot's tile schedules best differs by chip. Share of the MXU
    limit, 2048 x 2048 block, bf16, head dims 128 / 128 on v6e and 192 / 128 on tpu7x: 512 x 512
    98 % and 95 %, 256 x 1024 98 % and (1024 x 2048 block) 93 %, 256 x 512 76 % and 96 %; dots of
    256 keys lost 2 to 6 % on both. Under a soft cap on v6e these win instead: 512 x 256 96 %
    (no spills), 512 x 512 73 %.
    """
    keys = (256, 512, 1024) if problem.options["logit_soft_cap"] else (512, 1024)
    q_len, kv_len = problem.shape["q_len"], problem.shape["kv_len"]

    def blocks(length: int, *sizes: int) -> Tunable:
        return Tunable(values=at.block_values(length, sizes), check=at.allowed_block)

    def compute(length: int, *sizes: int) -> Tunable:
        return Tunable(
            values=at.block_values(length, sizes),
            check=lambda value: None if value is None else at.allowed_block(value),
        )

    return {
        "block_q": blocks(q_len, 512, 1024, 2048),
        "block_kv": blocks(kv_len, 512, 1024, 2048),
        "block_q_compute": compute(q_len, 256, 512),
        "block_kv_compute": compute(kv_len, *keys),
        "vmem_limit_bytes": _vmem_limit(problem, device),
    }


def _vmem_limit(problem: Problem, device: Device) -> Tunable:
    """The default limit where 2048 x 2048 fits it with a quarter to spare, else the raised one."""
    itemsize, shape = jnp.dtype(problem.dtype).itemsize, AttentionShape.of(problem)
    acc = at.round_up(shape.head_dim_v + 1, LANES)
    windows = (
        2 * 2 * itemsize * (at.round_up(shape.head_dim_qk, LANES) + acc)
    )  # q, k, v, out, twice
    scratch = 4 * (2 * acc + 4 * LANES)  # accumulator and its backup; anchors, maxima, sums
    limit = vmem_limit_tunable(device)
    fits = 2048 * (windows + scratch) <= device.scoped_vmem_bytes * 3 // 4
    return Tunable(values=limit.values[:1] if fits else limit.values[-1:], check=limit.check)


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why the config cannot run on this problem and device, with both numbers; None when it can."""
    try:
        blocks = BlockSizes(**config)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        return str(error)
    return limit_reason(blocks.vmem_limit_bytes, device)


def canonical(problem: Problem, config: Config) -> Config:
    """Blocks clamped to the padded lengths, nulls filled in; an illegal config as it is."""
    try:
        blocks = BlockSizes(**config)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return config
    blocks = blocks.clamped(problem.shape["q_len"], problem.shape["kv_len"])
    return {name: getattr(blocks, name) for name in BlockSizes.__dataclass_fields__}


def default(problem: Problem, device: Device) -> Config:
    """128 everywhere.

    Source: `BlockSizes.get_default` of `jax.experimental.pallas.ops.tpu.flash_attention`, what a
    caller who passes no block sizes gets.
    """
    return canonical(problem, {"block_q": 128, "block_kv": 128})


def check(problem: Problem) -> None:
    """Raises InputError where heads do not group or a constant is certain to be unsafe."""
    at.check_heads(problem)
    at.check_shift_option(problem)


def flops(problem: Problem) -> int:
    per_pair = 2 * (problem.shape["head_dim_qk"] + problem.shape["head_dim_v"])
    return at.pair_flops(problem, per_pair)


KERNEL = Kernel(
    name="flash_fwd",
    axes=at.AXES,
    axis_defaults=at.AXIS_DEFAULTS,
    build=build,
    tunables=tunables,
    flops=flops,
    flop_convention="2·(d + dv) per visible (query, key) pair and q head: QKᵀ and PV",
    options={
        **at.attention_options(),
        "out_dtype": choice(None, *OUT_DTYPES),
        "max_logit_const": number(positive=False),
        "use_exp2": flag(True),
        "residuals": flag(),
    },
    check=check,
    illegal=illegal,
    canonical=canonical,
    default=default,
    inputs=inputs,
    reference=reference.flash_fwd,
    # The anchors' check depends on the data; logits of `inputs` do not leave its range.
    scope_counts=lambda problem, config: {"rescale_step": 0},
)
