"""What problems are called where many stand together: no two alike, and no longer than need be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autotune.leaderboard import Board
from autotune.report import facts

_Named = tuple[str, str, str | None]


def names(boards: Sequence[Board]) -> list[str]:
    """A problem's name; its shape where it has none.

    Of several of one name, kernel and device, with what tells them apart and no more: the names a
    config's matrix makes say all axes of it, and long options by their number.
    """
    alike: dict[_Named, list[Board]] = {}
    for board in boards:
        alike.setdefault(_named(board), []).append(board)
    differing = {key: _differing(some) for key, some in alike.items() if len(some) > 1}
    told = [_name(board, differing.get(_named(board))) for board in boards]
    taken = Counter((_named(board), name) for board, name in zip(boards, told, strict=True))
    return [
        name if taken[_named(board), name] == 1 else _unlike(board, name)
        for board, name in zip(boards, told, strict=True)
    ]


def _unlike(board: Board, name: str) -> str:
    """For what words in brief do not tell apart, as two lists of many documents."""
    first = board.rows[0]
    return first.problem_name or f"{name} {first.problem_key.rpartition('-')[2]}"


def _named(board: Board) -> _Named:
    """Kernel, device, and the name without what a matrix wrote behind it."""
    first = board.rows[0]
    words, told = (first.problem_name or "").split(" "), facts.facts(first)
    while len(words) > 1 and _of_a_matrix(words[-1], told):
        words.pop()
    return first.kernel, first.device, " ".join(words) or None


def _of_a_matrix(word: str, told: Mapping[str, str]) -> bool:
    """Whether a matrix wrote `word`: `q_len=512`, `mask={causal:{}}`, or `mask=#2`."""
    name, _, value = word.partition("=")
    return name in told and (value == told[name] or value[:1] in ("#", "{"))


def _name(board: Board, differing: Sequence[str] | None) -> str:
    first = board.rows[0]
    if first.problem_name is None:
        return facts.shape(first)
    told = facts.facts(first)
    if differing is None:
        words = (word.partition("=") for word in first.problem_name.split(" "))
        return " ".join(
            f"{k}={told[k]}" if k in told and v.startswith("#") else k + sign + v
            for k, sign, v in words
        )
    return " ".join([_named(board)[2] or "", *(f"{k}={told[k]}" for k in differing if k in told)])


def _differing(boards: Sequence[Board]) -> list[str]:
    """What not all have alike; of several that go together (q_len and kv_len), the first."""
    told = [facts.facts(board.rows[0]) for board in boards]
    columns = {k: tuple(f.get(k) for f in told) for k in dict.fromkeys(k for f in told for k in f)}
    shown: dict[tuple[str | None, ...], str] = {}
    for key, values in columns.items():
        if len(set(values)) > 1:
            shown.setdefault(values, key)
    return list(shown.values())
