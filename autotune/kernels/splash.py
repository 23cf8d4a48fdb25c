"""Splash attention, forward: attention under a static mask, over its active blocks only.

Conventions (scale, soft cap, lse) are those of `attention.py`, masks those of `masks.py`, the
algorithm that of `anchored_softmax.py`. Lengths that no block divides are read past their edge and
masked, so nothing is padded or sliced in HBM. Segment ids, where asked for, hide pairs of different
ids; a negative id is padding, which sees nothing and is seen by nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.candidate import Config
from autotune.kernels import attention as at
from autotune.kernels import flash_fwd_call
from autotune.kernels import reference as references
from autotune.kernels import splash_codes as codes
from autotune.kernels import splash_space as space
from autotune.kernels.attention import AttentionShape
from autotune.kernels.base import Call, Kernel
from autotune.kernels.flash_fwd_call import Outputs, abstract, keywords, operands, plan_entries
from autotune.kernels.mask_table import MaskTable, table_of
from autotune.kernels.masks import Mask, rows_of
from autotune.kernels.splash_kernel import SplashPlan, SplashRefs, kernel, scratch
from autotune.kernels.splash_space import BlockSizes
from autotune.problem import Problem

Q_PADDING, KV_PADDING = -1, -2
"""What negative ids become: unequal, so that padding never sees padding."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """One call's mask as arrays: the execution table, what each step does, each row's bounds.

    Attributes:
      tiles: code -> its tiles.
      unseen: codes after which some row may not have seen any key yet.
    """

    table: MaskTable
    actions: np.ndarray
    bounds: codes.Bounds
    tiles: dict[int, codes.Tiles]
    unseen: frozenset[int]

    @classmethod
    def of(cls, mask: Mask, shape: AttentionShape, blocks: BlockSizes, *, ids: bool) -> Tables:
        rows = rows_of(mask, shape.q_len, shape.kv_len)
        table = table_of(mask, shape.q_len, shape.kv_len, blocks.block_q, blocks.block_kv)
        assigned = codes.assign(table, blocks.q_tile, blocks.kv_tile, all_cut=ids)
        late = codes.unseen_codes(table, assigned.steps, rows)
        return cls(
            table=table,
            actions=codes.actions(table, assigned.steps),
            bounds=codes.row_bounds(rows, blocks.block_q, blocks.block_kv),
            tiles=assigned.tiles,
            unseen=frozenset(assigned.tiles) if ids else late,
        )

    def prefetched(self, stored: bool) -> tuple[np.ndarray, ...]:
        """The SMEM operands: rows, columns, actions and, with stored patterns, their indices."""
        first = (self.table.rows, self.table.cols, self.actions)
        return (*first, self.table.mask_next) if stored else first


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    *,
    mask: Mask,
    block_sizes: BlockSizes,
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
    kv_heads, kv_len, head_dim_v]; segment ids, both or none, int32[batch, q_len] and
    int32[batch, kv_len]. With `residuals` also lse and max, [batch, q_heads, q_len] f32. Rows that
    see no key are 0, with lse = max = `attention.MASK_VALUE`. The other arguments are those of
    `flash_fwd`.

    Raises:
      ValueError: for shapes that do not belong together, or a constant that a soft cap proves
        unsafe.
    """
    shape = at.shape_of(q, k, v)
    ids = _checked_ids(shape, q_segment_ids, kv_segment_ids)
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
    tables = Tables.of(mask, shape, blocks, ids=bool(ids))
    stored = blocks.partial_mask == "stored" and tables.table.patterns > 0
    plan = SplashPlan(
        **entries,
        track_top=residuals or bool(ids),
        # Stored patterns need no bounds, unless to tell rows that saw nothing yet.
        sides=() if stored and (ids or not tables.unseen) else tables.bounds.sides,
        stored=stored,
        segment_ids=bool(ids),
        codes=tables.tiles,
        unseen=tables.unseen,
    )
    return _call(plan, tables, out_dtype or q.dtype, blocks.vmem_limit_bytes)(q, k, v, *ids)


