"""What XLA runs around kernels, read from small modules in the real format written here."""
# ruff: noqa: E501 (lines of a module are as long as they are)

import pytest

from autotune.compiler.hlo import Size, size, xla_ops
from autotune.compiler.program import kernel_instructions

MODULE = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[64,128]{1,0:T(8,128)(2,1)})->f32[64,128]{1,0:T(8,128)}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%picks (p0: f32[1024,128], p1: s32[], p2: f32[8,128]) -> f32[1024,128] {
  %p0 = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %p2 = f32[8,128]{1,0:T(8,128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %update = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%p0, %p2, %p1, %zero)
}

%body (state: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {
  %state = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[64,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %negate = f32[64,128]{1,0:T(8,128)} negate(%x), backend_config={"window_config":{"estimated_cycles":"77"}}
  ROOT %next = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}) tuple(%n, %negate)
}

%still (state.1: (s32[], f32[64,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}) parameter(0)
  ROOT %less = pred[]{:T(512)} constant(true)
}

ENTRY %main (q: bf16[64,128], cache: f32[1024,128], at: s32[]) -> f32[64,128] {
  %q = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %cache = f32[1024,128]{1,0:T(8,128)} parameter(1)
  %at = s32[]{:T(128)} parameter(2)
  %flat = bf16[8192]{0:T(1024)(128)(2,1)} bitcast(%q)
  %copy-start = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%q)
  %rows = f32[64]{0:T(128)} fusion(%q), kind=kLoop, calls=%add, frontend_attributes={kernel_metadata={
"text": "over (several) lines"
}}, backend_config={"window_config":{"estimated_cycles":"1234","iteration_bounds":["1"]}}
  %copy-done = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %attend.1 = (f32[64,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) custom-call(%copy-done, /*index=1*/%rows), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"AAAA"}}
  %out = f32[64,128]{1,0:T(8,128)} get-tuple-element(%attend.1), index=0
  %few = f32[8,128]{1,0:T(8,128)} get-tuple-element(%attend.1), index=1
  %kept = f32[1024,128]{1,0:T(8,128)} fusion(%cache, %at, %few), kind=kLoop, calls=%picks, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  %part = f32[16,128]{1,0:T(8,128)} slice(%kept), slice={[0:16], [0:128]}
  %zero.1 = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}) tuple(%zero.1, %out)
  %loop = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}) while(%start), condition=%still, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %result = f32[64,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def ops(text=MODULE):
    return {op.name: op for op in xla_ops(text)}


def test_what_moves_or_computes_is_listed_once_and_kernels_and_names_are_not():
    assert list(ops()) == ["copy-start", "rows", "kept", "part", "negate"]
    assert kernel_instructions(MODULE) == ["attend.1"]


def test_an_asynchronous_copy_is_one_op_that_may_overlap():
    copy = ops()["copy-start"]
    assert (copy.opcode, copy.asynchronous) == ("copy", True)
    assert (copy.bytes_read, copy.bytes_written) == (64 * 128 * 2, 0), "it fills VMEM"
    assert copy.vmem_bytes == 64 * 128 * 2
    assert not ops()["rows"].asynchronous


def test_cycles_are_xlas_own_figure_or_none():
    found = ops()
    assert found["rows"].estimated_cycles == 1234, "behind an attribute of several lines"
    assert found["kept"].estimated_cycles is None, "the largest integer says nothing"
    assert found["part"].estimated_cycles is None
    zero = MODULE.replace('"estimated_cycles":"1234"', '"estimated_cycles":"0"')
    assert ops(zero)["rows"].estimated_cycles is None


def test_an_update_in_place_costs_what_it_replaces_and_a_slice_what_it_takes():
    found = ops()
    assert found["kept"].bytes_written == 8 * 128 * 4
    assert found["kept"].bytes_read == 8 * 128 * 4 + 512, "the update and the place, not the cache"
    assert found["part"].bytes_read == found["part"].bytes_written == 16 * 128 * 4


def test_a_loop_repeats_what_it_holds_as_often_as_xla_knows():
    assert ops()["negate"].repeats == 5
    unknown = MODULE.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    assert ops(unknown)["negate"].repeats == 1
    counter = MODULE.replace("constant(true)", "compare(%i, %five), direction=LT").replace(
        "  ROOT %less",
        "  %i = s32[]{:T(128)} get-tuple-element(%state.1), index=0\n"
        "  %five = s32[]{:T(128)} constant(5)\n  ROOT %less",
    )
    counter = counter.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    assert ops(counter)["negate"].repeats == 1, "nothing says that the counter grows by one"
    grows = counter.replace("tuple(%n, %negate)", "tuple(%more, %negate)").replace(
        "  ROOT %next",
        "  %one = s32[]{:T(128)} constant(1)\n  %more = s32[]{:T(128)} add(%n, %one)\n  ROOT %next",
    )
    assert ops(grows)["negate"].repeats == 5
    copied = grows.replace("tuple(%zero.1,", "tuple(%first,").replace(
        "  %start =", "  %first = s32[]{:T(128)} copy(%zero.1)\n  %start ="
    )
    assert ops(copied)["negate"].repeats == 5
    assert ops(grows.replace("%zero.1 = s32[]{:T(128)} constant(0)", "%zero.1 = s32[]{:T(128)} "
                             "constant(2)"))["negate"].repeats == 3  # fmt: skip
    nested = MODULE.replace(
        "  %negate =", '  %again = f32[] call(%x), to_apply=%add\n  %negate ='
    )  # fmt: skip
    assert ops(nested)["sum"].repeats == 5


@pytest.mark.parametrize(
    ("text", "hbm"),
    [
        ("f32[2,32,1024,1]{2,3,1,0:T(1,128)}", 2 * 32 * 1024 * 4),
        ("f32[2,32,1024,1]{3,2,1,0:T(8,128)}", 2 * 32 * 1024 * 128 * 4),
        ("bf16[5,130]{1,0:T(8,128)(2,1)}", 8 * 256 * 2),
        ("s4[10,128]{1,0:T(8,128)(8,1)}", 16 * 128 // 2),
        ("pred[3]{0:T(512)}", 512),
        ("f8e4m3fn[100]", 100),
        ("(f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}, token[])", 8 * 128 * 4),
    ],
)
def test_sizes_count_the_padding_of_the_layout(text, hbm):
    assert size(text) == Size(hbm=hbm)


def test_vmem_and_hbm_are_told_apart():
    both = "(f32[8,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)})"
    assert size(both) == Size(hbm=8192, vmem=4096)
