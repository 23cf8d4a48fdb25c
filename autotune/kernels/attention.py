"""What the attention kernels share: shapes, GQA map, causal alignment, block rules, FLOP pairs.

Conventions, the same in every kernel and reference:
- q is [batch, q_heads, q_len, head_dim_qk], k [batch, kv_heads, kv_len, head_dim_qk], v and the
  output [batch, heads, length, head_dim_v]; q head h reads kv head h // (q_heads / kv_heads).
- Logits are q·k · scale, scale = 1/sqrt(head_dim_qk) unless the option `scale` is given, then
  soft-capped (cap · tanh(logits / cap)), then masked.
- Causal is bottom-right aligned: query i sees keys j <= i + kv_len - q_len.
- lse and max are natural logarithms' arguments of the capped logits, f32, whatever `use_exp2`; a
  fully masked row has output 0 and lse = max = MASK_VALUE (finite: no inf - inf in a merge).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autotune.candidate import Scalar
from autotune.errors import InputError
from autotune.kernels.options import Option, flag, number
from autotune.problem import Problem

AXES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim_qk", "head_dim_v")
AXIS_DEFAULTS: Mapping[str, int] = {"batch": 1}
LANES = 128
MASK_VALUE = -0.7 * 3.4028234663852886e38
"""Logit of a masked pair, and lse and max of a fully masked row: finite, far below any logit."""
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

At = Callable[..., tuple[Any, Any, Any]]
"""Program ids (and prefetched tables) -> (batch, head, block) of an operand's window."""


def window(rows: int, columns: int, at: At) -> pl.BlockSpec:
    """A window of [batch, heads, length, columns]: `rows` of one head."""
    return pl.BlockSpec((None, None, rows, columns), lambda *ids: (*at(*ids), 0))


def row_window(rows: int, at: At) -> pl.BlockSpec:
    """A window of [batch, heads, 1, length]: a number for each of `rows`."""

    def index(*ids: Any) -> tuple[Any, ...]:
        batch, head, block = at(*ids)
        return batch, head, 0, block

    return pl.BlockSpec((None, None, 1, rows), index)


def attention_options() -> dict[str, Option]:
    """The options all attention kernels have; `scale: null` is 1/sqrt(head_dim_qk)."""
    return {
        "causal": flag(),
        "scale": number(positive=True),
        "logit_soft_cap": number(positive=True),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Sizes of one attention problem. Raises ValueError where heads do not group."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim_qk: int
    head_dim_v: int

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} do not divide q_heads {self.q_heads}; "
                "every kv head serves the same number of q heads"
            )

    @classmethod
    def of(cls, problem: Problem) -> AttentionShape:
        return cls(**{axis: problem.shape[axis] for axis in AXES})

    @property
    def group(self) -> int:
        """q heads per kv head: 1 is MHA, q_heads is MQA."""
        return self.q_heads // self.kv_heads

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + offset (bottom-right aligned); negative where q is longer."""
        return self.kv_len - self.q_len

    def scale(self, option: float | None) -> float:
        """The factor on q·k: `option`, or 1/sqrt(head_dim_qk)."""
        return self.head_dim_qk**-0.5 if option is None else option


def check_heads(problem: Problem) -> None:
    """Raises InputError naming both head counts where kv_heads do not divide q_heads."""
    try:
        AttentionShape.of(problem)
    except ValueError as error:
        raise InputError(str(error), path=("shape", "kv_heads")) from None


def shape_of(q: Any, k: Any, v: Any) -> AttentionShape:
    """The shape of q [b, hq, lq, d], k [b, hkv, lkv, d], v [b, hkv, lkv, dv].

    Raises ValueError, with both shapes, where the three do not belong together.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; [batch, heads, length, head_dim] is needed"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or length"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head_dim")
    return AttentionShape(
        batch=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        q_len=q.shape[2],
        kv_len=k.shape[2],
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
    )


