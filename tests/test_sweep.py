"""Whole sweeps through the command line: evidence, isolation, resuming, and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import optuna
import pandas as pd
import psutil
import pytest

from autotune import leaderboard
from autotune.search import storage

TESTS = Path(__file__).parent
TINY = """
device: v6e
problems:
  - name: tiny
    kernel: matmul
    shape: {m: 256, k: 512, n: 512}
    space: {bm: 256, bk: [256, 512], bn: [256, 512], grid_order: mn, buffers: 2,
            vmem_limit_bytes: null}
"""


class Workplace:
    """A folder with configs, results and a cache of its own, and the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.environment = {
            **os.environ,
            "AUTOTUNE_CACHE_DIR": str(self.cache),
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        }

    def config(self, text: str, name: str = "c.yaml") -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", *arguments], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, expect: int = 0) -> tuple[str, str]:
        """(stdout, stderr) of a command that must end with status `expect`."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == expect, f"status {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return out, err

    def board(self, results: str = "results") -> leaderboard.Board:
        (path,) = (self.folder / results).rglob("*.parquet")
        return leaderboard.read(path)

    def entries(self) -> dict[Path, int]:
        """Cache entries with the time each was written."""
        return {p: p.stat().st_mtime_ns for p in self.cache.rglob("*.json")}


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace in which the tiny config was swept once."""
    place = Workplace(tmp_path_factory.mktemp("swept"))
    place.run("sweep", place.config(TINY))
    return place


@pytest.mark.compiler
def test_every_survivor_is_compiled_and_the_board_says_how(swept: Workplace) -> None:
    board = swept.board()
    ranked = [r for r in board.rows if r.rank is not None]
    assert len(ranked) == board.counts["ranked"] == 5, "4 tiles and the default"
    assert all(r.evidence == "compiled" and r.status == "ok" for r in ranked)
    assert sum(r.is_best for r in board.rows) == sum(r.is_default for r in board.rows) == 1
    assert [r.rank for r in ranked] == [1, 2, 3, 4, 5]
    best = board.best
    assert best is not None
    assert best.latency_ms == best.latency_compiled_ms
    assert best.flops == 2 * 256 * 512 * 512
    assert best.effective_tflops == pytest.approx(best.flops / best.latency_ms / 1e9)
    assert best.mfu == pytest.approx(best.effective_tflops * 1e12 / 9.2e14)
    assert best.cycles
    assert best.vmem_compiled_bytes
    assert json.loads(best.scopes or "")["step"]["executions"] == best.grid_steps
    assert best.jax_version
    assert best.libtpu_version
    assert best.kernel_fingerprint


@pytest.mark.compiler
def test_a_second_sweep_compiles_nothing_and_leaves_the_file_as_it_is(swept: Workplace) -> None:
    path, entries = swept.board().path, swept.entries()
    before = path.stat().st_mtime_ns, path.read_bytes()
    out, _ = swept.run("sweep", "c.yaml")
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    assert f"{swept.board().best.latency_ms:.4g} ms" in out, "its winner is told all the same"
    assert swept.entries() == entries


@pytest.mark.compiler
def test_the_number_of_jobs_does_not_change_the_board(swept: Workplace) -> None:
    swept.run("sweep", "c.yaml", "--results", "fresh", "--fresh", "--jobs", "1")
    before, after = (
        pd.read_parquet(swept.board(results).path).drop(columns=["created_at", "compile_seconds"])
        for results in ("results", "fresh")
    )
    pd.testing.assert_frame_equal(before, after)


@pytest.mark.compiler
def test_a_damaged_cache_entry_is_named_and_made_again(swept: Workplace) -> None:
    victim = min(swept.entries(), key=lambda p: p.stat().st_size)
    whole = victim.read_text()
    victim.write_text(whole[:40])
    _, err = swept.run("sweep", "c.yaml", "--results", "repaired")
    assert str(victim) in err
    assert len(err.splitlines()) == 1
    assert victim.stat().st_size > 40


