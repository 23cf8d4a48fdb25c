"""Figures of merit of predictions: order, regret, error. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[float, float]
"""Predicted and measured milliseconds of one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merit:
    """How far predictions of some rows can be trusted.

    Attributes:
      rows, groups: rows with a prediction; problems with at least two of them.
      kendall_tau: over all pairs of rows of one problem: (in order - out of order) / pairs; a pair
        of equal predictions counts for neither. None without pairs.
      tau_by_problem: the same for each problem with at least three rows, the lowest.
      regret_first, regret_of_three: measured time of the configuration predicted best, and of the
        best of the three predicted best, over the measured best, less 1; the largest over problems.
      median_error, p90_error, worst_error: of |predicted / measured - 1|.
      bias: median of predicted / measured - 1.
    """

    rows: int
    groups: int
    kendall_tau: float | None = None
    tau_by_problem: float | None = None
    regret_first: float | None = None
    regret_of_three: float | None = None
    median_error: float | None = None
    p90_error: float | None = None
    worst_error: float | None = None
    bias: float | None = None


def merit(pairs: Iterable[tuple[Hashable, Pair]]) -> Merit:
    """The figures of (problem, (predicted, measured)) rows."""
    by_problem: dict[Hashable, list[Pair]] = defaultdict(list)
    for problem, pair in pairs:
        by_problem[problem].append(pair)
    every = [pair for group in by_problem.values() for pair in group]
    if not every:
        return Merit(rows=0, groups=0)
    errors = sorted(abs(p / m - 1) for p, m in every)
    several = [group for group in by_problem.values() if len(group) > 1]
    taus = [
        tau for group in several if len(group) > 2 and (tau := kendall_tau([group])) is not None
    ]
    return Merit(
        rows=len(every),
        groups=len(several),
        kendall_tau=kendall_tau(several),
        tau_by_problem=min(taus, default=None),
        regret_first=max((regret(group, 1) for group in several), default=None),
        regret_of_three=max((regret(group, 3) for group in several), default=None),
        median_error=quantile(errors, 0.5),
        p90_error=quantile(errors, 0.9),
        worst_error=errors[-1],
        bias=quantile(sorted(p / m - 1 for p, m in every), 0.5),
    )


def kendall_tau(groups: Iterable[Sequence[Pair]]) -> float | None:
    """(pairs in order - pairs out of order) / pairs, over pairs within a group that were measured
    unlike; None where there are none."""
    score = count = 0
    for group in groups:
        for (p, m), (q, n) in itertools.combinations(group, 2):
            if m != n:
                count += 1
                score += ((p > q) - (p < q)) * ((m > n) - (m < n))
    return score / count if count else None


def regret(group: Sequence[Pair], tried: int) -> float:
    """What the best of the `tried` predicted best costs over the measured best, as a share."""
    chosen = sorted(group)[:tried]
    return min(m for _, m in chosen) / min(m for _, m in group) - 1


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation in a sorted sequence."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def half_width(pairs: Sequence[Pair], share: float = 0.9) -> float:
    """Half width w of a band: `share` of rows were measured within predicted / (1 + w) and
    predicted · (1 + w)."""
    return quantile(sorted(max(p / m, m / p) - 1 for p, m in pairs), share)


def bands(residuals: Mapping[str, Sequence[Pair]], *, least_rows: int = 5) -> dict[str, float]:
    """Kernel -> half width; "*" for all kernels together. A kernel with few rows has none.

    Few rows seldom hold the worst: widths grow by 2 / rows.
    """
    every = [pair for rows in residuals.values() for pair in rows]
    groups = {k: rows for k, rows in residuals.items() if len(rows) >= least_rows}
    if every:
        groups["*"] = every
    return {k: half_width(rows) * (1 + 2 / len(rows)) for k, rows in groups.items()}
