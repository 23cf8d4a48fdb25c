"""The parser of the compiler's dump, on small dumps in the real format written here."""
# ruff: noqa: E501 (lines of a dump are as long as they are)

import pytest

from autotune import device as devices
from autotune.compiler.dump import (
    DumpError,
    mxu_rows,
    parse_allocations,
    parse_schedule,
    parse_utilization,
)
from autotune.compiler.program import in_trace_order, kernel_instructions, read_schedules

V5E, V6E, TPU7X = (devices.get(name) for name in ("v5e", "v6e", "tpu7x"))

LEGEND = """\
= control target key start
LH: loop header
LB: loop body
PF: predicated region fallthrough
= control target key end

"""
# A grid loop with a prologue of two bundles, a scope in a scope, an inner loop, delay slots that
# the compiler adds without their level, and a bundle over several lines.
BUNDLES = (
    LEGEND
    + """\
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[512,512], index: 0, kind: input] }
   0x1   :  { %7 = vsyncpa [#allocation4], 0 } /* Start region 1 */
   0x2 LB: > { %s5_s25 = sadd.s32 1, %s7_s24 /* iteration index, stage = 1 */ }
   0x3   : > { %8 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s4 /* hlo: tile.1
base_bounds: (32, 1)
second_minor_factor: 1 */ }
   0x4   : > { %137 = vtrace 3087007744 /* TraceMeStart(outer step) [ */ }
   0x5   : > { %770 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v0  ;;  %871 = vmatmul.mubr.bf16.gmra.mxu1 %v2_v0 }
   0x6   : > { %138 = vtrace 3087007745 /* TraceMeStart(inner-1/x<y>) [ */ }
   0x7 LB: >> { %771 = vmatmul.mubr.f32.vlgmr.msra.gmra.mxu0 %v3_v0 }
   0x8   : > { %680 = sbr.rel (%p7_p10) target = $region77 }
   0x9   :  {}
   0xa   :  { %1363 = vtrace 2818572363 }
   0xb PF: > { %363 = vtrace 3355443201 /* ] TraceMeEnd(inner-1/x<y>) */ }
   0xc   : > { %364 = vtrace 3355443200 /* ] TraceMeEnd(outer step) */ }
   0xd   : > { %16 = sbr.rel (!%p14_p2) target = $region94 }
   0xe   :  {}
   0xf   :  { %640 = vsyncpa [#allocation7 + $0x1], 1 } /* End region 1 */
"""
)
ROWS = ["0 0 0 0 0 0 0 0 0 0"] * 16
ROWS[5] = "2 0 1 0 0 1 2 0 0 1"
ROWS[7] = "1 0 0 0 0 0 0 1 3 0"
UTILIZATION = (
    "== CAPACTIY:\n"
    "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU\n"
    "    2     2     4     2     1     3     3     2     2     2\n"
    "== UTILIZATION:\n" + "\n".join(ROWS) + "\n"
)
ALLOCATIONS = """\
$region0: #{tile.1}
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'smem constant']
  #allocation1 [shape = 'u32[144,128]{1,0:T(1,128)}', space=vmem, size = 0x12000, scoped, tag = 'internal scratch']
  #allocation2 [shape = 'f32[512,512]{1,0:T(8,128)}', space=vmem, size = 0x100000, scoped, tag = 'scratch operand']
  #allocation5 [shape = 'f32[8,128]{1,0:T(8,128)}', space=vmem, size = 0x1000, scoped, tag = 'scratch operand']
    #allocation3 [shape = 'u8[1048576]{0}', space=vmem, size = 0x100000, scoped, tag = 'input window allocation for operator input 0. The window shape is bf16[512,512]. This allocation has 2 buffering levels.']
    #allocation8 [shape = 'u8[512]{0}', space=vmem, size = 512, scoped, tag = 'output window allocation for operator output 0. The window shape is bf16[512,512].']
    #allocation4 [shape = 's32[2]{0}', space=sflag, size = 0x8, scoped, tag = 'scoped memory for tile.1']
"""


