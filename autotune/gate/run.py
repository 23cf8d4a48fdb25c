"""One verdict a leaderboard: evaluate its best config again, compare, and accept where asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from autotune import leaderboard, stale
from autotune.candidate import Candidate, Config
from autotune.compiler import environment
from autotune.errors import AutotuneError, InputError, KernelError
from autotune.gate import compiled, measured
from autotune.gate.verdict import INCONCLUSIVE, PASS, REGRESSION, Finding, Verdict
from autotune.kernels import base
from autotune.kernels.base import Kernel
from autotune.leaderboard import Board
from autotune.measure.check import NO_REFERENCE, Checked
from autotune.measure.interpreted import Interpreter
from autotune.measure.stage import Measurer
from autotune.problem import Problem
from autotune.progress import Progress
from autotune.row import EVIDENCE, Row
from autotune.search.prune import Stages
from autotune.search.space import Space

EVIDENCE_OF = {"model": "model", "compile": "compiled", "measure": "measured"}
TOLERANCE = {"model": 0.02, "compile": 0.02, "measure": 0.05}
"""`--against` -> the relative slowdown that passes unless another is asked for."""


class Checker(Protocol):
    """Says whether a config's output is right: `Interpreter`, or a test's fake."""

    def check(self, problem: Problem, config: Config) -> Checked:
        """The verdict at a reduced problem with the same block structure."""

    def close(self) -> None:
        """Ends what was started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the gate is to do.

    Attributes:
      against: `model`, `compile` or `measure`.
      tolerance: relative slowdown that still passes; None is `TOLERANCE`'s.
      update: write today's figures into the leaderboards, those of wrong or failing configs aside.
      checker: opens, at the first board that needs it, what checks the output of today's kernel
        where compiled evidence is compared.
      measurer: opens, at the first board that needs it, what takes fresh times on a device, or
        says why nothing can; used by `measure` only.
    """

    against: str
    tolerance: float | None = None
    update: bool = False
    checker: Callable[[], Checker] = Interpreter
    measurer: Callable[[str], Measurer | str] = lambda device: "nothing here takes times"

    @property
    def evidence(self) -> str:
        return EVIDENCE_OF[self.against]

    @property
    def allowed(self) -> float:
        return TOLERANCE[self.against] if self.tolerance is None else self.tolerance


def check(
    baseline: Path,
    request: Request,
    *,
    jobs: int | None = None,
    timeout_s: float = 300.0,
    progress: Progress,
) -> list[Verdict]:
    """One verdict a leaderboard under `baseline`; a single inconclusive one where there is none."""
    if not baseline.exists():
        return [_nothing(str(baseline), "no baseline: the path does not exist")]
    found = list(leaderboard.boards(baseline))
    if not found:
        return [_nothing(str(baseline), "no baseline: no leaderboard in it")]
    with Stages.open(jobs=jobs, timeout_s=timeout_s, fresh=False, progress=progress) as stages:
        gate = _Gate(request=request, stages=stages)
        try:
            return [
                _nothing(str(item), "damaged baseline")
                if isinstance(item, AutotuneError)
                else gate.verdict(item)
                for item in found
            ]
        finally:
            gate.close()


@dataclass(kw_only=True, slots=True)
class _Gate:
    """The boards' common means: workers, and the measurer of each device once it is needed."""

    request: Request
    stages: Stages
    measurers: dict[str, Measurer | str] = field(default_factory=dict)
    checker: Checker | None = None

    def verdict(self, board: Board) -> Verdict:
        best = board.best
        if best is None:
            return _nothing(board.title, "no baseline: no candidate was ranked")
        if reason := self._obstacle(board, best):
            return self._about(board, best, Finding(outcome=INCONCLUSIVE, reason=reason))
        try:
            return self._evaluated(board, best)
        except KernelError as error:
            finding = Finding(outcome=REGRESSION, reason=f"fails today: {error}")
        except InputError as error:
            reason = f"cannot be asked for today: {error}"
            finding = Finding(outcome=INCONCLUSIVE, reason=reason)
        except AutotuneError as error:  # the device is busy, or was lost
            finding = Finding(outcome=INCONCLUSIVE, reason=str(error))
        return self._about(board, best, finding)

    def close(self) -> None:
        for measurer in self.measurers.values():
            if not isinstance(measurer, str):
                measurer.close()
        if self.checker is not None:
            self.checker.close()

    def _obstacle(self, board: Board, best: Row) -> str | None:
        """Why the board cannot be compared here, before anything is evaluated; else None."""
        evidence = self.request.evidence
        if compiled.latency_ms(best, evidence) is None:
            return f"no {evidence} baseline stored"
        if evidence == "compiled":
            return environment.unavailable()
        if evidence == "measured":
            if reason := measured.obstacle(best):
                return reason
            measurer = self._measurer(best.device)
            return measurer if isinstance(measurer, str) else None
        return None

    def _measurer(self, device: str) -> Measurer | str:
        if device not in self.measurers:
            self.measurers[device] = self.request.measurer(device)
        return self.measurers[device]

    def _evaluated(self, board: Board, best: Row) -> Verdict:
        """Raises InputError for a problem that is none today, KernelError for a broken kernel."""
        kernel = base.load(best.kernel)
        problem = base.make_problem(
            kernel, device=best.device, name=best.problem_name, **json.loads(best.problem)
        )
        if self.request.evidence == "measured":
            finding, how, rows = self._timed(board, problem)
        else:
            today = self._today(problem, best)
            finding, rows = self._compared(best, today), [today]
            finding, how = self._checked(kernel, problem, best, finding)
        if not self.request.update:
            return replace(self._about(board, best, finding), checked=how)
        refusal = self._refusal(board, finding, rows)
        if refusal is None:
            self._accept(board, problem, rows)
        else:
            finding = replace(finding, reason=f"{finding.reason}; not updated: {refusal}")
        return replace(self._about(board, best, finding), checked=how, updated=refusal is None)

    def _compared(self, best: Row, today: Row) -> Finding:
        return compiled.compare(
            best, today, evidence=self.request.evidence, tolerance=self.request.allowed
        )

    def _today(self, problem: Problem, stored: Row) -> Row:
        """Today's row of a stored config, as far as compiling where that is what is compared."""
        judge = self.stages.judge(base.load(problem.kernel), problem)
        candidate = Candidate.of(json.loads(stored.config), is_default=stored.is_default)
        (judged,) = self.stages.model(judge, Space(legal=(candidate,)))
        if self.request.against == "model" or not judged.survives or environment.unavailable():
            return judged.row
        return self.stages.compile(judge, 1)([judged], lambda: False)[candidate]

    def _checked(
        self, kernel: Kernel, problem: Problem, best: Row, finding: Finding
    ) -> tuple[Finding, str | None]:
        """`finding`, or a regression where the output is wrong; and how that was looked at."""
        if self.request.evidence != "compiled" or finding.today_ms is None:
            return finding, None  # what does not compile needs no other fault
        if kernel.reference is None:
            return finding, NO_REFERENCE
        if self.checker is None:
            self.checker = self.request.checker()
        found = self.checker.check(problem, json.loads(best.config))
        if found.status == "wrong":
            reason = f"wrong output: {found.reason}; {finding.reason}"
            return replace(finding, outcome=REGRESSION, reason=reason, wrong=True), found.how
        if found.status != "ok":
            said = f"output not checked: {found.status}: {found.reason}"
            # Some kernels cannot be interpreted at all; what was lost on the way might have been.
            lost = found.status in ("timeout", "crashed") and finding.outcome == PASS
            return replace(finding, outcome=INCONCLUSIVE) if lost else finding, said
        return finding, found.how

    def _timed(self, board: Board, problem: Problem) -> tuple[Finding, str | None, list[Row]]:
        measurer = self._measurer(problem.device)
        assert not isinstance(measurer, str)
        records = measured.fresh(measurer, problem, board)
        finding = measured.compare(board, records, tolerance=self.request.allowed)
        how = next((r.checked for r in records.values() if r.checked), None)
        if not self.request.update:
            return finding, how, []
        judge = self.stages.judge(base.load(problem.kernel), problem)
        stored = {r.config: r for r in board.rows}
        rows = [
            judge.measured(self._today(problem, stored[candidate.json]), record)
            for candidate, record in records.items()
        ]
        return finding, how, rows

    def _refusal(self, board: Board, finding: Finding, rows: list[Row]) -> str | None:
        """Why today's rows, the best's first, cannot be the baseline; None where they can."""
        if finding.wrong:
            return "no baseline may be wrong"
        if not rows or rows[0].status != "ok":
            return "there are no figures of today"
        if board.strength > EVIDENCE.index(self.request.evidence):
            return f"the board ranks by {EVIDENCE[board.strength]} evidence"
        return None

    def _accept(self, board: Board, problem: Problem, rows: list[Row]) -> None:
        """Writes today's rows into the board.

        The default goes with the best, so that the board can still say what tuning won.
        """
        default = board.default
        if default is not None and default.config not in {r.config for r in rows}:
            rows = [*rows, self._today(problem, default)]
        leaderboard.merge(
            board.path, rows, flop_convention=board.flop_convention or "",
            warn=self.stages.progress.note,
        )  # fmt: skip

    def _about(self, board: Board, best: Row, finding: Finding) -> Verdict:
        return Verdict(
            problem=board.title,
            kernel=best.kernel,
            device=best.device,
            config=best.config,
            outcome=finding.outcome,
            reason=finding.reason,
            evidence=self.request.evidence,
            baseline_ms=finding.baseline_ms,
            today_ms=finding.today_ms,
            stale=stale.reason(best),
        )


def _nothing(problem: str, reason: str) -> Verdict:
    return Verdict(problem=problem, outcome=INCONCLUSIVE, reason=reason)
