"""The HTML pages: what they say, that they need no network, and that a real browser shows them."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import plotly.graph_objects as go
import pytest

from autotune import page
from autotune.device import DEVICES
from autotune.leaderboard import Board, ranked
from autotune.page import Cell, Section
from autotune.report import figures, heat_map, html
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
    for part in ("bm=256 bn=256", "10.00×", "compiled", "1 candidate did not survive", "2·m·k·n"):
        assert part in text, f"the page lacks {part}"
    assert '"3.0">3.0</td><td class=number data-order="32.0">32<' in text, "the compiler's VMEM"
    assert "up &lt;b&gt;" in text, "a problem's name is text, not markup"
    assert "up <b>" not in text


def test_a_page_fetches_nothing(board: Board) -> None:
    text = written([board])
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)


def test_the_heat_map_marks_infeasible_cells_and_keeps_one_kind_of_evidence(board: Board) -> None:
    (fig,) = heat_map.heat_maps(board)
    cells, crosses, _ = fig.data
    assert (crosses["x"], crosses["y"]) == (["128"], ["256"])
    assert sum(z is not None for line in cells["z"] for z in line) == 3
    only_model = replace(board, rows=tuple(replace(r, rank=None) for r in board.rows))
    (empty,) = heat_map.heat_maps(only_model)
    assert all(z is None for line in empty.data[0]["z"] for z in line), "unranked is not shown"


def test_a_cell_with_a_candidate_that_fits_is_not_infeasible(board: Board) -> None:
    """The winner by the model may be beyond the budget where a neighbour of its cell is refused."""
    untried = replace(
        row(128, 256, None), status="ok", reason=None, latency_model_ms=0.3056,
        config='{"bm": 128, "bn": 256, "bk": 1}',
    )  # fmt: skip
    shown = replace(board, rows=tuple(ranked([*board.rows, untried])))
    of_blocks = next(fig for fig in heat_map.heat_maps(shown) if fig.name == "bm × bn")
    cells, crosses, rings = of_blocks.data
    assert crosses["x"] == []
    assert (rings["x"], rings["y"]) == (["128"], ["256"])
    assert rings["text"] == ["not evaluated; 0.3056 ms model"]
    assert cells["z"][1][0] is None, "a prediction of the model has no colour among compiled ones"


def test_a_cell_has_the_least_latency_of_its_ranked_candidates(board: Board) -> None:
    slower = row(256, 256, 100.0, config='{"bm": 256, "bn": 256, "bk": 1}')
    shown = replace(board, rows=tuple(ranked([*board.rows, slower])))
    of_blocks = next(fig for fig in heat_map.heat_maps(shown) if fig.name == "bm × bn")
    assert of_blocks.data[0]["z"] == [[1.0, 0.30103], [None, 0.0]], "log10 of ms"


def test_every_pair_of_tunables_has_a_heat_map_the_best_known_first(board: Board) -> None:
    rows = [
        replace(r, config=r.config[:-1] + f', "bk": {n % 2}}}') for n, r in enumerate(board.rows)
    ]
    maps = heat_map.heat_maps(replace(board, rows=tuple(rows)))
    known = [sum(z is not None for line in fig.data[0]["z"] for z in line) for fig in maps]
    assert {fig.name for fig in maps} == {"bm × bn", "bk × bm", "bk × bn"}
    assert known == sorted(known, reverse=True)


def test_plotly_knows_every_property_of_every_figure(board: Board) -> None:
    measured = [replace(r, latency_measured_ms=1.5) if r.rank else r for r in board.rows]
    for rows in (board.rows, tuple(measured)):
        shown = replace(board, rows=rows)
        drawn = [fig for _, figs in html._drawn(shown) for fig in figs]
        assert len(drawn) == 5
        for fig in drawn:
            go.Figure(data=fig.data, layout=fig.layout)  # raises for a property there is not


def test_a_board_without_survivors_is_shown_with_its_reasons(board: Board) -> None:
    refused = tuple(row(bm, 128, None) for bm in (1, 2))
    text = written([Board(path=board.path, rows=refused)])
    assert "none survived" in text
    assert "needs at least 40.00 MiB of VMEM" in text


def test_predicted_is_held_against_measured_where_something_was_measured(board: Board) -> None:
    measured = [replace(r, latency_measured_ms=1.5) if r.rank else r for r in board.rows]
    fig = figures.predicted(replace(board, rows=tuple(measured)))
    assert fig is not None
    assert [trace["name"] for trace in fig.data] == ["model", "compiled", "equal"]
    assert fig.layout["xaxis"]["title"]["text"] == "measured, ms"


def test_the_funnel_counts_what_each_stage_let_through(board: Board) -> None:
    fig = figures.funnel(board)
    stages = dict(zip(fig.data[0]["y"], fig.data[0]["x"], strict=True))
    assert stages == {"candidates": 4, "legal and traced": 4, "fit by the model": 3, "compiled": 3}
    refused = [row(512, 512, None, status=s, evidence="compiled") for s in ("oom", "unsupported")]
    fig = figures.funnel(replace(board, rows=(*board.rows, *refused)))
    stages = dict(zip(fig.data[0]["y"], fig.data[0]["x"], strict=True))
    assert (stages["compiled"], stages["accepted by the compiler"]) == (5, 3)


def test_a_roofline_says_that_its_points_count_executed_flops(board: Board) -> None:
    fig = figures.roofline(board)
    assert fig is not None
    titles = [fig.layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis")]
    assert titles == ["executed FLOP per byte of HBM traffic", "executed TFLOP/s"]
    best = fig.data[2]
    assert best["name"] == "best (compiled)"
    assert (best["x"], best["y"]) == ([1000.0], [1.0]), "10⁹ FLOPs over 10⁶ bytes in 1 ms"


def test_the_roof_is_the_device_s_bandwidth_up_to_its_peak(board: Board) -> None:
    fig = figures.roofline(board)
    assert fig is not None
    (low, ridge, high), heights = fig.data[0]["x"], fig.data[0]["y"]
    bytes_per_s = DEVICES["v6e"].hbm_bytes_per_s
    assert heights == pytest.approx([low * bytes_per_s / 1e12, 920.0, 920.0])
    assert ridge == pytest.approx(920e12 / bytes_per_s), "460 TFLOP/s are an MFU of 0.5"
    assert low < ridge < high


def test_the_winner_s_vmem_stands_under_its_limit(board: Board) -> None:
    fig = figures.vmem(board)
    assert fig is not None
    assert {bar["name"]: bar["x"] for bar in fig.data} == {
        "scratch": [2.0],
        "input window 0": [1.0],
    }
    (line,) = fig.layout["shapes"]
    assert (line["x0"], line["x1"]) == (32.0, 32.0)


def many(board: Board, number: int = 14) -> list[Board]:
    """Boards of `number` problems; the first on a device of its own, with 30 ranked rows."""
    boards = []
    for i in range(number):
        device = "v6e" if i else "v5p"
        rows = [
            replace(r, problem_key=f"k{i}", problem_name=f"p{i}", device=device) for r in board.rows
        ]
        boards.append(replace(board, rows=tuple(rows)))
    rows = [replace(boards[0].rows[0], config=f'{{"bm": {n}}}', latency_compiled_ms=n + 1.0)
            for n in range(30)]  # fmt: skip
    return [replace(boards[0], rows=tuple(ranked(rows))), *boards[1:]]


def test_a_page_of_many_problems_is_small_and_packs_what_is_not_open(board: Board) -> None:
    few, lots = written(many(board)), written(many(board, 114))
    assert len(few) < 3_000_000, "Plotly is packed"
    assert (len(lots) - len(few)) / 100 < 8_000, "bytes a problem more"
    packed = re.findall(r'class="packed">([^<]+)<', few)
    assert len(packed) == 14
    body = gzip.decompress(base64.b64decode(packed[1])).decode()
    assert "1 candidate did not survive" in body
    assert "1 candidate did not survive" not in few


def test_what_is_out_of_sight_is_hidden_as_it_is_written_and_shown_where_no_script_runs(
    board: Board,
) -> None:
    text = written(many(board, 2 * page.CARDS))
    assert text.count('<details class="card" hidden') == page.CARDS
    assert text.count("<tr hidden data-at") == 2 * page.CARDS - 2 * html.LIMIT
    assert "<noscript><style>tr[hidden] { display: table-row !important; }" in text
    few = written([board])
    assert '<details class="card" open' in few
    assert "<tr hidden" not in few


def shown_by_browser(text: str, folder: Path) -> str:
    """The page's DOM after its scripts ran; they must have no errors."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(text)
    shown = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", "--dump-dom",
            "--enable-logging=stderr", path.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    said = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not said, f"the browser's console has {said}"
    return shown.stdout


