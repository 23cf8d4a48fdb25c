"""Which program wins, on clocks and devices that are made up."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest

from autotune.candidate import Candidate
from autotune.measure import record
from autotune.measure.clocks import HostClock
from autotune.measure.confirm import confirm
from autotune.measure.record import Measured
from autotune.measure.timing import (
    EMPTY,
    HOST_SAMPLES,
    MAX_RUNS,
    Effort,
    half_width,
    interleaved,
    time_on_device,
    time_on_host,
)
from autotune.measure.trace import TraceError


class FakeDevice:
    """A `Runner`: each program takes its time, plus dispatch, jitter and drift of the clock.

    `drift` is the slow-down from the first run to the `drift_runs`th.
    """

    def __init__(self, times_us, *, dispatch_us=0.0, jitter_us=0.0, drift=0.0, drift_runs=1000,
                 seed=0, loses=(), first_us=None):  # fmt: skip
        self.times = {EMPTY: 0.0, **times_us}
        self.dispatch, self.jitter, self.drift, self.drift_runs = (
            dispatch_us, jitter_us, drift, drift_runs,
        )  # fmt: skip
        self.random, self.loses, self.done, self.orders = random.Random(seed), loses, 0, []
        self.first = dict(first_us or {})

    def once(self, program):
        slow = 1 + self.drift * min(1.0, self.done / self.drift_runs)
        self.done += 1
        time_us = self.first.pop(program, self.times[program]) * slow
        return (time_us + self.dispatch + self.random.uniform(-1, 1) * self.jitter) / 1e3

    def run(self, order):
        self.orders.append(list(order))
        times = {}
        for program in order:
            times.setdefault(program, []).append(self.once(program))
        return {p: t[1:] if p in self.loses else t for p, t in times.items()}


def median_us(samples):
    return statistics.median(samples) * 1e3


@pytest.mark.parametrize("seed", range(20))
def test_dispatch_and_jitter_do_not_make_a_3_us_and_a_9_us_kernel_alike_on_the_host(seed):
    device = FakeDevice({"nine": 9, "three": 3}, dispatch_us=125, jitter_us=5, seed=seed)
    found = time_on_host(device, ["nine", "three"], effort=Effort(), seed=seed)
    assert median_us(found["three"]) < median_us(found["nine"])
    assert median_us(found["three"]) == pytest.approx(3, abs=1.5)
    assert median_us(found["nine"]) == pytest.approx(9, abs=1.5)
    assert len(found["nine"]) == HOST_SAMPLES


def test_a_program_lost_in_the_host_clocks_jitter_has_no_time():
    device = FakeDevice({"nothing": 0, "ten": 10}, dispatch_us=125, jitter_us=5)
    found = time_on_host(device, ["nothing", "ten"], effort=Effort(), seed=0)
    assert "cannot tell it from a program that does nothing" in str(found["nothing"])
    assert median_us(found["ten"]) == pytest.approx(10, abs=1.5)


def test_the_last_and_truly_best_wins_on_a_clock_that_drifts_by_a_fifth():
    times = {f"c{n}": 100 for n in range(8)} | {"last": 95}
    device = FakeDevice(times, drift=0.2, drift_runs=9 * 30, jitter_us=1)
    found = time_on_device(device, list(times), effort=Effort(most=30), seed=0)
    assert min(found, key=lambda p: statistics.median(found[p])) == "last"


def test_timed_one_after_the_other_the_same_clock_would_crown_another():
    times = {f"c{n}": 100 for n in range(8)} | {"last": 95}
    device = FakeDevice(times, drift=0.2, drift_runs=9 * 30, jitter_us=1)
    alone = {p: statistics.median(device.run([p] * 30)[p]) for p in times}
    assert min(alone, key=lambda p: alone[p]) != "last", "or the test above shows nothing"


def test_every_block_of_runs_has_each_program_once_in_seeded_random_order():
    programs = ["a", "b", "c", "d"]
    order = interleaved(programs, 25, seed=3)
    blocks = [order[n : n + 4] for n in range(0, 100, 4)]
    assert all(sorted(block) == programs for block in blocks)
    assert len({tuple(block) for block in blocks}) > 5
    assert order == interleaved(programs, 25, seed=3)
    assert order != interleaved(programs, 25, seed=4)


def test_a_steady_program_is_run_few_times_and_a_noisy_one_up_to_the_cap():
    steady = time_on_device(FakeDevice({"a": 100}), ["a"], effort=Effort(), seed=0)
    noisy = time_on_device(FakeDevice({"a": 100}, jitter_us=50), ["a"], effort=Effort(), seed=0)
    assert 6 <= len(steady["a"]) <= 13
    assert len(noisy["a"]) == Effort().most


def test_long_programs_are_run_less_often():
    device = FakeDevice({"slow": 900_000}, jitter_us=90_000)
    found = time_on_device(device, ["slow"], effort=Effort(), seed=0)
    assert len(found["slow"]) <= Effort().total_ms / 900 + 10
    assert max(map(len, device.orders)) <= 3


def test_no_trace_is_longer_than_a_trace_may_be():
    programs = {f"c{n}": 50 for n in range(400)}
    device = FakeDevice(programs, jitter_us=25)
    time_on_device(device, list(programs), effort=Effort(), seed=0)
    assert max(map(len, device.orders)) <= MAX_RUNS


def test_a_missing_event_fails_its_program_and_leaves_the_others_their_times():
    device = FakeDevice({"a": 10, "b": 20}, loses=("a",))
    found = time_on_device(device, ["a", "b"], effort=Effort(), seed=0)
    assert str(found["a"]) == "the trace holds 2 of 3 runs"
    assert median_us(found["b"]) == pytest.approx(20)
    assert all("a" not in order for order in device.orders[1:]), "it is not run again"


class EmptyTrace:
    def run(self, order):
        raise TraceError("the trace has no device plane (it has /host:CPU)")


def test_an_empty_trace_fails_every_program_and_gives_no_zero():
    found = time_on_device(EmptyTrace(), ["a", "b"], effort=Effort(), seed=0)
    assert [str(f) for f in found.values()] == [
        "the trace has no device plane (it has /host:CPU)"
    ] * 2
    assert all(isinstance(f, TraceError) for f in found.values())
    host = time_on_host(EmptyTrace(), ["a"], effort=Effort(), seed=0)
    assert isinstance(host["a"], TraceError)


@pytest.mark.parametrize("wrong", [0.0, -0.001, math.nan, math.inf])
def test_a_clock_that_gives_no_time_is_a_failed_measurement(wrong):
    class Broken:
        def run(self, order):
            return {p: [wrong if p == "a" else 0.01] * order.count(p) for p in order}

    found = time_on_device(Broken(), ["a", "b"], effort=Effort(), seed=0)
    assert str(found["a"]).startswith("the clock gave")
    assert set(found["b"]) == {0.01}


def test_the_interval_of_a_median_narrows_with_samples():
    values = random.Random(0)
    some = [100 + values.gauss(0, 5) for _ in range(400)]
    assert half_width(some[:5]) == math.inf
    assert half_width(some[:20]) > half_width(some) > 0
    assert half_width([5.0] * 6) == 0
    assert half_width([5.0] * 6, base=5.0) == math.inf


def test_the_interval_holds_the_median_19_times_in_20():
    values = random.Random(1)
    held = 0
    for _ in range(400):
        some = [values.gauss(100, 10) for _ in range(30)]
        middle = statistics.median(some)
        held += abs(middle - 100) <= half_width(some) * middle * 1.15  # it need not be symmetric
    assert held / 400 > 0.93


def test_a_record_survives_json_with_an_infinite_error():
    one = Measured(status="wrong", reason="NaN", error=math.inf, tolerance=0.03, checked="here")
    assert record.from_json(record.to_json(one)) == one
    ok = Measured(status="ok", samples_ms=(1.0, 2.0, 4.0), device_kind="TPU v5 lite", seed=3)
    assert record.from_json(record.to_json(ok)) == ok
    assert ok.median_ms == 2.0
    assert ok.spread == pytest.approx(0.25, abs=0.5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"status": "lucky"}, "none of ok, wrong"),
        ({"status": "ok", "samples_ms": (1.0,), "timer": "sundial"}, "none of device_profile"),
        ({"status": "ok"}, "samples belong to status ok"),
        ({"status": "wrong", "reason": "x", "samples_ms": (1.0,)}, "samples belong to status ok"),
        ({"status": "failed"}, "a reason belongs"),
    ],
)
def test_an_impossible_record_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Measured(**fields)


class FakeMeasurer:
    """A `Measurer` over a `FakeDevice`, one call after the other."""

    def __init__(self, device):
        self.device, self.calls = device, []

    def measure(self, problem, candidates):
        self.calls.append(list(candidates))
        names = [candidate.json for candidate in candidates]
        found = time_on_device(self.device, names, effort=Effort(most=10), seed=len(self.calls))
        for candidate in candidates:
            samples = tuple(found[candidate.json])
            yield candidate, Measured(status="ok", samples_ms=samples, device_kind="fake")

    def close(self):
        return


def searched(times, *, batch, **device):
    """Everything measured in batches on a drifting clock, then the leaders confirmed."""
    candidates = [Candidate.of({"block": n}) for n in range(len(times))]
    named = {c.json: t for c, t in zip(candidates, times, strict=True)}
    measurer = FakeMeasurer(FakeDevice(named, **device))
    first = {}
    for start in range(0, len(candidates), batch):
        first |= dict(measurer.measure(None, candidates[start : start + batch]))
    again = confirm(measurer, None, first)
    best = [min(m, key=lambda c: m[c].median_ms) for m in (first, first | again)]
    return measurer, [candidates.index(b) for b in best]


def test_confirming_the_leaders_undoes_a_drift_over_the_whole_search():
    times = [100.0] * 11 + [95.0]
    measurer, (before, after) = searched(times, batch=2, drift=0.2, drift_runs=100, jitter_us=0.5)
    assert before != 11, "or the clock did not drift"
    assert after == 11
    assert all(len(call) <= 4 for call in measurer.calls)


def test_on_a_steady_clock_the_leaders_are_confirmed_once():
    measurer, (before, after) = searched([100.0, 90.0, 95.0, 97.0, 99.0, 120.0], batch=6)
    assert before == after == 1
    assert [len(call) for call in measurer.calls] == [6, 4]


def test_a_lone_winner_and_no_winner_need_no_confirming():
    alone = {Candidate.of({"b": 1}): Measured(status="ok", samples_ms=(1.0,))}
    assert confirm(FakeMeasurer(None), None, alone) == {}
    lost = {Candidate.of({"b": 1}): Measured(status="wrong", reason="off")}
    assert confirm(FakeMeasurer(None), None, lost) == {}


def test_a_leader_that_fails_when_timed_again_leads_no_more():
    class Failing(FakeMeasurer):
        def measure(self, problem, candidates):
            for candidate, found in super().measure(problem, candidates):
                first = candidate.config["block"] == 0
                yield candidate, Measured(status="crashed", reason="gone") if first else found

    candidates = [Candidate.of({"block": n}) for n in range(3)]
    device = FakeDevice({c.json: 10.0 + n for n, c in enumerate(candidates)})
    first = {c: Measured(status="ok", samples_ms=(10.0 + n,)) for n, c in enumerate(candidates)}
    again = confirm(Failing(device), None, first, top=2)
    assert again[candidates[0]].status == "crashed"
    assert again.keys() == set(candidates), "the third is timed beside the second"


def test_a_first_call_of_seconds_is_not_the_time_of_a_run():
    slept = iter([0.3])

    def run(array):
        time.sleep(next(slept, 0.001))

    clock = HostClock({EMPTY: lambda array: None, "a": run}, {"a": [(None,)]})
    found = time_on_host(clock, ["a"], effort=Effort(most=5), seed=0)
    assert 0.5 < statistics.median(found["a"]) < 50


def test_runs_take_the_sets_of_inputs_in_turn_each_program_on_its_own():
    taken = {"a": [], "b": []}
    runs = {name: taken[name].append for name in taken}
    clock = HostClock(runs, {name: [(1,), (2,), (3,)] for name in taken})
    clock.run(["a", "a", "b", "a", "b"])
    assert taken == {"a": [1, 2, 3, 1], "b": [1, 2, 3]}, "the first run of each is the warm-up"
