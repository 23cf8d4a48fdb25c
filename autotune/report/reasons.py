"""Why candidates did not survive: reasons that are alike but for their numbers are one kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from autotune.leaderboard import Board

NUMBER = re.compile(r"\d[\d.,]*")
MOST = 3
"""Kinds that are told one by one."""


def common(boards: Sequence[Board]) -> list[str]:
    """`12 pruned: …`: the most common kinds of reason in all `boards`, each with one of its texts;
    then how many candidates the others are."""
    kinds = _kinds(boards)
    rest = [number for number, _ in kinds[MOST:]]
    told = [f"{number} {text}" for number, text in kinds[:MOST]]
    return [*told, f"{sum(rest)} for {len(rest)} other reasons"] if rest else told


def of_nothing_left(board: Board) -> list[str]:
    """Why no candidate of `board` survived: the most common kinds of reason."""
    return [f"no candidate survived; {text}" for _, text in _kinds([board])[:MOST]]


def _kinds(boards: Sequence[Board]) -> list[tuple[int, str]]:
    """How many candidates each kind has, and one of its texts behind the status."""
    texts = Counter(
        f"{r.status}: {r.reason}" for board in boards for r in board.rows if r.status != "ok"
    )
    kinds: dict[str, tuple[int, str]] = {}
    for text, number in texts.items():
        kind = NUMBER.sub("#", text)
        before, first = kinds.get(kind, (0, text))
        kinds[kind] = (before + number, first)
    return sorted(kinds.values(), key=lambda kind: -kind[0])
