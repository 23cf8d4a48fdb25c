"""One verdict a leaderboard: evaluate the best configs again, compare, and accept where asked.

All boards go through a stage together, so that every worker has something to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune import leaderboard
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.compiler.pool import default_jobs
from autotune.errors import AutotuneError, DamagedFileError, InputError
from autotune.gate import measured
from autotune.gate.case import Case, verdict_on
from autotune.gate.checkers import checked
from autotune.gate.request import Request
from autotune.gate.verdict import INCONCLUSIVE, PASS, Finding, Verdict
from autotune.leaderboard import Board
from autotune.measure.check import uncheckable
from autotune.measure.stage import Measurer
from autotune.progress import Progress
from autotune.search.evaluate import Judge, Judged
from autotune.search.prune import Stages


def check(
    baseline: Path,
    request: Request,
    *,
    jobs: int | None = None,
    timeout_s: float = 300.0,
    progress: Progress,
) -> list[Verdict]:
    """One verdict a leaderboard under `baseline`, in path order; a single inconclusive one where
    there is none.

    With `update` the boards are written last: a gate that is interrupted leaves all as they were.

    Raises:
      InputError: today's figures are to be accepted and a board's folder cannot be written.
    """
    if not baseline.exists():
        reason = (
            "no baseline: the path does not exist; check it, or make one with "
            f"`autotune sweep CONFIG --results {baseline}`"
        )
        return [_nothing(str(baseline), reason)]
    found = [_opened(item) for item in leaderboard.boards(baseline)]
    if not found:
        return [_nothing(str(baseline), "no baseline: no leaderboard in it")]
    cases = [case for case in found if isinstance(case, Case)]
    if request.update:
        for folder in dict.fromkeys(case.board.path.parent for case in cases):
            leaderboard.check_writable(folder)
    label = f"{len(cases)} boards" if len(cases) > 1 else "".join(c.board.title for c in cases)
    for case in cases:
        case.ask(request)
    if request.evidence == "measured":
        _time(cases, request, progress, label)
    with Stages.open(jobs=jobs, timeout_s=timeout_s, fresh=False, progress=progress) as stages:
        _evaluate(cases, request, stages, label)
    # The compile workers are gone, and with them what memory they held.
    if request.evidence == "compiled" or (request.evidence == "model" and request.update):
        _check_outputs(cases, request, jobs or default_jobs(), progress, label)
    return [_closed(c, request, progress) if isinstance(c, Case) else c for c in found]


def _opened(item: Board | InputError) -> Case | Verdict:
    if isinstance(item, AutotuneError):
        path = item.file or ""
        what = "damaged" if isinstance(item, DamagedFileError) else "unreadable"
        fault = str(item).removeprefix(f"{path}: ")
        return replace(_nothing(path, f"{what} baseline: {fault}"), path=path)
    if item.best is None:
        reason = "no baseline: no candidate was ranked"
        return verdict_on(item, outcome=INCONCLUSIVE, reason=reason)
    return Case(board=item, best=item.best)


def _time(cases: Sequence[Case], request: Request, progress: Progress, label: str) -> None:
    """Fresh times, one board after the other: a device is one process's alone."""
    measurers: dict[str, Measurer | str] = {}
    waiting = [case for case in cases if case.waits]
    progress.start(label, "measure", len(waiting))
    try:
        for case in waiting:
            with case.guarded():
                _time_one(case, request, measurers)
            progress.advance()
    finally:
        for measurer in measurers.values():
            if not isinstance(measurer, str):
                measurer.close()


def _time_one(case: Case, request: Request, measurers: dict[str, Measurer | str]) -> None:
    device = case.best.device
    reason = measured.obstacle(case.best)
    if reason is None and device not in measurers:
        measurers[device] = request.measurer(device)
    measurer = reason or measurers[device]
    if isinstance(measurer, str):
        case.finding = Finding(outcome=INCONCLUSIVE, reason=measurer)
        return
    assert case.problem is not None
    records = measured.fresh(measurer, case.problem, case.board)
    case.take_times(records, measured.compare(case.board, records, tolerance=request.allowed))


