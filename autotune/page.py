"""One self-contained HTML page: sections, sortable tables, Plotly figures; light and dark.

Nothing is fetched: Plotly's script is inside the page, once, and only where there is a figure.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = ("#3b7dd8", "#e08a2c", "#3a9d6e", "#c2525c", "#8265c9", "#7f8893", "#b59b2b", "#4aa7b5")
"""Readable on white and on near-black."""
GRID = "rgba(128,128,128,0.25)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A table cell: what is shown, and what it is sorted by (the text itself where None)."""

    text: str
    order: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and its HTML; `anchor` is its place in the page's address."""

    title: str
    body: str
    anchor: str | None = None


def text(value: object) -> str:
    """`value` as HTML text."""
    return html.escape(str(value))


def paragraph(value: str) -> str:
    return f"<p>{text(value)}</p>"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    *,
    bold: int = -1,
    roomy: bool = False,
) -> str:
    """A table that sorts by the column whose head is clicked. `bold` is the row to stand out;
    `roomy` gives the last column, of long texts, a width at which they take few lines."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{text(h)}</button></th>'
        for h in header
    )
    body = "".join(
        f"<tr{' class=best' if i == bold else ''}>{''.join(map(_cell, row))}</tr>"
        for i, row in enumerate(rows)
    )
    kind = "sortable roomy" if roomy else "sortable"
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f"<td>{text(cell)}</td>"
    if cell.order is None:
        return f"<td>{text(cell.text)}</td>"
    return f'<td class="number" data-order="{cell.order!r}">{text(cell.text)}</td>'


def figure(fig: go.Figure, *, height: int = 340, label: str) -> str:
    """`fig` under its `label` as a heading, in the page's width and colours."""
    fig.update_layout(
        height=height, margin={"l": 60, "r": 20, "t": 34, "b": 50}, colorway=COLOURS,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        # At the figure's foot, whatever its height: below the axis it would cover the title of a
        # narrow one, whose entries take several lines.
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    )  # fmt: skip
    fig.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    fig.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    drawn = fig.to_html(
        full_html=False, include_plotlyjs=False,
        config={"displayModeBar": False, "responsive": True},
    )  # fmt: skip
    return f"<figure><figcaption>{text(label)}</figcaption>{drawn}</figure>"


def write(title: str, lead: str, sections: Sequence[Section], file: IO[str]) -> None:
    """The whole page. `lead` is HTML under the title."""
    body = "".join(_section(s) for s in sections)
    script = ""
    if 'class="plotly-graph-div"' in body + lead:
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}</script>"
    print(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}</style>{script}</head>"
        f"<body><main><h1>{text(title)}</h1>{lead}{body}</main><script>{_SCRIPT}</script></body></html>",
        file=file,
    )


def _section(section: Section) -> str:
    anchor = f' id="{text(section.anchor)}"' if section.anchor else ""
    return f"<section{anchor}><h2>{text(section.title)}</h2>{section.body}</section>"


_STYLE = """
:root { color-scheme: light dark; --fg: #1d2329; --soft: #5b6670; --bg: #ffffff; --line: #d9dee3;
  --best: #e9f2fd; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e8ec; --soft: #9aa5b0; --bg: #14181c;
  --line: #343b43; --best: #1c3149; --card: #1b2026; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
figcaption { font-weight: 600; margin: .8rem 0 .2rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
a { color: inherit; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; } td.number { text-align: right; white-space: nowrap; }
table.roomy td:last-child { min-width: min(26rem, 75vw); }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap; }
th button:focus-visible { outline: 2px solid #3b7dd8; }
th[aria-sort=ascending] button::after { content: " ▲"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " ▼"; font-size: .7em; }
tr.best td { background: var(--best); }
figure { margin: .5rem 0; } .plots { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); }
.plots > * { min-width: 0; }
.js-plotly-plot text { fill: var(--fg) !important; }
details > summary { cursor: pointer; padding: .3rem 0; }
section.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .2rem 1rem 1rem; margin-top: 1.2rem; }
"""

_SCRIPT = """
/* A plot is drawn while the page is still being laid out: fit it to the room it got. */
function fit() {
  document.querySelectorAll('.js-plotly-plot').forEach(function (plot) {
    if (plot.offsetWidth) Plotly.Plots.resize(plot);
  });
}
window.addEventListener('load', fit);
document.querySelectorAll('table.sortable th').forEach(function (head) {
  head.addEventListener('click', function () {
    var table = head.closest('table'), body = table.tBodies[0];
    var column = Array.prototype.indexOf.call(head.parentNode.children, head);
    var down = head.getAttribute('aria-sort') === 'ascending';
    head.parentNode.querySelectorAll('th').forEach(function (other) {
      other.setAttribute('aria-sort', 'none');
    });
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    var value = function (row) {
      var cell = row.cells[column];
      if (cell.dataset.order !== undefined) return parseFloat(cell.dataset.order);
      return cell.textContent;
    };
    Array.from(body.rows).sort(function (a, b) {
      var x = value(a), y = value(b), numbers = [x, y].filter(Number.isFinite).length;
      if (numbers === 1) return Number.isFinite(x) ? -1 : 1;  /* what has no number goes last */
      var order = numbers === 2 ? x - y : String(x).localeCompare(String(y), 'en', {numeric: true});
      return down ? -order : order;
    }).forEach(function (row) { body.appendChild(row); });
  });
});
"""
