"""`autotune.tune`: leaderboards for scripts and notebooks."""

import json
import subprocess
import sys

import contract_kernels
import jax.numpy as jnp
import numpy as np
import pytest

import autotune
from autotune.compiler.environment import unavailable
from autotune.device import DEVICES, attached
from autotune.errors import InputError, KernelError, UnknownNameError
from autotune.row import SCHEMA

MATMUL = {"shape": {"m": 512, "k": 512, "n": 512}, "device": "v6e"}
PINNED = {"bm": 256, "bk": [128, 256], "bn": 256}


@pytest.fixture(scope="module")
def board():
    return autotune.tune("matmul", MATMUL, space=PINNED, until="model", jobs=1)


def test_the_frame_has_the_leaderboard_s_columns_in_their_order(board):
    assert list(board.columns) == SCHEMA.names


def test_rows_are_ranked_and_the_default_is_among_them(board):
    ranked = board[board["rank"].notna()]
    assert list(ranked["rank"]) == list(range(1, len(ranked) + 1))
    assert ranked["latency_ms"].is_monotonic_increasing
    assert board["is_default"].sum() == 1
    assert board["is_best"].sum() == 1
    assert {json.loads(c)["bk"] for c in board["config"]} >= {128, 256}
    assert set(board["evidence"]) == {"model"}


def test_whole_numbers_stay_whole_beside_nulls(board):
    assert str(board["flops"].dtype) == "Int64"
    assert str(board["cycles"].dtype) == "Int64"
    assert board["cycles"].isna().all()
    assert board["flops"].iloc[0] == 2 * 512**3


def test_problem_parts_may_be_arguments_and_devices_a_list():
    board = autotune.tune(
        "matmul", shape=MATMUL["shape"], device=["v6e", "v5e"], space=PINNED, until="model", jobs=1
    )
    assert list(dict.fromkeys(board["device"])) == ["v6e", "v5e"]
    assert (board["rank"] == 1).sum() == 2


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    autotune.tune("matmul", MATMUL, space=PINNED, until="model", jobs=1)
    assert list(tmp_path.iterdir()) == []
    autotune.tune("matmul", MATMUL, space=PINNED, until="model", jobs=1, results="found")
    assert [p.suffix for p in tmp_path.glob("found/v6e/matmul/[!.]*")] == [".parquet"]


def test_a_kernel_that_its_module_holds_is_named_after_it():
    board = autotune.tune(
        contract_kernels.KEEPS, shape={"m": 256, "n": 128}, dtype="float32", device="v6e",
        until="model", jobs=1,
    )  # fmt: skip
    assert set(board["kernel"]) == {"contract_kernels:KEEPS"}


CELLS = """
import sys
import autotune
assert "jax" not in sys.modules, "import autotune stays fast"
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from autotune.kernels.base import Kernel, Tunable

FACTOR = 2.0

def body(x, out):
    out[...] = x[...] * FACTOR

def build(problem, config):
    array = jax.ShapeDtypeStruct((problem.shape["m"], 128), jnp.float32)
    window = pl.BlockSpec((config["rows"], 128), lambda i: (i, 0))
    grid = (problem.shape["m"] // config["rows"],)
    call = pl.pallas_call(body, grid=grid, in_specs=[window], out_specs=window, out_shape=array)
    return call, (array,)

def kernel(rows):
    return Kernel(
        name="my kernel", axes=("m",), build=build, dtypes=("float32",),
        tunables=lambda problem, device: {"rows": Tunable(values=rows)},
        flops=lambda problem: 128 * problem.shape["m"],
    )

for rows in ((64, 128), (256,)):
    board = autotune.tune(
        kernel(rows), shape={"m": 512}, dtype="float32", device="v6e", jobs=1, until=UNTIL
    )
    print(*board["kernel"].unique(), *board["status"], *board["evidence"], *sorted(board["config"]))
"""


