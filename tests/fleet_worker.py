"""A sweep's measuring stage with a pretended device, as a process that tests can kill. No jax.

`python fleet_worker.py URL LOG SIZE`: times SIZE² candidates, with a line in LOG as it begins and
ends each, and prints what it knows in the end.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from autotune.candidate import Candidate
from autotune.row import Row
from autotune.search import storage
from autotune.search.evaluate import Judged
from autotune.search.fleet import joined
from autotune.search.ledger import Codec, Ledger, Topic
from autotune.search.order import time_survivors
from autotune.search.study import Budget

CODEC: Codec[float] = Codec(
    encode=lambda ms: {"ms": ms},
    decode=lambda record: float(record["ms"]),
    latency_ms=lambda candidate, ms: ms if ms > 0 else None,
)


def survivors(size: int) -> list[Judged]:
    """Blocks (bm, bn); none is so slow that it may be left out."""
    found = []
    for bm, bn in itertools.product(range(size), repeat=2):
        candidate = Candidate.of({"bm": bm, "bn": bn}, is_default=bm == bn == 0)
        row = Row(
            problem_key="k", kernel="matmul", device="v6e", problem="{}", config=candidate.json,
            status="ok", evidence="compiled", latency_compiled_ms=1 + bm / 100 + bn / 1000,
        )  # fmt: skip
        found.append(Judged(candidate=candidate, row=row))
    return found


def topic(judged: Sequence[Judged], method: str = "pretended") -> Topic:
    candidates = frozenset(j.candidate for j in judged)
    return Topic(stage="measure", subject="matmul v6e k", method=method, candidates=candidates)


def true_ms(candidate: Candidate) -> float:
    bm, bn = candidate.config["bm"], candidate.config["bn"]
    assert isinstance(bm, int)
    assert isinstance(bn, int)
    return 1 + ((bm * 7 + bn * 3) % 11) / 100


def main(url: str, log: str, size: int) -> None:
    judged = survivors(size)

    def note(what: str, candidate: Candidate) -> None:
        with Path(log).open("a") as file:
            file.write(json.dumps([os.getpid(), what, candidate.json]) + "\n")

    def work(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, float]]:
        for candidate in candidates:
            note("begin", candidate)
            time.sleep(0.02)
            note("end", candidate)
            yield candidate, true_ms(candidate)

    with (
        closing(storage.opened(url)) as opened,
        joined(opened) as fleet,
        Ledger(fleet, topic(judged), CODEC) as ledger,
    ):

        def evaluate(
            batch: Sequence[Judged], out_of_time: Callable[[], bool]
        ) -> dict[Candidate, Row]:
            rows = {j.candidate: j.row for j in batch}
            return {
                c: replace(rows[c], evidence="measured", latency_measured_ms=ms)
                for c, ms in ledger.share(list(rows), work, out_of_time)
            }

        rows = time_survivors(judged, evaluate, budget=Budget(trials=size**2), seed=0)
    print(json.dumps({c.json: row.latency_measured_ms for c, row in rows.items()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
