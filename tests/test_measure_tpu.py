"""The measuring worker on the CPU backend: what it costs to lose it, and what it says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import psutil
import pytest

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.environment import worker_environment
from autotune.errors import DeviceBusyError, NoTpuError
from autotune.kernels import base
from autotune.measure.environment import measuring_environment
from autotune.measure.interpreted import Interpreter, check_interpreted
from autotune.measure.lock import DeviceLock
from autotune.measure.record import Measured
from autotune.measure.timing import Effort
from autotune.measure.tpu import TpuMeasurer
from autotune.search.evaluate import Judge

jax.config.update("jax_platforms", "cpu")

QUICK = Effort(first=3, more=3, most=6)
SHAPE = {"m": 128, "k": 128, "n": 128}


def problem_of(attribute, shape=None, dtype="float32", device="v6e"):
    kernel = base.load(f"measure_kernels:{attribute}")
    return base.make_problem(kernel, device=device, shape=shape or SHAPE, dtype=dtype)


def candidate(act="nothing", parts=1):
    return Candidate.of({"act": act, "parts": parts})


def measurer(tmp_path: Path, **more):
    given = {"platform": "cpu", "lock_folder": tmp_path, "effort": QUICK, "threads": 2}
    return TpuMeasurer(**{**given, "timeout_s": 120, **more})


def workers():
    return [p for p in psutil.Process().children() if "autotune.measure.worker" in p.cmdline()]


def test_right_wrong_refused_and_identical_candidates_of_one_call(tmp_path):
    same = Candidate.of({"act": "quite the same", "parts": 1})
    asked = [candidate(), candidate(parts=2), candidate("half"), candidate("nan"),
             candidate("refuses"), same]  # fmt: skip
    with measurer(tmp_path) as one:
        found = dict(one.measure(problem_of("PRODUCT"), asked))
        assert len(workers()) == 1
    assert workers() == [], "a closed measurer leaves no process"
    assert found.keys() == set(asked)
    status = [found[c].status for c in asked]
    assert status == ["ok", "ok", "wrong", "wrong", "failed", "ok"]
    ok, half, nan = found[asked[0]], found[asked[2]], found[asked[3]]
    assert len(ok.samples_ms) >= 3
    assert all(math.isfinite(s) and s > 0 for s in ok.samples_ms)
    assert (ok.timer, ok.device_kind, ok.scope, ok.seed) == ("device_profile", "cpu", "module", 0)
    assert 0 < ok.error < ok.tolerance
    assert ok.checked == "at its own size on cpu"
    assert half.error > half.tolerance
    assert nan.error == math.inf
    assert "is off by" in half.reason
    assert found[asked[4]].reason == "NotImplementedError: no such block"
    assert found[same].samples_ms == ok.samples_ms
    assert found[same].shared_with == asked[0].json, "timed once"
    assert ok.shared_with is None


def test_a_hang_and_an_abort_cost_one_candidate_each_and_are_recorded(tmp_path):
    asked = [candidate("aborts in tracing"), candidate("hangs"), candidate(parts=2)]
    with measurer(tmp_path, timeout_s=12, threads=1) as one:
        found = dict(one.measure(problem_of("PRODUCT"), asked))
    aborted, hung, right = (found[c] for c in asked)
    assert (aborted.status, hung.status, right.status) == ("crashed", "timeout", "ok")
    assert aborted.reason == "the measuring worker ended with SIGABRT"
    assert hung.reason == "took longer than 12 s in the measuring worker"
    assert workers() == []


@pytest.mark.nightly
def test_every_way_to_lose_the_worker_costs_the_culprit_only(tmp_path):
    acts = ["aborts in tracing", "hangs in tracing", "aborts", "hangs", "raises"]
    asked = [candidate(), *map(candidate, acts), candidate(parts=2), candidate(parts=4)]
    with measurer(tmp_path, timeout_s=40, threads=3) as one:
        found = dict(one.measure(problem_of("PRODUCT"), asked))
    status = [found[c].status for c in asked]
    assert status == ["ok", "crashed", "timeout", "crashed", "timeout", "failed", "ok", "ok"]
    assert "the device lost a packet" in found[asked[5]].reason


@pytest.mark.nightly
def test_the_hosts_clock_is_used_when_asked_for_and_says_so(tmp_path):
    shape = dict.fromkeys("mkn", 1024)
    with measurer(tmp_path, timer="host_clock", effort=Effort(most=20)) as one:
        (record,) = dict(one.measure(problem_of("PRODUCT", shape), [candidate()])).values()
    assert record.status == "ok", record.reason
    assert record.timer == "host_clock"


@pytest.mark.nightly
def test_a_pallas_kernel_takes_the_same_path_in_interpret_mode(tmp_path):
    kernel = base.load("matmul")
    problem = base.make_problem(kernel, device="v6e", shape=dict.fromkeys("mkn", 256))
    default = Candidate.of(kernel.default(problem, devices.get("v6e")))
    with measurer(tmp_path) as one:
        (record,) = dict(one.measure(problem, [default])).values()
    assert record.status == "ok", record.reason
    assert record.device_kind == "cpu"
    assert record.error < record.tolerance


def test_no_tpu_is_one_clear_line_and_the_lock_is_given_back(tmp_path):
    one = TpuMeasurer(lock_folder=tmp_path, platform="nonesuch")
    with pytest.raises(NoTpuError, match="the nonesuch cannot be used: ") as raised:
        list(one.measure(problem_of("PRODUCT"), [candidate()]))
    assert "\n" not in str(raised.value)
    one.close()
    DeviceLock(folder=tmp_path).acquire(wait_s=0)


HOLD = """
import sys
from pathlib import Path
from autotune.measure.lock import DeviceLock
lock = DeviceLock(folder=Path(sys.argv[1]))
lock.acquire(wait_s=0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock until its stdin ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


def test_a_second_timing_job_names_the_first_or_waits_for_it(tmp_path, holder):
    lock = tmp_path / "autotune-tpu.lock"
    with (
        measurer(tmp_path) as one,
        pytest.raises(DeviceBusyError, match=f"the TPU is in use: process {holder.pid} is"),
    ):
        list(one.measure(problem_of("PRODUCT"), [candidate()]))
    assert workers() == [], "the device is not touched"
    assert lock.exists(), "a lock is never deleted"
    holder.stdin.close()
    DeviceLock(folder=tmp_path).acquire(wait_s=60)


def test_a_chip_that_another_process_holds_is_named_busy_not_missing(tmp_path, monkeypatch):
    says = "The TPU is already in use by process with pid 4711. Not attempting to load libtpu.so"
    (tmp_path / "jax.py").write_text(f"raise RuntimeError({says!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DeviceBusyError) as raised:
        devices.attached()
    assert str(raised.value) == (
        "The TPU is already in use by process with pid 4711: wait for it to end, or use "
        "--until compile"
    )
    (tmp_path / "jax.py").write_text("raise RuntimeError('no such backend')")
    assert devices.attached() is None


def test_a_killed_timing_job_leaves_no_stale_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    started = time.monotonic()
    DeviceLock(folder=tmp_path).acquire(wait_s=30)
    assert time.monotonic() - started < 10


def test_a_lock_that_cannot_be_opened_is_one_clear_line(tmp_path):
    (tmp_path / "autotune-tpu.lock").mkdir()
    with pytest.raises(NoTpuError, match=r"the TPU's lock .*autotune-tpu\.lock cannot be opened: "):
        DeviceLock(folder=tmp_path).acquire(wait_s=0)


def test_the_environment_is_the_users_without_what_hides_the_chip():
    user = {"HOME": "/home/me", "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=98304",
            "TPU_WORKER_HOSTNAMES": "localhost", "JAX_COMPILATION_CACHE_DIR": "/cache"}  # fmt: skip
    found = measuring_environment(user, platform="tpu")
    assert found["JAX_PLATFORMS"] == "tpu,cpu"
    assert found["LIBTPU_INIT_ARGS"] == user["LIBTPU_INIT_ARGS"]
    assert found["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert "JAX_COMPILATION_CACHE_DIR" not in found
    inside = measuring_environment(worker_environment(user, "/dump"), platform="tpu")
    assert inside["JAX_PLATFORMS"] == "tpu,cpu"
    assert inside.keys().isdisjoint({"ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_ACCELERATOR_TYPE"})
    assert measuring_environment(user, platform="cpu")["JAX_PLATFORMS"] == "cpu"
    chosen = measuring_environment({"TPU_ACCELERATOR_TYPE": "v5e-8"}, platform="tpu")
    assert chosen["TPU_ACCELERATOR_TYPE"] == "v5e-8"


def test_interpret_mode_tells_right_from_wrong_and_from_nothing_said():
    problem = problem_of("COPY", {"m": 160, "n": 128})
    with Interpreter() as interpreter:
        right, wrong = (
            interpreter.check(problem, {"rows": 16, "wrong": wrong}) for wrong in (False, True)
        )
    assert (right.status, right.how) == ("ok", "at m=48 in interpret mode")
    assert wrong.status == "wrong", "an index map wrong from the third block on needs three blocks"
    kernel = base.load("measure_kernels:UNCHECKED")
    silent = check_interpreted(kernel, problem_of("UNCHECKED"), {"act": "half", "parts": 1})
    assert (silent.status, silent.how) == ("ok", "the kernel has no reference: not checked")


@pytest.mark.parametrize(
    ("act", "reason"),
    [("reads outside", "not finite"), ("writes outside", "outside its arrays: Out-of-bounds")],
)
def test_a_kernel_that_leaves_its_arrays_is_wrong_in_interpret_mode(act, reason):
    problem, config = problem_of("COPY", {"m": 32, "n": 128}), {"rows": 16, "wrong": False}
    kernel = base.load("measure_kernels:COPY")
    found = check_interpreted(kernel, problem, config | {"act": act})
    assert found.status == "wrong"
    assert reason in str(found.reason)


def test_a_kernel_that_says_interpret_mode_cannot_run_it_is_not_run_there():
    problem, config = problem_of("UNRUN", {"m": 32, "n": 128}), {"rows": 16, "wrong": False}
    kernel = base.load("measure_kernels:UNRUN")
    found = check_interpreted(kernel, problem, config | {"act": "aborts"})
    assert (found.status, found.error) == ("ok", None)
    assert found.how == "interpret mode cannot run this kernel: not checked"


@pytest.mark.parametrize(("n", "checked_at"), [(384, "its own size"), (320, "n=384")])
def test_a_pipeline_within_a_kernel_that_asks_for_its_chip_is_interpreted(n, checked_at):
    """An edge within a tile, which the interpreter cannot write, is checked in whole tiles."""
    kernel = base.load("matmul")
    shape = {"m": 384, "k": 256, "n": n}
    problem = base.make_problem(kernel, device="v5e", shape=shape)
    config = {
        "bm": 128, "bk": 128, "bn": 128, "grid_order": "mn", "buffers": 3, "vmem_limit_bytes": None,
    }  # fmt: skip
    found = check_interpreted(kernel, problem, config)
    assert (found.status, found.how) == ("ok", f"at {checked_at} in interpret mode")


@pytest.mark.nightly
def test_a_kernel_that_hangs_or_aborts_in_interpret_mode_is_a_verdict():
    kernel, problem = base.load("measure_kernels:COPY"), problem_of("COPY", {"m": 160, "n": 128})
    config = {"rows": 16, "wrong": False}
    aborted = check_interpreted(kernel, problem, config | {"act": "aborts"})
    assert (aborted.status, aborted.how) == ("crashed", "in interpret mode")
    hung = check_interpreted(kernel, problem, config | {"act": "hangs"}, timeout_s=5)
    assert hung.status == "timeout"


def judged(**record):
    problem = problem_of("PRODUCT", dtype="bfloat16")
    judge = Judge(
        problem=problem, device=devices.get("v6e"), flops=2 * 128**3, kernel_fingerprint="f"
    )
    row = judge._row(candidate(), "ok", None)
    return judge.measured(row, Measured(**{"device_kind": "TPU v6 lite", **record}))


def test_the_row_has_the_median_the_raw_samples_and_how_it_was_checked():
    row = judged(status="ok", samples_ms=(0.3, 0.1, 0.2), error=0.001, tolerance=0.03, seed=7)
    assert (row.status, row.evidence, row.timer) == ("ok", "measured", "device_profile")
    assert row.latency_measured_ms == 0.2
    assert row.samples_ms == [0.3, 0.1, 0.2]
    assert json.loads(row.measurement) | {"method": 0} == {
        "device_kind": "TPU v6 lite", "error": 0.001, "method": 0, "scope": "module", "seed": 7,
        "tolerance": 0.03,
    }  # fmt: skip
    assert row.mfu == pytest.approx(2 * 128**3 / 0.2e-3 / 9.2e14)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_a_failed_row_and_never_wins(wrong):
    row = judged(status="ok", samples_ms=(1.0, wrong))
    assert row.status == "failed"
    assert row.reason.startswith("a measured time is not a finite number above 0")
    assert row.latency_measured_ms is None


def test_times_of_interpret_mode_or_another_chip_never_become_a_row():
    assert judged(status="ok", samples_ms=(1.0,), device_kind="cpu").reason == (
        "measured on cpu, not on TPU v6 lite"
    )
    assert judged(status="ok", samples_ms=(1.0,), device_kind="TPU7x").status == "failed"
    replayed = judged(status="ok", samples_ms=(1.0,), device_kind=None, timer="replay")
    assert (replayed.status, replayed.timer) == ("ok", "replay")


def test_a_wrong_candidate_has_its_error_in_the_reason_and_no_latency():
    row = judged(status="wrong", reason="the output is off by 0.8", error=math.inf, tolerance=0.03)
    assert (row.status, row.evidence, row.latency_measured_ms) == ("wrong", "measured", None)
    assert row.reason == "the output is off by 0.8"
    json.loads(row.measurement)  # an infinite error is no JSON


def test_a_time_beyond_the_chips_peak_is_a_failed_row():
    row = judged(status="ok", samples_ms=(1e-9,))
    assert row.status == "failed"


@pytest.mark.parametrize("status", ["timeout", "crashed", "failed"])
def test_a_lost_measurement_keeps_the_evidence_the_row_had(status):
    row = judged(status=status, reason="gone", device_kind=None)
    assert (row.status, row.reason, row.evidence) == (status, "gone", "model")


def test_measuring_leaves_the_callers_environment_alone():
    before = dict(os.environ)
    measuring_environment(os.environ, platform="tpu")
    assert dict(os.environ) == before
