"""What a trace sees of a kernel that is a pipeline of its own (`pltpu.emit_pipeline`)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import device as devices
from autotune.call_record import PallasCall, Program
from autotune.candidate import Config
from autotune.cost_model import model_latency, vmem_bill
from autotune.kernels import matmul as module
from autotune.kernels.base import make_problem
from autotune.pallas_call import trace

CHIP = devices.get("tpu7x")
X = module.abstract((1000, 2048), jnp.bfloat16)


def traced(buffers: int) -> PallasCall:
    p = make_problem(module.KERNEL, device="tpu7x", shape={"m": 1000, "k": 2060, "n": 512})
    config: Config = {
        "bm": 256, "bk": 512, "bn": 256, "grid_order": "nm", "buffers": buffers,
        "vmem_limit_bytes": None,
    }  # fmt: skip
    return trace(*module.KERNEL.build(p, config), CHIP).calls[0]


def without_own_scopes(call: PallasCall) -> list[Any]:
    """The timeline without the scopes the pipeline adds; its first and last step count apart."""
    merged: dict[Any, int] = {}
    for step in call.classes:
        scopes = {n: c for n, c in step.scopes.items() if not n.startswith("ep_")}
        key = repr(dataclasses.replace(step, steps=1, scopes=scopes))
        merged[key] = merged.get(key, 0) + step.steps
    return sorted(merged.items())


def test_an_inner_pipeline_is_read_like_the_calls_own() -> None:
    two, three = traced(2), traced(3)
    assert three.grid == two.grid == (2, 4, 5)
    assert without_own_scopes(three) == without_own_scopes(two)
    assert three.hbm_bytes == two.hbm_bytes
    assert three.executed_flops == two.executed_flops
    assert three.scratch == two.scratch
    assert three.scratch[0].carried
    assert three.windows == tuple(
        dataclasses.replace(w, buffers=3 if w.role == "input" else 2) for w in two.windows
    )


def test_a_third_buffer_is_on_the_vmem_bill_and_halves_what_a_copy_may_cost() -> None:
    two, three = traced(2), traced(3)
    inputs = sum(w.window_bytes for w in two.windows if w.role == "input")
    assert vmem_bill(three, CHIP).windows - vmem_bill(two, CHIP).windows == inputs
    latencies = [model_latency(Program(calls=(c,)), CHIP).total_s for c in (two, three)]
    assert latencies[1] < latencies[0]


def test_the_scopes_of_the_pipeline_itself_run_every_step_or_once() -> None:
    scopes = traced(3).scopes
    assert {scopes[f"ep_{n}"] for n in ("copy_in", "wait_in", "copy_out", "wait_out")} == {40}
    assert {n: c for n, c in scopes.items() if "initialize" in n} == {
        "ep_initialize_0": 1, "ep_initialize_1": 1,
    }  # fmt: skip


def double(x: Any, *, twice: bool) -> Any:
    """x + 1 by one pipeline in a kernel, or by two."""

    def add_one(x_ref: Any, o_ref: Any) -> None:
        with jax.named_scope("work"):
            o_ref[...] = x_ref[...] + 1

    def kernel(x_ref: Any, o_ref: Any) -> None:
        spec = pl.BlockSpec((200, 256), lambda i, j: (i, j))
        for _ in range(1 + twice):
            pltpu.emit_pipeline(add_one, grid=(5, 8), in_specs=[spec], out_specs=[spec])(
                x_ref, o_ref
            )

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(kernel, in_specs=[hbm], out_specs=hbm, out_shape=x, name="double")(x)


def test_a_kernel_of_several_pipelines_is_read_as_loops_of_copies_as_before() -> None:
    one = trace(functools.partial(double, twice=False), (X,), CHIP).calls[0]
    assert one.grid_steps == 40
    assert [w.memory for w in one.windows] == ["vmem", "vmem"]
    two = trace(functools.partial(double, twice=True), (X,), CHIP).calls[0]
    assert two.grid_steps == 1
    assert [w.memory for w in two.windows] == ["hbm", "hbm"]
    assert two.scopes["work"] == 80


def test_tracing_leaves_jax_as_it_was() -> None:
    traced(3)
    config: Any = jax.config
    assert not config.jax_use_emit_pipeline_primitive
