"""What a user's kernel does wrong is one clear line with the right status; right, it is costed."""

import dataclasses
import sys
import tracemalloc
from pathlib import Path

import contract_kernels
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler.environment import unavailable
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.errors import InputError, KernelError
from autotune.kernels import base, external
from autotune.kernels.contract import checked_output
from autotune.pallas_call import trace
from autotune.problem import Problem
from autotune.search import space
from autotune.tuning import tune

SHAPE = {"m": 512, "n": 256}
BREACHES = {
    "RAISES": ("failed", "<lambda> raised RuntimeError: rows of 7 do not fit"),
    "NO_CALL": ("failed", "<lambda> holds no pallas_call: there is nothing to tune"),
    "WRONG_SHAPE": ("failed", "the call returns [64, 256], its reference [512, 256]"),
    "WRONG_SHAPE_SAID": ("failed", "the call returns [64, 256], its output [512, 256]"),
    "WRONG_COUNT": (
        "failed",
        "the call returns [512, 256] and [512, 256], its reference [512, 256]",
    ),
    "LACKS_AXIS": ("failed", "the problem's shape has no 'k', only m, n"),
    "LACKS_OPTION": ("failed", "the problem's options has no 'causal', only nothing"),
    "NO_PAIR": ("failed", "build gave a function, not (function, arguments)"),
    "NO_STRUCTS": ("failed", "argument 0 of build is an int, not a jax.ShapeDtypeStruct"),
    "KEEPS": ("ok", None),
    "NUMPY_REFERENCE": ("ok", None),
}


@pytest.fixture(scope="module")
def verdicts():
    tasks = [
        Task(
            problem=Problem(
                kernel=f"contract_kernels:{name}", device="v6e", shape=SHAPE, dtype="float32"
            ),
            candidate=Candidate.of({"rows": 128}),
            kind="trace",
        )
        for name in BREACHES
    ]
    with CompilePool(jobs=1, timeout_s=120) as pool:
        return {t.problem.kernel.partition(":")[2]: answer for t, answer in pool.run(tasks)}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_of_the_contract_is_one_clear_line(name, verdicts):
    status, told = BREACHES[name]
    answer = verdicts[name]
    assert answer.status == status, answer.reason
    if told is None:
        assert answer.reason is None
    else:
        assert told.removeprefix("<lambda> ") in answer.reason
        assert "\n" not in answer.reason


def test_a_kernel_that_counts_flops_by_an_axis_it_lacks_is_told_which_it_has():
    with pytest.raises(KernelError, match=r"the problem's shape has no 'k', only m, n"):
        base.make_problem(contract_kernels.FLOPS_LACK_AXIS, device="v6e", shape=SHAPE,
                          dtype="float32")  # fmt: skip


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tunables", "tunables gave null, not a mapping"),
        ("tunables of lists", r"tunable rows is \[8, 64\], not a Tunable\(values=\(…\)\)"),
        ("tunables by number", "tunables gave the name 3, not text"),
        ("canonical", "canonical gave null, not a mapping"),
        ("default", "default gave null, not a mapping"),
        ("illegal", "illegal gave true, not a reason or None"),
    ],
)
@pytest.mark.parametrize("overrides", [None, {"rows": (8,)}])
def test_an_answer_of_another_kind_is_one_line(what, message, overrides):
    function = {what.partition(" ")[0]: contract_kernels.ANSWERS[what]}
    kernel = dataclasses.replace(contract_kernels.KEEPS, **function)
    problem = base.make_problem(kernel, device="v6e", shape=SHAPE, dtype="float32")
    with pytest.raises(KernelError, match=f"^kernel keeps: {message}$"):
        space.candidates(kernel, problem, devices.get("v6e"), overrides)


def test_scope_counts_that_are_no_counts_are_one_line():
    kernel = contract_kernels.KEEPS
    with pytest.raises(KernelError, match="scope_counts gave 'many' for step, not a whole"):
        base.ask(kernel, "scope_counts", lambda problem: {"step": "many"}, None)


def test_a_kernel_is_checked_when_it_is_made():
    with pytest.raises(KernelError, match="axes is 'mn', not a tuple of names"):
        dataclasses.replace(contract_kernels.KEEPS, axes="mn")
    with pytest.raises(KernelError, match="option causal is true, not an Option"):
        dataclasses.replace(contract_kernels.KEEPS, options={"causal": True})


def test_an_axis_the_problem_lacks_is_named_with_those_the_kernel_needs():
    with pytest.raises(InputError, match=r"shape: lacks 'n' \(keeps needs m, n\)"):
        base.make_problem(contract_kernels.KEEPS, device="v6e", shape={"m": 8}, dtype="float32")


