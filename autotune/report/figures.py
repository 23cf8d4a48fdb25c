"""The plots of a leaderboard's page. Each takes a board and gives a Plotly figure, or None."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from autotune import device as devices
from autotune.device import Device
from autotune.errors import UnknownNameError
from autotune.leaderboard import Board
from autotune.page import COLOURS
from autotune.report.units import milliseconds
from autotune.row import Row

MIB = 2**20
FUNNEL = ("candidates", "legal and traced", "fit by the model", "compiled", "measured")


def heat_map(board: Board) -> go.Figure | None:
    """Best latency over two tunables, the others free; x where no value of them is feasible.

    Ranked rows only, so one kind of evidence. The pair with the most known cells comes first; a
    menu has the others.
    """
    configs = [(json.loads(r.config), r) for r in board.rows]
    axes = _axes([config for config, _ in configs])
    pairs = list(itertools.combinations(axes, 2))
    if not pairs:
        return None
    pairs.sort(key=lambda pair: -len(_cells(configs, *pair)[0]))
    fig = go.Figure()
    for number, (x, y) in enumerate(pairs):
        xs, ys = axes[x], axes[y]
        best, why = _cells(configs, x, y)
        fig.add_heatmap(
            x=[f"{v}" for v in xs], y=[f"{v}" for v in ys],
            z=[[_log(best.get((a, b))) for a in xs] for b in ys],
            text=[[_hover(best, why, a, b) for a in xs] for b in ys],
            hovertemplate=f"{x} %{{x}}, {y} %{{y}}<br>%{{text}}<extra></extra>",
            colorscale="Viridis", reversescale=True, colorbar=_ticks(best.values()),
            visible=number == 0,
        )  # fmt: skip
        closed = [(a, b) for a in xs for b in ys if (a, b) in why and (a, b) not in best]
        fig.add_scatter(
            x=[f"{a}" for a, _ in closed], y=[f"{b}" for _, b in closed], mode="markers",
            marker={"symbol": "x", "size": 9, "color": COLOURS[3]}, name="infeasible",
            text=[why[c] for c in closed], hovertemplate="%{text}<extra></extra>",
            visible=number == 0, showlegend=False,
        )  # fmt: skip
    fig.update_xaxes(title=pairs[0][0], type="category")
    fig.update_yaxes(title=pairs[0][1], type="category")
    if len(pairs) > 1:
        fig.update_layout(updatemenus=[_menu(pairs)])
    return fig


def _axes(configs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Numeric tunables with at least two values, those with the most first; values ascending."""
    values: dict[str, set[float]] = {}
    for config in configs:
        for name, value in config.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, set()).add(value)
    several = {n: sorted(v) for n, v in values.items() if len(v) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))


Point = tuple[float, float]


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


def _hover(best: dict[Point, float], why: dict[Point, str], a: float, b: float) -> str:
    if (a, b) in best:
        return milliseconds(best[a, b])
    return why.get((a, b), "not evaluated")


def _log(latency_ms: float | None) -> float | None:
    """Colour by orders of magnitude: a default 100 times slower must not hide all else."""
    return None if latency_ms is None else math.log10(latency_ms)


def _ticks(latencies_ms: Iterable[float]) -> dict[str, Any]:
    ends = sorted(latencies_ms)
    marks = [ends[0], math.sqrt(ends[0]) * math.sqrt(ends[-1]), ends[-1]] if ends else []
    return {"tickvals": [math.log10(v) for v in marks], "ticktext": [f"{v:.3g} ms" for v in marks]}