@pytest.mark.compiler
def test_report_prints_the_board_for_people_and_for_programs(swept: Workplace) -> None:
    out, _ = swept.run("report")
    assert "tiny: matmul on v6e" in out
    assert "5 ranked" in out
    assert "FLOPs: 2·m·k·n" in out
    document = json.loads(swept.run("report", "--format", "json")[0])
    (problem,) = document["problems"]
    assert problem["problem"]["shape"] == {"m": 256, "k": 512, "n": 512}
    assert problem["best"]["config"] == json.loads(swept.board().rows[0].config)
    assert len(problem["rows"]) == len(swept.board().rows)
    assert swept.run("report", "--format", "csv")[0].startswith("problem_key,problem_name,kernel")
    assert "| rank | blocks |" in swept.run("report", "--format", "markdown")[0]


@pytest.mark.compiler
def test_the_gate_passes_on_what_was_just_swept(swept: Workplace) -> None:
    out, _ = swept.run("gate")
    assert out.splitlines()[-1] == "1 pass, 0 regression, 0 inconclusive"
    document = json.loads(swept.run("gate", "--format", "json")[0])
    assert document["exit_status"] == 0
    assert document["verdicts"][0]["outcome"] == "pass"


@pytest.mark.compiler
def test_the_gate_fails_when_the_stored_best_was_faster(swept: Workplace) -> None:
    _with_best_latency(swept, 0.9)
    out, _ = swept.run("gate", "faster", expect=1)
    assert "regression" in out
    assert "(+11.1%, tolerance 2.0%)" in out
    swept.run("gate", "faster", "--tolerance", "0.2")


@pytest.mark.compiler
def test_the_gate_fails_when_the_stored_best_no_longer_fits(workplace: Workplace) -> None:
    workplace.run("sweep", workplace.config(_user("HUNGRY_DEFAULT", "scratch_mib: 1")))
    path = workplace.board().path
    frame = pd.read_parquet(path)
    frame["config"] = frame["config"].str.replace('"scratch_mib": 1,', '"scratch_mib": 90,')
    frame.to_parquet(path)
    out, _ = workplace.run("gate", expect=1)
    assert "regression" in out
    assert "pruned: " in out


def test_one_broken_kernel_does_not_keep_the_gate_from_the_others(workplace: Workplace) -> None:
    config = workplace.config(_user("HUNGRY_DEFAULT", "scratch_mib: 1"))
    workplace.run("sweep", config, "--until", "model")
    (workplace.folder / "broken.py").write_text("print('loading'); raise RuntimeError('no more')")
    frame = pd.read_parquet(workplace.board().path)
    for kernel in ("gone:KERNEL", "broken:KERNEL"):
        frame["kernel"] = kernel
        frame.to_parquet(workplace.folder / "results" / f"{kernel.partition(':')[0]}.parquet")
    out, err = workplace.run("gate", "--against", "model", "--format", "json", expect=1)
    verdicts = json.loads(out)["verdicts"]
    assert [v["outcome"] for v in verdicts] == ["regression", "inconclusive", "pass"]
    assert "raised RuntimeError: no more" in verdicts[0]["reason"]
    assert "no module 'gone'" in verdicts[1]["reason"]
    assert err == "loading\n", "what a kernel prints is no result"


def test_the_vmem_limit_of_the_users_own_flags_is_the_models_too(workplace: Workplace) -> None:
    config = workplace.config(
        "device: v5e\nproblems:\n  - kernel: matmul\n    shape: {m: 4096, k: 4096, n: 4096}\n"
        "    space: {bm: 1024, bk: 1024, bn: 1024, buffers: 2, grid_order: mn,\n"
        "            vmem_limit_bytes: null}\n"
    )
    workplace.run("sweep", config, "--until", "model")
    before = {r.config: r for r in workplace.board().rows}
    flag = "--xla_tpu_scoped_vmem_limit_kib=98304"
    workplace.environment["LIBTPU_INIT_ARGS"] = flag
    workplace.run("sweep", config, "--until", "model")
    after = {r.config: r for r in workplace.board().rows}
    (tile,) = (c for c in before if json.loads(c)["bm"] == 1024)
    assert before[tile].status == "pruned", "16 MiB of block sum and spills (V1)"
    assert after[tile].status == "ok"
    assert after[tile].vmem_limit_bytes == 96 << 20
    assert {r.made_with for r in after.values()}.isdisjoint(r.made_with for r in before.values())


