"""What a mask does to the grid: block kinds, patterns, visible pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.kernels import mask_table, masks
from autotune.problem import Problem


def statistics(problem: Problem, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Blocks by kind and visible pairs of one head; None for a kernel without a static mask."""
    mask = problem.options.get("mask")
    sizes = (config.get("block_q"), config.get("block_kv"))
    lengths = (problem.shape.get("q_len"), problem.shape.get("kv_len"))
    if not isinstance(mask, dict) or not all(isinstance(n, int) for n in (*sizes, *lengths)):
        return None
    parsed = masks.of(mask)
    try:
        table = mask_table.table_of(parsed, *lengths, *sizes)  # type: ignore[arg-type]
    except ValueError:
        return None
    q_len, kv_len = lengths
    pairs = masks.rows_of(parsed, q_len, kv_len).pairs  # type: ignore[arg-type]
    blocks = -(-q_len // sizes[0]) * -(-kv_len // sizes[1])  # type: ignore[operator]
    return {
        "blocks": blocks,
        "active": table.active,
        "full": table.full,
        "partial": table.partial,
        "empty": blocks - table.active,
        "patterns": table.patterns,
        "visible_pairs": int(pairs),
        "visible_share_of_active": pairs / (table.active * sizes[0] * sizes[1]),  # type: ignore[operator]
    }
