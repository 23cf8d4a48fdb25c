"""What the real TPU compiler says of small kernels, for chips that are not there."""

import math

import pytest

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.cache import Cache, CompileCache
from autotune.compiler.environment import unavailable
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.problem import Problem

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
B256 = {"bm": 256, "bk": 256, "bn": 256}
B1024 = {"bm": 1024, "bk": 1024, "bn": 1024}
SMALL, LARGE = dict.fromkeys("mkn", 512), dict.fromkeys("mkn", 4096)


@pytest.fixture(scope="module")
def pool():
    with CompilePool(jobs=1, timeout_s=300) as pool:
        yield pool


def task(kernel, config, *, device, dtype="bfloat16", shape=SMALL):
    return Task(
        problem=Problem(
            kernel=f"compiler_kernels:{kernel}", device=device, dtype=dtype, shape=shape
        ),
        candidate=Candidate.of(config),
    )


def compile_one(pool, *args, **kwargs):
    ((_, compiled),) = pool.run([task(*args, **kwargs)])
    return compiled


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("bm", "bk", "bn"), [(256, 256, 256), (128, 512, 256)])
def test_rows_through_the_mxu_are_those_of_the_closed_form(pool, chip, bm, bk, bn):
    size = devices.get(chip).mxu_size
    compiled = compile_one(pool, "MATMUL", {"bm": bm, "bk": bk, "bn": bn}, device=chip)
    assert compiled.status == "ok", compiled.reason
    (schedule,) = compiled.schedules
    step = schedule.scopes["step"]
    assert step.mxu_rows == bm * math.ceil(bk / size) * math.ceil(bn / size)
    assert step.loop_depth == 1


def test_a_schedule_tells_scopes_spills_units_and_vmem_apart(pool):
    compiled = compile_one(pool, "MATMUL", B256, device="tpu7x", shape=LARGE)
    (schedule,) = compiled.schedules
    assert schedule.name == "tile"
    assert set(schedule.scopes) == {"", "init", "step", "finalize"}
    assert sum(use.bundles for use in schedule.scopes.values()) == schedule.bundles
    assert 0 < schedule.prologue_bundles < schedule.scopes[""].bundles
    assert schedule.scopes["step"].units["MXU"] > schedule.scopes["init"].units["MXU"] == 0
    assert schedule.capacity["MXU"] == devices.get("tpu7x").num_mxus
    assert schedule.vmem["scratch"] == 256 * 256 * 4
    assert schedule.vmem["input window 0"] == 2 * 256 * 256 * 2, "two buffers of bf16"
    assert schedule.vmem_bytes == sum(schedule.vmem.values())
    assert compiled.compile_seconds > 0
    assert compiled.jax_version
    assert compiled.libtpu_version


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_a_program_of_several_calls_gives_a_schedule_for_each_in_order(pool, chip):
    compiled = compile_one(pool, "TWO_CALLS", B256, device=chip)
    assert compiled.status == "ok", compiled.reason
    assert [schedule.name for schedule in compiled.schedules] == ["tile", "tile", "other"]
    first, second, other = (s.scopes["step"].mxu_rows for s in compiled.schedules)
    assert first == other == 2 * second


def test_a_kernel_without_scopes_is_split_alike_by_trace_and_schedule(pool):
    asked = {"device": "v6e", "shape": {"m": 1024, "k": 128, "n": 1}}
    traced = Task(problem=task("JAX_FLASH", {}, **asked).problem, candidate=Candidate.of({}),
                  kind="trace")  # fmt: skip
    compiled = compile_one(pool, "JAX_FLASH", {}, **asked)
    ((_, said),) = pool.run([traced])
    (call,), (schedule,) = said.program.calls, compiled.schedules
    assert call.marking == "marked"
    assert set(schedule.scopes) == set(call.scopes) == {"", "init", "step", "finalize"}
    with_products = {scope for scope, use in schedule.scopes.items() if use.mxu_rows}
    assert with_products == {scope for scope, n in call.scope_flops.items() if n} == {"step"}


def test_xlas_work_around_the_kernels_is_part_of_the_record(pool):
    compiled = compile_one(pool, "TWO_CALLS", B256, device="v6e")
    assert compiled.xla_ops, "a scaling between the calls and a softmax behind them"
    assert sum(op.bytes_read + op.bytes_written + op.vmem_bytes for op in compiled.xla_ops) >= (
        512 * 512 * (2 + 4)
    )
    assert not {op.name for op in compiled.xla_ops} & {"tile.1", "tile.2", "other.1"}
    alone = compile_one(pool, "MATMUL", B256, device="v6e")
    assert alone.xla_ops == ()


def test_the_same_candidate_gives_the_same_record_again(pool):
    records = [compile_one(pool, "MATMUL", B256, device="v6e") for _ in range(2)]
    assert records[0].schedules == records[1].schedules


@pytest.mark.parametrize(
    ("chip", "status", "limit"),
    [("v4", "oom", "16.00M"), ("v5e", "oom", "16.00M"), ("v5p", "oom", "16.00M"),
     ("v6e", "ok", ""), ("tpu7x", "ok", "")],
)  # fmt: skip
def test_v1_a_block_set_of_exactly_16_mib_needs_more(pool, chip, status, limit):
    compiled = compile_one(pool, "MATMUL", B1024, device=chip, shape=LARGE)
    assert compiled.status == status, compiled.reason
    assert limit in (compiled.reason or "")