def test_the_gate_without_a_baseline_is_inconclusive(workplace: Workplace) -> None:
    told = (
        "none: no baseline: the path does not exist; check it, or make one with "
        "`autotune sweep CONFIG --results none`\n"
    )
    assert told in workplace.run("gate", "none", expect=3)[0]
    (workplace.folder / "results").mkdir()
    assert "no baseline: no leaderboard in it" in workplace.run("gate", expect=3)[0]
    (workplace.folder / "results" / "x.parquet").write_bytes(b"PAR1")
    assert "damaged baseline" in workplace.run("gate", expect=3)[0]


@pytest.mark.compiler
def test_the_gate_on_evidence_that_is_not_stored_is_inconclusive(swept: Workplace) -> None:
    out, _ = swept.run("gate", "--against", "measure", expect=3)
    assert "no measured baseline stored" in out


def test_sweep_until_model_needs_no_compiler(workplace: Workplace) -> None:
    out, _ = workplace.run("sweep", workplace.config(TINY), "--until", "model")
    board = workplace.board()
    assert {r.evidence for r in board.rows} == {"model"}
    assert board.best is not None
    assert re.search(r"ms ±\d+% model", out), "model evidence, with its band"


def test_where_libtpu_is_missing_the_sweep_says_so_and_ends_at_model_evidence(
    workplace: Workplace,
) -> None:
    (workplace.folder / "sitecustomize.py").write_text(_NO_LIBTPU)
    workplace.environment["PYTHONPATH"] = (
        f"{workplace.folder}:{workplace.environment['PYTHONPATH']}"
    )
    config = workplace.config(TINY)
    _, err = workplace.run("sweep", config)
    assert "libtpu, the TPU compiler, is not installed" in err
    assert "model evidence" in err
    assert {r.evidence for r in workplace.board().rows} == {"model"}
    _, err = workplace.run("sweep", config, "--until", "compile", expect=2)
    assert err.startswith("autotune: --until compile is not possible here: libtpu")


_NO_LIBTPU = """
import importlib.util
_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "libtpu" else _find(name, *more)
"""


def test_measuring_without_a_tpu_says_so(workplace: Workplace) -> None:
    out, err = workplace.run("sweep", workplace.config(TINY), "--until", "measure", expect=2)
    assert err.startswith("autotune: --until measure needs a TPU attached to this machine")
    assert not out
    assert not (workplace.folder / "results").exists()


@pytest.mark.compiler
def test_candidates_that_abort_hang_or_raise_cost_one_row_each(workplace: Workplace) -> None:
    started = time.monotonic()
    workplace.run("sweep", workplace.config(_user("MISBEHAVES")), "--timeout", "3")
    ended = {json.loads(r.config)["act"]: (r.status, r.reason) for r in workplace.board().rows}
    assert ended["nothing"] == ("ok", None)
    assert ended["abort"][0] == "crashed"
    assert ended["hang"] == ("timeout", "tracing and compiling took longer than 3 s")
    raised = ("value error", "not implemented", "assertion", "mlir", "mosaic", "runtime")
    assert {ended[act][0] for act in raised} == {"failed"}, ended
    assert "block 96 does not divide 100" in (ended["value error"][1] or "")
    assert time.monotonic() - started < 60, "the hang of 60 s must not be waited for"


@pytest.mark.compiler
def test_a_default_that_does_not_fit_is_a_row_and_a_smaller_one_wins(workplace: Workplace) -> None:
    out, _ = workplace.run("sweep", workplace.config(_user("HUNGRY_DEFAULT")))
    board = workplace.board()
    assert board.default is not None
    assert board.default.status in ("pruned", "oom")
    assert board.best is not None
    assert json.loads(board.best.config)["scratch_mib"] in (1, 2)
    assert "default scratch_mib=100" in out


