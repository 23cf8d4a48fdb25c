"""The cost model's cycles against the compiler's own simulator, for small matmuls.

    python benchmarks/simulator_check.py

Each case is compiled in a process of its own: the simulator's flag is read once per process, it
simulates every grid step (a few seconds a case), and it may end the process, as it does on tpu7x.
The simulator has an HBM rate of its own, between the published peak and what copies reach, so no
case is bound by copies alone (bf16 blocks of 512 cubed are: 23 % above the simulator, 8 % at the
published peak). The fixed costs that are fitted to silicon are left out: it knows none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """A matmul of m, k, n in blocks of bm, bk, bn: a handful of steps."""

    device: str
    dtype: str
    sizes: tuple[int, int, int, int, int, int]


CASES = (
    Case("v6e", "bfloat16", (1024, 2048, 4096, 1024, 2048, 512)),
    Case("v6e", "bfloat16", (1024, 2048, 1024, 1024, 512, 1024)),
    Case("v6e", "float32", (1024, 1024, 1024, 512, 512, 512)),
    Case("v6e", "float32", (512, 1024, 1024, 256, 256, 512)),
    Case("v5e", "float32", (512, 1024, 512, 256, 512, 256)),
)
_CYCLES = re.compile(r"estimated_cycles: (\d+)")


def simulated_and_predicted(case: Case) -> tuple[int, float]:
    """(the simulator's cycles, the cost model's) of a matmul, from a process of its own.

    Raises RuntimeError where the compiler left no profile.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                "--inside",
                folder,
                case.device,
                case.dtype,
                *map(str, case.sizes),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        profiles = list(Path(folder).glob("*_static_llo_profile.textproto"))
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not profiles or not answers:
            raise RuntimeError(f"no profile for {case}: {done.stderr[-300:]}")
        found = [int(n) for p in profiles for n in _CYCLES.findall(p.read_text())]
        return max(found), float(json.loads(answers[-1])["cycles"])


def _inside(folder: str, case: Case) -> None:
    from autotune.compiler import environment

    with tempfile.TemporaryDirectory() as dump:
        inside = environment.worker_environment(os.environ, dump)
        inside["LIBTPU_INIT_ARGS"] += f" --xla_jf_dump_static_llo_profile_to={folder}"
        os.environ.update(inside)
        from autotune import cost_model, pallas_call
        from autotune import device as devices
        from autotune.candidate import Candidate
        from autotune.compiler.task import Task
        from autotune.compiler.worker import Compiler
        from autotune.kernels import base

        m, k, n, bm, bk, bn = case.sizes
        kernel, device = base.load("matmul"), devices.get(case.device)
        problem = base.make_problem(
            kernel, device=case.device, shape={"m": m, "k": k, "n": n}, dtype=case.dtype
        )
        assert kernel.default is not None
        blocks = {**kernel.default(problem, device), "bm": bm, "bk": bk, "bn": bn}
        blocks["vmem_limit_bytes"] = device.usable_vmem_bytes  # blocks this large need more
        config = kernel.canonical(problem, blocks)
        compiled = Compiler(Path(dump)).evaluate(
            Task(problem=problem, candidate=Candidate.of(config))
        )
        program = pallas_call.trace(*kernel.build(problem, config), device)
        bare = replace(device, scalar_cycles=0.0, issued_step_s=0.0, launch_s=0.0)
        latency = cost_model.compiled_latency(program, compiled.schedules, bare)
        print(json.dumps({"cycles": latency.total_s * device.clock_hz}), flush=True)
        os._exit(0)  # the simulator's own clean-up may abort


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.inside:
        folder, device, dtype, *sizes = chosen.inside
        m, k, n, bm, bk, bn = map(int, sizes)
        _inside(folder, Case(device, dtype, (m, k, n, bm, bk, bn)))
    print(f"{'matmul, blocks':44} {'simulated':>10} {'model':>10}  error")
    for case in CASES:
        simulated, predicted = simulated_and_predicted(case)
        sizes = ", ".join("x".join(map(str, part)) for part in (case.sizes[:3], case.sizes[3:]))
        name = f"{case.device} {case.dtype} {sizes}"
        print(f"{name:44} {simulated:10} {predicted:10.0f} {predicted / simulated - 1:+6.1%}")


if __name__ == "__main__":
    main()
