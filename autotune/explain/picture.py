"""An explanation as one HTML page: timeline, VMEM bill, scopes, roofline, neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from autotune import page
from autotune.explain.facts import SHARES, Explanation, without
from autotune.explain.terminal import headline
from autotune.page import COLOURS, Cell, Figure, Section
from autotune.report.units import milliseconds

MIB = 2**20
LANES = {"copy in": COLOURS[0], "compute": COLOURS[1], "copy out": COLOURS[2]}
Rows = list[list[Cell | str]]


def write(explanation: Explanation, file: IO[str]) -> None:
    """The page of one candidate, self-contained."""
    first, *rest = headline(explanation)
    lead = "".join(page.paragraph(line) for line in (*rest, *explanation.notes))
    page.write(first, lead, list(_sections(explanation)), file)


def _sections(e: Explanation) -> Iterator[Section]:
    if e.timeline:
        yield Section(title="Timeline", body=_timelines(e))
    if e.vmem:
        drawn = page.figure(_vmem(e), label="by allocation, the model's beside the compiler's")
        told = "".join(page.paragraph(sentence) for sentence in without(e.vmem))
        yield Section(title="VMEM", body=drawn + told)
    if e.scopes:
        yield Section(title="Scopes", body=_scopes(e))
    if e.roofline is not None and e.roofline.intensity is not None:
        drawn = page.figure(roofline_figure(e), label="executed FLOPs")
        yield Section(title="Roofline", body=drawn)
    if e.mask:
        rows: Rows = [[k.replace("_", " "), _number(v)] for k, v in e.mask.items()]
        yield Section(title="Mask", body=page.table(("of one head", ""), rows, label="Mask"))
    if e.neighbours:
        yield Section(title="One step away", body=_neighbours(e))


def _timelines(e: Explanation) -> str:
    """One strip per call and part: DMA lanes above, compute below."""
    strips = []
    for call in dict.fromkeys(s.call for s in e.timeline):
        for part in dict.fromkeys(s.part for s in e.timeline if s.call == call):
            bars = [s for s in e.timeline if (s.call, s.part) == (call, part)]
            lanes = list(dict.fromkeys(s.lane for s in bars))
            data = []
            for lane in lanes:
                own = [s for s in bars if s.lane == lane]
                data.append(
                    {"type": "bar", "y": [lane] * len(own), "x": [s.duration_us for s in own],
                     "base": [s.start_us for s in own], "orientation": "h", "name": lane,
                     "marker": {"color": LANES[lane]}, "text": [s.label for s in own],
                     "hovertemplate": "%{text}: %{x:.3f} µs from %{base:.3f} µs<extra></extra>",
                     "textposition": "inside", "insidetextanchor": "start", "showlegend": False}
                )  # fmt: skip
            layout = {
                "barmode": "overlay", "yaxis": {"autorange": "reversed"},
                "xaxis": {"title": {"text": "µs"}},
                "uniformtext": {"minsize": 10, "mode": "hide"},  # hovering has what is left out
            }  # fmt: skip
            fig = Figure(data=data, layout=layout)
            height = 70 + 34 * len(lanes)
            strips.append(page.figure(fig, height=height, label=f"{call}: {part}"))
    return "".join(strips)


def _vmem(e: Explanation) -> Figure:
    """Stacked bars, the model's beside the compiler's, under the limit."""
    data = []
    several = len({line.call for line in e.vmem}) > 1
    for line in e.vmem:
        x = [f"{line.call}: {side}" if several else side for side in ("model", "compiler")]
        y = [(size or 0) / MIB for size in (line.model_bytes, line.compiled_bytes)]
        data.append(
            {"type": "bar", "x": x, "y": y, "name": line.allocation,
             "text": [f"{line.allocation}: {size:.2f}" if size else "" for size in y],
             "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
             "hovertemplate": "%{y:.2f} MiB"}
        )  # fmt: skip
    layout: dict[str, Any] = {
        "barmode": "stack",
        "uniformtext": {"minsize": 10, "mode": "hide"},  # hovering has what is left out
        "yaxis": {"title": {"text": "MiB a TensorCore"}},
    }
    if e.vmem_limit_bytes:
        layout |= page.limit_line(e.vmem_limit_bytes / MIB, axis="y")
    return Figure(data=data, layout=layout)


def _scopes(e: Explanation) -> str:
    rows: Rows = [
        [
            f"{line.call}: {line.scope}",
            Cell(text="run-time data" if line.executions is None else f"{line.executions:,}",
                 order=float(line.executions or 0)),
            _amount(line.cycles_once, ",.0f"),
            _amount(line.share, ".1%"),
            _amount(line.mxu_share, ".0%"),
            _amount(line.spill_loads, ",d"),
            _amount(line.spill_stores, ",d"),
            " ".join(f"{u} {s:.0%}" for u, s in sorted((line.units or {}).items(),
                     key=lambda item: -item[1]) if s >= 0.005),
        ]
        for line in e.scopes
    ]  # fmt: skip
    header = (
        "scope", "runs", "cycles each", "share of cycles", "MXU", "spill loads",
        "spill stores", "units",
    )  # fmt: skip
    told = [*([SHARES] if any(line.units for line in e.scopes) else []), *e.scopes_split]
    return page.table(header, rows, label="Scopes") + "".join(map(page.paragraph, told))


def roofline_figure(e: Explanation) -> Figure:
    """Executed FLOPs per byte against executed TFLOP/s, both logarithmic."""
    r = e.roofline
    assert r is not None
    assert r.intensity is not None
    low, high = min(r.ridge, r.intensity) / 8, max(r.ridge, r.intensity) * 8
    slope = r.peak_tflops / r.ridge
    data: list[dict[str, Any]] = [
        {"type": "scatter", "x": [low, r.ridge, high], "mode": "lines",
         "y": [low * slope, r.peak_tflops, r.peak_tflops],
         "name": f"{e.device}: peak and HBM bandwidth"}
    ]  # fmt: skip
    if r.executed_tflops:
        data.append(
            {"type": "scatter", "x": [r.intensity], "y": [r.executed_tflops], "mode": "markers",
             "marker": {"size": 11}, "name": f"this candidate ({e.evidence})"}
        )  # fmt: skip
    layout = {
        "xaxis": {"type": "log", "title": {"text": "executed FLOP per byte of HBM traffic"}},
        "yaxis": {"type": "log", "title": {"text": "executed TFLOP/s"}},
    }
    return Figure(data=data, layout=layout)


def _neighbours(e: Explanation) -> str:
    rows: Rows = [
        [
            f"{n.tunable}: {e.config.get(n.tunable)} → {n.value}",
            Cell(text="–") if n.latency_ms is None
            else Cell(text=milliseconds(n.latency_ms), order=n.latency_ms),
            _amount(n.change, "+.1%"),
            _amount(None if n.vmem_bytes is None else n.vmem_bytes / MIB, ".2f"),
            n.evidence if n.status == "ok" else f"{n.status}: {n.reason}",
        ]
        for n in e.neighbours
    ]  # fmt: skip
    header = ("change", "latency", "against this", "VMEM MiB", "ends as")
    return page.table(header, rows, label="One step away")


def _amount(value: float | None, form: str) -> Cell:
    return Cell(text="–") if value is None else Cell(text=format(value, form), order=float(value))


def _number(value: float) -> Cell:
    return Cell(text=f"{value:.1%}" if isinstance(value, float) else f"{value:,}", order=value)
