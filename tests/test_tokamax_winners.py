"""The benchmark that holds Tokamax's measured winners against their spaces: its arithmetic."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.candidate import Candidate


def loaded():
    path = Path(__file__).parents[1] / "benchmarks" / "tokamax_winners.py"
    spec = importlib.util.spec_from_file_location("tokamax_winners", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


tw = loaded()


def candidate(blocks=(1024, 1024, 512), layouts=(1, 1, 1), scheduler=False):
    named = zip((*tw.BLOCKS, *tw.LAYOUTS), (*blocks, *layouts), strict=True)
    return Candidate.of({**dict(named), tw.SCHEDULER: scheduler})


WINNER = candidate()
SPACE = [
    candidate((q, kv, c), layouts, scheduler)
    for q, kv, c in itertools.product((1024, 2048), (1024, 2048), (256, 512, 1024))
    for layouts in itertools.product((1, 2), repeat=3)
    for scheduler in (False, True)
]


def outcome(predicted, measured=((WINNER, 1.0),), device="tpu7x"):
    problem = SimpleNamespace(
        device=device, options={"mask": {"causal": {}}, "residuals": False},
        shape={"batch": 4, "q_heads": 16, "kv_heads": 8, "q_len": 4096, "head_dim_qk": 128},
    )  # fmt: skip
    return tw.Outcome(spec=tw.Spec(problem=problem, winners=measured), predicted=predicted)


def test_a_sample_has_what_the_model_ranks_best_and_changes_of_every_kind():
    fastest, second = candidate((2048, 2048, 1024)), candidate((2048, 1024, 1024))
    model_ms = dict.fromkeys(SPACE, 3.0) | {fastest: 1.0, second: 2.0}
    chosen = tw.ordered(WINNER, SPACE, model_ms, "a")[:6]
    assert chosen[:2] == [fastest, second]
    assert WINNER not in chosen
    every = tw.ordered(WINNER, SPACE, model_ms, "a")
    assert len(set(every)) == len(every)
    kinds = [tw.changed(WINNER, c) for c in chosen[2:]]
    assert any(len(kind) == 1 and kind[0] in tw.BLOCKS for kind in kinds)
    assert any(set(kind) <= set(tw.LAYOUTS) for kind in kinds)
    assert (tw.SCHEDULER,) in kinds


def test_a_sample_is_the_seeds():
    def drawn(seed):
        return tw.ordered(WINNER, SPACE, {}, seed)

    assert drawn("a") == drawn("a") != drawn("b")


def test_changes_that_were_predicted_faster_are_tried_together():
    key, value = candidate(layouts=(1, 2, 1)), candidate(layouts=(1, 1, 2))
    slower = candidate(scheduler=True)
    both = tw.combined(WINNER, outcome({WINNER: 1.0, key: 0.9, value: 0.95, slower: 1.1}), SPACE)
    assert both == candidate(layouts=(1, 2, 2))
    assert tw.combined(WINNER, outcome({WINNER: 1.0, slower: 1.1}), SPACE) is None
    # One change alone makes a candidate that was tried.
    assert tw.combined(WINNER, outcome({WINNER: 1.0, key: 0.9}), SPACE) is None


def test_the_better_of_two_changes_of_one_tunable_is_taken():
    small, large = candidate((1024, 1024, 256)), candidate((1024, 1024, 1024))
    key = candidate(layouts=(1, 2, 1))
    tried = outcome({WINNER: 1.0, small: 0.8, large: 0.7, key: 0.9})
    assert tw.combined(WINNER, tried, SPACE) == candidate((1024, 1024, 1024), (1, 2, 1))


def test_the_winner_is_the_fastest_measured_run_and_stands_against_the_best_prediction():
    other, third = candidate(layouts=(2, 1, 1)), candidate(layouts=(2, 2, 2))
    tried = outcome({WINNER: 1.06, other: 1.02, third: 1.0}, measured=((WINNER, 0.9), (other, 0.8)))
    assert tried.winner == (other, 0.8)
    assert tried.above == pytest.approx(0.02)
    assert "| 1024/1024/512 L211 | 0.800 | 1.020 (+27.5%)" in tw.line(tried)
    assert tw.line(tried).endswith("| 1024/1024/512 L222 | 1.000 | 2.0% |")


def test_a_winner_without_a_competitor_is_not_within_anything():
    alone = outcome({WINNER: 1.0})
    assert alone.above is None
    assert tw.line(alone).endswith("| – |")
    assert tw.summary([alone], "tpu7x") == "tpu7x: 0 of 1 specs tried, 0 within 5 % (none)"
    # The winner of another run is none either: it was not sampled.
    other = candidate(layouts=(2, 1, 1))
    runs = outcome({WINNER: 1.0, other: 1.1}, measured=((WINNER, 1.0), (other, 1.1)))
    assert runs.above is None


def test_the_share_within_five_percent_is_of_the_specs_that_were_tried():
    other = candidate(layouts=(2, 1, 1))
    near, far = outcome({WINNER: 1.04, other: 1.0}), outcome({WINNER: 1.06, other: 1.0})
    none = outcome({})
    none.dropped[WINNER] = "timeout: took over 150 s"
    told = tw.summary([near, far, near, none, outcome({WINNER: 2.0}, device="v6e")], "tpu7x")
    assert told.splitlines()[0] == "tpu7x: 3 of 4 specs tried, 2 within 5 % (67%)"
    assert "1024/1024/512 L111 (timeout: took over 150 s)" in told
    assert "timeout: took over 150 s" in tw.line(none)
