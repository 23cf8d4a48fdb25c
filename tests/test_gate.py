"""The gate: what is a regression, what is inconclusive, and what is written and said."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from boards import MATMUL_TILE, row, store
from test_cli import call

from autotune import gate, leaderboard
from autotune.candidate import Candidate
from autotune.child import StoppedError
from autotune.errors import InputError
from autotune.gate import checkers, compiled, measured
from autotune.gate.verdict import Finding, Verdict
from autotune.kernels import base
from autotune.leaderboard import Board
from autotune.measure.check import Checked
from autotune.measure.record import METHOD, Measured
from autotune.measure.replay import COLUMNS
from autotune.problem import Problem
from autotune.progress import Quiet
from autotune.row import Row

SHAPE = {"m": 256, "k": 256, "n": 256}
BEST = {**MATMUL_TILE, "bm": 256, "bk": 256, "bn": 256}
DEFAULT = {**MATMUL_TILE, "bm": 128, "bk": 128, "bn": 128}


def matmul(device: str = "v6e") -> Problem:
    return base.make_problem(base.load("matmul"), device=device, shape=SHAPE, name="small")


def scopes(spills: int, *, step: str = "step") -> str:
    use = {"cycles": 1000, "executions": 16, "spill_loads": spills, "spill_stores": 0}
    return json.dumps({
        "(pipeline)": {**use, "cycles": 9999, "spill_loads": 500},
        "init": {**use, "executions": 1, "spill_loads": 70},
        step: use,
    })  # fmt: skip


def stored(latency_ms: float = 1.0, **columns: Any) -> Row:
    made: dict[str, Any] = {"cycles": 1000, "scopes": scopes(0), "method_fingerprint": "m1"}
    return row(matmul(), BEST, latency_ms, **(made | columns))


def compared(before: Row, today: Row) -> Finding:
    return compiled.compare(before, today, evidence="compiled", tolerance=0.02)


@pytest.mark.parametrize(
    ("today", "outcome", "told"),
    [
        (stored(), "pass", "1.000 ms → 1.000 ms compiled (+0.0%, tolerance 2.0%)"),
        (stored(1.019), "pass", "+1.9%"),
        (stored(1.03), "regression", "+3.0%"),
        (stored(cycles=1050), "regression", "1000 → 1050 cycles (+5.0%)"),
        (stored(scopes=scopes(1)), "regression", "new spills in the steady step (step): 0 → 1"),
        (stored(status="oom", reason="needs 40 MiB"), "regression", "oom: needs 40 MiB"),
        (stored(status="pruned", reason="VMEM"), "regression", "pruned: VMEM"),
        (stored(status="unsupported", reason="no"), "regression", "unsupported: no"),
        (stored(status="timeout", reason="60 s"), "inconclusive", "timeout: 60 s"),
        (stored(status="crashed", reason="gone"), "inconclusive", "crashed: gone"),
        (stored(0.7), "pass", "-30.0%"),
        (stored(1.2, method_fingerprint="m2"), "inconclusive", "models or the compiler flags"),
        (stored(1.0, method_fingerprint="m2"), "pass", "+0.0%"),
        (stored(float("nan")), "regression", "nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_compiled_anew_is_judged_by_fit_latency_cycles_and_spills(
    today: Row, outcome: str, told: str
) -> None:
    found = compared(stored(), today)
    assert found.outcome == outcome
    assert told in found.reason


UPGRADED = {"libtpu_version": "0.0.99"}
OTHER_METHOD = [
    ({"scopes": scopes(9)}, "inconclusive", "regression", "new spills"),
    ({"status": "oom", "reason": "too big"}, "inconclusive", "regression", "oom: too big"),
    ({"status": "failed", "reason": "no"}, "inconclusive", "regression", "failed: no"),
    ({"status": "pruned", "reason": "VMEM"}, "inconclusive", "inconclusive", "pruned: VMEM"),
    ({"cycles": 1100}, "inconclusive", "inconclusive", "(+10.0%)"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "same", "upgraded", "told"), OTHER_METHOD)
def test_by_other_models_only_another_kernel_or_compiler_can_not_fit_or_spill(
    columns: dict[str, Any], same: str, upgraded: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    today = stored(**columns, method_fingerprint="m2")
    found = compared(stored(), today)
    assert (found.outcome, told in found.reason) == (same, True)
    assert found.reason.endswith(
        "autotune's models or the compiler flags changed since, so the two do not compare"
    )
    for change in (UPGRADED, {"jax_version": "9"}, {"kernel_fingerprint": "edited"}):
        assert compared(stored(), replace(today, **change)).outcome == upgraded, change
    assert compared(stored(), replace(today, method_fingerprint="m1")).outcome == "regression"


@pytest.mark.parametrize("columns", [case[0] for case in OTHER_METHOD])
def test_flags_that_may_be_others_than_the_baselines_make_nothing_a_regression(
    columns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
    today = stored(**columns, method_fingerprint="m2", **UPGRADED)
    found = compared(stored(), today)
    assert found.outcome == "inconclusive"
    assert "or the compiler flags (today in LIBTPU_INIT_ARGS) changed since" in found.reason
    alike = replace(today, method_fingerprint="m1")
    assert compared(stored(), alike).outcome == "regression", "the flags are the baseline's"


@pytest.mark.parametrize(("latency_ms", "faster"), [(0.99, False), (0.97, True)])
def test_faster_is_what_exceeds_the_tolerance(latency_ms: float, faster: bool) -> None:
    found = compared(stored(), stored(latency_ms))
    assert (found.outcome, found.faster) == ("pass", faster)


def test_spills_are_new_beyond_the_tolerance_and_where_the_step_was_renamed() -> None:
    before = stored(scopes=scopes(100))
    assert compared(before, stored(scopes=scopes(102))).outcome == "pass"
    assert compared(before, stored(scopes=scopes(103))).outcome == "regression"
    renamed = compared(before, stored(scopes=scopes(200, step="masked_step")))
    assert "(step): 100 → 200" in renamed.reason
    assert compared(stored(scopes=None), stored(scopes=scopes(9))).outcome == "pass"


def test_model_evidence_has_no_cycles_to_compare() -> None:
    before, today = (row(matmul(), BEST, ms, evidence="model") for ms in (1.0, 1.5))
    found = compiled.compare(before, today, evidence="model", tolerance=0.02)
    assert (found.outcome, "cycles" in found.reason) == ("regression", False)


def times(ms: float, *, seed: int = 0, count: int = 20) -> list[float]:
    random = np.random.default_rng(seed)
    return (ms * np.exp(random.normal(0.0, 0.002, count))).tolist()  # type: ignore[no-any-return]


def timed(
    config: dict[str, Any],
    ms: float,
    *,
    seed: int = 0,
    about: Problem | None = None,
    **columns: Any,
) -> Row:
    made: dict[str, Any] = {
        "evidence": "measured", "samples_ms": times(ms, seed=seed), "timer": "device_profile",
        "latency_compiled_ms": ms,
        "measurement": json.dumps({"method": METHOD, "scope": "module"}),
    }  # fmt: skip
    return row(about or matmul(), config, ms, **(made | columns))


def measured_board(results: Path, **columns: Any) -> Board:
    return store(results, timed(BEST, 1.0, **columns),
                 timed(DEFAULT, 3.0, seed=9, is_default=True, **columns))  # fmt: skip


class Fake:
    """A `Measurer` with a time for each config, or a record in place of it."""

    def __init__(self, best: float | Measured, default: float | Measured = 3.0) -> None:
        self.answers = {Candidate.of(BEST).json: best, Candidate.of(DEFAULT).json: default}
        self.asked: list[list[str]] = []
        self.closed = False

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        self.asked.append([c.json for c in candidates])
        for n, candidate in enumerate(candidates):
            answer = self.answers[candidate.json]
            if not isinstance(answer, Measured):
                answer = Measured(status="ok", samples_ms=tuple(times(answer, seed=n + 20)),
                                  device_kind="TPU v6 lite", checked="at full size")  # fmt: skip
            yield candidate, answer

    def close(self) -> None:
        self.closed = True


def verdict(results: Path, measurer: Fake | str, **request: Any) -> Verdict:
    asked = gate.Request(against="measure", measurer=lambda device: measurer, **request)
    (found,) = gate.check(results, asked, jobs=1, progress=Quiet())
    return found


def test_fresh_times_of_best_and_default_are_taken_together(tmp_path: Path) -> None:
    measured_board(tmp_path)
    fake = Fake(1.0)
    found = verdict(tmp_path, fake)
    assert (found.outcome, found.checked) == ("pass", "at full size")
    assert fake.asked == [[Candidate.of(BEST).json, Candidate.of(DEFAULT).json]]
    assert fake.closed
    assert verdict(tmp_path, Fake(1.1)).outcome == "regression"


def bad(status: str) -> Measured:
    return Measured(status=status, reason="because")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (bad("wrong"), "regression"),
        (bad("oom"), "regression"),
        (bad("unsupported"), "regression"),
        (bad("failed"), "inconclusive"),
        (bad("timeout"), "inconclusive"),
        (bad("crashed"), "inconclusive"),
    ],
    ids=lambda value: value.status if isinstance(value, Measured) else value,
)
def test_a_config_that_gives_no_time_is_no_pass(
    answer: Measured, outcome: str, tmp_path: Path
) -> None:
    measured_board(tmp_path)
    found = verdict(tmp_path, Fake(answer))
    assert (found.outcome, found.reason) == (outcome, f"{answer.status}: because")


def test_a_default_that_gives_no_time_leaves_the_best_alone(tmp_path: Path) -> None:
    measured_board(tmp_path)
    found = verdict(tmp_path, Fake(1.0, bad("oom")))
    assert found.outcome == "pass"
    assert "20 stored and 0 fresh times of the default are too few" in found.reason


NO_TIMES = {
    "all missing": [math.nan] * 20,
    "half missing": [math.nan, 2.0] * 10,
    "one missing": [*times(1.0, count=19), math.nan],
    "zero": [0.0, *times(1.0, count=19)],
    "negative": [-1.0, *times(1.0, count=19)],
    "infinite": [*times(1.0, count=19), math.inf],
    "below what ratios can say": [5e-324] * 20,
    "beyond what sums can say": [1e308] * 20,
}


@pytest.mark.parametrize("case", NO_TIMES)
def test_what_is_no_time_is_inconclusive_and_never_a_pass(case: str, tmp_path: Path) -> None:
    measured_board(tmp_path)
    ok = Measured(status="ok", samples_ms=tuple(NO_TIMES[case]))
    found = verdict(tmp_path, Fake(ok))
    assert (found.outcome, found.today_ms) == ("inconclusive", None)
    assert "ms is no time of a run; a finite number above 0 is" in found.reason
    beside = verdict(tmp_path, Fake(1.0, ok))
    assert "20 stored and 0 fresh times of the default are too few" in beside.reason
    assert beside.outcome == "pass"
    assert verdict(tmp_path, Fake(1.08, ok)).outcome == "inconclusive"


@pytest.mark.parametrize("case", ["all missing", "half missing", "zero", "infinite"])
def test_a_recording_without_times_of_one_board_leaves_the_others_their_verdicts(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, recorded = tmp_path / "results", tmp_path / "r.csv"
    with recorded.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        for device, best in (("v5e", NO_TIMES[case]), ("v6e", times(1.2, seed=3))):
            about = matmul(device)
            store(results, timed(BEST, 1.0, about=about),
                  timed(DEFAULT, 3.0, seed=9, about=about, is_default=True))  # fmt: skip
            for config, taken in ((BEST, best), (DEFAULT, times(3.0, seed=4))):
                text = about.json, json.dumps(config)
                lines.writerows(("matmul", device, *text, "" if t != t else t) for t in taken)
    status, out, err = call(capsys, "gate", str(results), "--against", "measure", "--replay",
                            str(recorded), "--format", "json")  # fmt: skip
    document = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    told = {v["device"]: v["outcome"] for v in document["verdicts"]}
    assert told == {"v5e": "inconclusive", "v6e": "regression"}
    assert (status, err) == (1, "")


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"timer": "host_clock"}, "timed by host_clock, today by device_profile"),
        ({"measurement": '{"scope": "kernel"}'}, "times span kernel, today's module"),
        ({"measurement": f'{{"method": {METHOD + 1}}}'}, "was timed another way"),
        ({"samples_ms": None}, "no samples in the measured baseline"),
        ({"samples_ms": [1.0, 1.0]}, "2 stored and 20 fresh samples"),
    ],
    ids=["timer", "scope", "method", "no samples", "two samples"],
)
def test_times_of_another_kind_do_not_compare(
    columns: dict[str, Any], told: str, tmp_path: Path
) -> None:
    measured_board(tmp_path, **columns)
    found = verdict(tmp_path, Fake(5.0))
    assert found.outcome == "inconclusive"
    assert told in found.reason


def test_without_a_measurer_or_a_measured_baseline_the_gate_is_inconclusive(tmp_path: Path) -> None:
    measured_board(tmp_path / "a")
    found = verdict(tmp_path / "a", "no TPU is attached to this machine")
    assert (found.outcome, found.reason) == ("inconclusive", "no TPU is attached to this machine")
    store(tmp_path / "b", stored())
    assert verdict(tmp_path / "b", Fake(1.0)).reason == "no measured baseline stored"


@pytest.mark.parametrize(
    ("attached", "told"),
    [(None, "no TPU is attached to this machine"),
     ("v5p", "the TPU attached here is a v5p, the baseline is of v6e")],
)  # fmt: skip
def test_another_kind_of_device_is_inconclusive(
    attached: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune import device as devices

    chip = devices.get(attached) if attached else None
    monkeypatch.setattr(devices, "attached", lambda: chip)
    assert measured.opener(None)("v6e") == told


def test_an_unknown_tpu_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune import device as devices
    from autotune.errors import UnknownNameError

    def attached() -> None:
        raise UnknownNameError("kind of TPU", "TPU99", ["TPU7x"])

    monkeypatch.setattr(devices, "attached", attached)
    assert "unknown kind of TPU 'TPU99'" in str(measured.opener(None)("v6e"))


def recording(path: Path, best: float, default: float | None = 3.0) -> Path:
    """A recording of fresh times as a leaderboard's Parquet file."""
    rows = [timed(BEST, best, seed=31)]
    if default is not None:
        rows.append(timed(DEFAULT, default, seed=32, is_default=True))
    return store(path, *rows).path


