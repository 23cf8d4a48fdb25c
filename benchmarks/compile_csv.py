"""Compiles every configuration of a CSV of measured kernels, and says which the compiler refuses.

    python benchmarks/compile_csv.py silicon_v6e_splash.csv --kernel jax.splash [--jobs 1]

The CSV has the columns `kernel, device, problem, config`, `problem` and `config` in the
leaderboard's JSON form. Ends with exit status 1 where a row of the kernel got no compiled evidence.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autotune.candidate import Candidate
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.kernels import base


def tasks(path: Path, kernel_name: str) -> list[Task]:
    """The rows of one kernel, in the file's order; equal candidates once."""
    kernel = base.load(kernel_name)
    found: dict[tuple[str, str], Task] = {}
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            if record["kernel"] != kernel_name:
                continue
            given = json.loads(record["problem"])
            problem = base.make_problem(kernel, device=record["device"], **given)
            config = kernel.canonical(problem, json.loads(record["config"]))
            candidate = Candidate.of(config)
            found[problem.key, candidate.json] = Task(problem=problem, candidate=candidate)
    return list(found.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("csv", type=Path)
    options.add_argument("--kernel", required=True)
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--timeout", type=float, default=900.0, help="seconds a configuration")
    arguments = options.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    with CompilePool(jobs=arguments.jobs, timeout_s=arguments.timeout) as pool:
        for task, compiled in pool.run(tasks(arguments.csv, arguments.kernel)):
            counts[compiled.status] += 1
            bundles = [schedule.bundles for schedule in compiled.schedules]
            print(compiled.status, compiled.reason or bundles, task.candidate.json, flush=True)
    print(", ".join(f"{status} {count}" for status, count in counts.items()) or "no rows")
    sys.exit(0 if set(counts) == {"ok"} else 1)


if __name__ == "__main__":
    main()