def _menu(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    buttons = [
        {
            "label": f"{x} × {y}",
            "method": "update",
            "args": [
                {"visible": [i // 2 == number for i in range(2 * len(pairs))]},
                {"xaxis.title.text": x, "yaxis.title.text": y},
            ],
        }
        for number, (x, y) in enumerate(pairs)
    ]
    return {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}


def predicted(board: Board) -> go.Figure | None:
    """Predicted against measured latency; the model's against the compiler's where nothing was
    measured."""
    measured = any(r.latency_measured_ms is not None for r in board.rows)
    truth, word = ("measured", "measured") if measured else ("compiled", "compiled prediction")
    fig = go.Figure()
    ends: list[float] = []
    for evidence in ("model", "compiled") if measured else ("model",):
        points = [
            (t, p, r.config)
            for r in board.rows
            if r.status == "ok"
            and (t := r.latency_ms_of(truth))
            and (p := r.latency_ms_of(evidence))
        ]
        if points:
            ends += [v for t, p, _ in points for v in (t, p)]
            fig.add_scatter(
                x=[t for t, _, _ in points], y=[p for _, p, _ in points], mode="markers",
                name=evidence, text=[c for _, _, c in points],
                hovertemplate="%{text}<br>%{x:.4g} → %{y:.4g} ms<extra></extra>",
            )  # fmt: skip
    if not ends:
        return None
    line = [min(ends), max(ends)]
    fig.add_scatter(x=line, y=line, mode="lines", name="equal", line={"dash": "dot"})
    fig.update_xaxes(type="log", title=f"{word}, ms")
    fig.update_yaxes(type="log", title="predicted, ms")
    return fig


def roofline(board: Board) -> go.Figure | None:
    """Executed FLOP per byte against TFLOP/s of every ranked candidate, under the device's roof."""
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
    fig = go.Figure()
    fig.add_scatter(
        x=[low, ridge, high], y=[low * bandwidth / 1e12, peak / 1e12, peak / 1e12], mode="lines",
        name=f"{device.name}: peak and HBM bandwidth",
    )  # fmt: skip
    for name, chosen in (
        ("candidates", [p for p in points if not p[2].is_best]),
        ("best", [p for p in points if p[2].is_best]),
    ):
        fig.add_scatter(
            x=[x for x, _, _ in chosen], y=[y for _, y, _ in chosen], mode="markers", name=name,
            text=[r.config for _, _, r in chosen], marker_size=11 if name == "best" else 6,
            hovertemplate="%{text}<br>%{x:.4g} FLOP/B, %{y:.4g} TFLOP/s<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(type="log", title="FLOP per byte of HBM traffic")
    fig.update_yaxes(type="log", title="TFLOP/s")
    return fig


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


def vmem(board: Board) -> go.Figure | None:
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
    fig = go.Figure()
    for name in [*shown, *(["others"] if len(largest) > len(shown) else [])]:
        sizes = [
            bar.get(name, 0) if name != "others"
            else sum(size for other, size in bar.items() if other not in shown)
            for bar in bars.values()
        ]  # fmt: skip
        fig.add_bar(
            y=list(bars), x=[size / MIB for size in sizes], name=name, orientation="h",
            hovertemplate="%{y} %{fullData.name}: %{x:.2f} MiB<extra></extra>",
        )  # fmt: skip
    if best.vmem_limit_bytes:
        fig.add_vline(
            x=best.vmem_limit_bytes / MIB, line_dash="dash", line_color=COLOURS[3],
            annotation_text="limit", annotation_position="top left",
        )  # fmt: skip
    fig.update_layout(barmode="stack")
    fig.update_xaxes(title="MiB a TensorCore")
    fig.update_yaxes(showticklabels=len(bars) > 1, type="category", autorange="reversed")
    return fig


def funnel(board: Board) -> go.Figure:
    """How many candidates each stage let through."""
    rows = board.rows
    legal = [r for r in rows if r.grid_steps is not None]
    fit = [r for r in legal if r.status != "pruned"]
    compiled = [r for r in rows if r.latency_compiled_ms is not None]
    measured = [r for r in rows if r.latency_measured_ms is not None]
    numbers = [len(rows), len(legal), len(fit), len(compiled), len(measured)]
    shown = [(n, k) for n, k in zip(FUNNEL, numbers, strict=True) if k or n != "measured"]
    return go.Figure(
        go.Funnel(y=[n for n, _ in shown], x=[k for _, k in shown], textinfo="value",
                  marker_color=COLOURS[0])
    )  # fmt: skip