def _evaluate(cases: Sequence[Case], request: Request, stages: Stages, label: str) -> None:
    """Today's rows of all boards: traced in one pass over the workers, compiled in another."""
    asked: list[tuple[Case, Judge, list[Candidate]]] = []
    for case in cases:
        if (case.waits or case.records) and (candidates := case.candidates(request)):
            with case.guarded():
                assert case.kernel is not None
                assert case.problem is not None
                asked.append((case, stages.judge(case.kernel, case.problem), candidates))
    if not asked:
        return
    # What took longest goes first, so that no worker is left with it at the end.
    asked.sort(key=lambda item: -(item[0].best.compile_seconds or 0.0))
    try:
        _fill(asked, request, stages, label)
    except AutotuneError as error:  # no worker starts, which holds for all
        for case, _, _ in asked:
            case.rows.clear()
            case.finding = case.finding or Finding(outcome=INCONCLUSIVE, reason=str(error))
        return
    for case, judge, _ in asked:
        for candidate, record in case.records.items():
            case.rows[candidate] = judge.measured(case.rows[candidate], record)
        if case.finding is None:
            case.compare(request)


def _fill(
    asked: Sequence[tuple[Case, Judge, list[Candidate]]],
    request: Request,
    stages: Stages,
    label: str,
) -> None:
    works = [(judge, candidates) for _, judge, candidates in asked]
    stages.progress.start(label, "model", sum(len(candidates) for _, candidates in works))
    cases = {id(judge): case for case, judge, _ in asked}
    judged: dict[tuple[int, Candidate], Judged] = {}
    for (judge, _), found in zip(works, stages.modelled(works), strict=True):
        for one in found:
            cases[id(judge)].rows[one.candidate] = one.row
            judged[id(judge), one.candidate] = one
    if request.against == "model" or environment.unavailable():
        return
    able = [(j, c) for j, candidates in works for c in candidates if judged[id(j), c].survives]
    stages.progress.start(label, "compile", len(able))
    for judge, candidate, answer in stages.answers(able):
        one = judged[id(judge), candidate]
        cases[id(judge)].rows[candidate] = judge.compiled(one, answer)
        stages.progress.advance()


def _check_outputs(
    cases: Sequence[Case], request: Request, jobs: int, progress: Progress, label: str
) -> None:
    """Takes into each finding whether today's output is right."""
    waiting = []
    for case in cases:
        if case.kernel is None or case.finding is None or case.finding.today_ms is None:
            continue  # what does not compile needs no other fault
        if (verdict := uncheckable(case.kernel)) is not None:
            case.take(verdict)
        else:
            waiting.append(case)
    if not waiting:
        return
    waiting.sort(key=lambda case: -(case.best.compile_seconds or 0.0))
    progress.start(label, "check", len(waiting))
    asked = [(c.problem, c.candidate.config) for c in waiting if c.problem is not None]
    for place, verdict in checked(request.checker, asked, jobs=jobs):
        waiting[place].take(verdict)
        progress.advance()


def _closed(case: Case, request: Request, progress: Progress) -> Verdict:
    """The verdict, with today's rows written into the board where that is asked for and allowed:
    what was asked for and could not be is no pass.

    The default's row is written too, and its output was not checked: a board on which another
    config than the checked one would be the best is left as it is.
    """
    assert case.finding is not None
    if not request.update or case.kernel is None:
        return case.verdict(request)
    refusal = case.refusal(request)
    if refusal is None:
        try:
            leaderboard.merge(
                case.board.path, list(case.rows.values()), best=case.rows[case.candidate].config,
                flop_convention=case.board.flop_convention or "", warn=progress.note,
            )  # fmt: skip
            return case.verdict(request, updated=True)
        except InputError as error:
            refusal = str(error)
    outcome = INCONCLUSIVE if case.finding.outcome == PASS else case.finding.outcome
    reason = f"{case.finding.reason}; not updated: {refusal}"
    case.finding = replace(case.finding, outcome=outcome, reason=reason)
    return case.verdict(request)


def _nothing(problem: str, reason: str) -> Verdict:
    return Verdict(problem=problem, outcome=INCONCLUSIVE, reason=reason)