def _checked_ids(shape: AttentionShape, q_ids: Any, kv_ids: Any) -> tuple[jax.Array, ...]:
    """Ids as int32[batch, 1, length] with padding told apart; () without ids."""
    if q_ids is None and kv_ids is None:
        return ()
    found = []
    for name, ids, length, padding in (
        ("q_segment_ids", q_ids, shape.q_len, Q_PADDING),
        ("kv_segment_ids", kv_ids, shape.kv_len, KV_PADDING),
    ):
        if ids is None or tuple(ids.shape) != (shape.batch, length):
            given = None if ids is None else tuple(ids.shape)
            raise ValueError(f"{name} has shape {given}; {(shape.batch, length)} is needed")
        ids = ids.astype(jnp.int32)
        found.append(jnp.where(ids < 0, padding, ids)[:, None, :])
    return tuple(found)


def _call(
    plan: SplashPlan, tables: Tables, out_dtype: Any, vmem_limit_bytes: int | None
) -> Callable[..., Any]:
    shape, held = plan.shape, scratch(plan)
    prefetched = tables.prefetched(plan.stored)
    outputs = Outputs.of(plan, out_dtype, lambda b, h, s, rows, *_: (b, h, rows[s]))
    specs, constants = _inputs(plan, tables)
    names = (*specs, *outputs.names, *held)
    unused = dict.fromkeys(SplashRefs.__dataclass_fields__)

    def body(*refs: Any) -> None:
        own = dict(zip(names, refs[len(prefetched) :], strict=True))
        kernel(refs[: len(prefetched)], SplashRefs(**{**unused, **own}), plan=plan)

    call = pl.pallas_call(
        body,
        name="splash",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(shape.batch, shape.q_heads, tables.table.steps),
            in_specs=list(specs.values()),
            out_specs=outputs.specs,
            scratch_shapes=list(held.values()),
        ),
        out_shape=outputs.shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
    )

    def run(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return outputs.results(call(*prefetched, q, k, v, *ids, *(make() for make in constants)))

    return run


def _inputs(
    plan: SplashPlan, tables: Tables
) -> tuple[dict[str, pl.BlockSpec], list[Callable[[], Any]]]:
    """`SplashRefs` field -> window, in operand order, and what makes the mask's own operands."""
    shape = plan.shape
    kv_at = lambda b, h, s, rows, cols, *_: (b, at.quotient(h, shape.group), cols[s])
    q_at = lambda b, h, s, rows, *_: (b, h, rows[s])
    specs = {
        "q": at.window(plan.block_q, shape.head_dim_qk, q_at),
        "k": at.window(plan.block_kv, shape.head_dim_qk, kv_at),
        "v": at.window(plan.block_kv, shape.head_dim_v, kv_at),
    }
    constants: list[Callable[[], Any]] = []
    if plan.segment_ids:
        specs["q_ids"] = pl.BlockSpec(
            (None, 1, plan.block_q), lambda b, h, s, rows, *_: (b, 0, rows[s])
        )
        specs["kv_ids"] = pl.BlockSpec(
            (None, 1, plan.block_kv), lambda b, h, s, rows, cols, *_: (b, 0, cols[s])
        )
    if plan.sides:
        specs["bounds"] = pl.BlockSpec(
            (len(plan.sides), plan.block_q), lambda b, h, s, rows, *_: (0, rows[s])
        )
        constants.append(lambda: jnp.asarray(tables.bounds.values))
    if plan.stored:
        specs["pattern"] = pl.BlockSpec(
            (None, plan.block_q, plan.block_kv),
            lambda b, h, s, rows, cols, actions, mask_next: (mask_next[s], 0, 0),
        )
        constants.append(functools.partial(_patterns, tables.table))
    return specs, constants


def _patterns(table: MaskTable) -> jax.Array:
    """int8[patterns, block_q, block_kv], made on the device from the bounds of their rows.

    As constants hundreds of patterns would make the program gigabytes large; the barrier keeps the
    compiler from folding them into such constants.
    """
    bounds: tuple[jax.Array, jax.Array] = (jnp.asarray(table.lo), jnp.asarray(table.hi))
    lo, hi = lax.optimization_barrier(bounds)  # type: ignore[no-untyped-call]
    keys = lax.broadcasted_iota(jnp.int32, (1, 1, table.block_kv), 2)
    seen: jax.Array = functools.reduce(
        jnp.logical_or,
        [
            (keys >= lo[:, n, :, None]) & (keys < hi[:, n, :, None])
            for n in range(table.lo.shape[1])
        ],
    )
    return seen.astype(jnp.int8)


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract q, k, v and segment ids. Raises ValueError for an impossible config."""
    fn = functools.partial(
        splash,
        mask=space.mask_of(problem),
        block_sizes=space.block_sizes(problem, config),
        **keywords(problem),
    )
    s = AttentionShape.of(problem)
    lengths = (s.q_len, s.kv_len) if problem.options["segment_ids"] else ()
    return fn, (*operands(problem), *(abstract((s.batch, n), jnp.int32) for n in lengths))


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """As of `flash_fwd`; ids of packed documents of about 1/8 of the keys, the last one padding."""
    arrays = flash_fwd_call.inputs(problem, key)
    ids = problem.options["segment_ids"]
    return (*arrays, *_draw_ids(key, shape=AttentionShape.of(problem))) if ids else arrays


@functools.partial(jax.jit, static_argnames=("shape",))
def _draw_ids(key: jax.Array, *, shape: AttentionShape) -> tuple[jax.Array, jax.Array]:
    lengths, mean = (shape.batch, shape.kv_len), min(1.0, 8 / shape.kv_len)
    starts = jax.random.bernoulli(jax.random.fold_in(key, 1), mean, lengths)
    kv_ids = jnp.cumsum(starts, axis=1)
    kv_ids = jnp.where((kv_ids == kv_ids[:, -1:]) & (kv_ids > 0), -1, kv_ids)
    position = jnp.arange(shape.q_len) + shape.causal_offset
    return kv_ids[:, jnp.clip(position, 0, shape.kv_len - 1)], kv_ids


def reference(problem: Problem, q: Any, k: Any, v: Any, *ids: Any) -> Any:
    """The output, or (output, lse, max) with `residuals`, in float64 under the dense mask."""
    q, k, v = references.f64(q, k, v)
    shape, options = AttentionShape.of(problem), problem.options
    seen = rows_of(space.mask_of(problem), shape.q_len, shape.kv_len).dense()
    if ids:
        q_ids, kv_ids = (np.asarray(i)[:, None] for i in ids)
        same = (q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids >= 0)[..., None]
        seen = seen & same
    out, lse, top = references.attention(
        q, k, v, scale=shape.scale(options["scale"]), soft_cap=options["logit_soft_cap"], mask=seen
    )
    return (out, lse, top) if options["residuals"] else out


KERNEL = Kernel(
    name="splash",
    axes=at.AXES,
    axis_defaults=at.AXIS_DEFAULTS,
    build=build,
    tunables=space.tunables,
    flops=space.flops,
    flop_convention=(
        "2·(d + dv) per (query, key) pair the mask shows and q head: QKᵀ and PV; pairs that "
        "run-time segment ids hide are counted"
    ),
    options=space.options(),
    check=space.check,
    illegal=space.illegal,
    canonical=space.canonical,
    default=space.default,
    inputs=inputs,
    reference=reference,
    # The anchors' check depends on the data; logits of standard normals never leave its range.
    scope_counts=lambda problem, config: {"rescale_step": 0},
)
