"""How many of the compiler's VMEM refusals the model foresees, and whether it ever refuses wrongly.

    python benchmarks/vmem_verdicts.py [--devices v5e,v6e] [--kernels matmul] [--number 12]

Compiles candidates whose bill lies near their VMEM limit (0.7 to 1.6 times it; the limit is moved
as well as the blocks) and compares the verdicts. Targets: 95 % foreseen, none refused wrongly.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autotune import cost_model, pallas_call
from autotune import device as devices
from autotune.candidate import Candidate
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


def near_limit(kernel: base.Kernel, problem: Problem, device: Device, number: int) -> Foreseen:
    """Tasks whose bill is 0.7 to 1.6 times the limit, evenly spread, with our verdicts."""
    limits = tuple(n * MIB for n in LIMITS_MIB if n * MIB <= device.usable_vmem_bytes)
    names = kernel.tunables(problem, device)
    wanted = {"vmem_limit_bytes": (None, *limits), "buffers": (2,)}
    overrides = {name: values for name, values in wanted.items() if name in names}
    legal = space.candidates(kernel, problem, device, overrides).legal
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


def cases(
    kernels: list[str], names: list[str], dtypes: list[str]
) -> Iterator[tuple[base.Kernel, Problem, Device]]:
    for kernel_name in kernels:
        kernel = base.load(kernel_name)
        for name in names:
            for shape, dtype in CASES[kernel_name]:
                if dtype in dtypes:
                    problem = base.make_problem(kernel, device=name, shape=shape, dtype=dtype)
                    yield kernel, problem, devices.get(name)


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
        f"{problem.kernel:10} {problem.device:6} {problem.dtype:9} {len(foreseen):8} {refused:8}"
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
    options.add_argument("--devices", default=",".join(DEVICES))
    options.add_argument("--kernels", default=",".join(n for n in CASES if n in base.REGISTRY))
    options.add_argument("--dtypes", default="bfloat16,float32")
    options.add_argument("--number", type=int, default=12, help="compiles per line")
    options.add_argument("--jobs", type=int, default=1)
    chosen = options.parse_args()
    print("kernel     device dtype     compiled refusals  foreseen  share  wrong  other")
    refused = foreseen = 0
    with CompilePool(jobs=chosen.jobs, timeout_s=300) as pool:
        names = (chosen.kernels, chosen.devices, chosen.dtypes)
        for kernel, problem, device in cases(*(given.split(",") for given in names)):
            tasks = near_limit(kernel, problem, device, chosen.number)
            line = report(problem, tasks, dict(pool.run(tasks)))
            refused, foreseen = refused + line[0], foreseen + line[1]
    if refused:
        print(f"all: {foreseen} of {refused} refusals foreseen, {foreseen / refused:.0%}")


if __name__ == "__main__":
    main()