def parsed(bundles=BUNDLES, utilization=UTILIZATION, allocations=ALLOCATIONS, device=V6E):
    return parse_schedule(bundles, utilization, allocations, "tile", device)


def test_every_bundle_belongs_to_its_innermost_scope():
    schedule = parsed()
    assert schedule.bundles == 16
    assert {name: use.bundles for name, use in schedule.scopes.items()} == {
        "": 8,  # 0x0-0x4, 0xd-0xf
        "outer step": 3,  # 0x5, 0x6 with the inner start, 0xc with its own end
        "inner-1/x<y>": 5,
    }


def test_spills_and_unit_use_are_summed_per_scope():
    scopes = parsed().scopes
    assert scopes["outer step"].spill_loads == 2
    assert scopes["outer step"].units["MXU"] == 2
    assert scopes["inner-1/x<y>"].spill_stores == 3
    assert scopes[""].units == dict.fromkeys(scopes[""].units, 0)


def test_rows_are_counted_at_the_bf16_rate_and_for_each_mxu():
    scopes = parsed().scopes
    assert scopes["outer step"].mxu_rows == 32
    assert scopes["inner-1/x<y>"].mxu_rows == 8


def test_prologue_is_what_lies_outside_the_grid_loop_in_no_scope():
    # 0x0, 0x1 and 0xf; the empty delay slot 0xe still belongs to the loop it leaves.
    assert parsed().prologue_bundles == 3


def test_loop_depth_is_that_of_most_bundles_of_the_scope():
    scopes = parsed().scopes
    assert scopes["outer step"].loop_depth == 1
    assert scopes[""].loop_depth == 1


def test_what_lies_in_a_loop_inside_a_scope_is_told_from_what_runs_once():
    inner = parsed().scopes["inner-1/x<y>"]
    (loop,) = inner.loops
    assert (loop.bundles, loop.mxu_rows, loop.spill_stores, loop.loop_depth) == (1, 8, 3, 2)
    outside = inner.outside_loops()
    assert (outside.bundles, outside.mxu_rows, outside.spill_stores) == (4, 0, 0)
    assert parsed().scopes["outer step"].loops == (), "the loop belongs to the innermost scope"
    whole = parsed(bundles=BUNDLES.replace("TraceMeStart(inner-1/x<y>) [", "["))
    assert [loop.bundles for loop in whole.scopes["outer step"].loops] == [1]
    unmarked = parsed(bundles=BUNDLES.replace("TraceMe", "Other"))
    assert [loop.bundles for loop in unmarked.scopes[""].loops] == [1], "the grid's own is none"
    no_grid = parsed(bundles=BUNDLES.replace("iteration index, stage", "no loop"))
    assert [loop.bundles for loop in no_grid.scopes["inner-1/x<y>"].loops] == [1]


def test_a_text_without_a_grid_loop_is_the_body_of_one_step():
    schedule = parsed(bundles=BUNDLES.replace("iteration index, stage", "no loop"))
    assert schedule.prologue_bundles == 0
    assert schedule.scopes["outer step"].loop_depth == 2


def test_an_end_without_a_start_and_a_start_without_an_end_stay_local():
    no_start = parsed(bundles=BUNDLES.replace("TraceMeStart(outer step)", "TraceMeStart(other)"))
    assert no_start.scopes["other"].bundles == 5, "an unclosed scope ends with the loop around it"
    no_end = parsed(bundles=BUNDLES.replace("] TraceMeEnd(inner-1/x<y>)", "]"))
    assert no_end.scopes["inner-1/x<y>"].bundles == 6, "an unclosed scope ends with the one around"
    assert no_end.scopes[""].bundles == 7 + 1


def test_equal_names_nest():
    twice = BUNDLES.replace("inner-1/x<y>", "outer step")
    assert parsed(bundles=twice).scopes["outer step"].bundles == 8


