"""The matmul: numerics against float64, legality, problems it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import (
    BF16_TOLERANCE,
    CHIPS,
    DRAWN,
    F32_TOLERANCE,
    assert_compiles_or_lacks_vmem,
    plant,
    run,
    spread,
)

from autotune import device as devices
from autotune.errors import InputError
from autotune.kernels import matmul as module
from autotune.kernels.base import make_problem
from autotune.kernels.matmul import KERNEL, BlockSizes, matmul
from autotune.problem import Problem

MIB = 2**20


def problem(
    m: int, k: int, n: int, *, device: str = "v6e", dtype: str = "bfloat16", **options: Any
):
    shape = {"m": m, "k": k, "n": n}
    return make_problem(KERNEL, device=device, shape=shape, options=options, dtype=dtype)


def config(bm: int, bk: int, bn: int, **more: Any) -> dict[str, Any]:
    rest = {"grid_order": "mn", "buffers": 2, "vmem_limit_bytes": None}
    return {"bm": bm, "bk": bk, "bn": bn, **rest, **more}


def tolerance(p: Problem) -> float:
    """By operand and output dtype: sums are f32 or exact, so K does not enter."""
    if p.dtype == "float32":
        return F32_TOLERANCE
    out = p.options["out_dtype"]
    if p.dtype == "int8":
        return 0.0 if p.options["epilogue"] in ("none", "relu") and out is None else F32_TOLERANCE
    return F32_TOLERANCE if out == "float32" else BF16_TOLERANCE


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, dict[str, Any], int]:
    bm = draw(st.sampled_from([8, 16, 32]))
    m = draw(st.integers(1, 3 * bm + 5))
    k = draw(st.integers(1, 420))
    n = draw(st.integers(1, 300))
    buffers = draw(st.sampled_from([1, 2, 3]))
    if buffers == 3:  # the interpreter stores no part of a tile: see `kernel_support.interpret`
        m, n = -(-m // 8) * 8, -(-n // 128) * 128
    dtype = draw(st.sampled_from(["bfloat16", "float32", "int8", "float8_e5m2"]))
    options = {
        "epilogue": draw(st.sampled_from(["none", "relu", "gelu", "silu"])),
        "transpose_rhs": draw(st.booleans()),
        "out_dtype": "float32" if draw(st.booleans()) else None,
    }
    if dtype == "int8" and options["epilogue"] in ("gelu", "silu"):
        options["out_dtype"] = "float32"
    blocks = config(
        min(bm, -(-m // 8) * 8),
        draw(st.sampled_from([128, k])),
        draw(st.sampled_from([128, n])),
        grid_order=draw(st.sampled_from(["mn", "nm"])),
        buffers=buffers,
    )
    return problem(m, k, n, dtype=dtype, **options), blocks, draw(st.integers(0, 9))


def agrees(case: tuple[Problem, dict[str, Any], int]) -> None:
    p, blocks, seed = case
    error = run(KERNEL, p, blocks, seed=seed).error()
    assert error <= tolerance(p), f"{p.json} {blocks}: {error:.2e} from the reference"


@settings(max_examples=25, derandomize=True, **DRAWN)
@given(cases())
def test_drawn_problems_agree_with_the_float64_reference(case):
    agrees(case)


@pytest.mark.nightly
@settings(max_examples=200, **DRAWN)
@given(cases())
def test_two_hundred_drawn_problems_agree_with_the_float64_reference(case):
    agrees(case)


THREE_BLOCKS = (40, 300, 290)  # three blocks an axis, the last of each cut by the edge


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_an_edge_at_a_lane_tile_needs_no_mask_and_agrees(transpose_rhs):
    p = problem(16, 640, 130, dtype="float32", transpose_rhs=transpose_rhs)
    agrees((p, config(16, 256, 130), 2))


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_a_tall_block_multiplied_in_parts_agrees(transpose_rhs, monkeypatch):
    monkeypatch.setattr(module, "TALL_ROWS", 16)
    monkeypatch.setattr(module, "PART_ROWS", 16)
    p = problem(90, 300, 200, transpose_rhs=transpose_rhs)
    assert run(KERNEL, p, config(48, 128, 128)).error() <= tolerance(p)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("order", ["mn", "nm"])
def test_three_buffers_give_the_same_bits_as_two(dtype, order):
    p = problem(40, 300, 384, dtype=dtype)
    two, three = (
        run(KERNEL, p, config(16, 128, 128, buffers=n, grid_order=order), seed=1) for n in (2, 3)
    )
    np.testing.assert_array_equal(two.got[0], three.got[0])
    assert three.error() <= tolerance(p)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_three_uneven_blocks_an_axis_agree_with_the_reference(dtype):
    agrees((problem(*THREE_BLOCKS, dtype=dtype), config(16, 128, 128), 1))


@pytest.mark.parametrize(
    ("lhs", "rhs"), [("bfloat16", "int8"), ("int8", "bfloat16"), ("float8_e5m2", "int8")]
)
def test_mixed_operands_are_multiplied_in_the_dtype_that_holds_both(lhs, rhs):
    p = problem(16, 200, 130, dtype=lhs, rhs_dtype=rhs)
    fn, args = KERNEL.build(p, config(16, 128, 130))
    assert jax.eval_shape(fn, *args).dtype == jnp.bfloat16
    assert run(KERNEL, p, config(16, 128, 130)).error() <= BF16_TOLERANCE


def test_a_long_bf16_sum_passes_and_one_skipped_block_of_it_does_not(monkeypatch):
    # Field report D3: K = 8192 in bf16, one 128-wide block of K left out.
    p, blocks = problem(8, 8192, 128), config(8, 1024, 128)
    assert run(KERNEL, p, blocks).error() <= BF16_TOLERANCE
    plant(
        monkeypatch,
        module,
        "acc_ref[rows, :] += dot(x_ref[rows, :], y_ref[...])",
        "column = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1) + 1024 * step\n"
        "                acc_ref[...] += dot(jnp.where(column < 128, 0, x_ref[...]), y_ref[...])",
        "_kernel",
    )
    assert run(KERNEL, p, blocks).error() > BF16_TOLERANCE


FAULTS = {
    "K edge of x not masked": (
        "_kernel",
        "x = _zero_past(x_ref[rows, :used], axis=1, valid=edge)",
        "x = x_ref[rows, :used]",
    ),
    "K edge of y not masked": (
        "_kernel",
        "y = _zero_past(y_ref[:used, :], axis=0, valid=edge)",
        "y = y_ref[:used, :]",
    ),
    "K edge cut too short": ("_kernel", "used = round_up(edge, LANES)", "used = edge // 8 * 8"),
    "K mask offset by one": (
        "_zero_past",
        "jnp.where(index < valid, block, jnp",
        "jnp.where(index < valid - 1, block, jnp",
    ),
    "last K step left out": ("_kernel", "acc_ref[rows, :] += dot(x, y)", "pass"),
    "accumulator not zeroed": ("_kernel", "acc_ref[...] = jnp.zeros_like(acc_ref)", "pass"),
    "last block not stored": (
        "_kernel",
        """    @pl.when(step == last)
    def _() -> None:
        with jax.named_scope("finalize"):""",
        """    @pl.when((step == last) & (pl.program_id(1) < pl.num_programs(1) - 1))
    def _() -> None:
        with jax.named_scope("finalize"):""",
    ),
    "rows of x by the column block": (
        "matmul",
        '[spec((b.bm, b.bk), "mk", b.buffers)',
        '[spec((b.bm, b.bk), "nk", b.buffers)',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_the_numerics_check(fault, monkeypatch):
    name, right, wrong = FAULTS[fault]
    plant(monkeypatch, module, right, wrong, name)
    with pytest.raises(AssertionError, match="from the reference"):
        agrees((problem(*THREE_BLOCKS, dtype="float32"), config(16, 128, 128), 1))


def lowers(p: Problem, blocks: dict[str, Any]) -> bool:
    """Whether JAX's TPU lowering, which holds the rules for blocks, takes the call."""
    fn, args = KERNEL.build(p, blocks)
    try:
        jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",))
    except ValueError as error:
        if "last two dimensions of your block shape" not in str(error):
            raise
        return False
    return True


