"""Measures the register spills of attention's tiles, for `autotune/traced/measured_spills.json`.

    python benchmarks/tile_spills.py [--kernels flash_dq] [--chips v6e] --records spills.jsonl

Spills depend on the tile, not on the length of the sequence: a tile of each size is compiled on a
short one, a second or three each. Every compile is a line of the records; what is there is not
compiled again, and records of several versions of libtpu may lie in one file. With `--results` the
compiled rows of leaderboards count too. The table has, by formulas and size of the tiles, what they
surely spill (`sure_spills`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing is refused for want of VMEM, so that the compiler's report says what was spilled.
os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_scoped_vmem_limit_kib=65408"

from autotune import device as devices
from autotune import leaderboard
from autotune.candidate import Candidate
from autotune.compiler.fingerprint import kernel_fingerprint
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.device import KIB
from autotune.kernels import base
from autotune.traced.capture import capture
from autotune.traced.measured_spills import ALIKE, DATA, Size, formulas, size_of
from autotune.traced.outer_code import find_calls
from autotune.traced.tile_formulas import Use, tile_uses

CHIPS = ("v5e", "v6e", "tpu7x")
MANY = 4
"""So many different kernels of one size say for themselves how much their spills differ."""
ONE_COMPILER = 0.95
"""Share of a spill measured with one compiler only: where both were asked, they were within 5 %."""
SMALL = 2**19
"""Bytes of spills below which a difference of a few registers is a large share."""
HEADS = {"batch": 1, "q_heads": 4, "kv_heads": 4}
CAUSAL = {"causal": True}
MASKS = ({"causal": {}}, {"all": [{"causal": {}}, {"local": {"left": 512}}]})
LAYOUTS = {f"{name}_layout": "HEAD_DIM_MINOR" for name in "qkv"}
Options = Mapping[str, Any]
Variant = tuple[Options, str, int, int]  # options, dtype, head dims
Spilled = list[tuple[str, str, int]]  # of kernels of one size: (which, libtpu, bytes)
Spills = dict[tuple[str, tuple[str, ...]], dict[Size, Spilled]]


def forward_blocks() -> Iterator[dict[str, Any]]:
    """Tiles of 256 and 512 queries and 512 and 1024 keys, one or few and several to a block."""
    for q, kv in itertools.product((256, 512), (512, 1024)):
        for block_q, block_kv in ((512, kv), (1024, 1024)):
            yield {
                "block_q": block_q, "block_kv": block_kv, "block_q_compute": q,
                "block_kv_compute": kv, "vmem_limit_bytes": None,
            }  # fmt: skip


def splash_blocks() -> Iterator[dict[str, Any]]:
    single = ({"block_q": q, "block_kv": kv} for q, kv in SPLASH_TILES)
    several = ({"block_q": 1024, "block_kv": 1024} for _ in SPLASH_TILES)
    for (q, kv), *blocks in zip(SPLASH_TILES, single, several, strict=True):
        for block in blocks:
            tile = {"block_q_compute": q, "block_kv_compute": kv, "vmem_limit_bytes": None}
            yield {**block, **tile, "partial_mask": "computed"}


SPLASH_TILES = ((256, 256), *itertools.product((256, 512), (512, 1024)))


def dq_blocks() -> Iterator[dict[str, Any]]:
    """Tiles of 512 and 1024 a side."""
    for q, kv in itertools.product((512, 1024), repeat=2):
        yield {"block_q_major": q, "block_kv_major": 1024, "block_kv": kv}


def dkv_blocks() -> Iterator[dict[str, Any]]:
    for q, kv in itertools.product((512, 1024), repeat=2):
        yield {"block_q_major": 1024, "block_kv_major": 1024, "block_q": q, "block_kv": kv}


def jax_splash_blocks() -> Iterator[dict[str, Any]]:
    for q, kv in itertools.product((256, 512, 1024), (256, 512, 1024)):
        for block_kv in {kv, 1024}:
            yield {"block_q": q, "block_kv": block_kv, "block_kv_compute": kv, **LAYOUTS}


def jax_splash_backward_blocks() -> Iterator[dict[str, Any]]:
    forward = {"block_q": 512, "block_kv": 512, "block_kv_compute": 512, **LAYOUTS}
    for q, kv, fused in itertools.product((512, 1024), (256, 512), (True, False)):
        dq = {"block_q_dq": None if fused else q, "block_kv_dq": None if fused else 2 * kv}
        dkv = {"block_q_dkv": q, "block_kv_dkv": 1024, "block_kv_dkv_compute": kv}
        yield {**forward, **dkv, **dq, "use_fused_bwd_kernel": fused}


def jax_flash_blocks() -> Iterator[dict[str, Any]]:
    for q, kv in itertools.product((256, 512, 1024), (256, 512, 1024)):
        for major in {kv, 1024}:
            yield {"block_q": q, "block_k_major": major, "block_k": kv, "block_b": 1}


def jax_dq_blocks() -> Iterator[dict[str, Any]]:
    for q, kv in itertools.product((512, 1024), repeat=2):
        for major in {kv, 1024}:
            yield {"block_q_dq": q, "block_k_major_dq": major, "block_k_dq": kv}


def jax_dkv_blocks() -> Iterator[dict[str, Any]]:
    for q, kv in itertools.product((512, 1024), repeat=2):
        for major in {max(q, kv), 1024}:
            yield {
                "block_q_major_dkv": major, "block_q_dkv": q, "block_k_major_dkv": major,
                "block_k_dkv": kv,
            }  # fmt: skip


OWN: list[Variant] = [
    ({}, "bfloat16", 128, 128), (CAUSAL, "bfloat16", 128, 128), (CAUSAL, "bfloat16", 192, 128),
    ({}, "bfloat16", 64, 64), ({}, "bfloat16", 256, 256), ({}, "float32", 128, 128),
    ({"logit_soft_cap": 50.0}, "bfloat16", 128, 128),
]  # fmt: skip
MASKED: list[Variant] = [({"mask": mask}, "bfloat16", 128, 128) for mask in MASKS]
MASKED += [({"mask": MASKS[0]}, "bfloat16", *dims) for dims in ((192, 128), (64, 64))]
JAX: list[Variant] = [(CAUSAL, "bfloat16", 128, 128)]
CASES: list[tuple[str, list[Variant], Callable[[], Iterator[dict[str, Any]]]]] = [
    ("flash_dq", OWN, dq_blocks),
    ("flash_dkv", OWN, dkv_blocks),
    ("flash_fwd", OWN, forward_blocks),
    ("splash", MASKED, splash_blocks),
    ("jax.flash_dq", JAX, jax_dq_blocks),
    ("jax.flash_dkv", JAX, jax_dkv_blocks),
    ("jax.splash", [({"mask": MASKS[0], "grad": True}, "bfloat16", 128, 128)],
     jax_splash_backward_blocks),
    ("jax.splash", [({"mask": MASKS[0]}, "bfloat16", d, d) for d in (64, 128)], jax_splash_blocks),
    ("jax.flash", JAX, jax_flash_blocks),
]  # fmt: skip


def tasks(kernels: list[str], chips: list[str]) -> Iterator[Task]:
    """The candidates to compile, as the kernels' own rules allow them."""
    for (name, variants, blocks), chip in itertools.product(CASES, chips):
        if name not in kernels:
            continue
        kernel = base.load(name)
        for options, dtype, dim, dim_v in variants:
            shape = {**HEADS, "q_len": 2048, "kv_len": 2048}
            shape |= {"head_dim_qk": dim, "head_dim_v": dim_v}
            problem = base.make_problem(
                kernel, device=chip, shape=shape, options=options, dtype=dtype
            )
            for config in blocks():
                if not kernel.illegal(problem, config, devices.get(chip)):
                    yield Task(problem=problem, candidate=Candidate.of(config))


