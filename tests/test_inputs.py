"""What outputs are checked on shows each option that bends a result: leaving it out is seen."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from autotune.kernels import base
from autotune.kernels.base import make_problem
from autotune.measure.check import error_of
from autotune.problem import Problem

SEEN = 0.0625
"""Twice what bf16 outputs are allowed to be off by."""
ATTENTION = {
    "batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 128, "kv_len": 384, "head_dim_qk": 128,
    "head_dim_v": 128,
}  # fmt: skip
PAGED = {"q_heads": 4, "kv_heads": 2, "kv_len": 512, "head_dim": 128, "page_size": 16}


def problem(kernel: str, shape: dict[str, int], **options: Any) -> Problem:
    return make_problem(
        base.load(kernel), device="v6e", shape=shape, options=options, dtype="bfloat16"
    )


def difference(right: Problem, wrong: Problem) -> float:
    """How far the outputs of `wrong` are from those of `right`, on what `right` is checked on."""
    kernel = base.load(right.kernel)
    assert kernel.inputs is not None
    assert kernel.reference is not None
    arrays = kernel.inputs(right, jax.random.key(0))
    outputs = (jax.tree.leaves(kernel.reference(p, *arrays)) for p in (wrong, right))
    return max(
        error_of(np.asarray(one, np.float64), np.asarray(other, np.float64))
        for one, other in zip(*outputs, strict=True)
    )


@pytest.mark.parametrize("dtypes", [{}, {"rhs_dtype": "int8"}], ids=["bf16", "by int8"])
@pytest.mark.parametrize("k", [128, 8192])
@pytest.mark.parametrize(
    ("right", "wrong"), list(itertools.permutations(("none", "relu", "gelu", "silu"), 2))
)
def test_one_epilogue_in_place_of_another_is_seen(
    right: str, wrong: str, k: int, dtypes: dict[str, str]
) -> None:
    if right == "none" and k > 128:
        pytest.skip("without an epilogue sums keep their size, and half of them are below 0")
    shape = {"m": 64, "k": k, "n": 256}
    one, other = (problem("matmul", shape, epilogue=e, **dtypes) for e in (right, wrong))
    assert difference(one, other) > SEEN


@pytest.mark.parametrize("cap", [5.0, 50.0])
@pytest.mark.parametrize(
    ("kernel", "shape", "option", "more"),
    [
        ("flash_fwd", ATTENTION, "logit_soft_cap", {"causal": True}),
        ("flash_fwd", ATTENTION, "logit_soft_cap", {"scale": 0.5}),
        ("flash_dq", ATTENTION, "logit_soft_cap", {"causal": True}),
        ("flash_dkv", ATTENTION, "logit_soft_cap", {"causal": True}),
        ("splash", ATTENTION, "logit_soft_cap", {"segment_ids": True}),
        ("jax.splash", ATTENTION, "attn_logits_soft_cap", {}),
        ("jax.paged_attention", PAGED, "attn_logits_soft_cap", {}),
        ("jax.ragged_paged_attention", PAGED, "soft_cap", {"sm_scale": 0.1}),
    ],
)
def test_a_soft_cap_that_was_left_out_is_seen(
    kernel: str, shape: dict[str, int], option: str, more: dict[str, Any], cap: float
) -> None:
    capped, plain = (problem(kernel, shape, **more, **{option: c}) for c in (cap, None))
    assert difference(capped, plain) > SEEN


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_a_soft_cap_that_was_left_out_of_gradients_is_seen(cap: float) -> None:
    capped, plain = (
        problem("jax.splash", ATTENTION, grad=True, attn_logits_soft_cap=c) for c in (cap, None)
    )
    assert difference(capped, plain) > SEEN
