"""Right or wrong: tolerances, NaN, smaller problems with the same blocks, drawn inputs."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import measure_kernels
import numpy as np
import pytest

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.task import Task
from autotune.errors import KernelError
from autotune.kernels import base
from autotune.measure import check, inputs, worker
from autotune.measure.bench import Bench, OversizeError
from autotune.measure.check import NO_REFERENCE, error_of, judge, precision_of, tolerance
from autotune.measure.inputs import UnfitError
from autotune.measure.reduce import in_whole_tiles, lightened, reduced
from autotune.measure.timing import Effort

jax.config.update("jax_platforms", "cpu")

SHAPE = {"m": 256, "k": 256, "n": 256}


def problem_of(attribute, shape=None, dtype="bfloat16", device="v6e"):
    kernel = base.load(f"measure_kernels:{attribute}")
    return base.make_problem(kernel, device=device, shape=shape or SHAPE, dtype=dtype)


def task(attribute, config, **problem):
    return Task(problem=problem_of(attribute, **problem), candidate=Candidate.of(config))


@pytest.fixture(scope="module")
def bench():
    bench = Bench("cpu")
    bench.verify()
    return bench


@pytest.fixture(autouse=True)
def _cleared(bench):
    bench.clear()


def test_nan_never_equals_nan_and_an_infinity_must_be_met():
    want = np.array([[1.0, 2.0], [3.0, 4.0]])
    nan = np.array([[1.0, np.nan], [3.0, 4.0]])
    assert error_of(nan, want) == math.inf
    assert judge([nan], [nan], 1.0, how="").status == "failed", "a reference of NaN says nothing"
    infinite = np.array([[1.0, -np.inf], [3.0, 4.0]])
    assert error_of(infinite, infinite) == 0
    assert error_of(want, infinite) == math.inf
    assert error_of(infinite, want) == math.inf
    assert error_of(-infinite, infinite) == math.inf


def test_markers_of_masked_rows_are_met_and_do_not_widen_the_scale():
    want = np.array([[0.5, -2.38e38], [0.25, 0.125]])
    assert error_of(want.astype(np.float32).astype(np.float64), want) < 1e-6
    assert error_of(np.array([[0.9, -2.38e38], [0.25, 0.125]]), want) > 0.3
    assert error_of(np.array([[0.5, 0.0], [0.25, 0.125]]), want) == math.inf


def test_another_shape_or_number_of_outputs_is_wrong():
    one = np.ones((2, 2))
    assert judge([one[:1]], [one], 1.0, how="here").status == "wrong"
    found = judge([one, one], [one], 1.0, how="here")
    assert found.reason == "2 outputs, the reference has 1"


def test_nothing_but_zeros_is_right_when_met_and_wrong_when_not():
    zeros = np.zeros((2, 2))
    assert error_of(zeros, zeros) == 0
    assert error_of(zeros + 1e-3, zeros) >= 1


def test_the_worse_of_two_outputs_is_named_with_its_error_and_what_is_allowed():
    one = np.ones((4, 4))
    found = judge([one, one * 1.5], [one, one], 0.03, how="at its own size on cpu")
    assert found.status == "wrong"
    assert found.error == pytest.approx(0.25)
    assert found.reason == "output 1 is off by 0.25, 0.03 is allowed (at its own size on cpu)"
    assert check.Checked.from_json(found.to_json()) == found


def test_a_verdict_with_an_infinite_error_survives_json():
    found = judge([np.full((2,), np.nan)], [np.ones(2)], 0.1, how="here")
    assert found.to_json()["error"] == "inf"
    assert check.Checked.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("dtype", "precision", "low", "high"),
    [
        ("bfloat16", None, 0.03, 0.04),
        ("float32", jax.lax.Precision.HIGHEST, 1e-5, 1e-3),
        ("float32", None, 0.03, 0.04),  # one pass of bf16 operands on a TPU
        ("int8", None, 0.0, 0.0),
    ],
)
def test_the_tolerance_follows_from_what_the_arithmetic_rounds_to(dtype, precision, low, high):
    whole = dtype == "int8"

    def product(x, y):
        wide = jnp.int32 if whole else jnp.float32
        return jnp.dot(x, y, precision=precision, preferred_element_type=wide).astype(
            wide if whole else dtype
        )

    array = jax.ShapeDtypeStruct((128, 128), dtype)
    found = precision_of(jax.make_jaxpr(product)(array, array))
    assert low <= tolerance(found, 4096) <= high


def test_exact_operands_of_a_coarse_type_do_not_widen_the_tolerance():
    array = jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn)

    def product(x, y):
        return jnp.dot(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16),
                       preferred_element_type=jnp.float32).astype(jnp.bfloat16)  # fmt: skip

    assert precision_of(jax.make_jaxpr(product)(array, array)).rounding == 2.0**-8


def test_the_tolerance_grows_with_k_and_never_past_a_tenth():
    f32 = check.Precision(rounding=2.0**-24, accumulating=2.0**-24)
    assert tolerance(f32, 65536) > 4 * tolerance(f32, 1024)
    bf16 = check.Precision(rounding=2.0**-8, accumulating=2.0**-8)
    assert tolerance(bf16, 2**20) == 0.1


def test_bf16_products_of_8192_terms_pass_and_one_skipped_block_of_128_does_not(bench):
    """D3 of the field reports."""
    shape = {"m": 64, "k": 8192, "n": 128}
    for name, skip in (("autotune_00000", None), ("autotune_00001", 5)):
        assert bench.compile(name, task("SKIPS", {"skip": skip}, shape=shape)) is None
    right, wrong = (bench.check(name, seed=0) for name in ("autotune_00000", "autotune_00001"))
    assert right.status == "ok", right.reason
    assert 0 < right.error < right.tolerance / 4
    assert wrong.status == "wrong"
    assert wrong.error > 5 * wrong.tolerance
    assert right.tolerance == wrong.tolerance == pytest.approx(8 * 2.0**-8, rel=0.05)
    assert right.how == "at its own size on cpu"


def test_a_first_and_fastest_wrong_candidate_is_disqualified_alone(bench):
    """W1: nothing but the kernel's own reference is ever compared with."""
    acts = ["half", "nothing", "nan"]
    verdicts = []
    for n, act in enumerate(acts):
        bench.compile(f"autotune_{n:05}", task("PRODUCT", {"act": act, "parts": 1 + n % 2}))
        verdicts.append(bench.check(f"autotune_{n:05}", seed=0).status)
    assert verdicts == ["wrong", "ok", "wrong"]