# Field report B1; the last ones are ours.
VERDICTS = [
    ((1024, 1024, 1024), (4, 128, 128), False),
    ((1024, 1024, 1024), (12, 128, 128), False),
    ((1024, 1024, 1024), (100, 128, 128), False),
    ((1024, 1024, 1024), (16, 64, 128), False),
    ((1024, 1024, 1024), (16, 192, 128), False),
    ((1024, 1024, 1024), (16, 128, 200), False),
    ((1024, 1024, 1024), (8, 128, 128), True),
    ((1024, 1024, 1024), (16, 256, 384), True),
    ((100, 100, 100), (100, 100, 100), True),
    ((1, 1024, 1024), (1, 128, 128), True),
    ((100, 100, 100), (104, 128, 128), True),
]


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize(("shape", "blocks", "legal"), VERDICTS)
def test_a_block_is_legal_exactly_where_the_tpu_lowering_takes_it(
    shape, blocks, legal, transpose_rhs, monkeypatch
):
    p, chip = problem(*shape, transpose_rhs=transpose_rhs), devices.get("v6e")
    assert (KERNEL.illegal(p, config(*blocks), chip) is None) is legal
    checks = [KERNEL.tunables(p, chip)[name].check for name in ("bm", "bk", "bn")]
    assert all(check(b) is None for check, b in zip(checks, blocks, strict=True)) is legal
    monkeypatch.setattr(BlockSizes, "check", lambda *args: None)
    assert lowers(p, config(*blocks)) is legal


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (config(256, 128, 128), "bm 256 is larger than axis m = 64"),
        (config(12, 128, 128), "bm 12 is neither a multiple of 8 nor axis m = 64"),
        (config(0, 128, 128), "bm 0 is below 1"),
        (config(8, 128, 128, buffers=4), "buffers 4 is not one of (1, 2, 3)"),
        (config(8, 128, 128, grid_order="kn"), "grid_order 'kn' is not one of ('mn', 'nm')"),
        (
            config(8, 128, 128, vmem_limit_bytes=192 * MIB),
            "vmem_limit_bytes 201326592 is above tpu7x's VMEM of 67108864",
        ),
    ],
)
def test_an_illegal_config_is_refused_with_both_numbers(blocks, words):
    p = problem(64, 1024, 1024, device="tpu7x")
    assert KERNEL.illegal(p, blocks, devices.get("tpu7x")) == words


