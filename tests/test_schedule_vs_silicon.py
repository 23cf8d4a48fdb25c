"""The benchmark that fits the shipped constants: which rows, and by which clock."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import device as devices
from autotune.calibration import data
from autotune.calibration.evidence_of import Evidence
from autotune.calibration.run import Prediction
from autotune.call_record import Program
from autotune.candidate import Candidate
from autotune.compiler.cache import Cache
from autotune.evidence import Compiled, XlaOp
from autotune.kernels import base
from autotune.progress import Quiet
from autotune.search.prune import Stages

V6E = replace(devices.get("v6e"), launch_s=2e-6)


def loaded():
    path = Path(__file__).parents[1] / "benchmarks" / "schedule_vs_silicon.py"
    spec = importlib.util.spec_from_file_location("schedule_vs_silicon", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = loaded()


def measured(ms, where, **problem):
    return data.Measured(
        kernel="k", device="v6e", problem=problem, config={}, measured_ms=ms, part="fit",
        where=f"/data/{where}:2",
    )  # fmt: skip


def evidence(device_ms, where, more_ms=0.0):
    """A program of one XLA operation that takes `device_ms` by the device's clock."""
    read = round((device_ms * 1e-3 - V6E.launch_s) * V6E.copy_bytes_per_s)
    op = XlaOp(name="copy", opcode="copy", bytes_read=read, bytes_written=0, estimated_cycles=None)
    return Evidence(
        measured=measured(device_ms + more_ms, where), device=V6E, program=Program(calls=()),
        compiled=Compiled(status="ok", xla_ops=(op,)),
    )  # fmt: skip


def test_a_hosts_clock_is_taken_to_the_devices_and_the_devices_own_is_left_alone():
    by_host = [evidence(ms, bench.V6E, more_ms=0.02) for ms in (0.1, 0.2, 0.4, 0.8)]
    by_device = [evidence(ms, bench.TOKAMAX) for ms in (0.3, 0.6)]
    told = bench.in_device_time([*by_host, *by_device], V6E)
    times = [row.measured.measured_ms for row in told]
    assert times[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.002)
    assert told[4:] == by_device


def test_a_line_says_of_how_many_rows_it_is():
    rows = [
        Prediction(
            measured=measured(1.0, "a"), predicted_ms=1.1, model_ms=0.5, evidence="compiled"
        ),
        Prediction(measured=measured(1.0, "a"), predicted_ms=0.5, model_ms=0.5, evidence="model"),
        Prediction(measured=measured(1.0, "a"), reason="unknown kernel"),
    ]
    assert bench.line("x", rows, "compiled").startswith("| x | compiled | 1 of 3 (1) | ")
    assert bench.line("x", rows, "model").startswith("| x | model | 2 of 3 (1) | ")
    assert bench.line("x", rows[:1], "compiled").startswith("| x | compiled | 1 (1) | ")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("schedule_vs_silicon", "has none of silicon_v6e_splash.csv"),
        ("tokamax_winners", "has no silicon_tokamax_splash.csv"),
        ("search_strategies", "is no file"),
    ],
)
@pytest.mark.nightly
def test_missing_data_is_one_line_that_says_where_it_comes_from(script, said, tmp_path):
    path = Path(bench.__file__).with_name(f"{script}.py")
    ended = subprocess.run(
        [sys.executable, str(path), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert said in ended.stderr
    assert "docs/calibration.md, Where the measurements come from" in ended.stderr


def test_of_two_runs_of_one_problem_the_faster_counts():
    slow, fast = measured(1.2, bench.TOKAMAX, n=1), measured(1.0, bench.TOKAMAX, n=1)
    other, host = measured(3.0, bench.TOKAMAX, n=2), measured(2.0, bench.V6E, n=1)
    assert bench._faster_runs([slow, host, fast, host, other]) == [host, host, fast, other]


class Pool:
    """Counts what it is asked to compile."""

    timeout_s, memory_limit_bytes = 60.0, 2**34

    def __init__(self):
        self.asked = []

    def run(self, tasks):
        for task in tasks:
            self.asked.append(task)
            yield task, Compiled(status="ok")


def test_once_time_is_up_nothing_is_compiled_and_what_is_cached_is_still_told(tmp_path):
    pool, up = Pool(), [False]
    stages = Stages(
        pool=pool, cache=Cache(tmp_path), progress=Quiet(), calibrations={},
        out_of_time=lambda: up[0],
    )  # fmt: skip
    problem = base.make_problem(
        base.load("matmul"), device="v6e", shape={"m": 256, "k": 256, "n": 256}
    )
    judge = stages.judge(base.load("matmul"), problem)
    first, second = (Candidate.of({"bm": size}) for size in (128, 256))
    assert list(stages.verdicts(judge, [first])) == [first]
    up[0] = True
    assert list(stages.verdicts(judge, [first, second])) == [first]
    assert [task.candidate for task in pool.asked] == [first]
