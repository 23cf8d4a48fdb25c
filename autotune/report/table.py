"""Leaderboards as tables: for a terminal and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from autotune import stale
from autotune.device import DEVICES
from autotune.errors import printable
from autotune.leaderboard import Board
from autotune.report import facts, reasons
from autotune.report.pairs import backward_pairs
from autotune.report.units import counted, milliseconds
from autotune.row import Row, indistinguishable

HEADER = ("rank", "blocks", "latency", "MFU", "TFLOP/s", "VMEM / limit", "spills", "vs default")
MIB = 2**20


def cells(row: Row, default: Row | None, best: Row | None = None) -> tuple[str, ...]:
    """One ranked row as text, in the order of `HEADER`.

    `≈` marks a row that cannot be told apart from `best`.
    """
    near = best is not None and best is not row and indistinguishable(row, best)
    return (
        f"{row.rank}{' ≈' if near else ''}{' *' if row.is_default else ''}",
        blocks(row.config),
        f"{banded(row)} {row.evidence}" if row.latency_ms is not None else "–",
        f"{row.mfu:.1%}" if row.mfu is not None else "–",
        f"{row.effective_tflops:.1f}" if row.effective_tflops is not None else "–",
        _vmem(row),
        "–" if (spilled := spills(row)) is None else str(spilled),
        _versus(row, default),
    )


def banded(row: Row) -> str:
    """A ranked row's latency with its band, where one is known: `0.2034 ms ±12%`."""
    assert row.latency_ms is not None
    return f"{milliseconds(row.latency_ms)} {band(row)}".rstrip()


def band(row: Row) -> str:
    """`±12%`: the band of a row's latency as a share of it, the wider side where they differ, below
    1 % with a digit more; empty where none is known."""
    if row.latency_ms is None or row.latency_low_ms is None or row.latency_high_ms is None:
        return ""
    wider = max(row.latency_high_ms / row.latency_ms - 1, 1 - row.latency_low_ms / row.latency_ms)
    return f"±{wider:{'.0%' if wider >= 0.01 else '.1%'}}"


def blocks(config: str) -> str:
    """A config as `bm=512 bk=1024`; entries that are null (the kernel's own choice) left out."""
    return printable(" ".join(f"{k}={v}" for k, v in json.loads(config).items() if v is not None))


def caption(board: Board) -> list[str]:
    """What stands under a table: the funnel, the default, the FLOP convention, staleness."""
    counts = board.counts
    words = _WORDS | ({"not_evaluated": "not timed"} if _timed(board) else {})
    ends = [f"{n} {words.get(s, s)}" for s, n in counts.items() if s != "candidates"]
    lines = [f"{counted(counts['candidates'], 'candidate')}: " + ", ".join(ends)]
    lines += reasons.common([board]) if board.best else reasons.of_nothing_left(board)
    lines += filter(None, (of_default(board), of_bandwidth(board), _of_scratch(board)))
    if board.best is not None and board.best.timer in _TIMES:
        lines.append(_TIMES[board.best.timer])
    if board.best is not None and (reason := stale.reason(board.best)):
        lines.append(reason)
    if alike := _alike(board):
        lines.append(alike)
    if board.flop_convention:
        lines.append(f"FLOPs: {board.flop_convention}")
    return [printable(line) for line in lines]


def of_default(board: Board) -> str | None:
    """Why there is no gain over the default, and what is known of it; None where it is ranked."""
    default = board.default
    if default is None:
        return "no default: the kernel states none, or its row is not here"
    if default.rank is not None:
        return None
    return f"default {blocks(default.config)}: {default.reason or _unranked(board)}"


TELLING = 0.02
"""MFU below which a kernel is told by its share of the HBM's bandwidth too."""


def of_bandwidth(board: Board) -> str | None:
    """HBM traffic of the best over its latency, for kernels that compute next to nothing."""
    best, device = board.best, DEVICES.get(board.rows[0].device)
    if best is None or device is None or not best.latency_ms or not best.hbm_bytes:
        return None
    if best.mfu is not None and best.mfu >= TELLING:
        return None
    bytes_per_s = best.hbm_bytes / best.latency_ms * 1e3
    share = bytes_per_s / device.hbm_bytes_per_s
    return f"the best moves {bytes_per_s / 1e9:,.0f} GB/s, {share:.0%} of the HBM's bandwidth"


def _of_scratch(board: Board) -> str | None:
    """Why a candidate that the compiler took has more VMEM than its limit."""
    ranked = (r for r in board.rows if r.rank is not None)
    if not any((vmem_bytes(r) or 0) > (r.vmem_limit_bytes or math.inf) for r in ranked):
        return None
    return "VMEM over the limit: the compiler's internal scratch does not count against it"


def _unranked(board: Board) -> str:
    """What is known of an `ok` default with weaker evidence than the ranked rows; beside the best's
    by that evidence, so that the table says what tuning is predicted to win where it cannot say
    what it won."""
    best, default = board.best, board.default
    assert default is not None
    said = "not timed" if _timed(board) else "not evaluated"
    weaker = default.latency_ms_of(default.evidence)
    if weaker is None:
        return said
    said += f"; {milliseconds(weaker)} {default.evidence}"
    if best is None or (own := best.latency_ms_of(default.evidence)) is None:
        return said
    return f"{said}, {weaker / own:.2f}x the best's {milliseconds(own)} {default.evidence}"


