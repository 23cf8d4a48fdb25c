"""Scratch the compiler must hold: what a step may read before it wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import cost_model, device
from autotune.pallas_call import trace

SHAPE = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def accumulates(x: Any, o: Any, s: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        s[...] = jnp.zeros_like(s)

    s[...] += x[...]
    o[...] = s[...]


def stages(x: Any, o: Any, s: Any) -> None:
    s[...] = x[...]
    o[...] = s[...] * 2


def writes_a_part(x: Any, o: Any, s: Any) -> None:
    s[:8, :] = x[:8, :]
    o[...] = s[...]


def never_reads(x: Any, o: Any, s: Any) -> None:
    s[...] = x[...]
    o[...] = x[...]


def writes_in_both_branches(x: Any, o: Any, s: Any) -> None:
    def put(value: Any) -> None:
        s[...] = value

    lax.cond(pl.program_id(0) == 0, lambda: put(x[...]), lambda: put(x[...] + 1))
    o[...] = s[...]


def reads_in_one_branch(x: Any, o: Any, s: Any) -> None:
    @pl.when(pl.program_id(0) > 0)
    def _() -> None:
        o[...] = s[...]

    s[...] = x[...]


def reads_where_data_says(x: Any, o: Any, s: Any) -> None:
    s[...] = x[...]

    @pl.when(x[0, 0] > 0)
    def _() -> None:
        o[...] = s[...]


def reads_where_the_grid_says(x: Any, o: Any, s: Any) -> None:
    s[...] = x[...]

    @pl.when(pl.program_id(0) > 0)
    def _() -> None:
        o[...] = s[...]


def writes_and_reads_where_data_says(x: Any, o: Any, s: Any) -> None:
    @pl.when(x[0, 0] > 0)
    def _() -> None:
        s[...] = x[...]
        o[...] = s[...]


def writes_in_a_loop(x: Any, o: Any, s: Any) -> None:
    @pl.loop(0, 2)
    def _(_: Any) -> None:
        s[...] = x[...]

    o[...] = s[...]


def reads_in_a_loop(x: Any, o: Any, s: Any) -> None:
    @pl.loop(0, 2)
    def _(_: Any) -> None:
        o[...] = s[...]

    s[...] = x[...]


def stages_in_a_function(x: Any, o: Any, s: Any) -> None:
    @jax.jit
    def put() -> None:
        s[...] = x[...]

    put()
    o[...] = s[...]


@pytest.mark.parametrize(
    ("kernel", "carried"),
    [
        (accumulates, True),
        (stages, False),
        (writes_a_part, True),
        (never_reads, False),
        (writes_in_both_branches, False),
        (reads_in_one_branch, True),
        (reads_where_data_says, True),
        (reads_where_the_grid_says, False),
        (writes_and_reads_where_data_says, False),
        (writes_in_a_loop, True),
        (reads_in_a_loop, True),
        (stages_in_a_function, False),
    ],
)
def test_scratch_is_carried_where_a_read_may_come_before_the_whole_was_written(
    kernel: Callable[..., None], carried: bool
) -> None:
    (call,) = traced(kernel).calls
    assert [s.carried for s in call.scratch] == [carried]


def test_only_carried_scratch_can_get_a_candidate_rejected() -> None:
    chip = device.get("v5e")
    huge = (64 << 20) // 512
    assert cost_model.rejection(traced(stages, rows=huge), chip) is None
    told = cost_model.rejection(traced(accumulates, rows=huge), chip)
    assert told is not None
    assert "of VMEM, of 16.00 MiB allowed on v5e" in told


def traced(kernel: Callable[..., None], rows: int = 64) -> Any:
    block = (64, 128)
    whole = kernel
    if rows != 64:

        def whole(x: Any, o: Any, s: Any) -> None:  # the same on all of a larger scratch
            kernel(_Wide(x, rows), _Narrow(o), s)

    call = pl.pallas_call(
        whole,
        grid=(4,),
        in_specs=[pl.BlockSpec(block, lambda i: (0, 0))],
        out_specs=pl.BlockSpec(block, lambda i: (0, 0)),
        out_shape=SHAPE,
        scratch_shapes=[pltpu.VMEM((rows, 128), jnp.float32)],
    )
    return trace(call, [SHAPE], device.get("v5e"))


class _Wide:
    def __init__(self, ref: Any, rows: int) -> None:
        self._ref, self._rows = ref, rows

    def __getitem__(self, index: Any) -> Any:
        return jnp.broadcast_to(self._ref[:1, :], (self._rows, 128))


class _Narrow:
    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def __setitem__(self, index: Any, value: Any) -> None:
        self._ref[...] = value[:64, :]
