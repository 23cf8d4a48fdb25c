"""Many leaderboards on one screen: a line a problem, under the kernel and device they share."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import IO

from rich.cells import cell_len

from autotune import stale
from autotune.errors import printable
from autotune.leaderboard import Board
from autotune.report import reasons, table
from autotune.report.naming import names
from autotune.report.pairs import backward_pairs, shared
from autotune.report.units import counted, milliseconds

FEW = 12
"""Leaderboards that are told in full where nobody says otherwise; of more, a line each."""
FIGURES = ("latency", "vs default", "MFU", "TFLOP/s", "VMEM MiB", "spills")
COUNTS = ("candidates", "ranked", "pruned", "rejected", "failed")
PRUNED, REJECTED = ("pruned",), ("oom", "unsupported")
FAILED = ("failed", "timeout", "crashed", "wrong")


def write_terminal(boards: Sequence[Board], *, many: bool, file: IO[str]) -> None:
    """The summary on `file`, as wide as the terminal is.

    Of `many` boards it is all that is told: why candidates did not survive stands under each
    table; the backward pairs follow, what MFU counts, and how to see more.
    """
    console = table.terminal(file)
    lines = _groups(boards, console.width, reasoned=many)
    if many:
        lines += [*_pairs(boards), *_totals(boards), (False, "")]
        lines += [(False, x) for said in conventions(boards) for x in _folded(said, console.width)]
    for is_heading, line in lines:
        console.print(line, style="bold" if is_heading else None, soft_wrap=True)
    if many:
        said = f"{len(boards)} problems; --problem TEXT or --top N show their candidates"
        for note in (*_notes(boards), said):
            console.print(note)


def write_markdown(boards: Sequence[Board], *, file: IO[str]) -> None:
    """The summary as one GitHub-flavoured table, and one of the backward pairs."""
    header = ("problem", "kernel", "device", "evidence", *FIGURES, *COUNTS, "winner")
    rows = [
        (name, b.rows[0].kernel, b.rows[0].device, b.best.evidence if b.best else "–",
         *_figures(b), *map(str, ended(b)), _winner(b))
        for b, name in zip(boards, names(boards), strict=True)
    ]  # fmt: skip
    table.markdown(header, rows, file)
    if pairs := _pair_rows(boards):
        table.markdown(PAIR, pairs, file)
    remarks = [
        f"{about}: {'; '.join(said)}"
        for about, some in _alike(boards).items()
        if (said := [*reasons.common(some), *_remarks([(b, b.title) for b in some])])
    ]
    for note in (*remarks, *conventions(boards), *_notes(boards)):
        print(f"{table.escaped(note)}  ", file=file)


Line = tuple[bool, str]
"""Whether it is a heading, and its text."""


def _groups(boards: Sequence[Board], width: int, *, reasoned: bool) -> list[Line]:
    """Problems under the kernel, device and evidence they share.

    The counts have columns where there is room for them, and stand beside the winner where there
    is not, both then under the problem; with columns, the winner is beside them where it fits.
    `reasoned`: why the other candidates of a group did not survive, under it.
    """
    said: list[Line] = []
    groups = itertools.groupby(zip(boards, names(boards), strict=True), lambda p: _about(p[0]))
    for about, group in groups:
        some = list(group)
        told = _group([b for b, _ in some], [name for _, name in some], width)
        if reasoned:
            for line in ("; ".join(reasons.common([b for b, _ in some])), *_remarks(some)):
                told += _folded(line, width, indent="  ")
        said += [(False, ""), (True, about), *((False, line) for line in told)]
    return said[1:]


def _remarks(boards: Sequence[tuple[Board, str]]) -> list[str]:
    """Why there is no gain, or hardly an MFU: a line a problem, or one for all of one remark."""
    said: dict[str, list[str]] = {}
    for board, name in boards:
        for remark in (table.of_default(board), table.of_bandwidth(board)):
            if board.best is not None and remark:
                said.setdefault(remark, []).append(name)
    return [
        f"{names[0] if len(names) == 1 else f'{len(names)} problems'}: {remark}"
        for remark, names in said.items()
    ]


def _folded(text: str, width: int, *, indent: str = "") -> list[str]:
    """Text on as many lines as it needs, further in from the second on; none for none."""
    further = f"{indent}  "
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
    )


def _about(board: Board) -> str:
    first, best = board.rows[0], board.best
    evidence = best.evidence if best else "no candidate survived"
    return printable(f"{first.kernel} on {first.device}, {evidence}")


def _group(boards: Sequence[Board], names: Sequence[str], width: int) -> list[str]:
    counts = [ended(board) for board in boards]
    rows = [(*_figures(b), *map(str, n)) for b, n in zip(boards, counts, strict=True)]
    longest = max(map(cell_len, names))
    figures = table.aligned([(*FIGURES, *COUNTS), *rows])
    roomy = longest + 2 + cell_len(figures[0]) <= width
    if not roomy:
        figures = table.aligned([FIGURES, *(_figures(board) for board in boards)])
    beside = longest + 2 + cell_len(figures[0]) <= width
    said = [f"{'':{longest if beside else 0}}  {figures[0]}{'  winner' * roomy}"]
    for board, name, row, count in zip(boards, names, figures[1:], counts, strict=True):
        line = f"{_padded(name, longest)}  {row}" if beside else f"  {row}"
        said += [] if beside else [name]
        if roomy:
            said += _wrapped([line, _winner(board)], width)
        else:
            said += [line, *_wrapped([f"    {_winner(board)}", _counted(count)], width)]
    return said


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Parts on one line as far as they fit, the others on lines of their own, indented."""
    said = [parts[0]]
    for part in parts[1:]:
        if cell_len(said[-1]) + 2 + cell_len(part) <= width:
            said[-1] += f"  {part}"
        else:
            said.append(f"    {part}")
    return said


