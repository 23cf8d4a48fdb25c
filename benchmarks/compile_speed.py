"""How fast candidates compile: 27 matmul tiles for tpu7x on one worker, and their cache.

    python benchmarks/compile_speed.py [--jobs 1] [--device tpu7x]

Target: 20 s for all 27 on an otherwise idle machine, starting the worker included.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import tempfile
import time
from pathlib import Path

from autotune.candidate import Candidate
from autotune.compiler.cache import Cache, CompileCache
from autotune.compiler.fingerprint import kernel_fingerprint
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.evidence import Compiled
from autotune.kernels import base

TARGET_S = 20.0
BLOCKS = (256, 512, 1024)
SHAPE = {"m": 4096, "k": 7168, "n": 18432}


def tasks(device: str) -> list[Task]:
    """The 27 tiles, as the kernel itself would run them."""
    kernel = base.load("matmul")
    problem = base.make_problem(kernel, device=device, shape=SHAPE)
    blocks = [
        dict(zip(("bm", "bk", "bn"), b, strict=True)) for b in itertools.product(BLOCKS, repeat=3)
    ]
    return [
        Task(problem=problem, candidate=Candidate.of(kernel.canonical(problem, config)))
        for config in blocks
    ]


def compile_all(pool: CompilePool, wanted: list[Task]) -> tuple[dict[Task, Compiled], float]:
    """(verdicts, wall seconds)."""
    started = time.perf_counter()
    found: dict[Task, Compiled] = {}
    for task, compiled in pool.run(wanted):
        found[task] = compiled
        blocks = " x ".join(f"{task.candidate.config[b]:4}" for b in ("bm", "bk", "bn"))
        bundles = sum(schedule.bundles for schedule in compiled.schedules)
        told = compiled.reason or f"{bundles:6} bundles"
        print(f"  {blocks}  {compiled.compile_seconds:6.2f} s  {compiled.status:4}  {told}")
    return found, time.perf_counter() - started


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--device", default="tpu7x")
    chosen = options.parse_args()
    wanted = tasks(chosen.device)
    with CompilePool(jobs=chosen.jobs) as pool:
        found, wall_s = compile_all(pool, wanted)
    in_worker_s = sum(compiled.compile_seconds or 0.0 for compiled in found.values())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    verdict = "met" if wall_s <= TARGET_S else "missed"
    print(
        f"{len(found)} candidates on {chosen.jobs} worker(s): {wall_s:.1f} s; "
        f"target {TARGET_S:g} s {verdict}"
    )
    print(
        f"  tracing, compiling and parsing {in_worker_s:.1f} s, the rest is starting the worker; "
        f"CPU {used.ru_utime + used.ru_stime:.1f} s, largest {used.ru_maxrss / 2**20:.2f} GiB"
    )
    with tempfile.TemporaryDirectory() as folder:
        cache = CompileCache(
            Cache(Path(folder)),
            fingerprint=kernel_fingerprint("matmul"),
            timeout_s=pool.timeout_s,
            memory_limit_bytes=pool.memory_limit_bytes,
        )
        for task, compiled in found.items():
            cache.put(task, compiled)
        started = time.perf_counter()
        for _ in range(300 // len(found) + 1):
            assert all(cache.get(task) == compiled for task, compiled in found.items())
        reads = len(found) * (300 // len(found) + 1)
        print(f"  reading {reads} cached verdicts: {time.perf_counter() - started:.3f} s")


if __name__ == "__main__":
    main()
