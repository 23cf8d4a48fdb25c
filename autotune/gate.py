"""The gate: stored best configs against today's kernel, jax and libtpu."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from autotune import leaderboard, stale
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.errors import AutotuneError, InputError, KernelError
from autotune.kernels import base
from autotune.leaderboard import Board
from autotune.progress import Progress
from autotune.report.units import milliseconds
from autotune.row import Row
from autotune.search.prune import Stages
from autotune.search.space import Space

PASS, REGRESSION, INCONCLUSIVE = "pass", "regression", "inconclusive"
EXIT_STATUS = {PASS: 0, REGRESSION: 1, INCONCLUSIVE: 3}
_EVIDENCE = {"model": "model", "compile": "compiled", "measure": "measured"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one stored best config.

    Attributes:
      outcome: `pass`, `regression` or `inconclusive`.
      reason: one line: what was compared, or why nothing could be.
      baseline_ms, today_ms: latency of the stored row and of today's, of the same evidence.
      stale: what changed since the baseline was made: jax, libtpu, the kernel's source.
    """

    problem: str
    device: str | None = None
    config: str | None = None
    outcome: str
    reason: str
    baseline_ms: float | None = None
    today_ms: float | None = None
    stale: str | None = None


def check(
    baseline: Path,
    *,
    against: str,
    tolerance: float,
    jobs: int | None,
    timeout_s: float,
    progress: Progress,
) -> list[Verdict]:
    """One verdict a leaderboard under `baseline`; a single inconclusive one where there is none."""
    if not baseline.exists():
        return [_nothing(str(baseline), "no baseline: the path does not exist")]
    found = list(leaderboard.boards(baseline))
    if not found:
        return [_nothing(str(baseline), "no baseline: no leaderboard in it")]
    obstacle = _obstacle(against)
    with Stages.open(jobs=jobs, timeout_s=timeout_s, fresh=False, progress=progress) as stages:
        return [
            _nothing(str(item), "damaged baseline")
            if isinstance(item, AutotuneError)
            else _check(item, stages, against, tolerance, obstacle)
            for item in found
        ]


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """1 when any config regressed, else 3 when any is inconclusive, else 0."""
    outcomes = {v.outcome for v in verdicts}
    worst = next(o for o in (REGRESSION, INCONCLUSIVE, PASS) if o in outcomes)
    return EXIT_STATUS[worst]


def write_table(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """One line a verdict, and a last line that counts them."""
    for v in verdicts:
        where = f" on {v.device}" if v.device else ""
        print(f"{v.outcome:<12}  {v.problem}{where}: {v.reason}", file=file)
    counts = [f"{sum(v.outcome == o for v in verdicts)} {o}" for o in EXIT_STATUS]
    print(", ".join(counts), file=file)


def write_json(verdicts: Sequence[Verdict], file: IO[str]) -> None:
    """One JSON document: `exit_status` and the verdicts."""
    records = [asdict(v) | {"config": json.loads(v.config) if v.config else None} for v in verdicts]
    json.dump({"exit_status": exit_status(verdicts), "verdicts": records}, file, indent=2)
    file.write("\n")


def _nothing(problem: str, reason: str) -> Verdict:
    return Verdict(problem=problem, outcome=INCONCLUSIVE, reason=reason)


def _obstacle(against: str) -> str | None:
    if against == "measure":
        return "no TPU is attached to this machine"
    return environment.unavailable() if against == "compile" else None


def _check(
    board: Board, stages: Stages, against: str, tolerance: float, obstacle: str | None
) -> Verdict:
    best = board.best
    if best is None:
        return _nothing(board.title, "no baseline: no candidate was ranked")
    stored_ms = _latency(best, against)
    if stored_ms is None:
        return _about(board, best, INCONCLUSIVE, f"no {_EVIDENCE[against]} baseline stored")
    if obstacle:
        return _about(board, best, INCONCLUSIVE, obstacle)
    try:
        today = _reevaluate(best, stages, against)
    except InputError as error:
        return _about(board, best, INCONCLUSIVE, f"cannot be asked for today: {error}")
    except KernelError as error:
        return _about(board, best, REGRESSION, f"fails today: {error}")
    return _compare(board, best, today, against, tolerance)


def _reevaluate(best: Row, stages: Stages, against: str) -> Row:
    """Today's row of the stored best config."""
    kernel = base.load(best.kernel)
    problem = base.make_problem(
        kernel, device=best.device, name=best.problem_name, **json.loads(best.problem)
    )
    judge = stages.judge(kernel, problem)
    candidate = Candidate.of(json.loads(best.config))
    (judged,) = stages.model(judge, Space(legal=(candidate,)))
    if against == "model" or not judged.survives:
        return judged.row
    return stages.compile(judge, 1)([judged], lambda: False)[candidate]


def _compare(board: Board, best: Row, today: Row, against: str, tolerance: float) -> Verdict:
    stored_ms, now_ms = _latency(best, against), _latency(today, against)
    if today.status in ("timeout", "crashed"):
        return _about(board, best, INCONCLUSIVE, f"{today.status}: {today.reason}")
    if now_ms is None or stored_ms is None:
        return _about(board, best, REGRESSION, f"{today.status}: {today.reason}")
    change = now_ms / stored_ms - 1
    outcome = REGRESSION if change > tolerance else PASS
    reason = (
        f"{milliseconds(stored_ms)} → {milliseconds(now_ms)} {_EVIDENCE[against]} ({change:+.1%}, "
        f"tolerance {tolerance:.1%})"
    )
    if change < -tolerance:
        reason += "; much faster than the baseline: sweep again to refresh it"
    if old := stale.reason(best):
        reason += f"; baseline {old}"
    return _about(board, best, outcome, reason, stored_ms, now_ms)


def _about(
    board: Board,
    best: Row,
    outcome: str,
    reason: str,
    stored_ms: float | None = None,
    now_ms: float | None = None,
) -> Verdict:
    return Verdict(
        problem=board.title,
        device=best.device,
        config=best.config,
        outcome=outcome,
        reason=reason,
        baseline_ms=stored_ms,
        today_ms=now_ms,
        stale=stale.reason(best),
    )


def _latency(row: Row, against: str) -> float | None:
    if row.status != "ok":
        return None
    return {
        "model": row.latency_model_ms,
        "compile": row.latency_compiled_ms,
        "measure": row.latency_measured_ms,
    }[against]
