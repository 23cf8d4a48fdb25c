"""The look of a page: light and dark, a desktop's and a phone's width."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --fg: #1d2329; --soft: #56616b; --bg: #ffffff; --line: #d9dee3;
  --best: #e9f2fd; --card: #f7f8fa; --link: #1f5fb4; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e8ec; --soft: #9aa5b0; --bg: #14181c;
  --line: #343b43; --best: #1c3149; --card: #1b2026; --link: #8ab8f5; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
figcaption { font-weight: 600; margin: .8rem 0 .2rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; } .soft { color: var(--soft); }
a { color: var(--link); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
.wide { overflow-x: auto; }
/* Separate: a collapsed border stays behind where a pinned cell moves on. */
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums;
  font-size: 14px; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th.number, td.number { text-align: right; } td.number { white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: 12px; }
table.pinned td { white-space: nowrap; }
table.sortable td.words { white-space: normal; min-width: min(19rem, 60vw); }
table.pinned td:first-child, table.pinned th:first-child { position: sticky; left: 0;
  background: var(--bg); min-width: min(11rem, 38vw); white-space: normal;
  overflow-wrap: anywhere; }
table.pinned td.words:first-child { min-width: min(19rem, 38vw); }
th { vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap; }
table.pinned th button { white-space: normal; }
th button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " ▲"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " ▼"; font-size: .7em; }
tr.best td { background: var(--best); }
button.more { font: inherit; margin: .4rem 0; padding: .2rem .8rem; cursor: pointer;
  color: var(--link); background: none; border: 1px solid var(--line); border-radius: 6px; }
figure { margin: .5rem 0; } .plots { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); }
.plots > * { min-width: 0; }
.js-plotly-plot text { fill: var(--fg) !important; }
/* On a bar's own colour, which is of middling lightness in both schemes. */
.js-plotly-plot .barlayer text.bartext-inside { fill: #0d1115 !important; }
#filter, label.menu { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; }
#filter { margin: 1rem 0 0; } label.menu { gap: .5rem; color: var(--soft); font-size: 14px; }
input, select { font: inherit; padding: .2rem .4rem; max-width: 100%; color: var(--fg);
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
output { color: var(--soft); }
details > summary { cursor: pointer; padding: .3rem 0; }
details.card { border-top: 1px solid var(--line); margin-top: .5rem; }
details.card > summary > h2 { display: inline; font-size: 1.05rem; overflow-wrap: anywhere; }
details.card:not([open]) > summary > h2 { font-size: .95rem; font-weight: 500; }
details.card[open] { padding-bottom: 1.5rem; }
"""