def visible_pairs(q_len: int, kv_len: int, *, causal: bool) -> int:
    """(query, key) pairs that attention is defined on, per head.

    Causal, bottom-right: row i has min(kv_len, max(0, i + 1 + kv_len - q_len)) keys.
    """
    if not causal:
        return q_len * kv_len
    rows = min(q_len, kv_len)  # rows that see any key; the last sees all kv_len
    return rows * kv_len - rows * (rows - 1) // 2


def pair_flops(problem: Problem, per_pair: int) -> int:
    """FLOPs of a kernel that spends `per_pair` on each visible pair of each head."""
    shape = AttentionShape.of(problem)
    causal = bool(problem.options.get("causal"))
    pairs = visible_pairs(shape.q_len, shape.kv_len, causal=causal)
    return shape.batch * shape.q_heads * pairs * per_pair


def round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def clamp_block(block: int, length: int, tile: int = LANES) -> int:
    """`block`, or the tile-padded length where the block is larger."""
    return min(block, round_up(length, tile))


def check_block(name: str, value: Scalar, tile: int = LANES) -> int:
    """`value` as a block size. Raises ValueError with both numbers when not a multiple of tile."""
    if isinstance(value, bool) or not isinstance(value, int) or value < tile or value % tile:
        raise ValueError(f"{name} {value!r} is not a positive multiple of {tile}")
    return value


def check_divides(inner: str, inner_size: int, outer: str, outer_size: int) -> None:
    """Raises ValueError with both numbers unless `inner_size` divides `outer_size`."""
    if outer_size % inner_size:
        raise ValueError(f"{inner} {inner_size} does not divide {outer} {outer_size}")


def block_values(length: int, choices: Sequence[int], tile: int = LANES) -> tuple[int, ...]:
    """`choices` clamped to the length, each once, ascending."""
    return tuple(sorted({clamp_block(choice, length, tile) for choice in choices}))


def allowed_block(value: Scalar, tile: int = LANES) -> str | None:
    """`Tunable.check` of a block size: what is allowed, or None when `value` is legal."""
    try:
        check_block("block", value, tile)
    except ValueError:
        return f"a positive multiple of {tile}"
    return None


# Block arithmetic. Block indices may be Python ints or traced scalars; `offset` is causal_offset.


def quotient(a: Any, b: int) -> Any:
    """a // b for a >= 0. The operator's floor on a traced value would ask for the chip's kind."""
    return a // b if isinstance(a, int) else lax.div(a, jnp.asarray(b, a.dtype))


def last_kv_block(q_block: Any, block_q: int, block_kv: int, offset: int) -> Any:
    """Last kv block any query of `q_block` sees under a causal mask; 0 where none: a safe index."""
    last = (q_block + 1) * block_q - 1 + offset
    return quotient(_at_least_0(last), block_kv)


def _at_least_0(value: Any) -> Any:
    return max(value, 0) if isinstance(value, int) else jnp.maximum(value, 0)


def is_visible(q_block: Any, kv_block: Any, block_q: int, block_kv: int, offset: int) -> Any:
    """Whether any pair of the block is visible under a causal mask."""
    return kv_block * block_kv <= (q_block + 1) * block_q - 1 + offset


def is_cut(q_block: Any, kv_block: Any, block_q: int, block_kv: int, offset: int) -> Any:
    """Whether any pair of the block is hidden under a causal mask."""
    return (kv_block + 1) * block_kv - 1 > q_block * block_q + offset


def shift_range(kv_len: int) -> tuple[float, float]:
    """How far (least, most) a row's largest logit may lie above the max-logit constant, in nats.

    Below, its exponential 2^-64 and the row's sum lose what is small beside them to f32 underflow;
    above, the sum of kv_len exponentials, each weighted with values up to 2^20, nears f32's 2^128.
    """
    return -64 * LN_2, 107 * LN_2 - math.log(kv_len)


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


def check_shift_option(problem: Problem) -> None:
    """Raises InputError for the option `max_logit_const` where `check_shift` refuses it."""
    shift, cap = problem.options["max_logit_const"], problem.options["logit_soft_cap"]
    if shift is None:
        return
    try:
        check_shift(shift, cap, problem.shape["kv_len"])
    except ValueError as error:
        raise InputError(str(error), path=("options", "max_logit_const")) from None
