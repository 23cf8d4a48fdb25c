"""How many of the compiler's VMEM refusals the model foresees, and whether it ever refuses wrongly.

    python benchmarks/vmem_verdicts.py [--devices v5e,v6e] [--kernels matmul] [--number 12]
    python benchmarks/vmem_verdicts.py --configs configs/dsv3.yaml [--devices v5e]

Compiles candidates whose bill lies near their VMEM limit (0.7 to 1.6 times it) and compares the
verdicts. Targets: 95 % foreseen, none refused wrongly. The first form moves the limit as well as
the blocks; the second takes what sweeps of the files would: their spaces, at their own limits.
Verdicts are kept in autotune's compile cache.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
from collections.abc import Iterator, Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autotune import config, cost_model, pallas_call
from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.cache import Cache, CompileCache
from autotune.compiler.fingerprint import kernel_fingerprint
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.device import DEVICES, MIB, Device
from autotune.errors import KernelError
from autotune.evidence import Compiled
from autotune.kernels import base
from autotune.problem import Problem
from autotune.search import space

TRACED = 240  # candidates looked at per kernel and device
LIMITS_MIB = (4, 6, 8, 12, 16, 24, 32, 48)
ATTENTION = {
    "batch": 1, "q_heads": 64, "kv_heads": 64, "q_len": 4096, "kv_len": 4096,
    "head_dim_qk": 128, "head_dim_v": 128,
}  # fmt: skip
# Operands too large for XLA to park them in VMEM, where the kernel's bill would not be the whole.
CASES: dict[str, list[tuple[dict[str, int], str]]] = {
    "matmul": [({"m": 8192, "k": 8192, "n": 8192}, dtype) for dtype in ("bfloat16", "float32")],
    "flash_fwd": [(ATTENTION, "bfloat16")],
    "flash_dq": [(ATTENTION, "bfloat16")],
    "flash_dkv": [(ATTENTION, "bfloat16")],
    "splash": [(ATTENTION, "bfloat16")],
}
Foreseen = dict[Task, str | None]
Case = tuple[base.Kernel, Problem, Sequence[Candidate]]


def moved_limits(kernel: base.Kernel, problem: Problem, device: Device) -> Sequence[Candidate]:
    """The legal candidates of a kernel's space with a range of VMEM limits in it."""
    limits = tuple(n * MIB for n in LIMITS_MIB if n * MIB <= device.usable_vmem_bytes)
    names = kernel.tunables(problem, device)
    wanted = {"vmem_limit_bytes": (None, *limits), "buffers": (2,)}
    overrides = {name: values for name, values in wanted.items() if name in names}
    return space.candidates(kernel, problem, device, overrides).legal


