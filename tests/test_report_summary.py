"""Many leaderboards on a screen: a line each, told apart, and no wider than the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_leaderboard import row
from test_report import board, compiled

from autotune import cli, leaderboard, stale
from autotune.cli.report import Format, _natural, write
from autotune.leaderboard import Board
from autotune.report import reasons, summary, table
from autotune.report.naming import names
from autotune.row import STATUSES, Row


def problem(name: str | None, latency_ms: float = 1.0, **sizes: int) -> Board:
    about = json.dumps({"shape": {"m": 8, "k": 8} | sizes, "options": {}, "dtype": "bfloat16"})
    one = {"problem": about, "problem_name": name, "problem_key": f"{name}-{sizes}"}
    return board(
        compiled(512, latency_ms, **one),
        compiled(128, 4 * latency_ms, is_default=True, **one),
        row({"bm": 1}, status="pruned", reason="VMEM", **one),
        row({"bm": 2}, status="unsupported", reason="no", evidence="compiled", **one),
        row({"bm": 3}, status="crashed", reason="abort", **one),
    )


def shown(boards: list[Board], *, columns: int, many: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(table, "PIPED", columns)
    file = io.StringIO()
    summary.write_terminal(boards, many=many, file=file)
    return file.getvalue()


def test_a_line_says_the_winner_its_figures_and_how_the_others_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = shown([problem("up"), problem("down")], columns=140, many=False, monkeypatch=monkeypatch)
    heading, names, up, down = told.splitlines()
    assert heading == "matmul on tpu7x, compiled"
    assert names.split()[:4] == ["latency", "vs", "default", "MFU"]
    assert names.endswith("spills  candidates  ranked  pruned  rejected  failed  winner")
    assert " ".join(up.split()) == "up 1.000 ms 4.00x 0.2% 2.0 3.0 / 32 7 5 2 1 1 1 bm=512"
    assert down.startswith("down  1.000 ms")


def test_every_status_is_in_one_column() -> None:
    fallen = [
        row({"bm": i}, status=status, reason="no")
        for i, status in enumerate(status for status in STATUSES if status != "ok")
    ]
    said = summary.ended(board(compiled(99, 1.0), *fallen))
    assert dict(zip(summary.COUNTS, said, strict=True)) == {
        "candidates": 8, "ranked": 1, "pruned": 1, "rejected": 2, "failed": 4,
    }  # fmt: skip


def test_where_the_counts_have_no_room_they_stand_beside_the_winner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = shown([problem("up")], columns=80, many=False, monkeypatch=monkeypatch)
    assert "bm=512  5 candidates: 2 ranked, 1 pruned, 1 rejected, 1 failed" in told


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    boards = [problem("a-name-of-some-length", m=4096), problem("another", 1234.5)]
    monkeypatch.setattr(stale, "reason", lambda row: "stale: " + "jax 0.10.2 → 0.12.0.1, " * 8)
    told = shown(boards, columns=columns, many=True, monkeypatch=monkeypatch)
    config = json.dumps({f"block_{n}_compute": 1024 for n in ("q", "kv", "qm", "kvm")})
    best = replace(compiled(1, 1.0, latency_low_ms=0.8, latency_high_ms=1.18), config=config)
    details = io.StringIO()
    table.write_terminal([board(best)], top=5, file=details)
    for line in [*told.splitlines(), *details.getvalue().splitlines()]:
        assert len(line) <= columns
    together = "block_q_compute=1024 block_kv_compute=1024"
    assert together in details.getvalue(), "blocks are not cut into pieces"


def test_problems_of_one_name_are_told_apart_by_what_differs() -> None:
    sizes = [(q, b) for q in (512, 1024) for b in (1, 2)]
    boards = [problem("fwd", q_len=q, kv_len=q, batch=b) for q, b in sizes]
    assert names([*boards, problem("once", q_len=7), problem(None)]) == [
        "fwd q_len=512 batch=1", "fwd q_len=512 batch=2",
        "fwd q_len=1024 batch=1", "fwd q_len=1024 batch=2",
        "once", "m=8 k=8",
    ]  # fmt: skip


def test_names_that_a_matrix_made_say_no_axis_twice_and_none_that_goes_with_another() -> None:
    boards = [problem(f"fwd q_len={q} kv_len={q} m=8", q_len=q, kv_len=q) for q in (512, 1024)]
    assert names(boards) == ["fwd q_len=512", "fwd q_len=1024"]
    assert names(boards[:1]) == ["fwd q_len=512 kv_len=512 m=8"]
    assert names([problem("a=b up=1")]) == ["a=b up=1"]


def test_a_mask_that_a_matrix_numbers_is_named_by_its_kind() -> None:
    def packed(name: str, mask: object) -> Board:
        about = json.dumps({"shape": {"m": 8}, "options": {"mask": mask}, "dtype": "bfloat16"})
        return board(compiled(1, 1.0, problem=about, problem_name=name, problem_key=str(mask)))

    causal = packed("16K mask={causal:{}}", {"causal": {"offset": 0}})
    two = packed("16K mask=#1", {"documents": {"lengths": [4, 4]}})
    assert names([causal, two]) == ["16K mask=causal", "16K mask=documents 4+4"]
    assert names([two]) == ["16K mask=documents 4+4"]
    many, uneven = (
        packed(f"16K mask=#{n}", {"documents": {"lengths": lengths}})
        for n, lengths in ((2, [2] * 8), (3, [1, 3] * 4))
    )
    assert names([two, many]) == ["16K mask=documents 4+4", "16K mask=8 documents"]
    assert names([many, uneven]) == ["16K mask=#2", "16K mask=#3"], "words tell them not"


def test_problems_without_names_that_words_do_not_tell_apart_have_their_keys() -> None:
    def unnamed(key: str, lengths: list[int]) -> Board:
        options = {"mask": {"documents": {"lengths": lengths}}}
        about = json.dumps({"shape": {"m": 8}, "options": options, "dtype": "bfloat16"})
        return board(compiled(1, 1.0, problem=about, problem_name=None, problem_key=key))

    told = names([unnamed("m8-aa", [1] * 8), unnamed("m8-bb", [2] * 4 + [0] * 4)])
    assert told == ["m=8; mask=8 documents aa", "m=8; mask=8 documents bb"]


def test_problems_stand_in_the_order_of_their_sizes() -> None:
    keys = ["k/len1024-b2", "k/len512-b10", "k/len512-b9", "j/x"]
    assert sorted(keys, key=_natural) == ["j/x", "k/len512-b9", "k/len512-b10", "k/len1024-b2"]


def test_a_problem_without_a_winner_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = board(row({"bm": 2}, status="oom", reason="VMEM: used 70M of 64M"))
    told = shown([lost], columns=140, many=False, monkeypatch=monkeypatch)
    assert told.startswith("matmul on tpu7x, no candidate survived\n")
    assert "oom: VMEM: used 70M of 64M" in told


@pytest.mark.parametrize("form", [Format.table, Format.markdown])
def test_many_problems_are_a_line_each_and_their_candidates_are_asked_for(
    form: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(number: int, top: int | None) -> int:
        write([problem(f"p{i}") for i in range(number)], form, top=top, output=None)
        return len(capsys.readouterr().out.splitlines())

    assert lines(summary.FEW + 1, None) < 2 * summary.FEW
    assert lines(summary.FEW + 1, 5) > 8 * summary.FEW
    assert lines(summary.FEW, None) > 8 * summary.FEW


def test_many_problems_end_with_totals_a_kernel_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = [board(compiled(1, 1.0), compiled(2, gain, is_default=True)) for gain in (2.0, 8.0)]
    lost = board(row({"bm": 2}, status="oom", reason="VMEM"))
    told = shown([*gains, lost], columns=80, many=True, monkeypatch=monkeypatch)
    ranked, unranked = [x for x in told.splitlines() if x.startswith("matmul on tpu7x, ")][-2:]
    assert ranked.split()[4:] == ["2", "4.00x", "2.00x", "8.00x", "0.2%"]
    assert unranked.split()[-5:] == ["1", "–", "–", "–", "–"]


@pytest.mark.parametrize("columns", [80, 140])
def test_many_problems_say_why_candidates_fell_and_what_is_counted(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = shown(
        [problem("up"), problem("down")], columns=columns, many=True, monkeypatch=monkeypatch
    )
    ended = "2 pruned: VMEM; 2 unsupported: no; 2 crashed: abort"
    assert told.split("\n\n")[0].splitlines()[-1] == f"  {ended}"
    assert told.count("FLOPs of matmul: 2·m·k·n\n") == 1, "a line a kernel"
    file = io.StringIO()
    summary.write_markdown([problem("up"), problem("down")], file=file)
    assert f"matmul on tpu7x, compiled: {ended}  \n" in file.getvalue()
    assert "FLOPs of matmul: 2·m·k·n  \n" in file.getvalue()


def test_a_dash_under_vs_default_has_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(*rows: Row) -> Board:
        return board(*(replace(r, problem_name=f"p{len(rows)}") for r in rows))

    fallen = row({"bm": 1}, status="oom", reason="VMEM", evidence="compiled", is_default=True)
    boards = [named(compiled(1, 1.0)), named(compiled(1, 1.0)), named(compiled(1, 1.0), fallen)]
    told = shown(boards, columns=140, many=True, monkeypatch=monkeypatch)
    assert "  2 problems: no default: the kernel states none, or its row is not here\n" in told
    assert "  p2: default bm=1: VMEM\n" in told
    file = io.StringIO()
    table.write_markdown(boards[:1], top=5, file=file)
    assert "no default: the kernel states none, or its row is not here  \n" in file.getvalue()


def test_reasons_beyond_the_three_most_common_kinds_are_counted() -> None:
    words = ("a", "a", "b", "b", "c", "c", "d", "e", "e 1", "e 2")
    fallen = [
        row({"bm": i}, status="pruned", reason=f"{word} 7") for i, word in enumerate(words)
    ]  # fmt: skip
    assert reasons.common([board(compiled(99, 1.0), *fallen)]) == [
        "2 pruned: a 7", "2 pruned: b 7", "2 pruned: c 7", "4 for 3 other reasons",
    ]  # fmt: skip


def test_stale_problems_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    old = [compiled(1, 1.0, jax_version="0.0.1", problem_name=f"p{n}") for n in range(2)]
    boards = [board(r) for r in old]
    told = shown(boards, columns=140, many=True, monkeypatch=monkeypatch)
    assert "2 of 2 problems are stale: jax 0.0.1 → " in told


def test_backward_passes_of_many_problems_are_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dq = board(compiled(1, 2.0, kernel="flash_dq", problem_name="back"))
    dkv = board(compiled(1, 3.0, kernel="flash_dkv", problem_name="back"))
    others = [problem(f"p{i}") for i in range(summary.FEW)]
    write([dq, dkv, *others], Format.table, top=None, output=None)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "5.000 ms" in x]
    assert line.split()[:8] == ["back", "tpu7x", "2.000", "ms", "3.000", "ms", "5.000", "ms"]


def test_a_report_of_one_device_leaves_out_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in ("v6e", "v5e"):
        path = leaderboard.path_of(tmp_path, device, "matmul", "k")
        row = compiled(1, 1.0, device=device, problem='{"shape": {"m": 8}}')
        leaderboard.merge(path, [row], flop_convention="2·m·k·n")

    def devices(*arguments: str) -> set[str]:
        cli.app(["report", str(tmp_path), "--format", "json", *arguments], standalone_mode=False)
        return {p["device"] for p in json.loads(capsys.readouterr().out)["problems"]}

    assert devices() == {"v5e", "v6e"}
    assert devices("--device", "v6e") == {"v6e"}
    assert devices("--device", "TPU v6 lite") == {"v6e"}, "JAX's name for it will do"
