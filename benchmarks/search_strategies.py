"""How many timed trials each search strategy needs to come within 1 % of the best recorded.

    python benchmarks/search_strategies.py RECORDING [--seeds 100] [--until compile|model]

For each problem of a recording (CSV or Parquet, as `autotune sweep --replay` takes it) of which
enough configurations were measured. What does not compile here is no candidate for any strategy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from autotune.candidate import Candidate
from autotune.errors import InputError
from autotune.kernels import base
from autotune.measure.replay import Replay
from autotune.problem import Problem
from autotune.progress import Quiet
from autotune.search.evaluate import Judged
from autotune.search.order import TimingOrder
from autotune.search.prune import Stages
from autotune.search.space import Space
from autotune.search.tpe import Tpe

SOURCES = "docs/calibration.md, Where the measurements come from, has recordings"
WITHIN = 1.01
Times = Mapping[Candidate, float]
Strategy = Callable[[Sequence[Judged], Times, int], Iterator[Candidate]]


def predicted(judged: Sequence[Judged], times: Times, seed: int) -> Iterator[Candidate]:
    """This project's: predictions, corrected by what was timed. Never stops by itself here."""
    order = TimingOrder(judged, seed)
    known: dict[Candidate, float | None] = {}
    while batch := order.next(known, 1):
        known[batch[0]] = times[batch[0]]
        yield batch[0]


def tpe_cold(judged: Sequence[Judged], times: Times, seed: int) -> Iterator[Candidate]:
    """Optuna's TPE that knows nothing before the first trial; a known point costs nothing."""
    tpe = Tpe((j.candidate for j in judged), seed)
    known: set[Candidate] = set()
    left = random.Random(seed).sample(sorted(times, key=lambda c: c.json), len(times))
    while len(known) < len(times):
        asked = tpe.ask(1, closed=known) or [next(c for c in left if c not in known)]
        known.add(asked[0])
        yield asked[0]
        tpe.tell({asked[0]: times[asked[0]]})


def drawn(judged: Sequence[Judged], times: Times, seed: int) -> Iterator[Candidate]:
    """Without replacement, each order as likely."""
    yield from random.Random(seed).sample([j.candidate for j in judged], len(judged))


def grid(judged: Sequence[Judged], times: Times, seed: int) -> Iterator[Candidate]:
    """The product of the values in ascending order, from a corner that the seed draws."""
    ordered = sorted((j.candidate for j in judged), key=lambda c: [repr(v) for _, v in c.items])
    start = random.Random(seed).randrange(len(ordered))
    yield from ordered[start:] + ordered[:start]


STRATEGIES: dict[str, Strategy] = {
    "autotune": predicted, "TPE, cold": tpe_cold, "random": drawn, "grid": grid,
}  # fmt: skip


def trials_needed(strategy: Strategy, judged: Sequence[Judged], times: Times, seed: int) -> int:
    """Trials until one is within 1 % of the best; one more than there are where it stops before."""
    goal = min(times.values()) * WITHIN
    for count, candidate in enumerate(strategy(judged, times, seed), start=1):
        if times[candidate] <= goal:
            return count
    return len(times) + 1


def judged_of(
    stages: Stages, problem: Problem, candidates: Sequence[Candidate], *, compiles: bool
) -> list[Judged]:
    """The candidates with their predictions: the compiled schedule's, or the model's."""
    judge = stages.judge(base.load(problem.kernel), problem)
    modelled = [j for j in stages.model(judge, Space(legal=tuple(candidates))) if j.survives]
    if not compiles:
        return modelled
    rows = stages.compile(judge, len(modelled))(modelled, lambda: False)
    return [Judged(candidate=c, row=row) for c, row in rows.items() if row.status == "ok"]


def compare(
    judged: Sequence[Judged], samples: Mapping[Candidate, Sequence[float]], seeds: int
) -> dict[str, list[int]]:
    """Strategy -> trials needed, one number a seed."""
    times = {j.candidate: statistics.median(samples[j.candidate]) for j in judged}
    return {
        name: [trials_needed(strategy, judged, times, seed) for seed in range(seeds)]
        for name, strategy in STRATEGIES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--least", type=int, default=8, help="configurations of a problem")
    parser.add_argument("--until", choices=("model", "compile"), default="compile")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if not arguments.recording.is_file():
        raise InputError(f"{arguments.recording} is no file; {SOURCES}")
    replay = Replay(arguments.recording)
    total = {name: [0] * arguments.seeds for name in STRATEGIES}
    with Stages.open(jobs=arguments.jobs, timeout_s=600, fresh=False, progress=Quiet()) as stages:
        for problem in replay.problems():
            samples = replay.samples(problem)
            if len(samples) < arguments.least:
                continue
            compiles = arguments.until == "compile"
            judged = judged_of(stages, problem, list(samples), compiles=compiles)
            print(f"{problem.label} {problem.json}: {len(judged)} of {len(samples)} candidates")
            needed = compare(judged, samples, arguments.seeds)
            _print(needed)
            for name, counts in needed.items():
                total[name] = [a + b for a, b in zip(total[name], counts, strict=True)]
    print(f"all problems together ({arguments.until} evidence)")
    _print(total)


def _print(needed: Mapping[str, Sequence[int]]) -> None:
    for name, counts in needed.items():
        ordered = sorted(counts)
        share = statistics.median(counts) / statistics.median(needed["random"])
        print(
            f"  {name:<10} median {statistics.median(counts):5.1f} trials to come within 1 % "
            f"(nine seeds in ten: {ordered[int(0.9 * (len(ordered) - 1))]}); "
            f"{share:.2f} of random's"
        )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
