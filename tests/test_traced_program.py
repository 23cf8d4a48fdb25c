"""Branches, dimension semantics, and the program around the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_kernels import (
    BF16,
    F32,
    MIB,
    matmul,
    moving,
    of,
    one,
    shaped,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from autotune import device
from autotune.errors import KernelError
from autotune.pallas_call import semantics_reason, trace

TPU7X = device.get("tpu7x")


# Branches


def test_branches_of_jaxs_own_splash_run_as_often_as_its_mask_says() -> None:
    heads, length, d = 4, 2048, 128
    masks = [splash_attention_mask.CausalMask((length, length))] * heads
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask(masks),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=512, block_kv=1024, block_kv_compute=512
        ),
    )
    call = one(lambda q, k, v: kernel(q, k, v), *[shaped((heads, length, d), BF16)] * 3)
    init, active, finalize = call.branches[0], call.branches[1], call.branches[-1]
    assert init == (16, 16), "16 initialisations in 32 steps"
    assert active == (8, 24), "8 skipped and 24 active steps"
    assert finalize == (16, 16), "16 finalisations"
    assert call.executed_flops == 24 * 2 * 512 * 1024 * (d + d)
    assert semantics_reason(call) is None, "its constant outputs are scratch in disguise"


def test_a_branch_on_run_time_data_has_no_count_and_is_taken_in_every_class() -> None:
    def kernel(x: Any, z: Any) -> None:
        @pl.when(x[0, 0] > 0)
        def _() -> None:
            with jax.named_scope("perhaps"):
                z[...] = jnp.dot(x[...], x[...])

    spec = pl.BlockSpec((128, 128), lambda i: (i, 0))
    fn = pl.pallas_call(
        kernel, name="data", grid=(3,), in_specs=[spec], out_specs=spec,
        out_shape=shaped((384, 128), F32),
    )  # fmt: skip
    call = one(fn, shaped((384, 128), F32))
    assert call.scopes["perhaps"] is None
    assert call.branches == ((None, None),)
    assert call.executed_flops == 3 * 2 * 128**3
    assert call.executed_with({"perhaps": 1}) == 2 * 128**3
    assert call.executed_with({"perhaps": 0, "step": 5}) == 0
    assert sum(c.steps * c.scopes["perhaps"] for c in call.classes) == 3


# Dimension semantics


def test_a_reduction_axis_marked_parallel_is_named() -> None:
    call = of(matmul(512, 512, 512, 128, 128, 128, semantics=("parallel",) * 3))
    assert semantics_reason(call) == "axis 2 of mm is a reduction and is marked parallel"
    assert semantics_reason(of(matmul(512, 512, 512, 128, 128, 128))) is None
    single = matmul(512, 128, 512, 128, 128, 128, semantics=("parallel",) * 3)
    assert semantics_reason(of(single)) is None, "one K block is no reduction"


def test_a_second_output_that_sums_over_a_parallel_axis_is_found() -> None:
    def kernel(x: Any, dx: Any, bias: Any) -> None:
        dx[...] = x[...]
        bias[...] += jnp.sum(x[...], axis=0, keepdims=True)

    fn = pl.pallas_call(
        kernel, name="bias_grad", grid=(4, 4),
        in_specs=[pl.BlockSpec((128, 128), lambda i, j: (i, j))],
        out_specs=[
            pl.BlockSpec((128, 128), lambda i, j: (i, j)),
            pl.BlockSpec((1, 128), lambda i, j: (0, j)),
        ],
        out_shape=[shaped((512, 512), F32), shaped((1, 512), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )  # fmt: skip
    call = one(fn, shaped((512, 512), F32))
    assert semantics_reason(call) == "axis 0 of bias_grad is a reduction and is marked parallel"


@pytest.mark.parametrize(
    ("semantics", "message"),
    [
        (("parallel", "arbitrary"), "dimension_semantics of mm has 2 entries for a grid of 3 axes"),
        (("parallel", "foo", "arbitrary"), "dimension_semantics of mm: 'foo' is unknown; use par"),
    ],
)
def test_wrong_dimension_semantics_are_named(semantics: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        of(matmul(512, 512, 512, 128, 128, 128, semantics=semantics))


def test_semantics_given_as_enums_read_as_words_and_a_megacore_splits_parallel_axes() -> None:
    words = (pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY)
    built = matmul(512, 512, 512, 128, 128, 128, semantics=words)
    assert of(built).dimension_semantics == ("parallel", "arbitrary", "arbitrary")
    assert [of(built, on=name).parallel_splits for name in ("v5p", "v4", "v6e")] == [2, 2, 1]
    flat = matmul(128, 512, 512, 128, 128, 128, semantics=words)
    assert of(flat, on="v5p").parallel_splits == 1, "an axis of one cannot be shared"


@pytest.mark.parametrize(
    ("grid", "words", "steps"),
    [
        ((5, 4, 3), "ppa", 30),
        ((5, 4, 3), "paa", 36),
        ((5, 7, 3), "ppa", 54),
        ((3, 2, 3), "pap", 10),
        ((2, 3, 5, 7), "apap", 110),
        ((7,), "p", 4),
        ((1, 7, 3), "ppa", 12),
        ((5, 4, 3), "aaa", 60),
    ],
)
def test_two_cores_share_the_product_of_the_parallel_axes_as_v5p_schedules_do(
    grid: tuple[int, ...], words: str, steps: int
) -> None:
    block = ((128, 128), lambda *ids: (0, 0))
    semantics = tuple({"p": "parallel", "a": "arbitrary"}[word] for word in words)
    built = moving(grid, [((128, 128), *block)], ((128, 128), *block), semantics=semantics)
    call = of(built, on="v5p")
    assert call.core_steps == steps, "loop limits less the pipeline's 2 in the compiled schedules"
    assert of(built, on="v6e").core_steps == call.grid_steps


# The program around the calls


def simple(name: str = "simple", grid: Any = (4,)) -> Callable[..., Any]:
    def kernel(x: Any, z: Any) -> None:
        z[...] = x[...] * 2

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, name=name, grid=grid, in_specs=[spec], out_specs=spec,
        out_shape=shaped((32, 128), F32),
    )  # fmt: skip


@jax.custom_vjp
def with_rule(x: Any) -> Any:
    return simple("forward")(x)


with_rule.defvjp(lambda x: (simple("kept")(x), x), lambda x, g: (simple("backward")(g),))
X = shaped((32, 128), F32)


@pytest.mark.parametrize(
    ("fn", "calls"),
    [
        (lambda x: jax.jit(jax.jit(simple()))(x), [("simple", 1)]),
        (lambda x: simple("b")(simple("a")(x) + 1), [("a", 1), ("b", 1)]),
        (with_rule, [("forward", 1)]),
        (lambda x: jax.grad(lambda y: with_rule(y).sum())(x), [("kept", 1), ("backward", 1)]),
        (lambda x: jax.checkpoint(simple())(x), [("simple", 1)]),
        (lambda x: jax.lax.scan(lambda c, _: (simple()(c), None), x, length=7)[0], [("simple", 7)]),
        (lambda x: jax.lax.while_loop(lambda c: c.sum() > 0, simple(), x), [("simple", 1)]),
        (lambda x: jax.lax.cond(jnp.int32(3) > 1, simple("yes"), simple("no"), x), [("yes", 1)]),
        (
            lambda x: jax.lax.cond(x[0, 0] > 1, simple("yes"), simple("no"), x),
            [("no", 1), ("yes", 1)],
        ),
    ],
)
def test_calls_are_found_in_program_order_wherever_they_are(
    fn: Callable[..., Any], calls: list[tuple[str, int]]
) -> None:
    assert [(c.name, c.repeats) for c in trace(fn, (X,), TPU7X).calls] == calls


def test_vmap_adds_a_grid_axis_that_program_ids_do_not_count() -> None:
    def kernel(x: Any, z: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            with jax.named_scope("first"):
                z[...] = x[...]

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    fn = pl.pallas_call(
        kernel, name="batched", grid=(4,), in_specs=[spec], out_specs=spec, out_shape=X,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
    )  # fmt: skip
    call = one(jax.vmap(fn), shaped((3, 32, 128), F32))
    assert call.grid == (3, 4)
    assert call.scopes["first"] == 3
    assert call.dimension_semantics == ("parallel", "arbitrary")


def test_a_grid_computed_from_known_values_is_known_and_from_data_is_an_error() -> None:
    assert one(lambda x: simple(grid=(jnp.int32(2) + 1,))(x), X).grid == (3,)
    with pytest.raises(KernelError, match="the grid of simple depends on run-time data"):
        one(lambda n, x: simple(grid=(n,))(x), shaped((), jnp.int32), X)
    with pytest.raises(KernelError, match="the grid of simple has an axis of 0"):
        one(simple(grid=(0,)), X)


def test_a_call_without_a_grid_is_one_step() -> None:
    call = one(pl.pallas_call(lambda x, z: None, out_shape=X, name="whole"), X)
    assert (call.grid, call.grid_steps, call.dma_count) == ((), 1, 2)
    assert (call.fill_bytes, call.drain_bytes) == (32 * 128 * 4, 32 * 128 * 4)


def test_a_kernel_may_ask_for_the_chip_and_work_eagerly_while_it_is_traced() -> None:
    def fn(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            factor = int(np.asarray(jnp.arange(4)).sum())
        lanes = pltpu.get_tpu_info().num_lanes

        def kernel(x: Any, z: Any) -> None:
            z[...] = x[...] * lanes * factor

        return pl.pallas_call(kernel, name="asks", out_shape=X)(x)

    assert one(fn, X).name == "asks"


def test_a_function_that_raises_is_one_line_with_its_cause_and_one_without_calls_says_so() -> None:
    def broken(x: Any) -> Any:
        raise ValueError("block 100 does not divide 384\nand more")

    with pytest.raises(KernelError, match=r"broken raised ValueError: block .* and more$") as error:
        trace(broken, (X,), TPU7X)
    assert isinstance(error.value.__cause__, ValueError)

    def asks_then_breaks(x: Any) -> Any:
        pltpu.get_tpu_info()
        raise ValueError("the kernel's own fault")

    with pytest.raises(KernelError, match="raised ValueError: the kernel's own fault"):
        trace(asks_then_breaks, (X,), TPU7X)
    with pytest.raises(KernelError, match="holds no pallas_call"):
        trace(lambda x: x + 1, (X,), TPU7X)


def test_the_calls_own_limit_is_read() -> None:
    call = of(matmul(512, 512, 512, 128, 128, 128, limit=48 * MIB))
    assert call.vmem_limit_bytes == 48 * MIB