def test_bundles_and_unit_rows_that_differ_in_number_are_refused():
    fewer = UTILIZATION.rsplit("\n", 2)[0] + "\n"
    with pytest.raises(DumpError, match="tile: 16 bundles but 15 rows of unit use"):
        parsed(utilization=fewer)


def test_the_unit_table_is_read_by_its_own_header():
    capacity, rows = parse_utilization(
        "== CAPACTIY:\nSALU, NEW\n  2  7\n== UTILIZATION:\n1 0\n0 5\n\n"
    )
    assert capacity == {"SALU": 2, "NEW": 7}
    assert rows == [[1, 0], [0, 5]]


@pytest.mark.parametrize("text", ["", "nothing here", "A, B\n1\n==\n", "A, B\n1 2\n==\n1 2 3\n"])
def test_a_unit_table_of_another_form_is_refused(text):
    with pytest.raises(DumpError, match="unit use"):
        parse_utilization(text)


def test_vmem_is_summed_by_tag_and_other_memories_left_out():
    assert parse_allocations(ALLOCATIONS) == {
        "internal scratch": 0x12000,
        "scratch": 0x101000,
        "input window 0": 0x100000,
        "output window 0": 512,
    }
    assert parsed().vmem_bytes == 0x12000 + 0x101000 + 0x100000 + 512


@pytest.mark.parametrize(
    ("instruction", "device", "rows"),
    [
        ("vmatmul.bf16.gmra.mxu2", V5E, 16),
        ("vmatmul.msk.bf16.vlgmr.msra.gmra.mxu0", V5E, 16),
        ("vmatmul.mubr.bf16.gmra.mrb[4].mxu0", TPU7X, 16),
        ("vmatmul.f32.gmra.mxu0", V5E, 8),
        ("vmatmul.hi.f32.dwg.msra.gmra.mxu0", V5E, 8),
        ("vmatmul.s8.gmra.mxu0", V5E, 16),  # 32 rows at twice the bf16 rate
        ("vmatmul.s4.gmra.mxu0", V5E, 16),  # 64 rows at four times the bf16 rate
        ("vmatmul.mubr.f8e5m2.bf16.gmra.mxu0", V6E, 32),  # fp8 at the bf16 rate
        ("vmatmul.msk.f8e4m3b11.bf16.gmra.mxu0", V5E, 32),
        ("vmatmul.mubr.f8e4m3fn.gmra.mrb[0].mxu0", TPU7X, 16),  # 32 rows at twice the bf16 rate
    ],
)
def test_rows_of_an_instruction_follow_its_operand_type_and_the_chips_rate(
    instruction, device, rows
):
    assert mxu_rows(instruction, device) == rows


def test_an_unknown_matmul_instruction_is_named_not_guessed():
    with pytest.raises(DumpError, match=r"unknown matmul instruction 'vmatmul\.q3\.mxu0'"):
        mxu_rows("= vmatmul.q3.mxu0", V5E)


HLO = """\
HloModule jit_f, is_scheduled=true

%fused_computation (param_0: bf16[512,512]) -> bf16[512,512] {
  ROOT %multiply.1 = bf16[512,512]{1,0} multiply(%param_0, %param_0)
}

%body.2 (arg: (s32[], bf16[512,512])) -> (s32[], bf16[512,512]) {
  %under_scan.3 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} custom-call(%a, %b), custom_call_target="tpu_custom_call"
}

%cond.3 (arg: (s32[], bf16[512,512])) -> pred[] {
  ROOT %lt.0 = pred[]{:T(512)} compare(%x, %y), direction=LT
}

ENTRY %main.3 (x.1: bf16[512,512], y.1: bf16[512,512]) -> f32[512,512] {
  %tile.2 = bf16[512,512]{1,0} custom-call(%x.1, %y.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/tile/pallas_call"}
  %fusion = bf16[512,512]{1,0} fusion(%tile.2), kind=kLoop, calls=%fused_computation
  %while = (s32[], bf16[512,512]) while(%tuple), condition=%cond.3, body=%body.2
  %other.4 = f32[8]{0} custom-call(%fusion), custom_call_target="Sharding"
  ROOT %tile.3.x = f32[512,512]{1,0} custom-call(%fusion), custom_call_target="tpu_custom_call"
}
"""


