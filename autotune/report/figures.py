"""The plots of a leaderboard's page: each takes a board and gives a figure, or None."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from autotune import page
from autotune.device import DEVICES, Device
from autotune.leaderboard import Board
from autotune.page import Figure

MIB = 2**20
FUNNEL = (
    "candidates", "legal and traced", "fit by the model", "compiled", "accepted by the compiler",
    "measured",
)  # fmt: skip


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
    device = DEVICES.get(board.rows[0].device)
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
             "name": name, "orientation": "h", "text": [f"{size / MIB:.2f}" for size in sizes],
             "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
             "hovertemplate": "%{y} %{fullData.name}: %{x:.2f} MiB<extra></extra>"}
        )  # fmt: skip
    layout: dict[str, Any] = {
        "barmode": "stack",
        "uniformtext": {"minsize": 10, "mode": "hide"},  # hovering has what is left out
        "xaxis": {"title": {"text": "MiB a TensorCore"}},
        "yaxis": {"showticklabels": len(bars) > 1, "type": "category", "autorange": "reversed"},
    }
    if best.vmem_limit_bytes:
        layout |= page.limit_line(best.vmem_limit_bytes / MIB, axis="x")
    return Figure(data=data, layout=layout)


def funnel(board: Board) -> Figure:
    """How many candidates came to each stage; of the last two only what says more."""
    rows = board.rows
    legal = [r for r in rows if r.grid_steps is not None]
    fit = [r for r in legal if r.status != "pruned"]
    accepted = [r for r in rows if r.latency_compiled_ms is not None]
    refused = [r for r in rows if r.latency_compiled_ms is None and r.evidence == "compiled"]
    measured = [r for r in rows if r.latency_measured_ms is not None]
    compiled = len(accepted) + len(refused)
    numbers = [len(rows), len(legal), len(fit), compiled, len(accepted), len(measured)]
    told = dict(zip(FUNNEL, numbers, strict=True))
    if not refused:
        del told["accepted by the compiler"]
    if not measured:
        del told["measured"]
    shown = list(told.items())
    bars = {
        "type": "funnel", "y": [n for n, _ in shown], "x": [k for _, k in shown],
        "textinfo": "value", "hoverinfo": "x+y",
        # Pale, so that the numbers on it can be read in light and dark.
        "marker": {"color": "rgba(59,125,216,0.4)"},
        "connector": {"fillcolor": "rgba(59,125,216,0.15)"},
    }  # fmt: skip
    return Figure(data=[bars])