@pytest.mark.parametrize(("best", "status"), [(1.0, 0), (1.2, 1)])
def test_the_gate_reads_fresh_times_from_a_recording(
    best: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_board(tmp_path / "results")
    asked = ["gate", str(tmp_path / "results"), "--against", "measure"]
    replay = str(recording(tmp_path / "today", best))
    ended, out, _ = call(capsys, *asked, "--replay", replay, "--format", "json")
    document = json.loads(out)
    assert ended == document["exit_status"] == status
    assert document["verdicts"][0]["evidence"] == "measured"
    assert document["verdicts"][0]["config"] == BEST


def test_a_recording_without_the_config_is_inconclusive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_board(tmp_path / "results")
    other = tmp_path / "o.csv"
    other.write_text("kernel,device,problem,config,latency_ms\n")
    ended, out, _ = call(capsys, "gate", str(tmp_path / "results"), "--against", "measure",
                         "--replay", str(other))  # fmt: skip
    assert ended == 3
    assert "no fresh time of the stored best config" in out
    _, out, _ = call(capsys, "gate", str(tmp_path / "results"), "--against", "measure",
                     "--replay", str(other), "--update")  # fmt: skip
    assert "; not updated: there are no figures of today\n" in out


BAD_USAGE = {
    "replay of compiled": (["--replay", "r.csv"], "--replay goes with --against measure only"),
    "replay": (["--against", "measure", "--replay", "gone.csv"], "--replay gone.csv"),
    "tolerance": (["--tolerance", "-1"], "--tolerance"),
    "nan": (["--tolerance", "nan"], "--tolerance 'nan' is not allowed"),
    "inf": (["--tolerance", "inf"], "--tolerance inf is not allowed; a share such as 0.02"),
    "against": (["--against", "silicon"], "--against 'silicon'"),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, told = BAD_USAGE[case]
    store(tmp_path, stored())
    status, out, err = call(capsys, "gate", str(tmp_path), *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err


def shown(outcome: str, reason: str, **fields: Any) -> Verdict:
    return Verdict(problem="small", device="v6e", outcome=outcome, reason=reason, **fields)


def test_annotations_are_errors_warnings_and_notices_of_github() -> None:
    file = io.StringIO()
    gate.annotate(
        [
            shown("regression", "+3.0%\nslower"),
            shown("inconclusive", "no baseline"),
            shown("pass", "far faster: refresh baseline"),
            shown("pass", "+0.0%"),
            shown("regression", "+9%", updated=True),
        ],
        file,
    )
    assert file.getvalue().splitlines() == [
        "::error title=autotune gate regression::small on v6e: +3.0%25 slower",
        "::warning title=autotune gate inconclusive::small on v6e: no baseline",
        "::notice title=autotune gate pass::small on v6e: far faster: refresh baseline",
    ]


@pytest.mark.parametrize("format", ["table", "json"])
def test_annotations_appear_on_github_only_and_leave_json_alone(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["gate", str(tmp_path / "none"), "--format", format]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    status, out, err = call(capsys, *asked)
    assert status == 3
    assert "::warning title=autotune gate" in (err if format == "json" else out)
    if format == "json":
        assert json.loads(out)["exit_status"] == 3
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert "::" not in "".join(map(str, call(capsys, *asked)[1:]))


def test_the_worst_verdict_is_the_exit_status_and_what_was_accepted_is_no_regression() -> None:
    ok, slow, unknown = shown("pass", ""), shown("regression", ""), shown("inconclusive", "")
    assert gate.exit_status([ok, unknown, slow]) == 1
    assert gate.exit_status([ok, unknown]) == 3
    assert gate.exit_status([ok]) == gate.exit_status([replace(slow, updated=True)]) == 0


def test_the_table_says_when_the_baseline_is_stale() -> None:
    file = io.StringIO()
    gate.write_table([shown("pass", "+0.0%", stale="libtpu 0.0.41 → 0.0.43")], file)
    assert "pass          small on v6e: +0.0%; baseline stale: libtpu 0.0.41" in file.getvalue()
    assert file.getvalue().endswith("1 pass, 0 regression, 0 inconclusive\n")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one small matmul, compiled."""
    folder = tmp_path_factory.mktemp("gated")
    config = folder / "c.yaml"
    config.write_text(
        "device: v6e\nproblems:\n  - name: small\n    kernel: matmul\n"
        "    shape: {m: 256, k: 256, n: 256}\n    space: {bm: 256, bk: 256, bn: 256, "
        "grid_order: mn, buffers: 2, vmem_limit_bytes: null}\n"
    )
    from autotune import cli

    results = str(folder / "results")
    cli.app(["sweep", str(config), "--results", results, "--jobs", "1"], standalone_mode=False)
    return folder / "results"


def checked(status: str) -> Any:
    reason = None if status == "ok" else "is off by 0.5"
    found = Checked(status=status, reason=reason, tolerance=0.03, how="256 of each, interpreted")

    class Fake:
        def check(self, problem: Problem, config: Any) -> Checked:
            return found

        def stop(self) -> None:
            return

        def close(self) -> None:
            ended.append(status)

    return Fake


ended: list[str] = []


def compile_verdict(results: Path, **request: Any) -> Verdict:
    asked = gate.Request(against="compile", **{"checker": checked("ok"), **request})
    (found,) = gate.check(results, asked, jobs=1, progress=Quiet())
    return found


class Slow:
    """A `Checker` that answers when all that may run at once are at it, or waits to be stopped."""

    def __init__(self, together: threading.Barrier | None) -> None:
        self.together, self.stopped = together, threading.Event()
        self.closed = False

    def check(self, problem: Problem, config: Any) -> Checked:
        if self.together is None:
            assert self.stopped.wait(10)
            raise StoppedError
        self.together.wait(10)
        return Checked(status="ok", how=str(config["n"]))

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed = True


def test_outputs_are_checked_side_by_side_as_many_as_there_are_jobs() -> None:
    made: list[Slow] = []

    def make() -> Slow:
        made.append(Slow(together))
        return made[-1]

    together = threading.Barrier(2)
    asked: list[tuple[Problem, Any]] = [(matmul(), {"n": n}) for n in range(6)]
    answers = dict(checkers.checked(make, asked, jobs=2))
    assert {place: found.how for place, found in answers.items()} == {n: str(n) for n in range(6)}
    assert len(made) == 2
    assert all(one.closed for one in made)
    assert not list(checkers.checked(make, [], jobs=2))


def test_leaving_the_checks_early_ends_what_is_being_checked() -> None:
    made = [Slow(threading.Barrier(1)), Slow(None)]
    asked: list[tuple[Problem, Any]] = [(matmul(), {"n": n}) for n in range(9)]
    answers = checkers.checked(iter(made).__next__, asked, jobs=2)
    next(answers)
    started = time.perf_counter()
    answers.close()
    assert time.perf_counter() - started < 5
    assert all(one.stopped.is_set() and one.closed for one in made)


def test_boards_of_a_broken_and_of_a_lost_kernel_spoil_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut short")
    gone = replace(row(matmul(), BEST, 1.0, evidence="model"), kernel="gone")
    lost = replace(gone, kernel="nobody.has:IT")
    raises = replace(gone, kernel="config_kernels:BROKEN", problem='{"shape": {"m": 1}}')
    for stored_row in (gone, lost, raises):
        store(tmp_path, stored_row)
    about = replace(matmul(), name="ranked by nothing")
    store(tmp_path, row(about, BEST, None, status="oom", reason="VMEM", evidence="model"))
    found = gate.check(tmp_path, gate.Request(against="model"), jobs=1, progress=Quiet())
    told = {v.kernel or Path(v.problem).name: (v.outcome, v.reason) for v in found}
    assert len(found) == 5
    assert told["a.parquet"][0] == "inconclusive"
    assert told["a.parquet"][1].startswith("damaged baseline: not a readable leaderboard (")
    assert told["matmul"] == ("inconclusive", "no baseline: no candidate was ranked")
    assert told["gone"][0] == told["nobody.has:IT"][0] == "inconclusive"
    assert told["gone"][1].startswith("cannot be asked for today: unknown kernel 'gone'")
    assert "no module 'nobody.has'" in told["nobody.has:IT"][1]
    assert told["config_kernels:BROKEN"][0] == "regression"
    assert (
        "fails today: kernel config_kernels:BROKEN: check raised"
        in (told["config_kernels:BROKEN"][1])
    )


@pytest.mark.compiler
def test_a_wrong_output_is_a_regression_however_fast(swept: Path) -> None:
    found = compile_verdict(swept, checker=checked("ok"))
    assert (found.outcome, found.checked) == ("pass", "256 of each, interpreted")
    found = compile_verdict(swept, checker=checked("wrong"), update=True)
    assert (found.outcome, found.updated) == ("regression", False), "no baseline may be wrong"
    assert found.reason.startswith("wrong output: is off by 0.5; ")
    assert found.reason.endswith("not updated: no baseline may be wrong")
    found = compile_verdict(swept, checker=checked("crashed"))
    assert found.outcome == "inconclusive"
    assert "output not checked: crashed" in (found.checked or "")
    assert ended == ["ok", "wrong", "crashed"], "what was started has ended"


@pytest.mark.compiler
def test_update_accepts_todays_figures_and_keeps_the_default(swept: Path, tmp_path: Path) -> None:
    (path,) = swept.rglob("*.parquet")
    board = leaderboard.read(path)
    faster = [
        replace(r, latency_compiled_ms=(r.latency_compiled_ms or 1) * 0.8, cycles=1,
                libtpu_version="0.0.41")
        for r in board.rows if r.status == "ok"
    ]  # fmt: skip
    store(tmp_path, *faster)
    found = compile_verdict(tmp_path)
    assert (found.outcome, found.updated) == ("regression", False)
    assert (found.stale or "").startswith("libtpu 0.0.41 → ")
    found = compile_verdict(tmp_path, update=True)
    assert (found.outcome, found.updated) == ("regression", True)
    assert gate.exit_status([found]) == 0
    found = compile_verdict(tmp_path)
    assert (found.outcome, found.stale) == ("pass", None)
    (path,) = tmp_path.rglob("*.parquet")
    again = leaderboard.read(path)
    assert again.gain == board.gain, "the default was made anew too"


@pytest.mark.compiler
def test_an_interrupted_gate_ends_its_workers_and_leaves_the_boards_as_they_were(
    swept: Path, tmp_path: Path
) -> None:
    (path,) = swept.rglob("*.parquet")
    before = path.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", "gate", str(swept), "--update", "--jobs", "2"],
        env={**os.environ, "AUTOTUNE_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    workers: list[psutil.Process] = []
    while not workers and process.poll() is None:
        time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == "autotune: interrupted; the same command goes on from here\n"
    assert not psutil.wait_procs(workers, timeout=5)[1]
    assert path.read_bytes() == before


@pytest.mark.compiler
def test_boards_of_one_gate_are_told_in_path_order(swept: Path, tmp_path: Path) -> None:
    (path,) = swept.rglob("*.parquet")
    board = leaderboard.read(path)
    for name in ("b", "a", "c"):
        rows = [replace(r, problem_name=name) for r in board.rows]
        leaderboard.merge(tmp_path / f"{name}.parquet", rows, flop_convention="")
    asked = gate.Request(against="compile", checker=checked("ok"))
    found = gate.check(tmp_path, asked, jobs=2, progress=Quiet())
    assert [(v.problem, v.outcome) for v in found] == [(n, "pass") for n in "abc"]


@pytest.mark.compiler
def test_update_accepts_fresh_times_too(tmp_path: Path) -> None:
    measured_board(tmp_path)
    assert verdict(tmp_path, Fake(1.2), update=True).updated
    (path,) = tmp_path.rglob("*.parquet")
    best = leaderboard.read(path).best
    assert best is not None
    assert best.latency_measured_ms == pytest.approx(1.2, rel=0.01)
    assert len(best.samples_ms or ()) == 20
    assert verdict(tmp_path, Fake(1.2)).outcome == "pass"


@pytest.mark.compiler
def test_times_by_a_weaker_timer_are_not_said_to_be_the_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = measured_board(tmp_path / "results")
    replay = str(recording(tmp_path / "today", 1.0))
    ended, out, _ = call(capsys, "gate", str(tmp_path / "results"), "--against", "measure",
                         "--replay", replay, "--update")  # fmt: skip
    assert ended == 3
    assert "not updated: the board's own times are by device_profile, today's by replay" in out
    assert leaderboard.read(board.path) == board


def test_a_board_that_cannot_be_written_is_bad_input_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = store(tmp_path, stored())
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != board.path.parent)
    status, out, err = call(capsys, "gate", str(tmp_path), "--update")
    assert (status, out) == (2, "")
    assert err == (
        f"autotune: results directory {board.path.parent} cannot be written: "
        f"{board.path.parent} may not be written to\n"
    )


def test_figures_that_could_not_be_written_are_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_board(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise InputError("results directory r cannot be written: No space left on device")

    monkeypatch.setattr(leaderboard, "merge", full)
    found = verdict(tmp_path, Fake(1.0), update=True)
    assert (found.outcome, found.updated) == ("inconclusive", False)
    assert "not updated: results directory r cannot be written: No space left" in found.reason


def test_weaker_evidence_does_not_replace_what_the_board_ranks_by(tmp_path: Path) -> None:
    measured_board(tmp_path, latency_model_ms=1.0)
    before = leaderboard.read(next(tmp_path.rglob("*.parquet")))
    (found,) = gate.check(
        tmp_path,
        gate.Request(against="model", update=True, tolerance=9.0, checker=checked("ok")), jobs=1,
        progress=Quiet(),
    )  # fmt: skip
    assert (found.outcome, found.updated) == ("inconclusive", False)
    assert "not updated: the board ranks by measured evidence" in found.reason
    assert leaderboard.read(before.path) == before


KERNEL = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
from autotune.kernels.base import Kernel, Tunable

def body(x_ref, o_ref):
    with jax.named_scope("step"):
        o_ref[...] = STEP

def build(problem, config):
    m, block = problem.shape["m"], config["block_m"]
    spec = pl.BlockSpec((block, 256), lambda i: (i, 0))
    call = pl.pallas_call(body, name="edited", grid=(m // block,), in_specs=[spec],
                          out_specs=spec, out_shape=jax.ShapeDtypeStruct((m, 256), jnp.float32))
    return call, (jax.ShapeDtypeStruct((m, 256), jnp.float32),)

KERNEL = Kernel(
    name="edited", axes=("m",), build=build, dtypes=("float32", "bfloat16"),
    tunables=lambda p, d: {"block_m": Tunable(values=(256,))},
    flops=lambda p: 256 * p.shape["m"], reference=lambda p, x: np.tanh(np.asarray(x)),
)
"""
EDITS = {
    "slower": ("jnp.tanh(x_ref[...]) + 0 * jnp.exp(jnp.sin(x_ref[...]))", "cycles (+"),
    "wrong": ("jnp.tanh(x_ref[...]) * 1.1", "wrong output: the output is off by"),
}


@pytest.mark.compiler
def test_an_edited_kernel_is_held_against_its_stored_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path("edited.py")
    command = [sys.executable, "-m", "autotune"]
    Path("c.yaml").write_text(
        "device: v6e\nproblems:\n  - name: tanh\n    kernel: edited:KERNEL\n    dtype: float32\n"
        "    shape: {m: 1024}\n"
    )
    source.write_text(KERNEL.replace("STEP", "jnp.tanh(x_ref[...])"))
    subprocess.run([*command, "sweep", "c.yaml", "--jobs", "1"], check=True, capture_output=True)
    for edit, (step, told) in EDITS.items():
        source.write_text(KERNEL.replace("STEP", step))
        done = subprocess.run([*command, "gate", "--jobs", "1"], capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 1, (edit, done.stdout, done.stderr)
        assert told in done.stdout, edit
        assert "the kernel's source changed" in done.stdout
