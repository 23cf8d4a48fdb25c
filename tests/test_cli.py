"""The command line: bad input is one line and status 2, help is complete, nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import cli

MATMUL = """device: tpu7x
problems:
  - kernel: matmul
    shape: {m: 256, k: 256, n: 256}
"""


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command run in this process."""
    status = cli.app(list(arguments), standalone_mode=False)
    out, err = capsys.readouterr()
    return status or 0, out, err


BAD_CONFIGS = {
    "empty file": ("", " is empty", "a config has the keys"),
    "YAML syntax": ("device: [tpu7x\nproblems: {", "", ""),
    "duplicate key": (MATMUL + "device: v6e\n", "5", "device"),
    "unknown key": (MATMUL.replace("device:", "devise:"), "1", "'devise'; did you mean 'device'?"),
    "unknown kernel": (MATMUL.replace("matmul", "matmull"), "3", "did you mean 'matmul'?"),
    "unknown device": (MATMUL.replace("tpu7x", "tpu9"), "1", "(known: tpu7x, v4, v5e, v5p, v6e)"),
    "missing axis": (MATMUL.replace("k: 256, ", ""), "4", "lacks 'k'"),
    "zero": (MATMUL.replace("m: 256", "m: 0"), "4", "0 is not allowed; a whole number from 1"),
    "negative": (MATMUL.replace("m: 256", "m: -5"), "4", "-5 is not allowed"),
    "fraction": (MATMUL.replace("m: 256", "m: 2.5"), "4", "2.5 is not allowed"),
    "text": (MATMUL.replace("m: 256", "m: big"), "4", "big"),
    "huge": (MATMUL.replace("m: 256", "m: 2147483649"), "4", "2147483649 is not allowed"),
    "dtype": (MATMUL + "    dtype: int8\n", "5", "not multiplied by tpu7x"),
    "block of 0": (MATMUL + "    space: {bm: [0]}\n", "5", "0"),
    "block off the tile": (MATMUL + "    space: {bn: [200]}\n", "5", "200 is not allowed"),
    "block above the axis": (MATMUL + "    space: {bm: [512]}\n", "5", "512 is not allowed"),
    "space of nothing": (MATMUL + "    space: {}\n", "5", "{} is not allowed"),
    "too many FLOPs": (MATMUL.replace("256", "2147483648"), "4", "FLOPs is not allowed"),
    "empty space": (MATMUL + "    space: {bm: []}\n", "5", "bm"),
    "no budget": (MATMUL + "budget: {trials: 0}\n", "5", "0 is not allowed"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_one_line_with_file_line_and_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line, told = BAD_CONFIGS[case]
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text)
    status, out, err = call(capsys, "sweep", "bad.yaml")
    assert (status, out) == (2, "")
    assert err.startswith(f"autotune: bad.yaml:{line}")
    assert told in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.yaml"], "nothing may be written"


@pytest.mark.parametrize(
    ("kv_heads", "status"), [(4, 2), (5, 2), (2, 0), (6, 0)], ids=["6/4", "6/5", "6/2", "6/6"]
)
def test_kv_heads_must_divide_q_heads(
    kv_heads: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "device: v6e\nproblems:\n  - kernel: flash_fwd\n    shape: {batch: 1, q_heads: 6, "
        f"kv_heads: {kv_heads}, q_len: 256, kv_len: 256, head_dim_qk: 128, head_dim_v: 128}}\n"
        "    space: {block_q: 256, block_kv: 256}\n"
    )
    results = str(tmp_path / "r")
    ended, _, err = call(capsys, "sweep", str(config), "--until", "model", "--results", results)
    assert ended == status
    if status:
        assert "6" in err
        assert str(kv_heads) in err


BAD_USAGE = {
    "missing file": (["sweep", "none.yaml"], "none.yaml"),
    "directory": (["sweep", "."], "."),
    "no config": (["sweep"], "Missing argument"),
    "trials": (["sweep", "c.yaml", "--trials", "0"], "--trials 0 is not allowed"),
    "seed": (["sweep", "c.yaml", "--seed", "-1"], "--seed -1 is not allowed"),
    "seconds": (["sweep", "c.yaml", "--seconds", "-1"], "--seconds -1 is not allowed"),
    "text for a number": (["sweep", "c.yaml", "--seconds", "soon"], "--seconds 'soon'"),
    "jobs": (["sweep", "c.yaml", "--jobs", "0"], "--jobs '0' is not allowed"),
    "until": (["sweep", "c.yaml", "--until", "never"], "--until 'never' is not allowed"),
    "device": (["sweep", "c.yaml", "--device", "tpu9"], "unknown device 'tpu9'"),
    "results is a file": (["sweep", "c.yaml", "--until", "model", "--results", "c.yaml"],
                          "cannot be written"),
    "measure": (["sweep", "c.yaml", "--until", "measure"], "needs a TPU attached"),
    "no results": (["report", "none"], "no results at none"),
    "empty results": (["report", "."], "no leaderboard in ."),
    "format": (["report", "--format=xml"], "--format 'xml' is not allowed"),
    "device of a report": (["report", "--device", "v9"], "unknown device 'v9' (known: tpu7x, v4"),
    "damaged": (["report", "damaged.parquet"], "damaged.parquet: not a readable leaderboard"),
    "output": (["report", "c.yaml"], "c.yaml: not a readable leaderboard"),
    "tolerance": (["gate", "--tolerance", "-0.1"], "--tolerance '-0.1' is not allowed"),
    "endless tolerance": (["gate", "--tolerance", "inf"], "--tolerance inf is not allowed"),
    "command": (["swep", "c.yaml"], "unknown command 'swep'; did you mean 'sweep'? (known: best,"),
    "option": (["report", "--fromat", "csv"], "unknown report option '--fromat'; did you mean "
               "'--format'? (known: --device, --format, --help, --output, --problem, --top)"),
    "option of none": (["--versio"], "unknown option '--versio'; did you mean '--version'?"),
    "option of a later command": (["sweep", "c.yaml", "--tolerance", "1"],
                                  "unknown sweep option '--tolerance'"),
    "choice": (["report", "--format", "jsn"], "--format 'jsn' is not allowed; did you mean 'json'? "
               "(allowed: table, markdown, json, csv, html)"),
    "choice like no other": (["sweep", "c.yaml", "--timer", "x"],
                             "--timer 'x' is not allowed; one of device, host"),
    "argument": (["export", "jaxx"], "target 'jaxx' is not allowed; did you mean 'jax'?"),
    "whole number": (["report", "--top", "few"], "--top 'few' is not allowed; a whole number"),
    "least": (["report", "--top=0"], "--top '0' is not allowed; at least 1"),
    "no value": (["report", "--top"], "--top needs a value"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_one_line_that_names_the_option_and_the_value(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, told = BAD_USAGE[case]
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(MATMUL)
    Path("damaged.parquet").write_bytes(b"PAR1 cut short")
    if case == "empty results":
        Path("damaged.parquet").unlink()
    before = sorted(tmp_path.rglob("*"))
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before, "nothing may be written"


def test_an_unreadable_config_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_bytes(b"\x00\x01\xff\xfe binary")
    status, out, err = call(capsys, "sweep", str(config))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(config) in err


@pytest.mark.parametrize(
    "command", ["sweep", "report", "gate", "best", "export", "calibrate", "kernels", "devices"]
)
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(capsys, command, "--help")
    assert status == 0
    assert f"Example: autotune {command}" in out


def test_kernels_and_devices_list_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "kernels")
    assert "matmul\n  shape    m, k, n\n" in out
    _, out, _ = call(capsys, "devices")
    assert "tpu7x  ('TPU7x', 1 TensorCore a JAX device)" in out
    assert "v5p  ('TPU v5', 2 TensorCores a JAX device)" in out


def test_version_names_jax_and_libtpu(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "--version")
    assert out.startswith("autotune ")
    assert " jax 0." in out


def test_a_space_without_a_legal_candidate_names_its_line_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    attention = (
        "  - kernel: flash_fwd\n    shape: {q_heads: 1, kv_heads: 1, q_len: 1024, kv_len: 1024, "
        "head_dim_qk: 128, head_dim_v: 128}\n    space: {block_kv: 512, block_kv_compute: 384}\n"
    )
    Path("c.yaml").write_text(MATMUL + attention)
    status, out, err = call(capsys, "sweep", "c.yaml", "--until", "model")
    assert (status, out) == (2, "")
    assert err.startswith("autotune: c.yaml:7: problems[1].space: leaves no legal candidate")
    assert not Path("results").exists()


def test_one_problem_in_two_files_must_ask_for_one_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(MATMUL)
    Path("b.yaml").write_text(MATMUL + "    space: {bm: 128}\n")
    status, _, err = call(capsys, "sweep", "a.yaml", "b.yaml", "--until", "model")
    assert status == 2
    assert err.startswith("autotune: b.yaml:5: ")
    assert "another space or budget is at a.yaml:3" in err


@pytest.mark.parametrize("flops", ["-5", "0", "2.5e9", "True"])
def test_a_kernel_whose_flops_are_no_count_is_refused(
    flops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"counts_{abs(hash(flops))}"
    Path(f"{name}.py").write_text(
        "from autotune.kernels.base import Kernel\n"
        "KERNEL = Kernel(name='k', axes=('m',), build=lambda p, c: None, "
        f"tunables=lambda p, d: {{}}, flops=lambda p: {flops})\n"
    )
    Path("c.yaml").write_text(
        f"device: v6e\nproblems:\n  - kernel: {name}:KERNEL\n    shape: {{m: 8}}\n"
    )
    status, _, err = call(capsys, "sweep", "c.yaml", "--until", "model")
    assert status == 2
    assert "not a whole number of at least 1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["kernels", "--help"])
def test_a_reader_who_closes_the_pipe_ends_the_command_quietly(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "autotune", command],
            stdout=closed, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, ""), "as of a program that SIGPIPE ends"


def test_a_closed_stdout_is_one_line_and_status_2() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m autotune devices >&-', sys.executable],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "autotune: stdout is closed\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line_and_status_2() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autotune", "devices"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr
