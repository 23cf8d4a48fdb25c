"""flash_dq and flash_dkv against the float64 reference's derivative, in TPU interpret mode."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.environment import unavailable
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.errors import InputError
from autotune.evidence import Compiled
from autotune.kernels import flash_bwd, flash_dkv, flash_dq, reference
from autotune.kernels.attention import MASK_VALUE, AttentionShape
from autotune.kernels.base import make_problem
from autotune.kernels.flash_bwd_problem import reference_gradients
from autotune.kernels.flash_bwd_tiles import Blocks, largest_tile
from autotune.pallas_call import trace
from autotune.problem import Problem

MODULES = (flash_dq, flash_dkv)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
SHAPE = {
    "q_heads": 4,
    "kv_heads": 2,
    "q_len": 300,
    "kv_len": 420,
    "head_dim_qk": 24,
    "head_dim_v": 40,
}
BLOCKS = {"block_q_major": 128, "block_kv_major": 128, "block_q": 128, "block_kv": 128}


def problem_of(
    module: ModuleType, device: str = "v6e", dtype: str = "float32", **given: Any
) -> Problem:
    """`SHAPE`, with axes and options changed by name."""
    options = {name: given.pop(name) for name in list(given) if name in module.KERNEL.options}
    return make_problem(
        module.KERNEL, device=device, shape={**SHAPE, **given}, options=options, dtype=dtype
    )


def config_of(module: ModuleType, **blocks: int) -> dict[str, int]:
    return {name: {**BLOCKS, **blocks}[name] for name in module.BlockSizes.__dataclass_fields__}


def operands(problem: Problem, seed: int = 0, shift: float = 0.0) -> tuple[jax.Array, ...]:
    """q, k, v, do drawn, with `shift` added to every logit; lse and di from the reference."""
    random, s = np.random.default_rng(seed), AttentionShape.of(problem)
    scale, dtype = s.scale(problem.options["scale"]), jnp.dtype(problem.dtype)
    q = random.normal(size=(s.batch, s.q_heads, s.q_len, s.head_dim_qk))
    k = random.normal(size=(s.batch, s.kv_heads, s.kv_len, s.head_dim_qk))
    v = random.normal(size=(s.batch, s.kv_heads, s.kv_len, s.head_dim_v))
    do = random.normal(size=(s.batch, s.q_heads, s.q_len, s.head_dim_v))
    if shift:
        q[..., 0] = abs(shift / scale) ** 0.5
        k[..., 0] = shift / scale / q[0, 0, 0, 0]
    q, k, v, do = (jnp.asarray(x, dtype) for x in (q, k, v, do))
    mask = reference.causal_mask(s.q_len, s.kv_len) if problem.options["causal"] else None
    o, lse, _ = reference.attention(
        q, k, v, scale=scale, soft_cap=problem.options["logit_soft_cap"], mask=mask
    )
    di = np.sum(np.asarray(jnp.asarray(o, dtype), np.float64) * np.asarray(do, np.float64), axis=-1)
    return q, k, v, do, jnp.asarray(lse, jnp.float32), jnp.asarray(di, jnp.float32)


def run(module: ModuleType, problem: Problem, config: dict[str, int], arrays: Any) -> list[Any]:
    """The kernel's gradients, interpreted with race detection and NaN as fresh memory."""
    fn, _ = module.KERNEL.build(problem, module.KERNEL.canonical(problem, config))
    fast_to_compile = {"xla_backend_optimization_level": 0}
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(interpret):
        out = jax.jit(fn).lower(*arrays).compile(fast_to_compile)(*arrays)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(out)]


def errors(
    module: ModuleType, problem: Problem, config: dict[str, int], arrays: Any
) -> list[float]:
    """Largest difference from the reference, over the reference's largest value, per gradient.

    A gradient of which nothing is left where a row sees one key, p·(dp - di) being 0, is judged by
    the terms that cancel.
    """
    found = run(module, problem, config, arrays)
    expected = jax.tree.leaves(module.KERNEL.reference(problem, *arrays))
    assert [x.shape for x in found] == [x.shape for x in expected], "shapes of the gradients"
    worst, least = [], cancelled_terms(problem, arrays) if problem.shape["kv_len"] <= 4 else 0.1
    for got, want in zip(found, expected, strict=True):
        assert np.isfinite(got).all(), "a gradient is not finite"
        worst.append(np.abs(got - want).max() / max(np.abs(want).max(), least))
    return worst


