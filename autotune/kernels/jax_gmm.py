"""`jax.gmm`: the grouped matmul of JAX's megablox, `jax.experimental.pallas.ops.tpu.megablox.gmm`.

Its argument `tiling` is the tunables tile_m, tile_k and tile_n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels import gmm_problem as gmm
from autotune.kernels.base import Call, Tunable
from autotune.problem import Problem

M_TILES = (128, 256, 512, 1024)
KN_TILES = (128, 256, 512, 1024, 2048)


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    return gmm.tiles(problem, M_TILES, KN_TILES)


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract lhs and rhs; the group sizes are constants of it."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox

    tiling = tuple(config[name] for name in gmm.TILES)
    sizes = gmm.group_sizes(problem)

    def run(lhs: Any, rhs: Any) -> Any:
        return megablox(
            lhs, rhs, jnp.array(sizes, jnp.int32), gmm.out_dtype(problem, "float32"), tiling,
            None, None, problem.options["transpose_rhs"],
        )  # fmt: skip

    return run, gmm.operands(problem)


def default(problem: Problem, device: Device) -> Config:
    """(128, 128, 128), the function's own default."""
    return gmm.canonical(problem, dict.fromkeys(gmm.TILES, 128))


KERNEL = gmm.kernel("jax.gmm", build=build, tunables=tunables, default=default)
