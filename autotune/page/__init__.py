"""One self-contained HTML page: sections, sortable tables, Plotly figures; light and dark.

Nothing is fetched: Plotly's script is inside the page, once, packed, and only where there is a
figure. What a reader may never open is packed too, and drawn when it is opened.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from autotune.page.script import SCRIPT
from autotune.page.style import STYLE

COLOURS = ("#3b7dd8", "#e08a2c", "#3a9d6e", "#c2525c", "#8265c9", "#7f8893", "#b59b2b", "#4aa7b5")
"""Readable on white and on near-black."""
CARDS = 50
"""Closed sections in sight at a time. Rows and sections that are not are hidden as they are
written: laying them out takes nine tenths of the time in which a page of a thousand opens."""
WORDY = 30
"""Letters from which on a cell has room for more of them on a line, and breaks into several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A table cell: what is shown, what it is sorted by (the text itself where None), the `anchor`
    of the section it leads to, and a `note` in small under it."""

    text: str
    order: float | None = None
    anchor: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Plotly's traces and layout as JSON values; `name` is its place in a menu of several.

    Not `plotly.graph_objects`: checking a figure takes them longer than all else a page needs, and
    the tests do it once.
    """

    data: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and its HTML; `anchor` is its place in the page's address.

    One that is `open` or `closed` can be folded; a closed one is packed and its figures are drawn
    when it is opened. `tags` are what the page's filter knows of it: `find` (text), and others.
    """

    title: str
    body: str
    anchor: str | None = None
    fold: Literal["never", "open", "closed"] = "never"
    tags: Mapping[str, str] = field(default_factory=dict)


def text(value: object) -> str:
    """`value` as HTML text."""
    return html.escape(str(value))


def paragraph(value: str) -> str:
    """`value` as a paragraph; what has backticks around it is set as code."""
    return "<p>" + re.sub("`([^`]+)`", r"<code>\1</code>", text(value)) + "</p>"


def folded(summary: str, body: str) -> str:
    """HTML that is shown once its one line is clicked; nothing where there is no `body`."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>" if body else ""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    *,
    label: str,
    bold: int = -1,
    limit: int = 0,
    anchors: Sequence[str] = (),
    kind: Literal["", "pinned"] = "",
) -> str:
    """A table that sorts by the column whose head is clicked.

    `label` is its name for who does not see the page. `bold` is the row to stand out; beyond
    `limit` rows a button shows the rest. `anchors` are the sections that each row stands for, a
    word each: a row is shown while one of them passes the page's filter. `pinned` keeps the first
    column in sight.
    """
    numeric = [
        any(isinstance(row[i], Cell) and row[i].order is not None for row in rows)  # type: ignore[union-attr]
        for i in range(len(header))
    ]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{" class=number" if is_number else ""}>'
        f'<button type="button">{text(h)}</button></th>'
        for h, is_number in zip(header, numeric, strict=True)
    )
    body = []
    for i, row in enumerate(rows):
        at = f' data-at="{text(anchors[i])}"' if anchors else ""
        look = (" class=best" if i == bold else "") + (" hidden" if limit and i >= limit else "")
        cells = "".join(map(_cell, row, numeric))
        body.append(f"<tr{look}{at}>{cells}</tr>")
    more = f' data-limit="{limit}"' if limit else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{text(label)}">'
        f'<table class="sortable {kind}"{more}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(cell: Cell | str, is_number: bool) -> str:
    """`is_number` is the column's: a dash among numbers stands where they do."""
    cell = Cell(text=cell) if isinstance(cell, str) else cell
    kind = " class=number" if is_number else " class=words" if len(cell.text) > WORDY else ""
    shown = text(cell.text)
    if cell.anchor:
        shown = f'<a href="#{text(cell.anchor)}">{shown}</a>'
    if cell.note:
        shown += f" <small>{text(cell.note)}</small>"
    order = "" if cell.order is None else f' data-order="{cell.order!r}"'
    return f"<td{kind}{order}>{shown}</td>"


