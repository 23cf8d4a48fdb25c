"""What the gate says of one stored best config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PASS, REGRESSION, INCONCLUSIVE = "pass", "regression", "inconclusive"
EXIT_STATUS = {PASS: 0, REGRESSION: 1, INCONCLUSIVE: 3}
REFRESH = "refresh baseline"
"""In the reason of a config that is far faster than its baseline, which hides a later loss."""
OK, WRONG, UNCHECKED, FAILED = "ok", "wrong", "unchecked", "failed"
"""Of today's output: as the reference's, not so, never compared, and lost on the way to that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An outcome and what it rests on, before it is known whose it is.

    `faster`: today's figures lie below the baseline's by more than the tolerance.
    """

    outcome: str
    reason: str
    baseline_ms: float | None = None
    today_ms: float | None = None
    faster: bool = False

    def __post_init__(self) -> None:
        if self.outcome not in EXIT_STATUS:
            raise ValueError(f"outcome {self.outcome!r} is none of {', '.join(EXIT_STATUS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one stored best config.

    Attributes:
      problem: its name, or kernel and key; the file where that cannot be read.
      path: the leaderboard's file; `problem_key` and `shape` (axis -> size) are of its problem.
      outcome: `pass`, `regression` or `inconclusive`.
      reason: one line: what was compared, or why nothing could be.
      evidence: what was compared: `model`, `compiled` or `measured`.
      baseline_ms, today_ms: latency of the stored row and of today's, of that evidence.
      output: `ok`; `wrong`; `unchecked`: nothing was compared, since the kernel has no reference,
        interpret mode cannot run it, the times are a recording's, or there was nothing to run;
        `failed`: it was to be compared, and that did not come to an end.
      checked: how today's output was checked, in words; None where nothing was evaluated.
      stale: what changed since the baseline was made: jax, libtpu, the kernel's source.
      updated: whether today's figures were written into the baseline.
    """

    problem: str
    problem_key: str | None = None
    shape: Mapping[str, int] | None = None
    path: str | None = None
    kernel: str | None = None
    device: str | None = None
    config: str | None = None
    outcome: str
    reason: str
    evidence: str | None = None
    baseline_ms: float | None = None
    today_ms: float | None = None
    output: str = UNCHECKED
    checked: str | None = None
    stale: str | None = None
    updated: bool = False


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """1 when any config regressed, else 3 when any is inconclusive, else 0.

    What was accepted as the new baseline counts as passed.
    """
    outcomes = {PASS if v.updated else v.outcome for v in verdicts}
    worst = next(o for o in (REGRESSION, INCONCLUSIVE, PASS) if o in outcomes)
    return EXIT_STATUS[worst]
