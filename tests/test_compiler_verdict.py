"""From the compiler's words to a status and one line."""

import pytest

from autotune.compiler.verdict import MAX_REASON, classify, classify_text, crash

# As libtpu 0.0.42 and 0.0.50 and Pallas word them, cut where they go on for pages.
SCOPED = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %probe.1 = bf16[4096,4096] \
custom-call(%a, %b). Scoped allocation with size 18.36M and limit 16.00M exceeded scoped vmem \
limit by 2.36M. It should not be possible to run out of scoped vmem -
See https://openxla.org/xla/errors/error_1001 for more details."""
WHOLE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space \
vmem. Used 52.95M of 16.00M vmem. Exceeded vmem capacity by 36.95M.

Program vmem requirement 52.95M:
    scoped           52.95M
  1. Size: 4.00M"""
SINGLE = (
    "RESOURCE_EXHAUSTED: Allocation (size=73400320) would exceed memory (size=67108864) :: "
    "#allocation2 [shape = 'f32[143360,128]{1,0:T(8,128)}', space=vmem, size = 0x4600000, scoped, "
    "tag = 'scratch operand'] :: tpu_custom_call.1"
)
HBM = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(32.25G) exceeds available HBM (15.75G)."
)
HBM_CODE = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom:
XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 32.25G of 15.75G hbm. \
Exceeded hbm capacity by 16.50G."""
MOSAIC_OLD = """INTERNAL: Mosaic failed to compile TPU kernel: E2001: \
CompileTimeMosaicUnsupportedRhsType: Unsupported matmul RHS type on target: vector<128x128xi8>
See https://openxla.org/xla/errors/error_2001 for more details.

The MLIR operation involved:
  %1094 = "tpu.matmul"(%1087, %1091, %1093)
Please report a bug at: https://github.com/jax-ml/jax/issues/new/choose
"""
MOSAIC_NEW = """INTERNAL: Mosaic failed to compile TPU kernel with MLIR module name `probe` \
HLO name `probe.1`: Unsupported type for matmul: 'vector<256x256xf8E4M3B11FNUZ>'
"""
BLOCK = (
    "The Pallas TPU lowering currently requires that the last two dimensions of your block shape "
    "are divisible by 8 and 128 respectively, or be equal to the respective dimensions of the "
    "overall array. Block spec for args[0] in pallas_call kernel at /home/me/code/mine.py:63 has "
    "block shape (100, 100), array shape (256, 256).\n"
    "See details at https://docs.jax.dev/en/latest/pallas/grid_blockspec.html#pallas-blockspec"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SCOPED, "VMEM: the kernel allocates 18.36M, its limit is 16.00M (E1001)"),
        (WHOLE, "VMEM: used 52.95M of 16.00M"),
        (
            SINGLE,
            "VMEM: one allocation of 73400320 bytes (scratch operand) exceeds the memory of "
            "67108864 bytes",
        ),
        (
            SINGLE.replace("space=vmem", "space=smem"),
            "SMEM: one allocation of 73400320 bytes (scratch operand) exceeds the memory of "
            "67108864 bytes",
        ),
        (HBM, "HBM: HLO temporaries need 32.25G of 15.75G"),
        (HBM_CODE, "HBM: used 32.25G of 15.75G"),
        (
            "RESOURCE_EXHAUSTED: Some new way of saying it: 5 does not fit in 4.",
            "Some new way of saying it: 5 does not fit in 4",
        ),
    ],
)
def test_every_wording_of_too_little_memory_is_oom_with_its_numbers(text, reason):
    verdict = classify_text("JaxRuntimeError", text)
    assert (verdict.status, verdict.reason) == ("oom", reason)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (
            "MosaicError",
            MOSAIC_OLD,
            "Unsupported matmul RHS type on target: vector<128x128xi8> (E2001)",
        ),
        (
            "JaxRuntimeError",
            MOSAIC_NEW,
            "Unsupported type for matmul: 'vector<256x256xf8E4M3B11FNUZ>'",
        ),
        (
            "MosaicError",
            "INTERNAL: Mosaic failed to compile TPU kernel: Invalid vector type for load\n\nThe",
            "Invalid vector type for load",
        ),
        (
            "NotImplementedError",
            "head_dim=192 should be a multiple of 128 if larger",
            "head_dim=192 should be a multiple of 128 if larger",
        ),
        (
            "NotImplementedError",
            "Unimplemented primitive in Pallas TPU lowering for tc: sort. Please file an issue at "
            "https://github.com/jax-ml/jax/issues/new/choose.",
            "Unimplemented primitive in Pallas TPU lowering for tc: sort",
        ),
        (
            "MLIRError",
            "Invalid type:\nerror: failed to verify 'elementType': VectorElementTypeInterface",
            "Invalid type: error: failed to verify 'elementType': VectorElementTypeInterface",
        ),
    ],
)
def test_a_refused_type_shape_or_operation_is_unsupported(kind, text, reason):
    verdict = classify_text(kind, text)
    assert (verdict.status, verdict.reason) == ("unsupported", reason)


def test_a_refused_block_shape_keeps_its_numbers_and_loses_the_machines_path():
    verdict = classify_text("ValueError", BLOCK)
    assert verdict.status == "unsupported"
    assert "block shape (100, 100), array shape (256, 256)" in verdict.reason
    assert "mine.py:63" in verdict.reason
    assert "/home" not in verdict.reason
    assert "https" not in verdict.reason


@pytest.mark.parametrize("kind", ["ValueError", "NotImplementedError", "AssertionError"])
def test_what_the_kernel_itself_raises_is_failed_whatever_it_says(kind):
    verdict = classify_text(kind, "epilogue not supported", from_library=False)
    assert (verdict.status, verdict.reason) == ("failed", f"{kind}: epilogue not supported")


def test_an_exception_without_words_says_where_it_was_raised():
    try:
        raise AssertionError
    except AssertionError as error:
        verdict = classify(error)
    assert verdict.status == "failed"
    assert verdict.reason.startswith("AssertionError raised at test_compiler_verdict.py:")


def test_missing_host_memory_is_failed_and_may_be_tried_again():
    verdict = classify(MemoryError("mask of 64 GiB"))
    assert verdict.reason == "out of host memory: mask of 64 GiB"
    assert verdict.status == "failed"
    assert not verdict.repeatable


def test_a_reason_is_one_line_of_bounded_length_without_addresses():
    verdict = classify_text("ValueError", "bad <object at 0x7f1234567890>" + " x" * MAX_REASON)
    assert "\n" not in verdict.reason
    assert len(verdict.reason) <= MAX_REASON
    assert "0x7f" not in verdict.reason


def test_an_abort_is_explained_by_the_compilers_own_line():
    stderr = (
        "warning: something\n"
        "F1129 17:17:30.671779    1234 emitter.cc:42] Check failed: a == b (1 vs. 2)\n"
        "*** Check failure stack trace: ***\n    @     0x7f12  main\n"
    )
    verdict = crash(stderr, -6)
    assert verdict.status == "crashed"
    assert verdict.reason == (
        "the compiler aborted: emitter.cc:42] Check failed: a == b (1 vs. 2) (SIGABRT)"
    )
    assert verdict.repeatable


def test_a_worker_killed_from_outside_may_be_tried_again():
    verdict = crash("", -9)
    assert verdict.reason == "the compile worker ended with SIGKILL"
    assert not verdict.repeatable
    assert crash("bye\n", 3).reason == "the compile worker ended with exit status 3"
