"""Masks: the algebra, its strict form, and the sparse execution table."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.kernels import masks
from autotune.kernels.mask_table import EMPTY, FULL, PARTIAL, MaskTable, block_kinds, table_of

CAUSAL = masks.Causal()


def brute(form: dict[str, Any], q_len: int, kv_len: int) -> np.ndarray:
    """bool[q_len, kv_len] from the definition of each mask, element by element."""
    q = np.arange(q_len)[:, None] + kv_len - q_len
    k = np.arange(kv_len)[None]
    ((name, body),) = form.items()
    if name == "full":
        return np.ones((q_len, kv_len), bool)
    if name == "causal":
        return k <= q + body.get("offset", 0)
    if name == "local":
        left, right = body.get("left"), body.get("right")
        return (k >= q - (10**9 if left is None else left)) & (
            k <= q + (10**9 if right is None else right)
        )
    if name == "documents":
        ids = np.repeat(np.arange(len(body["lengths"])), body["lengths"])

        def of(p: np.ndarray) -> np.ndarray:
            return np.where((p >= 0) & (p < len(ids)), ids[np.clip(p, 0, len(ids) - 1)], -1)

        return (of(q) == of(k)) & (of(q) >= 0)
    seen = [brute(part, q_len, kv_len) for part in body]
    return np.logical_and.reduce(seen) if name == "all" else np.logical_or.reduce(seen)


LEAVES = st.one_of(
    st.just({"full": {}}),
    st.builds(lambda n: {"causal": {"offset": n}}, st.integers(-9, 9)),
    st.builds(lambda n, m: {"local": {"left": n, "right": m}}, st.integers(0, 9), st.none())
    | st.builds(lambda n, m: {"local": {"left": n, "right": m}}, st.none(), st.integers(0, 9))
    | st.builds(
        lambda n, m: {"local": {"left": n, "right": m}}, st.integers(0, 9), st.integers(0, 9)
    ),
    st.builds(lambda n: {"documents": {"lengths": n}}, st.lists(st.integers(1, 9), min_size=1)),
)
FORMS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda name, parts: {name: parts},
        st.sampled_from(["all", "any"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)
LENGTHS = st.integers(1, 40)
BLOCKS = st.sampled_from([1, 2, 3, 4, 8, 16, 64])


@settings(max_examples=100, deadline=None)
@given(form=FORMS, q_len=LENGTHS, kv_len=LENGTHS)
def test_any_mask_sees_exactly_the_pairs_of_its_definition(form, q_len, kv_len):
    expected = brute(form, q_len, kv_len)
    rows = masks.rows_of(masks.of(form), q_len, kv_len)
    assert np.array_equal(rows.dense(), expected)
    assert rows.pairs == expected.sum()
    assert (rows.lo[1:] > rows.hi[:-1])[(rows.hi > rows.lo)[1:]].all(), "intervals must be apart"


@settings(max_examples=100, deadline=None)
@given(form=FORMS, q_len=LENGTHS, kv_len=LENGTHS)
def test_the_canonical_form_means_the_same_and_is_its_own_canonical_form(form, q_len, kv_len):
    parsed = masks.parse(form)
    assert np.array_equal(brute(parsed, q_len, kv_len), brute(form, q_len, kv_len))
    assert masks.parse(parsed) == parsed


def dense_patterns(table: MaskTable) -> np.ndarray:
    """bool[patterns, block_q, block_kv]."""
    keys = np.arange(table.block_kv)
    return ((keys >= table.lo[..., None]) & (keys < table.hi[..., None])).any(axis=1)


def replay(table: MaskTable, q_len: int, kv_len: int) -> np.ndarray:
    """The mask a kernel would apply if it followed the table to the letter."""
    rows, cols = table.rows.max() + 1, max(table.cols.max() + 1, -(-kv_len // table.block_kv))
    seen = np.zeros((rows * table.block_q, cols * table.block_kv), bool)
    patterns, row_open = dense_patterns(table), False
    for n in range(table.steps):
        assert table.bounds_start[n] == (not row_open), f"step {n} must start its row exactly once"
        row_open = not table.bounds_end[n]
        block = np.s_[
            table.rows[n] * table.block_q : (table.rows[n] + 1) * table.block_q,
            table.cols[n] * table.block_kv : (table.cols[n] + 1) * table.block_kv,
        ]
        if table.kinds[n] == FULL:
            seen[block] = True
        elif table.kinds[n] == PARTIAL:
            seen[block] = patterns[table.mask_next[n]]
    assert not row_open, "the last row must be closed"
    assert not seen[:, kv_len:].any(), "padding keys must never be seen"
    return seen[:q_len, :kv_len]


@settings(max_examples=150, deadline=None)
@given(form=FORMS, q_len=LENGTHS, kv_len=LENGTHS, block_q=BLOCKS, block_kv=BLOCKS)
def test_following_the_table_applies_exactly_the_mask(form, q_len, kv_len, block_q, block_kv):
    expected = brute(form, q_len, kv_len)
    table = table_of(masks.of(form), q_len, kv_len, block_q, block_kv)
    assert np.array_equal(replay(table, q_len, kv_len), expected)
    assert sorted(set(table.rows.tolist())) == list(range(-(-q_len // block_q)))
    order = table.rows.astype(int) * 10**6 + table.cols
    assert (np.diff(order) > 0).all(), "query blocks outer, key blocks inner, each once"
    patterns = dense_patterns(table)
    assert len({pattern.tobytes() for pattern in patterns}) == len(patterns)


@settings(max_examples=100, deadline=None)
@given(form=FORMS, q_len=LENGTHS, kv_len=LENGTHS, block_q=BLOCKS, block_kv=BLOCKS)
def test_block_kinds_are_those_of_the_dense_mask(form, q_len, kv_len, block_q, block_kv):
    dense = brute(form, q_len, kv_len)
    kinds = block_kinds(masks.of(form), q_len, kv_len, block_q, block_kv)
    for i, j in np.ndindex(kinds.shape):
        block = dense[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        whole = (j + 1) * block_kv <= kv_len and block.all()
        assert kinds[i, j] == (FULL if whole else PARTIAL if block.any() else EMPTY), (i, j)


def test_causal_4096_at_1024_by_2048_is_the_lectures_table():
    table = table_of(CAUSAL, 4096, 4096, 1024, 2048)
    assert (table.active, table.partial, table.patterns) == (6, 4, 2)
    assert table.bounds_start.tolist() == [True, True, True, False, True, False]
    assert table.bounds_end.tolist() == [True, True, False, True, False, True]
    assert table.rows.tolist() == [0, 1, 2, 2, 3, 3]
    assert table.cols.tolist() == [0, 0, 0, 1, 0, 1]
    assert table.mask_next[table.kinds == PARTIAL].tolist() == [0, 1, 0, 1]


def test_causal_4096_at_1024_by_1024_is_the_lectures_table():
    table = table_of(CAUSAL, 4096, 4096, 1024, 1024)
    assert (table.active, table.partial, table.full, table.patterns) == (10, 4, 6, 1)


def test_documents_1000_2000_1096_at_1024_are_the_lectures_blocks():
    kinds = block_kinds(masks.Documents(lengths=(1000, 2000, 1096)), 4096, 4096, 1024, 1024)
    assert kinds.tolist() == [[1, 1, 1, 0], [1, 2, 1, 0], [1, 1, 1, 1], [0, 0, 1, 2]]
    table = table_of(masks.Documents(lengths=(1000, 2000, 1096)), 4096, 4096, 1024, 1024)
    assert (16 - table.active, table.full, table.partial) == (4, 2, 10)


@pytest.mark.parametrize(
    ("form", "patterns"),
    [
        ({"causal": {}}, 1),
        ({"all": [{"causal": {}}, {"local": {"left": 4096}}]}, 2),
        ({"local": {"left": 1024, "right": 0}}, 2),
    ],
)
def test_16384_at_1024_stores_as_many_patterns_as_the_lecture_counts(form, patterns):
    assert table_of(masks.of(form), 16384, 16384, 1024, 1024).patterns == patterns


def test_deepseek_causal_4096_at_2048_has_four_blocks_and_skips_one():
    kinds = block_kinds(CAUSAL, 4096, 4096, 2048, 2048)
    assert kinds.tolist() == [[PARTIAL, EMPTY], [FULL, PARTIAL]]


def test_unequal_lengths_are_aligned_bottom_right():
    assert masks.rows_of(CAUSAL, 2, 4).dense().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert masks.rows_of(CAUSAL, 4, 2).dense().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert masks.rows_of(CAUSAL, 128, 256).pairs == 128 * 128 + 8256


def test_a_query_block_that_sees_nothing_keeps_one_empty_step_so_that_zeros_are_written():
    table = table_of(CAUSAL, 8, 4, 2, 2)
    assert table.kinds.tolist() == [EMPTY, EMPTY, PARTIAL, FULL, PARTIAL]
    assert table.rows.tolist() == [0, 1, 2, 3, 3]
    assert table.active == 3
    assert table.bounds_start.tolist() == [True, True, True, True, False]


def test_a_step_that_needs_no_pattern_names_the_next_one():
    table = table_of(CAUSAL, 16, 16, 4, 8)
    assert table.kinds.tolist() == [1, 1, 2, 1, 2, 1]
    assert table.mask_next.tolist() == [0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "form",
    [
        {"causal": {}},
        {"local": {"left": 4096, "right": 0}},
        {"documents": {"lengths": [1820] * 72 + [32]}},
        {
            "all": [
                {"causal": {}},
                {"local": {"left": 8192}},
                {"documents": {"lengths": [65536] * 2}},
            ]
        },
    ],
    ids=str,
)
def test_131072_at_1024_takes_under_a_second_and_never_builds_the_square(form):
    masks.rows_of.cache_clear()
    table_of.cache_clear()
    start = time.process_time()
    table = table_of(masks.of(form), 131072, 131072, 1024, 1024)
    assert time.process_time() - start < 1.0
    assert table.active > 0
    bounds = masks.rows_of(masks.of(form), 131072, 131072)
    assert bounds.lo.nbytes + bounds.hi.nbytes < 2**23, "key bounds, not the square"


def test_pair_counts_do_not_wrap():
    assert masks.rows_of(masks.Full(), 2**20, 2**20).pairs == 2**40
    assert masks.rows_of(CAUSAL, 2**20, 2**20).pairs == 2**19 * (2**20 + 1)


@pytest.mark.parametrize(
    ("given_form", "canonical"),
    [
        ({"causal": {}}, {"causal": {"offset": 0}}),
        ({"local": {"left": 7}}, {"local": {"left": 7, "right": None}}),
        ({"all": [{"full": {}}]}, {"full": {}}),
        ({"all": [{"full": {}}, {"causal": {}}]}, {"causal": {"offset": 0}}),
        ({"any": [{"full": {}}, {"causal": {}}]}, {"full": {}}),
        (
            {"all": [{"local": {"left": 2}}, {"all": [{"causal": {}}, {"local": {"left": 2}}]}]},
            {"all": [{"causal": {"offset": 0}}, {"local": {"left": 2, "right": None}}]},
        ),
        ({"documents": {"lengths": (1, 2)}}, {"documents": {"lengths": [1, 2]}}),
    ],
)
def test_equal_masks_have_one_canonical_form(given_form, canonical):
    assert masks.parse(given_form) == canonical


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("causal", "a mask is one entry"),
        (None, "a mask is one entry"),
        ([], "a mask is one entry"),
        ({}, "a mask is one entry"),
        ({"causal": {}, "full": {}}, "a mask is one entry"),
        ({"casual": {}}, "did you mean 'causal'"),
        ({1: {}}, "not 1"),
        ({True: {}}, "not True"),
        ({"causal": None}, "causal takes a mapping of offset, not None"),
        ({"causal": {"ofset": 1}}, "causal takes offset, not 'ofset'"),
        ({"causal": {"offset": True}}, "whole number"),
        ({"causal": {"offset": 1.5}}, "whole number"),
        ({"causal": {"offset": 2**40}}, "whole number"),
        ({"full": {"x": 1}}, "full takes nothing, write {}"),
        ({"local": {}}, "local needs left, right or both"),
        ({"local": {"left": -1}}, "local left is a whole number from 0"),
        ({"local": {"left": "4"}}, "not '4'"),
        ({"documents": {}}, "documents needs lengths"),
        ({"documents": {"lengths": []}}, "documents needs lengths"),
        ({"documents": {"lengths": 5}}, "documents needs lengths"),
        ({"documents": {"lengths": [0]}}, "a document length is a whole number from 1"),
        ({"documents": {"lengths": [True]}}, "a document length is a whole number from 1"),
        ({"all": []}, "all takes a list of masks"),
        ({"any": {"causal": {}}}, "any takes a list of masks"),
        ({"all": [{"causal": {}}, {"lokal": {}}]}, "did you mean 'local'"),
    ],
    ids=str,
)
def test_a_bad_mask_is_refused_with_what_is_allowed(bad, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        masks.parse(bad)
    assert "\n" not in str(caught.value)


def test_masks_nest_only_so_deep():
    form: dict[str, Any] = {"causal": {}}
    for _ in range(50):
        form = {"all": [form]}
    with pytest.raises(ValueError, match="nest at most 8 deep"):
        masks.parse(form)


def test_sizes_no_table_can_hold_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="not 33554432 x 8"):
        masks.rows_of(CAUSAL, 2**25, 8)
    with pytest.raises(ValueError, match=r"128 x 128 cuts .* into 268435456 blocks"):
        table_of(CAUSAL, 2**21, 2**21, 128, 128)
    with pytest.raises(ValueError, match="0 x 4"):
        table_of(CAUSAL, 8, 8, 0, 4)


def test_document_lengths_are_found_wherever_they_stand():
    form = {"any": [{"causal": {}}, {"all": [{"documents": {"lengths": [3, 4]}}, {"causal": {}}]}]}
    assert masks.document_lengths(masks.of(form)) == [(3, 4)]