def test_each_candidate_is_checked_on_inputs_of_its_own():
    """T10: what a candidate finds in memory another left is wrong for it."""
    candidates = [Candidate.of({"act": a, "parts": p}) for a in "ab" for p in (1, 2, 4)]
    seeds = {inputs.check_seed(0, candidate) for candidate in candidates}
    assert len(seeds) == len(candidates)
    assert inputs.check_seed(0, candidates[0]) == inputs.check_seed(0, candidates[0])
    assert inputs.check_seed(1, candidates[0]) not in seeds


def test_a_candidate_that_writes_half_into_anothers_memory_is_wrong_even_when_run_second(bench):
    """T10, with a device whose memory keeps what the last program left."""
    memory = np.zeros((256, 256), np.float32)

    def run(share):
        def host(x, y):
            rows = int(256 * share)
            memory[:rows] = np.asarray(x)[:rows] @ np.asarray(y)
            return memory.copy()

        def build(problem, config):
            def program(x, y):
                return jax.pure_callback(host, jax.ShapeDtypeStruct((256, 256), jnp.float32), x, y)

            return program, measure_kernels._operands(problem)

        return build

    kernel = dataclasses.replace(
        measure_kernels.PRODUCT, build=lambda p, c: run(float(c["share"]))(p, c)
    )
    problem = problem_of("PRODUCT", dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_kernels, "PRODUCT", kernel)
        found = []
        for n, share in enumerate((1.0, 0.5)):
            one = Task(problem=problem, candidate=Candidate.of({"share": share}))
            assert bench.compile(f"autotune_{n:05}", one) is None
            found.append(bench.check(f"autotune_{n:05}", seed=0).status)
    assert found == ["ok", "wrong"]


def test_a_kernel_without_a_reference_says_that_nothing_was_checked(bench):
    bench.compile("autotune_00000", task("UNCHECKED", {"act": "half", "parts": 1}))
    found = bench.check("autotune_00000", seed=0)
    assert (found.status, found.error, found.how) == ("ok", None, NO_REFERENCE)


def test_a_reference_the_host_cannot_hold_is_asked_for_less_with_the_same_blocks(
    bench, monkeypatch
):
    shape = {"m": 160, "n": 128}
    monkeypatch.setattr("autotune.measure.bench._reference_fits", lambda kernel, program: False)
    verdicts = {}
    for n, wrong in enumerate((False, True)):
        config = {"rows": 16, "wrong": wrong}
        bench.compile(f"autotune_{n:05}", task("COPY", config, shape=shape))
        verdicts[wrong] = bench.check(f"autotune_{n:05}", seed=0)
    assert verdicts[False].status == "ok"
    assert verdicts[False].how == "at m=48 on cpu"
    assert verdicts[True].status == "wrong", "an index map wrong from the third block on shows"


