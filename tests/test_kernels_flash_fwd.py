"""Flash attention forward: numerics against float64, legality, problems it refuses."""

from __future__ import annotations

import math
from typing import Any

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
    interpret,
    plant,
    run,
    spread,
)

from autotune import device as devices
from autotune.errors import InputError
from autotune.kernels import anchored_softmax, attention, flash_fwd_kernel
from autotune.kernels import flash_fwd as module
from autotune.kernels.attention import MASK_VALUE, last_kv_block, shift_range, visible_pairs
from autotune.kernels.attention_inputs import gain_of
from autotune.kernels.base import make_problem
from autotune.kernels.flash_fwd import KERNEL, BlockSizes, flash_fwd
from autotune.problem import Problem

TILES = ("block_q", "block_kv", "block_q_compute", "block_kv_compute")
Case = tuple[Problem, dict[str, Any], int, float]


def problem(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    *,
    device: str = "v6e",
    dtype: str = "bfloat16",
    batch: int = 1,
    **options: Any,
) -> Problem:
    shape = dict(zip(attention.AXES, (batch, *heads, *lengths, *dims), strict=True))
    return make_problem(KERNEL, device=device, shape=shape, options=options, dtype=dtype)


def config(*tiles: int) -> dict[str, Any]:
    return dict(zip(TILES, tiles, strict=True))


def tolerance(p: Problem, gain: float) -> float:
    """f32 logits of size s carry an error of up to s · 2^-24, and so do their exponentials."""
    if p.dtype == "bfloat16":
        return BF16_TOLERANCE
    return F32_TOLERANCE * max(1.0, gain * gain_of(p) / 2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    causal = draw(st.booleans())
    cap = draw(st.sampled_from([None, None, 5.0, 60.0]))
    p = problem(
        draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)])),
        (draw(st.integers(1, 300)), draw(st.integers(1, 300))),
        draw(st.sampled_from([(64, 64), (80, 128), (96, 80), (192, 128), (128, 256)])),
        # On v5e an MXU is 128 wide, and V of 128 and 256 leaves no column for the sums.
        device=draw(st.sampled_from(["v6e", "v5e"])),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        batch=draw(st.sampled_from([1, 1, 1, 1, 2])),
        causal=causal,
        logit_soft_cap=cap,
        max_logit_const=draw(st.sampled_from([None, None, 4.0])) if cap != 60.0 else None,
        use_exp2=draw(st.booleans()),
        residuals=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.2])),
    )
    tiles = draw(
        st.sampled_from(
            [(128, 128, 128, 128), (256, 128, 128, 128), (128, 256, 128, 128), (256, 256, 256, 256)]
        )
    )
    # Under a max-logit constant logits beyond its range are the caller's mistake.
    gains = [1.0] if p.options["max_logit_const"] is not None else [1.0, 1.0, 40.0]
    return p, config(*tiles), draw(st.integers(0, 9)), draw(st.sampled_from(gains))


def agrees(case: Case) -> None:
    p, tiles, seed, gain = case
    error = run(KERNEL, p, tiles, seed=seed, gain=gain).error()
    limit = tolerance(p, gain)
    assert error <= limit, f"{p.json} {tiles} gain {gain}: {error:.2e} from the reference"


@settings(max_examples=25, derandomize=True, **DRAWN)
@given(cases())
def test_drawn_problems_agree_with_the_float64_reference(case):
    agrees(case)


@pytest.mark.nightly
@settings(max_examples=200, **DRAWN)
@given(cases())
def test_two_hundred_drawn_problems_agree_with_the_float64_reference(case):
    agrees(case)


# Three blocks an axis, cut by the diagonal and by both edges, two groups of two heads; the gain
# makes logits of up to 150 nats, far outside the anchors' range.
HARD = problem((4, 2), (300, 330), (64, 64), dtype="float32", causal=True, residuals=True)
HARD_TILES = config(128, 128, 128, 128)


@pytest.mark.parametrize("gain", [1.0, 40.0])
@pytest.mark.parametrize("device", ["v6e", "v5e"])
def test_three_uneven_causal_blocks_an_axis_agree_with_the_reference(device, gain):
    p = problem((2, 1), (300, 330), (64, 128), device=device, dtype="float32", causal=True)
    agrees((p, HARD_TILES, 1, gain))


