"""The plots of a leaderboard's page: each takes a board and gives a figure, or None."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from autotune import device as devices
from autotune import page
from autotune.device import Device
from autotune.errors import UnknownNameError
from autotune.leaderboard import Board
from autotune.page import COLOURS, Figure
from autotune.report.units import milliseconds
from autotune.row import Row

MIB = 2**20
Point = tuple[float, float]
Axis = tuple[str, list[float]]
FUNNEL = ("candidates", "legal and traced", "fit by the model", "compiled", "measured")


def heat_maps(board: Board) -> list[Figure]:
    """Best latency over two tunables, the others free; x where no value of them is feasible.

    Ranked rows only, so one kind of evidence. A figure a pair of tunables, the pair with the most
    known cells first.
    """
    configs = [(json.loads(r.config), r) for r in board.rows]
    axes = _axes([config for config, _ in configs])
    maps = [(_cells(configs, x, y), x, y) for x, y in itertools.combinations(axes, 2)]
    maps.sort(key=lambda one: -len(one[0][0]))
    return [_heat_map(best, why, (x, axes[x]), (y, axes[y])) for (best, why), x, y in maps]


def _heat_map(best: dict[Point, float], why: dict[Point, str], x: Axis, y: Axis) -> Figure:
    (x_name, xs), (y_name, ys) = x, y
    closed = [(a, b) for a in xs for b in ys if (a, b) in why and (a, b) not in best]
    cells = {
        "type": "heatmap", "x": [f"{v}" for v in xs], "y": [f"{v}" for v in ys],
        "z": [[_log(best.get((a, b))) for a in xs] for b in ys],
        "text": [[_shown(best.get((a, b))) for a in xs] for b in ys], "hoverongaps": False,
        "hovertemplate": f"{x_name} %{{x}}, {y_name} %{{y}}<br>%{{text}}<extra></extra>",
        "colorscale": "Viridis", "reversescale": True, "colorbar": _ticks(best.values()),
        "xgap": 1, "ygap": 1,
    }  # fmt: skip
    crosses = {
        "type": "scatter", "x": [f"{a}" for a, _ in closed], "y": [f"{b}" for _, b in closed],
        "mode": "markers", "marker": {"symbol": "x", "size": 8, "color": COLOURS[3]},
        "name": "infeasible", "text": [why[at] for at in closed], "showlegend": False,
        "hovertemplate": f"{x_name} %{{x}}, {y_name} %{{y}}<br>%{{text}}<extra></extra>",
    }  # fmt: skip
    return Figure(
        name=f"{x_name} × {y_name}",
        data=[cells, crosses],
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


def _cells(
    configs: Sequence[tuple[dict[str, Any], Row]], x: str, y: str
) -> tuple[dict[Point, float], dict[Point, str]]:
    """Least latency of each cell, and why a cell's last candidate ended otherwise."""
    best: dict[Point, float] = {}
    why: dict[Point, str] = {}
    for config, row in configs:
        if not all(isinstance(config.get(n), int | float) for n in (x, y)):
            continue
        at = (config[x], config[y])
        if row.rank is not None and row.latency_ms is not None:
            best[at] = min(row.latency_ms, best.get(at, row.latency_ms))
        elif row.status != "ok":
            why[at] = f"{row.status}: {row.reason}"
    return best, why


def _shown(latency_ms: float | None) -> str:
    return "" if latency_ms is None else milliseconds(latency_ms)


def _log(latency_ms: float | None) -> float | None:
    """Colour by orders of magnitude: a default 100 times slower must not hide all else."""
    return None if latency_ms is None else round(math.log10(latency_ms), 5)


def _ticks(latencies_ms: Iterable[float]) -> dict[str, Any]:
    ends = sorted(latencies_ms)
    marks = [ends[0], math.sqrt(ends[0]) * math.sqrt(ends[-1]), ends[-1]] if ends else []
    return {"tickvals": [math.log10(v) for v in marks], "ticktext": [f"{v:.3g} ms" for v in marks]}


def predicted(board: Board) -> Figure | None:
    """Predicted against measured latency; the model's against the compiler's where nothing was
    measured."""
    measured = any(r.latency_measured_ms is not None for r in board.rows)
    truth, word = ("measured", "measured") if measured else ("compiled", "compiled prediction")
    data: list[dict[str, Any]] = []
    ends: list[float] = []
    for evidence in ("model", "compiled") if measured else ("model",):
        points = [
            (_rounded(t), _rounded(p), r.config)
            for r in board.rows
            if r.status == "ok"
            and (t := r.latency_ms_of(truth))
            and (p := r.latency_ms_of(evidence))
        ]
        if points:
            ends += [v for t, p, _ in points for v in (t, p)]
            data.append(
                _markers(points, name=evidence) | {
                    "hovertemplate": "%{text}<br>%{x:.4g} → %{y:.4g} ms<extra></extra>",
                }
            )  # fmt: skip
    if not ends:
        return None
    line = [min(ends), max(ends)]
    data.append(
        {"type": "scatter", "x": line, "y": line, "mode": "lines", "name": "equal",
         "line": {"dash": "dot"}}
    )  # fmt: skip
    return Figure(data=data, layout=_logarithmic(f"{word}, ms", "predicted, ms"))


