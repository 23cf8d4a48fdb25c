"""Leaderboards for programs: one JSON document, or CSV with the leaderboard's columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import IO, Any

from autotune import stale
from autotune.leaderboard import Board
from autotune.report.pairs import BackwardPair, backward_pairs
from autotune.row import Row

COLUMNS = tuple(f.name for f in fields(Row))


def write_json(boards: Sequence[Board], *, top: int | None, file: IO[str]) -> None:
    """One document: `problems`, each one's identity, counts, gain, best, default and rows; and
    `backward_pairs`. A problem a line: indented, all of it takes Python twice as long to write."""
    file.write('{"problems": [')
    for i, board in enumerate(boards):
        problem = json.dumps(_problem(board, top), allow_nan=False)
        file.write(f"{',' if i else ''}\n{problem}")
    pairs = json.dumps([_pair(pair) for pair in backward_pairs(boards)], allow_nan=False)
    file.write(f'\n],\n"backward_pairs": {pairs}}}\n')


def write_csv(boards: Sequence[Board], *, top: int | None, file: IO[str]) -> None:
    """One line a row of every problem; JSON columns stay JSON text."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for board in boards:
        for row in _limited(board, top):
            writer.writerow([_text(getattr(row, name)) for name in COLUMNS])


def _problem(board: Board, top: int | None) -> dict[str, Any]:
    first, best, default = board.rows[0], board.best, board.default
    return {
        "problem_key": first.problem_key,
        "problem_name": first.problem_name,
        "kernel": first.kernel,
        "device": first.device,
        "problem": json.loads(first.problem),
        "flops": first.flops,
        "flop_convention": board.flop_convention,
        "counts": board.counts,
        "gain_over_default": board.gain,
        "stale": stale.reason(best or first),
        "best": _row(best) if best else None,
        "default": _row(default) if default else None,
        "rows": [_row(row) for row in _limited(board, top)],
    }


def _pair(pair: BackwardPair) -> dict[str, Any]:
    return {
        "dq": pair.dq.problem_key,
        "dkv": pair.dkv.problem_key,
        "device": pair.dq.device,
        "evidence": pair.dq.evidence,
        "latency_ms": pair.latency_ms,
        "flops": pair.flops,
        "effective_tflops": pair.effective_tflops,
        "mfu": pair.mfu,
    }


def _limited(board: Board, top: int | None) -> list[Row]:
    return [r for r in board.rows if top is None or (r.rank is not None and r.rank <= top)]


def _row(row: Row) -> dict[str, Any]:
    record = {name: getattr(row, name) for name in COLUMNS}
    for column in ("problem", "config", "scopes", "vmem"):
        record[column] = json.loads(record[column]) if record[column] else None
    record["created_at"] = row.created_at.isoformat() if row.created_at else None
    return record


def _text(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value) if isinstance(value, list) else value