def _alike(board: Board) -> str | None:
    """How many ranked rows cannot be told apart from the best."""
    best = board.best
    if best is None:
        return None
    ranked = [r for r in board.rows if r.rank is not None and r is not best]
    alike = sum(indistinguishable(r, best) for r in ranked)
    if not alike:
        return None
    return f"≈ cannot be told apart from the best, by the bands of their latencies: {alike}"


PIPED = 140
"""Columns where the width is not a terminal's."""
NARROW = 120
"""Below it, blocks would wrap: they stand under the figures instead of beside them."""


def write_terminal(boards: Sequence[Board], *, top: int, file: IO[str]) -> None:
    """Tables on `file`, one a problem, as wide as the terminal is; then the backward pairs."""
    console = terminal(file)
    for board in boards:
        rows = [(r, cells(r, board.default, board.best)) for r in _shown(board, top)]
        if rows and console.width >= NARROW:
            console.print(_boxed(title(board), rows))
        else:
            console.print(title(board), style="bold")
            _stacked(rows, console)
        for line in caption(board):
            console.print(Padding(line, (0, 0, 0, 2), expand=False))
        console.print()
    pairs = backward_pairs(boards)
    for pair in pairs:
        console.print(f"{pair.title}: {pair.text}")
    if pairs:
        console.print()


def terminal(file: IO[str]) -> Console:
    """Of the terminal's width; of `PIPED` columns where `file` is none."""
    width = None if file.isatty() else PIPED
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def _boxed(name: str, rows: Sequence[tuple[Row, tuple[str, ...]]]) -> Table:
    table = Table(title=name, title_justify="left")
    for head in HEADER:
        numeric = head not in ("rank", "blocks")
        table.add_column(head, justify="right" if numeric else "left", overflow="fold")
    for row, shown in rows:
        table.add_row(*shown, style="bold" if row.is_best else None)
    return table


def _stacked(rows: Sequence[tuple[Row, tuple[str, ...]]], console: Console) -> None:
    """Rank and figures on one line, the blocks under them."""
    if not rows:
        return
    head, *lines = aligned([(HEADER[0], *HEADER[2:]), *((c[0], *c[2:]) for _, c in rows)])
    console.print(head, style="underline")
    for (row, shown), line in zip(rows, lines, strict=True):
        style = "bold" if row.is_best else None
        console.print(line, style=style)
        console.print(Padding(shown[1], (0, 0, 0, 7), expand=False), style=style)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines whose columns end where those of the others end, two spaces apart."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(" " * (w - cell_len(cell)) + cell for cell, w in zip(row, widths, strict=True))
        for row in rows
    ]


def write_markdown(boards: Sequence[Board], *, top: int, file: IO[str]) -> None:
    """GitHub-flavoured tables, one a problem."""
    for board in boards:
        print(f"### {escaped(title(board))}\n", file=file)
        rows = [cells(row, board.default, board.best) for row in _shown(board, top)]
        markdown(HEADER, rows, file)
        print("  \n".join(map(escaped, caption(board))) + "\n", file=file)
    for pair in backward_pairs(boards):
        print(f"**{escaped(pair.title)}**: {pair.text}\n", file=file)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], file: IO[str]) -> None:
    """One GitHub-flavoured table and an empty line."""
    print("| " + " | ".join(header) + " |", file=file)
    print("| " + " | ".join("---" for _ in header) + " |", file=file)
    for row in rows:
        print("| " + " | ".join(map(escaped, row)) + " |", file=file)
    print(file=file)


def escaped(text: str) -> str:
    """`text` without what ends a cell or begins a tag in Markdown, on one line."""
    return (
        " ".join(printable(text).split())
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace("|", "\\|")
    )


def _shown(board: Board, top: int) -> list[Row]:
    """The first `top` ranked rows, and the default wherever it ranks."""
    return [r for r in board.rows if r.rank is not None and (r.rank <= top or r.is_default)]


def title(board: Board) -> str:
    """`name: kernel on device (shape; options)`; of the options what is on or has a value, and the
    dtype where it is not bfloat16, so that no two problems of one shape look alike."""
    first = board.rows[0]
    name = f"{first.problem_name}: " if first.problem_name else ""
    return printable(f"{name}{first.kernel} on {first.device} ({facts.shape(first)})")


_TIMES = {
    "replay": "measured: times of a recording, not taken here",
    "host_clock": "measured: by the host's clock, less that of an empty program",
}
_WORDS = {
    "not_evaluated": "beyond the budget",
    "oom": "out of memory by the compiler",
    "unsupported": "unsupported by the compiler",
    "pruned": "pruned (model or legality)",
}


def _timed(board: Board) -> bool:
    return board.best is not None and board.best.evidence == "measured"


def vmem_bytes(row: Row) -> int | None:
    """What the compiler allocates, the model's sum where nothing was compiled."""
    return row.vmem_model_bytes if row.vmem_compiled_bytes is None else row.vmem_compiled_bytes


def spills(row: Row) -> int | None:
    """Loads and stores of spilled registers in the program text."""
    return None if row.spill_stores is None else (row.spill_loads or 0) + row.spill_stores


def _vmem(row: Row) -> str:
    used = vmem_bytes(row)
    if used is None or row.vmem_limit_bytes is None:
        return "–"
    return f"{used / MIB:.1f} / {row.vmem_limit_bytes / MIB:.0f} MiB"


def gain(row: Row, default: Row | None) -> float | None:
    """The default's latency over the row's; None where they have no evidence in common."""
    if default is None or not default.rank or not default.latency_ms or not row.latency_ms:
        return None
    return default.latency_ms / row.latency_ms


def _versus(row: Row, default: Row | None) -> str:
    times = gain(row, default)
    return "–" if times is None else f"{times:.2f}x"