def cancelled_terms(problem: Problem, arrays: Any) -> float:
    """Size of scale · dp·k and scale · dp·q, before di is subtracted."""
    s = AttentionShape.of(problem)
    q, k, v, do = (np.asarray(x, np.float64) for x in arrays[:4])
    dp = np.einsum("bhqd,bhkd->bhqk", do, np.repeat(v, s.group, axis=1))
    size = s.scale(problem.options["scale"]) * max(np.abs(q).max(), np.abs(k).max())
    return float(np.abs(dp).max() * size)


def check(module: ModuleType, problem: Problem, config: dict[str, int], **drawn: Any) -> None:
    worst = errors(module, problem, config, operands(problem, **drawn))
    allowed = TOLERANCE[problem.dtype]
    assert max(worst) <= allowed, f"{module.KERNEL.name} is off by {worst}, allowed {allowed}"


@st.composite
def problems(draw: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """A problem in keywords of `problem_of`, and blocks; lengths up to three blocks of 128."""
    q_heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]))
    length = st.one_of(st.integers(1, 400), st.integers(257, 384))
    major, minor = st.sampled_from([(128, 128), (128, 128), (256, 128), (256, 256), (384, 128)]), {}
    for axis in ("q", "kv"):
        minor[f"block_{axis}_major"], minor[f"block_{axis}"] = draw(major)
    problem = {
        "device": draw(st.sampled_from(["v6e", "v5e"])),  # transposed accumulation and not
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "batch": draw(st.sampled_from([1, 1, 2])),
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "q_len": draw(length),
        "kv_len": draw(length),
        "head_dim_qk": draw(st.sampled_from([8, 16, 24, 40])),
        "head_dim_v": draw(st.sampled_from([8, 16, 32])),
        "causal": draw(st.sampled_from([True, True, False])),
        "logit_soft_cap": draw(st.sampled_from([None, None, 2.0])),
        # Not 0.3: it makes logits of 10, whose rounding to f32 alone moves dk by 1.7e-6.
        "scale": draw(st.sampled_from([None, 0.1])),
        "use_exp2": draw(st.booleans()),
    }
    return problem, minor