@pytest.mark.parametrize("lengths", [(512, 512), (520, 600)])
@pytest.mark.parametrize("gain", [1.0, 40.0])
def test_tiles_that_the_diagonal_halves_agree_with_the_reference(lengths, gain):
    p = problem((1, 1), lengths, (64, 64), dtype="float32", causal=True, residuals=True)
    agrees((p, config(256, 256, 256, 256), 1, gain))


def test_rows_that_see_no_key_give_zeros_and_a_defined_lse():
    p = problem((1, 1), (300, 140), (64, 64), dtype="float32", causal=True, residuals=True)
    result = run(KERNEL, p, config(128, 128, 128, 128))
    assert result.error() <= F32_TOLERANCE
    out, lse, top = result.got
    assert np.all(out[0, 0, :160] == 0.0)
    assert np.all(lse[0, 0, :160] == np.float32(MASK_VALUE))
    assert np.all(top[0, 0, :160] == np.float32(MASK_VALUE))
    assert np.all(np.isfinite(lse[0, 0, 160:]))


def test_very_negative_logits_do_not_underflow():
    # Every logit of the first block is near -250 nats: under the starting anchor 0 their
    # exponentials vanish, so the step has to be done again with the maximum as the anchor.
    p = problem((1, 1), (128, 384), (64, 64), dtype="float32", scale=1.0)
    fn, arguments = KERNEL.build(p, config(128, 128, 128, 128))
    q, k, v = (np.full(a.shape, 0.0, np.float32) for a in arguments)
    q[..., 0], k[..., 0] = 16.0, -16.0 + np.linspace(0, 0.5, 384)[None, None]
    v += np.random.default_rng(0).standard_normal(v.shape).astype(np.float32)
    assert KERNEL.reference is not None
    got = np.asarray(interpret(fn, q, k, v))
    want = KERNEL.reference(p, q, k, v)
    assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()


FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "mask offset by one": (
        flash_fwd_kernel,
        "CutByDiagonal",
        "column - row <= rows.start",
        "column - row < rows.start",
    ),
    "V past the end not masked": (anchored_softmax, "_values", "if valid is not None", "if False"),
    "missing rescale": (
        anchored_softmax,
        "rescale",
        "acc * wide(alpha, acc.shape[1]) + _weighted",
        "acc + _weighted",
    ),
    "overflow not noticed": (
        anchored_softmax,
        "_out_of_range",
        "jnp.where(good if exempt is None else good | exempt, 0.0, 1.0)",
        "jnp.zeros_like(total)",
    ),
    "wrong group map": (module, "_call", "at.quotient(h, shape.group)", "h % shape.kv_heads"),
    "last visible block not copied": (
        module,
        "_call",
        "j = jnp.minimum(j, seen)",
        "j = jnp.minimum(j, jnp.maximum(seen - 1, 0))",
    ),
    "last block not stored": (
        flash_fwd_kernel,
        "kernel",
        "@pl.when(kv_block == plan.kv_blocks - 1)",
        "@pl.when((kv_block == plan.kv_blocks - 1) & (q_block < plan.q_blocks - 1))",
    ),
    "sums not normalised": (
        anchored_softmax,
        "finalize",
        "refs.acc[:, :dim] * inverse",
        "refs.acc[:, :dim]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_the_numerics_check(fault, monkeypatch):
    where, name, right, wrong = FAULTS[fault]
    plant(monkeypatch, where, right, wrong, name)
    with pytest.raises(AssertionError, match="from the reference"):
        agrees((HARD, HARD_TILES, 1, 40.0))


def test_the_problem_the_faults_are_planted_in_agrees_without_them():
    agrees((HARD, HARD_TILES, 1, 40.0))


@pytest.mark.parametrize("lengths", [(1, 1), (5, 9), (9, 5), (7, 7), (1, 8), (8, 1)])
def test_visible_pairs_are_those_of_the_mask(lengths):
    q_len, kv_len = lengths
    seen = sum(j <= i + kv_len - q_len for i in range(q_len) for j in range(kv_len))
    assert visible_pairs(q_len, kv_len, causal=True) == seen
    assert visible_pairs(q_len, kv_len, causal=False) == q_len * kv_len


def test_flops_count_visible_pairs_only():
    # Field report A1: top-left alignment would have 8256 of the 32768 pairs.
    assert visible_pairs(128, 256, causal=True) == 8256 + 128 * 128
    p = problem((8, 2), (128, 256), (192, 128), causal=True, batch=2)
    assert KERNEL.flops(p) == 2 * 8 * (8256 + 128 * 128) * 2 * (192 + 128)


@pytest.mark.parametrize("offset", [-700, -1, 0, 3, 500])
def test_the_last_visible_block_is_that_of_the_mask(offset):
    for block in range(4):
        last_key = (block + 1) * 256 - 1 + offset
        want = max(0, last_key) // 128
        assert last_kv_block(block, 256, 128, offset) == want
        assert int(last_kv_block(jnp.int32(block), 256, 128, offset)) == want


def test_blocks_longer_than_the_sequence_are_one_candidate():
    # Field report B7.
    p = problem((1, 1), (128, 128), (64, 64))
    asked = [config(b, b, b, b) for b in (128, 256, 512)]
    asked += [{"block_q": 512, "block_kv": 2048}]
    ran = [KERNEL.canonical(p, c) for c in asked]
    assert all(c == ran[0] for c in ran)
    assert ran[0]["block_q"] == ran[0]["block_kv_compute"] == 128
    for tunable in KERNEL.tunables(p, devices.get("v6e")).values():
        assert len(tunable.values) == 1


@pytest.mark.parametrize(("cap", "keys"), [(None, (512, 1024)), (30.0, (256, 512, 1024))])
def test_narrow_key_tiles_are_searched_under_a_soft_cap(cap, keys):
    p = problem((1, 1), (4096, 4096), (128, 128), logit_soft_cap=cap)
    assert KERNEL.tunables(p, devices.get("v6e"))["block_kv_compute"].values == keys


@pytest.mark.parametrize(
    ("length", "tile"), [(128, 128), (300, 384), (640, 128), (700, 384), (1000, 512), (5000, 512)]
)
def test_a_tile_that_does_not_divide_its_clamped_block_becomes_the_next_smaller(length, tile):
    p = problem((1, 1), (length, length), (64, 64))
    ran = KERNEL.canonical(p, config(2048, 2048, 512, 512))
    assert ran["block_q_compute"] == ran["block_kv_compute"] == tile


def test_the_vmem_limit_is_raised_where_the_largest_tile_needs_it():
    for device, dims, dtype, want in (
        ("v6e", (128, 128), "bfloat16", None),
        ("v5e", (256, 256), "bfloat16", 120 * 2**20),
        ("v4", (256, 256), "float32", None),
    ):
        p = problem((1, 1), (4096, 4096), dims, device=device, dtype=dtype)
        assert KERNEL.tunables(p, devices.get(device))["vmem_limit_bytes"].values == (want,)


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        ((100, 128, 128, 128), "block_q 100 is not a positive multiple of 128"),
        ((128, 384, 128, 256), "block_kv_compute 256 does not divide block_kv 384"),
        ((128, 384, 128, 64), "block_kv_compute 64 is not a positive multiple of 128"),
        ((512, 128, 384, 128), "block_q_compute 384 does not divide block_q 512"),
        ((128, 0, 128, 128), "block_kv 0 is not a positive multiple of 128"),
    ],
)
def test_an_illegal_block_is_refused_with_both_numbers(tiles, words):
    p, chip = problem((1, 1), (512, 512), (64, 64)), devices.get("v6e")
    assert KERNEL.illegal(p, config(*tiles), chip) == words
    with pytest.raises(ValueError, match=words):
        BlockSizes(**config(*tiles))


