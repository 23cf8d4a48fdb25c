"""The vectorised interpreter of scalar kernel code against plain Python, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_kernels import F32, one, shaped
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.call_record import PallasCall
from autotune.traced.block_moves import distinct_rows
from autotune.traced.scalar_code import UNKNOWN, ScalarCode, Table

GRID = (3, 1, 5)


def values(fn: Callable[..., Any], grid: tuple[int, ...] = GRID) -> np.ndarray:
    """`fn(*program ids)` over the grid, by the interpreter."""
    jaxpr = jax.make_jaxpr(fn)(*[jnp.int32(0)] * len(grid))
    code = ScalarCode(grid=grid, program_axes=tuple(range(len(grid))))
    (result,) = code.run(jaxpr, [code.axis(n) for n in range(len(grid))])
    assert isinstance(result, np.ndarray), f"{result} is not known"
    return np.broadcast_to(result, grid)


ARITHMETIC: list[Callable[[Any, Any, Any], Any]] = [
    lambda i, j, k: i * 5 + j - k,
    lambda i, j, k: (i - k) // 2,
    lambda i, j, k: (i - k) % 3,
    lambda i, j, k: jax.lax.div(i - k, jnp.int32(2)),
    lambda i, j, k: jax.lax.rem(i - k, jnp.int32(3)),
    lambda i, j, k: jnp.where(i > k, i, jnp.minimum(k, 2)),
    lambda i, j, k: jnp.clip(k - i, 0, 2),
    lambda i, j, k: (i << 3) | (k >> 1) ^ 5,
    lambda i, j, k: jnp.abs(i - k) ** 2,
    lambda i, j, k: ((i >= k) & ~(j != 0)).astype(jnp.int32),
    lambda i, j, k: jax.lax.cond(i == k, lambda: k * 10, lambda: i + k),
    lambda i, j, k: jax.lax.switch(i, [lambda x: x, lambda x: x + 1, lambda x: -x], k),
    lambda i, j, k: jax.lax.fori_loop(0, 4, lambda n, s: s + n * i, k),
    lambda i, j, k: jax.lax.fori_loop(i, k, lambda n, s: s + jnp.where(n > 1, n, 0), j),
    lambda i, j, k: jax.lax.while_loop(lambda s: s < 20, lambda s: s * 2 + 1, i + k),
    lambda i, j, k: jax.lax.population_count(k + i),
    lambda i, j, k: pl.cdiv(k * 7 + 3, 4) + 0 * i,
    lambda i, j, k: (k.astype(jnp.float32) / 2.0 + i).astype(jnp.int32),
    lambda i, j, k: k * jnp.int32(2**30),
]


@pytest.mark.parametrize("number", range(len(ARITHMETIC)))
def test_scalar_code_has_the_values_jax_gives_it_step_by_step(number: int) -> None:
    fn = ARITHMETIC[number]
    expected = [int(fn(*map(jnp.int32, step))) for step in itertools.product(*map(range, GRID))]
    found = values(lambda i, j, k: fn(i, j, k) + jnp.int32(0)).reshape(-1).tolist()
    assert found == expected


def test_a_value_of_one_axis_costs_that_axis_only() -> None:
    code = ScalarCode(grid=(1000, 1000), program_axes=(0, 1))
    jaxpr = jax.make_jaxpr(lambda i, j: (i // 2 + 1, i * 0 + j))(jnp.int32(0), jnp.int32(0))
    first, second = code.run(jaxpr, [code.axis(0), code.axis(1)])
    assert (first.shape, second.shape) == ((1000, 1), (1, 1000))


def test_what_rests_on_unknown_values_is_unknown_and_the_rest_is_not() -> None:
    code = ScalarCode(grid=(4,), program_axes=(0,))
    jaxpr = jax.make_jaxpr(lambda i, x: (i + 1, x + i))(jnp.int32(0), jnp.int32(0))
    known, unknown = code.run(jaxpr, [code.axis(0), UNKNOWN])
    assert known.tolist() == [1, 2, 3, 4]
    assert unknown is UNKNOWN


def test_an_inactive_branch_may_read_beyond_its_table() -> None:
    def kernel(table: Any, z: Any) -> None:
        i = pl.program_id(0)

        @pl.when(i < 3)
        def _() -> None:
            @pl.when(table[i] == 1)
            def _() -> None:
                with jax.named_scope("hit"):
                    z[...] = z[...] + 1

    call = one(_with_table(kernel, (6,), jnp.array([1, 0, 1], jnp.int32)))
    assert call.scopes["hit"] == 2


def _with_table(kernel: Any, grid: tuple[int, ...], table: Any) -> Callable[[], Any]:
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=grid, in_specs=[],
        out_specs=pl.BlockSpec((8, 128), lambda *ids: (0, 0)),
    )  # fmt: skip
    call = pl.pallas_call(kernel, name="tabled", grid_spec=spec, out_shape=shaped((8, 128), F32))
    return lambda: call(table)


def counted(body: Callable[[Any], None], grid: tuple[int, ...] = (4, 3)) -> PallasCall:
    """The call of a kernel whose body gets its output Ref."""
    fn = pl.pallas_call(
        body, name="counted", grid=grid, out_shape=shaped((128, 128), F32),
        out_specs=pl.BlockSpec((128, 128), lambda *ids: (0, 0)),
    )  # fmt: skip
    return one(fn)


def dot(z: Any) -> None:
    z[...] = jnp.dot(z[...], z[...])


ONE_DOT = 2 * 128**3


def test_scopes_in_conds_jits_and_loops_count_executions_and_dots_go_to_the_innermost() -> None:
    @jax.jit
    def jitted(x: Any) -> Any:
        with jax.named_scope("jitted"):
            return jnp.dot(x, x)

    def body(z: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(i > j)
        def _() -> None:
            with jax.named_scope("outer"):

                def turn(n: Any, carry: Any) -> Any:
                    with jax.named_scope("inner"):
                        dot(z)
                    return carry

                jax.lax.fori_loop(0, j + 1, turn, None)
                jax.lax.fori_loop(0, 5, turn, None)
                z[...] = jitted(z[...])

    call = counted(body)
    below = [(i, j) for i in range(4) for j in range(3) if i > j]
    inner = sum(j + 1 + 5 for _, j in below)
    assert call.scopes == {"": 12, "outer": 6, "inner": inner, "jitted": 6}
    assert call.scope_flops == {"inner": inner * ONE_DOT, "jitted": 6 * ONE_DOT}
    assert call.scope_regions == {"outer": 1, "inner": 2, "jitted": 1}
    assert call.loops == {"outer": ((inner, 2),)}


def test_a_scope_that_stands_in_the_text_several_times_says_so() -> None:
    def body(z: Any) -> None:
        for n in range(3):
            with jax.named_scope("tile"):
                dot(z)
            z[n, :] = z[0, :]

        def turn(n: Any, carry: Any) -> Any:
            with jax.named_scope("unrolled"):
                dot(z)
            z[0, :] = z[1, :]
            return carry

        jax.lax.fori_loop(0, 4, turn, None, unroll=True)

    call = counted(body)
    assert call.scopes == {"": 12, "tile": 36, "unrolled": 48}
    assert call.scope_regions == {"tile": 3, "unrolled": 4}
    assert call.loops == {}, "an unrolled loop is none"


def test_loops_are_counted_level_by_level_from_the_scope_they_lie_in() -> None:
    def body(z: Any) -> None:
        def inner(n: Any, carry: Any) -> Any:
            dot(z)
            return carry

        def outer(n: Any, carry: Any) -> Any:
            jax.lax.fori_loop(0, 7, inner, None)
            with jax.named_scope("deep"):
                jax.lax.fori_loop(0, 3, inner, None)
            return carry

        with jax.named_scope("step"):
            jax.lax.fori_loop(0, 5, outer, None)
            jax.lax.fori_loop(0, 4, inner, None)

    call = counted(body)
    assert call.loops == {
        "step": ((12 * (5 + 4), 2), (12 * 5 * 7, 1)), "deep": ((12 * 5 * 3, 1),),
    }  # fmt: skip


def test_a_branch_inside_a_loop_is_followed_turn_by_turn() -> None:
    def body(z: Any) -> None:
        i = pl.program_id(0)

        def turn(n: Any, carry: Any) -> Any:
            @pl.when(n <= i)
            def _() -> None:
                with jax.named_scope("masked"):
                    dot(z)

            return carry

        jax.lax.fori_loop(0, 3, turn, None)
        jax.lax.fori_loop(i, 3, turn, None)

    call = counted(body, (4,))
    static = sum(n <= i for i in range(4) for n in range(3))
    dynamic = sum(n <= i for i in range(4) for n in range(i, 3))
    assert call.scopes["masked"] == static + dynamic
    assert call.scope_regions["masked"] == 2


def test_both_sides_of_a_branch_and_nested_scopes_are_told_apart() -> None:
    def body(z: Any) -> None:
        def yes() -> None:
            with jax.named_scope("work"):
                z[...] = z[...] + 1
                with jax.named_scope("deep"):
                    dot(z)
                z[...] = z[...] + 2

        def no() -> None:
            with jax.named_scope("skip"):
                z[...] = z[...] * 0

        jax.lax.cond(pl.program_id(1) == 1, yes, no)

    call = counted(body)
    assert call.scopes == {"": 12, "skip": 8, "work": 4, "deep": 4}
    assert call.branches == ((8, 4),)
    assert {tuple(c.scopes) for c in call.classes} == {("skip",), ("work", "deep")}


def test_a_loop_of_unknown_length_has_no_count_but_is_seen() -> None:
    def body(z: Any) -> None:
        def turn(carry: Any) -> Any:
            with jax.named_scope("while"):
                dot(z)
            return z[0, 0] > 0

        jax.lax.while_loop(lambda go: go, turn, z[0, 0] > 0)

    call = counted(body)
    assert call.scopes["while"] is None
    assert call.executed_flops == 12 * ONE_DOT


def test_a_known_table_is_read_inside_run_scoped() -> None:
    def kernel(table: Any, z: Any) -> None:
        def inner(buffer: Any) -> None:
            @pl.when(table[pl.program_id(0)] > 1)
            def _() -> None:
                with jax.named_scope("scoped"):
                    z[...] = buffer[...]

        pl.run_scoped(inner, pltpu.VMEM((8, 128), F32))

    call = one(_with_table(kernel, (4,), jnp.array([0, 2, 2, 3], jnp.int32)))
    assert call.scopes["scoped"] == 3


def test_batched_dots_count_every_product() -> None:
    def body(z: Any) -> None:
        left = jnp.broadcast_to(z[...], (3, 128, 128))
        right = jnp.broadcast_to(z[...], (3, 128, 128))
        contract = (((2,), (1,)), ((0,), (0,)))
        z[...] = jax.lax.dot_general(left, right, contract).sum(0)

    assert counted(body).executed_flops == 12 * 3 * ONE_DOT


def test_a_table_reads_by_several_indices_of_different_axes() -> None:
    code = ScalarCode(grid=(2, 3), program_axes=(0, 1))
    table = np.arange(6, dtype=np.int32).reshape(2, 3)

    def kernel(table: Any, z: Any) -> None:
        @pl.when(table[pl.program_id(0), pl.program_id(1)] % 2 == 0)
        def _() -> None:
            with jax.named_scope("even"):
                z[...] = z[...] + 1

    call = one(_with_table(kernel, (2, 3), jnp.asarray(table)))
    assert call.scopes["even"] == 3
    assert Table(table).values.shape == code.grid


def test_distinct_rows_are_counted_in_order_of_appearance_whatever_their_range() -> None:
    rng = np.random.default_rng(0)
    columns = [
        rng.integers(0, 2, 500), rng.choice([0, 7 * 10**12, 3], 500), np.full(500, 9),
        rng.choice([0, 2**40], 500),
    ]  # fmt: skip
    firsts, counts = distinct_rows([*columns, 5], 500)
    rows = list(zip(*(c.tolist() for c in columns), strict=True))
    order = list(dict.fromkeys(rows))
    assert [rows[n] for n in firsts.tolist()] == order
    assert counts.tolist() == [rows.count(row) for row in order]


def test_a_loop_too_long_to_follow_is_unknown_and_not_followed_for_ever() -> None:
    def body(z: Any) -> None:
        def turn(n: Any, carry: Any) -> Any:
            @pl.when(n % 2 == 0)
            def _() -> None:
                with jax.named_scope("even"):
                    z[...] = z[...] + 1

            return carry

        jax.lax.fori_loop(0, 10**6, turn, None)
        with jax.named_scope("after"):
            z[...] = z[...] * 2

    call = counted(body)
    assert call.scopes == {"": 12, "even": None, "after": 12}
    assert call.loops == {"": ((12 * 10**6, 1),)}
