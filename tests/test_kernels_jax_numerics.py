"""JAX's own attention kernels against our references: the alignment and scaling that FLOPs rest on.

On the CPU: TPU interpret mode, and JAX's plain one for splash attention, since the former does not
run calls under vmap.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kernel_support
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from kernel_support import BF16_TOLERANCE, F32_TOLERANCE

from autotune.candidate import Config
from autotune.kernels import base, jax_pages
from autotune.kernels.jax_masks import jax_mask
from autotune.kernels.masks import Causal, Documents, Full, Local, of
from autotune.kernels.top_left import rows_of
from autotune.problem import Problem

SHAPE = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 256, "kv_len": 256, "head_dim_qk": 128,
         "head_dim_v": 128}  # fmt: skip
FORWARD = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
BACKWARD = {**FORWARD, "block_q_dkv": 128, "block_kv_dkv": 128, "block_kv_dkv_compute": 128}


def problem(name: str, options: dict[str, Any], shape: dict[str, int], dtype: str) -> Problem:
    kernel = base.load(name)
    return base.make_problem(kernel, device="v6e", shape=shape, options=options, dtype=dtype)


def error(p: Problem, config: Config, *, plain: bool = False) -> float:
    """Largest difference from the reference, as a share of its largest magnitude."""
    kernel = base.load(p.kernel)
    config = kernel.canonical(p, config)
    if not plain:
        return kernel_support.run(kernel, p, config).error()
    assert kernel.inputs is not None
    assert kernel.reference is not None
    inputs = kernel.inputs(p, jax.random.key(0))
    with kernel_support.plainly_interpreted():
        got = jax.block_until_ready(kernel.build(p, config)[0](*inputs))
    outputs = (jax.tree.leaves(got), jax.tree.leaves(kernel.reference(p, *inputs)))
    arrays = [tuple(np.asarray(x).astype(np.float64) for x in side) for side in outputs]
    return kernel_support.Run(got=arrays[0], want=arrays[1]).error()


@pytest.mark.parametrize(
    ("options", "config", "shape"),
    [
        ({"segment_ids": True, "save_residuals": True, "attn_logits_soft_cap": 30.0},
         {**FORWARD, "q_layout": "SEQ_MINOR"}, {"kv_heads": 1, "batch": 2}),
        ({"mask": {"documents": {"lengths": [100, 156]}}, "is_mqa": True}, FORWARD, {"q_heads": 4}),
        pytest.param({"mask": {"all": [{"causal": {}}, {"local": {"left": 60}}]}}, FORWARD,
                     {"kv_len": 384}, marks=pytest.mark.nightly),
        ({"grad": True}, {**BACKWARD, "use_fused_bwd_kernel": True}, {"kv_heads": 1}),
    ],
)  # fmt: skip
def test_splash_agrees_with_the_definition(options, config, shape):
    p = problem("jax.splash", options, {**SHAPE, **shape}, "float32")
    assert error(p, config, plain=True) < F32_TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("cap", [None, 20.0])
def test_splash_gradients_of_three_kernels_agree_with_the_definition(cap):
    p = problem("jax.splash", {"grad": True, "attn_logits_soft_cap": cap}, SHAPE, "float32")
    config = {**BACKWARD, "block_q_dq": 128, "block_kv_dq": 128, "k_layout": "SEQ_MINOR"}
    assert error(p, config, plain=True) < F32_TOLERANCE


def test_a1_causal_flash_is_aligned_top_left():
    p = problem("jax.flash", {"causal": True}, {**SHAPE, "q_len": 128}, "float32")
    config = {"block_q": 128, "block_k_major": 256, "block_k": 128, "block_b": 1}
    assert error(p, config) < F32_TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("block_k", [128, 256])
def test_flash_with_residuals_and_segments_agrees_with_the_definition(block_k):
    options = {"causal": True, "save_residuals": True, "segment_ids": True, "sm_scale": 0.1}
    p = problem("jax.flash", options, {**SHAPE, "q_len": 192}, "float32")
    config = {"block_q": 128, "block_k_major": 256, "block_k": block_k, "block_b": 1}
    assert error(p, config) < F32_TOLERANCE


@pytest.mark.parametrize(
    ("name", "config", "q_len"),
    [
        ("jax.flash_dq", {"block_q_dq": 128, "block_k_major_dq": 256, "block_k_dq": 128}, 128),
        ("jax.flash_dkv", {"block_q_major_dkv": 256, "block_q_dkv": 128, "block_k_major_dkv": 256,
                           "block_k_dkv": 128}, 256),
    ],
)  # fmt: skip
def test_flash_gradients_agree_with_the_definition(name, config, q_len):
    p = problem(name, {"causal": True, "sm_scale": 0.1}, {**SHAPE, "q_len": q_len}, "float32")
    assert error(p, config) < F32_TOLERANCE


@pytest.mark.parametrize("inline", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_paged_attention_agrees_with_the_definition(inline):
    shape = {"batch": 2, "q_heads": 8, "kv_heads": 2, "kv_len": 50, "head_dim": 128}
    p = problem("jax.paged_attention", {"attn_logits_soft_cap": 30.0}, shape, "bfloat16")
    config = {"pages_per_compute_block": 2, "megacore_mode": None, "inline_seq_dim": inline}
    assert error(p, config) < BF16_TOLERANCE


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.nightly), 20])
def test_our_ragged_reference_is_jaxs_own(window):
    # JAX's interpreters do not run this kernel: it reads through reshaped references.
    shape = {"batch": 3, "q_heads": 8, "kv_heads": 4, "q_len": 5, "kv_len": 50, "head_dim": 128}
    options = {"sliding_window": window, "sm_scale": 0.1, "soft_cap": 20}
    p = problem("jax.ragged_paged_attention", options, shape, "float32")
    kernel = base.load(p.kernel)
    assert kernel.inputs is not None
    assert kernel.reference is not None
    q, kv_pages = kernel.inputs(p, jax.random.key(0))
    theirs = ref_ragged_paged_attention(
        q, kv_pages, jnp.full(3, 50, jnp.int32), jnp.asarray(jax_pages.page_table(p)),
        jnp.arange(4, dtype=jnp.int32) * 5, jnp.array([3]), **p.options,
    )  # fmt: skip
    assert np.abs(kernel.reference(p, q, kv_pages) - np.asarray(theirs)).max() < 1e-5


OWN = {"all": [{"causal": {}}, {"documents": {"lengths": [256]}}]}
NESTED = {"any": [{"local": {"left": 3}}, OWN]}


@pytest.mark.parametrize("mask", [
    Full(), Causal(), Causal(offset=70), Local(left=30, right=5), Local(left=9),
    Documents(lengths=(100, 28, 128)), of(NESTED),
])  # fmt: skip
def test_jaxs_masks_show_the_pairs_that_flops_count(mask):
    shown = jax_mask(mask, 128, 256)[:, :]
    want = rows_of(mask, 128, 256)
    assert np.array_equal(shown, want.dense())
    assert int(shown.sum()) == want.pairs
