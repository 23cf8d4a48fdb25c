"""What a mask does to the grid: block kinds, patterns, visible pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.kernels import mask_table, masks
from autotune.problem import Problem


def statistics(problem: Problem, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Blocks by kind and visible pairs of one head; None for a kernel without a static mask."""
    mask = problem.options.get("mask")
    known = {**problem.shape, **config}
    names = ("q_len", "kv_len", "block_q", "block_kv")
    if not isinstance(mask, dict) or not all(isinstance(known.get(n), int) for n in names):
        return None
    q_len, kv_len, block_q, block_kv = (int(known[n]) for n in names)
    parsed = masks.of(mask)
    try:
        table = mask_table.table_of(parsed, q_len, kv_len, block_q, block_kv)
    except ValueError:
        return None
    pairs = int(masks.rows_of(parsed, q_len, kv_len).pairs)
    blocks = -(-q_len // block_q) * -(-kv_len // block_kv)
    return {
        "blocks": blocks,
        "active": table.active,
        "full": table.full,
        "partial": table.partial,
        "empty": blocks - table.active,
        "patterns": table.patterns,
        "visible_pairs": pairs,
        "visible_share_of_active": pairs / max(1, table.active * block_q * block_kv),
    }
