"""Does the prediction choose well? Measured winners of Tokamax's splash against their spaces.

    python benchmarks/tokamax_winners.py DATA_DIR [--devices tpu7x,v6e,v5p] [--sample 5]
        [--seconds N] [--timeout 150] [--output FILE]

For every forward problem of `silicon_tokamax_splash.csv` the measured winners and a seeded sample
of the other candidates that they were measured against are compiled and predicted, the cheapest
problems first and the chips in turn. A sample is the candidates whose blocks the model ranks best,
changes of a winner's blocks, layouts and scheduler, and, last, all of those changes that the
schedules liked, together: it looks for a better prediction, so that a winner within 5 % of the
best means something. What is compiled is cached, so an interrupted call goes on where it was;
`--seconds 0` shows what the cache has. Nothing here needs a TPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune import device as devices
from autotune import versions
from autotune.calibration import data
from autotune.candidate import Candidate
from autotune.errors import InputError
from autotune.kernels import base
from autotune.problem import Problem
from autotune.progress import Quiet
from autotune.search.evaluate import Judge
from autotune.search.prune import Stages
from autotune.search.space import Space

CSV, KERNEL = "silicon_tokamax_splash.csv", "tokamax.splash"
SOURCES = "docs/calibration.md, Where the measurements come from, says how to make it"
WITHIN = 0.05
RANKED = 2
"""Of a sample, the candidates that the model's rank brings in."""
BLOCKS = ("block_q", "block_kv", "block_kv_compute")
LAYOUTS = ("q_layout", "k_layout", "v_layout")
SCHEDULER = "use_experimental_scheduler"
WIDEST = {"v6e": 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A problem with its measured winners: (config as measured, milliseconds) of each run."""

    problem: Problem
    winners: tuple[tuple[Candidate, float], ...]

    @property
    def label(self) -> str:
        """Batch x query heads / key heads x length x head dim, mask, residuals."""
        s, options = self.problem.shape, self.problem.options
        mask = "causal" if "causal" in options["mask"] else "full"
        more = ", residuals" if options["residuals"] else ""
        heads = f"{s['q_heads']}" + ("" if s["q_heads"] == s["kv_heads"] else f"/{s['kv_heads']}")
        return f"{s['batch']} x {heads} x {s['q_len']} x {s['head_dim_qk']} {mask}{more}"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What was predicted for a spec.

    Attributes:
      predicted: candidate -> milliseconds, of all that compiled.
      dropped: candidate -> why it has no prediction.
      left: candidates that time did not suffice for.
    """

    spec: Spec
    predicted: dict[Candidate, float] = field(default_factory=dict)
    dropped: dict[Candidate, str] = field(default_factory=dict)
    left: int = 0

    @property
    def tried(self) -> set[Candidate]:
        return {*self.predicted, *self.dropped}

    @property
    def best(self) -> Candidate | None:
        """The candidate predicted fastest."""
        return min(self.predicted, key=lambda c: self.predicted[c], default=None)

    @property
    def winner(self) -> tuple[Candidate, float] | None:
        """The fastest measured run that has a prediction, and its measured milliseconds."""
        told = [w for w in self.spec.winners if w[0] in self.predicted]
        return min(told, key=lambda w: w[1], default=None)

    @property
    def above(self) -> float | None:
        """The winner's prediction over the best one, less 1; None without a sampled competitor."""
        measured = {candidate for candidate, _ in self.spec.winners}
        if self.winner is None or self.best is None or not self.predicted.keys() - measured:
            return None
        return self.predicted[self.winner[0]] / self.predicted[self.best] - 1


def specs(folder: Path, chosen: Sequence[str]) -> list[Spec]:
    """Forward problems of the chosen chips in the order they are tried: cheapest first, chips in
    turn.

    Raises:
      InputError: Tokamax is not installed, or the folder has no such file.
    """
    if not (folder / CSV).is_file():
        raise InputError(f"{folder} has no {CSV}; {SOURCES}")
    kernel = base.load(KERNEL)
    runs: dict[Problem, list[tuple[Candidate, float]]] = defaultdict(list)
    for row in data.read([folder / CSV], data.EVALUATE):
        if row.device in chosen and row.problem["options"].get("pass") is None:
            problem = base.make_problem(kernel, device=row.device, **row.problem)
            config = kernel.canonical(problem, row.config)
            runs[problem].append((Candidate.of(config), row.measured_ms))
    found = [Spec(problem=p, winners=tuple(w)) for p, w in runs.items()]
    queues = [
        sorted((s for s in found if s.problem.device == name), key=_effort) for name in chosen
    ]
    return [s for turn in itertools.zip_longest(*queues) for s in turn if s is not None]


def _effort(spec: Spec) -> int:
    """Roughly what compiling a spec's candidates takes: the area of the winner's tile, four times
    that with the alternative scheduler, twice where a mask makes two branches of a step."""
    config = max((dict(w.config) for w, _ in spec.winners), key=lambda c: bool(c[SCHEDULER]))
    area = int(config[BLOCKS[0]] or 0) * int(config[BLOCKS[1]] or 0)
    return area * (4 if config[SCHEDULER] else 1) * (2 if "causal" in spec.label else 1)


def space_of(spec: Spec) -> list[Candidate]:
    """The candidates the winner was measured against (the data's README tells which)."""
    problem, kernel = spec.problem, base.load(KERNEL)
    device = devices.get(problem.device)
    widest = WIDEST.get(problem.device, 4096)
    tiles = [2**n for n in range(7, 13) if 2**n <= widest]

    def allowed(length: int) -> list[int]:
        return [t for t in tiles if length % t == 0 and (length < 1024 or t >= 1024)]

    compute = [t for t in tiles if t <= 1024]
    found: dict[Candidate, None] = {}
    values = (allowed(problem.shape["q_len"]), allowed(problem.shape["kv_len"]), compute)
    first = dict(spec.winners[0][0].config)
    for blocks, layouts, scheduler in itertools.product(
        itertools.product(*values), itertools.product((1, 2), repeat=3), (False, True)
    ):
        config: dict[str, Any] = {
            **first, **dict(zip(BLOCKS, blocks, strict=True)),
            **dict(zip(LAYOUTS, layouts, strict=True)), SCHEDULER: scheduler,
        }  # fmt: skip
        if kernel.illegal is None or kernel.illegal(problem, config, device) is None:
            found[Candidate.of(kernel.canonical(problem, config))] = None
    return list(found)


def changed(winner: Candidate, other: Candidate) -> tuple[str, ...]:
    """Which tunables differ."""
    return tuple(n for n in winner.config if winner.config[n] != other.config.get(n))


def ordered(
    winner: Candidate, space: Iterable[Candidate], model_ms: Mapping[Candidate, float], seed: str
) -> list[Candidate]:
    """Competitors of `winner` in the order they are tried: of its layouts and scheduler those whose
    blocks the model ranks best, then changes of one or two of its tunables, a kind in turn."""
    others = [c for c in space if c != winner]
    alike = [c for c in others if set(changed(winner, c)) <= set(BLOCKS)]
    told = [c for c in alike if c in model_ms]
    found = dict.fromkeys(sorted(told, key=lambda c: model_ms[c])[:RANKED])
    rng = random.Random(seed)
    kinds: list[list[Candidate]] = [
        [c for c in alike if len(changed(winner, c)) == 1],
        [c for c in others if set(changed(winner, c)) <= set(LAYOUTS)],
        [c for c in others if changed(winner, c) == (SCHEDULER,)],
        [c for c in others if len(changed(winner, c)) == 2],
    ]
    for kind in kinds:
        rng.shuffle(kind)
    for turn in itertools.zip_longest(*kinds):
        found |= dict.fromkeys(c for c in turn if c is not None)
    return list(found)


def combined(winner: Candidate, outcome: Outcome, space: Iterable[Candidate]) -> Candidate | None:
    """All changes that were predicted faster than `winner`, together, the better first; None where
    that is no new candidate of the space."""
    bar = outcome.predicted.get(winner)
    if bar is None:
        return None
    better = sorted((ms, c.json, c) for c, ms in outcome.predicted.items() if ms < bar)
    config, taken = dict(winner.config), set[str]()
    for _, _, candidate in better:
        names = changed(winner, candidate)
        if taken.isdisjoint(names):
            config |= {name: candidate.config[name] for name in names}
            taken.update(names)
    found = Candidate.of(config)
    return found if found in set(space) and found not in outcome.tried else None


class Trial:
    """Predicts the candidates of one spec after the other, as a sweep does."""

    def __init__(self, stages: Stages, *, size: int, out_of_time: Callable[[], bool]) -> None:
        self._stages, self._size, self._out_of_time = stages, size, out_of_time

    def of(self, spec: Spec) -> Outcome:
        """The winners of a spec, then its sample, then what the sample's best changes make."""
        outcome = Outcome(spec=spec)
        judge = self._stages.judge(base.load(KERNEL), spec.problem)
        for winner, _ in spec.winners:
            self._predict(judge, winner, outcome)
        if outcome.winner is None:
            return outcome
        winner, space = outcome.winner[0], space_of(spec)
        measured = {each for each, _ in spec.winners}
        blocks = [c for c in space if set(changed(winner, c)) <= set(BLOCKS)]
        judged = self._stages.model(judge, Space(legal=tuple(blocks)))
        model_ms = {j.candidate: j.row.latency_model_ms or 0.0 for j in judged if j.survives}
        # What does not compile is no competitor: the next one takes its place, a few times.
        for candidate in ordered(winner, space, model_ms, spec.problem.key)[: 2 * self._size]:
            if len(outcome.predicted.keys() - measured) < self._size:
                self._predict(judge, candidate, outcome)
        if (last := combined(winner, outcome, space)) is not None:
            self._predict(judge, last, outcome)
        return outcome

    def _predict(self, judge: Judge, candidate: Candidate, outcome: Outcome) -> None:
        if candidate in outcome.tried:
            return
        (judged,) = self._stages.model(judge, Space(legal=(candidate,)))
        if judged.program is None:
            outcome.dropped[candidate] = f"{judged.row.status}: {judged.row.reason}"
            return
        evaluate = self._stages.compile(judge, 1)
        row = evaluate([judged], self._out_of_time).get(candidate)
        if row is None:
            outcome.left += 1
        elif row.status == "ok" and row.latency_compiled_ms is not None:
            outcome.predicted[candidate] = row.latency_compiled_ms
        else:
            outcome.dropped[candidate] = f"{row.status}: {row.reason}"


def shown(candidate: Candidate) -> str:
    """Blocks / layouts / scheduler, as in `1024/1024/512 L121 alt`."""
    c = candidate.config
    blocks = "/".join(str(c[name]) for name in BLOCKS)
    layouts = "".join(str(c[name]) for name in LAYOUTS)
    return f"{blocks} L{layouts}{' alt' if c[SCHEDULER] else ''}"


def line(outcome: Outcome) -> str:
    """One line of the Markdown table."""
    spec, winner, best = outcome.spec, outcome.winner, outcome.best
    start = f"| {spec.problem.device} | {spec.label} "
    if winner is None or best is None:
        reasons = "; ".join(sorted(set(outcome.dropped.values()))) or "not compiled in the time"
        return f"{start}| no prediction of a winner: {reasons} |"
    ms = outcome.predicted[winner[0]]
    return (
        f"{start}| {len(outcome.predicted)} | {shown(winner[0])} | {winner[1]:.3f} | {ms:.3f} "
        f"({ms / winner[1] - 1:+.1%}) | {shown(best)} | {outcome.predicted[best]:.3f} "
        f"| {'–' if outcome.above is None else f'{outcome.above:.1%}'} |"
    )


def record(outcome: Outcome) -> str:
    """The outcome as a line of JSON: every candidate's prediction, and why one has none."""
    return json.dumps(
        {
            "device": outcome.spec.problem.device,
            "problem": json.loads(outcome.spec.problem.json),
            "measured": [[w.config, ms] for w, ms in outcome.spec.winners],
            "predicted": [[c.config, ms] for c, ms in outcome.predicted.items()],
            "dropped": [[c.config, why] for c, why in outcome.dropped.items()],
            "above_best": outcome.above,
        }
    )


def summary(outcomes: Sequence[Outcome], device: str) -> str:
    """How many of a chip's specs were tried, and the share of them within 5 %."""
    own = [o for o in outcomes if o.spec.problem.device == device]
    tried = [o.above for o in own if o.above is not None]
    within = sum(above <= WITHIN for above in tried)
    dropped = [f"{shown(c)} ({why})" for o in own for c, why in o.dropped.items()]
    share = f"{within / len(tried):.0%}" if tried else "none"
    told = f"{device}: {len(tried)} of {len(own)} specs tried, {within} within 5 % ({share})"
    return told + "".join(f"\n  dropped: {text}" for text in dropped)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("data", type=Path, help="folder of the measured CSVs")
    options.add_argument("--devices", default="tpu7x,v6e,v5p")
    options.add_argument("--sample", type=int, default=5, help="competitors a spec")
    options.add_argument("--seconds", type=float, default=float("inf"))
    options.add_argument("--timeout", type=float, default=150.0, help="seconds a candidate")
    options.add_argument("--jobs", type=int, default=None)
    options.add_argument("--output", type=Path, help="JSON lines, one a spec")
    chosen = options.parse_args()
    names, ends = chosen.devices.split(","), time.monotonic() + chosen.seconds
    wanted = specs(chosen.data, names)
    here, outcomes = versions.installed(), []
    print(f"jax {here['jax']}, libtpu {here['libtpu']}\n")
    print("| chip | spec | choices | winner | measured | predicted | best | predicted | above |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with Stages.open(
        jobs=chosen.jobs, timeout_s=chosen.timeout, fresh=False, progress=Quiet()
    ) as stages:
        trial = Trial(stages, size=chosen.sample, out_of_time=lambda: time.monotonic() >= ends)
        for spec in wanted:
            outcomes.append(trial.of(spec))
            print(line(outcomes[-1]), flush=True)
            if chosen.output:
                with chosen.output.open("a", encoding="utf-8") as file:
                    file.write(record(outcomes[-1]) + "\n")
    print()
    for name in names:
        print(summary(outcomes, name))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
