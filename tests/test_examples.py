"""The examples run as their files say, and compute what they claim."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from autotune import leaderboard
from autotune.compiler.environment import unavailable
from autotune.kernels import base
from autotune.measure.check import error_of

DOC = Path(__file__).parent.parent / "docs" / "your-own-kernel.md"
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def kernel():
    return base.load("rmsnorm_matmul:KERNEL", beside=str(EXAMPLES))


@pytest.mark.compiler
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_the_rmsnorm_matmul_is_tuned_to_compiled_evidence_from_any_folder(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", "sweep", str(EXAMPLES / "rmsnorm_matmul.yaml"),
         "--trials", "4", "--jobs", "1", "--results", "found"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (board,) = leaderboard.boards(tmp_path / "found")
    assert not isinstance(board, Exception)
    assert board.best is not None
    assert board.best.evidence == "compiled"
    assert board.default is not None
    assert board.default.rank is not None
    assert board.best.latency_compiled_ms < board.default.latency_compiled_ms
    pruned = [row for row in board.rows if row.status == "pruned"]
    assert pruned, "whole rows of x and 1024 columns of w do not fit"
    assert all("of VMEM, of 32.00 MiB allowed on v6e" in row.reason for row in pruned)


@pytest.mark.parametrize(
    "config", [{"block_m": 16, "block_n": 128}, {"block_m": 48, "block_n": 384}]
)
def test_the_rmsnorm_matmul_computes_its_reference(kernel, config):
    problem = base.make_problem(kernel, device="v6e", shape={"m": 48, "k": 256, "n": 384})
    function, arguments = kernel.build(problem, config)
    arrays = kernel.inputs(problem, jax.random.key(0))
    assert [(a.shape, a.dtype) for a in arrays] == [(a.shape, a.dtype) for a in arguments]
    with pltpu.force_tpu_interpret_mode():
        got = np.asarray(jax.jit(function)(*arrays), np.float64)
    want = np.asarray(kernel.reference(problem, *arrays), np.float64)
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_the_rmsnorm_matmul_s_inputs_show_a_norm_that_is_left_out(kernel):
    problem = base.make_problem(kernel, device="v6e", shape={"m": 64, "k": 4096, "n": 128})
    x, weight, w = (np.asarray(a, np.float64) for a in kernel.inputs(problem, jax.random.key(0)))
    want = np.asarray(kernel.reference(problem, x, weight, w), np.float64)
    assert error_of(x * weight @ w, want) > 1, "of standard normals it is 0.03, as bf16 may have"


def test_the_rmsnorm_matmul_s_rules_say_what_is_allowed(kernel):
    problem = base.make_problem(kernel, device="v6e", shape={"m": 48, "k": 256, "n": 384})
    tunables = kernel.tunables(problem, None)
    assert tunables["block_m"].check(48) is None
    assert tunables["block_m"].check(32) == "a multiple of 8 that divides 48"
    assert tunables["block_n"].check(192) == "a multiple of 128 that divides 384"


def test_the_guide_s_kernel_and_its_notebook_cell_run_as_they_stand(tmp_path):
    kernel, cell = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    config = re.findall(r"```yaml\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[0]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "double.py").write_text(kernel, encoding="utf-8")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    swept = subprocess.run(
        [sys.executable, "-m", "autotune", "sweep", "mine/config.yaml", "--until", "model",
         "--jobs", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert swept.returncode == 0, swept.stderr
    assert "double:KERNEL on v6e" in swept.stdout
    cell = cell.replace('device="v6e")', 'device="v6e", until="model", jobs=1)')
    notebook = f"{kernel}\n{cell.replace('board.loc', 'print(board.loc')[:-1]})\n"
    shown = subprocess.run(
        [sys.executable, "-"], input=notebook, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert '{"rows": ' in shown.stdout
    fields = set(re.findall(r"^\| `(\w+)` \|", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert fields == {f.name for f in dataclasses.fields(base.Kernel)}, "every field is explained"
