"""The worker that traces and compiles: a job a line on stdin, an answer a line on its own pipe.

Expendable: libtpu may abort, hang or eat memory in here. Started by `process.py`.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from autotune import device as devices
from autotune import evidence
from autotune.call_record import Program
from autotune.child import serve
from autotune.compiler import environment
from autotune.compiler.hlo import xla_ops
from autotune.compiler.program import read_schedules
from autotune.compiler.task import Task
from autotune.compiler.verdict import Verdict, classify
from autotune.device import Device
from autotune.errors import KernelError
from autotune.evidence import Compiled
from autotune.kernels import base, contract
from autotune.pallas_call import semantics_reason, trace
from autotune.traced.capture import capture
from autotune.traced.jaxprs import call_names


class Compiler:
    """The TPU compiler for chips that are not there."""

    def __init__(self, dump_folder: Path) -> None:
        self._dump = dump_folder
        self._targets: dict[str, Any] = {}
        self._versions = environment.versions()

    def target(self, device: Device) -> Any:
        """The compile-only JAX device. On v4 it is the whole megacore chip only when asked for."""
        if device.name not in self._targets:
            more = {"chip_config_name": "megacore"} if device.cores > 1 else {}
            topology = topologies.get_topology_desc(device.topology, platform="tpu", **more)
            self._targets[device.name] = topology.devices[0]
        return self._targets[device.name]

    def evaluate(self, task: Task) -> Compiled:
        """The verdict on a candidate. Whatever the candidate raises becomes its reason."""
        started = time.perf_counter()
        schedules: tuple[evidence.Schedule, ...] = ()
        around: tuple[evidence.XlaOp, ...] = ()
        program = verdict = None
        try:
            if task.kind == "trace":
                program = _program(task)
            else:
                schedules, around = self._compiled(task)
        except KernelError as error:
            verdict = _refused_by_library(error) or Verdict(status="failed", reason=str(error))
        except _RefusedError as error:
            verdict = Verdict(status="pruned", reason=str(error))
        except (Exception, SystemExit) as error:
            verdict = classify(error)
        finally:
            self._empty_dump()
        return Compiled(
            status=verdict.status if verdict else "ok",
            reason=verdict.reason if verdict else None,
            repeatable=verdict.repeatable if verdict else True,
            schedules=schedules,
            xla_ops=around,
            program=program,
            compile_seconds=time.perf_counter() - started,
            jax_version=self._versions["jax"],
            libtpu_version=self._versions["libtpu"],
        )

    def _compiled(
        self, task: Task
    ) -> tuple[tuple[evidence.Schedule, ...], tuple[evidence.XlaOp, ...]]:
        device = devices.get(task.problem.device)
        kernel = base.load(task.problem.kernel)
        function, arguments = contract.built(kernel, task.problem, task.candidate.config)
        one = SingleDeviceSharding(self.target(device))
        captured = capture(function, arguments, device, one)
        text = captured.lower().compile().as_text()
        names = list(call_names(captured.marked.jaxpr))
        return read_schedules(self._dump, device, names), xla_ops(text)

    def _empty_dump(self) -> None:
        for path in self._dump.iterdir():
            path.unlink(missing_ok=True)


def _refused_by_library(error: KernelError) -> Verdict | None:
    """`unsupported` where a kernel of JAX's refuses, while it is traced, what it does not do."""
    if not isinstance(error.__cause__, NotImplementedError):
        return None
    verdict = classify(error.__cause__)
    return verdict if verdict.status == "unsupported" else None


class _RefusedError(Exception):
    """A config that the kernel, or the rules for its grid, cannot run."""


def _program(task: Task) -> Program:
    """The traced program. Raises KernelError, or _RefusedError with the rule that is broken."""
    kernel = base.load(task.problem.kernel)
    try:
        built = contract.built(kernel, task.problem, task.candidate.config)
    except ValueError as error:
        raise _RefusedError(" ".join(str(error).split())) from error
    function, arguments = contract.checked_output(kernel, task.problem, built)
    program = trace(function, arguments, devices.get(task.problem.device))
    for call in program.calls:
        if reason := semantics_reason(call):
            raise _RefusedError(reason)
    return program


def main(answers_fd: int, dump_folder: Path) -> None:
    """Serves until stdin ends. The first line names the device to warm up for, or null."""

    def at_end() -> None:
        shutil.rmtree(dump_folder, ignore_errors=True)

    with serve(answers_fd, at_end=at_end) as (next_job, answer):
        hello = next_job()
        compiler = Compiler(dump_folder)
        if hello["device"] is not None:
            compiler.target(devices.get(hello["device"]))
        answer({"ready": True})
        while True:
            answer(evidence.to_json(compiler.evaluate(Task.from_json(next_job()))))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
