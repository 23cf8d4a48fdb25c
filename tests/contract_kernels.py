"""User kernels that break the contract, each in its own way, and two that keep it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.kernels.base import Kernel, Tunable


def _double(ref: Any, out: Any) -> None:
    out[...] = ref[...] * 2.0


def _scale(x: Any, rows: int, name: str = "double") -> Any:
    m, n = x.shape
    window = pl.BlockSpec((rows, n), lambda i: (i, 0))
    return pl.pallas_call(
        _double, name=name, grid=(m // rows,), in_specs=[window], out_specs=window, out_shape=x
    )(x)


def _argument(problem: Any) -> Any:
    return jax.ShapeDtypeStruct((problem.shape["m"], problem.shape["n"]), jnp.float32)


def _build(problem: Any, config: Any) -> Any:
    return lambda x: _scale(x, config["rows"]), (_argument(problem),)


KEEPS = Kernel(
    name="keeps",
    axes=("m", "n"),
    build=_build,
    tunables=lambda problem, device: {"rows": Tunable(values=(128, 256))},
    flops=lambda problem: problem.shape["m"] * problem.shape["n"],
    dtypes=("float32",),
    reference=lambda problem, x: 2.0 * x,
)


def _breaks(call: Any) -> Kernel:
    return dataclasses.replace(
        KEEPS, build=lambda problem, config: (call, (_argument(problem),)), name="breaks"
    )


def _raises(x: Any) -> Any:
    raise RuntimeError("rows of 7 do not\nfit")


RAISES = _breaks(_raises)
NO_CALL = _breaks(lambda x: x * 2.0)
WRONG_SHAPE = _breaks(lambda x: _scale(x, 128)[:64])
WRONG_SHAPE_SAID = dataclasses.replace(
    WRONG_SHAPE, reference=None, output=lambda problem: _argument(problem)
)
WRONG_COUNT = _breaks(lambda x: (_scale(x, 128), x))
NUMPY_REFERENCE = dataclasses.replace(KEEPS, reference=lambda problem, x: np.asarray(x)[:1])
LACKS_AXIS = dataclasses.replace(
    KEEPS, build=lambda problem, config: problem.shape["k"] and _build(problem, config)
)
LACKS_OPTION = dataclasses.replace(
    KEEPS, build=lambda problem, config: problem.options["causal"] and _build(problem, config)
)
FLOPS_LACK_AXIS = dataclasses.replace(KEEPS, flops=lambda problem: problem.shape["k"])
NO_PAIR = dataclasses.replace(KEEPS, build=lambda problem, config: _scale)
NO_STRUCTS = dataclasses.replace(KEEPS, build=lambda problem, config: (_scale, (128,)))

TWICE = dataclasses.replace(
    KEEPS,
    name="twice",
    build=lambda problem, config: (
        lambda x: _scale(_scale(x, config["rows"], "first"), config["rows"], "second"),
        (_argument(problem),),
    ),
    reference=None,
)


def _hungry(problem: Any, config: Any) -> Any:
    """`scratch_mib` of scratch: a sum carried from step to step, or written anew in each."""
    shape = (config["scratch_mib"] * 2048, 128)

    def body(ref: Any, out: Any, scratch: Any) -> None:
        if config["carried"]:
            scratch[0:8] = scratch[0:8] + ref[0:8, 0:128]
        else:  # all of it, and then one place: the compiler cannot do without
            scratch[...] = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + ref[0, 0]
        place = pl.multiple_of(pl.program_id(0) * 8, 8)
        out[...] = ref[...] + jnp.sum(scratch[pl.ds(place, 8)])

    def call(x: Any) -> Any:
        window = pl.BlockSpec((128, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(x.shape[0] // 128,),
            in_specs=[window],
            out_specs=window,
            out_shape=x,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32)],
            name="hungry",
        )(x)

    return call, (_argument(problem),)


HUNGRY = dataclasses.replace(
    KEEPS,
    name="hungry",
    build=_hungry,
    tunables=lambda problem, device: {
        "scratch_mib": Tunable(values=(1, 40)),
        "carried": Tunable(values=(False, True)),
    },
    reference=None,
)

ANSWERS = {
    "tunables": lambda problem, device: None,
    "tunables of lists": lambda problem, device: {"rows": [8, 64]},
    "tunables by number": lambda problem, device: {3: Tunable(values=(8,))},
    "canonical": lambda problem, config: None,
    "default": lambda problem, device: None,
    "illegal": lambda problem, config, device: True,
}
"""What functions of a kernel must not give."""