def uses_of(task: Task) -> list[list[Use]]:
    """What each kernel of the task's program makes of its tiles, in program order."""
    problem, kernel = task.problem, base.load(task.problem.kernel)
    function, arguments = kernel.build(problem, task.candidate.config)
    marked = capture(function, arguments, devices.get(problem.device)).marked
    return [tile_uses(call.eqn.params["jaxpr"]) for call in find_calls(marked.jaxpr)]


def measure(wanted: list[Task], records: Path, jobs: int) -> None:
    """Compiles what is not in `records` yet and appends it."""
    from autotune.versions import installed  # after LIBTPU_INIT_ARGS

    libtpu = installed()["libtpu"]
    known = {(r["libtpu"], _tile(Task.from_json(r["task"]))) for r in read(records)}
    missing = [task for task in wanted if (libtpu, _tile(task)) not in known]
    print(f"{len(missing)} of {len(wanted)} to compile with libtpu {libtpu}", flush=True)
    with CompilePool(jobs=jobs, timeout_s=300) as pool, records.open("a") as file:
        for task, compiled in pool.run(missing):
            spilled = [s.vmem.get("register spills", 0) for s in compiled.schedules]
            line = {"libtpu": libtpu, "task": task.to_json(), "spilled": spilled}
            file.write(json.dumps({**line, "status": compiled.status}) + "\n")
            file.flush()
            if compiled.status != "ok":
                print(f"{task.problem.label} {task.candidate.json}: {compiled.reason}", flush=True)


def _tile(task: Task) -> str:
    """All of a task but its lengths and heads, of which spills are independent."""
    problem = task.problem
    dims = [size for axis, size in sorted(problem.shape.items()) if axis.startswith("head_dim")]
    options = dict(problem.options)
    parts = (problem.kernel, problem.device, problem.dtype, dims, options, task.candidate.config)
    return json.dumps(parts, sort_keys=True)


def read(records: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.open()] if records.exists() else []


