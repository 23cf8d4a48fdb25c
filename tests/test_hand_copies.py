"""Kernels that copy by hand and keep their place in SMEM from step to step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import cost_model
from autotune import device as devices
from autotune.call_record import PallasCall
from autotune.kernels import base
from autotune.pallas_call import trace

V6E = devices.get("v6e")


def traced(fn: Any, *args: Any) -> PallasCall:
    (call,) = trace(fn, args, V6E).calls
    return call


def kernel_with_state(body: Any, steps: int, cells: list[int]) -> Any:
    """A call over `steps` whose `body` gets a prefetched table that it may write."""

    def call(x: Any) -> Any:
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(steps,),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=pl.BlockSpec((8, 128), lambda i, state: (i, 0)),
                scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
            ),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(jnp.asarray(cells, jnp.int32), x)

    return call


def copy_and_count(state: Any, x: Any, out: Any, held: Any, sem: Any) -> None:
    """Copies as many blocks as `state[1]` says, one more every other step; the first step inits."""
    del out

    @pl.when(state[0] == 1)
    def _() -> None:
        with jax.named_scope("first"):
            held[...] = jnp.zeros_like(held)

    state[0] = 0

    @pl.loop(0, state[1])
    def _(i: Any) -> None:
        with jax.named_scope("turn"):
            pltpu.make_async_copy(x.at[pl.ds(0, 8)], held, sem).start()

    @pl.when(pl.program_id(0) % 2 == 1)
    def _() -> None:
        state[1] += 1


def test_what_a_step_writes_the_next_step_reads():
    x = jax.ShapeDtypeStruct((48, 128), jnp.float32)
    call = traced(kernel_with_state(copy_and_count, 6, [1, 1]), x)
    assert call.scopes["first"] == 1, "its flag is cleared in the first step"
    assert call.scopes["turn"] == 1 + 1 + 2 + 2 + 3 + 3
    assert call.hand_copies == 12
    assert call.hand_bytes == 12 * 8 * 128 * 4
    assert call.dma_count == 12 + sum(window.copies for window in call.windows)


def test_state_that_does_not_settle_is_unknown_and_what_does_is_not():
    x = jax.ShapeDtypeStruct((640, 128), jnp.float32)
    call = traced(kernel_with_state(copy_and_count, 80, [1, 1]), x)
    assert call.scopes["first"] == 1
    assert call.scopes["turn"] is None, "40 passes would be needed"


def test_an_index_map_on_a_table_that_is_written_is_not_exact():
    def follow(state: Any, x: Any, out: Any) -> None:
        out[...] = x[...]
        state[0] += 1

    def call(x: Any) -> Any:
        return pl.pallas_call(
            follow,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(4,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, state: (state[0], 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, state: (i, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(jnp.zeros(1, jnp.int32), x)

    window = traced(call, jax.ShapeDtypeStruct((32, 128), jnp.float32)).windows[0]
    assert not window.exact
    assert window.copies == 4


def rows_by_hand(rows: Any) -> PallasCall:
    """Four steps, each of which copies `rows(i, lengths)` rows of x into half of `held`."""

    def body(lengths: Any, x: Any, out: Any, held: Any, sem: Any) -> None:
        count = rows(pl.program_id(0), lengths)
        held_rows = held.at[1, pl.ds(0, count)]
        pltpu.make_async_copy(x.at[pl.ds(0, count)], held_rows, sem).start()
        pltpu.make_async_copy(x.at[pl.ds(0, count)], held_rows, sem).wait()
        out[...] = held[1]

    def call(x: Any) -> Any:
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(4,),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=pl.BlockSpec((16, 128), lambda i, lengths: (i, 0)),
                scratch_shapes=[pltpu.VMEM((2, 16, 128), x.dtype), pltpu.SemaphoreType.DMA],
            ),
            out_shape=jax.ShapeDtypeStruct((64, 128), x.dtype),
        )(jnp.asarray([8, 3, 0, 16], jnp.int32), x)

    return traced(call, jax.ShapeDtypeStruct((4096, 128), jnp.float32))


def test_rows_whose_number_the_grid_or_a_table_says_are_counted_one_by_one():
    row = 128 * 4
    assert rows_by_hand(lambda i, lengths: lengths[i]).hand_bytes == (8 + 3 + 0 + 16) * row
    assert rows_by_hand(lambda i, lengths: 4 * i).hand_bytes == (0 + 4 + 8 + 12) * row
    assert rows_by_hand(lambda i, lengths: 5).hand_bytes == 4 * 5 * row


def test_rows_whose_number_only_a_run_knows_are_the_most_that_the_core_s_side_holds():
    def hashed(i: Any, lengths: Any) -> Any:
        return pltpu.prng_random_bits((8, 128))[0, 0] % 16

    call = rows_by_hand(hashed)
    assert call.hand_copies == 4
    assert call.hand_bytes == 4 * 16 * 128 * 4, "16 rows of scratch, not 4096 of x"


def paged(**config: Any) -> PallasCall:
    kernel = base.load("jax.paged_attention")
    shape = {"batch": 4, "q_heads": 8, "kv_heads": 2, "kv_len": 512, "head_dim": 128}
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    fn, args = kernel.build(problem, {"megacore_mode": None, **config})
    return traced(fn, *args)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("block", [4, 16])
def test_paged_attention_copies_each_page_of_k_and_v_once(block, inline):
    call = paged(pages_per_compute_block=block, inline_seq_dim=inline)
    assert call.hand_copies == 2 * 4 * 2 * 32  # k and v, sequences, kv heads, pages of 16
    assert call.hand_bytes == call.hand_copies * 16 * 128 * 2


@pytest.mark.parametrize("queries", [8, 16])
def test_ragged_attention_goes_on_where_the_query_block_before_ended(queries):
    kernel = base.load("jax.ragged_paged_attention")
    shape = {"batch": 16, "q_heads": 8, "kv_heads": 8, "kv_len": 256, "head_dim": 128}
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    config = {"num_kv_pages_per_block": 8, "num_queries_per_block": queries}
    fn, args = kernel.build(problem, {**config, "vmem_limit_bytes": None})
    call = traced(fn, *args)
    assert call.hand_copies == 16 * 16  # sequences, pages of 16; k and v lie together


def test_a_call_cannot_be_faster_than_the_copies_it_makes_by_hand():
    call = paged(pages_per_compute_block=16, inline_seq_dim=True)
    program = trace(*_paged_program(), V6E)
    assert program.calls[0].hand_bytes == call.hand_bytes
    much = replace(call, hand_bytes=2**40)
    latency = cost_model.model_latency(replace(program, calls=(much,)), V6E)
    assert latency.total_s >= 2**40 / V6E.hbm_bytes_per_s
    assert latency.bound == "memory"


def _paged_program() -> tuple[Any, Any]:
    kernel = base.load("jax.paged_attention")
    shape = {"batch": 4, "q_heads": 8, "kv_heads": 2, "kv_len": 512, "head_dim": 128}
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    config = {"megacore_mode": None, "pages_per_compute_block": 16, "inline_seq_dim": True}
    return kernel.build(problem, config)
