"""One leaderboard on its way through the gate: what is asked of it, and what was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autotune import leaderboard, stale, stored
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.errors import AutotuneError, InputError, KernelError
from autotune.gate import compiled
from autotune.gate.request import Request
from autotune.gate.samples import MIN_SAMPLES
from autotune.gate.verdict import (
    FAILED,
    INCONCLUSIVE,
    OK,
    PASS,
    REFRESH,
    REGRESSION,
    UNCHECKED,
    WRONG,
    Finding,
    Verdict,
)
from autotune.kernels.base import Kernel
from autotune.leaderboard import Board
from autotune.measure.check import Checked
from autotune.measure.record import Measured
from autotune.problem import Problem
from autotune.row import EVIDENCE, Row
from autotune.search.evaluate import Judge


@dataclass(kw_only=True, slots=True)
class Case:
    """A board with a best config, and what becomes of it.

    Attributes:
      kernel, problem: those of today; None before `ask` and where there are none.
      judge: makes today's rows.
      finding: None while there is none.
      output, checked: as in `Verdict`.
      records: fresh times, where times are compared.
      rows: today's row of each candidate that was evaluated.
    """

    board: Board
    best: Row
    kernel: Kernel | None = None
    problem: Problem | None = None
    judge: Judge | None = None
    finding: Finding | None = None
    output: str = UNCHECKED
    checked: str | None = None
    records: Mapping[Candidate, Measured] = field(default_factory=dict)
    rows: dict[Candidate, Row] = field(default_factory=dict)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What keeps this board from being evaluated becomes its finding, and nobody else's."""
        try:
            yield
        except KernelError as error:
            self.finding = Finding(outcome=REGRESSION, reason=f"fails today: {error}")
        except InputError as error:
            reason = f"cannot be asked for today: {error}"
            self.finding = Finding(outcome=INCONCLUSIVE, reason=reason)
        except AutotuneError as error:  # the device is busy, or was lost
            self.finding = Finding(outcome=INCONCLUSIVE, reason=str(error))

    def ask(self, request: Request) -> None:
        """Makes kernel and problem anew, where the board can be compared here at all."""
        evidence = request.evidence
        if compiled.latency_ms(self.best, evidence) is None:
            reason: str | None = f"no {evidence} baseline stored"
        else:
            reason = environment.unavailable() if evidence == "compiled" else None
        if reason is not None:
            self.finding = Finding(outcome=INCONCLUSIVE, reason=reason)
            return
        with self.guarded():
            self.kernel, self.problem = stored.problem_of(self.best)

    @property
    def waits(self) -> bool:
        """Whether there is something to evaluate yet."""
        return self.finding is None and self.problem is not None

    def candidates(self, request: Request) -> list[Candidate]:
        """What is evaluated today: the best, and with `--update` the default too, so that the board
        can still say what tuning won. Where times are compared, what has fresh ones."""
        if request.evidence == "measured" and not request.update:
            return []
        found = list(self.records) if request.evidence == "measured" else [self.candidate]
        default = self.board.default
        if request.update and default is not None:
            found.append(stored.candidate_of(default))
        return list(dict.fromkeys(found))

    @property
    def candidate(self) -> Candidate:
        return stored.candidate_of(self.best)

    def compare(self, request: Request) -> None:
        """Holds today's row of the best config against the stored one."""
        self.finding = compiled.compare(
            self.best, self.rows[self.candidate],
            evidence=request.evidence, tolerance=request.allowed,
        )  # fmt: skip

    def take(self, found: Checked) -> None:
        """Takes the verdict on the output into the finding: what was to be checked and was not is
        no pass. A kernel that cannot be checked says so itself, and is `ok` here."""
        finding = self.finding
        assert finding is not None
        self.output, self.checked = _output(found.status, found.tolerance), found.how
        if self.output == WRONG:
            reason = f"wrong output: {found.reason}; {finding.reason}"
            self.finding = replace(finding, outcome=REGRESSION, reason=reason)
        elif self.output == FAILED:
            self.checked = f"output not checked: {found.status}: {found.reason}"
            if finding.outcome == PASS:
                reason = f"{self.checked}; {finding.reason}"
                self.finding = replace(finding, outcome=INCONCLUSIVE, reason=reason)

    def take_times(self, records: Mapping[Candidate, Measured], finding: Finding) -> None:
        """Takes fresh times, and what was found on them. Outputs were checked before."""
        self.records, self.finding = records, finding
        if (best := records.get(self.candidate)) is not None:
            self.output, self.checked = _output(best.status, best.tolerance), best.checked

    def refusal(self, request: Request) -> str | None:
        """Why today's rows cannot be the baseline; None where they can."""
        assert self.finding is not None
        today = self.rows.get(self.candidate)
        if self.output == WRONG:
            return "no baseline may be wrong"
        if today is None or today.status != "ok":
            return "there are no figures of today"
        if self.output == FAILED:
            return "no baseline may be unchecked"
        if request.evidence == "measured" and len(today.samples_ms or ()) < MIN_SAMPLES:
            return f"a baseline needs at least {MIN_SAMPLES} samples"
        if self.board.strength > EVIDENCE.index(request.evidence):
            return f"the board ranks by {EVIDENCE[self.board.strength]} evidence"
        if leaderboard.strength(self.best) > leaderboard.strength(today):
            return f"the board's own times are by {self.best.timer}, today's by {today.timer}"
        return None

    def verdict(self, request: Request, *, updated: bool = False) -> Verdict:
        best, finding = self.best, self.finding
        assert finding is not None
        reason = finding.reason
        if finding.faster and finding.outcome == PASS and not updated:
            reason += f"; far faster than the baseline: {REFRESH} with --update"
        return replace(
            verdict_on(self.board, outcome=finding.outcome, reason=reason),
            config=best.config,
            evidence=request.evidence,
            baseline_ms=finding.baseline_ms,
            today_ms=finding.today_ms,
            output=self.output,
            checked=self.checked,
            stale=stale.changes(best),
            updated=updated,
        )


def verdict_on(board: Board, *, outcome: str, reason: str) -> Verdict:
    """A verdict that says whose it is, and nothing of a config yet."""
    first = board.rows[0]
    return Verdict(
        problem=board.title,
        problem_key=first.problem_key,
        shape=stored.statement_of(first).shape,
        path=str(board.path),
        kernel=first.kernel,
        device=first.device,
        outcome=outcome,
        reason=reason,
    )


def _output(status: str, tolerance: float | None) -> str:
    """What a check says of the output; nothing was compared where nothing was allowed."""
    if status == "ok":
        return UNCHECKED if tolerance is None else OK
    return WRONG if status == "wrong" else FAILED