def near_limit(
    kernel: base.Kernel, problem: Problem, legal: Sequence[Candidate], number: int
) -> Foreseen:
    """Tasks whose bill is 0.7 to 1.6 times the limit, evenly spread, with our verdicts."""
    device = devices.get(problem.device)
    drawn = random.Random(0).sample(legal, min(TRACED, len(legal)))
    found: list[tuple[float, Task, str | None]] = []
    for candidate in drawn:
        ratio, reason = _judged(kernel, problem, device, candidate)
        if 0.7 <= ratio <= 1.6:
            found.append((ratio, Task(problem=problem, candidate=candidate), reason))
    found.sort(key=lambda entry: entry[0])
    every = max(1, len(found) // number)
    return {task: reason for _, task, reason in found[::every][:number]}


def _judged(
    kernel: base.Kernel, problem: Problem, device: Device, candidate: Candidate
) -> tuple[float, str | None]:
    """(bill / limit of the fullest call, why the model refuses the candidate)."""
    try:
        function, arguments = kernel.build(problem, candidate.config)
        program = pallas_call.trace(function, arguments, device)
    except (ValueError, KernelError):
        return 0.0, None
    ratio = max(
        cost_model.vmem_bill(call, device).total / cost_model.vmem_limit_bytes(call, device)
        for call in program.calls
    )
    return ratio, cost_model.rejection(program, device)


def cases(kernels: list[str], names: list[str], dtypes: list[str]) -> Iterator[Case]:
    for kernel_name in kernels:
        kernel = base.load(kernel_name)
        for name in names:
            for shape, dtype in CASES[kernel_name]:
                if dtype in dtypes:
                    problem = base.make_problem(kernel, device=name, shape=shape, dtype=dtype)
                    yield kernel, problem, moved_limits(kernel, problem, devices.get(name))


def configured(files: list[str], names: list[str] | None) -> Iterator[Case]:
    for file in files:
        for spec in config.load(file, devices=names).problems:
            yield base.load(spec.problem.kernel), spec.problem, space.of(spec).legal


def verdicts(pool: CompilePool, kernel: str, tasks: Sequence[Task]) -> dict[Task, Compiled]:
    """The compiler's word on each task, from the cache where it is there."""
    cache = CompileCache(
        Cache(), fingerprint=kernel_fingerprint(kernel), timeout_s=pool.timeout_s,
        memory_limit_bytes=pool.memory_limit_bytes,
    )  # fmt: skip
    found = {task: known for task in tasks if (known := cache.get(task)) is not None}
    for task, compiled in pool.run([task for task in tasks if task not in found]):
        cache.put(task, compiled)
        found[task] = compiled
    return found


def report(problem: Problem, foreseen: Foreseen, verdicts: dict[Task, Compiled]) -> tuple[int, int]:
    """Prints the line of a kernel and device; gives (refusals, foreseen)."""
    counts = collections.Counter(
        (verdicts[task].status, reason is not None) for task, reason in foreseen.items()
    )
    refused = counts["oom", True] + counts["oom", False]
    share = f"{counts['oom', True] / refused:6.0%}" if refused else "     -"
    wrong = [t for t, reason in foreseen.items() if reason and verdicts[t].status == "ok"]
    other = sum(n for (status, _), n in counts.items() if status not in ("ok", "oom"))
    print(
        f"{problem.kernel:14} {problem.device:6} {problem.dtype:9} {len(foreseen):8} {refused:8}"
        f" {counts['oom', True]:9} {share} {len(wrong):6} {other:6}",
        flush=True,
    )
    for task in wrong:
        print(f"  refused wrongly: {task.candidate.json}: {foreseen[task]}")
    for task, reason in foreseen.items():
        verdict = verdicts[task]
        if verdict.status not in ("ok", "oom") or (verdict.status == "oom" and reason is None):
            told = f"{verdict.status}: {verdict.reason}"
            print(f"  {task.problem.device} {task.candidate.json}: {told}", file=sys.stderr)
    return refused, counts["oom", True]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--devices", help="default: all, or those of the files")
    options.add_argument("--kernels", default=",".join(n for n in CASES if n in base.REGISTRY))
    options.add_argument("--dtypes", default="bfloat16,float32")
    options.add_argument("--configs", nargs="+", help="problems and spaces of these files")
    options.add_argument("--number", type=int, default=12, help="compiles per line")
    options.add_argument("--jobs", type=int, default=1)
    chosen = options.parse_args()
    names = chosen.devices.split(",") if chosen.devices else None
    if chosen.configs:
        wanted = configured(chosen.configs, names)
    else:
        wanted = cases(chosen.kernels.split(","), names or list(DEVICES), chosen.dtypes.split(","))
    print("kernel         device dtype     compiled refusals  foreseen  share  wrong  other")
    refused = foreseen = 0
    with CompilePool(jobs=chosen.jobs, timeout_s=300) as pool:
        for kernel, problem, legal in wanted:
            tasks = near_limit(kernel, problem, legal, chosen.number)
            line = report(problem, tasks, verdicts(pool, kernel.name, list(tasks)))
            refused, foreseen = refused + line[0], foreseen + line[1]
    if refused:
        print(f"all: {foreseen} of {refused} refusals foreseen, {foreseen / refused:.0%}")


if __name__ == "__main__":
    main()