def drawn(examples: int) -> Callable[..., Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.mark.parametrize("module", MODULES)
@drawn(25)
@given(case=problems(), seed=st.integers(0, 2**16))
def test_gradients_are_those_of_the_reference(module, case, seed):
    keywords, blocks = case
    check(module, problem_of(module, **keywords), config_of(module, **blocks), seed=seed)


@pytest.mark.nightly
@pytest.mark.parametrize("module", MODULES)
@drawn(200)
@given(case=problems(), seed=st.integers(2**16, 2**20))
def test_gradients_are_those_of_the_reference_over_many_problems(module, case, seed):
    keywords, blocks = case
    check(module, problem_of(module, **keywords), config_of(module, **blocks), seed=seed)


@pytest.mark.parametrize(
    ("causal", "cap", "lengths"),
    [(False, None, (5, 8)), (True, None, (8, 9)), (True, 1.5, (9, 4))],
)
def test_the_reference_is_the_derivative_of_float64_attention(causal, cap, lengths):
    problem = problem_of(
        flash_dq, q_len=lengths[0], kv_len=lengths[1], causal=causal, logit_soft_cap=cap
    )
    s = AttentionShape.of(problem)
    q, k, v, do = (np.asarray(x, np.float64) for x in operands(problem)[:4])
    hidden = ~reference.causal_mask(s.q_len, s.kv_len) if causal else np.zeros(lengths, bool)

    def attention(q, k, v):
        k, v = (jnp.repeat(x, s.group, axis=1) for x in (k, v))
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, k) * s.scale(None)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        weights = jnp.where(hidden, 0.0, jnp.exp(logits))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
        return jnp.einsum("bhqk,bhkd->bhqd", weights, v)

    with jax.enable_x64(True):
        gradients = jax.jit(lambda do, *qkv: jax.vjp(attention, *qkv)[1](do))
        expected = gradients(*(jnp.asarray(x) for x in (do, q, k, v)))
        assert {x.dtype for x in expected} == {jnp.dtype("float64")}
    for got, want in zip(reference_gradients(problem, q, k, v, do), expected, strict=True):
        np.testing.assert_allclose(got, np.asarray(want), atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("device", ["v6e", "v5e"])
def test_a_query_that_sees_no_key_gets_zeros_and_gives_none(module, device):
    problem = problem_of(module, device, q_len=400, kv_len=150, causal=True)
    arrays = operands(problem)
    assert (np.asarray(arrays[4])[:, :, :250] == MASK_VALUE).all(), "lse of a row without keys"
    worst = errors(module, problem, config_of(module), arrays)
    assert max(worst) <= TOLERANCE["float32"], f"off by {worst}"
    if module is flash_dq:
        (dq,) = run(module, problem, config_of(module), arrays)
        assert not dq[:, :, :250].any(), "dq of a row without keys is not zero"


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("causal", [True, False])
def test_padded_keys_and_queries_stay_silent_where_logits_are_far_from_zero(module, causal):
    # exp(0 - lse) of a padded key is exp(150) = inf here, and inf · 0 would be NaN.
    problem = problem_of(module, causal=causal, q_heads=2, kv_heads=1)
    worst = errors(module, problem, config_of(module), operands(problem, shift=-150.0))
    assert max(worst) < 2e-3, f"off by {worst}"  # logits near 150 have 2^-17 of rounding


@pytest.mark.parametrize("module", MODULES)
def test_blocks_do_not_change_the_gradients(module):
    problem = problem_of(module, causal=True, q_len=512, kv_len=512)
    arrays = operands(problem)
    for blocks in (
        {"block_q_major": 256, "block_q": 256, "block_kv_major": 256, "block_kv": 256},
        {"block_q_major": 512, "block_q": 128, "block_kv_major": 256, "block_kv": 256},
        {"block_q_major": 256, "block_q": 128, "block_kv_major": 512, "block_kv": 256},
    ):
        worst = errors(module, problem, config_of(module, **blocks), arrays)
        assert max(worst) <= TOLERANCE["float32"], f"{blocks}: off by {worst}"


@pytest.mark.parametrize("causal", [True, False])
def test_query_tiles_within_a_long_block_add_up(causal, monkeypatch):
    monkeypatch.setattr(flash_dq, "largest_tile", lambda block: 128)  # 1024, too long to interpret
    problem = problem_of(flash_dq, causal=causal, q_heads=2, kv_heads=1)
    check(flash_dq, problem, config_of(flash_dq, block_q_major=384, block_kv_major=256))


@pytest.mark.parametrize("module", MODULES)
def test_out_dtype_is_the_gradients_dtype(module):
    problem = problem_of(module, dtype="bfloat16", out_dtype="float32", q_heads=2)
    fn, arrays = module.KERNEL.build(problem, config_of(module))
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(fn, *arrays))} == {np.dtype("float32")}
    check(module, problem, config_of(module))


def test_inputs_are_those_of_a_forward_pass():
    problem = problem_of(flash_dq, causal=True, q_len=600, kv_len=500, logit_soft_cap=2.0)
    q, k, v, do, lse, di = flash_dq.KERNEL.inputs(problem, jax.random.key(1))
    mask = reference.causal_mask(600, 500)
    o, expected, _ = reference.attention(q, k, v, scale=24**-0.5, soft_cap=2.0, mask=mask)
    np.testing.assert_allclose(lse, expected, rtol=1e-5)
    np.testing.assert_allclose(di, (o * np.asarray(do, np.float64)).sum(-1), atol=1e-4)
    assert np.unique(np.asarray(q)).size > 1000, "inputs are drawn, not constant"


