"""Names for the parts of kernels whose authors gave none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_kernels import BF16, F32, one, shaped
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention, megablox
from jax.experimental.pallas.ops.tpu import matmul as jax_matmul
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.extend.core import jaxpr_as_fun

from autotune import device
from autotune.call_record import PallasCall
from autotune.pallas_call import trace
from autotune.traced.jaxprs import inner_jaxprs, open_jaxpr
from autotune.traced.marking import mark

V6E = device.get("v6e")
TILE = (128, 128)


def kernel_call(
    body: Callable[..., Any], grid: tuple[int, ...] = (2, 3), *, interpret: bool = False
) -> Callable[[Any], Any]:
    """A call whose body gets an input block, an output block and a scratch."""
    return pl.pallas_call(
        body, name="unnamed", grid=grid, out_shape=shaped(TILE, F32), interpret=interpret,
        in_specs=[pl.BlockSpec(TILE, lambda *ids: (0, 0))],
        out_specs=pl.BlockSpec(TILE, lambda *ids: (0, 0)),
        scratch_shapes=[pltpu.VMEM(TILE, F32)],
    )  # fmt: skip


def counts(body: Callable[..., Any], grid: tuple[int, ...] = (2, 3)) -> dict[str, int | None]:
    call = one(kernel_call(body, grid), shaped(TILE, F32))
    return {scope: runs for scope, runs in call.scopes.items() if scope}


def names(jaxpr: Any) -> Iterator[str]:
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield from (scope.name for scope in eqn.source_info.name_stack.stack)
        for inner in inner_jaxprs(eqn):
            yield from names(inner)


def accumulate(x: Any, z: Any, acc: Any) -> None:
    """Init, step and finalize over the last grid axis of (2, 3)."""
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    acc[...] += jnp.dot(x[...], x[...])

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        z[...] = acc[...] * 2


# The words


def test_init_step_and_finalize_are_told_apart_and_counted() -> None:
    call = one(kernel_call(accumulate), shaped(TILE, F32))
    assert call.scopes == {"": 6, "init": 2, "step": 6, "finalize": 2}
    assert call.scope_flops == {"step": 6 * 2 * 128**3}
    assert call.marking == "marked"


def test_steps_skipped_steps_and_masked_steps_are_told_apart() -> None:
    def body(x: Any, z: Any, acc: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j < i)
        def _() -> None:
            acc[...] += jnp.dot(x[...], x[...])

        @pl.when(j == i)
        def _() -> None:
            rows = jax.lax.broadcasted_iota(jnp.int32, TILE, 0)
            columns = jax.lax.broadcasted_iota(jnp.int32, TILE, 1)
            acc[...] += jnp.where(rows >= columns, jnp.dot(x[...], x[...]), 0.0)

        @pl.when(j > i)
        def _() -> None:
            z[...] = jnp.zeros_like(z)

    assert counts(body, (3, 4)) == {"step": 3, "masked_step": 3, "skip": 6}
    skipping = [
        c for c in one(kernel_call(body, (3, 4)), shaped(TILE, F32)).classes
        if not {"step", "masked_step"} & set(c.scopes)
    ]  # fmt: skip
    assert sum(c.steps for c in skipping) == 6


def test_a_condition_inside_a_branch_is_a_part_of_its_own() -> None:
    def body(x: Any, z: Any, acc: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j <= i)
        def _() -> None:
            @pl.when(j == 0)
            def _() -> None:
                acc[...] = jnp.zeros_like(acc)

            acc[...] += jnp.dot(x[...], x[...])

            @pl.when(j == i)
            def _() -> None:
                z[...] = acc[...] + 1

    assert counts(body, (3, 4)) == {"step": 6, "init": 3, "finalize": 3}


def test_a_branch_that_only_holds_branches_is_named_branch_by_branch() -> None:
    def body(x: Any, z: Any, acc: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j <= i)
        def _() -> None:
            jax.lax.cond(
                j == i,
                lambda: z.__setitem__(..., jnp.dot(x[...], x[...])),
                lambda: z.__setitem__(..., jnp.dot(x[...], acc[...])),
            )

    assert counts(body, (3, 4)) == {"step": 3, "step_2": 3}


def test_products_under_no_condition_are_a_step_and_so_is_all_of_a_kernel_without_any() -> None:
    def products(x: Any, z: Any, acc: Any) -> None:
        z[...] = jnp.dot(x[...], x[...])

    def elementwise(x: Any, z: Any, acc: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        acc[...] += x[...] * 2

        @pl.when(pl.program_id(1) == 2)
        def _() -> None:
            z[...] = acc[...] + 1

    assert counts(products) == {"step": 6}
    assert counts(elementwise) == {"init": 2, "step": 6, "finalize": 2}


def test_a_rolled_loop_lies_in_its_step_and_one_of_unknown_turns_holds_it() -> None:
    def known(x: Any, z: Any, acc: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            z[...] = x[...]
            jax.lax.fori_loop(0, 5, lambda n, c: z.__setitem__(..., jnp.dot(z[...], x[...])), None)

    def computed(x: Any, z: Any, acc: Any) -> None:
        last = pl.program_id(1) + 1
        jax.lax.fori_loop(0, last, lambda n, c: z.__setitem__(..., jnp.dot(z[...], x[...])), None)

    call = one(kernel_call(known), shaped(TILE, F32))
    assert call.scopes == {"": 6, "step": 2}
    assert call.loops == {"step": ((10, 1),)}
    assert counts(computed) == {"step": 2 * (1 + 2 + 3)}, "once a turn"


def test_a_condition_that_grid_extents_decide_is_straight_code() -> None:
    assert counts(accumulate, (2, 1)) == {"step": 2}
    assert counts(accumulate, (2, 2)) == {"init": 2, "step": 4, "finalize": 2}


def test_words_are_numbered_and_the_authors_own_are_not_used_again() -> None:
    def body(x: Any, z: Any, acc: Any) -> None:
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _() -> None:
            with jax.named_scope("step"):
                z[...] = jnp.dot(x[...], x[...])

        for n in (1, 2):

            @pl.when(j == n)
            def _() -> None:
                z[...] = jnp.dot(x[...], x[...]) + 1

    call = one(kernel_call(body), shaped(TILE, F32))
    assert call.scopes == {"": 6, "step": 2, "step_2": 2, "step_3": 2}
    assert call.marking == "named and marked"


# What is left alone


def test_a_kernel_whose_author_named_its_parts_is_not_touched() -> None:
    def body(x: Any, z: Any, acc: Any) -> None:
        with jax.named_scope("mine"):
            z[...] = jnp.dot(x[...], x[...])

    closed = jax.make_jaxpr(kernel_call(body))(jnp.zeros(TILE))
    marked = mark(closed)
    assert marked.jaxpr is closed, "the program that was traced is the one that is compiled"
    assert list(marked.how.values()) == ["named"]
    plain = mark(jax.make_jaxpr(lambda x: x + 1)(1.0))
    assert plain.how == {}


def test_the_formula_of_einsum_is_no_name() -> None:
    def body(x: Any, z: Any, acc: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            z[...] = jnp.einsum("ij,jk->ik", x[...], x[...], preferred_element_type=F32)

    closed = jax.make_jaxpr(kernel_call(body))(jnp.zeros(TILE))
    assert "ij,jk->ik" in set(names(closed))
    assert set(names(mark(closed).jaxpr)) >= {"step"}
    assert "ij,jk->ik" not in set(names(mark(closed).jaxpr))
    assert counts(body) == {"step": 2}


def test_a_marked_program_computes_the_same() -> None:
    call = kernel_call(accumulate, interpret=True)
    x = jax.random.normal(jax.random.key(0), TILE)

    def fn(x: Any) -> Any:
        first = jax.vmap(call)(jnp.stack([x, 2 * x]))
        scanned, _ = jax.lax.scan(lambda c, _: (jax.jit(call)(c) / 100, None), x, None, length=2)
        return first, {"scanned": scanned, "twice": call(x) + call(x)}

    closed = jax.make_jaxpr(fn)(x)
    marked = mark(closed)
    assert marked.jaxpr is not closed
    expected = jax.tree.leaves(fn(x))
    for got, want in zip(jaxpr_as_fun(marked.jaxpr)(x), expected, strict=True):
        np.testing.assert_array_equal(got, want)


# JAX's own kernels

HEADS, LENGTH, HEAD_DIM = 2, 1024, 128
QKV = [shaped((1, HEADS, LENGTH, HEAD_DIM), BF16)] * 3


def splash(bq: int, bkv: int, **more: Any) -> Callable[..., Any]:
    causal = [splash_attention_mask.CausalMask((LENGTH, LENGTH))] * HEADS
    sizes = splash_attention_kernel.BlockSizes(
        block_q=bq, block_kv=bkv, block_kv_compute=bkv, **more
    )
    return jax.vmap(
        splash_attention_kernel.make_splash_mha_single_device(
            splash_attention_mask.MultiHeadMask(causal), block_sizes=sizes
        )
    )


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def total(*args: Any) -> Any:
        return fn(*args).astype(F32).sum()

    return jax.grad(total, argnums=(0, 1, 2))


def active(rows: int, columns: int) -> int:
    """Blocks of the causal mask with an unmasked pair, of all heads, counted one by one."""
    return HEADS * sum(
        column * columns <= (row + 1) * rows - 1
        for row in range(LENGTH // rows)
        for column in range(LENGTH // columns)
    )


@pytest.mark.parametrize(
    ("bq", "bkv"), [(256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 1024)]
)
def test_causal_splash_runs_its_parts_as_often_as_counted_by_hand(bq: int, bkv: int) -> None:
    call = one(splash(bq, bkv), *QKV)
    rows = HEADS * LENGTH // bq
    parts = {"init": rows, "finalize": rows} if bkv < LENGTH else {}
    steps = rows * -(-LENGTH // bkv)
    assert call.scopes == {"": steps, "step": active(bq, bkv)} | parts
    skipped = sum(c.steps for c in call.classes if "step" not in c.scopes)
    assert skipped == steps - active(bq, bkv)


def calls(fn: Callable[..., Any], *args: Any) -> dict[str, PallasCall]:
    return {call.name: call for call in trace(fn, args, V6E).calls}


def scopes_of(call: PallasCall) -> dict[str, int | None]:
    return {scope: runs for scope, runs in call.scopes.items() if scope}


@pytest.mark.parametrize("fused", [False, True])
def test_the_kernels_of_splash_backward_are_split_alike(fused: bool) -> None:
    dq = {} if fused else {"block_q_dq": 256, "block_kv_dq": 512}
    blocks = {"block_q_dkv": 256, "block_kv_dkv": 512, "block_kv_dkv_compute": 512} | dq
    found = calls(gradient(splash(256, 512, use_fused_bwd_kernel=fused, **blocks)), *QKV)
    assert len(found) == (2 if fused else 3)
    for name, call in found.items():
        columns = HEADS * LENGTH // 512 if "dkv" in name else HEADS * LENGTH // 256
        expected = {"init": columns, "step": active(256, 512), "finalize": columns}
        assert scopes_of(call) == expected, name


def test_flash_attention_and_its_backward_are_split() -> None:
    sizes = flash_attention.BlockSizes(
        block_q=256, block_k_major=512, block_k=256, block_b=1, block_q_major_dkv=256,
        block_k_major_dkv=512, block_k_dkv=256, block_q_dkv=256, block_k_major_dq=512,
        block_k_dq=256, block_q_dq=256,
    )  # fmt: skip
    found = calls(
        gradient(
            lambda *qkv: flash_attention.flash_attention(*qkv, causal=True, block_sizes=sizes)
        ),
        *QKV,
    )
    assert len(found) == 3
    for name, call in found.items():
        columns = HEADS * LENGTH // 512 if "dkv" in name else HEADS * LENGTH // 256
        split = scopes_of(call)
        split.pop("skip", None)
        expected = {"init": columns, "step": active(256, 512), "finalize": columns}
        assert split == expected, name


def test_matmul_megablox_and_paged_attention_are_split() -> None:
    square = shaped((1024, 1024), BF16)
    matmul = one(
        lambda x, y: jax_matmul.matmul(x, y, block_shape=(256, 256), block_k=256), square, square
    )
    assert scopes_of(matmul) == {"init": 16, "step": 64}
    groups = np.array([256, 512, 128, 128], np.int32)
    gmm = one(
        lambda x, y: megablox.gmm(x, y, jnp.asarray(groups), F32, (128, 256, 128)),
        shaped((1024, 512), BF16), shaped((4, 512, 512), BF16),
    )  # fmt: skip
    assert gmm.grid == (4, 8, 2)
    assert scopes_of(gmm) == {"init": 32, "step": 32, "masked_step": 32}, "the last stores, masked"
    pages, lengths = shaped((8, 64, 16, 128), BF16), shaped((4,), jnp.int32)
    paged = one(
        lambda *args: paged_attention(*args, pages_per_compute_block=4), shaped((4, 8, 128), BF16),
        pages, pages, lengths, shaped((4, 16), jnp.int32),
    )  # fmt: skip
    assert scopes_of(paged)["step"] is None, "lengths are known to a run only"
    ragged = one(
        lambda *args: ragged_paged_attention(
            *args, num_kv_pages_per_block=4, num_queries_per_block=32
        ),
        shaped((128, 8, 128), BF16), shaped((64, 16, 16, 128), BF16), lengths,
        shaped((4, 16), jnp.int32), shaped((5,), jnp.int32), shaped((1,), jnp.int32),
    )  # fmt: skip
    assert scopes_of(ragged)["step"] is None
