"""From a problem and a candidate to an `Explanation`: evaluate it and what lies next to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autotune import cost_model
from autotune import device as devices
from autotune.candidate import Candidate, Scalar
from autotune.compiler import environment
from autotune.errors import KernelError, NoCompilerError
from autotune.evidence import Compiled
from autotune.explain import bill, scopes, timeline, verdict
from autotune.explain.facts import Explanation, Neighbour, Roofline
from autotune.explain.mask import statistics
from autotune.explain.subject import Chosen, Subject
from autotune.kernels import base
from autotune.progress import Progress
from autotune.row import Row
from autotune.search.evaluate import Judge, Judged
from autotune.search.prune import Stages
from autotune.search.space import Illegal, Space


def explain(
    subject: Subject,
    chosen: Chosen,
    *,
    until: str | None,
    neighbours: bool,
    jobs: int | None,
    timeout_s: float,
    progress: Progress,
) -> Explanation:
    """Everything known of a candidate; compiled where the machine can and `until` allows.

    Raises:
      NoCompilerError: `until` is `compile` and this machine cannot.
      KernelError: a function of the kernel raised.
    """
    candidate, obstacle = chosen.candidate, environment.unavailable()
    if until == "compile" and obstacle:
        raise NoCompilerError(f"--until compile is not possible here: {obstacle}")
    compiling = until != "model" and not obstacle
    near = list(_neighbours(subject, candidate)) if neighbours else []
    with Stages.open(jobs=jobs, timeout_s=timeout_s, fresh=False, progress=progress) as stages:
        judge = stages.judge(subject.kernel, subject.problem)
        judged = {j.candidate: j for j in stages.model(judge, _space(candidate, near))}
        able = [j for j in judged.values() if j.survives and compiling]
        progress.start(judge.problem.label, "compile", len(able))
        compiled = stages.verdicts(judge, [j.candidate for j in able])
    rows = {
        c: judge.compiled(j, compiled[c]) if c in compiled else j.row for c, j in judged.items()
    }
    notes = [] if compiling else [obstacle or "not compiled: --until model"]
    return _explanation(
        subject, chosen.origin, judge, judged[candidate], compiled.get(candidate), rows[candidate],
        tuple(_told(near, rows, rows[candidate])), notes,
    )  # fmt: skip


Step = tuple[str, Scalar, str, Candidate, str | None]
"""Tunable, its value, `larger`, `smaller` or `other`, the candidate, and why it is illegal."""


def _neighbours(subject: Subject, candidate: Candidate) -> Iterator[Step]:
    """The candidates one step away along each tunable; canonical, none twice."""
    kernel, problem = subject.kernel, subject.problem
    device = devices.get(problem.device)
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    seen = {candidate}
    for name, tunable in tunables.items():
        for direction, value in _steps(candidate.config[name], tunable.values):
            config: Mapping[str, Any] = {**candidate.config, name: value}
            config = base.ask(kernel, "canonical", kernel.canonical, problem, config)
            other = Candidate.of(config)
            if other in seen:
                continue
            seen.add(other)
            reason = base.ask(kernel, "illegal", kernel.illegal, problem, config, device)
            yield name, value, direction, other, reason


def _steps(here: Scalar, values: Iterable[Scalar]) -> Iterator[tuple[str, Scalar]]:
    """The next value either way for numbers, each other value for the rest."""
    if isinstance(here, int | float) and not isinstance(here, bool):
        numbers = sorted(v for v in values if isinstance(v, int | float) and v is not True)
        yield from (("smaller", v) for v in [v for v in numbers if v < here][-1:])
        yield from (("larger", v) for v in [v for v in numbers if v > here][:1])
        return
    for value in values:
        if repr(value) != repr(here):
            yield "other", value


def _space(candidate: Candidate, near: list[Step]) -> Space:
    return Space(
        legal=(candidate, *(c for _, _, _, c, reason in near if reason is None)),
        illegal=tuple(
            Illegal(candidate=c, reason=reason) for _, _, _, c, reason in near if reason is not None
        ),
    )


def _told(near: list[Step], rows: Mapping[Candidate, Row], here: Row) -> Iterator[Neighbour]:
    for name, value, direction, other, _ in near:
        row = rows[other]
        comparable = row.latency_ms_of(here.evidence) if row.status == "ok" else None
        own = here.latency_ms_of(here.evidence)
        vmem = row.vmem_compiled_bytes or row.vmem_model_bytes
        yield Neighbour(
            tunable=name, value=value, direction=direction, status=row.status, reason=row.reason,
            evidence=row.evidence, latency_ms=comparable, vmem_bytes=vmem,
            change=comparable / own - 1 if comparable and own else None,
        )  # fmt: skip


def _explanation(
    subject: Subject,
    origin: str,
    judge: Judge,
    judged: Judged,
    compiled: Compiled | None,
    row: Row,
    near: tuple[Neighbour, ...],
    notes: list[str],
) -> Explanation:
    problem, program = subject.problem, judged.program
    counts = judge.scope_counts(judged.candidate)
    schedules = compiled.schedules if compiled is not None and compiled.status == "ok" else ()
    latency = None
    if program is not None:
        try:
            latency = (
                cost_model.compiled_latency(
                    program, schedules, judge.device, scope_counts=counts, xla_ops=compiled.xla_ops
                )
                if compiled is not None and schedules
                else cost_model.model_latency(program, judge.device, scope_counts=counts)
            )
        except KernelError as error:
            notes.append(str(error))
    lines = scopes.lines(program, schedules, judge.device, counts) if program else ()
    return Explanation(
        problem=problem.label,
        kernel=problem.kernel,
        device=problem.device,
        shape=dict(problem.shape),
        options=dict(problem.options),
        dtype=problem.dtype,
        config=judged.candidate.config,
        config_origin=origin,
        status=row.status,
        reason=row.reason,
        evidence=row.evidence,
        latency_ms=row.latency_ms_of(row.evidence) if row.status == "ok" else None,
        latency_low_ms=row.latency_low_ms,
        latency_high_ms=row.latency_high_ms,
        latency_model_ms=row.latency_model_ms,
        latency_compiled_ms=row.latency_compiled_ms,
        mfu=row.mfu,
        effective_tflops=row.effective_tflops,
        flops=judge.flops,
        flop_convention=subject.kernel.flop_convention,
        limits=verdict.limits(row, latency, lines),
        parts=verdict.parts(latency, judge.device),
        vmem_limit_bytes=row.vmem_limit_bytes,
        vmem=bill.lines(program, schedules, judge.device) if program else (),
        roofline=_roofline(judge, row),
        scopes=lines,
        scopes_split=scopes.split(program) if program else (),
        timeline=timeline.segments(program, schedules, judge.device, counts) if program else (),
        neighbours=near,
        mask=statistics(problem, judged.candidate.config),
        notes=tuple(notes),
    )


def _roofline(judge: Judge, row: Row) -> Roofline | None:
    """Source: Williams, Waterman, Patterson, "Roofline", CACM 52 (2009)."""
    device = judge.device
    peak = device.peak(judge.peak_dtype or judge.problem.dtype) or device.peak("bfloat16")
    if row.executed_flops is None or row.hbm_bytes is None or peak is None:
        return None
    intensity = row.executed_flops / row.hbm_bytes if row.hbm_bytes else None
    bandwidth = device.hbm_bytes_per_s
    attainable = peak if intensity is None else min(peak, intensity * bandwidth)
    latency_ms = row.latency_ms_of(row.evidence)
    reached = row.executed_flops / (latency_ms / 1e3) / 1e12 if latency_ms else None
    return Roofline(
        executed_flops=row.executed_flops,
        hbm_bytes=row.hbm_bytes,
        intensity=intensity,
        ridge=peak / bandwidth,
        peak_tflops=peak / 1e12,
        attainable_tflops=attainable / 1e12,
        executed_tflops=reached,
    )
