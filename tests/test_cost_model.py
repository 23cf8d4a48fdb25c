"""The cost model against closed forms by hand, and against the compiler's own verdicts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import cost_model
from autotune import device as devices
from autotune import latency as timing
from autotune.call_record import Dot, PallasCall, Program, Scratch, StepClass, Window
from autotune.device import DEVICES, MIB, Device
from autotune.errors import KernelError
from autotune.evidence import Schedule, ScopeUse, XlaOp

V5E, V6E, TPU7X, V5P = (devices.get(name) for name in ("v5e", "v6e", "tpu7x", "v5p"))


def window(role: str = "input", *, block=(1024, 1024), array=(4096, 4096), bits=16, **more):
    size = block[0] * block[1] * bits // 8
    fields = {
        "name": f"{role} 0", "dtype": {16: "bfloat16", 32: "float32"}[bits], "memory": "vmem",
        "buffers": 2, "copies": 1, "bytes_copied": size, "bytes_moved": size,
        "window_bytes": size,
    } | more  # fmt: skip
    return Window(role=role, array_shape=array, block_shape=block, bits=bits, **fields)


def make_call(**more) -> PallasCall:
    """A call of ten steps that each run `step`, 1 GFLOP a step, 1 MB in and nothing out."""
    fields = {
        "name": "kernel", "grid": (10,), "grid_steps": 10, "dimension_semantics": None,
        "vmem_limit_bytes": None, "windows": (), "scratch": (), "temporaries_bytes": 0,
        "scopes": {"": 10, "step": 10}, "scope_flops": {"step": 10 * 10**9},
        "executed_flops": 10 * 10**9, "fill_bytes": 0, "drain_bytes": 0, "parallel_splits": 1,
        "classes": (step_class(10),), "dots": (Dot(m=8, k=512, n=512, dtype="bfloat16", bits=16),),
    } | more  # fmt: skip
    return PallasCall(**fields)


def step_class(
    steps: int, *, scopes=None, next_in=1_000_000, copies=1, out=0, flops=10**9, ins=(), outs=()
):
    return StepClass(
        steps=steps, scopes={"step": 1} if scopes is None else scopes, next_in_bytes=next_in,
        next_in_copies=copies, prev_out_bytes=out, prev_out_copies=int(out > 0), flops=flops,
        next_in_windows=ins, prev_out_windows=outs,
    )  # fmt: skip


def program(*calls: PallasCall) -> Program:
    return Program(calls=calls)


def matmul_call(bm: int, bk: int, bn: int, **more) -> PallasCall:
    """The blocks of a bf16 4096³ matmul with an f32 accumulator."""
    return make_call(
        windows=(
            window(block=(bm, bk)), window(block=(bk, bn)), window("output", block=(bm, bn)),
        ),
        scratch=(Scratch(name="scratch 0", shape=(bm, bn), dtype="float32", memory="vmem",
                         bytes=4 * bm * bn),),
        dots=(Dot(m=bm, k=bk, n=bn, dtype="bfloat16", bits=16, loaded=True),),
        **more,
    )  # fmt: skip


def use(bundles: int, rows: int = 0, depth: int = 1, loops: tuple[ScopeUse, ...] = ()) -> ScopeUse:
    return ScopeUse(
        bundles=bundles, mxu_rows=rows, spill_loads=0, spill_stores=0, units={},
        loop_depth=depth, loops=loops,
    )  # fmt: skip


def make_schedule(scopes: dict[str, ScopeUse], *, prologue: int = 0, name="kernel") -> Schedule:
    return Schedule(
        name=name, bundles=sum(u.bundles for u in scopes.values()), prologue_bundles=prologue,
        capacity={}, scopes=scopes, vmem_bytes=0, vmem={},
    )  # fmt: skip


# VMEM


def test_the_bill_is_windows_times_buffers_plus_scratch_by_allocation():
    bill = cost_model.vmem_bill(matmul_call(512, 512, 512), V5E)
    assert [(a.name, a.kind, a.bytes) for a in bill.allocations] == [
        ("input 0", "window", MIB), ("input 0", "window", MIB), ("output 0", "window", MIB),
        ("scratch 0", "scratch", MIB), ("temporaries", "temporary", bill.temporaries),
    ]  # fmt: skip
    assert (bill.windows, bill.scratch) == (3 * MIB, MIB)
    assert bill.total == 4 * MIB + bill.temporaries


def test_three_buffers_cost_three_and_operands_outside_vmem_cost_nothing():
    smem = window(memory="smem")
    left = window(memory="hbm", window_bytes=0)
    call = make_call(windows=(window(buffers=3), smem, left))
    assert cost_model.vmem_bill(call, V5E).total == 6 * MIB


def test_the_limit_is_the_calls_own_or_the_devices_default():
    assert cost_model.vmem_limit_bytes(make_call(), V6E) == 32 * MIB
    assert cost_model.vmem_limit_bytes(make_call(vmem_limit_bytes=3 * MIB), V6E) == 3 * MIB


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p"])
def test_v1_a_block_sum_of_exactly_16_mib_is_rejected_where_16_is_the_limit(name: str):
    call = matmul_call(1024, 1024, 1024)
    bill = cost_model.vmem_bill(call, DEVICES[name])
    assert bill.windows + bill.scratch == 16 * MIB
    reason = cost_model.rejection(program(call), DEVICES[name])
    assert reason == f"needs at least 18.25 MiB of VMEM, of 16.00 MiB allowed on {name}"


@pytest.mark.parametrize("name", ["v6e", "tpu7x"])
def test_v1_the_same_blocks_are_kept_where_32_is_the_limit(name: str):
    assert cost_model.rejection(program(matmul_call(1024, 1024, 1024)), DEVICES[name]) is None


@pytest.mark.parametrize("limit", [None, 64 * MIB])
@pytest.mark.parametrize("name", ["tpu7x", "v5p"])
def test_v2_a_tile_of_the_full_64_mib_is_rejected_whatever_the_limit(name: str, limit: int | None):
    call = matmul_call(2048, 2048, 2048, vmem_limit_bytes=limit)
    assert cost_model.vmem_bill(call, DEVICES[name]).scratch == 16 * MIB
    assert "of VMEM" in str(cost_model.rejection(program(call), DEVICES[name]))


@pytest.mark.parametrize(
    ("name", "mib"), [("tpu7x", 64), ("v5p", 64), ("v5e", 128), ("v6e", 128), ("v4", 16)]
)
def test_v5_a_limit_above_the_cores_vmem_is_refused_with_both_numbers(name: str, mib: int):
    small = make_call(vmem_limit_bytes=192 * MIB)
    assert cost_model.rejection(program(small), DEVICES[name]) == (
        f"VMEM limit 192.00 MiB is more than the {mib}.00 MiB a TensorCore of {name} has"
    )
    assert (
        cost_model.rejection(program(make_call(vmem_limit_bytes=mib * MIB)), DEVICES[name]) is None
    )


def test_exactly_the_limit_fits_and_4_kib_more_does_not():
    # As bisection with a live scratch operand shows: windows and scratch may fill the limit.
    for extra, fits in ((0, True), (4096, False)):
        scratch = Scratch(
            name="scratch 0", shape=(8,), dtype="float32", memory="vmem",
            bytes=16 * MIB - 4 * MIB + extra,
        )  # fmt: skip
        call = make_call(windows=(window(),), scratch=(scratch,))
        assert (cost_model.rejection(program(call), V5E) is None) == fits


def test_a_raised_limit_ends_at_what_the_core_can_give():
    def with_scratch(size: int) -> Program:
        scratch = Scratch(name="s", shape=(8,), dtype="float32", memory="vmem", bytes=size)
        return program(make_call(scratch=(scratch,), vmem_limit_bytes=64 * MIB))

    usable = 64 * MIB - 65536
    assert cost_model.rejection(with_scratch(usable), V5P) is None
    assert cost_model.rejection(with_scratch(usable + 4096), V5P) == (
        "needs at least 63.94 MiB of VMEM, of 63.94 MiB allowed on v5p"
    )


def test_small_operands_of_tpu7x_may_be_parked_and_then_cost_no_window():
    big = window(array=(4096, 4096), block=(2048, 2048))
    small = window(array=(2048, 2048), block=(2048, 2048))
    for operand, parked in ((big, False), (small, True)):
        bill = cost_model.vmem_bill(make_call(windows=(operand,)), TPU7X)
        assert (bill.least == 0) == parked
        assert bill.total == 16 * MIB
        assert cost_model.vmem_bill(make_call(windows=(operand,)), V6E).least == 16 * MIB


@pytest.mark.parametrize(
    ("change", "spills"),
    [
        ({}, True), ({"loaded": False}, False), ({"k": 256}, False), ({"n": 256}, False),
        ({"m": 64}, False),
    ],
)  # fmt: skip
def test_only_a_large_product_of_a_loaded_block_is_billed_for_spills(change, spills: bool):
    dot = replace(Dot(m=1024, k=1024, n=1024, dtype="bfloat16", bits=16, loaded=True), **change)
    bill = cost_model.vmem_bill(make_call(dots=(dot,)), V6E)
    assert bill.temporaries == (2 * MIB + 2**18 if spills else 0)


def test_the_traces_own_temporaries_count_where_they_are_more():
    call = make_call(temporaries_bytes=5 * MIB)
    assert cost_model.vmem_bill(call, V6E).temporaries == 5 * MIB


def test_an_allocation_checks_itself():
    with pytest.raises(ValueError, match="kind 'heap' is not one of window, scratch, temporary"):
        cost_model.Allocation(name="x", kind="heap", bytes=1)
    with pytest.raises(ValueError, match="x has -1 bytes; 0 or more are allowed"):
        cost_model.Allocation(name="x", kind="scratch", bytes=-1)


def test_a_table_larger_than_smem_is_rejected():
    table = Scratch(
        name="prefetch 0", shape=(2**19,), dtype="int32", memory="smem", bytes=2 * MIB,
        prefetched=True,
    )  # fmt: skip
    assert cost_model.rejection(program(make_call(scratch=(table,))), V5E) == (
        "needs 2.00 MiB of SMEM, of 1.00 MiB on v5e"
    )


def test_v10_operands_beyond_the_chips_hbm_are_rejected_and_kept_on_the_larger_chip():
    call = make_call(
        windows=(
            window(array=(131072, 512)), window(array=(512, 131072)),
            window("output", array=(131072, 131072)),
        )
    )  # fmt: skip
    assert cost_model.rejection(program(call), V5E) == (
        "operands need 32.25 GiB of HBM, of 16.02 GiB on v5e"
    )
    assert cost_model.rejection(program(call), TPU7X) is None


def test_an_operand_given_twice_or_aliased_to_the_output_counts_once():
    same = window(array=(65536, 65536))
    output = window("output", array=(65536, 65536))
    assert cost_model.rejection(program(make_call(windows=(same, same, output))), V5E) is None


def test_h1_counts_beyond_2_to_the_31_do_not_wrap():
    call = make_call(windows=(window("output", array=(65536, 65536)),), executed_flops=2 * 65536**3)
    assert "8.00 GiB" in str(cost_model.rejection(program(call), replace(V5E, hbm_bytes=2**32)))
    assert cost_model.mfu(2 * 65536**3, 1.0, V5E, "bfloat16") == pytest.approx(
        562949953421312 / 1.97e14
    )


def test_a_reason_names_the_call_where_there_are_several():
    bad = make_call(name="dq", vmem_limit_bytes=192 * MIB)
    assert str(cost_model.rejection(program(make_call(), bad), V5E)).startswith("dq: VMEM limit")


# Latency from the trace


def test_a_compute_bound_call_takes_its_flops_at_peak_plus_overhead():
    latency = cost_model.model_latency(program(make_call()), V5E)
    assert latency.compute_s == pytest.approx(1e10 / 1.97e14)
    assert latency.overhead_s == pytest.approx(10 * 0.4e-6)
    assert latency.transfer_s == pytest.approx(10 * 1e6 / (8.2e11 * 0.87))
    assert latency.total_s == pytest.approx(latency.compute_s + latency.overhead_s)
    assert latency.bound == "compute"
    assert latency.cycles is None


def test_a_memory_bound_call_takes_its_bytes_at_the_rate_copies_reach():
    call = make_call(classes=(step_class(10, next_in=10**8),), fill_bytes=10**8, drain_bytes=10**7)
    latency = cost_model.model_latency(program(call), V6E)
    assert latency.total_s == pytest.approx((11 * 10**8 + 10**7) / (1.64e12 * 0.87))
    assert latency.bound == "memory"


def test_a_step_that_runs_no_scope_costs_the_skip_overhead():
    classes = (step_class(6), step_class(4, scopes={}, next_in=0, flops=0))
    latency = cost_model.model_latency(program(make_call(classes=classes)), V6E)
    assert latency.overhead_s == pytest.approx(6 * 0.4e-6 + 4 * 0.3e-6)


def test_a_kernel_without_scopes_or_dots_is_not_taken_for_skipped_steps():
    copying = make_call(
        scopes={"": 10}, scope_flops={}, executed_flops=0, dots=(),
        classes=(step_class(10, scopes={}, flops=0),),
    )  # fmt: skip
    assert cost_model.model_latency(program(copying), V6E).overhead_s == pytest.approx(10 * 0.4e-6)


def test_narrow_products_cost_the_mxus_full_width():
    wide = Dot(m=512, k=256, n=256, dtype="bfloat16", bits=16)
    call = lambda *dots: program(make_call(dots=dots))
    full = cost_model.model_latency(call(wide), V6E).compute_s
    assert cost_model.model_latency(call(replace(wide, k=128)), V6E).compute_s == 2 * full
    assert cost_model.model_latency(call(replace(wide, k=192)), V6E).compute_s == pytest.approx(
        full * 256 / 192
    )
    assert cost_model.model_latency(call(replace(wide, k=128)), V5E).compute_s == pytest.approx(
        1e10 / 1.97e14
    )


def test_f32_products_cost_as_many_bf16_passes_as_their_precision():
    dot = Dot(m=512, k=256, n=256, dtype="float32", bits=32, passes=6)
    latency = cost_model.model_latency(program(make_call(dots=(dot,))), V6E)
    assert latency.compute_s == pytest.approx(6 * 1e10 / 9.2e14)


def test_int8_products_run_at_the_int8_peak():
    dot = Dot(m=512, k=256, n=256, dtype="int8", bits=8)
    latency = cost_model.model_latency(program(make_call(dots=(dot,))), V6E)
    assert latency.compute_s == pytest.approx(1e10 / 1.84e15)


def test_cores_of_one_device_share_parallel_steps_and_the_bandwidth():
    alone = make_call()
    shared = make_call(parallel_splits=2, core_steps=5)
    one, two = (cost_model.model_latency(program(c), V5P) for c in (alone, shared))
    assert two.compute_s == pytest.approx(1e10 / 4.59e14)  # the whole device's peak
    assert one.compute_s == 2 * two.compute_s
    assert one.overhead_s == 2 * two.overhead_s
    assert two.transfer_s == one.transfer_s  # half the steps, each at half the bandwidth


def test_an_odd_number_of_steps_waits_for_the_busier_core():
    call = make_call(parallel_splits=2, core_steps=6)
    latency = cost_model.model_latency(program(call), V5P)
    assert latency.compute_s == pytest.approx(1.2 * 1e10 / 4.59e14)


def test_calls_of_a_program_add_up_and_repeats_multiply():
    one = cost_model.model_latency(program(make_call()), V6E)
    both = cost_model.model_latency(program(make_call(), make_call(repeats=3)), V6E)
    assert both.total_s == pytest.approx(4 * one.total_s)


def test_scopes_on_run_time_data_run_every_step_unless_the_kernel_says_otherwise():
    call = make_call(
        scopes={"": 10, "step": 10, "rescale": None},
        scope_flops={"step": 10**10, "rescale": 10**10},
        classes=(step_class(10, scopes={"step": 1, "rescale": 1}),),
    )
    assumed = cost_model.model_latency(program(call), V6E)
    told = cost_model.model_latency(program(call), V6E, scope_counts={"rescale": 0, "step": 99})
    assert (assumed.assumed, told.assumed) == (("rescale",), ())
    assert assumed.compute_s == pytest.approx(2e10 / 9.2e14)
    assert told.compute_s == pytest.approx(1e10 / 9.2e14), "what the trace counted is not overruled"


def test_a_single_copy_on_tpu7x_takes_latency_and_its_own_rate():
    # 2 MiB an operand and step: the published 1024³ Ironwood matmul took 3.33 us a step.
    call = make_call(
        windows=(window(copies=10, bytes_moved=20 * MIB), window(copies=10, bytes_moved=20 * MIB)),
        classes=(step_class(10, next_in=4 * MIB, copies=2, ins=(0, 1)),),
    )
    latency = cost_model.model_latency(program(call), TPU7X)
    assert latency.transfer_s / 10 == pytest.approx(0.42e-6 + 2 * MIB / 7.2e11)
    assert latency.total_s / 10 == pytest.approx(3.33e-6, rel=0.005)


def test_a_third_buffer_gives_a_copy_two_steps():
    def transfer(buffers: int) -> float:
        one = window(copies=10, bytes_moved=20 * MIB, buffers=buffers)
        call = make_call(windows=(one,), classes=(step_class(10, next_in=2 * MIB, ins=(0,)),))
        return cost_model.model_latency(program(call), TPU7X).transfer_s

    assert transfer(2) == pytest.approx(2 * transfer(3))


def test_an_output_copy_has_until_the_next_one():
    out = window("output", copies=2, bytes_moved=8 * MIB)
    step = step_class(2, next_in=0, copies=0, out=4 * MIB, outs=(0,))
    call = make_call(windows=(out,), classes=(step,))
    latency = cost_model.model_latency(program(call), TPU7X)
    assert latency.transfer_s / 2 == pytest.approx(4 * MIB / (3.7e12 * 0.87))


def test_a_window_copied_once_does_not_slow_the_steps():
    table = window(copies=1, bytes_moved=64 * MIB)
    call = make_call(windows=(table,), classes=(step_class(10, next_in=0, copies=0),))
    assert cost_model.model_latency(program(call), TPU7X).transfer_s == 0


# Latency from the schedule


def test_compiled_latency_is_cycles_over_the_clock_plus_overhead():
    schedule = make_schedule({"": use(150), "step": use(850)}, prologue=50)
    chip = replace(V6E, issued_step_s=0.4e-6, launch_s=3e-6)
    latency = cost_model.compiled_latency(program(make_call()), [schedule], chip)
    assert latency.cycles == 10 * (100 + 850) + 50
    assert latency.compute_s == pytest.approx(latency.cycles / V6E.clock_hz)
    assert latency.total_s == pytest.approx(latency.compute_s + 10 * 0.4e-6 + 3e-6)
    assert isinstance(latency.cycles, int)


def test_a_scope_waits_for_the_matrix_units_where_they_are_slower():
    slow = use(500, rows=4096)
    assert cost_model.mxu_limit_cycles(slow, V6E) == 1024  # 2 rows a cycle, 2 MXUs
    assert cost_model.mxu_limit_cycles(slow, V5E) == 1024  # 1 row a cycle, 4 MXUs
    assert cost_model.mxu_limit_cycles(use(1, rows=1), V6E) == 1
    assert cost_model.scope_cycles(slow, V6E) == 1024
    assert cost_model.scope_cycles(use(2000, rows=4096), V6E) == 2000


def test_a_scope_that_stands_in_the_text_twice_costs_half_of_it_each_time():
    call = make_call(scope_regions={"step": 2})
    latency = cost_model.compiled_latency(program(call), [make_schedule({"step": use(800)})], V6E)
    assert latency.cycles == 10 * 400


def test_a_rolled_loop_in_a_scope_runs_as_often_as_the_trace_says():
    call = make_call(loops={"step": ((40, 1),)})
    rolled = make_schedule({"step": use(130, loops=(use(100, depth=2),))})
    unrolled = make_schedule({"step": use(430)})
    for schedule in (rolled, unrolled):
        latency = cost_model.compiled_latency(program(call), [schedule], V6E)
        assert latency.cycles == 10 * (30 + 4 * 100), "the code around the loop runs once a step"


def test_nested_loops_and_several_side_by_side_are_each_counted_by_their_own_turns():
    call = make_call(loops={"step": ((60, 2), (200, 1))}, scope_regions={"step": 2})
    inner, outer = use(50, rows=4096, depth=3), use(80, depth=2)
    schedule = make_schedule({"step": use(20 + 80 + 50, rows=4096, loops=(outer, inner))})
    latency = cost_model.compiled_latency(program(call), [schedule], V6E)
    assert cost_model.scope_cycles(inner, V6E) == 1024
    assert latency.cycles == 10 * 20 // 2 + 60 * 80 // 2 + 200 * 1024


def test_a_loop_outside_any_scope_runs_its_turns_and_one_the_trace_does_not_know_runs_once():
    loop = use(100, depth=2)
    schedule = make_schedule(
        {"": use(150, loops=(loop,)), "step": use(9, loops=(use(5),))}, prologue=50
    )
    known = cost_model.compiled_latency(program(make_call(loops={"": ((30, 1),)})), [schedule], V6E)
    assert known.cycles == 50 + 30 * 100 + 10 * 9
    unknown = cost_model.compiled_latency(program(make_call()), [schedule], V6E)
    assert unknown.cycles == 50 + 10 * 100 + 10 * 9


def test_scope_counts_reach_the_compiled_cycles():
    call = make_call(
        scopes={"": 10, "step": 10, "rescale": None},
        classes=(step_class(10, scopes={"step": 1, "rescale": 1}),),
    )
    schedule = make_schedule({"step": use(100), "rescale": use(1000)})
    assumed = cost_model.compiled_latency(program(call), [schedule], V6E)
    told = cost_model.compiled_latency(program(call), [schedule], V6E, scope_counts={"rescale": 5})
    assert (assumed.cycles, assumed.assumed) == (11000, ("rescale",))
    assert (told.cycles, told.assumed) == (6000, ())


def test_schedules_that_belong_to_no_call_are_an_error_and_merged_calls_are_not():
    calls = program(make_call(name="dq"), make_call(name="dkv"))
    with pytest.raises(
        KernelError, match=r"schedules \['other'\] are of no traced call; those are"
    ):
        cost_model.compiled_latency(calls, [make_schedule({}, name="other")], V6E)
    twins = program(make_call(), make_call())
    one = make_schedule({"step": use(100)})
    assert cost_model.compiled_latency(twins, [one], V6E).cycles == 1000


def test_mxu_utilization_is_that_of_the_scope_with_the_most_cycles():
    schedule = make_schedule({"": use(9), "init": use(5000), "step": use(2000, rows=4096)})
    call = make_call(
        scopes={"": 10, "init": 1, "step": 10},
        classes=(step_class(1, scopes={"init": 1, "step": 1}), step_class(9)),
    )
    assert cost_model.mxu_utilization(program(call), [schedule], V6E) == pytest.approx(1024 / 2000)
    assert cost_model.mxu_utilization(program(call), [make_schedule({})], V6E) is None


def test_a_branch_that_never_runs_is_not_the_steady_step():
    schedule = make_schedule({"step": use(100, rows=400), "rescale": use(900)})
    call = make_call(
        scopes={"": 10, "step": 10, "rescale": None},
        classes=(step_class(10, scopes={"step": 1, "rescale": 1}),),
    )
    share = cost_model.mxu_utilization(program(call), [schedule], V6E, scope_counts={"rescale": 0})
    assert share == 1.0


# Figures of merit


def test_mfu_is_flops_over_peak_and_none_where_the_peak_is_unknown():
    assert cost_model.mfu(10**12, 1e-2, V6E, "bfloat16") == pytest.approx(1e14 / 9.2e14)
    assert cost_model.mfu(10**12, 1e-2, V6E, "float32") is None
    assert cost_model.mfu(10**12, 1e-2, devices.of_kind("TPU99"), "bfloat16") is None
    assert cost_model.effective_tflops(10**12, 1e-2) == 100.0


def test_g5_an_mfu_above_1_is_suspect():
    assert cost_model.suspect_reason(1.2) == "suspect: MFU 120% is more than the chip's peak allows"
    assert cost_model.suspect_reason(1.0) is None
    assert cost_model.suspect_reason(None) is None


def test_a_latency_is_finite():
    with pytest.raises(ValueError, match="finite and not negative"):
        cost_model.Latency(total_s=float("nan"), compute_s=0, transfer_s=0, overhead_s=0)


# Properties

blocks = st.sampled_from([128, 256, 512, 1024, 2048])
device_names = st.sampled_from(sorted(DEVICES))


@given(device_names, blocks, blocks, blocks, st.integers(0, 64 * MIB))
@settings(deadline=None, max_examples=60)
def test_more_vmem_never_turns_a_kept_candidate_into_a_rejected_one(name, bm, bk, bn, more):
    chip = DEVICES[name]
    larger = replace(
        chip, vmem_bytes=chip.vmem_bytes + more, scoped_vmem_bytes=chip.scoped_vmem_bytes + more
    )
    call = program(matmul_call(bm, bk, bn))
    if cost_model.rejection(call, chip) is None:
        assert cost_model.rejection(call, larger) is None


@given(device_names, blocks, blocks, blocks, st.sampled_from(["bm", "bk", "bn"]))
@settings(deadline=None, max_examples=60)
def test_a_larger_block_never_needs_less(name, bm, bk, bn, grown):
    sizes = {"bm": bm, "bk": bk, "bn": bn}
    larger = sizes | {grown: 2 * sizes[grown]}
    small, large = (
        cost_model.vmem_bill(matmul_call(*s.values()), DEVICES[name]) for s in (sizes, larger)
    )
    assert small.total <= large.total
    assert small.least <= large.least


@given(
    device_names, st.integers(1, 10**6), st.integers(0, 10**12), st.integers(0, 10**9),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_latency_lies_between_its_largest_part_and_their_sum(name, steps, flops, moved, bundles):
    call = make_call(
        grid=(steps,), grid_steps=steps, scopes={"": steps, "step": steps},
        scope_flops={"step": flops * steps}, executed_flops=flops * steps,
        classes=(step_class(steps, next_in=moved, flops=flops),),
    )  # fmt: skip
    chip = DEVICES[name]
    compiled = cost_model.compiled_latency(
        program(call), [make_schedule({"step": use(bundles)})], chip
    )
    for latency in (cost_model.model_latency(program(call), chip), compiled):
        parts = (latency.compute_s, latency.transfer_s, latency.overhead_s)
        assert max(parts) * (1 - 1e-9) <= latency.total_s <= sum(parts) * (1 + 1e-9)


@given(device_names, st.integers(1, 1000), st.integers(1, 1000))
@settings(deadline=None, max_examples=30)
def test_more_steps_never_take_less_time(name, steps, more):
    def seconds(n: int) -> float:
        call = make_call(
            grid=(n,), grid_steps=n, classes=(step_class(n),), scope_flops={"step": n * 10**9}
        )
        return cost_model.model_latency(program(call), DEVICES[name]).total_s

    assert seconds(steps) < seconds(steps + more)


def test_records_are_frozen():
    latency = cost_model.model_latency(program(make_call()), V6E)
    with pytest.raises(dataclasses.FrozenInstanceError):
        latency.total_s = 0.0  # type: ignore[misc]
    assert isinstance(V6E, Device)


# Operands XLA holds in VMEM, scalar code, and what XLA runs around the kernels


def held_schedule(*tags: str) -> Schedule:
    return replace(make_schedule({"": use(100), "step": use(1000)}), vmem=dict.fromkeys(tags, 1))


def test_an_operand_without_a_window_in_vmem_moves_no_hbm_bytes():
    windows = (
        window(copies=10, bytes_moved=10_000_000), window(copies=10, bytes_moved=10_000_000,
                                                          name="input 1"),
    )  # fmt: skip
    step = step_class(10, next_in=2_000_000, copies=2, ins=(0, 1))
    call = make_call(windows=windows, classes=(step,))

    def transfer_s(*tags: str) -> float:
        schedule = held_schedule(*tags)
        return cost_model.compiled_latency(program(call), [schedule], V6E).transfer_s

    both = transfer_s("input window 0", "input window 1")
    assert both == pytest.approx(20e6 / V6E.copy_bytes_per_s)
    assert transfer_s("input window 1") == pytest.approx(both / 2)
    assert transfer_s("scratch") == pytest.approx(both), "no window at all says nothing of them"
    assert transfer_s("input window 7") == pytest.approx(both), "numbered in a way unknown here"


def test_windows_are_numbered_behind_the_prefetched_tables():
    table = Scratch(
        name="prefetch 0", shape=(8,), dtype="int32", memory="smem", bytes=32, prefetched=True
    )
    call = make_call(windows=(window(), window("output")), scratch=(table,))
    found = timing.held_windows(call, held_schedule("input window 1", "output window 0"))
    assert found == frozenset()
    assert timing.held_windows(call, held_schedule("output window 0")) == {0}


def test_scalar_slots_cost_cycles_beyond_their_bundles_and_are_no_cycles_of_compute():
    def total(salu: int) -> cost_model.Latency:
        scopes = {"": replace(use(100), units={"SALU": salu}), "step": use(5000)}
        chip = replace(V6E, scalar_cycles=0.5)
        return cost_model.compiled_latency(program(make_call()), [make_schedule(scopes)], chip)

    more_s = total(400).total_s - total(0).total_s
    assert more_s == pytest.approx(10 * 400 * 0.5 / V6E.clock_hz)
    assert total(400).cycles == total(0).cycles


def xla_op(**more) -> XlaOp:
    fields = {
        "name": "copy.1", "opcode": "copy", "bytes_read": 0, "bytes_written": 0,
        "estimated_cycles": None,
    } | more  # fmt: skip
    return XlaOp(**fields)


def test_an_xla_operation_takes_the_hbm_or_the_core_whichever_is_slower_and_as_often_as_it_runs():
    chip = replace(V6E, op_overhead_s=1e-6, vmem_bytes_per_s=2 * V6E.copy_bytes_per_s)
    rate = chip.copy_bytes_per_s
    hbm = xla_op(bytes_read=10**8, bytes_written=10**8, vmem_bytes=1000, repeats=3)
    assert timing.around_seconds([hbm], chip) == pytest.approx(3 * (2e8 / rate + 1e-6))
    vmem = xla_op(vmem_bytes=10**9)
    assert timing.around_seconds([vmem], chip) == pytest.approx(1e9 / (2 * rate) + 1e-6)
    # What comes from HBM and goes to VMEM passes through the core too.
    mixed = xla_op(bytes_read=10**8, vmem_bytes=2 * 10**8)
    assert timing.around_seconds([mixed], chip) == pytest.approx(3e8 / (2 * rate) + 1e-6)
    background = xla_op(bytes_read=10**8, vmem_bytes=10**8, asynchronous=True)
    assert timing.around_seconds([background], chip) == pytest.approx(1e8 / rate)
    assert timing.around_seconds([], chip) == 0


def test_what_xla_runs_is_part_of_the_whole():
    schedule = make_schedule({"": use(100), "step": use(5000)})
    alone = cost_model.compiled_latency(program(make_call()), [schedule], V6E)
    ops = [xla_op(bytes_read=10**9)]
    both = cost_model.compiled_latency(program(make_call()), [schedule], V6E, xla_ops=ops)
    assert both.around_s == pytest.approx(1e9 / V6E.copy_bytes_per_s)
    assert both.total_s == pytest.approx(alone.total_s + both.around_s)
    assert both.bound == "memory"


def test_a_program_is_launched_once_however_many_calls_it_has():
    chip = replace(V6E, launch_s=1e-4)
    schedule = make_schedule({"": use(100), "step": use(5000)})
    one = cost_model.compiled_latency(program(make_call()), [schedule], chip).total_s
    two = cost_model.compiled_latency(
        program(make_call(), make_call()), [schedule, schedule], chip
    ).total_s
    assert two == pytest.approx(2 * one - 1e-4)
