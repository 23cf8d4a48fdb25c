"""JAX's own attention kernels: their rules, defaults, FLOPs and step counts, and what compiles."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from kernel_support import CHIPS

from autotune import cli, overrides
from autotune import device as devices
from autotune.candidate import Candidate, Config
from autotune.compiler.environment import unavailable
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.errors import InputError
from autotune.evidence import Compiled
from autotune.kernels import base
from autotune.pallas_call import trace
from autotune.problem import Problem
from autotune.search.space import candidates

NAMES = (
    "jax.splash", "jax.flash", "jax.flash_dq", "jax.flash_dkv", "jax.paged_attention",
    "jax.ragged_paged_attention",
)  # fmt: skip
SMALL = {"q_heads": 2, "kv_heads": 2, "q_len": 256, "kv_len": 256, "head_dim_qk": 128,
         "head_dim_v": 128}  # fmt: skip
PAGED = {"q_heads": 8, "kv_heads": 2, "kv_len": 256, "head_dim": 128}
BLOCKS = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
BACKWARD = {"block_q_dkv": 128, "block_kv_dkv": 128, "block_kv_dkv_compute": 128}
DQ = {"block_q_dq": 128, "block_kv_dq": 128}
FLASH = {"block_q": 128, "block_k_major": 128, "block_k": 128, "block_b": 1}
# Rows of a public sweep on v6e, as its CSV has them: problem, and configurations.
PUBLIC = (
    '{"dtype": "bfloat16", "options": {"grad": %s, "mask": {"causal": {}}}, "shape": {"batch": 2, '
    '"head_dim_qk": 128, "head_dim_v": 128, "kv_heads": 32, "kv_len": 1024, "q_heads": 32, '
    '"q_len": 1024}}'
)
LAYOUTS = '"k_layout": "HEAD_DIM_MINOR", "q_layout": "%s", "v_layout": "HEAD_DIM_MINOR"}'
PUBLIC_FORWARD = '{"block_kv": %d, "block_kv_compute": %d, "block_q": 256, ' + LAYOUTS
PUBLIC_FUSED = (
    '{"block_kv": 1024, "block_kv_compute": 1024, "block_kv_dkv": 512, "block_kv_dkv_compute": '
    '512, "block_q": 1024, "block_q_dkv": 512, "use_fused_bwd_kernel": true, ' + LAYOUTS
)
PUBLIC_UNFUSED = PUBLIC_FUSED.replace(
    '"use_fused_bwd_kernel": true',
    '"block_kv_dq": 512, "block_q_dq": 512, "use_fused_bwd_kernel": false',
)


def problem(
    name: str, options: dict[str, Any] | None = None, *, device: str = "v6e", **shape: int
) -> Problem:
    first = PAGED if "paged" in name else SMALL
    kernel = base.load(name)
    return base.make_problem(kernel, device=device, shape={**first, **shape}, options=options)


def why_illegal(p: Problem, config: Config) -> str | None:
    kernel = base.load(p.kernel)
    return kernel.illegal(p, kernel.canonical(p, config), devices.get(p.device))


def legal(p: Problem) -> list[dict[str, Any]]:
    space = candidates(base.load(p.kernel), p, devices.get(p.device))
    return [candidate.config for candidate in space.legal]


def branches(p: Problem, config: Config) -> list[tuple[tuple[int, ...], Any]]:
    """(grid, executions of each branch: (not taken, taken) of every `pl.when`) of every call."""
    kernel = base.load(p.kernel)
    fn, arguments = kernel.build(p, kernel.canonical(p, config))
    return [(c.grid, c.branches) for c in trace(fn, arguments, devices.get(p.device)).calls]


@pytest.mark.parametrize("name", NAMES)
def test_every_legal_candidate_of_a_small_problem_is_traced(name):
    p = problem(name, {"grad": True} if name == "jax.splash" else {})
    found = legal(p)
    assert found
    assert all(branches(p, config) for config in found)


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        (PUBLIC_FORWARD % (256, 256, "SEQ_MINOR"), 1),
        (PUBLIC_FORWARD % (1024, 1024, "HEAD_DIM_MINOR"), 1),
        (PUBLIC_FUSED % "SEQ_MINOR", 2),
        (PUBLIC_UNFUSED % "HEAD_DIM_MINOR", 3),
    ],
)
def test_a_public_sweeps_rows_are_built_as_they_are(config, calls):
    given = json.loads(PUBLIC % ("false" if calls == 1 else "true"))
    kernel = base.load("jax.splash")
    p = base.make_problem(kernel, device="v6e", **given)
    assert why_illegal(p, json.loads(config)) is None
    fn, arguments = kernel.build(p, json.loads(config))
    assert len(trace(fn, arguments, devices.get("v6e")).calls) == calls


@pytest.mark.parametrize(
    ("block_kv", "active", "skipped"), [(256, 10, 6), (512, 6, 2), (1024, 4, 0)]
)
def test_a_causal_grid_counts_its_active_and_skipped_steps(block_kv, active, skipped):
    p = problem("jax.splash", q_heads=4, kv_heads=4, q_len=1024, kv_len=1024)
    ((grid, (init, run, end)),) = branches(
        p, {"block_q": 256, "block_kv": block_kv, "block_kv_compute": block_kv}
    )
    assert math.prod(grid) == 4 * (active + skipped)
    assert run == (4 * skipped, 4 * active)
    assert init[1] == end[1] == 4 * 4  # once a query block and head


def test_a_local_masks_grid_is_shrunk():
    mask = {"mask": {"local": {"left": 200, "right": 0}}}
    p = problem("jax.splash", mask, q_heads=1, kv_heads=1, q_len=2048, kv_len=2048)
    ((grid, (_, run, _)),) = branches(p, {**BLOCKS, "block_q": 256, "block_kv": 256})
    assert grid[-3:] == (1, 8, 2), "two of eight key blocks a query block"
    assert run == (1, 15)


def test_b3_blocks_divide_the_key_length():
    for name, block in (("jax.splash", "block_kv"), ("jax.flash", "block_k_major")):
        p = problem(name, q_len=4992, kv_len=4992)
        assert {c[block] for c in legal(p)} == {128, 384, 1664, 4992}
        for refused in (256, 512):
            config = {**BLOCKS, **FLASH, block: refused}
            assert why_illegal(p, config) == f"{block} {refused} does not divide kv_len 4992"


def test_b4_each_kernel_has_its_own_rules():
    assert why_illegal(problem("jax.flash", q_len=192), FLASH) is None
    kv = problem("jax.flash", kv_len=192)
    assert why_illegal(kv, FLASH) == "block_k_major 128 does not divide kv_len 192"
    assert why_illegal(kv, {**FLASH, "block_k_major": 192, "block_k": 192}) is None
    queries, keys = problem("jax.splash", q_len=320), problem("jax.splash", kv_len=384)
    assert why_illegal(queries, BLOCKS) == "block_q 128 does not divide q_len 320"
    config = {**BLOCKS, "block_kv": 256}
    assert why_illegal(keys, config) == "block_kv 256 does not divide kv_len 384"


def test_b5_a_compute_block_divides_its_block_and_null_is_all_of_it():
    p = problem("jax.splash", kv_len=384)
    with_compute = lambda size: {"block_q": 128, "block_kv": 384, "block_kv_compute": size}
    assert why_illegal(p, with_compute(256)) == (
        "block_kv_compute 256 does not divide block_kv 384"
    )
    assert why_illegal(p, with_compute(64)) == "block_kv_compute 64 is not a multiple of 128"
    kernel = base.load("jax.splash")
    assert kernel.canonical(p, with_compute(None)) == kernel.canonical(p, with_compute(384))
    space = {"block_kv": (384,), "block_kv_compute": (None, 384), "block_q": (128,)}
    found = candidates(kernel, p, devices.get("v6e"), {**space, "q_layout": ("HEAD_DIM_MINOR",)})
    assert [c.config["block_kv_compute"] for c in found.legal if not c.is_default] == [384]


def test_b6_a_fused_backward_has_no_dq_blocks_and_another_needs_them():
    p, chip = problem("jax.splash", {"grad": True}), devices.get("v6e")
    found = legal(p)
    fused = [c for c in found if c["use_fused_bwd_kernel"]]
    assert fused
    assert {(c["block_q_dq"], c["block_kv_dq"]) for c in fused} == {(None, None)}
    assert all(c["block_q_dq"] and c["block_kv_dq"] for c in found if c not in fused)
    blocks = {**BLOCKS, **BACKWARD, "use_fused_bwd_kernel": False}
    assert why_illegal(p, blocks) == "block_q_dq is needed: the backward pass is not fused"
    assert why_illegal(p, {**blocks, **DQ}) is None
    both = {**blocks, **DQ, "use_fused_bwd_kernel": True}
    refused = base.load("jax.splash").illegal(p, both, chip)
    assert refused == "block_q_dq belongs to no kernel: the backward pass is fused"
    assert "block_q_dkv" not in legal(problem("jax.splash"))[0]


def test_b7_a_short_sequence_leaves_one_block():
    found = legal(problem("jax.flash", q_len=128, kv_len=128))
    assert found == [{**FLASH}]


def test_b9_heads_that_do_not_group_are_refused_naming_both():
    for name in ("jax.splash", "jax.paged_attention", "jax.ragged_paged_attention"):
        with pytest.raises(InputError, match="kv_heads 4 do not divide q_heads 6"):
            problem(name, q_heads=6, kv_heads=4)
    problem("jax.splash", q_heads=32, kv_heads=1)
    with pytest.raises(InputError, match="kv_heads 2 is not q_heads 8; JAX's flash"):
        problem("jax.flash", q_heads=8, kv_heads=2)
    with pytest.raises(InputError, match="head_dim_v 64 is not head_dim_qk 128"):
        problem("jax.flash", head_dim_v=64)


def test_a1_flash_is_aligned_top_left_and_so_are_its_flops():
    p = problem("jax.flash", {"causal": True}, q_heads=1, kv_heads=1, q_len=128, kv_len=256)
    assert base.load("jax.flash").flops(p) == 4_227_072 == 8256 * 2 * 256


def test_gradients_cost_the_forward_and_both_backward_kernels():
    kernel, pairs = base.load("jax.splash"), 256 * 257 // 2
    assert kernel.flops(problem("jax.splash", {"grad": True})) == 2 * pairs * 2 * 9 * 128


@pytest.mark.parametrize(
    ("name", "option"), [("jax.splash", "attn_logits_soft_cap"),
                         ("jax.paged_attention", "attn_logits_soft_cap"),
                         ("jax.ragged_paged_attention", "soft_cap")],
)  # fmt: skip
def test_a4_a_soft_cap_of_0_is_off_and_a_negative_one_refused(name, option):
    assert problem(name, {option: 0}).key == problem(name, {option: None}).key
    with pytest.raises(InputError, match=rf"options\.{option}: -1 is not allowed"):
        problem(name, {option: -1})


def test_a_mask_that_blinds_a_query_is_refused_with_the_count():
    with pytest.raises(InputError, match="hides every key from 3 of 256 queries"):
        problem("jax.splash", {"mask": {"causal": {"offset": -3}}})
    with pytest.raises(InputError, match="sum to 300, not kv_len 256"):
        problem("jax.splash", {"mask": {"documents": {"lengths": [100, 200]}}})


def test_defaults_are_those_of_the_installed_functions():
    chip = devices.get("v6e")
    sizes = jax_flash.BlockSizes.get_default(1, 1, 1, 1, 1)
    for name in ("jax.flash", "jax.flash_dq", "jax.flash_dkv"):
        kernel = base.load(name)
        assert kernel.default is not None
        config = kernel.default(problem(name), chip)
        assert config == {block: getattr(sizes, block) for block in config}
    splash = base.load("jax.splash")
    assert splash.default is not None
    found = splash.default(problem("jax.splash", {"grad": True}), chip)
    assert found["block_q_dkv"] == found["block_kv_dq"] == 128
    assert found["use_fused_bwd_kernel"] is False
    assert found["q_layout"] == "HEAD_DIM_MINOR"


def test_ragged_attentions_default_is_what_jaxs_table_has_for_the_device():
    kernel = base.load("jax.ragged_paged_attention")
    assert kernel.default is not None
    shape = {
        "batch": 32,
        "q_heads": 32,
        "kv_heads": 8,
        "kv_len": 512,
        "page_size": 64,
        "q_len": 128,
    }
    for chip, blocks in (("v6e", (8, 32)), ("v4", (8, 32)), ("tpu7x", (8, 32))):
        p = problem("jax.ragged_paged_attention", device=chip, **shape)
        found = kernel.default(p, devices.get(chip))
        assert (found["num_kv_pages_per_block"], found["num_queries_per_block"]) == blocks
    long = problem("jax.ragged_paged_attention", device="tpu7x", **{**shape, "kv_len": 16384})
    assert kernel.default(long, devices.get("tpu7x"))["num_kv_pages_per_block"] == 128


def test_megacore_modes_are_for_devices_of_two_cores():
    config = {"pages_per_compute_block": 4, "megacore_mode": "batch", "inline_seq_dim": True}
    why = why_illegal(problem("jax.paged_attention", batch=2), config)
    assert why == "megacore_mode batch hangs on v6e, which has one TensorCore a JAX device"
    modes = {c["megacore_mode"] for c in legal(problem("jax.paged_attention", device="v5p"))}
    assert modes == {None, "kv_head"}, "a batch of 1 is odd"


# Compiling


def compiled(tasks: list[tuple[Problem, Config]], kind: str = "compile") -> list[Compiled]:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    asked = [
        Task(
            problem=p,
            candidate=Candidate.of(base.load(p.kernel).canonical(p, config)),
            kind=kind,
        )
        for p, config in tasks
    ]
    with CompilePool(jobs=1, timeout_s=600) as pool:
        answers = dict(pool.run(asked))
    return [answers[task] for task in asked]


@pytest.mark.compiler
def test_a_kernel_of_each_kind_compiles_on_v6e():
    wanted: dict[str, Config] = {
        "jax.splash": {**BLOCKS, **BACKWARD, **DQ, "q_layout": "SEQ_MINOR"},
        "jax.flash": FLASH,
        "jax.flash_dq": {"block_q_dq": 128, "block_k_major_dq": 256, "block_k_dq": 128},
        "jax.flash_dkv": {"block_q_major_dkv": 256, "block_q_dkv": 128, "block_k_major_dkv": 128,
                          "block_k_dkv": 128},
        "jax.paged_attention": {"pages_per_compute_block": 4, "megacore_mode": None,
                                "inline_seq_dim": True},
        "jax.ragged_paged_attention": {"num_kv_pages_per_block": 4, "num_queries_per_block": 8},
    }  # fmt: skip
    options = {"jax.splash": {"grad": True}}
    more = {"jax.ragged_paged_attention": {"kv_heads": 8, "q_heads": 8, "q_len": 16}}
    tasks = [
        (problem(name, options.get(name), **more.get(name, {})), config)
        for name, config in wanted.items()
    ]
    found = compiled(tasks)
    assert [(a.status, a.reason) for a in found] == [("ok", None)] * len(tasks)
    assert [len(a.schedules) for a in found] == [3, 1, 1, 1, 1, 1]


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["trace", "compile"])
def test_b8_a_head_dim_that_flash_refuses_is_an_unsupported_row(kind):
    p = problem("jax.flash", head_dim_qk=192, head_dim_v=192)
    (answer,) = compiled([(p, FLASH)], kind)
    assert answer.status == "unsupported"
    assert answer.reason == "head_dim=192 should be a multiple of 128 if larger"


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("device", ["v5e", "tpu7x"])
def test_b8_every_head_dim_compiles_that_the_kernel_takes(device):
    sizes = {dim: {"head_dim_qk": dim, "head_dim_v": dim} for dim in (64, 80, 96, 192)}
    splash = [
        (problem("jax.splash", {"grad": True}, device=device, **size), {**BLOCKS, **BACKWARD, **DQ})
        for size in sizes.values()
    ]
    flash = [(problem("jax.flash", device=device, **size), FLASH) for size in sizes.values()]
    assert [a.status for a in compiled(splash)] == ["ok"] * 4
    assert [a.status for a in compiled(flash)] == ["ok"] * 3 + ["unsupported"]


@pytest.mark.nightly
@pytest.mark.compiler
def test_v8_a_backward_pass_runs_out_of_vmem_where_its_forward_pass_does_not():
    shape = {"q_heads": 1, "kv_heads": 1, "q_len": 8192, "kv_len": 8192}
    forward = {"block_q": 2048, "block_kv": 2048, "block_kv_compute": 256}
    dkv = {"block_q_dkv": 2048, "block_kv_dkv": 2048, "block_kv_dkv_compute": 256}
    dq = {"block_q_dq": 2048, "block_kv_dq": 2048}
    found = compiled([
        (problem("jax.splash", device="v5e", **shape), forward),
        (problem("jax.splash", {"grad": True}, device="v5e", **shape), {**forward, **dkv, **dq}),
    ])  # fmt: skip
    assert [a.status for a in found] == ["ok", "oom"]


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.parametrize("device", CHIPS)
def test_the_default_compiles_on_every_chip(device):
    for name in NAMES:
        kernel = base.load(name)
        p = problem(name, device=device, **({"kv_heads": 8} if "ragged" in name else {}))
        if kernel.default is not None:
            (answer,) = compiled([(p, kernel.default(p, devices.get(device)))])
            assert answer.status == "ok", f"{name}: {answer.reason}"


def test_a_kernel_that_the_installed_jax_lacks_is_one_line(monkeypatch, capsys):
    library = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
    for module in (library, f"{library}.kernel", f"{library}.tuned_block_sizes"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "autotune.kernels.jax_ragged", raising=False)
    monkeypatch.delattr("jax.experimental.pallas.ops.tpu.ragged_paged_attention", raising=False)
    with pytest.raises(InputError, match=r"kernel 'jax\.ragged_paged_attention' is not available"):
        base.load("jax.ragged_paged_attention")
    cli.app(["kernels"], standalone_mode=False)
    listed = capsys.readouterr().out
    assert "jax.ragged_paged_attention\n  kernel 'jax.ragged_paged_attention' is not" in listed
    assert "jax.paged_attention\n  shape" in listed


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("jax.splash", ("block_q", "block_kv", "block_kv_compute")),
        ("jax.flash", ("block_q", "block_k_major", "block_k")),
        ("jax.flash_dq", ("block_q_dq", "block_k_major_dq", "block_k_dq")),
        ("jax.flash_dkv", ("block_q_major_dkv", "block_k_major_dkv", "block_k_dkv")),
    ],
)
def test_blocks_longer_than_the_sequence_are_the_sequence_and_one_candidate(name, lists):
    kernel = base.load(name)
    shape = {**SMALL, "q_len": 128, "kv_len": 128}
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    given = {block: [128, 256, 512] for block in lists}
    if name == "jax.splash":
        given["q_layout"] = "HEAD_DIM_MINOR"
    checked = overrides.checked(kernel, problem, devices.get("v6e"), given)
    (candidate,) = candidates(kernel, problem, devices.get("v6e"), checked).legal
    assert all(candidate.config[block] == 128 for block in lists)
    with pytest.raises(InputError, match="100 is not allowed"):
        overrides.checked(kernel, problem, devices.get("v6e"), {lists[1]: 100})
