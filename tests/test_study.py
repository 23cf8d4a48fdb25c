"""The search over survivors: exhaustive where it can be, seeded, never wasteful."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from autotune.candidate import Candidate
from autotune.row import Row
from autotune.search.evaluate import Judged
from autotune.search.study import BATCH, Budget, explore


def judged(config: dict[str, object], model_ms: float, *, is_default: bool = False) -> Judged:
    candidate = Candidate.of(config, is_default=is_default)  # type: ignore[arg-type]
    row = Row(
        problem_key="k", kernel="matmul", device="v6e", problem="{}", config=candidate.json,
        status="ok", latency_model_ms=model_ms, is_default=is_default,
    )  # fmt: skip
    return Judged(candidate=candidate, row=row)


def space(sizes: Sequence[int]) -> list[Judged]:
    """Every (bm, bn, buffers); the model thinks larger blocks faster."""
    return [
        judged(
            {"bm": m, "bn": n, "buffers": b}, 100 / (m + n), is_default=(m, n, b) == (1, 1, None)
        )
        for m, n, b in itertools.product(sizes, sizes, (None, 3))
    ]


class Evaluations:
    """Counts what is evaluated; the true best is bm 6, bn 3, buffers 3."""

    def __init__(self, status: Callable[[dict[str, object]], str] = lambda config: "ok") -> None:
        self.done: list[Candidate] = []
        self._status = status

    def __call__(
        self, batch: Sequence[Judged], out_of_time: Callable[[], bool]
    ) -> dict[Candidate, Row]:
        self.done += [j.candidate for j in batch]
        return {j.candidate: self._row(j) for j in self.finish(batch)}

    def finish(self, batch: Sequence[Judged]) -> list[Judged]:
        """The order in which workers finish."""
        return list(reversed(batch))

    def _row(self, judged: Judged) -> Row:
        config = judged.candidate.config
        status = self._status(config)
        if status != "ok":
            return replace(judged.row, status=status, reason="the compiler says so")
        latency = 1 + abs(config["bm"] - 6) + abs(config["bn"] - 3) + (config["buffers"] is None)
        return replace(judged.row, evidence="compiled", latency_compiled_ms=latency)


def test_a_space_within_the_budget_is_exhausted_once_each() -> None:
    evaluations = Evaluations()
    rows = explore(space(range(1, 4)), evaluations, budget=Budget(trials=40), seed=0)
    assert len(rows) == len(evaluations.done) == 18, "the budget counts distinct configs (O9)"


def test_a_larger_space_stays_within_the_budget_and_repeats_nothing() -> None:
    evaluations = Evaluations()
    explore(space(range(1, 11)), evaluations, budget=Budget(trials=40), seed=0)
    assert len(evaluations.done) == len(set(evaluations.done)) == 40


def test_the_default_is_always_evaluated_and_the_models_best_come_first() -> None:
    evaluations = Evaluations()
    explore(space(range(1, 11)), evaluations, budget=Budget(trials=10), seed=0)
    assert evaluations.done[0] == Candidate.of({"bm": 1, "bn": 1, "buffers": None})
    assert [c.config["bm"] for c in evaluations.done[1:3]] == [10, 10]


def test_of_candidates_the_model_cannot_tell_apart_one_comes_first() -> None:
    evaluations = Evaluations()
    explore(space(range(1, 11)), evaluations, budget=Budget(trials=12), seed=0)
    first = [c.config for c in evaluations.done[:6]]
    assert all(c["buffers"] is None for c in first), "twins differ in buffers only; null is plain"


def test_tpe_finds_what_the_model_would_not_have_tried() -> None:
    survivors = space(range(1, 11))
    by_model = sorted(j.row.latency_model_ms or 0 for j in survivors)[:60]
    evaluations = Evaluations()
    rows = explore(survivors, evaluations, budget=Budget(trials=60), seed=0)
    best = min(r.latency_compiled_ms or 99 for r in rows.values())
    model_only = min(
        evaluations._row(j).latency_compiled_ms or 99
        for j in survivors
        if (j.row.latency_model_ms or 0) in by_model
    )
    assert best < model_only


def test_the_same_seed_gives_the_same_candidates_in_the_same_order() -> None:
    first, second, other = Evaluations(), Evaluations(), Evaluations()
    for evaluations, seed in ((first, 7), (second, 7), (other, 8)):
        explore(space(range(1, 11)), evaluations, budget=Budget(trials=40), seed=seed)
    assert first.done == second.done
    assert first.done != other.done


def test_the_order_in_which_workers_finish_changes_nothing() -> None:
    class Shuffled(Evaluations):
        def finish(self, batch: Sequence[Judged]) -> list[Judged]:
            return sorted(batch, key=lambda j: hash(j.candidate.json[::-1]))

    class InOrder(Evaluations):
        def finish(self, batch: Sequence[Judged]) -> list[Judged]:
            return list(batch)

    first, second = Shuffled(), InOrder()
    for evaluations in (first, second):
        explore(space(range(1, 15)), evaluations, budget=Budget(trials=64), seed=0)
    assert first.done == second.done


def test_failures_never_win_and_never_stop_the_search() -> None:
    evaluations = Evaluations(lambda c: "oom" if c["bm"] > 3 else "ok")
    rows = explore(space(range(1, 11)), evaluations, budget=Budget(trials=40), seed=0)
    assert len(rows) == 40
    assert any(r.status == "ok" for r in rows.values())


def test_all_failing_candidates_end_the_search_without_a_winner() -> None:
    evaluations = Evaluations(lambda c: "crashed")
    rows = explore(space(range(1, 11)), evaluations, budget=Budget(trials=30), seed=0)
    assert {r.status for r in rows.values()} == {"crashed"}
    assert 30 <= len(rows) <= 30 + BATCH


def test_a_refused_default_does_not_use_up_a_budget_of_one() -> None:
    evaluations = Evaluations(lambda c: "unsupported" if c["bm"] == 1 else "ok")
    rows = explore(space(range(1, 11)), evaluations, budget=Budget(trials=1), seed=0)
    assert [r.status for r in rows.values()] == ["unsupported", "ok"]


@pytest.mark.parametrize("refused", [2, 5, 200])
def test_refused_candidates_do_not_leave_the_default_as_the_only_one(refused: int) -> None:
    statuses = iter(["ok", *["oom"] * refused])
    evaluations = Evaluations(lambda c: next(statuses, "ok"))
    rows = explore(space(range(1, 11)), evaluations, budget=Budget(trials=3), seed=0)
    tried = ["ok", *["oom"] * refused, "ok"][: 3 + BATCH]
    assert [r.status for r in rows.values()] == tried


def test_a_budget_of_one_is_the_default_alone() -> None:
    evaluations = Evaluations()
    explore(space(range(1, 11)), evaluations, budget=Budget(trials=1), seed=0)
    assert [c.config["bm"] for c in evaluations.done] == [1]


def test_no_survivors_means_no_evaluation() -> None:
    evaluations = Evaluations()
    assert explore([], evaluations, budget=Budget(trials=30), seed=0) == {}
    assert not evaluations.done


def test_spent_seconds_end_the_search_but_never_before_the_default() -> None:
    evaluations = Evaluations()
    explore(space(range(1, 11)), evaluations, budget=Budget(trials=99, seconds=1e-9), seed=0)
    assert evaluations.done == [Candidate.of({"bm": 1, "bn": 1, "buffers": None})]


def test_what_was_not_begun_in_time_has_no_row() -> None:
    class Slow(Evaluations):
        def __call__(
            self, batch: Sequence[Judged], out_of_time: Callable[[], bool]
        ) -> dict[Candidate, Row]:
            return super().__call__(batch[:2], out_of_time)

    rows = explore(space(range(1, 4)), Slow(), budget=Budget(trials=40), seed=0)
    assert 0 < len(rows) < 18


@pytest.mark.parametrize("config", [{"a": True}, {"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": None}])
def test_values_that_python_confuses_are_different_candidates(config: dict[str, object]) -> None:
    others = [{"a": True}, {"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": None}]
    others = [o for o in others if repr(o) != repr(config)]
    assert Candidate.of(config) not in {Candidate.of(o) for o in others}  # type: ignore[arg-type]


def test_numpy_integers_are_plain_and_tuples_are_refused() -> None:
    import numpy as np

    assert Candidate.of({"bm": np.int64(128)}) == Candidate.of({"bm": 128})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"config entry bm=\(1, 2\) is not a scalar"):
        Candidate.of({"bm": (1, 2)})  # type: ignore[dict-item]
