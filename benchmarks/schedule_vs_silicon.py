"""Predicted against measured latency, for rows of a CSV with published TPU timings.

    python benchmarks/schedule_vs_silicon.py ironwood_published.csv [--jobs 1]

The CSV has the columns `kernel, device, problem, config, latency_ms`, `problem` and `config` in the
leaderboard's JSON form. `flash_fwd` stands for the kernel the timings are of (published_kernels).
Rows of other people's kernels and of XLA are listed without a prediction.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autotune import cost_model, pallas_call
from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.evidence import Compiled
from autotune.kernels import base

KERNELS = {"matmul": "matmul", "flash_fwd": "published_kernels:FLASH"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured row; `task` is None where no kernel here is the measured one."""

    label: str
    measured_ms: float
    task: Task | None


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [_row(record) for record in csv.DictReader(file)]


def _row(record: dict[str, str]) -> Row:
    problem, config = json.loads(record["problem"]), json.loads(record["config"])
    blocks = " ".join(f"{name} {value}" for name, value in config.items())
    constant = problem["options"].get("max_logit_const")
    label = f"{record['device']} {record['kernel']} {blocks}{' constant max' if constant else ''}"
    task = None
    if record["kernel"] in KERNELS:
        kernel = base.load(KERNELS[record["kernel"]])
        options = {k: v for k, v in problem["options"].items() if k in kernel.options}
        made = base.make_problem(
            kernel,
            device=record["device"],
            shape=problem["shape"],
            options=options,
            dtype=problem["dtype"],
        )
        candidate = Candidate.of(kernel.canonical(made, config))
        task = Task(problem=made, candidate=candidate)
    return Row(label=label, measured_ms=float(record["latency_ms"]), task=task)


def predicted(task: Task, compiled: Compiled) -> tuple[cost_model.Latency, cost_model.Latency]:
    """(by the schedule, by the model) for a candidate that compiled."""
    kernel, device = base.load(task.problem.kernel), devices.get(task.problem.device)
    function, arguments = kernel.build(task.problem, task.candidate.config)
    program = pallas_call.trace(function, arguments, device)
    return (
        cost_model.compiled_latency(program, compiled.schedules, device),
        cost_model.model_latency(program, device),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("csv", type=Path)
    options.add_argument("--jobs", type=int, default=1)
    chosen = options.parse_args()
    rows = read(chosen.csv)
    with CompilePool(jobs=chosen.jobs, timeout_s=600) as pool:
        verdicts = dict(pool.run([row.task for row in rows if row.task]))
    print(f"{'':52} measured compiled  error    model  error  bound")
    for row in rows:
        line = f"{row.label:52} {row.measured_ms:8.3f}"
        verdict = verdicts[row.task] if row.task else None
        if row.task is None or verdict is None or verdict.status != "ok":
            print(line, verdict.reason if verdict else "not predicted")
            continue
        schedule, model = predicted(row.task, verdict)
        for latency in (schedule, model):
            ms = latency.total_s * 1e3
            line += f" {ms:8.3f} {ms / row.measured_ms - 1:+6.1%}"
        print(line, schedule.bound)


if __name__ == "__main__":
    main()
