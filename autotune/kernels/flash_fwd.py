"""Flash attention, forward: MHA, GQA and MQA, causal or not, any lengths and head dims.

Conventions (scale, causal alignment, soft cap, lse) are those of `attention.py`; the algorithm is
told in `anchored_softmax.py`. Lengths that no block divides are read past their edge and masked, so
nothing is padded or sliced in HBM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import device as devices
from autotune.candidate import Config
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels import anchored_softmax as softmax
from autotune.kernels import attention as at
from autotune.kernels import flash_fwd_kernel, reference
from autotune.kernels.attention import LANES, AttentionShape
from autotune.kernels.base import Call, Kernel, Tunable, choice, flag, number
from autotune.kernels.flash_fwd_plan import Plan, Refs
from autotune.kernels.matmul_space import vmem_limit_tunable
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
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
        as long as every row's largest logit is within `shift_range`; outside, rows underflow to
        zero or overflow.
      mxu_size: side of the chip's MXU; decides whether it sums the probabilities on the side.

    Raises:
      ValueError: for shapes that do not belong together, or a constant that a soft cap proves
        unsafe.
    """
    shape = at.shape_of(q, k, v)
    if max_logit_const is not None:
        check_shift(max_logit_const, logit_soft_cap, shape.kv_len)
    blocks = block_sizes.clamped(shape.q_len, shape.kv_len)
    plan = Plan(
        shape=shape,
        block_q=blocks.block_q,
        block_kv=blocks.block_kv,
        q_tile=blocks.block_q_compute or blocks.block_q,
        kv_tile=blocks.block_kv_compute or blocks.block_kv,
        causal=causal,
        scale=shape.scale(scale),
        soft_cap=logit_soft_cap or None,
        shift=max_logit_const,
        use_exp2=use_exp2,
        residuals=residuals,
        track_top=residuals,
        spare_columns=at.round_up(shape.head_dim_v, mxu_size) > shape.head_dim_v,
    )
    call = _call(plan, out_dtype or q.dtype, blocks.vmem_limit_bytes)
    if not residuals:
        return call(q, k, v)[0]
    out, lse, top = call(q, k, v)
    rows = (shape.batch, shape.q_heads, shape.q_len)
    return out, lse.reshape(rows), top.reshape(rows)


def _call(plan: Plan, out_dtype: Any, vmem_limit_bytes: int | None) -> Callable[..., Any]:
    shape, scratch = plan.shape, softmax.scratch(plan)
    row_block = pl.BlockSpec((None, None, 1, plan.block_q), lambda b, h, i, j: (b, h, 0, i))
    rows = abstract((shape.batch, shape.q_heads, 1, shape.q_len), jnp.float32)
    out = abstract((shape.batch, shape.q_heads, shape.q_len, shape.head_dim_v), out_dtype)

    def kv_index(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        if plan.causal:
            # Stay at the last visible block: a block index that does not change is not copied.
            seen = at.last_kv_block(i, plan.block_q, plan.block_kv, plan.offset)
            j = jnp.minimum(j, seen)
        return b, at.quotient(h, shape.group), j, 0

    def q_spec(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, plan.block_q, dim), lambda b, h, i, j: (b, h, i, 0))

    def kv_spec(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, plan.block_kv, dim), kv_index)

    outputs = ("out", "lse", "top_out") if plan.residuals else ("out",)
    names = ("q", "k", "v", *outputs, *scratch)
    unused = dict.fromkeys(Refs.__dataclass_fields__)

    def body(*refs: Any) -> None:
        flash_fwd_kernel.kernel(
            Refs(**{**unused, **dict(zip(names, refs, strict=True))}), plan=plan
        )

    return pl.pallas_call(
        body,
        name="flash_fwd",
        grid=(shape.batch, shape.q_heads, plan.q_blocks, plan.kv_blocks),
        in_specs=[q_spec(shape.head_dim_qk), kv_spec(shape.head_dim_qk), kv_spec(shape.head_dim_v)],
        out_specs=[q_spec(shape.head_dim_v), row_block, row_block][: len(outputs)],
        out_shape=[out, rows, rows][: len(outputs)],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
    )


def shift_range(kv_len: int) -> tuple[float, float]:
    """How far (least, most) a row's largest logit may lie above the max-logit constant, in nats.

    Below, its exponential 2^-64 and the row's sum lose what is small beside them to f32 underflow;
    above, the sum of kv_len exponentials, each weighted with values up to 2^20, nears f32's 2^128.
    """
    return -64 * at.LN_2, 107 * at.LN_2 - math.log(kv_len)


def check_shift(shift: float, soft_cap: float | None, kv_len: int) -> None:
    """Raises ValueError where the soft cap leaves room for a largest logit outside shift_range."""
    if not soft_cap:
        return
    least, most = shift_range(kv_len)
    low, high = soft_cap - most, -soft_cap - least
    if not low <= shift <= high:
        room = f"from {low:.1f} to {high:.1f}" if low <= high else "none (leave it out)"
        raise ValueError(
            f"max_logit_const {shift} is not safe with logit_soft_cap {soft_cap} and kv_len "
            f"{kv_len}; allowed: {room}"
        )


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract q, k and v. Raises ValueError for a config that suits no chip."""
    options, shape = problem.options, AttentionShape.of(problem)
    out_dtype = options["out_dtype"]
    fn = functools.partial(
        flash_fwd,
        block_sizes=BlockSizes(**config),  # type: ignore[arg-type]
        causal=options["causal"],
        scale=options["scale"],
        logit_soft_cap=options["logit_soft_cap"],
        max_logit_const=options["max_logit_const"],
        use_exp2=options["use_exp2"],
        residuals=options["residuals"],
        out_dtype=jnp.dtype(out_dtype) if out_dtype else None,
        mxu_size=devices.get(problem.device).mxu_size,
    )
    dtype, s = jnp.dtype(problem.dtype), shape
    return fn, (
        abstract((s.batch, s.q_heads, s.q_len, s.head_dim_qk), dtype),
        abstract((s.batch, s.kv_heads, s.kv_len, s.head_dim_qk), dtype),
        abstract((s.batch, s.kv_heads, s.kv_len, s.head_dim_v), dtype),
    )


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """Blocks of 512 to 2048, dots of 256 to 1024 within them.

    Below 512 the fixed cost of a grid step outweighs its arithmetic; above 2048 the accumulator and
    its backup only cost VMEM. Which dot's tile schedules best differs by chip. Share of the MXU
    limit, 2048 x 2048 block, bf16, head dims 128 / 128 on v6e and 192 / 128 on tpu7x: 512 x 512
    98 % and 95 %, 256 x 1024 98 % and (1024 x 2048 block) 93 %, 256 x 512 76 % and 96 %; dots of
    256 keys lost 2 to 6 % on both.
    """
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
        "block_kv_compute": compute(kv_len, 512, 1024),
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
    limit = blocks.vmem_limit_bytes
    if limit is not None and limit > device.vmem_bytes:
        return f"vmem_limit_bytes {limit} is above {device.name}'s VMEM of {device.vmem_bytes}"
    return None


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
    options = problem.options
    if options["max_logit_const"] is None:
        return
    try:
        cap, kv_len = options["logit_soft_cap"], problem.shape["kv_len"]
        check_shift(options["max_logit_const"], cap, kv_len)
    except ValueError as error:
        raise InputError(str(error), path=("options", "max_logit_const")) from None


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
    reference=reference.flash_fwd,
    # The anchors' check depends on the data; logits of standard normals never leave its range.
    scope_counts=lambda problem, config: {"rescale_step": 0},
)
