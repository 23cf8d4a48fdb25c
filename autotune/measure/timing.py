"""When which program runs, and when its samples suffice. No clock and no device in here."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autotune.measure.record import usable
from autotune.measure.trace import TraceError

EMPTY = "empty"
"""The program that does nothing: what it takes on the host's clock is what every program pays."""
HOST_SAMPLES = 5
MAX_RUNS = 1000
"""Runs a trace: long traces lose events (jax-ml/jax#23446)."""


class Runner(Protocol):
    """What runs programs and says how long each run took."""

    def run(self, order: Sequence[str]) -> Mapping[str, list[float] | TraceError]:
        """Runs the programs in `order`; times in ms, per program in the order of its runs.

        Raises TraceError where nothing was recorded at all.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long to go on.

    Attributes:
      first, more: runs of each program in the first round, and in each one after it.
      most: runs of each program at which to stop whatever the spread is.
      spread: half-width of the median's 95 % interval, as a share of it, that suffices.
      round_ms: time of one round, where that allows fewer runs; never fewer than 3.
      total_ms: time of all rounds, after which no more is begun.
    """

    first: int = 3
    more: int = 10
    most: int = 100
    spread: float = 0.005
    round_ms: float = 2_000.0
    total_ms: float = 60_000.0


def interleaved(programs: Sequence[str], runs: int, seed: int) -> list[str]:
    """`runs` of each program in seeded random order, shuffled block by block.

    Each block has every program once, so that a drifting clock hits all alike.
    """
    order = random.Random(seed)
    blocks = [order.sample(programs, len(programs)) for _ in range(runs)]
    return [program for block in blocks for program in block]


def time_on_device(
    runner: Runner, programs: Sequence[str], *, effort: Effort, seed: int
) -> dict[str, list[float] | TraceError]:
    """Samples in ms of each program, or why it has none.

    Rounds go on until every median is known well enough. A program whose events do not match its
    runs in any round has no samples at all.
    """
    return _rounds(runner, programs, effort, seed, base_ms=lambda found: 0.0)


def time_on_host(
    runner: Runner, programs: Sequence[str], *, effort: Effort, seed: int
) -> dict[str, list[float] | TraceError]:
    """As `time_on_device`, on a clock that also counts dispatch and waiting.

    An empty program runs among the others, and its median is taken off. As jitter may be larger
    than what is left, a sample is the median of `1 / HOST_SAMPLES` of the runs. A program whose
    samples are not above 0, or differ by more than their median, cannot be told from nothing and
    has none.
    """
    effort = replace(effort, more=4 * effort.more, most=4 * effort.most)

    def base_ms(found: Mapping[str, list[float] | TraceError]) -> float:
        empty = found[EMPTY]
        return math.inf if isinstance(empty, TraceError) else statistics.median(empty)

    gross = _rounds(runner, [EMPTY, *programs], effort, seed, base_ms=base_ms)
    baseline = gross.pop(EMPTY)
    if isinstance(baseline, TraceError):
        return dict.fromkeys(programs, baseline)
    middle_ms = statistics.median(baseline)
    return {program: _above(middle_ms, samples) for program, samples in gross.items()}


def _rounds(
    runner: Runner,
    programs: Sequence[str],
    effort: Effort,
    seed: int,
    *,
    base_ms: Callable[[Mapping[str, list[float] | TraceError]], float],
) -> dict[str, list[float] | TraceError]:
    found: dict[str, list[float] | TraceError] = {program: [] for program in programs}
    runs = effort.first
    for number in range(effort.most):
        live = [p for p, samples in found.items() if not isinstance(samples, TraceError)]
        if not live:
            break
        runs = max(1, min(runs, MAX_RUNS // len(live)))
        _add_round(runner, found, interleaved(live, runs, seed + number))
        kept = {p: s for p, s in found.items() if not isinstance(s, TraceError)}
        base, done = base_ms(found), max(map(len, kept.values()), default=0)
        wide = [p for p, s in kept.items() if p != EMPTY and half_width(s, base) > effort.spread]
        spent_ms = sum(map(sum, kept.values()))
        if done >= effort.most or spent_ms >= effort.total_ms or not wide:
            break
        once_ms = sum(map(statistics.median, kept.values()))
        runs = min(effort.more, max(3, int(effort.round_ms / once_ms)), effort.most - done)
    return found


def _add_round(
    runner: Runner, found: dict[str, list[float] | TraceError], order: Sequence[str]
) -> None:
    try:
        times = runner.run(order)
    except TraceError as error:
        times = dict.fromkeys(order, error)
    for program in dict.fromkeys(order):
        new, count = times.get(program, []), order.count(program)
        if isinstance(new, list) and len(new) != count:
            new = TraceError(f"the trace holds {len(new)} of {count} runs")
        if isinstance(new, list) and not usable(new):
            new = TraceError(f"the clock gave {min(new)} ms")
        old = found[program]
        assert isinstance(old, list)
        found[program] = new if isinstance(new, TraceError) else old + new


def _above(base_ms: float, samples: list[float] | TraceError) -> list[float] | TraceError:
    if isinstance(samples, TraceError):
        return samples
    parts = [samples[part::HOST_SAMPLES] for part in range(HOST_SAMPLES)]
    net = [statistics.median(part) - base_ms for part in parts if part]
    if min(net) > 0 and max(net) - min(net) <= statistics.median(net):
        return net
    return TraceError(
        f"the host clock cannot tell it from a program that does nothing ({base_ms:.4g} ms)"
    )


def half_width(samples: Iterable[float], base: float = 0.0) -> float:
    """Half the 95 % interval of the median, as a share of the median less `base`.

    By order statistics: no distribution is assumed. Infinite for fewer than 6 samples, and where
    nothing is left above `base`. Source: ranks n/2 ± 0.98·sqrt(n) of the ordered samples (normal
    approximation of the binomial).
    """
    ordered = sorted(samples)
    n = len(ordered)
    if n < 6 or (net := statistics.median(ordered) - base) <= 0:
        return math.inf
    reach = 0.98 * math.sqrt(n)
    low = ordered[max(0, math.floor((n - 1) / 2 - reach))]
    high = ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))]
    return (high - low) / (2 * net)
