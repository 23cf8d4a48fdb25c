"""Blocked matmul with an f32 or int32 accumulator resident in VMEM, K innermost.

x [m, k] times y [k, n] ([n, k] with `transpose_rhs`) gives [m, n]. The grid is (m, n, k) or
(n, m, k); the accumulator is zeroed on the first K step and the epilogue applied to it on the
last, where the block is written once. Axes that no block divides are read past their edge: rows
and columns past m and n are never stored, and a K edge is zeroed in both operands on the last K
step only, so the steady step carries no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import device as devices
from autotune.candidate import Config
from autotune.errors import InputError
from autotune.kernels import matmul_space as space
from autotune.kernels import reference
from autotune.kernels.attention import LANES, round_up
from autotune.kernels.base import Call, Kernel
from autotune.kernels.matmul_space import MOST_WINDOW_BUFFERS, BlockSizes
from autotune.kernels.options import choice, flag
from autotune.problem import Problem

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")
DTYPES = ("bfloat16", "float32", "int8", *FLOAT8)
TALL_ROWS = 1024  # taller blocks are multiplied in parts
PART_ROWS = 512

EPILOGUES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda z: z,
    "relu": lambda z: jnp.maximum(z, 0),
    "gelu": lambda z: jax.nn.gelu(z, approximate=True),  # the tanh form, jax.nn.gelu's default
    "silu": lambda z: z / (1.0 + jnp.exp(-z)),
}
abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct


def multiplied_dtype(lhs: Any, rhs: Any) -> Any:
    """What both operands are widened to in VMEM: the MXU multiplies like by like.

    The wider of the two; bfloat16, which holds every fp8 and int8 value, for two 8-bit kinds.
    """
    lhs, rhs = jnp.dtype(lhs), jnp.dtype(rhs)
    if lhs.itemsize == rhs.itemsize:
        return lhs if lhs == rhs else jnp.dtype(jnp.bfloat16)
    return max(lhs, rhs, key=lambda dtype: dtype.itemsize)


def accumulator_dtype(dtype: Any) -> Any:
    """int32 for whole numbers, float32 otherwise."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def default_out_dtype(dtype: Any) -> Any:
    """The multiplied dtype; int32 for int8 and bf16 for fp8, whose own range sums overflow."""
    if jnp.dtype(dtype).itemsize > 1:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.bfloat16)


def _dot(x: jax.Array, y: jax.Array, *, transpose_rhs: bool, out_dtype: Any) -> jax.Array:
    common = multiplied_dtype(x.dtype, y.dtype)
    x, y = x.astype(common), y.astype(common)
    # One bf16 pass would leave f32 products 2^-8 apart from the truth.
    precision = lax.Precision.HIGHEST if common == jnp.float32 else None
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    return lax.dot_general(x, y, contract, precision=precision, preferred_element_type=out_dtype)


def _zero_past(block: jax.Array, *, axis: int, valid: int) -> jax.Array:
    """`block` with zeros from `valid` on along `axis`."""
    if block.shape[axis] == valid:
        return block
    index = lax.broadcasted_iota(jnp.int32, block.shape, axis)
    if block.dtype.itemsize == 1:  # 8-bit selects do not exist on every chip
        wide = jnp.int32 if block.dtype == jnp.int8 else jnp.float32
        return jnp.where(index < valid, block.astype(wide), 0).astype(block.dtype)
    return jnp.where(index < valid, block, jnp.zeros((), block.dtype))