def after(seconds: float, script: str) -> str:
    """`script` in the page, once the page had time; what it returns is the page's title."""
    return (
        "<script>var wait = ms => new Promise(go => setTimeout(go, ms));"
        f"setTimeout(async function () {{ var told = await (async function () {{ {script} }})();"
        f"document.title = JSON.stringify(told); }}, {seconds * 1000});</script>"
    )


def told(dom: str) -> object:
    """What `after` put into the title."""
    return json.loads(unescape(re.findall(r"<title>(.*?)</title>", dom)[0]))


@browser
def test_a_browser_draws_every_plot_and_fits_it_to_its_column(board: Board, tmp_path: Path) -> None:
    probe = """<script>window.addEventListener('load', function () { setTimeout(function () {
      var wide = Array.from(document.querySelectorAll('.js-plotly-plot .main-svg')).filter(
        function (svg) { return svg.getBoundingClientRect().right > window.innerWidth; });
      document.title = 'overflowing ' + wide.length; }, 500); });</script>"""
    dom = shown_by_browser(written([board]) + probe, tmp_path)
    ticks = re.findall(r'class="[xy]tick"><text[^>]*>([^<]*)<', dom)
    assert {"500", "1,000"} <= set(ticks), "a logarithmic axis has its values in full"
    assert dom.count("js-plotly-plot") >= 5, "one of the five plots was not drawn"
    assert "<title>overflowing 0</title>" in dom