def of_leaderboards(results: Path) -> Iterator[dict[str, Any]]:
    """Records of the compiled rows of a results folder that today's kernels made."""
    for board in leaderboard.boards(results):
        for row in board.rows if isinstance(board, leaderboard.Board) else ():
            known = row.kernel in base.REGISTRY and row.vmem_compiled_bytes is not None
            if row.status != "ok" or not known:
                continue
            if row.kernel_fingerprint != kernel_fingerprint(row.kernel):
                continue
            problem = base.make_problem(
                base.load(row.kernel), device=row.device, **json.loads(row.problem)
            )
            task = Task(problem=problem, candidate=Candidate.of(json.loads(row.config)))
            # Of a program of several kernels this is the sum, and it is left out for its length.
            spilled = [json.loads(row.vmem or "{}").get("register spills", 0)]
            yield {
                "libtpu": row.libtpu_version, "task": task.to_json(), "spilled": spilled,
                "status": "ok",
            }  # fmt: skip


def spills_of(records: list[dict[str, Any]]) -> Spills:
    """(chip, formulas) -> size -> bytes that kernels of it spilled, whatever the compiler."""
    found: Spills = defaultdict(lambda: defaultdict(list))
    for record in records:
        task = Task.from_json(record["task"])
        calls = uses_of(task) if record["status"] == "ok" else []
        if len(calls) != len(record["spilled"]):
            continue  # refused, or equal kernels that the compiler merged
        for uses, spilled in zip(calls, record["spilled"], strict=True):
            if uses:
                chip = task.problem.device
                known = found[ALIKE.get(chip, chip), formulas(uses)][size_of(uses)]
                which = chip + task.problem.json + task.candidate.json
                known.append((which, record["libtpu"], spilled))
    return found


def sure_spills(sizes: Mapping[Size, Spilled]) -> dict[Size, int]:
    """size -> KiB that every kernel of these formulas and that size may be taken to spill.

    The least that was measured, less as much again as measurements of one size differ: times their
    least over their greatest, where `MANY` kernels of the size were compiled; else times the least
    such share of any size, and nothing where no size was measured twice.
    """
    shares = {size: _share(spilled) for size, spilled in sizes.items() if _kernels(spilled) > 1}
    large = [share for size, share in shares.items() if _greatest(sizes[size]) > SMALL]
    found = {}
    for size, spilled in sizes.items():
        like = large if large and _greatest(spilled) > SMALL else [*shares.values()]
        if _kernels(spilled) < MANY:
            share = min([shares.get(size, 1.0), *like]) if like else 0.0
        else:
            share = shares[size]
        share *= 1.0 if len({libtpu for _, libtpu, _ in spilled}) > 1 else ONE_COMPILER
        if kib := int(share * min(each for *_, each in spilled)) // KIB:
            found[size] = kib
    return found


def _kernels(spilled: Spilled) -> int:
    return len({which for which, *_ in spilled})


def _greatest(spilled: Spilled) -> int:
    return max(size for *_, size in spilled)


def _share(spilled: Spilled) -> float:
    """Least over greatest."""
    return min(size for *_, size in spilled) / max(1, _greatest(spilled))


def write(found: Spills, compilers: list[str]) -> None:
    """Writes the table, a line for each chip of each formula."""
    tiles: dict[tuple[str, ...], dict[str, list[list[int]]]] = defaultdict(dict)
    for (chip, names), sizes in sorted(found.items()):
        rows = [[*_row(size), kib] for size, kib in sure_spills(sizes).items()]
        if rows:
            tiles[names][chip] = sorted(rows)
    entries = []
    for names, chips in sorted(tiles.items()):
        lines = ",\n".join(f'    "{chip}": {json.dumps(rows)}' for chip, rows in chips.items())
        entries.append(f'  {{"formulas": {json.dumps(names)}, "kib": {{\n{lines}\n  }}}}')
    head = f'"libtpu": {json.dumps(compilers)},\n "row": {json.dumps(ROW)}'
    DATA.write_text("{" + head + ',\n "tiles": [\n' + ",\n".join(entries) + "\n]}\n")
    print(f"{sum(len(r) for c in tiles.values() for r in c.values())} entries in {DATA}")


ROW = ["rows", "columns", "depth", "width", "KiB"]


def _row(size: Size) -> list[int]:
    return [size.rows, size.columns, size.depth, size.width]


def main() -> None:
    names = list(dict.fromkeys(name for name, _, _ in CASES))
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--kernels", default=",".join(names))
    options.add_argument("--chips", default=",".join(CHIPS))
    options.add_argument("--records", type=Path, required=True, help="JSON lines, added to")
    options.add_argument("--results", type=Path, help="also the compiled rows of this folder")
    options.add_argument("--jobs", type=int, default=1)
    chosen = options.parse_args()
    wanted = list(dict.fromkeys(tasks(chosen.kernels.split(","), chosen.chips.split(","))))
    measure(wanted, chosen.records, chosen.jobs)
    records = read(chosen.records)
    if chosen.results:
        records += of_leaderboards(chosen.results)
    write(spills_of(records), sorted({record["libtpu"] for record in records}))


if __name__ == "__main__":
    main()
