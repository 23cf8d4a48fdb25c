"""The grouped matmul of `jax.gmm` and `tokamax.gmm`: out[rows of g] = lhs[rows of g]·rhs[g].

How many tiles run depends on the group sizes, which are data of the call. Here they are part of the
problem, so that the grid is known without a run: the option `group_sizes`, or an even split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.jax_blocks import clamped
from autotune.kernels.options import Option, choice, flag, row_counts
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
AXES = ("groups", "m", "k", "n")
LANES, SUBLANES = 128, 8
TILES = ("tile_m", "tile_k", "tile_n")
FLOP_CONVENTION = (
    "2·m·k·n: lhs·rhs, each row with its group's matrix; group sizes as the problem says"
)


def options() -> dict[str, Option]:
    """`group_sizes` null is an even split; `out_dtype` null is the function's own default."""
    return {
        "group_sizes": row_counts(),
        "transpose_rhs": flag(),
        "out_dtype": choice(None, "bfloat16", "float32"),
    }


def group_sizes(problem: Problem) -> tuple[int, ...]:
    """Rows of each group: the option, else m shared out evenly, the first ones one row larger."""
    given: Sequence[int] | None = problem.options["group_sizes"]
    groups, m = problem.shape["groups"], problem.shape["m"]
    if given is not None:
        return tuple(given)
    return tuple(m // groups + (g < m % groups) for g in range(groups))


def check(problem: Problem) -> None:
    """Raises InputError for group sizes that are not one a group or do not sum to m."""
    sizes, shape = group_sizes(problem), problem.shape
    if len(sizes) != shape["groups"]:
        raise InputError(
            f"{len(sizes)} group sizes for {shape['groups']} groups",
            path=("options", "group_sizes"),
        )
    if sum(sizes) != shape["m"]:
        raise InputError(
            f"group sizes sum to {sum(sizes)}, not m {shape['m']}",
            path=("options", "group_sizes"),
        )


def flops(problem: Problem) -> int:
    shape = problem.shape
    return 2 * shape["m"] * shape["k"] * shape["n"]


def operands(problem: Problem) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """lhs [m, k] and rhs [groups, k, n], or [groups, n, k] with `transpose_rhs`."""
    groups, m, k, n = (problem.shape[axis] for axis in AXES)
    dtype = jnp.dtype(problem.dtype)
    matrix = (n, k) if problem.options["transpose_rhs"] else (k, n)
    return abstract((m, k), dtype), abstract((groups, *matrix), dtype)


def out_dtype(problem: Problem, default: str) -> Any:
    return jnp.dtype(problem.options["out_dtype"] or default)


def reference(problem: Problem, lhs: Any, rhs: Any) -> Any:
    """[m, n] in float64."""
    lhs, rhs = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
    if problem.options["transpose_rhs"]:
        rhs = rhs.swapaxes(1, 2)
    edges = np.cumsum((0, *group_sizes(problem)))
    parts = [lhs[edges[g] : edges[g + 1]] @ matrix for g, matrix in enumerate(rhs)]
    return np.concatenate(parts)


def tiles(problem: Problem, m_tiles: Sequence[int], kn_tiles: Sequence[int]) -> dict[str, Tunable]:
    """tile_m, tile_k, tile_n: multiples of 8 and of 128 twice, or the whole axis.

    tile_m divides m in both projects' kernels; k and n may end in a part of a tile.
    """
    shape = problem.shape
    fitting = tuple(t for t in m_tiles if shape["m"] % t == 0) or (shape["m"],)
    found = {"tile_m": Tunable(values=fitting, check=_multiple(SUBLANES, shape["m"]))}
    for name, axis in (("tile_k", "k"), ("tile_n", "n")):
        size = shape[axis]
        usual = [t for t in kn_tiles if t < size]
        found[name] = Tunable(values=(*usual[-3:], size), check=_multiple(LANES, size))
    return found


def _multiple(of: int, whole: int) -> Any:
    def check(value: Scalar) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if good and (value == whole or value % of == 0):  # type: ignore[operator]
            return None
        return f"a positive multiple of {of}, or the whole axis of {whole}"

    return check


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why the tiles cannot run, or None."""
    m, tile_m = problem.shape["m"], config["tile_m"]
    assert isinstance(tile_m, int)
    return f"tile_m {tile_m} does not divide m {m}" if m % tile_m else None


def canonical(problem: Problem, config: Config) -> Config:
    """Tiles over the axis are the axis."""
    axes = zip(TILES, ("m", "k", "n"), strict=True)
    return clamped(config, {name: problem.shape[axis] for name, axis in axes})


def kernel(
    name: str,
    *,
    build: Callable[[Problem, Config], Call],
    tunables: Callable[[Problem, Device], Mapping[str, Tunable]],
    default: Callable[[Problem, Device], Config],
) -> Kernel:
    """A project's grouped matmul; the problem, its rules and reference are this module's."""
    return Kernel(
        name=name,
        axes=AXES,
        build=build,
        tunables=tunables,
        flops=flops,
        flop_convention=FLOP_CONVENTION,
        options=options(),
        check=check,
        illegal=illegal,
        canonical=canonical,
        default=default,
        reference=reference,
    )
