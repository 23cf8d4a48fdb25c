"""Configs: what they mean, and every bad one's message, in full."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune import config, strict_yaml
from autotune import device as devices
from autotune.config import Config
from autotune.errors import AutotuneError, InputError, KernelError
from autotune.search import space as space_module

Load = Callable[..., Config]
CONFIGS = Path(__file__).parent.parent / "configs"

HEAD = "device: v6e\nproblems:\n"
TOY = "- kernel: config_kernels:KERNEL\n"
ROW = TOY + "  shape: {q_heads: 8, kv_heads: 2, q_len: 512, kv_len: 512}\n"
GOOD = HEAD + ROW  # four lines
UNSHAPED = HEAD + TOY + "  shape: {q_len: 512, kv_len: 512}\n"
DEVICELESS = "problems:\n" + ROW
TOY_NAME = "config_kernels:KERNEL"
KEYS = "(known: budget, dtype, kernel, matrix, name, options, shape, space)"
KINDS = "v4, v5e, v5p, v6e, tpu7x, auto, or a list of them"
CHIPS = "(known: tpu7x, v4, v5e, v5p, v6e)"
AXES = f"({TOY_NAME} needs q_heads, kv_heads, q_len, kv_len)"
DTYPES = "bfloat16, float32, int8, float8_e4m3b11fnuz"
COUNT = "a whole number from 1 to 2^31"
WHOLE_FILE = "a mapping with the keys device, budget, problems"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a text as `x.yaml` of the current directory."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes, **options: Any) -> Config:
        Path("x.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return config.load("x.yaml", **options)

    return load


def dim(value: str) -> str:
    return GOOD.replace("q_len: 512", f"q_len: {value}")


def option(text: str) -> str:
    return f"{GOOD}  options: {{{text}}}\n"


def space(text: str) -> str:
    return f"{GOOD}  space: {{{text}}}\n"


def matrix(text: str) -> str:
    return f"{GOOD}  matrix: {{{text}}}\n"


# text -> the message after "x.yaml:"
BAD: dict[str, str] = {
    # The file as a whole (Y5, Y6).
    "": " is empty; a config has the keys device and problems",
    "# only a comment\n": " is empty; a config has the keys device and problems",
    "~\n": " is empty; a config has the keys device and problems",
    "hello\n": f"1: 'hello' is not allowed; {WHOLE_FILE}",
    "- 1\n": f"1: [1] is not allowed; {WHOLE_FILE}",
    GOOD + "---\na: 1\n": "5: a second document starts here; a config is one document",
    HEAD + "\t- kernel: matmul\n": "3: a tab indents this line; YAML allows spaces only",
    HEAD + TOY + "\tshape: 1\n": "4: a tab indents this line; YAML allows spaces only",
    "device: [v6e": "1: is not YAML: expected ',' or ']', but got '<stream end>'",
    "device: v6e: x\n": "1: is not YAML: mapping values are not allowed here",
    "%YAML 1.1\n---\na: 1\n": "2: YAML 1.1 is not allowed; a config is YAML 1.2",
    "%YAML 3\n---\n": "1: is not YAML: expected a digit or '.', but found '\\n'",
    "device: \x07\n": "1: character U+0007 is not allowed in YAML",
    "a: !!int 3\n": "1: the tag 'tag:yaml.org,2002:int' is not allowed; plain values",
    'a: "\\ud800"\n': "1: '\\ud800' is not Unicode text",
    'a: 1\nb: "\\U00110000"\n': "2: is not YAML: chr() arg not in range(0x110000)",
    "a: *x\n": "1: the alias 'x' has no anchor of that name before it",
    "a: &x [*x]\n": "1: the alias 'x' stands inside what it stands for",
    "a: {<<: 5}\n": "1: << merges a mapping or a list of mappings, nothing else",
    "[" * 10_000: "1: nested deeper than 50 levels",
    BOMB: "6: with its aliases this is more than 100000 entries or 50 levels",
    # Keys (Y1, Y3, Y6).
    "device: v6e\ndevice: v5e\n": "2: the key 'device' is repeated (first on line 1)",
    "a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a\n": "4: the key '<<' is repeated (first on line 3)",
    space("block_q: 128, block_q: 256"): "5: the key 'block_q' is repeated (first on line 5)",
    GOOD + "  on: 1\n": f"5: problems[0].on: unknown key 'on' {KEYS}",
    GOOD + "  true: 1\n": "5: the key true is not allowed; a word",
    GOOD + "  5: 1\n": "5: the key 5 is not allowed; a word",
    GOOD + "  ~: 1\n": "5: the key null is not allowed; a word",
    GOOD + "  ? [a]\n  : 1\n": "5: the key that is a list or mapping is not allowed; a word",
    GOOD + "  bloks: 1\n": f"5: problems[0].bloks: unknown key 'bloks' {KEYS}",
    GOOD + "  spce: 1\n": f"5: problems[0].spce: unknown key 'spce'; did you mean 'space'? {KEYS}",
    "devise: v6e\n" + DEVICELESS: "1: devise: unknown key 'devise'; did you mean 'device'? "
    "(known: budget, device, problems)",
    GOOD + "  n\u2028ame: 1\n": "5: problems[0].n\\u2028ame: unknown key 'n\\u2028ame'; "
    f"did you mean 'name'? {KEYS}",
    # Devices and problems.
    "device: v6e\n": "1: lacks the key 'problems'; a list of problems, at least one",
    "device: v6e\nproblems: []\n": "2: problems: [] is not allowed; "
    "a list of problems, at least one",
    "device: v6e\nproblems: [5]\n": "2: problems[0]: 5 is not allowed; a mapping with the keys "
    "kernel, name, shape, options, dtype, matrix, space, budget",
    DEVICELESS: f"1: lacks the key 'device'; {KINDS}",
    "device: v9\n" + DEVICELESS: f"1: device: unknown device 'v9' {CHIPS}",
    "device: [v6e, tpu7]\n" + DEVICELESS: "1: device: unknown device 'tpu7'; "
    f"did you mean 'tpu7x'? {CHIPS}",
    "device: 7\n" + DEVICELESS: f"1: device: 7 is not allowed; {KINDS}",
    "device: []\n" + DEVICELESS: f"1: device: [] is not allowed; {KINDS}",
    "device:\n" + DEVICELESS: f"1: device: null is not allowed; {KINDS}",
    GOOD + "  name: 5\n": "5: problems[0].name: 5 is not allowed; a line of 1 to 200 characters",
    GOOD + "  name: ''\n": "5: problems[0].name: '' is not allowed; a line of 1 to 200 characters",
    GOOD + '  name: "a\\nb"\n': "5: problems[0].name: 'a\\nb' is not allowed; "
    "a line of 1 to 200 characters",
    GOOD + "  space: {block_q: 128}\n" + ROW: "6: problems[1]: the same problem as problems[0] "
    "on line 3, with another space or budget; drop one",
    # Kernels.
    HEAD + "- shape: {m: 1}\n": "3: problems[0]: lacks the key 'kernel'; "
    "the name of a kernel, or package.module:ATTRIBUTE",
    HEAD + "- kernel: 5\n": "3: problems[0].kernel: 5 is not allowed; "
    "the name of a kernel, or package.module:ATTRIBUTE",
    HEAD + "- kernel: a b:C\n": "3: problems[0].kernel: 'a b:C' is not allowed; "
    "a known kernel, or package.module:ATTRIBUTE",
    HEAD + "- kernel: config_kernels:KERNAL\n": "3: problems[0].kernel: unknown kernel in "
    "config_kernels 'KERNAL'; did you mean 'KERNEL'? (known: BROKEN, KERNEL)",
    HEAD + "- kernel: config_kernels:NOT_A_KERNEL\n": "3: problems[0].kernel: kernel "
    "'config_kernels:NOT_A_KERNEL': NOT_A_KERNEL is of type int, not an "
    "autotune.kernels.base.Kernel",
    # Shapes (Y1, Y2, Y4, B9).
    **{
        dim(value): f"4: problems[0].shape.q_len: {text} is not allowed; {COUNT}"
        for value, text in {
            "0": "0",
            "-5": "-5",
            "1.5": "1.5",
            "two": "'two'",
            "'512'": "'512'",
            "2147483649": "2147483649",
            "1e40": "1e+40",
            "010": "'010'",
            "09": "'09'",
            "1:30": "'1:30'",
            "1_024": "'1_024'",
            "0x10": "'0x10'",
            "0o10": "'0o10'",
            "true": "true",
            "on": "'on'",
            "": "null",
            "[1]": "[1]",
            "{a: 1}": '{"a": 1}',
        }.items()
    },
    dim("1e400"): "4: problems[0].shape.q_len: 1e400 is not allowed; a finite number",
    dim(".nan"): "4: problems[0].shape.q_len: .nan is not allowed; a finite number",
    UNSHAPED: f"4: problems[0].shape: lacks 'q_heads' {AXES}",
    HEAD + TOY: f"3: problems[0].shape: lacks 'q_heads' {AXES}",
    HEAD + TOY + "  shape:\n": "4: problems[0].shape: null is not allowed; "
    "a mapping of axes to whole numbers",
    GOOD.replace("q_len", "qlen"): f"4: problems[0].shape.qlen: unknown shape entry of {TOY_NAME} "
    "'qlen'; did you mean 'q_len'? (known: kv_heads, kv_len, q_heads, q_len, window)",
    GOOD.replace("8, kv_heads: 2", "6, kv_heads: 4"): "4: problems[0].shape.kv_heads: "
    "kv_heads 4 do not divide q_heads 6",
    # Dtypes (Y1, D1) and options (A4).
    GOOD + "  dtype: no\n": "5: problems[0].dtype: 'no' is not allowed; "
    f"{TOY_NAME} on v6e takes {DTYPES}",
    GOOD + "  dtype: 5\n": "5: problems[0].dtype: 5 is not allowed; the name of a dtype",
    GOOD.replace("v6e", "v4") + "  dtype: int8\n": "5: problems[0].dtype: 'int8' is not "
    "multiplied by v4; use bfloat16, float32",
    GOOD.replace("v6e", "tpu7x") + "  dtype: float8_e4m3b11fnuz\n": "5: problems[0].dtype: "
    "'float8_e4m3b11fnuz' is not multiplied by tpu7x; use bfloat16, float32",
    option("casual: true"): f"5: problems[0].options.casual: unknown option of {TOY_NAME} "
    "'casual'; did you mean 'causal'? (known: cap, causal, epilogue, lengths, window)",
    option("causal: on"): "5: problems[0].options.causal: 'on' is not allowed; true or false",
    option("causal: 1"): "5: problems[0].options.causal: 1 is not allowed; true or false",
    option("cap: -1"): "5: problems[0].options.cap: -1 is not allowed; "
    "a positive number, or 0 or null for off",
    option("lengths: [1, 0]"): "5: problems[0].options.lengths: [1, 0] is not allowed; "
    "a list of lengths",
    GOOD + "  options:\n": "5: problems[0].options: null is not allowed; "
    "a mapping of the kernel's options",
    # Budgets.
    **{
        f"{GOOD}budget: {{trials: {value}}}\n": f"5: budget.trials: {value} is not allowed; {COUNT}"
        for value in ("0", "-1", "true", "1.5", "null", "99999999999")
    },
    **{
        f"{GOOD}  budget: {{seconds: {value}}}\n": f"5: problems[0].budget.seconds: {value} is not "
        "allowed; a number of seconds above 0"
        for value in ("0", "-1.5", "true")
    },
    GOOD + "  budget: {seconds: .inf}\n": "5: problems[0].budget.seconds: .inf is not allowed; "
    "a finite number",
    GOOD + "budget: 0\n": "5: budget: 0 is not allowed; a mapping with trials, seconds or both",
    GOOD + "budget: {trails: 5}\n": "5: budget.trails: unknown key 'trails'; "
    "did you mean 'trials'? (known: seconds, trials)",
    # Spaces (B1, V5).
    **{
        space(f"block_q: {value}"): f"5: problems[0].space.block_q: {value} is not allowed; {rule}"
        for value, rule in {
            "0": "a multiple of 128",
            "-128": "a multiple of 128",
            "100": "a multiple of 128",
            "1.5": "a multiple of 128",
            "true": "a multiple of 128",
            "null": "a whole number, such as 128, 256, 512",
            '{"a": 1}': "a whole number, such as 128, 256, 512",
            "[]": "a value or a list of at least one",
        }.items()
    },
    space("block_q: [128, 100]"): "5: problems[0].space.block_q[1]: 100 is not allowed; "
    "a multiple of 128",
    space("block_q: [[128]]"): "5: problems[0].space.block_q[0]: [128] is not allowed; "
    "a whole number, such as 128, 256, 512",
    space("block_q: on"): "5: problems[0].space.block_q: 'on' is not allowed; "
    "a whole number, such as 128, 256, 512",
    space("block_kv_compute: abc"): "5: problems[0].space.block_kv_compute: 'abc' is not allowed; "
    "a whole number or null, such as null, 128",
    space("fused: 1"): "5: problems[0].space.fused: 1 is not allowed; "
    "true or false, such as false, true",
    space("order: 5"): "5: problems[0].space.order: 5 is not allowed; a word, such as 'qk', 'kq'",
    space("vmem_limit_bytes: 201326592"): "5: problems[0].space.vmem_limit_bytes: 201326592 is "
    "not allowed; null, or up to 134217728",
    space("blok_q: 128"): f"5: problems[0].space.blok_q: unknown tunable of {TOY_NAME} 'blok_q'; "
    "did you mean 'block_q'? (known: block_kv, block_kv_compute, block_q, fused, order, "
    "vmem_limit_bytes)",
    GOOD + "  space: [block_q]\n": '5: problems[0].space: ["block_q"] is not allowed; '
    "a mapping of tunables to a value or a list of values",
    # Matrices.
    matrix("causal: []"): "5: problems[0].matrix.causal: [] is not allowed; "
    "a list of at least one value",
    matrix("causal: true"): "5: problems[0].matrix.causal: true is not allowed; a list of values",
    matrix("casual: [true]"): f"5: problems[0].matrix.casual: unknown matrix key of {TOY_NAME} "
    "'casual'; did you mean 'causal'? (known: cap, causal, dtype, epilogue, kv_heads, kv_len, "
    "lengths, q_heads, q_len, window)",
    matrix("q_len: [128]"): "5: problems[0].matrix.q_len: shape.q_len is given twice",
    matrix("cap: [1], options.cap: [2]"): "5: problems[0].matrix.options.cap: "
    "options.cap is given twice",
    matrix("window: [1]"): "5: problems[0].matrix.window: window is ambiguous; "
    "write shape.window or options.window",
    matrix("causal: [true, 5]"): "5: problems[0].matrix.causal[1]: 5 is not allowed; "
    "true or false (combination causal=5)",
    matrix(f"cap: [{'1,' * 200}], lengths: [{'[1],' * 200}]"): "5: problems[0].matrix: "
    "40000 combinations; at most 10000",
    UNSHAPED + "  matrix:\n    q_heads: [8, 6]\n    kv_heads: [2, 4]\n": "7: problems[0].matrix."
    "kv_heads[1]: kv_heads 4 do not divide q_heads 6 (combination q_heads=6 kv_heads=4)",
    UNSHAPED + "  matrix: {q_heads+kv_heads: [[8, 2], [1, 2, 3]]}\n": "5: problems[0].matrix."
    "q_heads+kv_heads[1]: [1, 2, 3] is not allowed; one value, or a list of 2",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_config_is_one_line_with_file_line_key_value_and_what_is_allowed(
    load: Load, text: str
) -> None:
    started = time.monotonic()
    with pytest.raises(InputError) as error:
        load(text)
    assert str(error.value) == f"x.yaml:{BAD[text]}"
    assert error.value.exit_status == 2
    assert time.monotonic() - started < 10, "a bad config is refused quickly"


def test_an_unknown_kernel_lists_the_known_ones(load: Load) -> None:
    with pytest.raises(InputError) as error:
        load(HEAD + "- kernel: matmull\n")
    text = str(error.value)
    assert text.startswith(
        "x.yaml:3: problems[0].kernel: unknown kernel 'matmull'; did you mean 'matmul'? (known: "
    )
    assert "flash_fwd" in text


def test_a_module_that_is_not_there_is_bad_input_and_one_that_raises_is_a_kernel_error(
    load: Load, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"x\.yaml:3: .*no module 'nowhere\.mod' in .*/"):
        load(HEAD + "- kernel: nowhere.mod:K\n")
    (tmp_path / "raising_kernel.py").write_text("raise RuntimeError('out of\\nluck')")
    with pytest.raises(KernelError, match="importing raising_kernel raised RuntimeError: out of l"):
        load(HEAD + "- kernel: raising_kernel:K\n")


def test_a_kernel_whose_rules_raise_is_one_line(load: Load) -> None:
    with pytest.raises(KernelError) as error:
        load(HEAD + "- {kernel: 'config_kernels:BROKEN', shape: {m: 1}}\n")
    assert str(error.value) == (
        "x.yaml:3: problems[0]: kernel config_kernels:BROKEN: check raised LookupError: lost my way"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x01", "x.yaml: is a binary file; a YAML file is needed"),
        (GOOD.encode("utf-16"), "x.yaml: is a binary file; a YAML file is needed"),
        (b"device: v6e\nx: \xff\n", "x.yaml:2: byte 0xff is not UTF-8"),
        (b"#" * 300_000, "x.yaml: is larger than 256 KiB, the most a config has"),
    ],
)
def test_a_file_that_is_no_text_says_so(load: Load, data: bytes, message: str) -> None:
    with pytest.raises(InputError) as error:
        load(data)
    assert str(error.value) == message


def test_a_file_that_cannot_be_read_says_why(load: Load, tmp_path: Path) -> None:
    load(GOOD)
    for path, message in {
        "nope.yaml": "nope.yaml: no such file",
        ".": ".: is a directory; a YAML file is needed",
        "x.yaml/y": "x.yaml/y: cannot be read: Not a directory",
    }.items():
        with pytest.raises(InputError) as error:
            config.load(path)
        assert str(error.value) == message


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(load: Load) -> None:
    plain = load(GOOD)
    assert load(b"\xef\xbb\xbf" + GOOD.encode()).problems == plain.problems
    assert load(GOOD.replace("\n", "\r\n")).problems == plain.problems


def test_a_number_without_a_fraction_is_whole_however_it_is_written(load: Load) -> None:
    for written, value in {"2048.0": 2048, "1e3": 1000, "1.0e+3": 1000, "+512": 512}.items():
        (spec,) = load(dim(written)).problems
        assert spec.problem.shape["q_len"] == value
        assert type(spec.problem.shape["q_len"]) is int
    (spec,) = load(GOOD + "  budget: {trials: 1e1, seconds: 1.0e3}\n").problems
    assert (spec.trials, spec.seconds) == (10, 1000.0)


def test_words_of_older_yaml_stay_words(load: Load) -> None:
    for word in ("no", "on", "010", "1:30", "2026-11-29"):
        assert load(f"{GOOD}  name: {word}\n").problems[0].problem.name == word


def test_the_largest_axis_is_2_to_the_31(load: Load) -> None:
    assert load(dim("2147483648")).problems[0].problem.shape["q_len"] == 2**31


def test_merged_keys_may_be_overridden_and_keep_their_lines(load: Load) -> None:
    base = "- &base\n  kernel: config_kernels:KERNEL\n  shape: &shape\n    q_heads: 8\n"
    base += "    kv_heads: 2\n    q_len: 512\n    kv_len: 512\n"
    merged = "- <<: *base\n  shape: {<<: *shape, q_len: 1024}\n"
    lengths = [spec.problem.shape["q_len"] for spec in load(HEAD + base + merged).problems]
    assert lengths == [512, 1024]
    with pytest.raises(InputError, match=r"x\.yaml:8: problems\[0\]\.shape\.q_len: 0 is"):
        load(HEAD + (base + merged).replace("512", "0", 1))
    listed = "- <<: [{dtype: float32}, *base]\n  name: x\n"
    assert load(HEAD + base + listed).problems[1].problem.dtype == "float32"


def test_aliases_are_copies(load: Load) -> None:
    text = "a: &s {m: 1}\nb: *s\n"
    Path("x.yaml").write_text(text)
    value = strict_yaml.read("x.yaml").value
    value["a"]["m"] = 2
    assert value["b"] == {"m": 1}


def test_a_matrix_is_the_product_of_its_lists_under_readable_names(load: Load) -> None:
    text = UNSHAPED + "  name: llama\n  matrix:\n    q_heads+kv_heads: [[8, 2], 4]\n"
    problems = [s.problem for s in load(text + "    causal: [false, true]\n").problems]
    assert [p.name for p in problems] == [
        "llama q_heads=8 kv_heads=2 causal=false",
        "llama q_heads=8 kv_heads=2 causal=true",
        "llama q_heads=4 kv_heads=4 causal=false",
        "llama q_heads=4 kv_heads=4 causal=true",
    ]
    assert [(p.shape["kv_heads"], p.options["causal"]) for p in problems] == [
        (2, False), (2, True), (4, False), (4, True),
    ]  # fmt: skip


def test_a_matrix_reaches_dtypes_and_ambiguous_names(load: Load) -> None:
    text = GOOD + "  matrix: {dtype: [bfloat16, int8], shape.window: [3], options.window: [4]}\n"
    first, second = (s.problem for s in load(text).problems)
    assert (first.dtype, second.dtype) == ("bfloat16", "int8")
    assert (first.shape["window"], first.options["window"]) == (3, 4.0)
    assert second.name == "config_kernels:KERNEL dtype=int8 shape.window=3 options.window=4"


def test_a_long_matrix_value_is_named_by_its_position(load: Load) -> None:
    values = f"[[1], {list(range(1, 40))}]"
    names = [s.problem.name for s in load(matrix(f"lengths: {values}")).problems]
    assert names == ["config_kernels:KERNEL lengths=[1]", "config_kernels:KERNEL lengths=#1"]


def test_equal_problems_run_once_and_it_is_said(load: Load) -> None:
    loaded = load(GOOD + "  name: first\n" + ROW + "  options: {causal: false}\n  name: second\n")
    (spec,) = loaded.problems
    assert spec.problem.name == "first"
    assert loaded.duplicates == (
        "x.yaml:6: problems[1]: second: the same problem as problems[0] on line 3; it runs once",
    )


def test_a_problem_budget_replaces_the_files_entry_by_entry(load: Load) -> None:
    text = GOOD + "  budget: {seconds: 2.5}\n" + ROW.replace("512", "256")
    first, second = load("budget: {trials: 7, seconds: 60}\n" + text).problems
    assert (first.trials, first.seconds) == (7, 2.5)
    assert (second.trials, second.seconds) == (7, 60.0)
    (bare,) = load(GOOD).problems
    assert (bare.trials, bare.seconds) == (None, None)


def test_devices_come_from_the_file_or_the_caller_each_once(load: Load) -> None:
    def names(text: str, **options: Any) -> list[str]:
        return [spec.problem.device for spec in load(text, **options).problems]

    assert names("device: [v6e, v5e, v6e]\n" + DEVICELESS) == ["v6e", "v5e"]
    assert names(GOOD, devices=["tpu7x", "v4"]) == ["tpu7x", "v4"]
    assert names(DEVICELESS, devices=["v5p"]) == ["v5p"]
    with pytest.raises(InputError, match=r"^--device: unknown device 'v9' \(known: tpu7x, v4"):
        names(GOOD, devices=["v9"])
    with pytest.raises(InputError, match=r"x\.yaml:1: device: unknown device 'v9'"):
        names(GOOD.replace("v6e", "v9"), devices=["v5p"])


def test_auto_is_the_attached_tpu_or_says_there_is_none(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GOOD.replace("v6e", "auto")
    monkeypatch.setattr(devices, "attached", lambda: devices.get("v5e"))
    assert load(text).problems[0].problem.device == "v5e"
    monkeypatch.setattr(devices, "attached", lambda: None)
    with pytest.raises(InputError) as error:
        load(text)
    assert str(error.value) == (
        "x.yaml:1: device: 'auto' is not allowed here; no TPU is attached, so name one of "
        "v4, v5e, v5p, v6e, tpu7x"
    )
    with pytest.raises(InputError, match=r"^--device: 'auto' is not allowed here; no TPU"):
        load(GOOD, devices=["auto"])
    assert load(text, devices=["v6e"]).problems[0].problem.device == "v6e"


def test_the_attached_tpu_is_asked_of_jax_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(["noise\nkind:TPU v6 lite\n", "", "kind:TPU99\n"])
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=next(answers))
    )
    assert devices.attached() is devices.get("v6e")
    assert devices.attached() is None
    with pytest.raises(InputError, match=r"unknown kind of TPU 'TPU99'.* \(known: TPU v4, "):
        devices.attached()


def test_space_values_are_distinct_and_in_one_order(load: Load) -> None:
    (spec,) = load(
        space("block_q: [512, 128.0, 512, 1024], block_kv_compute: [128, null], fused: true")
    ).problems
    assert spec.space == {
        "block_q": (128, 512, 1024),
        "block_kv_compute": (None, 128),
        "fused": (True,),
    }
    assert spec.where == "x.yaml:5: problems[0].space"
    assert all(type(value) is int for value in spec.space["block_q"])


def test_every_shipped_config_loads_and_names_all_its_problems() -> None:
    for path in sorted(CONFIGS.glob("*.yaml")):
        loaded = config.load(path)
        assert not loaded.duplicates, f"{path} repeats a problem"
        assert all(spec.problem.name and spec.trials for spec in loaded.problems), path


PIECES = st.sampled_from(
    ["{", "}", "[", "]", ": ", "- ", "\n", "  ", "? ", "&a ", "*a", "!!str ", "|", ">", "'", '"',
     "%YAML 1.2\n", "---\n", "<<: *a", "#", "@", "\t", "\\U", "1e3", "0", "-", "~", "true", ".inf",
     "é", "\u2028", "\x85", "\ufeff", "\0", "problems", "shape", "space: ", "matrix: ", "+", "010"]
)  # fmt: skip
EDITS = st.lists(
    st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.text(max_size=4) | PIECES),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(start=st.sampled_from([GOOD, BOMB, "", space("block_q: &a [128]")]), edits=EDITS)
def test_garbage_is_a_config_or_one_line_of_error(
    load: Load, start: str, edits: list[tuple[int, int, str]]
) -> None:
    text = start
    for at, removed, inserted in edits:
        text = text[:at] + inserted + text[at + removed :]
    started = time.monotonic()
    message = None
    try:
        load(text.encode("utf-8", "surrogatepass"))
    except AutotuneError as error:
        message = str(error)
    assert message is None or re.fullmatch(r"x\.yaml:.*", message), "one line that names the file"
    assert message is None or len(message.splitlines()) == 1
    assert time.monotonic() - started < 10


NAMES = st.sampled_from(["q_len", "dtype", "causal", "block_q", "trials", "m", "+", "shape.q_len"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES = st.sampled_from(
    [("device",), ("budget",), ("problems",), ("problems", 0)]
    + [("problems", 0, key) for key in ("name", "kernel", "shape", "options", "dtype", "matrix")]
    + [("problems", 0, key) for key in ("space", "budget", "typo")]
    + [("problems", 0, "shape", "q_len"), ("problems", 0, "options", "lengths")]
    + [("problems", 0, "space", "block_q"), ("problems", 0, "matrix", "cap")]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=PLACES, junk=JUNK)
def test_any_value_anywhere_is_a_config_or_one_line_of_error(
    load: Load, place: tuple[Any, ...], junk: Any
) -> None:
    problem = {"kernel": TOY_NAME, "shape": {"q_heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 1}}
    value: Any = {
        "device": "v6e",
        "problems": [{**problem, "options": {}, "space": {}, "matrix": {}}],
    }
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    text = json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf")
    message = None
    try:
        load(text)
    except AutotuneError as error:
        message = str(error)
    assert message is None or re.fullmatch(r"x\.yaml:.*", message), "one line that names the file"
    assert message is None or len(message.splitlines()) == 1


def test_reading_configs_needs_no_jax_until_a_kernel_is_named() -> None:
    code = "import sys, autotune.config, autotune.search.space; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documented_example_is_what_its_page_says(load: Load) -> None:
    page = (CONFIGS.parent / "docs" / "configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    names = [spec.problem.name for spec in load(example, devices=["v6e"]).problems]
    assert names[:2] == ["ffn-up", "attention q_len=4096 kv_len=4096 q_heads=32 kv_heads=8"]
    assert len(names) == 5
    assert f"{strict_yaml.MAX_ENTRIES:,} entries" in page
    assert f"{space_module.MAX_POINTS:,}" in page
    with pytest.raises(InputError) as error:
        load(dim("-5"))
    assert str(error.value).partition("q_len: ")[2] in page
