"""Tokamax's kernels: numerics, their own rules, every configuration measured in public."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from kernel_support import plainly_interpreted

import autotune
from autotune import device as devices
from autotune.compiler.environment import unavailable
from autotune.errors import InputError
from autotune.kernels import base
from autotune.pallas_call import trace

jax.config.update("jax_platforms", "cpu")

INSTALLED = importlib.util.find_spec("tokamax") is not None
needs_tokamax = pytest.mark.skipif(not INSTALLED, reason="the extra tokamax is not installed")
V6E = devices.get("v6e")
SMALL = {"batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 384, "kv_len": 384, "head_dim_qk": 64,
         "head_dim_v": 128}  # fmt: skip
BLOCKS = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
DATA = Path(__file__).parents[2] / "shared" / "data" / "silicon_tokamax_splash.csv"


@pytest.mark.parametrize("kernel", ["tokamax.splash", "tokamax.gmm"])
def test_without_the_extra_one_line_says_how_to_install_it(kernel, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"device: v6e\nproblems:\n  - kernel: {kernel}\n    shape: {{m: 8}}\n", encoding="utf-8"
    )
    # An import hook stands for a machine without Tokamax, also where it is installed.
    absent = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tokamax':\n"
        "            raise ModuleNotFoundError(name=name.partition('.')[0])\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from autotune.cli import main\n"
        f"sys.argv = ['autotune', 'sweep', {str(config)!r}]\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", absent], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "pip install '.[tokamax]' in autotune's checkout" in line
    assert f"{config}:3" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.yaml"]


def splash(shape=None, dtype="float32", device="v6e", **options):
    kernel = base.load("tokamax.splash")
    problem = base.make_problem(
        kernel, device=device, shape={**SMALL, **(shape or {})}, options=options, dtype=dtype
    )
    return kernel, problem


def error(kernel, problem, config):
    """Largest difference of any output from the reference, as a share of that's largest value."""
    config = kernel.canonical(problem, config)
    assert kernel.illegal(problem, config, devices.get(problem.device)) is None
    function, arguments = kernel.build(problem, config)
    make = kernel.inputs or _normals(arguments)
    arrays = make(problem, jax.random.key(1))
    assert [(a.shape, a.dtype) for a in arrays] == [(a.shape, a.dtype) for a in arguments]
    with plainly_interpreted():
        got = jax.tree.leaves(jax.jit(function)(*arrays))
    want = kernel.reference(problem, *arrays)
    want = want if isinstance(want, tuple) else (want,)
    assert [g.shape for g in got] == [w.shape for w in want]
    return max(
        float(np.abs(np.asarray(g, np.float64) - w).max() / np.abs(w).max())
        for g, w in zip(got, want, strict=True)
    )


def _normals(arguments):
    def make(problem, key):
        keys = jax.random.split(key, len(arguments))
        pairs = zip(keys, arguments, strict=True)
        return tuple(jax.random.normal(each, a.shape, a.dtype) for each, a in pairs)

    return make


@needs_tokamax
@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, BLOCKS),
        (
            {"residuals": True, "mask": {"local": {"left": 100, "right": 20}}, "scale": 0.2},
            {**BLOCKS, "q_layout": 2, "k_layout": 2, "v_layout": 2, "fuse_reciprocal": False},
        ),
        ({"mask": {"documents": {"lengths": [200, 184]}}}, {**BLOCKS, "use_base2_exp": False}),
        (
            {
                "mask": {"full": {}},
                "attn_logits_soft_cap": 3.0,
                "max_logit_const": 3.0,
                "operand_layout": "bhtd",
            },
            {**BLOCKS, "block_kv": 384},
        ),
    ],
)
def test_the_forward_pass_is_attention_under_its_mask(options, config):
    assert error(*splash(**options), config) < 1e-5


BACKWARD = {"block_q_dkv": 128, "block_kv_dkv": 128, "block_kv_dkv_compute": 128}


@needs_tokamax
@pytest.mark.parametrize(
    ("options", "shape", "config"),
    [
        ({"pass": "backward", "attn_logits_soft_cap": 3.0}, {}, {**BACKWARD, "k_layout": 2}),
        ({"grad": True}, {"kv_heads": 1, "q_len": 128}, {**BLOCKS, **BACKWARD}),
    ],
)
def test_the_backward_pass_is_the_gradient(options, shape, config):
    assert error(*splash(shape, **options), config) < 1e-5


@needs_tokamax
def test_every_configuration_measured_in_public_is_legal_and_within_the_space_searched():
    if not DATA.exists():
        pytest.skip("the measurements are not beside this checkout")
    kernel = base.load("tokamax.splash")
    with DATA.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 94
    for row in rows:
        problem = base.make_problem(kernel, device=row["device"], **json.loads(row["problem"]))
        device, config = devices.get(row["device"]), json.loads(row["config"])
        full = kernel.canonical(problem, config)
        tunables = kernel.tunables(problem, device)
        assert full.keys() == tunables.keys()
        assert config.items() <= full.items()
        assert kernel.illegal(problem, full, device) is None
        assert all(value in tunables[name].values for name, value in config.items()), row


@needs_tokamax
def test_the_default_is_the_library_s_own():
    kernel, problem = splash()
    default = kernel.default(problem, V6E)
    assert default.items() >= {**BLOCKS, "q_layout": 1, "use_experimental_scheduler": False}.items()
    assert kernel.illegal(problem, default, V6E) is None


@needs_tokamax
def test_a_backward_pass_has_no_forward_blocks_and_a_forward_pass_no_backward_ones():
    for options, absent in (({"pass": "backward"}, BLOCKS), ({}, BACKWARD)):
        kernel, problem = splash(**options)
        assert not absent.keys() & kernel.tunables(problem, V6E).keys()
    kernel, problem = splash(grad=True)
    assert {**BLOCKS, **BACKWARD}.keys() <= kernel.tunables(problem, V6E).keys()


@needs_tokamax
def test_the_traced_grid_has_the_active_blocks_only():
    kernel, problem = splash({"batch": 2, "q_len": 1024, "kv_len": 1024})
    blocks = {"block_q": 256, "block_kv": 256, "block_kv_compute": 256}
    (call,) = trace(*kernel.build(problem, kernel.canonical(problem, blocks)), V6E).calls
    assert call.grid == (2, 4, 10)
    assert kernel.flops(problem) == 2 * 4 * (1024 * 1025 // 2) * 2 * (64 + 128)


@needs_tokamax
def test_unequal_lengths_are_aligned_top_left_as_tokamax_does():
    kernel, problem = splash({"q_len": 128, "kv_len": 384})
    assert kernel.flops(problem) == 4 * (128 * 129 // 2) * 2 * (64 + 128)


@needs_tokamax
@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({"kv_heads": 3}, {}, "kv_heads 3 do not divide q_heads 4"),
        ({}, {"residuals": True, "grad": True}, "residuals and grad exclude each other"),
        ({}, {"pass": "forward"}, "'forward' is not allowed; one of backward"),
        ({}, {"attn_logits_soft_cap": -1.0}, "-1.0 is not allowed; a positive number"),
        ({}, {"mask": {"causal": {"offset": -1}}}, "hides every key from 1 of"),
        ({}, {"mask": {"documents": {"lengths": [100]}}}, "lengths sum to 100, not kv_len 384"),
        (
            {"q_len": 2**15, "kv_len": 2**15},
            {"mask": {"documents": {"lengths": [2**15]}}},
            "documents over 32768 x 32768 pairs; Tokamax takes them as a dense mask",
        ),
    ],
)
def test_an_impossible_problem_is_one_line(shape, options, message):
    with pytest.raises(InputError, match=message):
        splash(shape, **options)


@needs_tokamax
@pytest.mark.parametrize(
    ("options", "config", "reason"),
    [
        ({}, {"block_q": 256}, "block_q 256 does not divide q_len 384"),
        ({}, {"block_kv": 384, "block_kv_compute": 256}, "does not divide block_kv 384"),
        ({"pass": "backward"}, {"block_kv_dkv": 256}, "block_kv_dkv 256 does not divide kv_len"),
    ],
)
def test_an_illegal_config_is_told_both_numbers(options, config, reason):
    kernel, problem = splash(**options)
    assert reason in kernel.illegal(problem, kernel.canonical(problem, config), V6E)


@needs_tokamax
def test_the_diagonal_skip_is_there_where_the_release_has_it_and_the_mask_is_causal():
    kernel, problem = splash()
    if "qk_diag_skip" not in kernel.tunables(problem, V6E):
        pytest.skip("this release of Tokamax has no diagonal skip")
    square = {"qk_diag_skip": True, "sv_diag_skip": True, **BLOCKS}
    assert error(kernel, problem, square) < 1e-5
    wide = kernel.canonical(problem, {**square, "block_kv": 384})
    assert "square forward blocks" in kernel.illegal(problem, wide, V6E)
    full = splash(mask={"full": {}})[1]
    assert "qk_diag_skip" not in kernel.tunables(full, V6E)


@needs_tokamax
@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("device", ["tpu7x", "v6e", "v5p"])
def test_the_public_benchmark_s_causal_problem_gets_compiled_evidence(device):
    shape = {"batch": 4, "q_heads": 16, "kv_heads": 16, "q_len": 4096, "kv_len": 4096,
             "head_dim_qk": 128, "head_dim_v": 128}  # fmt: skip
    space = {"block_q": 1024, "block_kv": 1024, "block_kv_compute": 512,
             "use_experimental_scheduler": False, "q_layout": 1, "k_layout": 1, "v_layout": 1,
             "use_base2_exp": True}  # fmt: skip
    board = autotune.tune("tokamax.splash", shape=shape, device=device, space=space, jobs=1)
    ranked = board[board["rank"].notna()]
    assert len(ranked) >= 2
    assert set(ranked["evidence"]) == {"compiled"}
    # What a release with a diagonal skip refuses, since these blocks are not square.
    assert set(board["status"]) <= {"ok", "pruned"}
    best = json.loads(board.loc[board["is_best"], "config"].iloc[0])
    assert best["block_q"] == 1024, "the default blocks of 128 are slower"
