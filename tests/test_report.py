"""Reports: what a table, a document and a backward pair say, and what they leave out."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from boards import store_matmul
from test_cli import call
from test_leaderboard import row

from autotune.leaderboard import Board, ranked
from autotune.report import document, facts, summary, table
from autotune.report.pairs import backward_pairs, shared
from autotune.report.units import milliseconds
from autotune.row import Row


def board(*rows: Row, convention: str | None = "2·m·k·n") -> Board:
    return Board(path=Path("b.parquet"), rows=tuple(ranked(rows)), flop_convention=convention)


def compiled(bm: int | None, latency_ms: float, **columns: object) -> Row:
    defaults: dict[str, object] = {
        "evidence": "compiled", "latency_compiled_ms": latency_ms, "flops": 2_000_000_000,
        "effective_tflops": 2 / latency_ms, "mfu": 2 / latency_ms / 1155, "spill_loads": 3,
        "spill_stores": 4, "vmem_compiled_bytes": 3 << 20, "vmem_limit_bytes": 32 << 20,
    }  # fmt: skip
    return row({"bm": bm, "bk": None}, **{**defaults, **columns})


def text(*boards: Board, top: int = 5) -> str:
    file = io.StringIO()
    table.write_markdown(boards, top=top, file=file)
    return file.getvalue()


def test_a_row_says_blocks_latency_with_evidence_mfu_vmem_spills_and_gain() -> None:
    default = compiled(128, 4.0, is_default=True)
    shown = text(board(compiled(512, 1.0), default))
    assert "| 1 | bm=512 | 1.000 ms compiled | 0.2% | 2.0 | 3.0 / 32 MiB | 7 | 4.00x |" in shown
    assert "| 2 * | bm=128 | 4.000 ms compiled |" in shown, "the default is marked"
    assert "FLOPs: 2·m·k·n" in shown


@pytest.mark.parametrize(
    ("low_ms", "high_ms", "said"),
    [(0.9, 1.25, "±25%"), (0.5, 1.1, "±50%"), (0.996, 1.004, "±0.4%"), (None, None, "")],
)
def test_a_latency_stands_with_its_band(
    low_ms: float | None, high_ms: float | None, said: str
) -> None:
    banded = compiled(512, 1.0, latency_low_ms=low_ms, latency_high_ms=high_ms)
    assert f"| {' '.join(filter(None, ('1.000 ms', said, 'compiled')))} |" in text(board(banded))


def test_a_default_that_was_not_timed_says_what_tuning_is_predicted_to_win() -> None:
    best = compiled(512, 1.0, evidence="measured", latency_measured_ms=1.1, samples_ms=[1.1])
    shown = text(board(best, compiled(128, 4.0, is_default=True)))
    assert (
        "default bm=128: not timed; 4.000 ms compiled, 4.00x the best's 1.000 ms compiled" in shown
    )
    untraced = row({"bm": 128}, latency_model_ms=4.0, is_default=True)
    assert "default bm=128: not timed; 4.000 ms model  \n" in text(board(best, untraced))


@pytest.mark.parametrize(
    ("timer", "said"),
    [("replay", "a recording"), ("host_clock", "the host's clock"), ("device_profile", None)],
)
def test_times_that_are_not_the_device_s_own_say_so(timer: str, said: str | None) -> None:
    timed = compiled(1, 1.0, evidence="measured", latency_measured_ms=1.0, timer=timer)
    shown = text(board(timed))
    assert said is None or said in shown
    assert ("measured: " in shown) == (said is not None)


def test_problems_of_one_shape_do_not_look_alike() -> None:
    def headed(options: dict[str, object], dtype: str = "bfloat16") -> str:
        problem = json.dumps({"shape": {"m": 8}, "options": options, "dtype": dtype})
        return table.title(board(compiled(1, 1.0, problem=problem)))

    assert headed({"grad": False, "epilogue": "none", "mask": {"full": {}}}).endswith("(m=8)")
    assert headed({"grad": True}).endswith("(m=8; grad=true)")
    assert headed({}, "float32").endswith("(m=8; float32)")
    long = headed({"window": {"sizes": [1000] * 50}})
    assert len(long) < 120
    assert long.endswith("…)")


LOCAL = {"local": {"left": 4096, "right": None}}
PACKED = {"documents": {"lengths": [2048, 1024]}}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"causal": {"offset": 0}}, "causal"), ({"causal": {"offset": -8}}, "causal offset=-8"),
        (LOCAL, "local 4096"), ({"local": {"left": 0, "right": 7}}, "local left=0 right=7"),
        ({"all": [{"causal": {"offset": 0}}, PACKED]}, "causal & documents 2048+1024"),
        ({"documents": {"lengths": [8] * 5}}, "5 documents"),
        (
            {"any": [{"all": [LOCAL, PACKED]}, LOCAL]},
            "(local 4096 & documents 2048+1024) or local 4096",
        ),
        ({"all": [{"mine": {}}, PACKED]}, None), ({"sparse": 3}, None), ([], None), (7, None),
        ({"causal": 3}, None), ({"all": 3}, None),
    ],
)  # fmt: skip
def test_a_mask_is_named_by_its_kinds(stored: object, words: str | None) -> None:
    assert facts.mask(stored) == words


def test_the_default_is_shown_wherever_it_ranks() -> None:
    rows = [compiled(n, float(n)) for n in range(1, 10)] + [compiled(99, 99.0, is_default=True)]
    shown = text(board(*rows), top=2)
    assert "| 10 * | bm=99 |" in shown
    assert "bm=3 " not in shown


def test_the_funnel_counts_every_candidate() -> None:
    shown = text(
        board(
            compiled(1, 1.0),
            row({"bm": 2}, status="pruned", reason="VMEM"),
            row({"bm": 3}, status="oom", reason="VMEM", evidence="compiled"),
            row({"bm": 4}, latency_model_ms=1.0),
        )
    )
    assert (
        "4 candidates: 1 pruned (model or legality), 1 out of memory by the compiler, "
        "1 beyond the budget, 1 ranked"
    ) in shown


def test_a_board_without_a_winner_says_why() -> None:
    shown = text(board(row({"bm": 2}, status="oom", reason="VMEM: used 70M of 64M")))
    assert "no candidate survived; oom: VMEM: used 70M of 64M" in shown


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"mfu": 0.0005}, True), ({"mfu": None}, True), ({"mfu": 0.02}, False),
        ({"mfu": 0.0005, "hbm_bytes": None}, False), ({"mfu": 0.0005, "device": "v9"}, False),
    ],
)  # fmt: skip
def test_a_kernel_that_computes_next_to_nothing_is_told_by_its_bandwidth(
    columns: dict[str, object], told: bool
) -> None:
    best = compiled(1, 1.0, **{"device": "v5e", "hbm_bytes": 410_000_000, **columns})
    line = "the best moves 410 GB/s, 50% of the HBM's bandwidth"
    assert (line in text(board(best))) == told


def test_a_default_that_failed_is_named_with_its_reason() -> None:
    failed = row({"bm": 9}, status="oom", reason="VMEM: too much", is_default=True)
    shown = text(board(compiled(1, 1.0), failed))
    assert "default bm=9: VMEM: too much" in shown
    assert "| – |" in shown, "no gain without a default to compare with"


def test_dq_and_dkv_of_one_problem_stand_together() -> None:
    dq = board(compiled(1, 2.0, kernel="flash_dq", problem_name="attention"))
    dkv = board(compiled(1, 3.0, kernel="flash_dkv", problem_name="attention"))
    other = board(compiled(1, 3.0, kernel="flash_dkv", device="v6e"))
    assert len(backward_pairs([dq, dkv, other])) == 1
    assert (
        "**attention: dq + dkv on tpu7x**: 2.000 ms + 3.000 ms = 5.000 ms compiled, "
        "0.8 TFLOP/s, MFU 0.1%"
    ) in text(dq, dkv, other)
    file = io.StringIO()
    document.write_json([dq, dkv, other], top=None, file=file)
    (pair,) = json.loads(file.getvalue())["backward_pairs"]
    assert pair["latency_ms"] == 5.0
    assert pair["flops"] == 4_000_000_000
    assert pair["mfu"] == pytest.approx(0.8 / 1155)


@pytest.mark.parametrize(
    ("dq", "dkv", "name"),
    [
        ("training, flash dq", "training, flash dkv", "training, flash"),
        ("back dq q_len=8", "back dkv q_len=8", "back q_len=8"),
        ("a", "b", "a + b"),
        ("", "b", "b"),
        ("m=8 k=8", "m=8 k=8", "m=8 k=8"),
    ],
)
def test_a_pair_is_named_by_what_its_halves_share(dq: str, dkv: str, name: str) -> None:
    assert shared(dq, dkv) == name


def test_a_pair_of_unlike_evidence_is_not_added_up() -> None:
    dq = board(compiled(1, 2.0, kernel="flash_dq"))
    dkv = board(row({"bm": 1}, kernel="flash_dkv", latency_model_ms=1.0))
    assert backward_pairs([dq, dkv]) == []


def test_dq_and_dkv_of_two_problems_are_no_pair() -> None:
    dq, dkv = (
        board(compiled(1, 2.0, kernel=f"flash_{half}", problem=f'{{"shape": {{"m": {m}}}}}'))
        for half, m in (("dq", 8), ("dkv", 16))
    )
    assert backward_pairs([dq, dkv]) == []


def test_json_says_of_a_problem_whether_it_is_stale() -> None:
    old, new = (
        compiled(1, 1.0, jax_version=version, libtpu_version=None, kernel_fingerprint=None)
        for version in ("0.0.1", None)
    )
    file = io.StringIO()
    document.write_json([board(old), board(new)], top=None, file=file)
    first, second = (p["stale"] for p in json.loads(file.getvalue())["problems"])
    assert "jax 0.0.1 → " in first
    assert second is None


@pytest.mark.parametrize(("used_bytes", "told"), [(33_628_160, True), (32 << 20, False)])
def test_vmem_over_the_limit_says_what_does_not_count(used_bytes: int, told: bool) -> None:
    shown = text(board(compiled(1, 1.0), compiled(2, 2.0, vmem_compiled_bytes=used_bytes)))
    assert ("VMEM over the limit: the compiler's internal scratch does not" in shown) == told


def test_what_the_compiler_allocates_comes_before_the_model_s_sum() -> None:
    row = compiled(1, 1.0, vmem_compiled_bytes=0, vmem_model_bytes=1 << 20)
    assert table.vmem_bytes(row) == 0
    assert table.vmem_bytes(replace(row, vmem_compiled_bytes=None)) == 1 << 20


def test_one_candidate_is_one() -> None:
    assert "1 candidate: 1 ranked  \n" in text(board(compiled(1, 1.0)))


def test_json_is_one_document_with_objects_and_no_nan() -> None:
    file = io.StringIO()
    document.write_json([board(compiled(1, 1.0))], top=None, file=file)
    (problem,) = json.loads(file.getvalue())["problems"]
    assert problem["rows"][0]["config"] == {"bk": None, "bm": 1}
    assert problem["best"]["latency_ms"] == 1.0
    assert problem["gain_over_default"] is None


def test_names_with_brackets_are_printed_as_they_are() -> None:
    file = io.StringIO()
    named = compiled(1, 1.0, problem_name="up [/] x [bold]y[/bold] :smile:")
    table.write_terminal([board(named)], top=5, file=file)
    assert "up [/] x [bold]y[/bold] :smile:" in file.getvalue()


def test_what_a_terminal_would_obey_is_nowhere_in_a_report() -> None:
    config = r'{"bm": "\u001b[31mred\u0007"}'
    problem = r'{"shape": {"m": 8}, "options": {"mode": "\u001b[2J"}, "dtype": 7}'
    about = {"problem": problem, "problem_name": "up\x1b[0m", "kernel": "mat\x1b[1mmul"}
    best = replace(compiled(1, 1.0, jax_version="0\x1b[5m", **about), config=config)
    failed = row({"bm": 2}, status="failed", reason="line one\x1b[31m\nline two\r", **about)
    assert failed.reason == "line one [31m line two"
    file = io.StringIO()
    odd = [board(best, failed, convention="2\x1b[7mmkn")]
    table.write_terminal(odd, top=5, file=file)
    summary.write_terminal(odd, many=True, file=file)
    assert "bm= [31mred" in file.getvalue()
    assert not [c for c in file.getvalue() if not c.isprintable() and c != "\n"]


def test_a_name_is_one_line_wherever_it_stands_and_no_markup_in_markdown() -> None:
    named = compiled(1, 1.0, problem_name="up\nimport os | <b>x</b>\x1b[31m")
    assert named.problem_name == "up import os | <b>x</b> [31m"
    failed = row({"bm": 2}, status="failed", reason="a | b\n<script>")
    heading, *lines = text(board(named, failed)).splitlines()
    assert heading == "### up import os \\| &lt;b>x&lt;/b> [31m: matmul on tpu7x (k=1)"
    assert "1 failed: a \\| b &lt;script>  " in lines


@pytest.mark.parametrize(
    ("value_ms", "shown"),
    [(203.3999, "203.4 ms"), (1.0, "1.000 ms"), (0.0014031, "0.001403 ms"), (12345.6, "12346 ms")],
)
def test_latencies_have_four_significant_digits(value_ms: float, shown: str) -> None:
    assert milliseconds(value_ms) == shown


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, now the current one, in which `r` has a leaderboard."""
    monkeypatch.chdir(tmp_path)
    store_matmul(Path("r"), 512, 512, 512, about={"name": "up"})
    return Path("r")