@pytest.mark.parametrize("attribute", ["ZEROS", "ONES"])
def test_constant_inputs_are_refused(bench, attribute):
    """T4: they run faster, and a broken kernel may pass them."""
    config = {"act": "nothing", "parts": 1}
    bench.compile("autotune_00000", task(attribute, config))
    with pytest.raises(UnfitError, match=r"input 0 is [01] throughout; times are taken on drawn"):
        bench.check("autotune_00000", seed=0)
    with pytest.raises(UnfitError, match="throughout"):
        bench.time(["autotune_00000"], timer="device_profile", effort=None, seed=0)


def test_constant_segment_ids_are_no_constant_data():
    data = jnp.arange(4, dtype=jnp.float32)
    assert inputs.constant([data, jnp.zeros(4, jnp.int32)], "float32") is None
    assert inputs.constant([data, jnp.zeros(4, jnp.int8)], "int8") is not None
    assert inputs.constant([data, jnp.zeros((1,), jnp.float32)], "float32") is None
    many = jnp.arange(64, dtype=jnp.float32)
    assert inputs.constant([many, jnp.ones(3, jnp.float32)], "float32") is None, "a scale"
    assert inputs.constant([many, jnp.ones(4, jnp.float32)], "float32") is not None
    assert "not finite" in (inputs.constant([data / 0], "float32") or "")


def test_generators_jax_cannot_trace_are_called_as_they_are(bench):
    kernel, problem = measure_kernels.NUMPY_INPUTS, problem_of("NUMPY_INPUTS")
    arguments = measure_kernels._operands(problem)
    first, again, other = (inputs.draw(kernel, problem, arguments, seed) for seed in (1, 1, 2))
    assert isinstance(first[0], jax.Array)
    assert np.array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])


def test_inputs_of_another_shape_than_the_calls_are_the_kernels_fault(bench):
    kernel = dataclasses.replace(
        measure_kernels.PRODUCT, inputs=lambda problem, key: (jax.random.normal(key, (2, 2)),)
    )
    with pytest.raises(KernelError, match=r"inputs are .*2, 2.*its call takes"):
        inputs.draw(
            kernel, problem_of("PRODUCT"), measure_kernels._operands(problem_of("PRODUCT")), 0
        )


def test_inputs_and_output_beyond_hbm_are_refused_before_device_work(bench):
    """V10: 32.25 GiB; a v5e has 16, a tpu7x 96."""
    shape = {"m": 131072, "k": 512, "n": 131072}
    config = {"act": "nothing", "parts": 1}
    with pytest.raises(OversizeError, match=r"HBM: inputs and output need 32\.25 GiB, the device"):
        bench.compile("autotune_00000", task("PRODUCT", config, shape=shape, device="v5e"))
    for device, fits in (("v5e", False), ("tpu7x", True)):
        problem = problem_of("PRODUCT", shape, device=device)
        arguments = measure_kernels._operands(problem)
        outputs = [jax.ShapeDtypeStruct((131072, 131072), jnp.bfloat16)]
        hbm_bytes = devices.get(device).hbm_bytes
        assert (inputs.preflight(arguments, outputs, hbm_bytes) is None) is fits
        if fits:
            assert inputs.sets_that_fit(arguments, outputs, hbm_bytes) == inputs.SETS


def test_fewer_sets_of_inputs_are_rotated_where_hbm_is_short():
    array = [jax.ShapeDtypeStruct((2**20,), jnp.int8)]
    assert inputs.sets_that_fit(array, array, 100 * 2**20) == inputs.SETS
    assert inputs.sets_that_fit(array, array, 4 * 2**20) == 2
    assert inputs.sets_that_fit(array, array, 2 * 2**20) == 1


@pytest.mark.parametrize("tail", ["", "\n\nat:\n  jaxlib/py_executable.cc:476"])
def test_what_host_code_raised_is_the_reason_not_its_traceback(tail):
    text = (
        "INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):\n"
        '  File "kernel.py", line 3, in host\nRuntimeError: the device lost a packet' + tail
    )
    verdict = worker._verdict(jax.errors.JaxRuntimeError(text))
    assert verdict == {"status": "failed", "reason": "RuntimeError: the device lost a packet"}


