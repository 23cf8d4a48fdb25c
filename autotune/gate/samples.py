"""Fresh samples against stored ones: slower, not slower by the tolerance, or too noisy to say.

Times of two runs differ by drift (clock, heat, chip) that is no fault of the kernel. The default
config is timed beside the best one, so what both share is taken off: the test is on the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from autotune.gate.verdict import INCONCLUSIVE, PASS, REGRESSION, Finding
from autotune.report.units import milliseconds

MIN_SAMPLES = 6
"""With fewer on both sides no order of samples with ties reaches `ALARM`."""
ALARM = 0.005
"""One-sided p of the Mann-Whitney test below which a slowdown is one."""
CONFIDENCE = 0.99
"""One-sided, of the bound below which a slowdown of the tolerance is ruled out."""
RUN_DRIFT = 0.05
"""What two runs of one program may differ by. Source: 1.5 % in the median over the repeated rows of
Tokamax's published splash timings; for a normal error that is 5.7 % at most in 99 of 100."""

ALONE_DRIFT = 0.045
"""How much faster drift alone makes a run of today in one of 40. Source: as `RUN_DRIFT`, 1.96 times
2.2 % for a normal error of 1.5 % in the median, with the 0.3 % a run of each config's own."""

RESIDUAL_DRIFT = 0.006
"""Standard deviation of what the default does not take off: each of four times is 0.3 % off.
Source: the published v6e sweep of JAX's splash attention."""
RESIDUAL_BOUND = NormalDist().inv_cdf(CONFIDENCE) * RESIDUAL_DRIFT


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Times of the best and of the default config from one run, in the order they were taken;
    `default_ms` is empty where the best is the default or the default gave no times."""

    best_ms: Sequence[float]
    default_ms: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """By which share today's times are above the baseline's: 0.05 is 5 % slower.

    Attributes:
      estimate: Hodges-Lehmann: the median of all pairs' ratios, less 1.
      low, high: its one-sided bounds at `CONFIDENCE`, from the ranks (so for any distribution).
      p_slower: of the one-sided Mann-Whitney test, "today is slower".
    """

    estimate: float
    low: float
    high: float
    p_slower: float


def shift(baseline: Sequence[float], today: Sequence[float]) -> Shift:
    """How `today` lies against `baseline`; both at least `MIN_SAMPLES` times above 0.

    Source: Hollander, Wolfe, Chicken, Nonparametric Statistical Methods, 3rd ed., 4.1 - 4.3, with
    the large-sample rank of the bounds.
    """
    from scipy.stats import mannwhitneyu  # type: ignore[import-untyped]

    logs = sorted(math.log(t / b) for t in today for b in baseline)
    n, m = len(today), len(baseline)
    spread = math.sqrt(n * m * (n + m + 1) / 12)
    rank = max(0, math.floor(n * m / 2 - NormalDist().inv_cdf(CONFIDENCE) * spread))
    constant = len({*baseline, *today}) == 1  # no order at all: the test is undefined
    p = 1.0 if constant else float(mannwhitneyu(today, baseline, alternative="greater").pvalue)
    return Shift(
        estimate=math.expm1(median(logs)),
        low=math.expm1(logs[rank]),
        high=math.expm1(logs[-1 - rank]),
        p_slower=p,
    )


def compare(baseline: Samples, today: Samples, *, tolerance: float) -> Finding:
    """The finding on fresh samples.

    With the default as a control: `pass` where a slowdown of `tolerance` against it is ruled out
    (by the bound of the ranks, widened for what drift the control leaves), `regression` where it is
    not and the test says slower by half the tolerance at least, else inconclusive. A slowdown that
    best and default share is a regression beyond what runs drift by, and inconclusive below.
    Without a default, drift cannot be taken off, so both bounds are widened by what runs drift by.

    What lost against the default passes where the best itself is faster than it was by more than
    the tolerance, and is inconclusive where it is faster by less, or where it is within the
    tolerance and the default gained more than runs drift by.
    Nothing passes while the mean grew so much more than the median that it says what ranks do not.
    """
    counts = [len(s) for s in (baseline.best_ms, today.best_ms)]
    if min(counts) < MIN_SAMPLES:
        return _finding(INCONCLUSIVE, f"{counts[0]} stored and {counts[1]} fresh samples; at least "
                        f"{MIN_SAMPLES} of each are needed", baseline, today)  # fmt: skip
    own = shift(baseline.best_ms, today.best_ms)
    control = _ratios(baseline), _ratios(today)
    if min(map(len, control)) < MIN_SAMPLES:
        outcome, why = _alone(own, tolerance, _missing(baseline, today))
    else:
        against = shift(*control)
        outcome, why = _beside_default(own, against, tolerance)
    tail = _tail(baseline.best_ms, today.best_ms)
    if outcome == PASS and tail > tolerance:
        outcome = INCONCLUSIVE
        why = f"some runs take far longer, the mean grew by {tail:.1%} more than the median; {why}"
    then, now = (milliseconds(median(s.best_ms)) for s in (baseline, today))
    told = (
        f"{then} → {now} measured ({own.estimate:+.1%}, tolerance {tolerance:.1%}, "
        f"{counts[0]} + {counts[1]} samples); {why}"
    )
    return _finding(outcome, told, baseline, today, faster=own.high < -tolerance - RUN_DRIFT)


def _beside_default(own: Shift, against: Shift, tolerance: float) -> tuple[str, str]:
    seen = f"{against.estimate:+.1%} against the default ({against.low:+.1%} to {against.high:+.1%}"
    seen += f", p {against.p_slower:.2g})"
    if _upper(against, RESIDUAL_BOUND) >= tolerance:
        if own.high < -tolerance:
            return PASS, f"faster than it was, whatever the default is: {seen}"
        if against.p_slower >= ALARM or against.estimate < tolerance / 2:
            return INCONCLUSIVE, f"too noisy to rule out {tolerance:.0%}: {seen}"
        gained = against.estimate - own.estimate  # by the default
        if own.high < 0 or (own.estimate < tolerance and gained > tolerance + RUN_DRIFT):
            return INCONCLUSIVE, f"not slower than it was, but the default got faster: {seen}"
        return REGRESSION, f"slower: {seen}"
    if own.low > tolerance + RUN_DRIFT and own.p_slower < ALARM:
        return REGRESSION, f"the default slowed down too, by more than runs drift: {seen}"
    if own.estimate > tolerance:
        return INCONCLUSIVE, f"the default slowed down too; kernel or machine? {seen}"
    return PASS, seen


def _alone(own: Shift, tolerance: float, missing: str) -> tuple[str, str]:
    seen = f"{missing} to take drift off ({own.low:+.1%} to {own.high:+.1%}, p {own.p_slower:.2g})"
    if _upper(own, ALONE_DRIFT) < tolerance:
        return PASS, seen
    if own.low > tolerance + RUN_DRIFT and own.p_slower < ALARM:
        return REGRESSION, f"slower by more than runs drift: {seen}"
    return INCONCLUSIVE, f"slower, or drift, or noise: {seen}"


def _missing(baseline: Samples, today: Samples) -> str:
    """What there is of the default where that is too little."""
    then, now = len(baseline.default_ms), len(today.default_ms)
    if not then and not now:
        return "no times of a default beside it"
    return f"{then} stored and {now} fresh times of the default are too few ({MIN_SAMPLES} of each)"


def _upper(found: Shift, drift: float) -> float:
    """The bound on a slowdown, with the two independent sources of error added in quadrature."""
    return found.estimate + math.hypot(found.high - found.estimate, drift)


def _tail(baseline: Sequence[float], today: Sequence[float]) -> float:
    """By which share of the median the mean grew beyond it; 0 where the mean itself fell by more
    than runs drift. Ranks do not see a quarter of all runs, however slow; one run that was
    disturbed is no such share, so the slowest is left out."""
    before, now = (fmean(sorted(s)[:-1]) for s in (baseline, today))
    if now < before * (1 - RUN_DRIFT):
        return 0.0
    return now / median(today) - before / median(baseline)


def _ratios(samples: Samples) -> list[float]:
    """Best over default, round by round."""
    pairs = zip(samples.best_ms, samples.default_ms, strict=False)
    return [best / default for best, default in pairs]


def _finding(
    outcome: str, reason: str, baseline: Samples, today: Samples, *, faster: bool = False
) -> Finding:
    then, now = (median(s.best_ms) if s.best_ms else None for s in (baseline, today))
    return Finding(outcome=outcome, reason=reason, baseline_ms=then, today_ms=now, faster=faster)
