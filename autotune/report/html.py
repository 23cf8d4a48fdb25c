"""Leaderboards as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO

from autotune import page
from autotune.leaderboard import Board
from autotune.page import Cell, Figure, Section
from autotune.report import figures, heat_map, summary, table
from autotune.report.naming import names
from autotune.report.pairs import BackwardPair, backward_pairs, shared
from autotune.report.units import counted, milliseconds
from autotune.row import Row

MIB = 2**20
FEW = 12
"""Problems that a page shows unfolded; of more, each is packed until it is opened."""
SEARCHABLE = 6
"""Problems from which on a page has a filter."""
LIMIT = 20
"""Rows of a table that are shown without being asked for; a button shows the others."""
Rows = list[list[Cell | str]]

FIGURES = ("latency", "vs default", "blocks", "MFU", "TFLOP/s", "VMEM MiB", "of limit", "spills")
OVERVIEW = (
    "problem", "latency", "vs default", "winner", "MFU", "TFLOP/s", "VMEM MiB", "of limit",
    "spills", "ranked", "pruned", "rejected", "failed",
)  # fmt: skip
"""Who won comes before how the others ended: on a small screen what is last is out of sight."""


def write(boards: Sequence[Board], *, top: int | None, file: IO[str]) -> None:
    """The page: an overview, the backward pairs, then a section a problem, made as it is written.

    A problem's table has all its ranked rows, or `top` and the default.
    """
    lead = page.paragraph(
        "Latencies say where they come from: model and compiled are predictions, measured is "
        "device time. Click a column's head to sort by it."
    )
    if len(boards) >= SEARCHABLE:
        firsts = [board.rows[0] for board in boards]
        menus = {
            "kernel": sorted({row.kernel for row in firsts}),
            "device": sorted({row.device for row in firsts}),
            "evidence": sorted({_evidence(board) for board in boards}),
        }
        lead += page.filters(menus)
    page.write("autotune leaderboards", lead, _sections(boards, top), file)


def _sections(boards: Sequence[Board], top: int | None) -> Iterator[Section]:
    anchors = [f"p{i}" for i in range(len(boards))]
    overview = page.table(
        OVERVIEW, _overview(boards, anchors), label="Winners", limit=2 * LIMIT,
        anchors=anchors, kind="pinned",
    )  # fmt: skip
    counted = "".join(page.paragraph(line) for line in summary.conventions(boards))
    yield Section(
        title="Winners", body=overview + page.folded("What MFU and TFLOP/s count", counted)
    )
    if pairs := backward_pairs(boards):
        yield Section(title="Backward passes, dq + dkv", body=_pairs(pairs, boards))
    for board, anchor in zip(boards, anchors, strict=True):
        first, name = board.rows[0], table.title(board)
        yield Section(
            title=name, body=_problem(board, top), anchor=anchor,
            fold="open" if len(boards) <= FEW else "closed",
            tags={"find": f"{name} {first.problem_key}".lower(),
                  "kernel": first.kernel, "device": first.device, "evidence": _evidence(board)},
        )  # fmt: skip


def _evidence(board: Board) -> str:
    return board.best.evidence if board.best else "none"


def _overview(boards: Sequence[Board], anchors: Sequence[str]) -> Rows:
    rows: Rows = []
    for board, name, anchor in zip(boards, names(boards), anchors, strict=True):
        first, best = board.rows[0], board.best
        ended = [_count(number) for number in summary.ended(board)[1:]]
        head = Cell(text=name, anchor=anchor, note=f"{first.kernel} on {first.device}")
        if best is None:
            rows.append([head, "–", "–", "none survived", *["–"] * 5, *ended])
        else:
            by = f"{table.band(best)} {best.evidence}".lstrip()
            latency = Cell(text=milliseconds(best.latency_ms or 0), order=best.latency_ms, note=by)
            rows.append([head, latency, *_figures(best, board)[1:], *ended])
    return rows


def _pairs(pairs: Sequence[BackwardPair], boards: Sequence[Board]) -> str:
    anchor = {id(board.best or board): f"p{i}" for i, board in enumerate(boards)}
    name = dict(zip(anchor, names(boards), strict=True))
    rows: Rows = [
        [
            shared(name[id(pair.dq)], name[id(pair.dkv)]),
            pair.dq.device,
            *(Cell(text=table.banded(half), order=half.latency_ms, anchor=anchor[id(half)])
              for half in (pair.dq, pair.dkv)),
            Cell(text=milliseconds(pair.latency_ms), order=pair.latency_ms),
            pair.dq.evidence,
            _amount(pair.mfu, ".1%"),
            _amount(pair.effective_tflops, ".1f"),
        ]
        for pair in pairs
    ]  # fmt: skip
    header = ("problem", *summary.PAIR[1:])
    at = [f"{anchor[id(pair.dq)]} {anchor[id(pair.dkv)]}" for pair in pairs]
    return page.table(header, rows, label="Backward passes", limit=LIMIT, anchors=at, kind="pinned")


def _figures(row: Row, board: Board) -> list[Cell]:
    """In the order of `FIGURES`."""
    gain = table.gain(row, board.default)
    used, limit = table.vmem_bytes(row), row.vmem_limit_bytes
    return [
        Cell(text="–") if row.latency_ms is None
        else Cell(text=table.banded(row), order=row.latency_ms),
        _amount(gain, ".2f", "×"),
        Cell(text=table.blocks(row.config)),
        _amount(row.mfu, ".1%"),
        _amount(row.effective_tflops, ".1f"),
        _amount(None if used is None else used / MIB, ".1f"),
        _amount(None if limit is None else limit / MIB, ".0f"),
        _amount(table.spills(row), ",d"),
    ]  # fmt: skip


def _problem(board: Board, top: int | None) -> str:
    lines = "".join(page.paragraph(line) for line in table.caption(board))
    drawn = "".join(page.figure(*figs, label=label) for label, figs in _drawn(board) if figs)
    ranked = [
        r
        for r in board.rows
        if r.rank is not None and (top is None or r.rank <= top or r.is_default)
    ]
    evidence = f", {ranked[0].evidence}" if ranked else ""
    header = ("rank", f"{FIGURES[0]}{evidence}", *FIGURES[1:])
    body: Rows = [
        [
            Cell(text=f"{r.rank}{' (default)' if r.is_default else ''}", order=float(r.rank or 0)),
            *_figures(r, board),
        ]
        for r in ranked
    ]
    best = next((i for i, r in enumerate(ranked) if r.is_best), -1)
    name = f"Ranked candidates of {table.title(board)}"
    rows = page.table(header, body, label=name, bold=best, limit=LIMIT)
    return f'{lines}<div class="plots">{drawn}</div>{rows if body else ""}{_refused(board)}'


def _drawn(board: Board) -> Iterator[tuple[str, list[Figure]]]:
    """Figures with their headings; several are choices of one, none is not drawn."""
    measured = any(r.latency_measured_ms is not None for r in board.rows)
    truth = "the measured" if measured else "the compiled prediction"
    yield (
        "Latency over two tunables, best of the others (× infeasible, ○ not evaluated)",
        heat_map.heat_maps(board),
    )
    for label, fig in (
        (f"Predicted latency against {truth}", figures.predicted(board)),
        ("Roofline, executed FLOPs", figures.roofline(board)),
        ("VMEM of the winner by allocation", figures.vmem(board)),
        ("What each stage let through", figures.funnel(board)),
    ):
        yield label, [fig] if fig is not None else []


def _refused(board: Board) -> str:
    """What did not survive, folded: status, reason, how many."""
    ended = Counter((r.status, r.reason or "") for r in board.rows if r.status != "ok")
    if not ended:
        return ""
    rows: Rows = [[status, reason, _count(n)] for (status, reason), n in ended.most_common()]
    told = f"{counted(sum(ended.values()), 'candidate')} did not survive"
    header = ("status", "reason", "candidates")
    return page.folded(told, page.table(header, rows, label=told, limit=LIMIT))


def _count(number: int) -> Cell:
    return Cell(text=f"{number:,}", order=float(number))


def _amount(value: float | None, form: str, unit: str = "") -> Cell:
    if value is None:
        return Cell(text="–")
    return Cell(text=format(value, form) + unit, order=float(value))
