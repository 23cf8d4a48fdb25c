"""Leaderboards as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO

import plotly.graph_objects as go

from autotune import page
from autotune.leaderboard import Board
from autotune.page import Cell, Section
from autotune.report import figures, table
from autotune.report.pairs import backward_pairs
from autotune.row import Row

MIB = 2**20
SHOWN = 50
"""Ranked rows of a problem on the page, unless asked for otherwise."""
Rows = list[list[Cell | str]]

FIGURES = ("latency", "evidence", "vs default", "MFU", "TFLOP/s", "VMEM MiB", "spills")
OVERVIEW = (
    "problem", "kernel", "device", *FIGURES, "ranked", "pruned", "rejected", "failed", "winner",
)  # fmt: skip
"""The blocks come last: many of them must not push the figures out of sight."""


def write(boards: Sequence[Board], *, top: int | None, file: IO[str]) -> None:
    """The page: an overview, the backward pairs, then a section a problem."""
    sections = [Section(title="Winners", body=page.table(OVERVIEW, _overview(boards), roomy=True))]
    if pairs := list(backward_pairs(boards)):
        body = "".join(page.paragraph(f"{pair.title}: {pair.text}") for pair in pairs)
        sections.append(Section(title="Backward passes, dq + dkv", body=body))
    sections += [
        Section(title=table.title(board), body=_problem(board, top or SHOWN), anchor=f"p{i}")
        for i, board in enumerate(boards)
    ]
    lead = page.paragraph(
        "Latencies say where they come from: model and compiled are predictions, measured is "
        "device time. Click a column's head to sort by it."
    )
    page.write("autotune leaderboards", lead, sections, file)


def _overview(boards: Sequence[Board]) -> Rows:
    rows: Rows = []
    for board in boards:
        best, counts = board.best, Counter(r.status for r in board.rows)
        first = board.rows[0]
        ended = [
            _count(board.counts["ranked"]),
            _count(counts["pruned"]),
            _count(counts["oom"] + counts["unsupported"]),
            _count(sum(counts[s] for s in ("failed", "timeout", "crashed", "wrong"))),
        ]
        head: list[Cell | str] = [board.title, first.kernel, first.device]
        if best is None:
            rows.append([*head, *["–"] * len(FIGURES), *ended, "none survived"])
        else:
            rows.append([*head, *_figures(best, board), *ended, table.blocks(best.config)])
    return rows


def _figures(row: Row, board: Board) -> list[Cell | str]:
    gain = table.gain(row, board.default)
    used = row.vmem_compiled_bytes or row.vmem_model_bytes
    spills = None if row.spill_stores is None else (row.spill_loads or 0) + row.spill_stores
    return [
        Cell(text="–") if row.latency_ms is None
        else Cell(text=table.banded(row), order=row.latency_ms),
        row.evidence,
        _amount(gain, ".2f", "×"),
        _amount(row.mfu, ".1%"),
        _amount(row.effective_tflops, ".1f"),
        _amount(None if used is None else used / MIB, ".1f"),
        _amount(spills, ",d"),
    ]  # fmt: skip


def _problem(board: Board, top: int) -> str:
    lines = "".join(page.paragraph(line) for line in table.caption(board))
    drawn = "".join(
        page.figure(fig, label=label) for label, fig in _drawn(board) if fig is not None
    )
    ranked = [r for r in board.rows if r.rank is not None and (r.rank <= top or r.is_default)]
    header = ("rank", *FIGURES, "blocks")
    body: Rows = [
        [
            Cell(text=f"{r.rank}{' (default)' if r.is_default else ''}", order=float(r.rank or 0)),
            *_figures(r, board),
            table.blocks(r.config),
        ]
        for r in ranked
    ]
    best = next((i for i, r in enumerate(ranked) if r.is_best), -1)
    return (
        f'{lines}<div class="plots">{drawn}</div>'
        f"{page.table(header, body, bold=best, roomy=True) if body else ''}{_refused(board)}"
    )


def _drawn(board: Board) -> Iterator[tuple[str, go.Figure | None]]:
    measured = any(r.latency_measured_ms is not None for r in board.rows)
    truth = "the measured" if measured else "the compiled prediction"
    yield (
        "Latency over two tunables, best of the others (× infeasible)",
        figures.heat_map(board),
    )
    yield f"Predicted latency against {truth}", figures.predicted(board)
    yield "Roofline, executed FLOPs", figures.roofline(board)
    yield "VMEM of the winner by allocation", figures.vmem(board)
    yield "What each stage let through", figures.funnel(board)


def _refused(board: Board) -> str:
    """What did not survive, folded: status, reason, how many."""
    ended = Counter((r.status, r.reason or "") for r in board.rows if r.status != "ok")
    if not ended:
        return ""
    rows: Rows = [[status, reason, _count(n)] for (status, reason), n in ended.most_common(100)]
    more = f" (the {len(rows)} most common reasons)" if len(ended) > len(rows) else ""
    summary = f"{sum(ended.values())} candidates did not survive{more}"
    return (
        f"<details><summary>{page.text(summary)}</summary>"
        f"{page.table(('status', 'reason', 'candidates'), rows)}</details>"
    )


def _count(number: int) -> Cell:
    return Cell(text=f"{number:,}", order=float(number))


def _amount(value: float | None, form: str, unit: str = "") -> Cell:
    if value is None:
        return Cell(text="–")
    return Cell(text=format(value, form) + unit, order=float(value))