@pytest.mark.nightly
@pytest.mark.parametrize(("chip", "used"), [("tpu7x", "75.9"), ("v5p", "72.8")])
def test_v2_a_block_set_of_exactly_64_mib_does_not_fit_64_mib(pool, chip, used):
    blocks = {"bm": 2048, "bk": 2048, "bn": 2048, "vmem_limit_mib": 64}
    compiled = compile_one(pool, "MATMUL", blocks, device=chip, shape=LARGE)
    assert compiled.status == "oom", compiled.reason
    assert f"used {used}" in compiled.reason


@pytest.mark.parametrize(("mib", "status"), [(62, "ok"), (64, "oom")])
def test_v2_the_whole_vmem_is_not_for_one_kernel(pool, mib, status):
    config = {"scratch_mib": mib, "vmem_limit_mib": 128}
    compiled = compile_one(pool, "SCRATCH", config, device="tpu7x")
    assert compiled.status == status
    assert status == "ok" or compiled.reason.startswith("VMEM: used 64.25M of 6")


@pytest.mark.parametrize(("chip", "status"), [("tpu7x", "oom"), ("v5e", "ok")])
def test_v5_a_limit_above_the_chips_vmem_does_not_make_room(pool, chip, status):
    config = {"scratch_mib": 70, "vmem_limit_mib": 128}
    compiled = compile_one(pool, "SCRATCH", config, device=chip)
    assert compiled.status == status, compiled.reason
    if status == "oom":
        assert compiled.reason == (
            "VMEM: one allocation of 73400320 bytes (scratch operand) exceeds the memory of "
            "67108864 bytes"
        )


def test_v9_too_much_smem_and_too_much_hbm_are_oom_too(pool):
    smem = compile_one(pool, "SCRATCH", {"scratch_mib": 4, "memory": "smem"}, device="tpu7x")
    assert smem.status == "oom"
    assert smem.reason.startswith("SMEM: one allocation of 4194304 bytes")
    wide = {"m": 131072, "k": 512, "n": 131072}
    hbm = compile_one(pool, "MATMUL", B256, device="v5e", shape=wide)
    assert hbm.status == "oom"
    assert hbm.reason.startswith("HBM: ")
    assert "32.25G of 15.75G" in hbm.reason


@pytest.mark.parametrize(
    ("dtype", "refusing"),
    [
        ("float16", CHIPS),
        ("int8", ("v4",)),
        ("int4", ("v4",)),
        ("float8_e5m2", ("v4",)),
        ("float8_e4m3fn", ("v4",)),
        ("float8_e4m3b11fnuz", ("v4", "tpu7x")),
    ],
)
def test_d1_a_type_the_chip_does_not_multiply_is_unsupported(pool, dtype, refusing):
    tasks = [task("MATMUL", B256, device=chip, dtype=dtype) for chip in CHIPS]
    found = {done.problem.device: compiled for done, compiled in pool.run(tasks)}
    for chip, compiled in found.items():
        expected = "unsupported" if chip in refusing else "ok"
        assert compiled.status == expected, f"{chip}: {compiled.reason}"
        if compiled.reason:
            assert "\n" not in compiled.reason
            assert "Mosaic failed" not in compiled.reason


def test_b1_an_illegal_block_shape_is_refused_with_both_numbers(pool):
    compiled = compile_one(pool, "MATMUL", {"bm": 128, "bk": 64, "bn": 128}, device="v6e")
    assert compiled.status == "unsupported"
    assert "64" in compiled.reason
    assert "(512, 512)" in compiled.reason


@pytest.mark.parametrize("head_dim", [80, 192])
def test_b8_what_another_kernel_refuses_itself_is_unsupported_in_its_own_words(pool, head_dim):
    shape = {"m": 256, "k": head_dim, "n": 1}
    compiled = compile_one(pool, "JAX_FLASH", {}, device="v5e", shape=shape)
    if head_dim == 80:
        assert compiled.status == "ok", compiled.reason
        assert [s.name for s in compiled.schedules] == ["_flash_attention_kernel"]
    else:
        assert compiled.status == "unsupported"
        assert compiled.reason == "head_dim=192 should be a multiple of 128 if larger"


def test_c3_two_pools_compile_at_once(pool):
    with CompilePool(jobs=1, timeout_s=120) as second:
        ours = pool.run([task("MATMUL", B256, device="v6e") for _ in range(3)])
        theirs = second.run([task("MATMUL", B256, device="tpu7x") for _ in range(3)])
        for (_, first), (_, other) in zip(ours, theirs, strict=True):
            assert first.status == other.status == "ok"


def test_s6_the_users_libtpu_flags_reach_the_compiler_and_the_key(pool, monkeypatch, tmp_path):
    def key():
        limits = {"timeout_s": 1.0, "memory_limit_bytes": 1}
        return CompileCache(Cache(tmp_path), fingerprint="f", **limits).key(one)

    one = task("MATMUL", B1024, device="v5e", shape=LARGE)
    plain = key()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=98304")
    with CompilePool(jobs=1, timeout_s=300) as flagged:
        ((_, compiled),) = flagged.run([one])
    assert compiled.status == "ok", "plain it is oom, as V1 shows"
    assert key() != plain
