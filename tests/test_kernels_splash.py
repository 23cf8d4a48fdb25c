"""splash: numerics against the dense float64 definition, and faults that must show in them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import (
    BF16_TOLERANCE,
    DRAWN,
    F32_TOLERANCE,
    interpret,
)
from splash_problems import DOCUMENTS, KERNEL, LOCAL, SMALL, problem

from autotune.kernels import anchored_softmax, masks, splash, splash_codes
from autotune.kernels.attention import MASK_VALUE
from autotune.kernels.attention_inputs import gain_of
from autotune.kernels.mask_table import FULL, PARTIAL, table_of
from autotune.problem import Problem


def run(p: Problem, config: dict[str, Any], arrays: Any = None) -> tuple[np.ndarray, ...]:
    """Outputs in TPU interpret mode."""
    fn, _ = KERNEL.build(p, {**SMALL, **config})
    out = interpret(fn, *(KERNEL.inputs(p, jax.random.key(0)) if arrays is None else arrays))
    return tuple(np.asarray(o, np.float64) for o in jax.tree.leaves(out))


def worst(p: Problem, found: tuple[np.ndarray, ...], arrays: Any) -> float:
    """The largest error over the outputs, relative to the reference; inf for a NaN."""
    expected = KERNEL.reference(p, *arrays)
    expected = expected if isinstance(expected, tuple) else (expected,)
    errors = []
    for have, want in zip(found, expected, strict=True):
        dead = want == MASK_VALUE
        assert np.array_equal(have[dead], want[dead].astype(np.float32)), "lse of dead rows"
        scale = max(np.max(np.abs(want), initial=0, where=~dead), 1e-30)
        if want.ndim == 3:  # lse and max are absolute by nature
            scale = max(scale, 1.0)
        error = np.max(np.abs(have - want), initial=0, where=~dead) / scale
        errors.append(np.inf if np.isnan(error) else float(error))
    return max(errors)


def check(p: Problem, config: dict[str, Any], arrays: Any = None, tolerance: float = 0.0) -> None:
    arrays = KERNEL.inputs(p, jax.random.key(0)) if arrays is None else arrays
    error = worst(p, run(p, config, arrays), arrays)
    f32 = F32_TOLERANCE * max(1.0, gain_of(p) / 2)  # logits of size s are off by up to s · 2^-24
    limit = tolerance or (f32 if p.dtype == "float32" else BF16_TOLERANCE)
    assert error <= limit, f"relative error {error:.2g} over {limit} for {p.json} {config}"


def pieces(cuts: set[int], length: int) -> list[int]:
    edges = [0, *sorted(cuts - {length}), length]
    return [b - a for a, b in itertools.pairwise(edges)]


@st.composite
def masks_of(draw: Any, q_len: int, kv_len: int) -> dict[str, Any]:
    """A mask over kv_len keys, of one to three parts, that lets some pair be seen."""
    cuts = st.sets(st.integers(1, max(1, kv_len - 1)), max_size=4)
    far = st.integers(0, 200)
    leaves = st.one_of(
        st.just({"full": {}}),
        st.builds(lambda n: {"causal": {"offset": n}}, st.integers(-40, 40)),
        st.builds(lambda n, m: {"local": {"left": n, "right": m}}, far, st.none() | far),
        cuts.map(lambda c: {"documents": {"lengths": pieces(c, kv_len)}}),
    )  # fmt: skip
    parts = draw(st.lists(leaves, min_size=1, max_size=3))
    return parts[0] if len(parts) == 1 else {draw(st.sampled_from(["all", "any"])): parts}


@st.composite
def cases(draw: Any) -> tuple[Problem, dict[str, Any]]:
    lengths = st.sampled_from([1, 100, 128, 200, 256, 300])
    kv_heads = draw(st.sampled_from([1, 2]))
    shape = {
        "batch": draw(st.sampled_from([1, 1, 2])), "kv_heads": kv_heads,
        "q_heads": kv_heads * draw(st.sampled_from([1, 2])),
        "q_len": draw(lengths), "kv_len": draw(lengths),
        "head_dim_qk": draw(st.sampled_from([64, 80, 96, 128, 192])),
        "head_dim_v": draw(st.sampled_from([64, 96, 128, 256])),
    }  # fmt: skip
    soft_cap = draw(st.sampled_from([None, None, 30.0]))
    options = {
        "mask": draw(masks_of(shape["q_len"], shape["kv_len"])),
        "segment_ids": draw(st.sampled_from([False, False, True])),
        "logit_soft_cap": soft_cap,
        "max_logit_const": draw(st.sampled_from([None, None, 5.0])),
        "use_exp2": draw(st.booleans()),
        "residuals": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.1])),
        "out_dtype": draw(st.sampled_from([None, "float32"])),
    }
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    if not masks.rows_of(masks.of(options["mask"]), shape["q_len"], shape["kv_len"]).pairs:
        options["mask"] = {"full": {}}
    # On v5e an MXU is 128 wide, and V of 128 leaves no column for the sums.
    p = problem(options, dtype, device=draw(st.sampled_from(["v6e", "v5e"])), **shape)
    config = {
        "block_q": draw(st.sampled_from([128, 256])), "block_kv": draw(st.sampled_from([128, 256])),
        "block_q_compute": draw(st.sampled_from([None, 128])),
        "block_kv_compute": draw(st.sampled_from([None, 128])),
        "partial_mask": draw(st.sampled_from(["computed", "stored"])),
    }  # fmt: skip
    return p, config


@settings(max_examples=25, derandomize=True, **DRAWN)
@given(case=cases())
def test_drawn_problems_agree_with_the_definition(case):
    check(*case)


@pytest.mark.nightly
@settings(max_examples=200, **DRAWN)
@given(case=cases())
def test_many_drawn_problems_agree_with_the_definition(case):
    check(*case)


def test_stored_and_computed_partial_masks_give_the_same_bits():
    p = problem({"mask": DOCUMENTS, "residuals": True})
    computed = run(p, {"partial_mask": "computed"})
    stored = run(p, {"partial_mask": "stored"})
    assert all(np.array_equal(a, b) for a, b in zip(computed, stored, strict=True))


def test_query_rows_that_see_nothing_are_zero_with_a_defined_lse():
    p = problem({"residuals": True}, q_len=384, kv_len=200)
    out, lse, top = run(p, {})
    dead = slice(0, 184)  # bottom-right: the first 184 queries stand before the first key
    assert not out[:, :, dead].any()
    assert (lse[:, :, dead] == np.float32(MASK_VALUE)).all()
    assert (top[:, :, dead] == np.float32(MASK_VALUE)).all()
    assert np.isfinite(lse).all()
    assert np.abs(lse[:, :, 184:]).max() < 20


def extreme(p: Problem, logit: float) -> tuple[jax.Array, ...]:
    """Inputs whose every logit is about `logit`: far outside what exp takes without a shift."""
    q, k, v, *ids = KERNEL.inputs(p, jax.random.key(1))
    size = abs(logit) ** 0.5 / p.shape["head_dim_qk"] ** 0.25
    return q * 0.02 + size, k * 0.02 + np.copysign(size, logit), v, *ids


@pytest.mark.parametrize(
    ("logit", "options"),
    [
        (300.0, {"mask": LOCAL}),
        (-300.0, {"mask": LOCAL}),
        (-300.0, {"mask": DOCUMENTS, "use_exp2": False}),
        (-300.0, {"segment_ids": True}),
    ],
    ids=["above", "below", "documents", "segments"],
)
def test_logits_far_from_zero_are_rescaled_also_where_rows_see_their_first_key_late(logit, options):
    p = problem({**options, "residuals": True})
    # Rounding of an f32 logit of 300 is 1.5e-5, so that much of every probability.
    check(p, {}, extreme(p, logit), tolerance=1e-4)


def test_rows_of_padding_ids_are_zero_and_no_other_row_depends_on_padding():
    p = problem({"segment_ids": True, "residuals": True}, "float32")
    q, k, v, *_ = KERNEL.inputs(p, jax.random.key(2))
    ids = jnp.asarray([[1] * 200 + [-1] * 56], jnp.int32)
    out, lse, _ = run(p, {}, (q, k, v, ids, ids))
    other = run(p, {}, (q, k.at[:, :, 200:].set(7.0), v.at[:, :, 200:].set(-9.0), ids, ids))
    assert np.array_equal(out, other[0])
    assert np.array_equal(lse, other[1])
    assert not out[:, :, 200:].any(), "padding must not attend to padding"
    assert (lse[:, :, 200:] == np.float32(MASK_VALUE)).all()
    check(p, {}, (q, k, v, ids, ids))


@pytest.mark.parametrize(
    ("lengths", "cells"), [([512, 512], (2, 2)), ([150, 230, 100, 300, 244], (1, 1))]
)
def test_tiles_are_halved_unless_that_makes_too_many_kinds(lengths, cells):
    form = {"all": [{"causal": {}}, {"documents": {"lengths": lengths}}]}
    p = problem({"mask": form}, q_heads=1, q_len=1024, kv_len=1024)
    table = table_of(masks.of(form), 1024, 1024, 256, 256)
    codes = splash_codes.assign(table, 256, 256, all_cut=False)
    assert {tiles.shape for tiles in codes.tiles.values()} == {cells}
    check(p, {"block_q": 256, "block_kv": 256})


# Planted faults: each makes the numeric check fail, or the check is worth nothing.


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def run_it(p: Problem, arrays: Any = None, config: dict[str, Any] | None = None) -> None:
        with pytest.raises(AssertionError):
            check(p, config or {}, arrays, tolerance=0.02)

    return run_it


def test_a_mask_offset_by_one_is_caught(caught, monkeypatch):
    real = splash_codes.row_bounds

    def shifted(*args: Any) -> Any:
        bounds = real(*args)
        return dataclasses.replace(bounds, values=bounds.values + 1)

    monkeypatch.setattr(splash_codes, "row_bounds", shifted)
    caught(problem({"residuals": True}))


def test_a_key_edge_that_is_not_masked_is_caught(caught, monkeypatch):
    monkeypatch.setattr(anchored_softmax, "_valid", lambda *args: None)
    caught(problem({"mask": {"full": {}}}, kv_len=200))


def test_a_missing_rescale_is_caught(caught, monkeypatch):
    monkeypatch.setattr(anchored_softmax, "rescale", lambda *args: None)
    p = problem()
    caught(p, extreme(p, 300.0))


def test_a_wrong_group_map_is_caught(caught, monkeypatch):
    monkeypatch.setattr(splash.at, "quotient", lambda head, group: head % group)
    caught(problem(q_heads=4, kv_heads=2))


def test_an_unstored_last_block_is_caught(caught, monkeypatch):
    real = splash_codes.actions

    def unclosed(*args: Any) -> Any:
        word = real(*args)
        word[-1] &= ~splash_codes.LAST
        return word

    monkeypatch.setattr(splash_codes, "actions", unclosed)
    caught(problem())


def test_a_cut_tile_taken_for_full_is_caught(caught, monkeypatch):
    real = splash_codes.assign

    def filled(*args: Any, **kwargs: Any) -> Any:
        codes = real(*args, **kwargs)
        tiles = {code: np.where(t == PARTIAL, FULL, t) for code, t in codes.tiles.items()}
        return dataclasses.replace(codes, tiles=tiles)

    monkeypatch.setattr(splash_codes, "assign", filled)
    caught(problem())