@pytest.mark.compiler
def test_no_survivor_is_exit_status_1_with_the_reasons(workplace: Workplace) -> None:
    out, _ = workplace.run("sweep", workplace.config(_user("NOTHING_FITS")), expect=1)
    assert "no candidate survived; pruned: " in out
    assert len(workplace.board().rows) == 2


@pytest.mark.compiler
def test_kill_9_and_again_repeats_nothing_that_was_finished(workplace: Workplace) -> None:
    config = workplace.config(TINY)
    process = workplace.start("sweep", config, "--jobs", "1")
    while len(workplace.entries()) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    finished = workplace.entries()
    psutil.wait_procs(workers, timeout=10)
    assert not [w for w in workers if w.is_running()], "workers must not outlive the sweep"
    workplace.run("sweep", config)
    assert {p: t for p, t in workplace.entries().items() if p in finished} == finished
    assert workplace.board().counts["ranked"] == 5


@pytest.mark.compiler
def test_ctrl_c_ends_with_one_line_and_no_leftover_process(workplace: Workplace) -> None:
    process = workplace.start("sweep", workplace.config(TINY), "--jobs", "1")
    while not workplace.entries():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "autotune: interrupted; the same command goes on from here\n"
    psutil.wait_procs(workers, timeout=10)
    assert not [w for w in workers if w.is_running()]


def _recording(place: Workplace, times_ms: dict[str, float], name: str = "r.csv") -> str:
    """A recording of tiny configs, by their bk and bn."""
    row = place.board().rows[0]
    lines = []
    for blocks, latency_ms in times_ms.items():
        bk, bn = map(int, blocks.split())
        config = {**json.loads(row.config), "bm": 256, "bk": bk, "bn": bn, "buffers": 2,
                  "grid_order": "mn", "vmem_limit_bytes": None}  # fmt: skip
        lines.append((row.kernel, row.device, row.problem, json.dumps(config), latency_ms))
    frame = pd.DataFrame(lines, columns=["kernel", "device", "problem", "config", "latency_ms"])
    frame.to_csv(place.folder / name, index=False)
    return name


def _trial_states(url: str) -> Counter[str]:
    with closing(storage.opened(url)) as opened:
        names = optuna.get_all_study_names(opened.backend)
        studies = [optuna.load_study(study_name=n, storage=opened.backend) for n in names]
        return Counter(trial.state.name for study in studies for trial in study.trials)


@pytest.mark.compiler
def test_a_recording_answers_for_a_tpu_and_measured_rows_rank_first(swept: Workplace) -> None:
    recording = _recording(swept, {"256 256": 0.5, "512 256": 0.4, "512 512": 0.45, "256 512": 0})
    arguments = ("c.yaml", "--replay", recording, "--results", "replayed")
    out, err = swept.run("sweep", *arguments)
    assert err.count("keep their compiled evidence") == 1
    assert "tiny: 1 of 5 candidates are not in r.csv" in err
    board = swept.board("replayed")
    ranked = [r for r in board.rows if r.rank is not None]
    assert [r.latency_ms for r in ranked] == [0.4, 0.45, 0.5]
    assert {(r.evidence, r.timer) for r in ranked} == {("measured", "replay")}
    assert [r.samples_ms for r in ranked] == [[0.4], [0.45], [0.5]]
    (zero,) = (r for r in board.rows if r.status == "failed")
    assert "is not a finite number above 0" in (zero.reason or "")
    assert "0.4000 ms measured" in out
    url = f"sqlite:///{swept.folder}/replayed/studies.db"
    assert _trial_states(url) == {"COMPLETE": 3, "FAIL": 1}
    again, _ = swept.run("sweep", *arguments)
    assert again == out, "what was timed is known"
    assert _trial_states(url) == {"COMPLETE": 3, "FAIL": 1}
    swept.run("sweep", *arguments, "--fresh", "--until", "measure", "--jobs", "1")
    assert _trial_states(url) == {"COMPLETE": 6, "FAIL": 2}, "--fresh times anew"


