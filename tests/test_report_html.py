"""The HTML pages: what they say, that they need no network, and that a real browser shows them."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import page
from autotune.leaderboard import Board, ranked
from autotune.page import Cell, Section
from autotune.report import figures, html
from autotune.row import Row

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def row(bm: int, bn: int, latency_ms: float | None, **more: object) -> Row:
    status = "ok" if latency_ms else "pruned"
    first = Row(
        problem_key="k", problem_name="up <b>", kernel="matmul", device="v6e",
        problem=json.dumps({"shape": {"m": 8}, "options": {}, "dtype": "bfloat16"}),
        config=json.dumps({"bm": bm, "bn": bn}), status=status,
        reason=None if latency_ms else "needs at least 40.00 MiB of VMEM",
        evidence="compiled" if latency_ms else "model",
        latency_ms=latency_ms, latency_model_ms=latency_ms, latency_compiled_ms=latency_ms,
        executed_flops=10**9, hbm_bytes=10**6, grid_steps=4, mfu=0.5, effective_tflops=460.0,
        vmem=json.dumps({"input window 0": 2**20, "scratch": 2**21}),
        vmem_compiled_bytes=3 * 2**20, vmem_limit_bytes=32 * 2**20, spill_loads=0, spill_stores=0,
    )  # fmt: skip
    return replace(first, **more)  # type: ignore[arg-type]


@pytest.fixture
def board() -> Board:
    rows = [
        row(128, 128, 10.0, is_default=True), row(256, 128, 2.0), row(256, 256, 1.0),
        row(128, 256, None),
    ]  # fmt: skip
    return Board(path=Path("b.parquet"), rows=tuple(ranked(rows)), flop_convention="2·m·k·n")


def written(boards: list[Board]) -> str:
    file = io.StringIO()
    html.write(boards, top=None, file=file)
    return file.getvalue()


def test_a_page_says_who_won_by_how_much_and_by_what_evidence(board: Board) -> None:
    text = written([board])
    for part in ("bm=256 bn=256", "10.00×", "compiled", "1 candidates did not survive", "2·m·k·n"):
        assert part in text, f"the page lacks {part}"
    assert "up &lt;b&gt;" in text, "a problem's name is text, not markup"
    assert "up <b>" not in text


def test_a_page_fetches_nothing(board: Board) -> None:
    text = written([board])
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)


def test_the_heat_map_marks_infeasible_cells_and_keeps_one_kind_of_evidence(board: Board) -> None:
    fig = figures.heat_map(board)
    assert fig is not None
    cells, crosses = fig.data[0], fig.data[1]
    assert list(crosses.x), list(crosses.y) == (["128"], ["256"])
    assert sum(z is not None for line in cells.z for z in line) == 3
    only_model = replace(board, rows=tuple(replace(r, rank=None) for r in board.rows))
    empty = figures.heat_map(only_model)
    assert empty is not None
    assert all(z is None for line in empty.data[0].z for z in line), "unranked rows are not shown"


def test_a_board_without_survivors_is_shown_with_its_reasons(board: Board) -> None:
    refused = tuple(row(bm, 128, None) for bm in (1, 2))
    text = written([Board(path=board.path, rows=refused)])
    assert "none survived" in text
    assert "needs at least 40.00 MiB of VMEM" in text


def test_predicted_is_held_against_measured_where_something_was_measured(board: Board) -> None:
    measured = [replace(r, latency_measured_ms=1.5) if r.rank else r for r in board.rows]
    fig = figures.predicted(replace(board, rows=tuple(measured)))
    assert fig is not None
    assert [trace.name for trace in fig.data] == ["model", "compiled", "equal"]
    assert fig.layout.xaxis.title.text == "measured, ms"


def test_the_funnel_counts_what_each_stage_let_through(board: Board) -> None:
    fig = figures.funnel(board)
    stages = dict(zip(fig.data[0].y, fig.data[0].x, strict=True))
    assert stages == {"candidates": 4, "legal and traced": 4, "fit by the model": 3, "compiled": 3}


def shown_by_browser(text: str, folder: Path) -> str:
    """The page's DOM after its scripts ran."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(text)
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip


@browser
def test_a_browser_draws_every_plot_and_fits_it_to_its_column(board: Board, tmp_path: Path) -> None:
    probe = """<script>window.addEventListener('load', function () { setTimeout(function () {
      var wide = Array.from(document.querySelectorAll('.js-plotly-plot .main-svg')).filter(
        function (svg) { return svg.getBoundingClientRect().right > window.innerWidth; });
      document.title = 'overflowing ' + wide.length; }, 500); });</script>"""
    dom = shown_by_browser(written([board]) + probe, tmp_path)
    assert dom.count("js-plotly-plot") >= 5, "one of the five plots was not drawn"
    assert "<title>overflowing 0</title>" in dom


@browser
def test_a_click_on_a_column_sorts_by_its_numbers(tmp_path: Path) -> None:
    rows = [["a", Cell(text="10 ms", order=10.0)], ["b", Cell(text="–")],
            ["c", Cell(text="9 ms", order=9.0)]]  # fmt: skip
    file = io.StringIO()
    page.write("t", "", [Section(title="s", body=page.table(("name", "time"), rows))], file)
    click = "<script>document.querySelectorAll('th')[1].click()</script>"
    dom = shown_by_browser(file.getvalue() + click, tmp_path)
    names = re.findall(r"<tr><td>(\w)</td>", dom)
    assert names == ["c", "a", "b"], "ascending, and what has no number last"
