"""The cost model's cycles against the compiler's own simulator, for small matmuls.

    python benchmarks/simulator_check.py [--device v6e]

Each case is compiled in a process of its own: the simulator's flag is read once per process, it
simulates every grid step, and it may end the process. The cases are bound by the matrix
units, since the simulator has a bandwidth of its own. The fixed costs that are fitted to silicon
are left out: the simulator knows none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

CASES = ((4096, 2048, 4096, 2048, 512, 2048), (4096, 2048, 2048, 2048, 512, 2048))
"""m, k, n and the blocks of each case: a handful of steps, bound by the matrix units."""
_CYCLES = re.compile(r"estimated_cycles: (\d+)")


def simulated_and_predicted(device: str, case: tuple[int, ...]) -> tuple[int, float]:
    """(the simulator's cycles, the cost model's) of a matmul, from a process of its own.

    Raises RuntimeError where the compiler left no profile.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--inside", folder, device, *map(str, case)],
            capture_output=True,
            text=True,
            check=False,
        )
        profiles = list(Path(folder).glob("*_static_llo_profile.textproto"))
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not profiles or not answers:
            raise RuntimeError(f"no profile for {device} {case}: {done.stderr[-300:]}")
        found = [int(n) for p in profiles for n in _CYCLES.findall(p.read_text())]
        return max(found), float(json.loads(answers[-1])["cycles"])


def _inside(folder: str, device_name: str, sizes: list[int]) -> None:
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

        m, k, n, bm, bk, bn = sizes
        kernel, device = base.load("matmul"), devices.get(device_name)
        problem = base.make_problem(kernel, device=device_name, shape={"m": m, "k": k, "n": n})
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
    options.add_argument("--device", default="v6e")
    options.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.inside:
        folder, device, *sizes = chosen.inside
        _inside(folder, device, [int(n) for n in sizes])
    print(f"{'matmul, blocks':40} {'simulated':>10} {'model':>10}  error")
    for case in CASES:
        simulated, predicted = simulated_and_predicted(chosen.device, case)
        name = f"{chosen.device} {'x'.join(map(str, case[:3]))}, {'x'.join(map(str, case[3:]))}"
        print(f"{name:40} {simulated:10} {predicted:10.0f} {predicted / simulated - 1:+6.1%}")


if __name__ == "__main__":
    main()
