"""Kernels for the measuring tests: plain jax where the kernel is not the point, and faulty ones."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.problem import Problem


def _product(problem: Problem, *arrays: Any) -> Any:
    x, y = (np.asarray(array).astype(np.float64) for array in arrays)
    return x @ y


def _operands(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    m, k, n = (problem.shape[axis] for axis in "mkn")
    dtype = jnp.dtype(problem.dtype)
    return jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)


def _acts(problem: Problem, config: Config) -> Call:
    """A product in `parts` that does what `config["act"]` says: while traced, or while it runs."""
    act, parts = str(config["act"]), int(config["parts"])  # type: ignore[arg-type]

    def host(value: Any) -> Any:
        if act == "hangs":
            time.sleep(60)
        if act == "aborts":
            os.abort()
        if act == "raises":
            raise RuntimeError("the device lost a packet")
        return value

    def program(x: Any, y: Any) -> Any:
        if act == "hangs in tracing":
            time.sleep(60)
        if act == "aborts in tracing":
            os.abort()
        if act == "refuses":
            raise NotImplementedError("no such block")
        if act in ("hangs", "aborts", "raises"):
            x = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        columns = jnp.split(y, parts, axis=1)
        out = jnp.concatenate([jnp.dot(x, c, preferred_element_type=jnp.float32) for c in columns],
                              axis=1)  # fmt: skip
        if act == "half":
            out = out.at[:, out.shape[1] // 2 :].set(0.0)
        return (jnp.full_like(out, jnp.nan) if act == "nan" else out).astype(x.dtype)

    return program, _operands(problem)


def _tunables(problem: Problem, device: Device) -> dict[str, Tunable]:
    return {"act": Tunable(values=("nothing",)), "parts": Tunable(values=(1, 2, 4))}


PRODUCT = Kernel(
    name="product",
    axes=("m", "k", "n"),
    build=_acts,
    tunables=_tunables,
    flops=lambda problem: 2 * problem.shape["m"] * problem.shape["k"] * problem.shape["n"],
    default=lambda problem, device: {"act": "nothing", "parts": 1},
    reference=_product,
)
UNCHECKED = dataclasses.replace(PRODUCT, name="unchecked", reference=None)
ZEROS = dataclasses.replace(
    PRODUCT,
    name="zeros",
    inputs=lambda problem, key: tuple(jnp.zeros(a.shape, a.dtype) for a in _operands(problem)),
)
ONES = dataclasses.replace(
    PRODUCT,
    name="ones",
    inputs=lambda problem, key: tuple(jnp.ones(a.shape, a.dtype) for a in _operands(problem)),
)


def _numpy_inputs(problem: Problem, key: Any) -> tuple[Any, ...]:
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return tuple(random.standard_normal(a.shape).astype(a.dtype) for a in _operands(problem))


NUMPY_INPUTS = dataclasses.replace(PRODUCT, name="numpy_inputs", inputs=_numpy_inputs)


def _skips(problem: Problem, config: Config) -> Call:
    """A matmul in 128-wide K blocks, f32 accumulator; `skip` leaves one block out."""
    m, k, n = (problem.shape[axis] for axis in "mkn")
    skip = config["skip"]

    def kernel(x_ref: Any, y_ref: Any, z_ref: Any, acc_ref: Any) -> None:
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _() -> None:
            acc_ref[...] = jnp.zeros_like(acc_ref)

        def add() -> None:
            acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        pl.when(step != (-1 if skip is None else skip))(add)

        @pl.when(step == k // 128 - 1)
        def _() -> None:
            z_ref[...] = acc_ref[...].astype(z_ref.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(k // 128,),
        in_specs=[
            pl.BlockSpec((m, 128), lambda s: (0, s)),
            pl.BlockSpec((128, n), lambda s: (s, 0)),
        ],
        out_specs=pl.BlockSpec((m, n), lambda s: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.dtype(problem.dtype)),
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
    )
    return call, _operands(problem)


SKIPS = dataclasses.replace(
    PRODUCT,
    name="skips",
    build=_skips,
    tunables=lambda problem, device: {"skip": Tunable(values=(None, 0, 1, 5))},
    default=None,
)


def _third(problem: Problem, config: Config) -> Call:
    """A copy in blocks; its index map may be wrong from the third block on, its trace may end."""
    if config.get("act") == "hangs":
        time.sleep(60)
    if config.get("act") == "aborts":
        os.abort()
    m, n = problem.shape["m"], problem.shape["n"]

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    rows = int(config["rows"])  # type: ignore[arg-type]
    wrong = bool(config["wrong"])
    read, written = (int(config.get("act") == act) for act in ("reads outside", "writes outside"))
    call = pl.pallas_call(
        kernel,
        grid=(m // rows,),
        in_specs=[
            pl.BlockSpec((rows, n), lambda i: ((jnp.minimum(i, 1) if wrong else i) + read, 0))
        ],
        out_specs=pl.BlockSpec((rows, n), lambda i: (i + written, 0)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.dtype(problem.dtype)),
    )
    return call, (jax.ShapeDtypeStruct((m, n), jnp.dtype(problem.dtype)),)


COPY = Kernel(
    name="copy",
    axes=("m", "n"),
    build=_third,
    tunables=lambda problem, device: {
        "rows": Tunable(values=(8, 16)),
        "wrong": Tunable(values=(False, True)),
    },
    flops=lambda problem: problem.shape["m"] * problem.shape["n"],
    reference=lambda problem, x: np.asarray(x).astype(np.float64),
)
UNRUN = dataclasses.replace(COPY, name="unrun", interpretable=False)