def test_an_output_that_cannot_be_written_in_full_stays_as_it_was(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Path("kept.html")
    kept.write_text("before")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most[1]))
    try:
        status, _, err = call(capsys, "report", "r", "--format", "html", "--output", str(kept))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert (status, err) == (2, "autotune: --output kept.html cannot be written: File too large\n")
    assert kept.read_text() == "before"
    assert sorted(path.name for path in Path().iterdir()) == ["kept.html", "r"]


@pytest.mark.parametrize("command", [["report"], ["export", "json"]])
def test_a_leaderboard_is_not_written_over_by_what_is_said_of_it(
    command: list[str], results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (board,) = results.rglob("*.parquet")
    link, before = Path("link"), board.read_bytes()
    link.symlink_to(board)
    for output in (board, link):
        status, out, err = call(capsys, *command, str(board), "--output", str(output))
        assert (status, out) == (2, "")
        assert err == f"autotune: --output {output} is not allowed; that is a leaderboard\n"
    assert board.read_bytes() == before


def test_an_output_is_what_a_link_leads_to_a_pipe_or_a_device(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, pipe = Path("link"), Path("pipe")
    link.symlink_to("page.csv")
    asked = ("report", "r", "--format", "csv", "--output")
    assert call(capsys, *asked, "link") == (0, "", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert call(capsys, *asked, "link") == (0, "", "autotune: wrote link\n")
    assert link.is_symlink()
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert call(capsys, *asked, "pipe") == (0, "", "")
    reader.join()
    assert read == [Path("page.csv").read_text()]
    assert call(capsys, *asked, os.devnull) == (0, "", "")
    assert not Path(os.devnull).is_file()


def test_a_pipe_is_no_leaderboard(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(results / "never.parquet")
    Path(results / "gone.parquet").symlink_to("nowhere")
    status, out, err = call(capsys, "report", "r", "--format", "json")
    assert (status, len(json.loads(out)["problems"])) == (0, 1)
    assert err == ("autotune: skipped r/gone.parquet: cannot be read (No such file or directory)\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [(["report", ""], "report"), (["best", "matmul", "--results="], "--results="),
     (["gate", "r", "--device", ""], "--device")],
)  # fmt: skip
def test_an_empty_word_is_not_the_current_folder(
    words: list[str], named: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "")
    assert err == f"autotune: {named} '' is not allowed; leave it out, or say what\n"
