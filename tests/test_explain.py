"""`autotune explain`: which candidate is meant, and what is said of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from boards import row, store
from test_cost_model import V6E, held_schedule, make_call, make_schedule, program, window

from autotune import cli, cost_model, page
from autotune.cli import explain as explain_module
from autotune.errors import InputError
from autotune.evidence import ScopeUse
from autotune.explain import bill, facts, scopes, subject, verdict
from autotune.kernels import base
from autotune.report.facts import options_on

CONFIG = """
device: v6e
problems:
  - name: small
    kernel: matmul
    shape: {m: 512, k: 512, n: 512}
  - name: masked
    kernel: splash
    shape: {batch: 1, q_heads: 1, kv_heads: 1, q_len: 4096, kv_len: 4096,
            head_dim_qk: 128, head_dim_v: 128}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


def run(*arguments: object) -> int:
    return int(cli.app([str(a) for a in arguments], standalone_mode=False) or 0)


def explained(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert run("explain", *arguments, "--format", "json") == 0
    out = capsys.readouterr().out
    document: dict[str, object] = json.loads(out)
    return document


MODEL = ("--until", "model", "--no-neighbours")


def test_pairs_change_the_default_where_nothing_is_stored(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = explained(
        capsys, f"{config}:small", "bm=256 bn=512", "--results", tmp_path / "r", *MODEL
    )
    assert isinstance(told["config"], dict)
    assert (told["config"]["bm"], told["config"]["bn"], told["config"]["bk"]) == (256, 512, 128)
    assert told["evidence"] == "model"
    roofline = told["roofline"]
    assert isinstance(roofline, dict)
    # 512 cubed in bf16, X read once a column of blocks and Y once a row of them: 2 m k n FLOPs.
    assert roofline["executed_flops"] == 2 * 512**3
    assert roofline["intensity"] == 2 * 512**3 / roofline["hbm_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["small", "best"], "config 'best': no best is stored, "),
        (["small", "bmm=256"], "unknown tunable of matmul 'bmm'"),
        (["small", "bm=100"], "bm: 100 is not allowed"),
        (["small", "bm"], "best, default, JSON, or name=value pairs"),
        (["small", "{bm"], "is no JSON"),
        (["smal"], "none answers; name one (known: small"),
        ([""], "several answer; name one (known: small"),
    ],
)
def test_a_candidate_that_cannot_be_meant_is_one_line(
    arguments: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = arguments
    place = f"{config}:{name}" if name else str(config)
    assert run("explain", place, *rest, *MODEL) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_what_is_explained_says_where_its_config_comes_from(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, results = f"{config}:small", ("--results", tmp_path / "r")

    def origin(*words: str) -> str:
        return str(explained(capsys, place, *words, *results, *MODEL)["config_origin"])

    assert origin().startswith("the kernel's default: no best is stored, ")
    assert origin().endswith(".parquet does not exist")
    assert origin("default") == "the kernel's default"
    assert origin("bm=256").startswith("bm as given, the rest the kernel's default: no best")
    full = json.dumps({"bm": 256, "bk": 512, "bn": 256, "buffers": 2, "grid_order": "mn",
                       "vmem_limit_bytes": None})  # fmt: skip
    assert origin(full) == "as given"
    assert run("explain", place, *results, *MODEL) == 0
    assert "the kernel's default: no best is stored, " in capsys.readouterr().out

    asked = subject.find(place, tmp_path / "r").problem
    board = store(tmp_path / "r", row(asked, {**json.loads(full), "bm": 128}, 1.0))
    assert (origin(), origin("best")) == ("the stored best", "the stored best")
    assert origin("bm=256") == "bm as given, the rest the stored best"
    store(tmp_path / "r", row(asked, json.loads(full), None, status="oom", reason="too large"))
    assert origin() == f"the kernel's default: no candidate of {board.path} survived"
    assert run("explain", place, "best", *results, *MODEL) == 2
    assert "survived; `autotune sweep` stores one, 'default'" in capsys.readouterr().err


def test_a_config_in_full_needs_no_default_to_start_from() -> None:
    asked = base.make_problem(
        base.load("measure_kernels:COPY"), device="v6e", shape={"m": 256, "n": 256}
    )
    about = subject.Subject(
        problem=asked, kernel=base.load("measure_kernels:COPY"), board=None, place=Path("none")
    )
    assert about.kernel.default is None
    chosen = subject.candidate(about, "rows=8 wrong=false")
    assert (chosen.candidate.config, chosen.origin) == ({"rows": 8, "wrong": False}, "as given")
    with pytest.raises(InputError, match="states no default config; give CONFIG in full"):
        subject.candidate(about, "rows=8")


def test_the_launch_is_no_part_of_what_grid_steps_cost() -> None:
    chip = replace(V6E, issued_step_s=0.0, scalar_cycles=0.0, launch_s=2e-6)
    whole = program(make_call(windows=(window(), window("output"))))
    latency = cost_model.compiled_latency(whole, [held_schedule("input window 0")], chip)
    times = {part.name: part.time_ms for part in verdict.parts(latency, chip)}
    assert times["launch"] == pytest.approx(0.002)
    assert times["grid steps and scalar code"] == pytest.approx(0, abs=1e-12)


def test_units_are_shares_of_the_cycles_that_the_matrix_units_make_longer() -> None:
    call = make_call()
    use = ScopeUse(
        bundles=100, mxu_rows=200 * V6E.mxu_rows_per_cycle * V6E.num_mxus, spill_loads=0,
        spill_stores=0, units={"MXU": 140, "VALU": 80}, loop_depth=1,
    )  # fmt: skip
    schedule = replace(make_schedule({"step": use}), capacity={"MXU": 2, "VALU": 4})
    (line,) = scopes.lines(program(call), [schedule], V6E, {})
    assert (line.mxu_share, line.units) == (1.0, {"MXU": 0.35, "VALU": 0.1})


def test_the_mask_of_the_lecture_is_counted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = "block_q=1024 block_kv=2048 block_kv_compute=1024 block_q_compute=512"
    told = explained(capsys, f"{config}:masked", blocks, "--results", tmp_path / "r", *MODEL)
    mask = told["mask"]
    assert isinstance(mask, dict)
    assert (mask["active"], mask["partial"], mask["patterns"]) == (6, 4, 2)
    assert mask["visible_pairs"] == 4096 * 4097 // 2


@pytest.mark.compiler
def test_a_compiled_candidate_shows_bill_scopes_timeline_and_neighbours(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, results = f"{config}:small", ("--results", tmp_path / "r", "--jobs", "2")
    told = explained(capsys, place, "bm=256 bn=256 bk=256", *results)
    vmem = told["vmem"]
    assert isinstance(vmem, list)
    windows = {line["allocation"]: line for line in vmem if "window" in line["allocation"]}
    assert len(windows) == 3
    for line in windows.values():
        assert line["model_bytes"] == line["compiled_bytes"], f"{line['allocation']} disagrees"
    scopes = told["scopes"]
    assert isinstance(scopes, list)
    runs = {line["scope"]: line["executions"] for line in scopes}
    assert runs["init"] == 4, "one a block of the output"
    assert sum(line["share"] for line in scopes) == pytest.approx(1)
    timeline = told["timeline"]
    assert isinstance(timeline, list)
    assert {s["part"].split(" step")[0] for s in timeline} == {"first", "steady", "last"}
    neighbours = told["neighbours"]
    assert isinstance(neighbours, list)
    assert {(n["tunable"], n["value"]) for n in neighbours} >= {("bm", 512), ("bk", 512)}
    ended = {(n["status"], n["evidence"]) for n in neighbours}
    assert ended == {("ok", "compiled")}
    assert run("explain", place, "bm=256 bn=256 bk=256", *results) == 0
    text = capsys.readouterr().out
    assert re.search(r"roofline: \d+ executed FLOP per byte .* predicted \d+ executed\n", text)
    for part in ("VMEM (limit", "one step away", "roofline:", "steady step", "the kernel's own"):
        assert part in text, f"the text lacks {part}"
    page = tmp_path / "why.html"
    assert run("explain", place, *results, "--format", "html", "--output", page) == 0
    assert "Plotly" in page.read_text()


@pytest.mark.compiler
def test_windows_behind_prefetched_tables_stand_beside_the_compiler_s_own(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--results", tmp_path / "r", "--no-neighbours")
    told = explained(capsys, f"{config}:masked", "block_q=256 block_kv=256", *more)
    vmem = told["vmem"]
    assert isinstance(vmem, list)
    both = [line for line in vmem if "window" in line["allocation"] and line["compiled_bytes"]]
    assert len(both) >= 4, "q, k, v and the output"
    for line in both:
        assert line["model_bytes"] == line["compiled_bytes"], f"{line['allocation']} disagrees"


def test_a_window_that_may_do_with_one_buffer_is_one_line_of_the_bill(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two parallel steps on two cores: the compiler gives each core one block, without a second.
    told = explained(
        capsys, f"{config}:small", "bm=256 bn=512 bk=512", "--device", "v5p", "--until", "model",
        "--results", tmp_path / "r", "--no-neighbours",
    )  # fmt: skip
    bill = {line["allocation"]: line["model_bytes"] for line in told["vmem"]}  # type: ignore[attr-defined]
    assert bill["input window 0"] == 2 * 256 * 512 * 2
    assert not any("more buffers" in name for name in bill)


@pytest.mark.compiler
def test_a_candidate_that_does_not_fit_is_explained_by_its_bill(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = tmp_path / "big.yaml"
    big.write_text(CONFIG.replace("m: 512, k: 512, n: 512", "m: 4096, k: 4096, n: 4096"))
    told = explained(
        capsys, f"{big}:small", "bm=4096 bn=4096 bk=4096", "--results", tmp_path / "r",
        "--no-neighbours",
    )  # fmt: skip
    assert told["status"] == "pruned"
    assert "of VMEM" in str(told["limits"])
    vmem = told["vmem"]
    assert isinstance(vmem, list)
    assert sum(line["model_bytes"] or 0 for line in vmem) > 128 * 2**20


def test_a_users_kernel_is_found_by_its_address_and_by_its_folders_name(tmp_path: Path) -> None:
    kernel = base.load("measure_kernels:COPY")
    asked = base.make_problem(kernel, device="v6e", shape={"m": 256, "n": 256})
    board = store(tmp_path, row(asked, {"rows": 8, "wrong": False}, 1.0))
    for name in ("measure_kernels:COPY", board.path.parent.name):
        found = subject.find(name, tmp_path)
        assert (found.problem, found.board) == (asked, board)
    with pytest.raises(InputError, match="none answers; name one"):
        subject.find("COPY", tmp_path)


def test_where_several_answer_the_message_says_what_narrows_and_names_few(tmp_path: Path) -> None:
    kernel = base.load("matmul")
    for device in ("v6e", "v5e"):
        for m in (256, 512, 1024):
            asked = base.make_problem(
                kernel, device=device, shape={"m": m, "k": 256, "n": 256}, name="up"
            )
            store(tmp_path, row(asked, {"bm": 128}, 1.0))
    narrowed = r"several answer; --device narrows it \(v5e, v6e\); name one"
    with pytest.raises(InputError, match=narrowed) as e:
        subject.find("up", tmp_path)
    assert str(e.value).count("bfloat16") == subject.LISTED
    assert str(e.value).endswith(", 3 more)")
    with pytest.raises(InputError, match=r"several answer; name one \(known: k256-m1024"):
        subject.find("up", tmp_path, device="v6e")
    with pytest.raises(InputError, match=r"none answers; name one \(known: up \(matmul on v"):
        subject.find("upp", tmp_path)
    with pytest.raises(InputError, match=r"none answers; name one \(known: none; `autotune sweep"):
        subject.find("up", tmp_path, device="v4")


def test_the_example_of_the_help_has_one_answer_in_a_clone() -> None:
    results = Path(__file__).parents[1] / "results"
    example = explain_module.EXAMPLE.split()
    name, pairs, device = example[2], example[3], example[example.index("--device") + 1]
    found = subject.find(name, results / device / "matmul", device=device)
    changed = subject.candidate(found, pairs).candidate.config
    assert (changed["bm"], changed["bn"]) == (1024, 512)
    assert changed["bk"] == subject.candidate(found, "best").candidate.config["bk"]


def test_a_window_that_the_compiler_did_without_says_why() -> None:
    call = make_call(windows=(window(), window(name="input 1"), window("output")))
    schedule = held_schedule("input window 1", "output window 0")
    lines = bill.lines(program(call), [schedule], V6E)
    assert {line.allocation: line.without for line in lines if line.without} == {
        "input window 0": bill.HELD
    }
    assert facts.without(lines) == [f"kernel: input window 0: {bill.HELD}"]
    merged = program(call, replace(call, name="other"))
    (both, other) = (
        [line for line in bill.lines(merged, [schedule], V6E) if line.call == name]
        for name in ("kernel", "other")
    )
    assert {line.without for line in other} == {bill.MERGED}
    assert bill.MERGED not in {line.without for line in both}
    assert not facts.without(bill.lines(program(call), [], V6E)), "nothing was compiled"


def test_the_page_sets_code_as_code_and_options_as_words() -> None:
    assert page.paragraph("`step` <b>") == "<p><code>step</code> &lt;b&gt;</p>"
    assert options_on({"causal": True, "mask": {"full": {}}, "window": 5}) == {
        "causal": "true", "window": "5",
    }  # fmt: skip