def roofline(board: Board) -> Figure | None:
    """Executed FLOP per byte against executed TFLOP/s of every ranked candidate, under the roof.

    Executed: what the candidate does, padding and whole blocks included, since that is what the
    roof bounds; effective TFLOP/s and MFU count less.
    """
    device = _device(board)
    rows = [r for r in board.rows if r.rank and r.hbm_bytes and r.executed_flops and r.latency_ms]
    if device is None or not rows:
        return None
    peak = _peak(board, device)
    bandwidth = device.hbm_bytes_per_s
    points = [
        (r.executed_flops / r.hbm_bytes, r.executed_flops / r.latency_ms / 1e9, r)  # type: ignore[operator]
        for r in rows
    ]
    ridge = peak / bandwidth
    low = min([ridge, *(x for x, _, _ in points)]) / 4
    high = max([ridge, *(x for x, _, _ in points)]) * 4
    data: list[dict[str, Any]] = [
        {"type": "scatter", "x": [low, ridge, high],
         "y": [low * bandwidth / 1e12, peak / 1e12, peak / 1e12], "mode": "lines",
         "name": f"{device.name}: peak and HBM bandwidth"}
    ]  # fmt: skip
    for name, is_best in (("candidates", False), ("best", True)):
        chosen = [
            (_rounded(x), _rounded(y), r.config) for x, y, r in points if r.is_best == is_best
        ]
        data.append(
            _markers(chosen, name=f"{name} ({rows[0].evidence})", size=11 if is_best else 6) | {
                "hovertemplate": "%{text}<br>%{x:.4g} FLOP/B, %{y:.4g} TFLOP/s<extra></extra>",
            }
        )  # fmt: skip
    axes = _logarithmic("executed FLOP per byte of HBM traffic", "executed TFLOP/s")
    return Figure(data=data, layout=axes)


def _markers(
    points: Sequence[tuple[float, float, str]], *, name: str, size: int = 6
) -> dict[str, Any]:
    return {
        "type": "scatter", "x": [x for x, _, _ in points], "y": [y for _, y, _ in points],
        "mode": "markers", "name": name, "text": [t for _, _, t in points],
        "marker": {"size": size},
    }  # fmt: skip


def _logarithmic(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": {"type": "log", "title": {"text": x}},
        "yaxis": {"type": "log", "title": {"text": y}},
    }


def _rounded(value: float) -> float:
    """To more digits than any of these has, and fewer than it takes to write them all."""
    return float(f"{value:.6g}")


def _device(board: Board) -> Device | None:
    try:
        return devices.get(board.rows[0].device)
    except UnknownNameError:
        return None


def _peak(board: Board, device: Device) -> float:
    """The peak that MFU is against, in ops/s: from a row that has both, else bf16's."""
    for row in board.rows:
        if row.mfu and row.effective_tflops:
            return row.effective_tflops * 1e12 / row.mfu
    return device.peak_ops_per_s["bfloat16"]


LARGEST = 7
"""Allocations that are drawn each in a colour of its own; the rest of a bar is one."""


def vmem(board: Board) -> Figure | None:
    """The winner's VMEM by allocation, under its limit: a bar a kernel, since they run in turn."""
    best = board.best
    if best is None or not best.vmem:
        return None
    bars: dict[str, dict[str, int]] = {}
    for name, size in json.loads(best.vmem).items():
        call, _, allocation = name.rpartition("/")
        bars.setdefault(call, {})[allocation] = size
    largest: dict[str, int] = {}
    for bar in bars.values():
        for name, size in bar.items():
            largest[name] = max(size, largest.get(name, 0))
    shown = sorted(largest, key=lambda name: -largest[name])[:LARGEST]
    data: list[dict[str, Any]] = []
    for name in [*shown, *(["others"] if len(largest) > len(shown) else [])]:
        sizes = [
            bar.get(name, 0) if name != "others"
            else sum(size for other, size in bar.items() if other not in shown)
            for bar in bars.values()
        ]  # fmt: skip
        data.append(
            {"type": "bar", "y": list(bars), "x": [_rounded(size / MIB) for size in sizes],
             "name": name, "orientation": "h",
             "hovertemplate": "%{y} %{fullData.name}: %{x:.2f} MiB<extra></extra>"}
        )  # fmt: skip
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "MiB a TensorCore"}},
        "yaxis": {"showticklabels": len(bars) > 1, "type": "category", "autorange": "reversed"},
    }
    if best.vmem_limit_bytes:
        layout |= page.limit_line(best.vmem_limit_bytes / MIB, axis="x")
    return Figure(data=data, layout=layout)


def funnel(board: Board) -> Figure:
    """How many candidates each stage let through."""
    rows = board.rows
    legal = [r for r in rows if r.grid_steps is not None]
    fit = [r for r in legal if r.status != "pruned"]
    compiled = [r for r in rows if r.latency_compiled_ms is not None]
    measured = [r for r in rows if r.latency_measured_ms is not None]
    numbers = [len(rows), len(legal), len(fit), len(compiled), len(measured)]
    shown = [(n, k) for n, k in zip(FUNNEL, numbers, strict=True) if k or n != "measured"]
    bars = {
        "type": "funnel", "y": [n for n, _ in shown], "x": [k for _, k in shown],
        "textinfo": "value", "hoverinfo": "x+y",
        # Pale, so that the numbers on it can be read in light and dark.
        "marker": {"color": "rgba(59,125,216,0.4)"},
        "connector": {"fillcolor": "rgba(59,125,216,0.15)"},
    }  # fmt: skip
    return Figure(data=[bars])