def test_a_donating_kernel_is_run_again_and_again(bench, monkeypatch):
    """T6: nothing is donated by the program that is timed, whatever its parts ask for."""

    def build(problem, config):
        def step(x, y):
            return x @ y

        return jax.jit(step, donate_argnums=0), measure_kernels._operands(problem)

    donating = dataclasses.replace(measure_kernels.PRODUCT, build=build)
    monkeypatch.setattr(measure_kernels, "PRODUCT", donating)
    bench.compile("autotune_00000", task("PRODUCT", {"act": "donates", "parts": 1}))
    assert bench.check("autotune_00000", seed=0).status == "ok"
    effort = Effort(first=5, more=5, most=10, spread=0.0)
    found = bench.time(["autotune_00000"], timer="device_profile", effort=effort, seed=0)
    assert len(found["autotune_00000"]) == 10


def test_identical_programs_are_known_before_they_are_compiled(bench):
    base_config = {"act": "nothing", "parts": 1}
    assert bench.compile("autotune_00000", task("PRODUCT", base_config)) is None
    assert bench.compile("autotune_00001", task("PRODUCT", {"act": "else", "parts": 1})) == (
        "autotune_00000"
    )
    assert bench.compile("autotune_00002", task("PRODUCT", {"act": "nothing", "parts": 2})) is None


@pytest.mark.parametrize(
    ("name", "shape", "config", "expected"),
    [
        ("matmul", {"m": 4096, "k": 7168, "n": 18432}, {"bm": 512, "bk": 1024, "bn": 2048},
         {"m": 1536, "k": 3072, "n": 6144}),
        ("matmul", {"m": 4000, "k": 256, "n": 128}, {"bm": 512, "bk": 128, "bn": 128},
         {"m": 1440, "k": 256, "n": 128}),
        ("flash_fwd",
         {"batch": 4, "q_heads": 64, "kv_heads": 8, "q_len": 2048, "kv_len": 2048,
          "head_dim_qk": 192, "head_dim_v": 128},
         {"block_q": 256, "block_kv": 256},
         {"batch": 3, "q_heads": 6, "kv_heads": 3, "q_len": 768, "kv_len": 768,
          "head_dim_qk": 192, "head_dim_v": 128}),
        # Smaller pages would be more copies, which is what interpreting takes its time for.
        ("jax.paged_attention",
         {"batch": 8, "q_heads": 16, "kv_heads": 4, "kv_len": 1024, "head_dim": 128,
          "page_size": 16},
         {"pages_per_compute_block": 16},
         {"batch": 3, "q_heads": 12, "kv_heads": 3, "kv_len": 1024, "head_dim": 128,
          "page_size": 16}),
    ],
)  # fmt: skip
def test_a_reduced_problem_keeps_the_blocks_and_three_of_each(name, shape, config, expected):
    kernel = base.load(name)
    problem = base.make_problem(kernel, device="tpu7x", shape=shape)
    device = devices.get("tpu7x")
    first = {name: t.values[0] for name, t in kernel.tunables(problem, device).items()}
    default = kernel.default(problem, device) if kernel.default else first
    whole = dict(kernel.canonical(problem, {**default, **config}))
    assert dict(reduced(kernel, problem, whole).shape) == expected


def test_of_a_problem_in_whole_tiles_only_long_axes_are_rounded_up():
    kernel = base.load("flash_fwd")
    shape = {
        "batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 320, "kv_len": 320, "head_dim_qk": 64,
        "head_dim_v": 64,
    }  # fmt: skip
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    whole = in_whole_tiles(kernel, problem)
    assert whole is not None
    assert dict(whole.shape) == shape | {"q_len": 384, "kv_len": 384}


def test_a_run_in_interpret_mode_is_lightened_by_halving_the_blocks_in_step():
    kernel = base.load("matmul")
    problem = base.make_problem(kernel, device="v6e", shape={"m": 8192, "k": 8192, "n": 8192})
    config = {**kernel.default(problem, devices.get("v6e")), "bm": 1024, "bk": 2048, "bn": 512}
    smaller, lighter = lightened(kernel, problem, config, max_flops=2 * 10**9)
    assert kernel.flops(smaller) <= 2 * 10**9
    assert [lighter[b] for b in ("bm", "bk", "bn")] == [256, 512, 128]
    assert lighter["buffers"] == config["buffers"]
    assert [smaller.shape[a] // lighter[f"b{a}"] for a in "mkn"] == [3, 3, 3]
