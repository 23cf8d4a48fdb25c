"""What flash_fwd and splash share of a call: keywords, operands, outputs, most of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from autotune import device as devices
from autotune.kernels import attention as at
from autotune.kernels.attention import At, AttentionShape
from autotune.kernels.attention_inputs import draw, gain_of
from autotune.kernels.flash_fwd_plan import SoftmaxPlan
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct


class Tiles(Protocol):
    """Blocks as they run: of the grid, and of the dots within them."""

    @property
    def block_q(self) -> int: ...
    @property
    def block_kv(self) -> int: ...
    @property
    def q_tile(self) -> int: ...
    @property
    def kv_tile(self) -> int: ...


def keywords(problem: Problem) -> dict[str, Any]:
    """The problem's options and device as the keyword arguments both wrappers have."""
    options, out_dtype = problem.options, problem.options["out_dtype"]
    same = ("scale", "logit_soft_cap", "max_logit_const", "use_exp2", "residuals")
    return {
        **{name: options[name] for name in same},
        "out_dtype": jnp.dtype(out_dtype) if out_dtype else None,
        "mxu_size": devices.get(problem.device).mxu_size,
    }


def operands(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k and v in the problem's dtype."""
    s, dtype = AttentionShape.of(problem), jnp.dtype(problem.dtype)
    return (
        abstract((s.batch, s.q_heads, s.q_len, s.head_dim_qk), dtype),
        abstract((s.batch, s.kv_heads, s.kv_len, s.head_dim_qk), dtype),
        abstract((s.batch, s.kv_heads, s.kv_len, s.head_dim_v), dtype),
    )


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """q, k, v of forward kernels: standard normals, q times `logit_gain`."""
    return draw(key, arrays=operands(problem), scale=gain_of(problem))


def plan_entries(
    shape: AttentionShape, tiles: Tiles, *, scale: float | None, logit_soft_cap: float | None,
    max_logit_const: float | None, use_exp2: bool, residuals: bool, mxu_size: int,
) -> dict[str, Any]:  # fmt: skip
    """`SoftmaxPlan`'s fields but `track_top`.

    Raises ValueError for a constant that a soft cap proves unsafe.
    """
    if max_logit_const is not None:
        at.check_shift(max_logit_const, logit_soft_cap, shape.kv_len)
    return {
        "shape": shape,
        "block_q": tiles.block_q,
        "block_kv": tiles.block_kv,
        "q_tile": tiles.q_tile,
        "kv_tile": tiles.kv_tile,
        "scale": shape.scale(scale),
        "soft_cap": logit_soft_cap or None,
        "shift": max_logit_const,
        "use_exp2": use_exp2,
        "residuals": residuals,
        "spare_columns": at.round_up(shape.head_dim_v, mxu_size) > shape.head_dim_v,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """The output and, with residuals, lse and max.

    Attributes:
      names: fields of `Refs`; specs and shapes: what `pallas_call` is given for them.
    """

    plan: SoftmaxPlan
    names: tuple[str, ...]
    specs: list[pl.BlockSpec]
    shapes: list[jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, plan: SoftmaxPlan, out_dtype: Any, q_at: At) -> Outputs:
        """`q_at`: where the windows of queries are."""
        s, count = plan.shape, 3 if plan.residuals else 1
        rows = abstract((s.batch, s.q_heads, 1, s.q_len), jnp.float32)
        row = at.row_window(plan.block_q, q_at)
        out = abstract((s.batch, s.q_heads, s.q_len, s.head_dim_v), out_dtype)
        return cls(
            plan=plan,
            names=("out", "lse", "top_out")[:count],
            specs=[at.window(plan.block_q, s.head_dim_v, q_at), row, row][:count],
            shapes=[out, rows, rows][:count],
        )

    def results(self, arrays: Any) -> Any:
        """What a wrapper returns: out, or (out, lse, max), the latter [batch, q_heads, q_len]."""
        if not self.plan.residuals:
            return arrays[0]
        shape = self.plan.shape
        rows = (shape.batch, shape.q_heads, shape.q_len)
        return arrays[0], arrays[1].reshape(rows), arrays[2].reshape(rows)
