"""What the gate makes of a checked output, what it accepts as the baseline, and how it ends."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boards import MATMUL_TILE, problem, row, store, store_matmul
from test_cli import call

from autotune import board_file, cli, gate, leaderboard, stored
from autotune.candidate import Candidate
from autotune.errors import InputError
from autotune.gate import run
from autotune.gate.case import Case
from autotune.gate.request import Request
from autotune.gate.verdict import Finding, Verdict
from autotune.kernels import base
from autotune.leaderboard import Board
from autotune.measure.check import Checked, judge
from autotune.progress import Quiet
from autotune.row import Row

DEFAULT = {**MATMUL_TILE, "bm": 128, "bk": 128, "bn": 128}


def case(board: Board, *, today_ms: float = 1.0, default_ms: float = 3.0, **found: Any) -> Case:
    """A board whose best and default were evaluated today, all but the output checked."""
    assert board.best is not None
    assert board.default is not None
    finding = Finding(**{"outcome": "pass", "reason": "+0.0%", "today_ms": today_ms, **found})
    kernel, about = stored.problem_of(board.best)
    made = Case(board=board, best=board.best, kernel=kernel, problem=about, finding=finding)
    for was, ms in ((board.best, today_ms), (board.default, default_ms)):
        made.rows[stored.candidate_of(was)] = replace(was, latency_compiled_ms=ms)
    return made


def checked(status: str, tolerance: float | None = 0.03) -> Checked:
    reason = None if status == "ok" else "because"
    return Checked(status=status, reason=reason, tolerance=tolerance, how="at m=256 interpreted")


def closed(made: Case, **request: Any) -> Verdict:
    return run._closed(made, Request(against="compile", **request), Quiet())


@pytest.mark.parametrize(
    ("found", "output", "outcome"),
    [
        (checked("ok"), "ok", "pass"),
        (checked("ok", None), "unchecked", "pass"),
        (checked("wrong"), "wrong", "regression"),
        (checked("wrong", None), "wrong", "regression"),
        (checked("failed", None), "failed", "inconclusive"),
        (checked("timeout", None), "failed", "inconclusive"),
        (checked("crashed", None), "failed", "inconclusive"),
        (checked("oom", None), "failed", "inconclusive"),
        (checked("unsupported", None), "failed", "inconclusive"),
    ],
    ids=lambda value: value.status if isinstance(value, Checked) else value,
)
def test_only_a_compared_output_or_a_kernel_that_cannot_be_compared_passes(
    found: Checked, output: str, outcome: str, tmp_path: Path
) -> None:
    made = case(store_matmul(tmp_path, 1024, 1024, 1024), today_ms=1.01)
    before = made.board.path.read_bytes()
    made.take(found)
    seen = closed(made, update=True)
    assert (seen.output, seen.outcome) == (output, outcome)
    assert seen.updated == (outcome == "pass")
    assert (made.board.path.read_bytes() == before) == (outcome != "pass")
    if output == "failed":
        assert seen.reason.startswith(f"output not checked: {found.status}: because; +0.0%")
        assert seen.reason.endswith("not updated: no baseline may be unchecked")


def test_a_check_that_was_lost_leaves_a_regression_one(tmp_path: Path) -> None:
    made = case(store_matmul(tmp_path, 1024, 1024, 1024), outcome="regression", reason="+9.0%")
    made.take(checked("crashed", None))
    seen = closed(made)
    assert (seen.outcome, seen.reason, seen.output) == ("regression", "+9.0%", "failed")
    assert seen.checked == "output not checked: crashed: because"


def test_an_update_never_makes_another_config_the_best(tmp_path: Path) -> None:
    board = store_matmul(tmp_path, 1024, 1024, 1024)
    before = board.path.read_bytes()
    made = case(board, today_ms=1.5, default_ms=1.2, outcome="regression", reason="+50.0%")
    made.take(checked("ok"))
    seen = closed(made, update=True)
    assert (seen.outcome, seen.updated) == ("regression", False)
    assert f"{Candidate.of(DEFAULT).json} would be the best, not" in seen.reason
    assert board.path.read_bytes() == before
    made = case(board, today_ms=1.5, default_ms=1.6, outcome="regression", reason="+50.0%")
    made.take(checked("ok"))
    assert closed(made, update=True).updated
    now = leaderboard.read(board.path)
    assert now.best is not None
    assert board.best is not None
    assert (now.best.config, now.best.latency_ms) == (board.best.config, 1.5)


def test_an_update_that_is_refused_is_no_pass(tmp_path: Path) -> None:
    made = case(store_matmul(tmp_path, 1024, 1024, 1024), default_ms=0.5)
    made.take(checked("ok"))
    assert closed(made, update=True).outcome == "inconclusive"


@pytest.mark.parametrize(("count", "told"), [(5, "a baseline needs at least 6 samples"), (6, None)])
def test_an_update_takes_no_times_that_could_never_be_compared(
    count: int, told: str | None, tmp_path: Path
) -> None:
    made = case(store_matmul(tmp_path, 1024, 1024, 1024))
    times = {"evidence": "measured", "latency_measured_ms": 1.0, "samples_ms": [1.0] * count}
    made.rows = {key: replace(was, **times) for key, was in made.rows.items()}
    assert made.refusal(Request(against="measure")) == told


class Wrong:
    """A checker that finds every output wrong."""

    def check(self, problem: Any, config: Any) -> Checked:
        return checked("wrong")

    def stop(self) -> None:
        return

    def close(self) -> None:
        return


def test_an_output_is_checked_before_a_baseline_of_the_model_is_replaced(tmp_path: Path) -> None:
    kernel = base.load("matmul")
    shape = {"m": 256, "k": 256, "n": 256}
    about = base.make_problem(kernel, device="v6e", shape=shape)
    board = store(tmp_path, row(about, DEFAULT, 1.0, evidence="model", is_default=True))
    before = board.path.read_bytes()
    asked = Request(against="model", update=True, checker=Wrong)
    (seen,) = gate.check(tmp_path, asked, jobs=1, progress=Quiet())
    assert (seen.outcome, seen.output, seen.updated) == ("regression", "wrong", False)
    assert board.path.read_bytes() == before


@pytest.mark.parametrize(
    ("today", "found", "told"),
    [
        (0.7, checked("ok"), True),
        (0.7, checked("wrong"), False),
        (0.7, checked("failed", None), False),
    ],
    ids=["ok", "wrong", "failed"],
)
def test_only_a_pass_is_told_to_refresh_its_baseline(
    today: float, found: Checked, told: bool, tmp_path: Path
) -> None:
    board = store_matmul(tmp_path, 1024, 1024, 1024, cycles=1000)
    slower = case(board, today_ms=today)
    slower.finding, request = None, Request(against="compile")
    slower.compare(request)
    slower.take(found)
    seen = slower.verdict(request)
    assert ("far faster than the baseline: refresh baseline with --update" in seen.reason) == told
    assert "refresh" not in slower.verdict(request, updated=True).reason


def test_more_cycles_at_less_time_are_a_regression_that_is_not_told_to_refresh(
    tmp_path: Path,
) -> None:
    made = case(store_matmul(tmp_path, 1024, 1024, 1024, cycles=1000), today_ms=0.7)
    key = made.candidate
    made.rows[key] = replace(made.rows[key], cycles=1100)
    made.compare(Request(against="compile"))
    seen = closed(made)
    assert (seen.outcome, "refresh" in seen.reason) == ("regression", False)


def verdict(name: str, **fields: Any) -> Verdict:
    made: dict[str, Any] = {"problem": name, "device": "v5e", "outcome": "pass", "reason": "+0.0%"}
    return Verdict(**{**made, **fields})


def test_boards_that_would_print_alike_are_told_apart() -> None:
    found = [
        verdict("output", shape={"m": 1, "n": 2}, problem_key="a", path="a.parquet"),
        verdict("output", shape={"m": 2, "n": 2}, problem_key="b", path="b.parquet"),
        verdict("output", device="v6e", shape={"m": 1, "n": 2}, problem_key="a", path="c.parquet"),
        verdict("down", shape={"m": 1}, problem_key="d", path="d.parquet"),
        verdict("down", shape={"m": 1}, problem_key="e", path="e.parquet"),
        verdict("up", shape={"m": 1}, problem_key="f", path="x/f.parquet"),
        verdict("up", shape={"m": 1}, problem_key="f", path="y/f.parquet"),
    ]
    table, notes = io.StringIO(), io.StringIO()
    gate.write_table(found, table)
    names = [
        line.split(":")[0].removeprefix("pass").strip() for line in table.getvalue().split("\n")
    ]
    assert names[:7] == [
        "output on v5e (m=1 n=2)", "output on v5e (m=2 n=2)", "output on v6e",
        "down on v5e (d)", "down on v5e (e)",
        "up on v5e (x/f.parquet)", "up on v5e (y/f.parquet)",
    ]  # fmt: skip
    gate.annotate([replace(v, outcome="regression") for v in found], notes)
    assert "regression::output on v5e (m=1 n=2): +0.0%25\n" in notes.getvalue()


def test_json_says_which_board_a_verdict_is_of_and_whether_its_output_was_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = store_matmul(tmp_path, 1024, 512, 256)
    damaged = tmp_path / "a.parquet"
    damaged.write_bytes(b"PAR1 cut short")
    unranked = replace(problem("matmul", {"m": 8, "k": 8, "n": 8}), name="unranked")
    none = store(tmp_path, row(unranked, DEFAULT, None, status="oom", reason="VMEM"))
    _, out, _ = call(capsys, "gate", str(tmp_path), "--against", "model", "--format", "json")
    told = {v["path"]: v for v in json.loads(out)["verdicts"]}
    assert set(told) == {str(board.path), str(damaged), str(none.path)}
    of_board = told[str(board.path)]
    assert of_board["problem_key"] == board.rows[0].problem_key
    assert of_board["shape"] == {"m": 1024, "k": 512, "n": 256}
    assert {v["output"] for v in told.values()} == {"unchecked"}
    assert told[str(none.path)]["shape"] == {"m": 8, "k": 8, "n": 8}


def test_a_fault_of_autotunes_own_is_inconclusive_and_no_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("unforeseen")

    monkeypatch.setattr(gate, "check", broken)
    status, out, err = call(capsys, "gate", str(tmp_path))
    assert (status, out) == (3, "")
    assert err.startswith("Traceback")
    assert err.endswith("TypeError: unforeseen\n")


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
def test_a_charset_without_an_arrow_is_no_regression(
    charset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = verdict("up", outcome="pass", reason="1.0 ms → 1.0 ms")
    monkeypatch.setattr(gate, "check", lambda *_, **__: [slower])
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=charset)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as ended:
        cli.app(["gate", str(tmp_path)])
    assert ended.value.code == 0
    assert b"pass          up on v5e: 1.0 ms ? 1.0 ms\n" in stdout.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_merge_that_would_rank_another_config_first_writes_nothing(tmp_path: Path) -> None:
    board = store_matmul(tmp_path, 1024, 1024, 1024)
    assert board.best is not None
    assert board.default is not None
    before = board.path.read_bytes()
    rows: list[Row] = [replace(board.default, latency_compiled_ms=0.5)]
    with pytest.raises(InputError, match="would be the best, not"):
        leaderboard.merge(board.path, rows, flop_convention="", best=board.best.config)
    assert board.path.read_bytes() == before


def test_a_line_says_once_how_the_output_was_checked(tmp_path: Path) -> None:
    made = case(store_matmul(tmp_path, 1024, 1024, 1024))
    made.take(judge([np.ones(3)], [np.zeros(3)], 0.03, how="at m=256 interpreted"))
    table = io.StringIO()
    gate.write_table([closed(made)], table)
    assert "wrong output: the output is " in table.getvalue()
    assert table.getvalue().count("at m=256 interpreted") == 1


def test_a_board_whose_best_is_not_its_first_is_damaged_and_nothing_is_compared(
    tmp_path: Path,
) -> None:
    board = store_matmul(tmp_path, 1024, 1024, 1024)
    rows = [replace(r, is_best=not r.is_best) for r in board.rows]
    board_file.write(replace(board, rows=tuple(rows)))
    (seen,) = gate.check(tmp_path, Request(against="model"), jobs=1, progress=Quiet())
    assert (seen.outcome, seen.path) == ("inconclusive", str(board.path))
    assert seen.reason.startswith("damaged baseline: ")
    assert "contradicts itself" in seen.reason


@pytest.mark.parametrize("name", ["cycles", "executions", "spill_loads"])
def test_a_board_that_counts_in_words_is_damaged(name: str, tmp_path: Path) -> None:
    counts = {"cycles": 1000, "executions": None, "spill_loads": 3, name: "many"}
    store_matmul(tmp_path, 1024, 1024, 1024, cycles=1000, scopes=json.dumps({"step": counts}))
    (seen,) = gate.check(tmp_path, Request(against="compile"), jobs=1, progress=Quiet())
    assert seen.outcome == "inconclusive"
    assert seen.reason.startswith("damaged baseline: ")
    assert f"scopes has {name} = many" in seen.reason


def test_a_line_says_that_a_compared_output_was_right(tmp_path: Path) -> None:
    board = store_matmul(tmp_path, 1024, 1024, 1024)
    lines = []
    for found in (checked("ok"), checked("ok", None)):
        made, table = case(board), io.StringIO()
        made.take(found)
        gate.write_table([closed(made)], table)
        lines.append(table.getvalue().split("\n")[0])
    assert lines[0].endswith("+0.0%; output right, at m=256 interpreted")
    assert lines[1].endswith("+0.0%; at m=256 interpreted"), "nothing was compared"


def test_what_changed_since_is_said_without_the_key_again(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"libtpu_version": "0.0.41"}
    made = case(store_matmul(tmp_path, 1024, 1024, 1024, **columns))
    table, file = io.StringIO(), io.StringIO()
    gate.write_table([closed(made)], table)
    gate.write_json([closed(made)], file)
    assert "; baseline stale: libtpu 0.0.41 → " in table.getvalue()
    (seen,) = json.loads(file.getvalue())["verdicts"]
    assert seen["stale"].startswith("libtpu 0.0.41 → ")


def test_json_has_no_word_for_what_is_no_number() -> None:
    file = io.StringIO()
    gate.write_json([verdict("up", baseline_ms=1.5, today_ms=float("nan"))], file)
    (seen,) = json.loads(file.getvalue(), parse_constant=pytest.fail)["verdicts"]
    assert (seen["baseline_ms"], seen["today_ms"]) == (1.5, None)


HOSTILE = "a\n::error title=x::pwned \x1b[31m.parquet"


def test_no_name_of_a_file_makes_a_line_or_reaches_the_terminal_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (tmp_path / HOSTILE).write_bytes(b"PAR1 cut short")
    board = store_matmul(tmp_path, 1024, 1024, 1024)
    for name in (HOSTILE, "b.parquet"):  # two that only their paths tell apart
        folder = tmp_path / "x" / name.removesuffix(".parquet")
        folder.mkdir(parents=True)
        (folder / "b.parquet").write_bytes(board.path.read_bytes())
    for command in (["gate", "--against", "model"], ["report"]):
        _, out, err = call(capsys, *command, str(tmp_path))
        assert "\x1b" not in out + err
        commands = [line for line in (out + err).splitlines() if line.startswith("::")]
        assert all(line.startswith("::warning title=autotune gate") for line in commands)
        assert "a ::error title=x::pwned [31m.parquet: " in out + err
    assert commands == []


def test_a_path_with_a_colon_in_it_is_kept_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "col: on"
    folder.mkdir()
    (folder / "a: b.parquet").write_bytes(b"PAR1 cut short")
    status, out, _ = call(capsys, "gate", str(tmp_path), "--format", "json")
    (seen,) = json.loads(out)["verdicts"]
    assert (status, seen["path"], seen["problem"]) == (3, *[str(folder / "a: b.parquet")] * 2)
    assert seen["reason"].startswith("damaged baseline: not a readable leaderboard (")


def test_the_help_says_what_it_compiles_and_how_to_narrow_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = call(capsys, "gate", "--help")
    told = " ".join(out.replace("│", " ").split())
    assert "Every best below BASELINE is compiled anew" in told
    assert "To narrow it, give a folder or file." in told
    assert "a regression needs half of it at least, and significance" in told