@pytest.mark.parametrize("lengths", [(4096, 4096), (1, 5000), (300, 700), (131072, 131072)])
def test_every_searched_value_and_the_default_are_legal(lengths):
    p, chip = problem((8, 2), lengths, (128, 128)), devices.get("tpu7x")
    tunables = KERNEL.tunables(p, chip)
    for tunable in tunables.values():
        assert tunable.values
        assert [tunable.check(value) for value in tunable.values] == [None] * len(tunable.values)
    for choice in spread(KERNEL, p, 1000):
        assert KERNEL.illegal(p, choice, chip) is None
        assert set(KERNEL.canonical(p, choice)) == set(tunables)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": (6, 4)}, "kv_heads 4 do not divide q_heads 6"),
        ({"logit_soft_cap": -1}, "logit_soft_cap"),
        ({"causal": 1}, "true or false"),
        (
            {"logit_soft_cap": 30.0, "max_logit_const": 90.0},
            "max_logit_const 90.0 is not safe with logit_soft_cap 30.0 and kv_len 512; "
            "allowed: from -37.9 to 14.4",
        ),
        ({"dtype": "int8"}, "takes bfloat16, float32"),
    ],
)
def test_a_problem_that_cannot_be_is_refused(arguments, words):
    heads = arguments.pop("heads", (4, 2))
    with pytest.raises(InputError) as caught:
        problem(heads, (512, 512), (64, 64), **arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (32, 1), (4, 4)])
def test_head_counts_that_group_are_taken(heads):
    assert problem(heads, (128, 128), (64, 64)).shape["kv_heads"] == heads[1]


def test_a_soft_cap_of_zero_is_off_and_has_the_key_of_null():
    # Field report A4: passed on, a cap of 0 silently gives uniform attention.
    zero = problem((1, 1), (128, 128), (64, 64), logit_soft_cap=0)
    assert zero.options["logit_soft_cap"] is None
    assert zero.key == problem((1, 1), (128, 128), (64, 64)).key


def test_the_shift_range_is_where_exponentials_stay_in_f32():
    least, most = shift_range(4096)
    assert math.exp(least) >= 2.0**-64.001
    assert math.exp(most) * 4096 * 2**20 < 2.0**127.1
    q = np.zeros((1, 1, 8, 64), np.float32)
    with pytest.raises(ValueError, match="is not safe"):
        flash_fwd(
            *(q, q, q),
            block_sizes=BlockSizes(block_q=128, block_kv=128),
            logit_soft_cap=50.0,
            max_logit_const=50.0,
        )


def test_the_wrapper_refuses_arrays_that_do_not_belong_together():
    blocks = BlockSizes(block_q=128, block_kv=128)
    q = np.zeros((1, 4, 8, 64), np.float32)
    for k, v, words in (
        (np.zeros((1, 3, 8, 64)), np.zeros((1, 3, 8, 64)), "kv_heads 3 do not divide q_heads 4"),
        (np.zeros((1, 4, 8, 32)), np.zeros((1, 4, 8, 64)), "differ in batch or head_dim"),
        (np.zeros((1, 4, 8, 64)), np.zeros((1, 4, 9, 64)), "differ in batch, heads or length"),
        (np.zeros((4, 8, 64)), np.zeros((1, 4, 8, 64)), "k has shape"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_fwd(q, k, v, block_sizes=blocks)


@pytest.mark.compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])  # the others: nightly
def test_the_default_and_a_causal_block_compile(chip):
    p = problem((2, 1), (600, 700), (80, 128), device=chip, causal=True, residuals=True)
    assert KERNEL.default is not None
    default = KERNEL.default(p, devices.get(chip))
    assert_compiles_or_lacks_vmem(KERNEL, p, [default, config(256, 512, 256, 256)])


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS)
def test_the_default_and_ten_spread_candidates_compile_or_lack_vmem(chip):
    p = problem((8, 2), (4096, 4096), (128, 128), device=chip, causal=True)
    assert_compiles_or_lacks_vmem(KERNEL, p, spread(KERNEL, p, 10))


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (192, 128), (256, 256)])
def test_every_head_dim_compiles_or_lacks_vmem(chip, dims):
    # Field report B8: head dims are padded, never banned.
    p = problem((8, 2), (4096, 4096), dims, device=chip, residuals=True)
    assert_compiles_or_lacks_vmem(KERNEL, p, spread(KERNEL, p, 2))
