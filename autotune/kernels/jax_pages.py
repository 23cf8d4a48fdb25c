"""What JAX's two paged attention kernels share: the page table of a problem, and its gathering.

All sequences of a problem are of one length. Lengths and page table are known when the call is
built, so how often a kernel's loops turn is known as well; a server passes them at run time, to the
same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.candidate import Scalar
from autotune.errors import InputError
from autotune.kernels.base import Tunable
from autotune.problem import Problem

MOST_PAGES, MOST_TOKENS = 64, 4096
"""Pages searched a block: each is a copy of its own in the program text."""


def pages_per_sequence(problem: Problem) -> int:
    return -(-problem.shape["kv_len"] // problem.shape["page_size"])


def page_table(problem: Problem) -> np.ndarray:
    """int32[batch, pages]: every page once, scattered as in a cache that has been in use."""
    batch, pages = problem.shape["batch"], pages_per_sequence(problem)
    order = np.random.default_rng(0).permutation(batch * pages)
    return order.astype(np.int32).reshape(batch, pages)


def gathered(problem: Problem, pages: Any) -> np.ndarray:
    """float64[batch, kv_len, …] of pages [total pages, page_size, …]."""
    rows = np.asarray(pages).astype(np.float64)[page_table(problem)]
    flat = rows.reshape(len(rows), -1, *rows.shape[3:])
    return np.asarray(flat[:, : problem.shape["kv_len"]])


def check_heads(problem: Problem) -> None:
    """Raises InputError naming both head counts where kv_heads do not divide q_heads."""
    q_heads, kv_heads = problem.shape["q_heads"], problem.shape["kv_heads"]
    if q_heads % kv_heads:
        raise InputError(
            f"kv_heads {kv_heads} do not divide q_heads {q_heads}; every kv head serves the same "
            "number of q heads",
            path=("shape", "kv_heads"),
        )


def searched(problem: Problem, counts: Sequence[int]) -> tuple[int, ...]:
    """The counts of pages a block that are worth a trial; the smallest where none is."""
    size = problem.shape["page_size"]
    kept = tuple(n for n in counts if n <= MOST_PAGES and n * size <= MOST_TOKENS)
    return kept or (min(counts),)


def up_to(values: tuple[Scalar, ...], most: int) -> Tunable:
    """A tunable that is any whole number from 1 to `most`."""

    def check(value: Scalar) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and 1 <= int(value or 0) <= most else f"from 1 to {most}"

    return Tunable(values=values, check=check)
