"""The measured gate's statistics: slower, not slower, or too noisy; never a pass by default."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from autotune.gate.samples import MIN_SAMPLES, Samples, compare, shift


def samples(best: float, default: float = 3.0, *, noise: float = 0.002, count: int = 20,
            seed: int = 0) -> Samples:  # fmt: skip
    random = np.random.default_rng(seed)
    times = lambda ms: (ms * np.exp(random.normal(0.0, noise, count))).tolist()
    return Samples(best_ms=times(best), default_ms=times(default))


def outcome(baseline: Samples, today: Samples, tolerance: float = 0.05) -> str:
    return compare(baseline, today, tolerance=tolerance).outcome


def alone(given: Samples) -> Samples:
    return Samples(best_ms=given.best_ms)


def test_the_same_times_pass() -> None:
    found = compare(samples(1.0), samples(1.0, seed=1), tolerance=0.05)
    assert found.outcome == "pass"
    assert found.baseline_ms == pytest.approx(1.0, rel=0.01)
    assert "20 + 20 samples" in found.reason


def test_a_slowdown_against_the_default_is_a_regression() -> None:
    found = compare(samples(1.0), samples(1.10, seed=1), tolerance=0.05)
    assert found.outcome == "regression"
    assert "+10." in found.reason
    assert "against the default" in found.reason
    assert outcome(samples(1.0), samples(1.03, seed=1)) == "pass", "3 % is within the tolerance"
    assert outcome(samples(1.0), samples(1.03, seed=1), tolerance=0.02) == "regression"


def test_drift_that_the_default_shares_is_taken_off() -> None:
    assert outcome(samples(1.0), samples(1.04, 3.12, seed=1)) == "pass"
    assert outcome(samples(1.0), samples(1.04 * 1.08, 3.12, seed=1)) == "regression"
    found = compare(samples(1.0), samples(1.08, 3.24, seed=1), tolerance=0.05)
    assert found.outcome == "inconclusive"
    assert "the default slowed down too; kernel or machine?" in found.reason


def test_a_slowdown_of_best_and_default_beyond_drift_is_a_regression() -> None:
    found = compare(samples(1.0), samples(1.2, 3.6, seed=1), tolerance=0.05)
    assert found.outcome == "regression"
    assert "the default slowed down too, by more than runs drift" in found.reason


@pytest.mark.parametrize(
    ("best", "default", "expected", "told"),
    [
        (0.6, 0.45, "pass", "faster than it was, whatever the default is: +3"),
        (0.97, 0.9, "inconclusive", "not slower than it was, but the default got faster: +7"),
        (1.01, 0.85, "inconclusive", "not slower than it was, but the default got faster: +1"),
        (1.04, 0.96, "regression", "slower: +8"),
        (1.08, 0.9, "regression", "slower: +2"),
    ],
)
def test_what_lost_against_a_faster_default_is_a_regression_only_where_it_is_slower_itself(
    best: float, default: float, expected: str, told: str
) -> None:
    found = compare(samples(1.0), samples(best, 3 * default, seed=1), tolerance=0.05)
    assert (found.outcome, told in found.reason) == (expected, True), found.reason
    assert found.faster == (best < 0.95)


@pytest.mark.parametrize(("best", "faster"), [(0.93, False), (0.87, True)])
def test_faster_is_what_exceeds_the_tolerance_and_drift(best: float, faster: bool) -> None:
    found = compare(samples(1.0), samples(best, seed=1), tolerance=0.05)
    assert (found.outcome, found.faster) == ("pass", faster)


def test_below_half_the_tolerance_nothing_is_a_regression_however_significant() -> None:
    now = samples(1.0, seed=1)
    some = Samples(best_ms=[1.015] * 11 + [1.1] * 9, default_ms=now.default_ms)
    found = compare(samples(1.0), some, tolerance=0.05)
    assert "p 3.4e-08" in found.reason
    assert found.outcome == "inconclusive"
    assert "too noisy to rule out 5%: +2." in found.reason


@pytest.mark.parametrize("slow", [2, 4, 5])
@pytest.mark.parametrize("beside", [True, False])
def test_slow_runs_that_no_rank_sees_are_no_pass(slow: int, beside: bool) -> None:
    before, now = samples(1.0), samples(1.0, seed=1)
    tail = [3 * ms for ms in now.best_ms[:slow]] + list(now.best_ms[slow:])
    today = Samples(best_ms=tail, default_ms=now.default_ms)
    if not beside:
        before, today = alone(before), alone(today)
    found = compare(before, today, tolerance=0.05)
    assert found.outcome == "inconclusive"
    assert "some runs take far longer, the mean grew by" in found.reason
    assert outcome(today, today) == "pass", "it has always been so"


def test_slow_runs_are_no_pass_on_a_faster_clock_either() -> None:
    now = samples(0.94, 3 * 0.94, seed=1)
    tail = [2 * ms for ms in now.best_ms[:2]] + list(now.best_ms[2:])
    assert sum(sorted(tail)[:-1]) < 19, "the mean itself did not grow"
    assert outcome(samples(1.0), now) == "pass"
    assert outcome(samples(1.0), Samples(best_ms=tail, default_ms=now.default_ms)) == "inconclusive"


def test_one_disturbed_run_is_no_reason_to_doubt_the_others() -> None:
    now = samples(1.0, seed=1)
    disturbed = Samples(best_ms=[9.0, *now.best_ms[1:]], default_ms=now.default_ms)
    assert outcome(samples(1.0), disturbed) == "pass"


def test_a_fast_mode_that_was_lost_is_no_pass_and_a_slow_one_that_was_lost_is() -> None:
    now, slow = samples(1.0, seed=1), samples(2.0, seed=2)
    mixed = lambda fast: Samples(
        best_ms=[*now.best_ms[:fast], *slow.best_ms[fast:]], default_ms=now.default_ms
    )
    assert outcome(mixed(8), now) == "pass"
    found = compare(mixed(4), slow, tolerance=0.05)
    assert found.outcome == "inconclusive"
    assert "the mean grew by" in found.reason


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.0, "pass"), (1.03, "inconclusive"), (1.08, "inconclusive"), (1.3, "regression")],
)
def test_without_a_default_only_what_exceeds_drift_is_a_regression(
    factor: float, expected: str
) -> None:
    found = compare(alone(samples(1.0)), alone(samples(factor, seed=1)), tolerance=0.05)
    assert found.outcome == expected
    assert "no times of a default beside it to take drift off" in found.reason


@pytest.mark.parametrize(("then", "now"), [(20, 5), (5, 20), (20, 0), (5, 5)])
def test_too_few_times_of_a_default_are_said_to_be_that_and_not_used(then: int, now: int) -> None:
    before, today = samples(1.0), samples(1.03, seed=1)
    found = compare(
        Samples(best_ms=before.best_ms, default_ms=before.default_ms[:then]),
        Samples(best_ms=today.best_ms, default_ms=today.default_ms[:now]),
        tolerance=0.05,
    )
    assert found.outcome == "inconclusive"
    told = f"{then} stored and {now} fresh times of the default are too few (6 of each)"
    assert told in found.reason
    assert "no times of a default" not in found.reason


@pytest.mark.parametrize("count", [1, MIN_SAMPLES - 1])
def test_too_few_samples_are_inconclusive_however_far_apart(count: int) -> None:
    for baseline, today in ((samples(1.0), samples(5.0, count=count)),
                            (samples(1.0, count=count), samples(5.0))):  # fmt: skip
        found = compare(baseline, today, tolerance=0.05)
        assert found.outcome == "inconclusive"
        assert f"at least {MIN_SAMPLES} of each" in found.reason


def test_the_least_number_of_samples_suffices_for_a_clear_answer_even_with_ties() -> None:
    constant = lambda ms: Samples(best_ms=[ms] * MIN_SAMPLES, default_ms=[3.0] * MIN_SAMPLES)
    assert outcome(constant(1.0), constant(1.0)) == "pass"
    assert outcome(constant(1.0), constant(1.2)) == "regression"
    rounded = Samples(best_ms=[1.2, 1.2, 1.21, 1.21, 1.22, 1.22], default_ms=[3.0] * 6)
    assert outcome(Samples(best_ms=[1.0, 1.0, 1.01, 1.01, 1.02, 1.02], default_ms=[3.0] * 6),
                   rounded) == "regression"  # fmt: skip


def test_noise_that_hides_the_tolerance_is_no_pass() -> None:
    found = compare(samples(1.0, noise=0.2), samples(1.0, noise=0.2, seed=3), tolerance=0.05)
    assert found.outcome == "inconclusive"
    assert "too noisy to rule out 5%" in found.reason


def test_far_faster_than_the_baseline_asks_for_a_fresh_one() -> None:
    usual, tail = samples(1.65), samples(2.152)
    found = compare(tail, samples(1.65, seed=1), tolerance=0.05)
    assert (found.outcome, found.faster) == ("pass", True)
    assert outcome(usual, samples(2.15, seed=1)) == "regression", "flagged once refreshed"


def test_the_shift_is_that_of_hodges_and_lehmann() -> None:
    found = shift([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    assert found.estimate == pytest.approx(1.0), "twice as long is + 100 %"
    assert found.low < found.estimate < found.high
    assert shift([1.0] * 6, [1.0] * 6).p_slower == 1.0


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_200_runs_at_10_percent_noise(factor: float) -> None:
    ended = Counter(
        outcome(samples(1.0, noise=0.1, seed=2 * n), samples(factor, noise=0.1, seed=2 * n + 1))
        for n in range(200)
    )
    if factor == 1.0:
        assert ended["regression"] <= 2, ended
    else:
        assert ended["regression"] >= 190, ended


def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gate_noise.py"
    spec = importlib.util.spec_from_file_location("gate_noise", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_on_recorded_noise_false_alarms_are_rare_and_what_slowed_down_is_found() -> None:
    noise = benchmark()
    recorded = noise.recorded(noise.load())
    for case in (c for c in noise.CASES if c.noise == "recorded"):
        runs = 500 if case.alone else 200  # the former are nearer to what is allowed
        shares = noise.simulate(case, recorded, runs=runs, samples=20, seed=1)
        assert noise.missed(case, shares) is None, (case.name, shares)
    assert "below 95%" in noise.missed(noise.CASES[1], {"regression": 0.5})
