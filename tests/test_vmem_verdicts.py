"""The model's VMEM verdicts against the compiler's: it must never refuse what compiles."""

from __future__ import annotations

import importlib.util

import pytest

from autotune import cost_model
from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.device import MIB
from autotune.kernels import base
from autotune.pallas_call import trace

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
]


@pytest.fixture(scope="module")
def pool():
    with CompilePool(jobs=1, timeout_s=300) as pool:
        yield pool


def matmul(name: str, blocks: tuple[int, int, int], limit: int | None = None, size: int = 4096):
    """A bf16 matmul of size³ as a task, and why the model refuses it."""
    kernel, device = base.load("matmul"), devices.get(name)
    problem = base.make_problem(kernel, device=name, shape=dict.fromkeys("mkn", size))
    config = dict(zip(("bm", "bk", "bn"), blocks, strict=True)) | {"vmem_limit_bytes": limit}
    config = {**kernel.default(problem, device), **config}
    function, arguments = kernel.build(problem, config)
    task = Task(problem=problem, candidate=Candidate.of(config))
    return task, cost_model.rejection(trace(function, arguments, device), device)


def flash_fwd(name: str, limit: int):
    """A flash_fwd of one tile of 512 x 1024 a block as a task, and why the model refuses it."""
    kernel, device = base.load("flash_fwd"), devices.get(name)
    shape = dict.fromkeys(("batch", "q_heads", "kv_heads"), 1)
    shape |= {"q_len": 4096, "kv_len": 4096, "head_dim_qk": 128, "head_dim_v": 128}
    problem = base.make_problem(kernel, device=name, shape=shape)
    blocks = {"block_q": 512, "block_kv": 1024, "block_q_compute": 512, "block_kv_compute": 1024}
    config = {**blocks, "vmem_limit_bytes": limit}
    function, arguments = kernel.build(problem, config)
    task = Task(problem=problem, candidate=Candidate.of(config))
    return task, cost_model.rejection(trace(function, arguments, device), device)


def statuses(pool: CompilePool, tasks: list[Task]) -> list[str]:
    verdicts = dict(pool.run(tasks))
    return [verdicts[task].status for task in tasks]


def test_v1_the_compiler_agrees_on_both_sides_of_the_default_limit(pool: CompilePool):
    cases = [matmul(name, (1024, 1024, 1024)) for name in ("v5e", "tpu7x")]
    assert statuses(pool, [task for task, _ in cases]) == ["oom", "ok"]
    assert [reason is None for _, reason in cases] == [False, True]


def test_windows_and_scratch_may_fill_the_limit_to_the_last_byte(pool: CompilePool):
    # v6e and tpu7x spill nothing for a tile of 512 cubed, so its bill of 4 MiB is exact.
    fits, over = (matmul("v6e", (512, 512, 512), limit) for limit in (4 * MIB, 4 * MIB - 4096))
    assert statuses(pool, [fits[0], over[0]]) == ["ok", "oom"]
    assert fits[1] is None
    assert over[1] == "needs at least 4.00 MiB of VMEM, of 4.00 MiB allowed on v6e"


def test_v5_a_limit_beyond_the_core_is_refused_though_the_compiler_takes_any_number(
    pool: CompilePool,
):
    task, reason = matmul("tpu7x", (256, 512, 256), 192 * MIB, size=1024)
    assert statuses(pool, [task]) == ["ok"]
    assert str(reason).startswith("VMEM limit 192.00 MiB is more than the 64.00 MiB")


@pytest.mark.parametrize(("name", "over", "fits"), [("v5e", 6, 7), ("v6e", 5, 6)])
def test_the_spills_of_attentions_tiles_decide_as_the_compiler_does(
    pool: CompilePool, name: str, over: int, fits: int
):
    # Windows and scratch are 2.75 MiB; the tile spills 3.7 MiB on v5e and 2.8 on v6e.
    cases = [flash_fwd(name, mib * MIB) for mib in (over, fits)]
    assert statuses(pool, [task for task, _ in cases]) == ["oom", "ok"]
    assert [reason is None for _, reason in cases] == [False, True]


SPREAD = [
    ("v5e", (512, 1024, 512), 7), ("v5e", (1024, 512, 512), 8), ("v5p", (512, 512, 1024), 7),
    ("v6e", (256, 1024, 1024), 8), ("v6e", (512, 2048, 256), 7), ("tpu7x", (1024, 1024, 512), 10),
    ("tpu7x", (512, 1024, 1024), 11),
]  # fmt: skip


def test_what_the_model_refuses_near_the_limit_the_compiler_refuses_too(pool: CompilePool):
    # 8192 a side: too large for XLA to park an operand in VMEM, where it would not be billed.
    cases = [matmul(name, blocks, mib * MIB, size=8192) for name, blocks, mib in SPREAD]
    found = statuses(pool, [task for task, _ in cases])
    wrong = [
        (task.problem.device, task.candidate.json, reason)
        for (task, reason), status in zip(cases, found, strict=True)
        if reason and status == "ok"
    ]
    assert not wrong, "the model refused what the compiler accepts"
    assert {"ok", "oom"} == set(found), "the spread must lie on both sides"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tpu7x", "v5p"])
def test_v2_the_compiler_refuses_a_tile_of_the_full_64_mib_under_the_largest_limit(
    pool: CompilePool, name: str
):
    task, reason = matmul(name, (2048, 2048, 2048), 64 * MIB)
    assert statuses(pool, [task]) == ["oom"]
    assert reason is not None