def test_the_programs_kernels_are_found_as_they_run_and_xlas_own_work_is_not():
    assert kernel_instructions(HLO) == ["tile.2", "under_scan.3", "tile.3.x"]


def test_schedules_come_in_the_order_the_calls_were_traced_in():
    ran = ["dkv.1", "dq.1", "tile.2.x", "tile.1"]
    traced = ["tile", "dq", "tile", "dkv"]
    assert in_trace_order(ran, traced) == [
        ("tile", "tile.1"),
        ("dq", "dq.1"),
        ("tile", "tile.2.x"),
        ("dkv", "dkv.1"),
    ]


def test_calls_that_hlo_names_its_own_way_get_what_is_left():
    ran = ["tpu_custom_call.2", "named.1", "tpu_custom_call.1"]
    assert in_trace_order(ran, ["kernel", "named", "body"]) == [
        ("kernel", "tpu_custom_call.1"),
        ("named", "named.1"),
        ("body", "tpu_custom_call.2"),
    ]
    assert in_trace_order(["_.1"], ["a.b/1"]) == [("a.b/1", "_.1")]


def test_a_transformation_around_a_call_is_part_of_its_name():
    ran = ["vmap_right_.1", "transpose_jvp_left__.1", "vmap_left_.2"]
    assert in_trace_order(ran, ["left", "right", "left"]) == [
        ("left", "transpose_jvp_left__.1"),
        ("right", "vmap_right_.1"),
        ("left", "vmap_left_.2"),
    ]


def test_merged_calls_leave_one_schedule_and_unknown_kernels_are_not_lost():
    assert in_trace_order(["tile.1"], ["tile", "tile"]) == [("tile", "tile.1")]
    assert in_trace_order(["tile.1", "more.7"], ["tile"]) == [
        ("tile", "tile.1"),
        ("more", "more.7"),
    ]


def write_dump(folder, second_shape):
    """The dump of a program that runs a kernel twice; the compiler left files of the first only."""
    call = 'custom-call(%x), custom_call_target="tpu_custom_call"'
    (folder / "17-module_0001.jit_f-TLP-hlo.txt").write_text(
        "HloModule jit_f, is_scheduled=true\n\n"
        "ENTRY %main (x: f32[8,128]) -> f32[8,128] {\n"
        "  %x = f32[8,128]{1,0:T(8,128)} parameter(0)\n"
        f"  %tile.1 = f32[8,128]{{1,0:T(8,128)}} {call}\n"
        f"  ROOT %tile.2 = {second_shape} {call}\n}}\n"
    )
    for part, text in {
        "final_bundles": BUNDLES,
        "final_hlo-static-per-bundle-utilization": UTILIZATION,
        "pre-finalize-registers-and-allocations": ALLOCATIONS,
    }.items():
        (folder / f"18-tile.1-03-{part}.txt").write_text(text)


def test_a_kernel_that_was_compiled_once_and_runs_twice_has_two_schedules(tmp_path):
    write_dump(tmp_path, "f32[8,128]{1,0:T(8,128)}")
    first, second = read_schedules(tmp_path, V6E, ["tile", "tile"])
    assert first == second
    assert first.bundles == 16


def test_a_kernel_of_other_shapes_is_another_and_its_missing_dump_is_told(tmp_path):
    write_dump(tmp_path, "f32[16,128]{1,0:T(8,128)}")
    with pytest.raises(DumpError, match=r"no final_bundles.txt for tile\.2"):
        read_schedules(tmp_path, V6E, ["tile", "tile"])
