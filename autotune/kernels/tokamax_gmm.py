"""`tokamax.gmm`: Tokamax's grouped matmul on TPU, the kernel behind `tokamax.ragged_dot`.

Its tunables are the fields of that operation's config: the tiles and the buffers of lhs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.kernels import gmm_problem as gmm
from autotune.kernels import tokamax_library
from autotune.kernels.base import Call, Tunable
from autotune.problem import Problem

library = tokamax_library.module(tokamax_library.RAGGED_DOT + "pallas_mosaic_tpu_kernel")

M_TILES = (128, 256, 512, 1024)
KN_TILES = (128, 256, 512, 1024, 2048)
BUFFERS = "input_buffer_count"


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """Tiles, and 2 to 4 buffers, as Tokamax's own search has them."""
    buffers = Tunable(values=(2, 3), check=_refused_buffers)
    return {**gmm.tiles(problem, M_TILES, KN_TILES), BUFFERS: buffers}


def _refused_buffers(value: Scalar) -> str | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 16
    return None if good else "a whole number from 1 to 16"


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract lhs and rhs; the group sizes are constants of it."""
    tiling = tuple(config[name] for name in gmm.TILES)
    sizes = gmm.group_sizes(problem)

    def run(lhs: Any, rhs: Any) -> Any:
        return library.gmm(
            lhs,
            rhs,
            group_sizes=jnp.array(sizes, jnp.int32),
            precision=(jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT),
            out_dtype=gmm.out_dtype(problem, problem.dtype),
            tiling=tiling,
            input_buffer_count=config[BUFFERS],
            transpose_rhs=problem.options["transpose_rhs"],
        )

    return run, gmm.operands(problem)


def default(problem: Problem, device: Device) -> Config:
    """The function's own defaults: tiling (128, 128, 128), two buffers."""
    own = inspect.signature(library.gmm).parameters
    tiles = dict(zip(gmm.TILES, own["tiling"].default, strict=True))
    return gmm.canonical(problem, {**tiles, BUFFERS: own[BUFFERS].default})


KERNEL = gmm.kernel("tokamax.gmm", build=build, tunables=tunables, default=default)