def _by_rows(count: int, add: Callable[[Any], None]) -> None:
    """`add` on all rows, in a rolled loop over parts of a tall block.

    One product of 2048 x 1024 x 2048 spills its whole left block and takes 20 s of CPU to compile
    (tpu7x: 13,276 bundles, 8,087 spills); in four parts it takes 2 s (4 x 2,917 bundles, 223
    spills), and the MXU is the limit of both.
    """
    if count <= TALL_ROWS or count % PART_ROWS:
        add(slice(None))
        return

    @pl.loop(0, count // PART_ROWS)
    def _(part: Any) -> None:
        add(pl.ds(pl.multiple_of(part * PART_ROWS, PART_ROWS), PART_ROWS))


def _kernel(
    x_ref: Any,  # [bm, bk]
    y_ref: Any,  # [bk, bn], or [bn, bk] transposed
    z_ref: Any,  # [bm, bn]
    acc_ref: Any,  # [bm, bn] f32 or int32
    *,
    k: int,
    k_steps: int,
    epilogue: str,
    transpose_rhs: bool,
) -> None:
    step = pl.program_id(2)
    last = k_steps - 1
    block_k = x_ref.shape[1]
    edge = k - last * block_k  # valid part of the last K block
    dot = functools.partial(_dot, transpose_rhs=transpose_rhs, out_dtype=acc_ref.dtype)

    @pl.when(step == 0)
    def _() -> None:
        with jax.named_scope("init"):
            acc_ref[...] = jnp.zeros_like(acc_ref)

    def accumulate() -> None:
        def add(rows: Any) -> None:
            with jax.named_scope("step"):
                acc_ref[rows, :] += dot(x_ref[rows, :], y_ref[...])

        _by_rows(acc_ref.shape[0], add)

    if edge == block_k:
        accumulate()
    else:
        pl.when(step < last)(accumulate)

        @pl.when(step == last)
        def _() -> None:
            # Only the lane tiles that hold valid columns are multiplied, and the last of them is
            # zeroed past the edge on both sides: NaN may lie there, and NaN · 0 is NaN.
            used = round_up(edge, LANES)

            def add(rows: Any) -> None:
                with jax.named_scope("masked_step"):
                    x = _zero_past(x_ref[rows, :used], axis=1, valid=edge)
                    if transpose_rhs:
                        y = _zero_past(y_ref[:, :used], axis=1, valid=edge)
                    else:
                        y = _zero_past(y_ref[:used, :], axis=0, valid=edge)
                    acc_ref[rows, :] += dot(x, y)

            _by_rows(acc_ref.shape[0], add)

    @pl.when(step == last)
    def _() -> None:
        with jax.named_scope("finalize"):
            acc = acc_ref[...]
            if epilogue in ("gelu", "silu"):
                acc = acc.astype(jnp.float32)
            z_ref[...] = EPILOGUES[epilogue](acc).astype(z_ref.dtype)


def _in_own_pipeline(
    body: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_spec: Any,
) -> Callable[..., None]:
    """The same kernel on operands in HBM, over `grid` within a single step on one core of a chip.

    Its windows take as many buffers as their specs say.
    """

    def kernel(x_ref: Any, y_ref: Any, z_ref: Any, acc_ref: Any) -> None:
        def step(x: Any, y: Any, z: Any) -> None:
            body(x, y, z, acc_ref)

        pipeline = pltpu.emit_pipeline(step, grid=grid, in_specs=in_specs, out_specs=[out_spec])
        pipeline(x_ref, y_ref, z_ref)

    return kernel


def matmul(
    x: jax.Array,
    y: jax.Array,
    *,
    block_sizes: BlockSizes,
    out_dtype: Any = None,
    epilogue: str = "none",
    transpose_rhs: bool = False,
) -> jax.Array:
    """epilogue(x · y) as [m, n].

    x is [m, k], y [k, n], or [n, k] with `transpose_rhs`. `out_dtype` None is what
    `default_out_dtype` says of the multiplied dtype.

    Raises:
      ValueError: for operands that do not belong together, or blocks that do not suit them.
    """
    contracted = 1 if transpose_rhs else 0
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[contracted]:
        wanted = "[m, k] and [n, k]" if transpose_rhs else "[m, k] and [k, n]"
        raise ValueError(f"x {x.shape} and y {y.shape} are not {wanted}")
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue {epilogue!r} is not one of {tuple(EPILOGUES)}")
    (m, k), n = x.shape, y.shape[1 - contracted]
    block_sizes.check(m, k, n)
    b = block_sizes
    k_steps = pl.cdiv(k, b.bk)
    common = multiplied_dtype(x.dtype, y.dtype)
    m_outer = b.grid_order == "mn"
    outer = (pl.cdiv(m, b.bm), pl.cdiv(n, b.bn))

    def spec(block: tuple[int, int], axes: str, buffers: int = 2) -> pl.BlockSpec:
        def index(i: Any, j: Any, kk: Any) -> tuple[Any, ...]:
            at = dict(zip("mnk", (i, j, kk) if m_outer else (j, i, kk), strict=True))
            return tuple(at[axis] for axis in axes)

        if buffers == 2:  # the pipeline's own default
            return pl.BlockSpec(block, index)
        return pl.BlockSpec(block, index, pipeline_mode=pl.Buffered(buffers))

    y_spec = (
        spec((b.bn, b.bk), "nk", b.buffers)
        if transpose_rhs
        else spec((b.bk, b.bn), "kn", b.buffers)
    )
    body: Any = functools.partial(
        _kernel, k=k, k_steps=k_steps, epilogue=epilogue, transpose_rhs=transpose_rhs
    )
    grid: tuple[int, ...] = (*(outer if m_outer else outer[::-1]), k_steps)
    in_specs, out_spec = [spec((b.bm, b.bk), "mk", b.buffers), y_spec], spec((b.bm, b.bn), "mn")
    semantics: Any = ("parallel", "parallel", "arbitrary")
    if b.buffers > MOST_WINDOW_BUFFERS:
        body = _in_own_pipeline(body, grid, in_specs, out_spec)
        hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
        grid, in_specs, out_spec, semantics = (), [hbm, hbm], hbm, None
    call = pl.pallas_call(
        body,
        name="matmul",
        grid=grid,
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=abstract((m, n), out_dtype or default_out_dtype(common)),
        scratch_shapes=[pltpu.VMEM((b.bm, b.bn), accumulator_dtype(common))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=b.vmem_limit_bytes
        ),
    )
    return call(x, y)  # type: ignore[no-any-return]


def _dtypes(problem: Problem) -> tuple[str, str, str]:
    """Dtypes of x, y and the output."""
    rhs = problem.options["rhs_dtype"] or problem.dtype
    out = problem.options["out_dtype"] or default_out_dtype(multiplied_dtype(problem.dtype, rhs))
    return problem.dtype, rhs, str(out)


def build(problem: Problem, config: Config) -> Call:
    """The call on abstract x and y. Raises ValueError for a config that suits no chip."""
    blocks = space.block_sizes(config)
    m, k, n = (problem.shape[axis] for axis in "mkn")
    blocks.check(m, k, n)
    lhs, rhs, out = _dtypes(problem)
    transpose_rhs = problem.options["transpose_rhs"]
    fn = functools.partial(
        matmul,
        block_sizes=blocks,
        out_dtype=jnp.dtype(out),
        epilogue=problem.options["epilogue"],
        transpose_rhs=transpose_rhs,
    )
    x = abstract((m, k), jnp.dtype(lhs))
    y = abstract((n, k) if transpose_rhs else (k, n), jnp.dtype(rhs))
    return fn, (x, y)


def check(problem: Problem) -> None:
    """Raises InputError for a rhs dtype the chip lacks, or an epilogue that needs fractions."""
    device = devices.get(problem.device)
    _, rhs, out = _dtypes(problem)
    if rhs not in device.matmul_dtypes:
        allowed = ", ".join(d for d in DTYPES if d in device.matmul_dtypes)
        raise InputError(
            f"rhs_dtype: {rhs!r} is not multiplied by {device.name}; use {allowed}",
            path=("options", "rhs_dtype"),
        )
    if problem.options["epilogue"] in ("gelu", "silu") and jnp.issubdtype(out, jnp.integer):
        raise InputError(
            f"epilogue {problem.options['epilogue']!r} has no whole-number result for out_dtype "
            f"{out!r}; use relu or none, or out_dtype float32 or bfloat16",
            path=("options", "epilogue"),
        )


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Standard normals; for int8 whole numbers over its full range.

    Under an epilogue both operands have variance K^-1/2, and x · y so 1: normals times K^-1/4, and
    for int8 mostly zeros and a few ±1. At K^1/2 gelu, silu and relu are one function but for a few
    values.
    """
    _, arguments = build(problem, space.default(problem, devices.get(problem.device)))
    keys = jax.random.split(key, len(arguments))
    plain = problem.options["epilogue"] == "none"
    scale = 1.0 if plain else float(problem.shape["k"] ** -0.25)

    def draw(argument: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if argument.dtype != jnp.int8:
            drawn = jax.random.normal(key, argument.shape, jnp.float32)
            return (drawn * scale).astype(argument.dtype)
        if plain:
            return jax.random.randint(key, argument.shape, -127, 128, jnp.int8)
        drawn = jax.random.uniform(key, argument.shape, jnp.float32, -1.0, 1.0)
        return (jnp.sign(drawn) * (jnp.abs(drawn) < scale**2)).astype(jnp.int8)

    return tuple(draw(a, k) for a, k in zip(arguments, keys, strict=True))


KERNEL = Kernel(
    name="matmul",
    axes=("m", "k", "n"),
    build=build,
    tunables=space.tunables,
    flops=lambda problem: 2 * problem.shape["m"] * problem.shape["k"] * problem.shape["n"],
    flop_convention="2·m·k·n: the multiply-adds of X·Y",
    options={
        "out_dtype": choice(None, "bfloat16", "float32", "int32", *FLOAT8, "int8"),
        "epilogue": choice("none", *EPILOGUES),
        "transpose_rhs": flag(),
        "rhs_dtype": choice(None, *DTYPES),
    },
    dtypes=DTYPES,
    check=check,
    illegal=space.illegal,
    canonical=space.canonical,
    multiplied_dtype=lambda problem: str(
        multiplied_dtype(problem.dtype, problem.options["rhs_dtype"] or problem.dtype)
    ),
    default=space.default,
    inputs=inputs,
    reference=reference.matmul,
)