def figure(*choices: Figure, label: str, height: int = 340) -> str:
    """A figure under its `label` as a heading, in the page's width and colours.

    Several `choices` get a menu, the first of them shown. No `<` is left in the JSON: `<!--` and
    `<script` would end a script element elsewhere than where it ends.
    """
    told = [{"name": c.name, "data": c.data, "layout": c.layout} for c in choices]
    script = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{text(label)}</figcaption>"
        f'<div class="plot" data-height="{height}" aria-label="{text(label)}">'
        f'<script type="application/json">{script}</script></div></figure>'
    )


def limit_line(at: float, *, axis: Literal["x", "y"]) -> dict[str, Any]:
    """Of a layout: a dashed line across the plot at `at` of `axis`, named so with its value."""
    other = "y" if axis == "x" else "x"
    line = {
        "type": "line", f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1,
        f"{axis}ref": axis, f"{other}ref": "paper", "line": {"dash": "dash", "color": COLOURS[3]},
    }  # fmt: skip
    name = {
        axis: at, f"{axis}ref": axis, other: 1, f"{other}ref": "paper", "text": f"limit {at:.4g}",
        "showarrow": False, "xanchor": "right", "yanchor": "bottom" if axis == "y" else "top",
    }  # fmt: skip
    return {"shapes": [line], "annotations": [name]}


def filters(choices: Mapping[str, Sequence[str]]) -> str:
    """A search field and a menu a tag, by which the sections with tags and their rows are shown."""
    menus = "".join(
        f'<label>{text(tag)} <select name="{text(tag)}"><option value="">all</option>'
        + "".join(f"<option>{text(value)}</option>" for value in values)
        + "</select></label>"
        for tag, values in choices.items()
        if len(values) > 1
    )
    return (
        '<form id="filter" role="search" hidden><label>find <input type="search" name="find" '
        f'placeholder="name, size, option"></label>{menus}<output></output></form>'
    )


def write(title: str, lead: str, sections: Iterable[Section], file: IO[str]) -> None:
    """The whole page, section by section. `lead` is HTML under the title."""
    file.write(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style>"
        "<noscript><style>tr[hidden] { display: table-row !important; }</style></noscript></head>"
        f"<body><main><h1>{text(title)}</h1>{lead}"
    )
    drawn, closed = False, 0
    for section in sections:
        drawn = drawn or 'class="plot"' in section.body
        closed += section.fold == "closed"
        file.write(_section(section, hidden=closed > CARDS))
    file.write("</main>")
    if drawn:
        from plotly.offline import get_plotlyjs

        file.write(f'<script type="text/plain" id="plotly">{_packed(get_plotlyjs())}</script>')
    script = SCRIPT.replace("COLOURS_OF_PAGE", json.dumps(COLOURS))
    script = script.replace("CARDS_OF_PAGE", str(CARDS))
    file.write(f"<script>{script}</script></body></html>\n")


def _section(section: Section, *, hidden: bool) -> str:
    anchor = f' id="{text(section.anchor)}"' if section.anchor else ""
    tags = "".join(f' data-{tag}="{text(value)}"' for tag, value in section.tags.items())
    head = f"<h2>{text(section.title)}</h2>"
    if section.fold == "never":
        return f"<section{anchor}{tags}>{head}{section.body}</section>"
    body = section.body
    if section.fold == "closed":
        body = f'<script type="text/plain" class="packed">{_packed(body)}</script>'
    state = " hidden" if hidden else " open" if section.fold == "open" else ""
    return f'<details class="card"{state}{anchor}{tags}><summary>{head}</summary>{body}</details>'


def _packed(value: str) -> str:
    """For `unpack` of the page's script: a quarter of the size, and nothing that ends a tag."""
    return base64.b64encode(gzip.compress(value.encode(), mtime=0)).decode()