@browser
def test_the_winner_s_blocks_are_in_sight_of_a_desktop_and_before_the_counts(
    board: Board, tmp_path: Path
) -> None:
    config = " ".join(f'"block_{n}_major": 1024,' for n in ("q", "kv", "qm")) + ' "b": 1'
    rows = [
        replace(r, problem_name="attention head_dim_qk=192 kv_heads=128 kv_len=4096",
                config=f"{{{config[:-1]}{n}}}") for n, r in enumerate(board.rows)
    ]  # fmt: skip
    many_blocks = replace(board, rows=tuple(ranked(rows)))
    script = """
      document.body.style.width = '1280px';
      var heads = Array.from(document.querySelectorAll('table')[0].querySelectorAll('th'));
      return heads.map(h => [h.textContent, h.getBoundingClientRect().right]);"""
    dom = shown_by_browser(written([many_blocks]) + after(0.5, script), tmp_path)
    right = dict(told(dom))  # type: ignore[call-overload]
    assert right["winner"] <= 1280
    assert list(right).index("winner") < list(right).index("ranked")


@browser
def test_markup_in_a_config_or_an_allocation_does_not_swallow_the_page(
    board: Board, tmp_path: Path
) -> None:
    odd = "<!--<script>"
    config = json.dumps({"bm": 1, "bn": 1, "mode": odd})
    best = row(1, 1, 0.5, config=config, vmem=json.dumps({odd: 2**20}))
    shown = replace(board, rows=tuple(ranked([best, *board.rows])))
    dom = shown_by_browser(written([shown, board]), tmp_path)
    assert dom.count("js-plotly-plot") >= 10, "the plots of both problems"
    assert dom.count("candidate did not survive</summary>") == 2


@browser
def test_a_click_on_a_column_sorts_by_its_numbers(tmp_path: Path) -> None:
    rows = [["a", Cell(text="10 ms", order=10.0)], ["b", Cell(text="–")],
            ["c", Cell(text="9 ms", order=9.0)]]  # fmt: skip
    file = io.StringIO()
    page.write(
        "t", "", [Section(title="s", body=page.table(("name", "time"), rows, label="t"))], file
    )
    click = "<script>document.querySelectorAll('th')[1].click()</script>"
    dom = shown_by_browser(file.getvalue() + click, tmp_path)
    names = re.findall(r"<tr><td>(\w)</td>", dom)
    assert names == ["c", "a", "b"], "ascending, and what has no number last"


@browser
def test_many_problems_are_filtered_limited_and_drawn_when_opened(
    board: Board, tmp_path: Path
) -> None:
    script = """
      var form = document.getElementById('filter'), before = shown('tr[data-at]');
      function shown(what) {
        return Array.from(document.querySelectorAll(what)).filter(e => e.offsetHeight).length; }
      function ranked() { return shown('#p0 > div > .wide tbody tr'); }
      function plots() { return document.querySelectorAll('.plotly-graph-div').length; }
      var none = plots();
      form.elements.device.value = 'v5p';
      form.dispatchEvent(new Event('input'));
      await wait(300);
      var one = shown('tr[data-at]'), cards = shown('details.card');
      document.querySelector('tr[data-at=p0] a').click();
      for (var n = 0; n < 30 && plots() < 4; n++) await wait(50);
      var rows = ranked(), more = document.querySelector('#p0 button.more');
      var word = more.textContent;
      more.click();
      return [before, none, one, cards, plots(), rows, word, ranked(),
              form.querySelector('output').textContent];"""
    dom = shown_by_browser(written(many(board)) + after(0.5, script), tmp_path)
    rows = [20, "Show all 30", 30]
    assert told(dom) == [14, 0, 1, 1, 4, *rows, "1 of 14 problems"]


@browser
def test_the_axes_of_a_heat_map_are_chosen_from_a_menu_of_the_browser(
    board: Board, tmp_path: Path
) -> None:
    three = tuple(
        replace(r, config=r.config[:-1] + f', "bk": {n}}}') for n, r in enumerate(board.rows)
    )
    script = """
      var menu = document.querySelector('figure select'), plot = menu.closest('.plot');
      function axis() { return plot.querySelector('.xtitle').textContent; }
      var first = axis();
      menu.selectedIndex = 1;
      menu.dispatchEvent(new Event('change'));
      await wait(300);
      return [menu.options.length, first + ' × ' + plot.querySelector('.ytitle').textContent
              !== menu.options[0].text, axis() === menu.options[1].text.split(' ')[0]];"""
    page_text = written([replace(board, rows=three)])
    assert told(shown_by_browser(page_text + after(1.5, script), tmp_path)) == [3, True, True]