def test_a_kernel_from_a_notebook_s_cells_reaches_the_workers(tmp_path):
    until, evidence = ("model", "model") if unavailable() else ("compile", "compiled")
    # A notebook's code lies in no file: neither does that of standard input.
    ended = subprocess.run(
        [sys.executable, "-"], input=f"UNTIL = {until!r}\n{CELLS}", capture_output=True,
        text=True, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f'cell_my_kernel:KERNEL ok ok {evidence} {evidence} {{"rows": 128}} {{"rows": 64}}',
        f'cell_my_kernel:KERNEL ok {evidence} {{"rows": 256}}',
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_cannot_be_sent_is_told_so():
    lock = __import__("threading").Lock()
    unsendable = contract_kernels.dataclasses.replace(
        contract_kernels.KEEPS, flops=lambda problem: lock and 1
    )
    with pytest.raises(KernelError, match=r"cannot be sent to worker processes .*put it into a"):
        autotune.tune(unsendable, shape={"m": 256, "n": 128}, device="v6e")


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("matmull", {}, r"unknown kernel 'matmull'; did you mean 'matmul'\?"),
        ("__main__:KERNEL", {}, r"give the Kernel itself to autotune.tune"),
        (7, {}, r"kernel: 7 is not allowed; a name"),
        ("matmul", {"shape": {"m": 8}}, r"shape: given in the problem and as an argument"),
        ("matmul", {"problem": {"shap": {}}}, r"unknown part of a problem 'shap'"),
        ("matmul", {"problem": {"device": "v6e", "shape": {"m": 8, "k": 8}}}, r"lacks 'n'"),
        ("matmul", {"problem": {**MATMUL, "device": "v99"}}, r"unknown device 'v99'"),
        ("matmul", {"problem": {**MATMUL, "device": []}}, r"device: \[\] is not allowed"),
        ("matmul", {"problem": {**MATMUL, "options": {"causal": True}}}, r"unknown option of"),
        ("matmul", {"problem": {**MATMUL, "dtype": "float99"}}, r"dtype: 'float99' is not"),
        ("matmul", {"problem": {**MATMUL, "dtype": 5}}, r"dtype: 5 is not allowed"),
        ("matmul", {"space": {"bloc": 1}}, r"unknown tunable of matmul 'bloc'"),
        ("matmul", {"space": {"bm": [12]}}, r"12 is not allowed"),
        ("matmul", {"space": {}}, r"space: \{\} is not allowed"),
        ("matmul", {"trials": 0}, r"trials: 0 is not allowed; a whole number of at least 1"),
        ("matmul", {"seconds": 0}, r"seconds: 0 is not allowed; a number above 0"),
        ("matmul", {"timeout": True}, r"timeout: true is not allowed"),
        ("matmul", {"jobs": 1.5}, r"jobs: 1.5 is not allowed"),
        ("matmul", {"seed": -1}, r"seed: -1 is not allowed; a whole number of at least 0"),
        ("matmul", {"problem": {**MATMUL, "device": 5}}, r"device: 5 is not allowed; a name or a"),
        ("matmul", {"problem": {**MATMUL, "name": 5}}, r"name: 5 is not allowed; a text"),
        ("matmul", {"results": 5}, r"results: 5 is not allowed; a folder"),
        ("matmul", {"until": "compiled"}, r"unknown stage for until 'compiled'"),
    ],
)
def test_wrong_arguments_are_one_line_and_an_input_error(kernel, arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        autotune.tune(kernel, **{"problem": MATMUL, **arguments})
    assert "\n" not in str(caught.value)


def test_numpy_s_numbers_are_taken_as_python_s():
    shape = dict(zip("mkn", np.array([256, 256, 256]), strict=True))
    space = {"bm": np.int64(128), "bk": list(np.array([128, 256])), "bn": range(128, 129)}
    board = autotune.tune(
        "matmul", shape=shape, dtype=jnp.float32, device="v6e", until="model", space=space, jobs=1
    )
    assert json.loads(board.problem[0])["dtype"] == "float32"
    blocks = [json.loads(text) for text in board.loc[~board.is_default, "config"]]
    assert {(b["bm"], b["bk"], b["bn"]) for b in blocks} == {(128, 128, 128), (128, 256, 128)}


@pytest.mark.skipif(attached() is not None, reason="a TPU is attached")
def test_without_a_device_and_without_a_tpu_the_devices_are_listed():
    with pytest.raises(InputError, match=r"no TPU is attached, so name one of") as caught:
        autotune.tune("matmul", shape=MATMUL["shape"])
    assert all(name in str(caught.value) for name in DEVICES)


def test_an_unknown_device_is_an_unknown_name():
    with pytest.raises(UnknownNameError):
        autotune.tune("matmul", shape=MATMUL["shape"], device=["v6e", "v99"])