def _counted(counts: Sequence[int]) -> str:
    told = ", ".join(f"{n} {s}" for n, s in zip(counts[1:], COUNTS[1:], strict=True) if n)
    return f"{counted(counts[0], 'candidate')}: {told}"


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


PAIR = ("backward pass", "device", "dq", "dkv", "dq + dkv", "evidence", "MFU", "TFLOP/s")


def _pairs(boards: Sequence[Board]) -> list[Line]:
    rows = _pair_rows(boards)
    if not rows:
        return []
    longest = max(cell_len(row[0]) for row in rows)
    head, *lines = table.aligned([PAIR[1:], *(row[1:] for row in rows)])
    return [
        (False, ""),
        (True, f"{_padded('dq + dkv', longest)}  {head}"),
        *((False, f"{_padded(row[0], longest)}  {x}") for row, x in zip(rows, lines, strict=True)),
    ]


TOTALS = ("problems", "vs default", "least", "most", "median MFU")


def _totals(boards: Sequence[Board]) -> list[Line]:
    """A line a kernel, device and evidence: geometric mean of the gains, their ends, median MFU."""
    groups = _alike(boards)
    rows = []
    for some in groups.values():
        gains = [board.gain for board in some if board.gain]
        mfus = [board.best.mfu for board in some if board.best and board.best.mfu]
        told = (statistics.geometric_mean(gains), min(gains), max(gains)) if gains else ()
        cells = [f"{gain:.2f}x" for gain in told] or ["–"] * 3
        mfu = f"{statistics.median(mfus):.1%}" if mfus else "–"
        rows.append((str(len(some)), *cells, mfu))
    longest = max(map(cell_len, groups))
    head, *lines = table.aligned([TOTALS, *rows])
    return [
        (False, ""),
        (True, f"{'':{longest}}  {head}"),
        *((False, f"{_padded(k, longest)}  {x}") for k, x in zip(groups, lines, strict=True)),
    ]


def _alike(boards: Sequence[Board]) -> dict[str, list[Board]]:
    """Boards by kernel, device and evidence."""
    groups: dict[str, list[Board]] = {}
    for board in boards:
        groups.setdefault(_about(board), []).append(board)
    return groups


def conventions(boards: Sequence[Board]) -> list[str]:
    """What the FLOPs behind MFU and TFLOP/s are, a line a kernel."""
    counted = {(b.rows[0].kernel, b.flop_convention): None for b in boards if b.flop_convention}
    return [printable(f"FLOPs of {kernel}: {convention}") for kernel, convention in counted]


def _notes(boards: Sequence[Board]) -> list[str]:
    """What each table would say under it and a reader of winners must know."""
    firsts = [board.best or board.rows[0] for board in boards]
    stories = Counter(reason for row in firsts if (reason := stale.reason(row)))
    return [
        printable(f"{n} of {len(boards)} problems are {reason}")
        for reason, n in stories.most_common()
    ]


def _pair_rows(boards: Sequence[Board]) -> list[tuple[str, ...]]:
    name = dict(zip((id(b.best or b) for b in boards), names(boards), strict=True))
    return [
        (shared(name[id(pair.dq)], name[id(pair.dkv)]), pair.dq.device,
         table.banded(pair.dq), table.banded(pair.dkv), milliseconds(pair.latency_ms),
         pair.dq.evidence,
         "–" if pair.mfu is None else f"{pair.mfu:.1%}", f"{pair.effective_tflops:.1f}")
        for pair in backward_pairs(boards)
    ]  # fmt: skip


def _figures(board: Board) -> tuple[str, ...]:
    best = board.best
    if best is None:
        return ("–",) * len(FIGURES)
    _, _, _, mfu, tflops, vmem, spills, versus = table.cells(best, board.default)
    return (table.banded(best), versus, mfu, tflops, vmem.removesuffix(" MiB"), spills)


def ended(board: Board) -> tuple[int, ...]:
    """Candidates in the order of `COUNTS`; one in no other column was beyond the budget."""
    counts = board.counts
    return (
        counts["candidates"],
        counts["ranked"],
        *(sum(counts.get(s, 0) for s in group) for group in (PRUNED, REJECTED, FAILED)),
    )


def _winner(board: Board) -> str:
    if board.best is None:
        return next((f"{r.status}: {r.reason}" for r in board.rows if r.reason), "none")
    return table.blocks(board.best.config)
