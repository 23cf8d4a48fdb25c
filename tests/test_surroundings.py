"""Operands that XLA may hold in VMEM because of what it runs around a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_kernels import F32, MIB, shaped
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import cost_model, device
from autotune.call_record import Dot, PallasCall
from autotune.pallas_call import trace

V5E, TPU7X = device.get("v5e"), device.get("tpu7x")


def kernel(x: Any, y: Any) -> Any:
    """A kernel over blocks of 256 rows of x and y, whatever their columns."""

    def body(x: Any, y: Any, z: Any) -> None:
        z[...] = x[...] + y[...].astype(F32)

    block = pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body, name="add", grid=(x.shape[0] // 256,), in_specs=[block, block], out_specs=block,
        out_shape=shaped(x.shape, F32),
    )(x, y)  # fmt: skip


def calls(fn: Callable[..., Any], columns: int = 128) -> tuple[PallasCall, ...]:
    return trace(fn, [shaped((1024, columns), F32)] * 2, V5E).calls


def may_vanish(call: PallasCall, chip: device.Device = V5E) -> list[str]:
    return [a.name for a in cost_model.vmem_bill(call, chip).allocations if a.may_vanish]


EVERYTHING = ["input 0", "input 1", "output 0"]


def rows(x: Any, y: Any) -> Any:
    return kernel(x, jnp.broadcast_to(np.arange(1024, dtype=np.int32)[:, None], (1024, 128)))


def reshapes(x: Any, y: Any) -> Any:
    return kernel(x.reshape(4, 256, 128).reshape(1024, 128), jax.jit(lambda v: v[None])(y)[0])


def doubles_first(x: Any, y: Any) -> Any:
    return kernel(x * 2, y)


def sums_afterwards(x: Any, y: Any) -> Any:
    return jnp.sum(kernel(x, y))


def in_a_loop(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, z: kernel(z, y), x)


@pytest.mark.parametrize(
    ("fn", "parked"),
    [
        (kernel, []),
        (reshapes, []),
        (rows, ["input 1"]),
        (doubles_first, EVERYTHING),
        (sums_afterwards, EVERYTHING),
        (in_a_loop, EVERYTHING),
    ],
)
def test_a_window_may_be_missing_where_xla_makes_the_operand_or_works_on_data_besides(
    fn: Callable[..., Any], parked: list[str]
) -> None:
    (call,) = calls(fn)
    assert may_vanish(call) == parked


def test_of_two_kernels_in_a_program_any_window_may_be_missing() -> None:
    assert [may_vanish(c) for c in calls(lambda x, y: kernel(kernel(x, y), y))] == [EVERYTHING] * 2


def test_operands_that_are_no_whole_tiles_are_copied_first_and_any_window_may_be_missing() -> None:
    (call,) = calls(kernel, columns=64)
    assert may_vanish(call) == EVERYTHING


def test_an_operand_too_large_for_the_vmem_outside_of_the_limit_keeps_its_window() -> None:
    (call,) = calls(doubles_first)
    tight = replace(call, vmem_limit_bytes=V5E.vmem_bytes - MIB // 4)
    assert may_vanish(tight) == []


def test_on_tpu7x_any_small_operand_may_lie_in_vmem() -> None:
    (call,) = calls(kernel)
    assert may_vanish(call, TPU7X) == EVERYTHING


def test_where_each_core_gets_one_parallel_index_a_window_may_have_one_buffer() -> None:
    """v5p, matmul 512 x 1024 x 512 in blocks of 256 x 1024 x 512: y has one buffer (measured)."""

    def least(rows: int) -> int:
        def body(x: Any, z: Any) -> None:
            z[...] = x[...]

        block = pl.BlockSpec((256, 128), lambda i: (i, 0))
        fn = pl.pallas_call(
            body, name="copy", grid=(rows // 256,), in_specs=[block], out_specs=block,
            out_shape=shaped((rows, 128), F32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )  # fmt: skip
        (call,) = trace(fn, [shaped((rows, 128), F32)], device.get("v5p")).calls
        bill = cost_model.vmem_bill(call, device.get("v5p"))
        assert bill.total == 4 * 2**17
        return bill.least

    assert least(512) == 2 * 2**17
    assert least(1024) == 4 * 2**17


@pytest.mark.parametrize(
    ("chip", "sizes", "spilled"),
    [
        ("v5e", (1024, 2048, 256), 4 * MIB - 2**18),  # measured 4.06 MiB
        ("v5e", (1024, 1024, 512), 2 * MIB + 2**18),  # 2.34
        ("v6e", (512, 1536, 1024), 0),  # 0.37
        ("v6e", (1024, 1024, 256), 0),
    ],
)
def test_the_left_block_of_a_product_is_billed_where_it_was_seen_to_be_kept(
    chip: str, sizes: tuple[int, int, int], spilled: int
) -> None:
    (call,) = calls(kernel)
    dot = Dot(**dict(zip("mkn", sizes, strict=True)), dtype="bfloat16", bits=16, loaded=True)
    bill = cost_model.vmem_bill(replace(call, dots=(dot,)), device.get(chip))
    assert bill.temporaries == spilled
