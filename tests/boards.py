"""Hand-made leaderboards of real problems, for tests of what reads leaderboards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune import leaderboard, versions
from autotune.candidate import Candidate
from autotune.leaderboard import Board
from autotune.problem import Problem
from autotune.row import Row

MATMUL_TILE = {
    "bm": 512, "bk": 512, "bn": 512, "grid_order": "mn", "buffers": 2, "vmem_limit_bytes": None,
}  # fmt: skip


def problem(
    kernel: str,
    shape: Mapping[str, int],
    *,
    device: str = "v6e",
    options: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    name: str | None = None,
) -> Problem:
    """A problem as `make_problem` would make it: options filled in with `defaults`."""
    full = {**(defaults or {}), **(options or {})}
    return Problem(
        kernel=kernel, device=device, shape=shape, options=full, dtype=dtype, name=name,
        defaults=frozenset(k for k, v in (defaults or {}).items() if full[k] == v),
    )  # fmt: skip


def row(about: Problem, config: Mapping[str, Any], latency_ms: float | None, **columns: Any) -> Row:
    """An `ok` row with compiled evidence, made with what is installed here."""
    here = versions.installed()
    evidence = columns.pop("evidence", "compiled")
    fields: dict[str, Any] = {
        "problem_key": about.key,
        "problem_name": about.name,
        "kernel": about.kernel,
        "device": about.device,
        "problem": about.json,
        "config": Candidate.of(config).json,
        "status": "ok",
        "evidence": evidence,
        f"latency_{evidence}_ms": latency_ms,
        "jax_version": here["jax"],
        "libtpu_version": here["libtpu"],
    }
    return Row(**{**fields, **columns})


def store(results: Path, *rows: Row) -> Board:
    """The board of `rows`, all of one problem, written below `results`."""
    first = rows[0]
    path = leaderboard.path_of(results, first.device, first.kernel, first.problem_key)
    return leaderboard.merge(path, rows, flop_convention="2·m·k·n", replace_stored=True)


def store_matmul(
    results: Path,
    m: int,
    k: int,
    n: int,
    latency_ms: float = 1.0,
    *,
    tile: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    **columns: Any,
) -> Board:
    """A board of one matmul tile and the 128-cubed default, three times slower.

    `about` is passed on to `problem`, `columns` to `row`.
    """
    config = {**MATMUL_TILE, **(tile or {})}
    about = problem("matmul", {"m": m, "k": k, "n": n}, **(about or {}))
    default = {**MATMUL_TILE, "bm": 128, "bk": 128, "bn": 128}
    return store(
        results,
        row(about, config, latency_ms, **columns),
        row(about, default, 3 * latency_ms, is_default=True, **columns),
    )