# The tests of the tests: each fault must be found by the comparison above.


def drop_last_store(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with its outputs left unwritten in the last block of their own axis."""
    sound, axis = module._kernel, 3 if module is flash_dq else 2

    class Forgetful:
        def __init__(self, ref: Any) -> None:
            self.ref, self.dtype, self.shape = ref, ref.dtype, ref.shape

        def __setitem__(self, index: Any, value: Any) -> None:
            @pl.when(pl.program_id(axis) < pl.num_programs(axis) - 1)
            def _() -> None:
                self.ref[index] = value

    def kernel(*refs: Any, **static: Any) -> None:
        outputs = 1 if module is flash_dq else 2
        kept = tuple(Forgetful(ref) for ref in refs[6 : 6 + outputs])
        sound(*refs[:6], *kept, *refs[6 + outputs :], **static)

    monkeypatch.setattr(module, "_kernel", kernel)


def shift_the_mask(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "offset", property(lambda b: b.kv_len - b.q_len + 1))


def interleave_the_groups(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda kv_head, member, group: member * SHAPE["kv_heads"] + kv_head
    monkeypatch.setattr(module, "q_head", wrong)


def forget_the_scale(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_bwd.Softmax, "scaled", lambda softmax, gradient: gradient)


def forget_di(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = flash_bwd.Softmax.gradients
    monkeypatch.setattr(
        flash_bwd.Softmax,
        "gradients",
        lambda softmax, s, dp, lse, di, visible: sound(softmax, s, dp, lse, di * 0, visible),
    )


def mask_nothing(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_bwd.Operands, "_visible", lambda operands, tile, cut, shape: None)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "plant",
    [
        drop_last_store,
        shift_the_mask,
        interleave_the_groups,
        forget_the_scale,
        forget_di,
        mask_nothing,
    ],
)
def test_a_planted_fault_is_found(module, plant, monkeypatch):
    problem = problem_of(module, causal=True, q_len=200, kv_len=260)
    plant(module, monkeypatch)
    with pytest.raises(AssertionError, match=r"is off by|is not finite"):
        check(module, problem, config_of(module))


def test_an_unmasked_padded_edge_is_found(monkeypatch):
    monkeypatch.setattr(flash_bwd.Operands, "_visible", lambda operands, tile, cut, shape: None)
    problem = problem_of(flash_dq, q_heads=2, kv_heads=1)
    with pytest.raises(AssertionError, match="a gradient is not finite"):
        errors(flash_dq, problem, config_of(flash_dq), operands(problem, shift=-150.0))


@pytest.mark.parametrize("module", MODULES)
def test_causal_skips_steps_and_copies(module):
    shape = {"q_heads": 4, "kv_heads": 2, "q_len": 4096, "kv_len": 4096}
    problem = problem_of(module, dtype="bfloat16", causal=True, **shape)
    config = config_of(module, **dict.fromkeys(BLOCKS, 1024))
    fn, arrays = module.KERNEL.build(problem, config)
    (call,) = trace(fn, arrays, devices.get("v6e")).calls
    assert call.scopes["step"] == 4 * 6, "whole blocks below the diagonal, 4 heads"
    assert call.scopes["masked_step"] == 4 * 4, "blocks on the diagonal"
    copies = {w.name: w.copies for w in call.windows if w.role == "input"}
    if module is flash_dq:  # k, v: 1 + 2 + 3 + 4 blocks a head, a skipped step fetches block 0
        assert copies["input 1"] == copies["input 2"] <= 4 * 10
        assert call.scopes["init"] == call.scopes["finalize"] == 4 * 4
    else:
        assert copies["input 0"] == copies["input 3"] <= 4 * 10
        assert call.scopes["init"] == call.scopes["finalize"] == 2 * 4, "once a kv head and block"


@pytest.mark.parametrize(
    ("lengths", "blocks", "diagonals"),
    [
        ((4096, 4096), (1024, 1024), (0,)),
        ((4096, 4096), (2048, 1024), (-1024, 0)),
        ((4096, 4096), (1024, 2048), (0, 1024)),
        ((1000, 1300), (512, 512), (-212, 300)),
        ((4096, 4096), (128, 2048), None),
        ((100, 1000), (128, 256), (132,)),
    ],
)
def test_the_diagonals_of_a_grid_are_known(lengths, blocks, diagonals):
    grid = Blocks(
        q_len=lengths[0], kv_len=lengths[1], block_q=blocks[0], block_kv=blocks[1],
        tile_q=blocks[0], tile_kv=blocks[1], causal=True,
    )  # fmt: skip
    assert grid.cut_deltas() == diagonals


def test_a_tile_is_the_largest_divisor_up_to_1024():
    assert [largest_tile(block) for block in (128, 384, 1024, 1152, 4096)] == [
        128, 384, 1024, 384, 1024,
    ]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_a_long_block_runs_the_tiles_of_short_ones_in_fewer_steps(module):
    shape = {"q_heads": 4, "kv_heads": 2, "q_len": 4096, "kv_len": 4096}
    problem = problem_of(module, dtype="bfloat16", causal=True, **shape)
    config = config_of(module, block_q_major=4096, block_kv_major=4096, block_q=1024, block_kv=1024)
    fn, arrays = module.KERNEL.build(problem, config)
    (call,) = trace(fn, arrays, devices.get("v6e")).calls
    assert call.grid_steps == 4
    assert (call.scopes["step"], call.scopes["masked_step"]) == (4 * 6, 4 * 4)
    assert call.executed_flops / module.KERNEL.flops(problem) < 1.07, "a strip sees what it can"


def test_flops_count_visible_pairs_only():
    square = {"q_heads": 1, "kv_heads": 1, "head_dim_qk": 128, "head_dim_v": 128}
    dq = problem_of(flash_dq, causal=True, q_len=4, kv_len=6, **square)
    assert flash_dq.KERNEL.flops(dq) == (3 + 4 + 5 + 6) * 2 * (2 * 128 + 128)
    dkv = problem_of(flash_dkv, causal=False, q_len=4, kv_len=6, **square)
    assert flash_dkv.KERNEL.flops(dkv) == 24 * 2 * (2 * 128 + 2 * 128)


@pytest.mark.parametrize("module", MODULES)
def test_blocks_beyond_a_short_sequence_are_one_configuration(module):
    problem = problem_of(module, q_len=128, kv_len=100)
    tunables = module.KERNEL.tunables(problem, devices.get("v6e"))
    assert {t.values for t in tunables.values()} == {(128,)}
    for block in (128, 256, 512):
        config = dict.fromkeys(tunables, block)
        assert module.KERNEL.canonical(problem, config) == dict.fromkeys(tunables, 128)
    assert module.KERNEL.default(problem, devices.get("v6e")) == dict.fromkeys(tunables, 128)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ({"block_kv": 384}, "block_kv 384 does not divide block_kv_major 1024"),
        ({"block_q_major": 100}, "block_q_major 100 is not a positive multiple of 128"),
        ({"block_kv_major": 0}, "block_kv_major 0 is not a positive multiple of 128"),
        ({"block_kv": True}, "block_kv True is not a positive multiple of 128"),
    ],
)
def test_an_impossible_block_is_refused_with_both_numbers(module, blocks, reason):
    problem = problem_of(module, q_len=4096, kv_len=4096)
    config = {**config_of(module, **dict.fromkeys(BLOCKS, 1024)), **blocks}
    assert module.KERNEL.illegal(problem, config, devices.get("v6e")) == reason


@pytest.mark.parametrize("module", MODULES)
def test_operands_that_do_not_belong_together_are_named(module):
    public = getattr(module, module.KERNEL.name)
    problem = problem_of(module)
    sizes = module.BlockSizes(**config_of(module))
    q, k, v, do, lse, di = module.KERNEL.build(problem, config_of(module))[1]
    other = jax.ShapeDtypeStruct((1, 4, 299), jnp.float32)
    half = jax.ShapeDtypeStruct(di.shape, jnp.bfloat16)
    for arrays, text in (
        ((q, k, v, q, lse, di), r"do \(1, 4, 300, 24\) is not \(1, 4, 300, 40\)"),
        ((q, k, v, do, other, di), r"lse \(1, 4, 299\) is not \(1, 4, 300\)"),
        ((q, k, v, do, lse, half), "di is bfloat16; float32 is needed"),
        ((q, k, k, k, lse, di), r"do \(1, 2, 420, 24\) is not \(1, 4, 300, 24\)"),
    ):
        with pytest.raises(ValueError, match=text):
            public(*arrays, block_sizes=sizes)


@pytest.mark.parametrize("module", MODULES)
def test_heads_that_do_not_group_and_options_that_do_not_exist_are_refused(module):
    with pytest.raises(InputError, match="kv_heads 4 do not divide q_heads 6"):
        problem_of(module, q_heads=6, kv_heads=4)
    with pytest.raises(InputError, match=r"logit_soft_cap: -1\.0 is not allowed"):
        problem_of(module, logit_soft_cap=-1.0)
    assert problem_of(module, logit_soft_cap=0).key == problem_of(module).key, "0 is off"


def compile_all(cases: list[tuple[Problem, dict[str, int]]]) -> list[tuple[Task, Compiled]]:
    with CompilePool(jobs=1, timeout_s=300) as pool:
        tasks = [Task(problem=p, candidate=Candidate.of(config)) for p, config in cases]
        return list(pool.run(tasks))


CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
LARGE = {"q_heads": 8, "kv_heads": 2, "q_len": 4096, "kv_len": 4096, "causal": True}
needs_libtpu = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.compiler
@needs_libtpu
def test_every_head_dim_compiles_for_some_chip():
    dims = ((64, 64), (80, 80), (96, 96), (192, 128), (256, 256))
    cases = [
        (
            problem_of(module, chip, "bfloat16", head_dim_qk=d, head_dim_v=dv, **LARGE),
            config_of(module),
        )
        for module in MODULES
        for chip, (d, dv) in zip(CHIPS, dims, strict=True)
    ]
    for task, compiled in compile_all(cases):
        assert compiled.status == "ok", f"{task.problem.label}: {compiled.reason}"


@pytest.mark.compiler
@needs_libtpu
def test_the_steady_step_reaches_two_thirds_of_the_mxu_limit():
    cases = [
        (
            problem_of(module, chip, "bfloat16", head_dim_qk=128, head_dim_v=128, **LARGE),
            config_of(module, **dict.fromkeys(BLOCKS, 1024)),
        )
        for module in MODULES
        for chip in ("v6e", "tpu7x")
    ]
    for task, compiled in compile_all(cases):
        assert compiled.status == "ok", f"{task.problem.label}: {compiled.reason}"
        chip = devices.get(task.problem.device)
        step = compiled.schedules[0].scopes["step"]
        limit = step.mxu_rows / (chip.mxu_rows_per_cycle * chip.num_mxus)
        assert limit / step.bundles >= 0.65, f"{task.problem.label}: {limit} of {step.bundles}"


@pytest.mark.nightly
@pytest.mark.compiler
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("module", MODULES)
def test_spread_candidates_compile_or_are_too_big(module, chip):
    spread = [(128, 128), (256, 128), (512, 512), (1024, 256), (1024, 1024), (2048, 2048)]
    cases = [
        (
            problem_of(module, chip, "bfloat16", head_dim_qk=192, head_dim_v=128, **LARGE),
            config_of(module, block_q_major=q, block_q=q_dot, block_kv_major=kv, block_kv=kv_dot),
        )
        for (q, q_dot), (kv, kv_dot) in zip(spread + spread, spread + spread[::-1], strict=True)
    ]
    for task, compiled in compile_all(cases):
        assert compiled.status in ("ok", "oom"), f"{task.candidate.json}: {compiled.reason}"
