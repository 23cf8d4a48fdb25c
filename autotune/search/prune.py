"""The model and compile stages of one sweep: candidates in, judged rows out, evidence cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from autotune import constants, evidence
from autotune import device as devices
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.compiler.cache import Cache, CompileCache, content_key
from autotune.compiler.fingerprint import kernel_fingerprint, record_fingerprint
from autotune.compiler.pool import CompilePool
from autotune.compiler.task import Task
from autotune.constants import Calibration
from autotune.device import Device
from autotune.evidence import Compiled
from autotune.kernels import base
from autotune.kernels.base import Kernel
from autotune.problem import Problem
from autotune.progress import Progress
from autotune.row import Row
from autotune.search.evaluate import Judge, Judged
from autotune.search.space import Space
from autotune.traced import measured_spills

Work = Callable[[Iterable[Candidate]], Iterator[tuple[Candidate, Compiled]]]
Share = Callable[
    [Sequence[Candidate], Work, Callable[[], bool]], Iterator[tuple[Candidate, Compiled]]
]


@dataclass(kw_only=True, slots=True)
class Stages:
    """What the stages of a sweep share: workers, cache, progress.

    `calibrations` are the devices' constants; None for those of the calibration file. Once
    `out_of_time`, `verdicts` has the cache's only.
    """

    pool: CompilePool
    cache: Cache
    progress: Progress
    fresh: bool = False
    calibrations: Mapping[str, Calibration] | None = None
    out_of_time: Callable[[], bool] = lambda: False
    _fingerprints: dict[str, str] = field(default_factory=dict)
    _compile_caches: dict[str, CompileCache] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(
        cls, *, jobs: int | None, timeout_s: float, fresh: bool, progress: Progress,
        calibrations: Mapping[str, Calibration] | None = None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> Iterator[Stages]:  # fmt: skip
        """Stages with `jobs` worker processes, which end with the context."""
        cache = Cache(warn=lambda text: progress.note(f"autotune: {text}"))
        with CompilePool(jobs=jobs, timeout_s=timeout_s) as pool:
            yield cls(
                pool=pool, cache=cache, progress=progress, fresh=fresh, calibrations=calibrations,
                out_of_time=out_of_time,
            )  # fmt: skip

    def judge(self, kernel: Kernel, problem: Problem) -> Judge:
        """The judge of a problem: its FLOP count, its kernel's fingerprint, its device's constants.

        Raises InputError for a calibration file that cannot be read.
        """
        device = _as_flagged(devices.get(problem.device))
        device = constants.calibrated(device, self.calibrations)
        return Judge(
            problem=problem,
            device=device,
            flops=base.ask(kernel, "flops", kernel.flops, problem),
            kernel_fingerprint=self._fingerprint(problem.kernel),
            method_fingerprint=self._method_fingerprint(device),
            peak_dtype=base.ask(kernel, "multiplied_dtype", kernel.multiplied_dtype, problem),
            scope_counts=partial(_scope_counts, kernel, problem),
        )

    def model(self, judge: Judge, space: Space) -> list[Judged]:
        """Model evidence on every candidate of `space`; the illegal ones with their rule."""
        self.progress.start(judge.problem.label, "model", len(space.legal))
        (modelled,) = self.modelled([(judge, space.legal)])
        return [
            *modelled,
            *(judge.rejected(i.candidate, "pruned", i.reason) for i in space.illegal),
        ]

    def modelled(self, works: Sequence[tuple[Judge, Sequence[Candidate]]]) -> list[list[Judged]]:
        """Model evidence on the candidates of several problems, all traced in one pass."""
        limits = self.pool.timeout_s, self.pool.memory_limit_bytes
        keys = [self._trace_key(judge) for judge, _ in works]
        answers: list[dict[str, Compiled]] = []
        tasks: list[Task] = []
        belongs: dict[int, dict[str, Compiled]] = {}  # by the identity of a task
        for (judge, candidates), key in zip(works, keys, strict=True):
            stored = None if self.fresh else self.cache.get(key)
            known = {c: evidence.from_json(r) for c, r in (stored or {}).items()}
            traced = {c: answer for c, answer in known.items() if answer.holds_under(*limits)}
            answers.append(traced)
            for candidate in candidates:
                if candidate.json in traced:
                    self.progress.advance()
                    continue
                tasks.append(Task(problem=judge.problem, candidate=candidate, kind="trace"))
                belongs[id(tasks[-1])] = traced
        for task, answer in self.pool.run(tasks):
            belongs[id(task)][task.candidate.json] = answer
            self.progress.advance()
        made = {id(traced) for traced in belongs.values()}
        for key, traced in zip(keys, answers, strict=True):
            if id(traced) in made:
                kept = {c: evidence.to_json(t) for c, t in traced.items() if t.repeatable}
                self.cache.put(key, kept)
        return [
            [_modelled(judge, c, traced[c.json]) for c in candidates]
            for (judge, candidates), traced in zip(works, answers, strict=True)
        ]

    def compile(
        self, judge: Judge, total: int, share: Share | None = None
    ) -> Callable[[Sequence[Judged], Callable[[], bool]], dict[Candidate, Row]]:
        """An evaluation for `study.explore`: compiled evidence on a batch of survivors.

        With `share`, other sweeps do a part of it, and this one what it gets to do.
        """
        self.progress.start(judge.problem.label, "compile", total)
        best_ms: float | None = None

        def evaluate(
            batch: Sequence[Judged], out_of_time: Callable[[], bool]
        ) -> dict[Candidate, Row]:
            nonlocal best_ms
            by_candidate = {j.candidate: j for j in batch}
            rows: dict[Candidate, Row] = {}
            work = partial(self._compiled, judge, out_of_time=out_of_time)
            wanted = list(by_candidate)
            answers = work(wanted) if share is None else share(wanted, work, out_of_time)
            for candidate, compiled in answers:
                row = judge.compiled(by_candidate[candidate], compiled)
                rows[candidate] = row
                if row.status == "ok" and row.latency_compiled_ms is not None:
                    best_ms = min(best_ms or row.latency_compiled_ms, row.latency_compiled_ms)
                self.progress.advance(best_ms=best_ms)
            return rows

        return evaluate

    def verdicts(self, judge: Judge, candidates: Iterable[Candidate]) -> dict[Candidate, Compiled]:
        """The compiler's verdict on each candidate; on each that the cache has once time is up."""
        return dict(self._compiled(judge, candidates, self.out_of_time))

    def _compiled(
        self, judge: Judge, candidates: Iterable[Candidate], out_of_time: Callable[[], bool]
    ) -> Iterator[tuple[Candidate, Compiled]]:
        for _, candidate, compiled in self.answers(((judge, c) for c in candidates), out_of_time):
            yield candidate, compiled

    def answers(
        self,
        asked: Iterable[tuple[Judge, Candidate]],
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Judge, Candidate, Compiled]]:
        """The compiler's verdict on candidates of any problems, as it comes; from the cache where
        it is there.

        Candidates are pulled as workers get free. Once `out_of_time` none is compiled any more.
        """
        cached: list[tuple[Judge, Candidate, Compiled]] = []
        judges: dict[int, Judge] = {}  # by the identity of a task that is being compiled

        def missing() -> Iterator[Task]:
            for judge, candidate in asked:
                task = Task(problem=judge.problem, candidate=candidate)
                known = None if self.fresh else self._compile_cache(judge).get(task)
                if known is not None:
                    cached.append((judge, candidate, known))
                elif not out_of_time():
                    judges[id(task)] = judge
                    yield task

        for task, compiled in self.pool.run(missing()):
            judge = judges.pop(id(task))
            self._compile_cache(judge).put(task, compiled)
            yield judge, task.candidate, compiled
            while cached:
                yield cached.pop()
        yield from cached

    def _compile_cache(self, judge: Judge) -> CompileCache:
        fingerprint = judge.kernel_fingerprint
        if fingerprint not in self._compile_caches:
            self._compile_caches[fingerprint] = CompileCache(
                self.cache,
                fingerprint=fingerprint,
                timeout_s=self.pool.timeout_s,
                memory_limit_bytes=self.pool.memory_limit_bytes,
            )
        return self._compile_caches[fingerprint]

    def _fingerprint(self, source: str) -> str:
        """`kernel_fingerprint`, hashed once a sweep: what is edited meanwhile is the next one's."""
        if source not in self._fingerprints:
            self._fingerprints[source] = kernel_fingerprint(source)
        return self._fingerprints[source]

    def _method_fingerprint(self, device: Device) -> str:
        return content_key(
            {
                "models": self._fingerprint("autotune.search.evaluate:Judge"),
                "constants": constants.fingerprint(device),
                "record": record_fingerprint(),
                "flags": environment.compile_flags(os.environ),
            }
        )[:16]

    def _trace_key(self, judge: Judge) -> str:
        """Key of what tracing says of all candidates of a problem: they cost milliseconds each,
        and writing an entry safely costs as much."""
        return content_key(
            {
                "kind": "traced",
                "kernel_fingerprint": judge.kernel_fingerprint,
                "record_fingerprint": self._fingerprint("autotune.pallas_call:trace"),
                "measured_spills": measured_spills.fingerprint(),
                "versions": environment.versions(),
                "flags": environment.compile_flags(os.environ),
                "problem_key": judge.problem.key,
                "problem": judge.problem.json,
            }
        )


def _as_flagged(device: Device) -> Device:
    """`device` with the default VMEM limit that the user's own LIBTPU_INIT_ARGS give it."""
    limit_bytes = environment.scoped_vmem_bytes(os.environ)
    return device if limit_bytes is None else replace(device, scoped_vmem_bytes=limit_bytes)


def _scope_counts(kernel: Kernel, problem: Problem, candidate: Candidate) -> dict[str, int]:
    if kernel.scope_counts is None:
        return {}
    return dict(base.ask(kernel, "scope_counts", kernel.scope_counts, problem, candidate.config))


def _modelled(judge: Judge, candidate: Candidate, answer: Compiled) -> Judged:
    if answer.program is None:
        return judge.rejected(candidate, answer.status, answer.reason or "not traced")
    return judge.modelled(candidate, answer.program)
