"""Windows, copies, traffic and VMEM of the traced call against closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from call_kernels import (
    BF16,
    BUFFER_CASES,
    F32,
    MIB,
    check_timeline,
    copy_call,
    matmul,
    moving,
    of,
    one,
    shaped,
    vmem_bytes,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.traced.block_moves import tile_bytes

# Copies and traffic


@pytest.mark.parametrize(("inner", "copies"), [("column", 192), ("row", 136)])
def test_the_lectures_bias_example_needs_192_copies_with_the_column_inner_and_136_with_it_outer(
    inner: str, copies: int
) -> None:
    column = 1 if inner == "column" else 0
    block = lambda *ids: (ids[1 - column], ids[column])
    bias = lambda *ids: (0, ids[column])
    fn, args = moving(
        (8, 8),
        [((1024, 1024), (128, 128), block), ((1, 1024), (1, 128), bias)],
        ((1024, 1024), (128, 128), block),
        dtype=F32,
    )
    call = one(fn, *args)
    assert call.dma_count == copies, f"{inner} inner: {call.dma_count} copies, not {copies}"


@pytest.mark.parametrize(
    ("m", "k", "n", "bm", "bk", "bn"),
    [
        (4096, 4096, 4096, 1024, 1024, 1024),
        (4096, 7168, 18432, 512, 512, 512),
        (1000, 1100, 1300, 256, 384, 512),
        (300, 1024, 384, 128, 256, 128),
        (512, 512, 512, 512, 512, 512),
        (4096, 512, 512, 512, 512, 512),
        (100, 100, 100, 256, 256, 256),
    ],
)
def test_matmul_traffic_is_the_closed_form_edges_included(
    m: int, k: int, n: int, bm: int, bk: int, bn: int
) -> None:
    call = of(matmul(m, k, n, bm, bk, bn))
    gm, gn, gk = (-(-a // b) for a, b in ((m, bm), (n, bn), (k, bk)))
    x_reads = gn if gk > 1 else 1  # one K block: X stays while n moves
    y_reads = gm if gk > 1 or gn > 1 else 1
    assert [w.bytes_copied for w in call.windows] == [
        2 * m * k * x_reads,
        2 * k * n * y_reads,
        2 * m * n,
    ]
    assert call.windows[2].copies == gm * gn, "the output block stays while K moves"
    assert call.scopes == {
        "": gm * gn * gk, "init": gm * gn, "step": gm * gn * gk, "finalize": gm * gn,
    }  # fmt: skip
    assert call.executed_flops == 2 * bm * bk * bn * gm * gn * gk
    assert call.scope_flops == {"step": call.executed_flops}
    check_timeline(call)


@pytest.mark.parametrize(("block_q", "mib"), [(1024, 1728), (2048, 1088)])
def test_attention_traffic_is_the_lectures_1_69_and_1_06_gib(block_q: int, mib: int) -> None:
    heads, length, d, dv, block_kv = 128, 4096, 192, 128, 1024
    q = lambda h, i, j: (h, i, 0)
    kv = lambda h, i, j: (h, j, 0)
    fn, args = moving(
        (heads, length // block_q, length // block_kv),
        [
            ((heads, length, d), (None, block_q, d), q),
            ((heads, length, d), (None, block_kv, d), kv),
            ((heads, length, dv), (None, block_kv, dv), kv),
        ],
        ((heads, length, dv), (None, block_q, dv), q),
    )
    call = one(fn, *args)
    assert call.hbm_bytes == mib * MIB
    assert call.windows[0].window_bytes == block_q * 256 * 2, "192 lanes take 256 in VMEM"
    assert call.windows[0].bytes_moved == call.windows[0].bytes_copied * 256 // 192, (
        "and in what a DMA moves"
    )


def test_grouped_queries_share_the_key_block_and_pay_for_it_once_a_group() -> None:
    q_heads, kv_heads, blocks = 8, 2, 3
    fn, args = moving(
        (q_heads, blocks),
        [
            ((q_heads, 384, 128), (None, 128, 128), lambda h, i: (h, i, 0)),
            ((kv_heads, 384, 128), (None, 384, 128), lambda h, i: (h // 4, 0, 0)),
        ],
        ((q_heads, 384, 128), (None, 128, 128), lambda h, i: (h, i, 0)),
    )
    call = one(fn, *args)
    assert [w.copies for w in call.windows] == [24, 2, 24]


def test_a_clamped_index_skips_the_copies_above_the_causal_diagonal() -> None:
    n = 5
    fn, args = moving(
        (n, n),
        [((n * 128, 128), (128, 128), lambda i, j: (jnp.minimum(i, j), 0))],
        ((n * 128, 128), (128, 128), lambda i, j: (i, 0)),
    )
    call = one(fn, *args)
    # row i visits blocks 0 … i; row 1 begins with the block row 0 ended with
    assert call.windows[0].copies == n * (n + 1) // 2 - 1


def test_an_index_map_that_reads_a_prefetched_table_is_followed() -> None:
    rows = jnp.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 3, 3, 3]], jnp.int32)
    fn, args = moving(
        (2, 6),
        [((4 * 128, 128), (128, 128), lambda h, t, rows: (rows[h, t], 0))],
        ((2, 6 * 128, 128), (None, 128, 128), lambda h, t, rows: (h, t, 0)),
        table=rows,
    )
    call = one(fn, *args)
    assert call.windows[0].copies == 3 + 3
    assert call.windows[0].buffers == 2, "the compiler cannot know the table"
    assert (call.scratch[0].name, call.scratch[0].memory) == ("prefetch 0", "smem")


def test_a_table_known_at_run_time_only_counts_every_step_as_a_copy_and_says_so() -> None:
    def kernel(*refs: Any) -> None:
        del refs

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(6,),
        in_specs=[pl.BlockSpec((128, 128), lambda t, rows: (rows[t], 0))],
        out_specs=pl.BlockSpec((128, 128), lambda t, rows: (t, 0)),
    )  # fmt: skip
    fn = pl.pallas_call(kernel, grid_spec=spec, out_shape=shaped((768, 128), F32), name="late")
    call = one(fn, shaped((6,), jnp.int32), shaped((512, 128), F32))
    assert (call.windows[0].copies, call.windows[0].exact) == (6, False)
    assert call.windows[1].exact


def test_element_indexed_blocks_start_where_the_map_says_and_are_clipped_at_the_edge() -> None:
    fn, args = moving(
        (3,),
        [((320, 128), (pl.Element(128), pl.Element(128)), lambda i: (i * 112, 0))],
        ((384, 128), (128, 128), lambda i: (i, 0)),
        dtype=F32,
    )
    call = one(fn, *args)
    assert call.windows[0].bytes_copied == (128 + 128 + 96) * 128 * 4


def test_a_wrong_index_map_differs_from_the_right_one_with_three_blocks_an_axis() -> None:
    right = of(matmul(384, 384, 384, 128, 128, 128))
    fn, args = moving(
        (3, 3, 3),
        [
            ((384, 384), (128, 128), lambda i, j, k: (i, j)),
            ((384, 384), (128, 128), lambda i, j, k: (k, j)),
        ],
        ((384, 384), (128, 128), lambda i, j, k: (i, j)),
    )
    wrong = one(fn, *args)
    assert right.windows[0].copies == 27
    assert wrong.windows[0].copies == 9


def test_counts_of_a_65536_cubed_matmul_are_python_integers_that_do_not_wrap() -> None:
    call = of(matmul(65536, 65536, 65536, 2048, 2048, 2048))
    assert call.executed_flops == 562949953421312
    assert call.hbm_bytes == 2 * 65536**2 * (32 + 32 + 1)
    assert all(type(w.bytes_copied) is int for w in call.windows)
    assert type(call.scopes["step"]) is int


def test_a_grid_of_a_quarter_million_steps_is_read_like_a_small_one() -> None:
    call = of(matmul(65536, 65536, 65536, 1024, 1024, 1024))
    assert call.grid_steps == 262144
    assert call.dma_count == 2 * 262144 + 4096
    assert len(call.classes) <= 8
    check_timeline(call)


MAPS: list[Callable[[Any, Any, Any], tuple[Any, Any]]] = [
    lambda i, j, k: (i, k),
    lambda i, j, k: (k, j),
    lambda i, j, k: (jnp.minimum(i, k), j // 2),
    lambda i, j, k: ((i + j + k) % 3, jnp.where(k > 1, j, 0)),
    lambda i, j, k: (jax.lax.div(i * 6 + j, jnp.int32(4)), 0),
    lambda i, j, k: (jnp.where(j == 2, k, i), jax.lax.rem(k, jnp.int32(2))),
]


@pytest.mark.parametrize("number", range(len(MAPS)))
@pytest.mark.parametrize("grid", [(3, 4, 5), (4, 1, 3), (1, 1, 1)])
def test_copies_and_bytes_are_those_of_walking_the_grid_step_by_step(
    number: int, grid: tuple[int, ...]
) -> None:
    index_map, rows, columns = MAPS[number], 300, 700
    fn, args = moving(
        grid, [((rows, columns), (64, 256), index_map)], ((rows, columns), (64, 256), index_map)
    )
    call = one(fn, *args)
    with jax.disable_jit():
        walked = [
            tuple(int(n) for n in index_map(*map(jnp.int32, step)))
            for step in itertools.product(*map(range, grid))
        ]
    runs = [index for index, _ in itertools.groupby(walked)]
    elements = sum(
        max(0, min(64, rows - 64 * i)) * max(0, min(256, columns - 256 * j)) for i, j in runs
    )
    assert [w.copies for w in call.windows] == [len(runs)] * 2
    assert [w.bytes_copied for w in call.windows] == [elements * 2, elements * 4]
    check_timeline(call)


# VMEM


@pytest.mark.parametrize(("block", "mib"), [(1024, 16), (2048, 64)])
def test_windows_and_scratch_of_field_reports_v1_and_v2_are_exactly_16_and_64_mib(
    block: int, mib: int
) -> None:
    call = of(matmul(4096, 4096, 4096, block, block, block))
    assert vmem_bytes(call) == mib * MIB


@pytest.mark.parametrize(
    ("shape", "bits", "size"),
    [
        ((256, 64), 32, 256 * 128 * 4),
        ((256, 192), 16, 256 * 256 * 2),
        ((1, 1024), 32, 4096),
        ((1, 1024), 16, 4096),
        ((1, 1024), 8, 4096),
        ((4, 1024), 16, 8192),
        ((100, 1024), 8, 104 * 1024),
        ((2, 1, 128), 16, 1024),
        ((3, 5, 7), 32, 3 * 8 * 512),
        ((1000,), 32, 4096),
        ((5,), 8, 512),
    ],
)
def test_an_array_takes_whole_native_tiles(shape: tuple[int, ...], bits: int, size: int) -> None:
    assert tile_bytes(shape, bits) == size


@pytest.mark.parametrize(("name", "case", "buffers"), BUFFER_CASES, ids=lambda v: str(v)[:24])
def test_buffers_follow_what_the_index_map_depends_on(name: str, case: Any, buffers: int) -> None:
    call = of(copy_call(*case))
    assert call.windows[0].buffers == buffers, name


def test_three_buffers_are_read_from_the_pipeline_mode() -> None:
    call = of(copy_call(lambda i: (i, 0), (4,), pl.Buffered(3)))
    assert call.windows[0].buffers == 3


def test_operands_left_in_hbm_have_no_window_and_scratch_says_where_it_lies() -> None:
    def kernel(x: Any, z: Any, buffer: Any, flags: Any, done: Any) -> None:
        del x, z, buffer, flags, done

    fn = pl.pallas_call(
        kernel, name="by hand", out_shape=shaped((512, 192), BF16),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)], out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[
            pltpu.VMEM((64, 192), BF16), pltpu.SMEM((3, 100), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )  # fmt: skip
    call = one(fn, shaped((512, 192), BF16))
    assert [(w.memory, w.copies, w.window_bytes) for w in call.windows] == [("hbm", 0, 0)] * 2
    assert [(s.memory, s.bytes) for s in call.scratch] == [
        ("vmem", 64 * 256 * 2), ("smem", 2048), ("semaphore_mem", 0),
    ]  # fmt: skip
