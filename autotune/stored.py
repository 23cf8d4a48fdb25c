"""What a stored row speaks of, made again: its kernel, problem and candidate. No jax import."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.candidate import Candidate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.kernels.base import Kernel
    from autotune.problem import Problem
    from autotune.row import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A row's problem as it is stored: options filled in with defaults, nulls left out."""

    shape: Mapping[str, int]
    options: Mapping[str, Any]
    dtype: str


def statement_of(row: Row) -> Statement:
    """The problem that a row, read by `leaderboard.read` or checked as there, states."""
    stated = json.loads(row.problem)
    return Statement(
        shape=stated["shape"],
        options=stated.get("options") or {},
        dtype=stated.get("dtype", "bfloat16"),
    )


def problem_of(row: Row) -> tuple[Kernel, Problem]:
    """The row's kernel and problem as they are today. Imports the kernel, and so jax.

    Raises:
      InputError: there is no such kernel any more, or the problem is none of its today.
      KernelError: the kernel cannot be imported, or one of its functions raised.
    """
    from autotune.kernels import base

    stated, kernel = statement_of(row), base.load(row.kernel)
    problem = base.make_problem(
        kernel, device=row.device, shape=stated.shape, options=stated.options, dtype=stated.dtype,
        name=row.problem_name,
    )  # fmt: skip
    return kernel, problem


def candidate_of(row: Row) -> Candidate:
    """The row's candidate."""
    return Candidate.of(json.loads(row.config), is_default=row.is_default)


def names_kernel(text: str, kernel: str) -> bool:
    """Whether `text` names a stored kernel: as it is, or as its folder under the results does.

    A user's `package.module:ATTRIBUTE` is kept in the folder `package.module.ATTRIBUTE`.
    """
    return text in (kernel, kernel.replace(":", "."))
