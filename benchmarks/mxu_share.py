"""Share of the matrix units' limit that each kernel's steady step reaches, as compiled.

    python benchmarks/mxu_share.py [--jobs 1] [--device v6e tpu7x] [--kernel flash_fwd] [--units]

Limit: rows issued to the MXUs / (rows per cycle · MXUs), zero padding of narrow heads included.
`--units` adds how full the step keeps each unit. Attention is bf16, head dims 128 / 128 on v6e and
192 / 128 on tpu7x (both stream the same rows); the blocks are what a search chooses from.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autotune import device as devices
from autotune.candidate import Candidate, Config
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.cost_model import mxu_utilization
from autotune.device import MIB, Device
from autotune.evidence import Compiled, ScopeUse
from autotune.kernels import base
from autotune.pallas_call import trace

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when a backend starts: only traces here

MATMUL = {"m": 4096, "k": 7168, "n": 18432}
CUBE: Config = {"bm": 1024, "bk": 1024, "bn": 1024}
TILES = {"v6e": (512, 512), "tpu7x": (256, 1024)}
CAPPED_TILES = {"v6e": (512, 256)}
"""block_q_compute and block_kv_compute that schedule best, by chip; where a soft cap differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table: a kernel's options and blocks, and the share aimed at."""

    kernel: str
    label: str
    target: float
    config: Config
    options: dict[str, Any] = field(default_factory=dict)
    length: int = 4096


def cases(chip: str) -> Iterator[Case]:
    for buffers in (2, 3):
        config = {**CUBE, "buffers": buffers, "vmem_limit_bytes": 56 * MIB}
        label = f"1024³, {buffers} buffers"
        yield Case(kernel="matmul", label=label, target=0.90, config=config)
    attention: list[tuple[str, float, dict[str, Any]]] = [
        ("online softmax", 0.85, {}),
        ("max-logit constant", 0.95, {"max_logit_const": 0.0}),
        ("logit_soft_cap", 0.85, {"logit_soft_cap": 30.0}),
    ]
    for size in (2048, 1024):
        for what, target, options in attention:
            yield Case(
                kernel="flash_fwd", label=f"{size}², {what}", target=target, options=options,
                config=forward_blocks(size, chip, capped="logit_soft_cap" in options),
            )  # fmt: skip
        yield Case(
            kernel="splash", label=f"{size}², causal, online softmax", target=0.85,
            options={"mask": {"causal": {}}}, config=forward_blocks(size, chip), length=16384,
        )  # fmt: skip
    tiles = {"block_q": 1024, "block_kv": 1024}
    major = {"block_q_major": 4096, "block_kv_major": 4096}
    label = "4096 in tiles of 1024"
    yield Case(kernel="flash_dq", label=label, target=0.65, config={**major, "block_kv": 1024})
    yield Case(kernel="flash_dkv", label=label, target=0.65, config={**major, **tiles})


def forward_blocks(size: int, chip: str, *, capped: bool = False) -> Config:
    tiles = {**TILES, **CAPPED_TILES} if capped else TILES
    q_tile, kv_tile = tiles.get(chip, (512, 512))
    return {
        "block_q": size, "block_kv": size, "block_q_compute": q_tile, "block_kv_compute": kv_tile,
        "vmem_limit_bytes": 56 * MIB,
    }  # fmt: skip


def task_of(case: Case, chip: str) -> Task:
    kernel, device = base.load(case.kernel), devices.get(chip)
    shape = MATMUL
    if case.kernel != "matmul":
        shape = {
            "q_heads": 2, "kv_heads": 2, "q_len": case.length, "kv_len": case.length,
            "head_dim_qk": 192 if chip == "tpu7x" else 128, "head_dim_v": 128,
        }  # fmt: skip
    problem = base.make_problem(kernel, device=chip, shape=shape, options=case.options)
    assert kernel.default is not None
    config = kernel.canonical(problem, {**kernel.default(problem, device), **case.config})
    return Task(problem=problem, candidate=Candidate.of(config))


def share(task: Task, compiled: Compiled) -> float | None:
    kernel, config = base.load(task.problem.kernel), task.candidate.config
    device = devices.get(task.problem.device)
    counts = kernel.scope_counts(task.problem, config) if kernel.scope_counts else None
    program = trace(*kernel.build(task.problem, config), device)
    return mxu_utilization(program, compiled.schedules, device, scope_counts=counts)


def units(compiled: Compiled, device: Device) -> str:
    """How full the largest scope with products keeps each unit, in percent."""
    (schedule,) = compiled.schedules
    use: ScopeUse = max(
        (use for name, use in schedule.scopes.items() if use.mxu_rows and name != "rescale_step"),
        key=lambda use: use.mxu_rows,
    )
    filled = {
        unit: round(100 * slots / schedule.capacity[unit] / use.bundles)
        for unit, slots in use.units.items()
        if unit in schedule.capacity and ":" not in unit
    }
    spills = f"{use.spill_loads} + {use.spill_stores} spills"
    return f"{use.bundles} bundles, {spills}, " + ", ".join(f"{u} {n}" for u, n in filled.items())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--device", nargs="+", default=["v6e", "tpu7x"])
    options.add_argument("--kernel", nargs="+")
    options.add_argument("--units", action="store_true")
    chosen = options.parse_args()
    print("| kernel | case | target | device | share |\n| --- | --- | --- | --- | --- |")
    for chip in chosen.device:
        wanted = {
            task_of(case, chip): case
            for case in cases(chip)
            if not chosen.kernel or case.kernel in chosen.kernel
        }
        with CompilePool(jobs=chosen.jobs, timeout_s=900) as pool:
            for task, compiled in pool.run(list(wanted)):
                case = wanted[task]
                reached = share(task, compiled) if compiled.status == "ok" else None
                told = compiled.reason if reached is None else f"{reached:.0%}"
                line = f"| {case.kernel} | {case.label} | {case.target:.0%} | {chip} | {told} |"
                print(line, flush=True)
                if chosen.units and reached is not None:
                    print(f"    {units(compiled, devices.get(chip))}")


if __name__ == "__main__":
    main()
