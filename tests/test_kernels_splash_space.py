"""splash: execution tables, block space, keys, compiles, and what it refuses."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import pytest
from kernel_support import (
    CHIPS,
    assert_compiles_or_lacks_vmem,
    spread,
)
from splash_problems import DOCUMENTS, KERNEL, LOCAL, SMALL, problem

from autotune import device as devices
from autotune.errors import InputError
from autotune.kernels import masks, splash, splash_codes
from autotune.kernels.mask_table import EMPTY, FULL, table_of
from autotune.pallas_call import trace
from autotune.problem import Problem


def scopes(p: Problem, config: dict[str, Any]) -> dict[str, int | None]:
    fn, args = KERNEL.build(p, config)
    (call,) = trace(fn, args, devices.get(p.device)).calls
    return call.scopes


@pytest.mark.parametrize("partial_mask", ["computed", "stored"])
def test_step_counts_follow_from_the_tables(partial_mask):
    p = problem({}, "bfloat16", q_len=4096, kv_len=4096, q_heads=4, kv_heads=2)
    counts = scopes(p, {"block_q": 1024, "block_kv": 1024, "partial_mask": partial_mask})
    assert counts["step"] == 6 * 4
    assert counts["masked_step"] == 4 * 4
    assert counts["init"] == counts["finalize"] == 4 * 4
    assert counts[""] == 10 * 4
    blocks = {"block_q": 1024, "block_kv": 2048, "block_kv_compute": 1024}
    two = scopes(p, {**blocks, "partial_mask": partial_mask})
    assert (two["step"], two["masked_step"], two["masked_step_1"]) == (2 * 4, 2 * 4, 2 * 4)


def test_a_mask_of_many_patterns_runs_one_masked_step():
    documents = {"documents": {"lengths": [1000, 2000, 1096]}}
    p = problem({"mask": documents}, "bfloat16", q_len=4096, kv_len=4096)
    counts = scopes(p, {"block_q": 1024, "block_kv": 1024})
    assert (counts["step"], counts["masked_step"], counts[""]) == (2 * 2, 10 * 2, 12 * 2)


@pytest.mark.parametrize("lengths", [[700, 900, 300, 1200, 100, 896], [1000, 2000, 1096]])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_like_tiles_share_a_step_that_leaves_out_nothing_visible(lengths, causal):
    parts = [{"documents": {"lengths": lengths}}, *([{"causal": {}}] if causal else [])]
    mask = masks.of({"all": parts})
    table = table_of(mask, 4096, 4096, 1024, 1024)
    codes = splash_codes.assign(table, 256, 512, all_cut=False)
    assert len(codes.tiles) <= splash_codes.MAX_MASKED + 1
    seen = masks.rows_of(mask, 4096, 4096).dense()
    left_out = 0
    for step, code in enumerate(codes.steps.tolist()):
        row, col = table.rows[step] * 1024, table.cols[step] * 1024
        kinds = codes.tiles[code]
        block = seen[row : row + 1024, col : col + 1024]
        tiles = block.reshape(len(kinds), -1, kinds.shape[1], 1024 // kinds.shape[1])
        assert not tiles.any(axis=(1, 3))[kinds == EMPTY].any(), "a tile left out is empty"
        assert tiles.all(axis=(1, 3))[kinds == FULL].all(), "a tile left unmasked is full"
        left_out += int((kinds == EMPTY).sum())
    assert left_out >= 10, "empty tiles are left out"


def test_causal_tiles_past_the_diagonal_are_not_multiplied():
    p = problem({}, "bfloat16", q_len=2048, kv_len=2048, q_heads=1)
    fn, args = KERNEL.build(
        p, {"block_q": 1024, "block_kv": 1024, "block_q_compute": 256, "block_kv_compute": 256}
    )
    (call,) = trace(fn, args, devices.get("v6e")).calls
    per_tile = 2 * 256 * 256 * (64 + 128)  # V is filled up with the columns that sum the row
    # Of the four tiles on the diagonal the upper right quarter is left out as well.
    assert call.scope_flops["masked_step"] == 2 * 9 * per_tile
    assert call.scope_flops["step"] == 16 * per_tile


@pytest.mark.parametrize(
    "options",
    [
        {"mask": {"causal": {}}},
        {"mask": {"all": [{"causal": {}}, {"local": {"left": 4096}}]}},
        {"mask": {"all": [{"causal": {}}, {"documents": {"lengths": [1820] * 72 + [32]}}]}},
        {"mask": {"causal": {}}, "segment_ids": True},
    ],
    ids=["causal", "local", "documents", "segments"],
)
@pytest.mark.parametrize("partial_mask", ["computed", "stored"])
def test_131072_long_problems_build_and_trace_in_seconds(options, partial_mask):
    start = time.process_time()
    p = problem(options, "bfloat16", q_len=131072, kv_len=131072, q_heads=8)
    config = {
        "block_q": 1024, "block_kv": 1024, "block_q_compute": 512, "block_kv_compute": 512,
        "partial_mask": partial_mask,
    }  # fmt: skip
    assert KERNEL.illegal(p, config, devices.get("v6e")) is None
    counts = scopes(p, config)
    assert counts["init"] == 128 * 8
    assert time.process_time() - start < 10


def test_a_table_larger_than_smem_is_refused_with_both_numbers():
    p = problem({}, "bfloat16", q_len=131072, kv_len=131072)
    reason = KERNEL.illegal(p, SMALL, devices.get("v6e"))
    assert reason == (
        "block_q 128 x block_kv 128 is too small: its table of 524800 steps takes 6297600 bytes "
        "of SMEM, v6e has 1048576"
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"block_q": 100}, "block_q 100 is not a positive multiple of 128"),
        ({"block_kv": 384, "block_kv_compute": 256}, "256 does not divide block_kv 384"),
        ({"block_kv_compute": 64}, "block_kv_compute 64 is not a positive multiple of 128"),
        ({"partial_mask": "guessed"}, "partial_mask 'guessed' is not one of computed, stored"),
        ({"vmem_limit_bytes": 2**30}, "vmem_limit_bytes 1073741824 is above v6e's VMEM"),
    ],
)  # fmt: skip
def test_an_illegal_block_is_refused_with_both_numbers(config, says):
    reason = KERNEL.illegal(
        problem(q_len=2048, kv_len=2048), {**SMALL, **config}, devices.get("v6e")
    )
    assert says in str(reason)


def test_equal_runs_are_one_candidate():
    short = problem(q_len=128, kv_len=128)
    runs = [KERNEL.canonical(short, {"block_q": b, "block_kv": b}) for b in (128, 256, 512)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0]["block_kv_compute"] == 128
    full = problem({"mask": {"full": {}}})
    stored = KERNEL.canonical(full, {**SMALL, "partial_mask": "stored"})
    assert stored["partial_mask"] == "computed", "no block is cut, so nothing is stored"
    odd = KERNEL.canonical(short, {"block_q": 100, "block_kv": 128})
    assert odd == {"block_q": 100, "block_kv": 128}, "an illegal config stays as it is"


def test_the_default_is_what_jax_gives_who_passes_no_block_sizes():
    from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes

    theirs, ours = BlockSizes.get_default(), KERNEL.default(problem(), devices.get("v6e"))
    for name in ("block_q", "block_kv", "block_kv_compute"):
        assert ours[name] == getattr(theirs, name)
    assert KERNEL.illegal(problem(), ours, devices.get("v6e")) is None


def test_every_value_of_the_space_passes_its_own_check():
    for device in devices.DEVICES.values():
        for name, tunable in KERNEL.tunables(problem(q_len=4096, kv_len=4096), device).items():
            assert tunable.values
            assert all(tunable.check(value) is None for value in tunable.values), name
            assert tunable.check("nonsense"), f"{name} takes anything"


def test_flops_count_visible_pairs_only():
    one_head = {"q_heads": 1, "head_dim_qk": 128, "head_dim_v": 128}
    aligned = problem(q_len=128, kv_len=256, **one_head)
    assert KERNEL.flops(aligned) == 2 * 256 * (128 * 128 + 8256)
    huge = problem({"mask": {"full": {}}}, batch=4, q_len=2**20, kv_len=2**20, **one_head)
    assert KERNEL.flops(huge) == 2 * 256 * 2**42
    heads = problem({"mask": LOCAL}, batch=3, q_heads=4, kv_heads=2)
    assert KERNEL.flops(heads) == 12 * KERNEL.flops(problem({"mask": LOCAL}, q_heads=1))


def test_masks_that_mean_the_same_are_one_problem_and_others_are_not():
    spelled = [
        {"all": [{"causal": {}}, {"local": {"left": 60}}]},
        {"all": [{"local": {"left": 60, "right": None}}, {"full": {}}, {"causal": {"offset": 0}}]},
    ]
    assert len({problem({"mask": mask}).key for mask in spelled}) == 1
    assert problem({"mask": {"causal": {}}}).key == problem().key
    different = [{"causal": {"offset": 1}}, LOCAL, DOCUMENTS, {"full": {}}]
    assert len({problem({"mask": mask}).key for mask in different}) == len(different)
    assert problem({"segment_ids": True}).key != problem().key


def test_a_soft_cap_of_zero_is_off():
    assert problem({"logit_soft_cap": 0}).key == problem().key


@pytest.mark.parametrize(
    ("options", "shape", "says"),
    [
        ({"mask": {"documents": {"lengths": [100, 100]}}}, {}, "sum to 200, not kv_len 256"),
        ({"mask": {"causal": {"offset": -256}}}, {}, "none of 256 queries sees any of 256 keys"),
        ({"mask": {"casual": {}}}, {}, "did you mean 'causal'"),
        ({"mask": {"local": {"left": -1}}}, {}, "local left is a whole number from 0"),
        ({"segment_ids": 1}, {}, "true or false"),
        ({"logit_soft_cap": -1.0}, {}, "a positive number"),
        ({"logit_soft_cap": 100.0, "max_logit_const": 0.0}, {}, "not safe with logit_soft_cap"),
        ({}, {"q_heads": 6, "kv_heads": 4}, "kv_heads 4 do not divide q_heads 6"),
        ({}, {"q_len": 2**25, "kv_len": 2**25}, "masks go up to 16777216"),
    ],
)  # fmt: skip
def test_an_impossible_problem_is_refused_in_one_line(options, shape, says):
    with pytest.raises(InputError) as caught:
        problem(options, **shape)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.path


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((None, np.zeros((1, 256), np.int32)), "q_segment_ids has shape None"),
        ((np.zeros((1, 256), np.int32), np.zeros((256,), np.int32)), r"\(256,\); \(1, 256\)"),
    ],
)
def test_segment_ids_of_the_wrong_shape_are_refused_in_the_wrapper(ids, says):
    q, k, v = KERNEL.inputs(problem(), jax.random.key(0))
    with pytest.raises(ValueError, match=says):
        splash.splash(
            q, k, v, *ids, mask=splash.space.mask_of(problem()),
            block_sizes=splash.BlockSizes(**SMALL),
        )  # fmt: skip


def compiled(chip: str, dtype: str = "bfloat16", **options: Any) -> Problem:
    return problem(
        options, dtype, device=chip, q_heads=4, kv_heads=2, q_len=2048, kv_len=2048,
        head_dim_qk=128, head_dim_v=128,
    )  # fmt: skip


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("chip", "dtype", "options"),
    [
        ("tpu7x", "bfloat16", {"mask": {"all": [{"causal": {}}, {"local": {"left": 300}}]}}),
        ("v5e", "float32", {"residuals": True, "logit_soft_cap": 30.0}),
        ("v4", "bfloat16", {"segment_ids": True, "residuals": True}),
    ],
)
@pytest.mark.parametrize("partial_mask", ["computed", "stored"])
def test_small_blocks_compile(chip, dtype, options, partial_mask):
    config = {"block_q": 256, "block_kv": 256, "partial_mask": partial_mask}
    assert_compiles_or_lacks_vmem(KERNEL, compiled(chip, dtype, **options), [config])


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS)
def test_the_default_and_ten_spread_candidates_compile_or_lack_vmem(chip):
    p = compiled(chip)
    assert_compiles_or_lacks_vmem(KERNEL, p, spread(KERNEL, p, 10))
