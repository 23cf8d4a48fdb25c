"""The order in which survivors are timed: predictions first, corrected by what was timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.measure.record import Measured
from autotune.problem import Problem
from autotune.progress import Quiet
from autotune.row import Row
from autotune.search import shared, storage
from autotune.search.crew import gathered
from autotune.search.evaluate import Judge, Judged
from autotune.search.fleet import Fleet, Identity, joined
from autotune.search.order import BATCH, TimingOrder, time_survivors
from autotune.search.space import Space
from autotune.search.study import Budget

PROBLEM = Problem(kernel="matmul", device="v6e", shape={"m": 1})
KIND = devices.get("v6e").kind


def judged(config: dict[str, Any], predicted_ms: float, **row: Any) -> Judged:
    candidate = Candidate.of(config, is_default=row.pop("is_default", False))
    made = Row(
        problem_key="k", kernel="matmul", device="v6e", problem="{}", config=candidate.json,
        status="ok", evidence="compiled", latency_compiled_ms=predicted_ms,
        is_default=candidate.is_default, **row,
    )  # fmt: skip
    return Judged(candidate=candidate, row=made)


def space(count: int = 6, steps: int = 10) -> list[Judged]:
    """(block, layout): larger blocks are predicted faster, and layouts alike. The default is 0."""
    return [
        judged({"block": b, "layout": l}, 2 - b / steps, is_default=(b, l) == (0, "a"))
        for b, l in itertools.product(range(count), "ab")
    ]


class Device:
    """Times candidates: twice their prediction, and layout b half as long again."""

    def __init__(self, survivors: Sequence[Judged]) -> None:
        self.predicted = {j.candidate: j.row.latency_compiled_ms or 0 for j in survivors}
        self.done: list[Candidate] = []

    def true_ms(self, candidate: Candidate) -> float | None:
        factor = 3.0 if candidate.config["layout"] == "b" else 2.0
        return factor * self.predicted[candidate]

    def __call__(
        self, batch: Sequence[Judged], out_of_time: Callable[[], bool]
    ) -> dict[Candidate, Row]:
        self.done += [j.candidate for j in batch]
        return {j.candidate: self.row(j) for j in reversed(batch)}

    def row(self, judged: Judged) -> Row:
        ms = self.true_ms(judged.candidate)
        if ms is None:
            return replace(judged.row, status="failed", reason="it hangs")
        return replace(judged.row, evidence="measured", latency_measured_ms=ms)


def test_the_default_and_the_predicted_best_are_timed_first() -> None:
    order = TimingOrder(space(), seed=0)
    first = [c.config for c in order.next({}, 2)]
    assert first[0] == {"block": 0, "layout": "a"}
    assert first[1]["block"] == 5


def test_what_was_timed_corrects_the_predictions_of_its_neighbours() -> None:
    survivors = space()
    device = Device(survivors)
    known = {
        j.candidate: device.true_ms(j.candidate)
        for j in survivors
        if j.candidate.config["block"] in (0, 1)
    }
    (after,) = TimingOrder(survivors, seed=0).next(known, 1)
    assert after.config == {"block": 5, "layout": "a"}, "layout b was slower than predicted"


def test_it_stops_when_no_prediction_with_its_band_can_win() -> None:
    exact = [replace(j, row=replace(j.row, latency_low_ms=0.99 * (j.row.latency_compiled_ms or 0)))
             for j in space(20, 40)]  # fmt: skip
    narrow, wide = Device(exact), Device(space(20, 40))
    for device, survivors in ((narrow, exact), (wide, space(20, 40))):
        rows = time_survivors(survivors, device, budget=Budget(trials=99), seed=0)
        best = min(row.latency_measured_ms or 99 for row in rows.values())
        assert best == pytest.approx(2 * (2 - 19 / 40))
    assert len(narrow.done) < len(wide.done) < 40, "a wider band leaves more to be tried"
    assert len(narrow.done) <= 2 * BATCH


def test_the_budget_counts_distinct_candidates_and_none_is_timed_twice() -> None:
    device = Device(space())
    rows = time_survivors(space(), device, budget=Budget(trials=7), seed=0)
    assert len(rows) == len(device.done) == len(set(device.done)) == 7


def test_the_same_seed_times_the_same_candidates_in_the_same_order() -> None:
    runs = []
    for _ in range(2):
        device = Device(space(10))
        time_survivors(space(10), device, budget=Budget(trials=16), seed=3)
        runs.append(device.done)
    assert runs[0] == runs[1]


def test_a_failure_neither_wins_nor_ends_the_search() -> None:
    class Failing(Device):
        def true_ms(self, candidate: Candidate) -> float | None:
            return None if candidate.config["block"] in (0, 5) else super().true_ms(candidate)

    device = Failing(space())
    rows = time_survivors(space(), device, budget=Budget(trials=99), seed=0)
    best = min(
        (r for r in rows.values() if r.status == "ok"), key=lambda r: r.latency_measured_ms or 9
    )
    assert '"block": 4' in best.config


def test_without_predictions_that_differ_all_are_timed() -> None:
    survivors = [judged({"act": name}, 1.0) for name in ("x", "y", "z")]
    order = TimingOrder(survivors, seed=0)
    assert len(order.next({}, 9)) == 3
    one = TimingOrder([judged({}, 1.0)], seed=0)
    assert len(one.next({}, 4)) == 1, "a kernel without tunables has one candidate"


class Stopwatch:
    """A `Measurer` whose clock slows down with each call."""

    def __init__(self) -> None:
        self.calls: list[list[Candidate]] = []

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        self.calls.append(list(candidates))
        drift = 1 + len(self.calls) / 20
        for candidate in candidates:
            ms = drift * (2 - int(candidate.config["block"] or 0) / 100)
            yield candidate, Measured(status="ok", samples_ms=(ms,), device_kind=KIND)

    def close(self) -> None:
        return


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with closing(storage.opened(f"sqlite:///{tmp_path}/s.db")) as opened, joined(opened) as fleet:
        yield fleet


def timing(fleet: Fleet, measurer: Stopwatch | None) -> shared.Timing:
    stages: Any = SimpleNamespace(progress=Quiet(), fresh=False)
    judge = Judge(problem=PROBLEM, device=devices.get("v6e"), flops=1, kernel_fingerprint="f")
    return shared.Timing(
        stages, judge, Space(legal=tuple(j.candidate for j in space(4))), space(4), trials=8,
        fleet=fleet, measurer=measurer, source="device_profile",
    )  # fmt: skip


def test_leaders_are_timed_once_more_side_by_side_and_once_in_a_fleet(fleet: Fleet) -> None:
    watch, second = Stopwatch(), Stopwatch()
    rows: list[dict[Candidate, Row]] = []
    for measurer in (watch, second):
        with timing(fleet, measurer) as evaluate:
            found = time_survivors(space(4), evaluate, budget=Budget(trials=8), seed=0)
            confirmed = evaluate.confirmed()
            rows.append({**found, **confirmed})
    assert len(watch.calls[-1]) == 4
    assert len(watch.calls) > 2
    assert not second.calls, "another sweep takes both from the storage"
    assert rows[0] == rows[1]
    best = min(rows[0].values(), key=lambda row: row.latency_measured_ms or 9)
    assert '"block": 3' in best.config, "drift made the first ones look fast"


def test_a_host_that_cannot_time_takes_what_there_is_and_waits_for_no_one(fleet: Fleet) -> None:
    with timing(fleet, None) as evaluate:
        assert not time_survivors(space(4), evaluate, budget=Budget(trials=8), seed=0)
        assert not evaluate.confirmed()
    with timing(fleet, Stopwatch()) as evaluate:
        time_survivors(space(4), evaluate, budget=Budget(trials=8), seed=0)
    with timing(fleet, None) as evaluate:
        assert time_survivors(space(4), evaluate, budget=Budget(trials=8), seed=0)


def test_a_sweep_resumed_with_more_trials_times_only_the_new_ones(fleet: Fleet) -> None:
    first, second = Stopwatch(), Stopwatch()
    for watch, trials in ((first, 5), (second, 8)):
        with timing(fleet, watch) as evaluate:
            rows = time_survivors(space(4), evaluate, budget=Budget(trials=trials), seed=0)
    timed = [c for watch in (first, second) for call in watch.calls for c in call]
    assert len(timed) == len(set(timed)) == len(rows) == 8


def test_another_way_of_timing_times_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch()
    for method in (1, 1, 2):
        monkeypatch.setattr("autotune.measure.record.METHOD", method)
        with timing(fleet, watch) as evaluate:
            evaluate(space(4)[:2], lambda: False)
    assert [len(call) for call in watch.calls] == [2, 2], "once for each method"


def test_hosts_that_time_take_their_part_of_a_batch(fleet: Fleet) -> None:
    fleet.measures([PROBLEM.key])
    other = Fleet(fleet.storage, identity=Identity(host="another", pid=1, started=0.0))
    other.measures([PROBLEM.key])
    watch = Stopwatch()
    with timing(fleet, watch) as evaluate:
        evaluate(space(4)[:4], lambda: False)
    assert [len(call) for call in watch.calls] == [2, 2]
    other.leave()


def test_only_problems_of_the_attached_device_are_timed(tmp_path: Path) -> None:
    with gathered(
        storage_url=None, results=tmp_path / "results", replay=None, attached=devices.get("v6e"),
        timer="host", seed=0, timeout_s=1.0,
    ) as crew:  # fmt: skip
        assert crew.times
        assert crew.source == "host_clock"
        assert crew.measurer(PROBLEM) is not None
        assert crew.measurer(replace(PROBLEM, device="tpu7x")) is None
        assert (tmp_path / "results" / "studies.db").exists()
    with gathered(
        storage_url=None, results=tmp_path / "none", replay=None, attached=None,
        timer="device", seed=0, timeout_s=1.0,
    ) as crew:  # fmt: skip
        assert not crew.times
    assert not (tmp_path / "none").exists(), "nothing to time, nothing to write"
