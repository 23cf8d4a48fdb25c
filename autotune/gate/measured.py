"""Fresh times of a stored best config, beside the default, against the stored ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune import device as devices
from autotune import stored
from autotune.candidate import Candidate
from autotune.errors import AutotuneError
from autotune.gate import samples
from autotune.gate.samples import Samples
from autotune.gate.verdict import INCONCLUSIVE, REGRESSION, Finding
from autotune.leaderboard import Board
from autotune.measure.record import METHOD, Measured, usable
from autotune.measure.replay import Replay
from autotune.measure.stage import Measurer
from autotune.measure.tpu import TpuMeasurer
from autotune.problem import Problem
from autotune.row import Row

Records = Mapping[Candidate, Measured]


def opener(replay: Path | None) -> Callable[[str], Measurer | str]:
    """`device name -> what takes fresh times of its kernels`, or why nothing can.

    Raises InputError for a recording that cannot be read.
    """
    if replay is not None:
        recording = Replay(replay)
        return lambda device: recording

    def attached(device: str) -> Measurer | str:
        try:
            chip = devices.attached()
        except AutotuneError as error:
            return str(error)
        if chip is None:
            return "no TPU is attached to this machine"
        if chip.name != device:
            return f"the TPU attached here is a {chip.name}, the baseline is of {device}"
        return TpuMeasurer()

    return attached


def contestants(board: Board) -> list[Candidate]:
    """What is timed: the stored best, and beside it the default where that was timed too."""
    best, default = board.best, board.default
    rows = [r for r in (best, default) if r is not None and r.samples_ms]
    return list(dict.fromkeys(map(stored.candidate_of, rows)))


def obstacle(best: Row) -> str | None:
    """Why a stored row's times cannot be compared with any taken today; None where they can."""
    if not best.samples_ms:
        return "no samples in the measured baseline"
    method = _details(best).get("method", METHOD)
    if method != METHOD:
        return f"the baseline was timed another way (method {method}, today's is {METHOD})"
    return None


def fresh(measurer: Measurer, problem: Problem, board: Board) -> dict[Candidate, Measured]:
    """Today's records of the contestants, timed interleaved; of those that a recording has."""
    wanted = contestants(board)
    if isinstance(measurer, Replay):
        recorded = measurer.samples(problem)
        wanted = [candidate for candidate in wanted if candidate in recorded]
    return dict(measurer.measure(problem, wanted))


def compare(board: Board, records: Records, *, tolerance: float) -> Finding:
    """The finding on fresh records of `contestants`."""
    best, default = board.best, board.default
    assert best is not None
    today = records.get(stored.candidate_of(best))
    if today is None:
        return Finding(outcome=INCONCLUSIVE, reason="no fresh time of the stored best config")
    if today.status in ("wrong", "oom", "unsupported"):
        return Finding(outcome=REGRESSION, reason=f"{today.status}: {today.reason}")
    if today.status != "ok":
        return Finding(outcome=INCONCLUSIVE, reason=f"{today.status}: {today.reason}")
    if unlike := _unlike(best, today) or _no_time(best.samples_ms or (), today.samples_ms):
        return Finding(outcome=INCONCLUSIVE, reason=unlike)
    beside: Measured | None = None
    then_ms: Sequence[float] = ()
    if default is not None and default is not best:
        beside, then_ms = records.get(stored.candidate_of(default)), default.samples_ms or ()
    now_ms = beside.samples_ms if beside is not None else ()
    if _no_time(then_ms, now_ms):
        now_ms = ()
    return samples.compare(
        Samples(best_ms=best.samples_ms or (), default_ms=then_ms),
        Samples(best_ms=today.samples_ms, default_ms=now_ms),
        tolerance=tolerance,
    )


def _no_time(*taken_ms: Sequence[float]) -> str | None:
    """In words, the first of the samples that is none: not finite, not above 0."""
    wrong = (ms for ms in itertools.chain(*taken_ms) if not usable([ms]))
    return next(
        (f"{ms:g} ms is no time of a run; a finite number above 0 is" for ms in wrong), None
    )


def _unlike(best: Row, today: Measured) -> str | None:
    """Why the two are not times of one kind. A recording stands for the device it was made on."""
    stored, now = best.timer, today.timer
    if stored != now and "replay" not in (stored, now):
        return f"the baseline was timed by {stored}, today by {now}"
    scope = _details(best).get("scope", today.scope)
    if scope != today.scope and "replay" not in (stored, now):
        return f"the baseline's times span {scope}, today's {today.scope}"
    return None


def _details(row: Row) -> dict[str, object]:
    found: dict[str, object] = json.loads(row.measurement) if row.measurement else {}
    return found
