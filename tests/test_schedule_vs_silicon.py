"""The benchmark that fits the shipped constants: which rows, and by which clock."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import device as devices
from autotune.calibration import data
from autotune.calibration.evidence_of import Evidence
from autotune.call_record import Program
from autotune.evidence import Compiled, XlaOp

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


def test_of_two_runs_of_one_problem_the_faster_counts():
    slow, fast = measured(1.2, bench.TOKAMAX, n=1), measured(1.0, bench.TOKAMAX, n=1)
    other, host = measured(3.0, bench.TOKAMAX, n=2), measured(2.0, bench.V6E, n=1)
    assert bench._faster_runs([slow, host, fast, host, other]) == [host, host, fast, other]
