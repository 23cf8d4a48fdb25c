"""`jax.matmul` and `jax.gmm`: JAX's own functions by their own arguments, rules and defaults."""

import importlib.util
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_support import plainly_interpreted

from autotune import device as devices
from autotune.errors import InputError
from autotune.kernels import base
from autotune.pallas_call import trace

jax.config.update("jax_platforms", "cpu")

V6E = devices.get("v6e")
GROUPED = ["jax.gmm"] + ["tokamax.gmm"] * bool(importlib.util.find_spec("tokamax"))


def problem_of(name, shape, dtype="float32", **options):
    kernel = base.load(name)
    return kernel, base.make_problem(
        kernel, device="v6e", shape=shape, options=options, dtype=dtype
    )


def error(kernel, problem, config):
    """Largest difference from the reference, as a share of its largest value."""
    function, arguments = kernel.build(problem, config)
    keys = jax.random.split(jax.random.key(0), len(arguments))
    arrays = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, arguments, strict=True)]
    with plainly_interpreted():
        got = np.asarray(jax.jit(function)(*arrays), np.float64)
    want = kernel.reference(problem, *arrays)
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


MATMUL = {"m": 48, "k": 384, "n": 384}


def test_jax_s_matmul_computes_the_product():
    kernel, problem = problem_of("jax.matmul", MATMUL)
    config = {"block_m": 16, "block_k": 128, "block_n": 128}
    assert error(kernel, problem, config) < 1e-5


def test_jax_s_matmul_has_its_own_default_for_block_k():
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    kernel, problem = problem_of("jax.matmul", {"m": 512, "k": 512, "n": 512})
    default = kernel.default(problem, V6E)
    assert default["block_k"] == inspect.signature(matmul).parameters["block_k"].default
    assert kernel.illegal(problem, default, V6E) is None
    kernel, problem = problem_of("jax.matmul", {"m": 8, "k": 100, "n": 384})
    assert kernel.default(problem, V6E) == {"block_m": 8, "block_k": 100, "block_n": 128}


def test_blocks_jax_s_matmul_would_leave_rows_out_of_are_illegal():
    kernel, problem = problem_of("jax.matmul", MATMUL)
    config = {"block_m": 48, "block_k": 128, "block_n": 256}
    assert kernel.illegal(problem, config, V6E) == "block_n 256 does not divide n 384"
    tunables = kernel.tunables(problem, V6E)
    assert tunables["block_m"].check(12) == "a positive multiple of 8, or the whole axis of 48"
    assert tunables["block_k"].check(True) is not None
    assert kernel.canonical(problem, {**config, "block_n": 512})["block_n"] == 384


SIZES = [100, 0, 300, 112]
GMM = {"groups": 4, "m": 512, "k": 256, "n": 384}
TILES = {"tile_m": 128, "tile_k": 128, "tile_n": 128}


def test_jax_s_gmm_multiplies_each_group_by_its_own_matrix():
    for options in ({"group_sizes": SIZES}, {"group_sizes": SIZES, "transpose_rhs": True}):
        kernel, problem = problem_of("jax.gmm", GMM, **options)
        assert error(kernel, problem, TILES) < 1e-5


@pytest.mark.parametrize("name", GROUPED)
def test_the_grid_of_a_gmm_visits_a_row_tile_once_for_each_group_in_it(name):
    kernel, problem = problem_of(name, GMM, "bfloat16", group_sizes=SIZES)
    (call,) = trace(*kernel.build(problem, kernel.default(problem, V6E)), V6E).calls
    # 100 | 300 from row 100 to 399 | 112 from row 400: the tiles of 128 rows hold 1, 4 and 1.
    assert call.grid == (3, 6, 2)
    assert call.executed_flops == 2 * (6 * 128) * 256 * 384
    assert all(window.exact for window in call.windows)
    lhs, rhs = (w for w in call.windows if w.role == "input" and w.memory == "vmem")
    assert lhs.copies == rhs.copies == 36


@pytest.mark.parametrize("name", GROUPED)
def test_without_group_sizes_the_rows_are_shared_out_evenly(name):
    kernel, problem = problem_of(name, {**GMM, "m": 514}, "bfloat16")
    assert kernel.default(problem, V6E).items() >= TILES.items(), "the functions' own default"
    from autotune.kernels import gmm_problem

    assert gmm_problem.group_sizes(problem) == (129, 129, 128, 128)
    assert kernel.illegal(problem, TILES, V6E) == "tile_m 128 does not divide m 514"


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([256, 256], "2 group sizes for 4 groups"),
        ([100, 0, 300, 100], "group sizes sum to 500, not m 512"),
        ([100, -1, 300, 113], r"\[100, -1, 300, 113\] is not allowed; a list of whole numbers"),
        ([], r"\[\] is not allowed; a list of whole numbers"),
        (7, "7 is not allowed; a list of whole numbers"),
    ],
)
def test_group_sizes_that_do_not_fit_are_one_line(name, sizes, message):
    with pytest.raises(InputError, match=message):
        problem_of(name, GMM, group_sizes=sizes)


def test_the_tiles_of_jax_s_gmm_default_to_its_own():
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    default = inspect.signature(gmm).parameters["tiling"].default
    kernel, problem = problem_of("jax.gmm", GMM)
    assert tuple(kernel.default(problem, V6E).values()) == default


def test_out_dtype_reaches_the_functions():
    for name, shape in (("jax.matmul", MATMUL), ("jax.gmm", GMM)):
        kernel, problem = problem_of(name, shape, "bfloat16", out_dtype="float32")
        function, arguments = kernel.build(problem, kernel.default(problem, V6E))
        assert jax.eval_shape(function, *arguments).dtype == jnp.float32
