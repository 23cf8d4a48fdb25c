"""Latency over two tunables: what is known of each cell, and where nothing fits."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.leaderboard import Board
from autotune.page import COLOURS, Figure
from autotune.report.units import milliseconds
from autotune.row import EVIDENCE, Row

Point = tuple[float, float]
Axis = tuple[str, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cells:
    """Each point of two tunables is in one of them: the least latency of its ranked candidates;
    what is known where some fit and none is ranked; why all its candidates were refused."""

    best: dict[Point, float]
    waiting: dict[Point, str]
    refused: dict[Point, str]


def heat_maps(board: Board) -> list[Figure]:
    """Best latency over two tunables, the others free; x where every candidate was refused.

    Ranked rows only have colours, so one kind of evidence. A figure a pair of tunables, the pair
    with the most known cells first.
    """
    configs = [(json.loads(r.config), r) for r in board.rows]
    axes = _axes([config for config, _ in configs])
    maps = [(_cells(configs, x, y), x, y) for x, y in itertools.combinations(axes, 2)]
    maps.sort(key=lambda one: -len(one[0].best))
    return [_heat_map(cells, (x, axes[x]), (y, axes[y])) for cells, x, y in maps]


def _heat_map(cells: _Cells, x: Axis, y: Axis) -> Figure:
    (x_name, xs), (y_name, ys) = x, y
    hover = f"{x_name} %{{x}}, {y_name} %{{y}}<br>%{{text}}<extra></extra>"
    coloured = {
        "type": "heatmap", "x": [f"{v}" for v in xs], "y": [f"{v}" for v in ys],
        "z": [[_log(cells.best.get((a, b))) for a in xs] for b in ys],
        "text": [[_shown(cells.best.get((a, b))) for a in xs] for b in ys], "hoverongaps": False,
        "hovertemplate": hover, "colorscale": "Viridis", "reversescale": True,
        "colorbar": _ticks(cells.best.values()), "xgap": 1, "ygap": 1,
    }  # fmt: skip
    marks = [
        {
            "type": "scatter", "x": [f"{a}" for a, _ in told], "y": [f"{b}" for _, b in told],
            "mode": "markers", "marker": {"symbol": symbol, "size": size, "color": colour},
            "name": name, "text": list(told.values()), "showlegend": False, "hovertemplate": hover,
        }
        for name, told, symbol, size, colour in (
            ("infeasible", cells.refused, "x", 8, COLOURS[3]),
            ("not evaluated", cells.waiting, "circle-open", 5, COLOURS[5]),
        )
    ]  # fmt: skip
    return Figure(
        name=f"{x_name} × {y_name}",
        data=[coloured, *marks],
        layout={
            "xaxis": {"title": {"text": x_name}, "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": y_name}, "type": "category", "showgrid": False},
            "plot_bgcolor": "rgba(128,128,128,0.12)",
        },
    )


def _axes(configs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Numeric tunables with at least two values, those with the most first; values ascending."""
    values: dict[str, set[float]] = {}
    for config in configs:
        for name, value in config.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, set()).add(value)
    several = {n: sorted(v) for n, v in values.items() if len(v) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))


def _cells(configs: Sequence[tuple[dict[str, Any], Row]], x: str, y: str) -> _Cells:
    cells: dict[Point, list[Row]] = {}
    for config, row in configs:
        if all(isinstance(config.get(n), int | float) for n in (x, y)):
            cells.setdefault((config[x], config[y]), []).append(row)
    found = _Cells(best={}, waiting={}, refused={})
    for at, rows in cells.items():
        ok = [r for r in rows if r.status == "ok"]
        if ranked := [r.latency_ms for r in ok if r.rank is not None and r.latency_ms is not None]:
            found.best[at] = min(ranked)
        elif ok:
            found.waiting[at] = _unranked(ok)
        else:
            reasons = Counter(f"{r.status}: {r.reason}" for r in rows)
            (reason, _), *_ = reasons.most_common(1)
            found.refused[at] = f"all {len(rows)} refused; {reason}"
    return found


def _unranked(rows: Sequence[Row]) -> str:
    """The least latency by the strongest evidence that any of them has."""
    strongest = max(rows, key=lambda r: (EVIDENCE.index(r.evidence), -(r.latency_ms or math.inf)))
    said = "not evaluated" if strongest.evidence == "model" else "not timed on the device"
    if strongest.latency_ms is None:
        return said
    return f"{said}; {milliseconds(strongest.latency_ms)} {strongest.evidence}"


def _shown(latency_ms: float | None) -> str:
    return "" if latency_ms is None else milliseconds(latency_ms)


def _log(latency_ms: float | None) -> float | None:
    """Colour by orders of magnitude: a default 100 times slower must not hide all else."""
    return None if latency_ms is None else round(math.log10(latency_ms), 5)


def _ticks(latencies_ms: Iterable[float]) -> dict[str, Any]:
    ends = sorted(latencies_ms)
    marks = [ends[0], math.sqrt(ends[0]) * math.sqrt(ends[-1]), ends[-1]] if ends else []
    return {"tickvals": [math.log10(v) for v in marks], "ticktext": [f"{v:.3g} ms" for v in marks]}