def test_a_program_of_two_calls_is_costed_as_their_sum():
    one, two = (
        tune(kernel, shape=SHAPE, dtype="float32", device="v6e", space={"rows": 128},
             until="model", jobs=1).iloc[0]
        for kernel in (contract_kernels.KEEPS, contract_kernels.TWICE)
    )  # fmt: skip
    assert two.hbm_bytes == 2 * one.hbm_bytes
    assert two.grid_steps == 2 * one.grid_steps
    assert two.latency_model_ms == pytest.approx(2 * one.latency_model_ms)


@pytest.mark.compiler
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_scratch_beyond_vmem_is_rejected_for_that_by_the_model_or_by_the_compiler():
    board = tune(
        contract_kernels.HUNGRY, shape=SHAPE, dtype="float32", device="v6e", jobs=1, trials=9
    )
    found = {row.config: row for row in board.itertuples()}
    carried = found['{"carried": true, "scratch_mib": 40}']
    assert carried.status == "pruned"
    assert carried.evidence == "model"
    assert "40" in carried.reason
    assert "MiB of VMEM, of 32.00 MiB allowed on v6e" in carried.reason
    fresh = found['{"carried": false, "scratch_mib": 40}']
    assert (fresh.status, fresh.evidence) == ("oom", "compiled")
    assert fresh.reason.startswith("VMEM: ")
    assert found['{"carried": true, "scratch_mib": 1}'].status == "ok"


def test_a_module_beside_a_config_is_not_mistaken_for_another_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "from contract_kernels import KEEPS as KERNEL\n"
    for folder in ("one", "two"):
        tmp_path.joinpath(folder).mkdir()
        tmp_path.joinpath(folder, "twin_kernels.py").write_text(text, encoding="utf-8")
    tmp_path.joinpath("two", "colorsys.py").write_text(text, encoding="utf-8")
    one, two = (str(tmp_path / folder) for folder in ("one", "two"))
    assert base.load("twin_kernels:KERNEL", beside=one).name == "twin_kernels:KERNEL"
    with pytest.raises(InputError, match=r"two/twin_kernels.py is hidden by .*one/twin_kernels.py"):
        base.load("twin_kernels:KERNEL", beside=two)
    with pytest.raises(InputError, match=r"two/colorsys.py is hidden by .*; rename one of them"):
        base.load("colorsys:KERNEL", beside=two)
    monkeypatch.delitem(sys.modules, "twin_kernels")


@pytest.mark.parametrize("edited", ["labkernels/mine.py", "labkernels/helper.py"])
def test_an_installed_copy_that_is_not_what_the_current_folder_holds_is_refused(
    tmp_path, monkeypatch, edited
):
    site = tmp_path / "env" / "site-packages"
    text = "from contract_kernels import KEEPS as KERNEL\nfrom labkernels import helper\n"
    for place in (site, tmp_path / "repo"):
        place.joinpath("labkernels").mkdir(parents=True)
        place.joinpath("labkernels", "__init__.py").touch()
        place.joinpath("labkernels", "mine.py").write_text(text)
        place.joinpath("labkernels", "helper.py").write_text("H = 1\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.chdir(tmp_path / "repo")
    assert base.load("labkernels.mine:KERNEL").name == "labkernels.mine:KERNEL"
    Path(edited).write_text(text + "# edited\n")
    external._first_difference.cache_clear()  # it is asked once a process
    with pytest.raises(InputError, match=rf"repo/{edited} is not what is installed as .*env/"):
        base.load("labkernels.mine:KERNEL")
    for name in ("labkernels", "labkernels.mine", "labkernels.helper"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    "name",
    ["splash", "flash_fwd", "flash_dq", "flash_dkv", "jax.splash", "jax.flash", "jax.flash_dq"],
)
def test_asking_for_the_shapes_of_an_output_makes_no_mask_of_the_problem_s_size(name):
    kernel = base.load(name)
    shape = dict.fromkeys(("q_len", "kv_len"), 32768)
    shape |= {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim_qk": 128, "head_dim_v": 128}
    options = {"mask": {"causal": {}}} if "splash" in name else {"causal": True}
    problem = base.make_problem(kernel, device="v6e", shape=shape, options=options)
    assert kernel.default is not None
    call = kernel.build(problem, kernel.default(problem, devices.get("v6e")))
    tracemalloc.start()
    checked_output(kernel, problem, call)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 * 2**20, "the mask alone has 1 GiB"


def test_a_kernel_left_in_interpret_mode_is_told_so():
    def build(problem, config):
        x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
        return pl.pallas_call(lambda x, o: None, out_shape=x, name="left", interpret=True), (x,)

    with pytest.raises(KernelError, match="left is called with interpret=True: the TPU compiler"):
        trace(*build(None, {}), devices.get("v6e"))