@pytest.mark.compiler
def test_a_recording_without_the_problem_is_said_and_one_without_any_is_bad_input(
    swept: Workplace,
) -> None:
    recording = _recording(swept, {"256 256": 0.5}, name="other.csv")
    text = (swept.folder / recording).read_text().replace('""m"": 256', '""m"": 512')
    (swept.folder / recording).write_text(text)
    arguments = ("--replay", recording, "--results", "none")
    out, err = swept.run("sweep", "c.yaml", *arguments, expect=2)
    assert (out, err) == (
        "",
        "autotune: --replay other.csv: no row is of a problem of the configs; it has "
        "matmul m=512 k=512 n=512 on v6e\n",
    )
    assert not (swept.folder / "none").exists()
    more = swept.config(TINY.replace("m: 256", "m: 512").replace("tiny", "other"), "more.yaml")
    _, err = swept.run("sweep", "c.yaml", more, *arguments)
    told = "tiny: no row for it in other.csv, which has matmul on v6e; nothing is timed\n"
    assert told in err
    boards = [leaderboard.read(p) for p in (swept.folder / "none").rglob("*.parquet")]
    ranked = {(b.title, r.evidence) for b in boards for r in b.rows if r.rank}
    assert ranked == {("tiny", "compiled"), ("other", "measured")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--storage", "redis://host"), "--storage redis://… is not allowed; postgresql://"),
        (("--replay", "none.csv"), "--replay none.csv cannot be read: No such file"),
        (("--timer", "sundial"), "--timer 'sundial' is not allowed"),
    ],
)
def test_bad_storages_recordings_and_timers_are_one_line_and_write_nothing(
    workplace: Workplace, arguments: tuple[str, str], message: str
) -> None:
    _, err = workplace.run("sweep", workplace.config(TINY), *arguments, expect=2)
    assert message in err
    assert len(err.splitlines()) == 1
    assert {p.name for p in workplace.folder.iterdir()} == {"c.yaml"}


@pytest.mark.compiler
def test_two_sweeps_on_one_storage_compile_each_candidate_once(
    workplace: Workplace, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    workplace.config(TINY)
    started = []
    for host in ("a", "b"):  # hosts with nothing in common but the storage
        workplace.environment["AUTOTUNE_CACHE_DIR"] = str(tmp_path / f"cache-{host}")
        arguments = ("--results", f"results-{host}", "--storage", url, "--jobs", "1")
        started.append(workplace.start("sweep", "c.yaml", *arguments))
    for process in started:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0
        assert err == (
            "autotune: tiny: not timed, as no host that could is at work on the storage; the same "
            "command takes its times over once one has been\n"
        ), "hosts without a TPU say what they could not do"
    first, second = (workplace.board(f"results-{host}") for host in ("a", "b"))
    assert [(r.config, r.rank, r.latency_ms, r.cycles) for r in first.rows] == [
        (r.config, r.rank, r.latency_ms, r.cycles) for r in second.rows
    ]
    assert first.counts["ranked"] == 5
    assert _trial_states(url) == {"COMPLETE": 5}
    compiled = [
        path
        for path in tmp_path.glob("cache-*/*/*.json")
        if json.loads(path.read_text().partition("\n")[2]).get("schedules")
    ]
    assert len(compiled) == 5, "on one of them, and never on both"


def _user(kernel: str, *pins: str) -> str:
    shape = "{m: 256}" if kernel != "MISBEHAVES" else "{m: 256, k: 256, n: 256}"
    space = f"\n    space: {{{', '.join(pins)}}}" if pins else ""
    return (
        f"device: v6e\nproblems:\n  - kernel: sweep_kernels:{kernel}\n    shape: {shape}{space}\n"
    )


def _with_best_latency(place: Workplace, factor: float) -> None:
    """A copy of the results in which the stored best took `factor` of its time."""
    board = place.board()
    target = place.folder / "faster" / board.path.relative_to(place.folder / "results")
    target.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.read_parquet(board.path)
    frame.loc[frame.is_best, ["latency_ms", "latency_compiled_ms"]] *= factor
    frame.to_parquet(target)
