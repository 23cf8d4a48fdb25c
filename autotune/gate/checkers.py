"""Outputs checked side by side, each in a worker process of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from autotune.candidate import Config
from autotune.gate.request import Checker
from autotune.measure.check import Checked
from autotune.problem import Problem


def checked(
    make: Callable[[], Checker], asked: Sequence[tuple[Problem, Config]], *, jobs: int
) -> Iterator[tuple[int, Checked]]:
    """(place in `asked`, verdict) of each, in the order they finish, `jobs` at a time.

    The threads do no more than wait for the checkers' processes: no kernel's code runs in them.
    Leaving early, by Ctrl-C too, ends what is still being checked.
    """
    checkers = [make() for _ in range(min(jobs, len(asked)))]
    idle: queue.SimpleQueue[Checker] = queue.SimpleQueue()
    for checker in checkers:
        idle.put(checker)

    def one(problem: Problem, config: Config) -> Checked:
        checker = idle.get()
        try:
            return checker.check(problem, config)
        finally:
            idle.put(checker)

    if not checkers:
        return
    threads = ThreadPoolExecutor(len(checkers), thread_name_prefix="check")
    try:
        places = {threads.submit(one, *item): place for place, item in enumerate(asked)}
        for done in as_completed(places):
            yield places[done], done.result()
    finally:
        for checker in checkers:
            checker.stop()
        threads.shutdown(wait=True, cancel_futures=True)
        for checker in checkers:
            checker.close()