def test_the_default_of_a_short_axis_is_all_of_it():
    default = KERNEL.default(problem(1, 4096, 100), devices.get("v6e"))
    assert (default["bm"], default["bk"], default["bn"]) == (1, 128, 100)


def test_one_block_of_m_or_n_leaves_one_grid_order():
    p = problem(512, 512, 1024)
    for blocks, order in (
        ((512, 256, 256), "mn"),
        ((256, 256, 1024), "mn"),
        ((256, 256, 256), "nm"),
    ):
        canonical = KERNEL.canonical(p, config(*blocks, grid_order="nm"))
        assert canonical["grid_order"] == order


@pytest.mark.parametrize(("device", "mib"), [("v4", 16), ("v5e", 128), ("v5p", 64), ("tpu7x", 64)])
def test_a_vmem_limit_goes_up_to_the_core_and_no_further(device, mib):
    # Field report V5: limits of 100 and 128 MiB copied between chips.
    limit = KERNEL.tunables(problem(64, 64, 64, device=device), devices.get(device))[
        "vmem_limit_bytes"
    ]
    assert limit.check(mib * MIB) is None
    allowed = f"null, or a multiple of 1 MiB up to {mib * MIB} ({device}'s VMEM)"
    assert [limit.check(bad) for bad in ((mib + 1) * MIB, 0, -MIB, 12345, True, "all")] == [
        allowed
    ] * 6
    assert all(limit.check(value) is None for value in limit.values)


