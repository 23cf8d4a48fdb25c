"""How often the measured gate is wrong, by simulation on recorded noise. No TPU, no jax.

Noise within a run is recorded: `recorded_noise.csv` has five device times of one program a row, a
sample over the whole range of spreads, from the autotuning data that Tokamax 0.0.17 ships (Apache
2.0; programs of 1 ms and more, since times are given to 1 us). A simulated run draws a program and,
with replacement, deviations from its median. Nobody published raw times of one program in two runs,
so what differs between runs is a model: drift that best and default share, normal with a median
size of 1.5 % between two runs (the repeated rows of Tokamax's splash timings), and drift of their
own, 0.3 % a run (two chips of the published v6e sweep).

    python benchmarks/gate_noise.py [--runs 1000] [--samples 20] [--check]
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.gate.samples import Samples, compare
from autotune.gate.verdict import INCONCLUSIVE, PASS, REGRESSION

RECORDED = Path(__file__).with_name("recorded_noise.csv")
SHARED_DRIFT = 0.015 / 0.6745 / np.sqrt(2)
"""Standard deviation of a run's shared drift: the median of |a - b| is 0.6745 · sqrt(2) of it."""
OWN_DRIFT = 0.003
TOLERANCE = 0.05

Noise = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulated situation: what became slower, under which noise, and what must come out.

    Attributes:
      best, default: factor on today's times.
      slow: share of today's runs of the best that take three times as long.
      alone: there is no default beside the best: it is the best, or it gave no times.
      at_most, at_least: outcome -> share of runs.
    """

    name: str
    best: float = 1.0
    default: float = 1.0
    slow: float = 0.0
    alone: bool = False
    noise: str = "recorded"
    shared: float = SHARED_DRIFT
    own: float = OWN_DRIFT
    at_most: tuple[str, float] | None = None
    at_least: tuple[str, float] | None = None


CASES = (
    Case(name="nothing changed", at_most=(REGRESSION, 0.01)),
    Case(name="best 5 % slower", best=1.05, at_least=(REGRESSION, 0.95)),
    Case(name="best 10 % slower", best=1.10, at_least=(REGRESSION, 0.95)),
    Case(name="best 3 % slower", best=1.03),
    Case(name="best and default 5 % slower", best=1.05, default=1.05),
    Case(name="best and default 20 % slower", best=1.2, default=1.2, at_least=(REGRESSION, 0.95)),
    Case(name="best 20 % faster", best=0.8, at_most=(REGRESSION, 0.01)),
    Case(name="best 40 % faster, default 55 %", best=0.6, default=0.45, at_most=(REGRESSION, 0.01)),
    Case(name="best 3x slower in 1 run of 10", slow=0.1, at_most=(PASS, 0.01)),
    Case(name="no default, nothing changed", alone=True, at_most=(REGRESSION, 0.01)),
    Case(name="no default, best 5 % slower", best=1.05, alone=True, at_most=(PASS, 0.05)),
    Case(name="no default, best 7 % slower", best=1.07, alone=True, at_most=(PASS, 0.01)),
    Case(name="no default, best 20 % slower", best=1.2, alone=True, at_least=(REGRESSION, 0.95)),
    Case(name="10 % noise, nothing changed", noise="10 %", at_most=(REGRESSION, 0.01)),
    Case(name="10 % noise, best 30 % slower", best=1.3, noise="10 %",
         at_least=(REGRESSION, 0.95)),
    Case(name="drift not shared, nothing changed", shared=0.0, own=float(SHARED_DRIFT)),
)  # fmt: skip


def recorded(rows: list[np.ndarray]) -> Noise:
    """Deviations drawn from those of one recorded program a run."""

    def noise(random: np.random.Generator, samples: int) -> np.ndarray:
        row = rows[random.integers(len(rows))]
        return random.choice(row, samples)

    return noise


def normal(share: float) -> Noise:
    return lambda random, samples: np.exp(random.normal(0.0, share, samples))


def run(
    case: Case,
    noise: Noise,
    random: np.random.Generator,
    samples: int,
    factors: tuple[float, float],
    slow: float = 0.0,
) -> Samples:
    """Times of the best (1 ms) and the default (3 ms) in one run."""
    shared = random.normal(0.0, case.shared)
    times = [
        base * factor * np.exp(shared + random.normal(0.0, case.own)) * noise(random, samples)
        for base, factor in zip((1.0, 3.0), factors, strict=True)
    ]
    times[0][: round(slow * samples)] *= 3
    return Samples(best_ms=times[0].tolist(), default_ms=[] if case.alone else times[1].tolist())


def simulate(case: Case, noise: Noise, *, runs: int, samples: int, seed: int) -> dict[str, float]:
    """Share of each outcome over `runs` pairs of a baseline and a run of today."""
    random = np.random.default_rng(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(runs):
        baseline = run(case, noise, random, samples, (1.0, 1.0))
        today = run(case, noise, random, samples, (case.best, case.default), slow=case.slow)
        outcomes[compare(baseline, today, tolerance=TOLERANCE).outcome] += 1
    return {o: outcomes[o] / runs for o in (PASS, REGRESSION, INCONCLUSIVE)}


def missed(case: Case, shares: dict[str, float]) -> str | None:
    """The target that was missed, in words; None where all were met."""
    if case.at_most and shares[case.at_most[0]] > case.at_most[1]:
        return f"{case.at_most[0]} above {case.at_most[1]:.0%}"
    if case.at_least and shares[case.at_least[0]] < case.at_least[1]:
        return f"{case.at_least[0]} below {case.at_least[1]:.0%}"
    return None


def load(path: Path = RECORDED) -> list[np.ndarray]:
    """Relative deviations of each recorded program."""
    with path.open(newline="") as file:
        times = [
            [float(row[f"sample_{i}_ms"]) for i in range(1, 6)] for row in csv.DictReader(file)
        ]
    return [np.array(row) / np.median(row) for row in times]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("--samples", type=int, default=20, help="per config and run")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    given = options.parse_args()
    noises = {"recorded": recorded(load()), "10 %": normal(0.1)}
    print(f"{given.runs} runs, {given.samples} samples a config and run, tolerance {TOLERANCE:.0%}")
    print(f"{'case':<36}{PASS:>8}{REGRESSION:>12}{INCONCLUSIVE:>14}  target")
    failures = 0
    for case in CASES:
        shares = simulate(case, noises[case.noise], runs=given.runs, samples=given.samples,
                          seed=given.seed)  # fmt: skip
        miss = missed(case, shares)
        failures += miss is not None
        target = case.at_most or case.at_least
        said = "" if target is None else miss or "met"
        print(f"{case.name:<36}{shares[PASS]:>8.1%}{shares[REGRESSION]:>12.1%}"
              f"{shares[INCONCLUSIVE]:>14.1%}  {said}")  # fmt: skip
    return 1 if given.check and failures else 0


if __name__ == "__main__":
    sys.exit(main())