@pytest.mark.parametrize(
    "shape", [(4096, 7168, 18432), (64, 1000, 130), (1, 1, 1), (300, 7168, 40)]
)
def test_every_searched_value_and_the_default_are_legal(shape):
    for name in ("v4", "tpu7x"):
        p, chip = problem(*shape, device=name), devices.get(name)
        tunables = KERNEL.tunables(p, chip)
        for tunable in tunables.values():
            assert tunable.values
            assert [tunable.check(value) for value in tunable.values] == [None] * len(
                tunable.values
            )
        assert KERNEL.default is not None
        assert KERNEL.illegal(p, KERNEL.default(p, chip), chip) is None
        assert set(KERNEL.default(p, chip)) == set(tunables)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "v4", "dtype": "int8"}, "'int8' is not multiplied by v4"),
        ({"device": "tpu7x", "rhs_dtype": "int8"}, "rhs_dtype: 'int8' is not multiplied by tpu7x"),
        ({"epilogue": "tanh"}, "none, relu, gelu, silu"),
        ({"dtype": "int8", "epilogue": "gelu"}, "epilogue 'gelu' has no whole-number result"),
        ({"dtype": "float16"}, "matmul on v6e takes bfloat16, float32, int8"),
    ],
)
def test_a_problem_the_chip_or_the_kernel_lacks_is_refused(arguments, words):
    with pytest.raises(InputError) as caught:
        problem(64, 64, 64, **arguments)
    assert words in str(caught.value)


def test_the_wrapper_refuses_operands_that_do_not_belong_together():
    x, blocks = jnp.zeros((8, 128)), BlockSizes(bm=8, bk=128, bn=128)
    for other, transposed in (((64, 128), False), ((128, 64), True), ((128,), False)):
        with pytest.raises(ValueError, match=r"are not \[m, k\] and \["):
            matmul(x, jnp.zeros(other), block_sizes=blocks, transpose_rhs=transposed)


def test_flops_do_not_wrap_at_two_to_the_31():
    # Field report H1.
    assert KERNEL.flops(problem(65536, 65536, 65536)) == 562949953421312


def test_operand_dtypes_and_options_are_part_of_the_key():
    # Field report S4.
    keys = {
        problem(64, 64, 64).key,
        problem(64, 64, 64, rhs_dtype="float32").key,
        problem(64, 64, 64, dtype="float32").key,
        problem(64, 64, 64, epilogue="relu").key,
        problem(64, 64, 64, transpose_rhs=True).key,
    }
    assert len(keys) == 5
    assert problem(64, 64, 64, rhs_dtype=None, epilogue="none").key == problem(64, 64, 64).key


def test_int8_inputs_cover_the_range_and_gelu_matches_jax():
    p = problem(64, 64, 64, dtype="int8")
    assert KERNEL.inputs is not None
    x, _ = KERNEL.inputs(p, jax.random.key(0))
    assert int(x.min()) < -100
    assert int(x.max()) > 100
    z = np.linspace(-9, 9, 64, dtype=np.float32)[None]
    eye = np.eye(64, dtype=np.float32)
    assert KERNEL.reference is not None
    gelu = KERNEL.reference(problem(1, 64, 64, dtype="float32", epilogue="gelu"), z, eye)
    np.testing.assert_allclose(gelu, jax.nn.gelu(z), atol=2e-6)


@pytest.mark.compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])  # the others: nightly
def test_the_default_and_an_uneven_block_compile(chip):
    p = problem(520, 1100, 640, device=chip, epilogue="silu")
    assert KERNEL.default is not None
    default = KERNEL.default(p, devices.get(chip))
    assert_compiles_or_lacks_vmem(
        KERNEL, p, [default, config(256, 512, 256, buffers=1), config(256, 512, 256, buffers=3)]
    )


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_and_ten_spread_candidates_compile_or_lack_vmem(chip, dtype):
    p = problem(4096, 7168, 18432, device=chip, dtype=dtype)
    assert_compiles_or_lacks_vmem(KERNEL, p, spread(KERNEL, p, 10))


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS)
def test_every_dtype_the_chip_multiplies_compiles(chip):
    # Field report D1: a dtype the chip lacks is refused before the compiler sees it.
    for dtype in KERNEL.dtypes:
        if dtype in devices.get(chip).matmul_dtypes:
            p = problem(500, 1100, 640, device=chip, dtype=dtype)
            assert_compiles_or_lacks_vmem(KERNEL, p, [config(256, 512, 256)])
