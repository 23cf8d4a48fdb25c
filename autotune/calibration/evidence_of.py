"""What tracing and compiling say of measured rows: everything a prediction needs but constants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune import cost_model
from autotune import device as devices
from autotune.calibration.data import Measured
from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.device import Device
from autotune.errors import AutotuneError, KernelError
from autotune.kernels import base
from autotune.problem import Problem
from autotune.progress import Progress
from autotune.search.space import Space

if TYPE_CHECKING:
    from autotune.call_record import Program
    from autotune.evidence import Compiled
    from autotune.kernels.base import Kernel
    from autotune.search.evaluate import Judge
    from autotune.search.prune import Stages


STAND_INS = {
    ("flash_fwd", frozenset({"block_q", "block_kv"})): "autotune.kernels.published_flash:FLASH",
}
"""(kernel, tunables a row names) -> the kernel that was timed under that name before this package
had one of its own, whose rows name all its tunables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One measured row with what is known of its program.

    Attributes:
      reason: why the row cannot be predicted; None where it can.
      program, counts: the traced calls, and executions of scopes that rest on run-time data.
      compiled: the compiler's answer; None where there is no compiler or it was not asked.
      foreseen: the model refused the row's VMEM.
    """

    measured: Measured
    device: Device | None = None
    program: Program | None = None
    counts: dict[str, int] = field(default_factory=dict)
    compiled: Compiled | None = None
    foreseen: bool = False
    reason: str | None = None

    @property
    def refused(self) -> bool:
        """Whether the compiler refused the row for want of memory."""
        return self.compiled is not None and self.compiled.status == "oom"

    def model_ms(self, device: Device) -> float | None:
        """Model evidence with the constants of `device`."""
        if self.program is None:
            return None
        latency = cost_model.model_latency(self.program, device, scope_counts=self.counts)
        return latency.total_s * 1e3

    def compiled_ms(self, device: Device) -> float | None:
        """Compiled evidence with the constants of `device`; None where it did not compile."""
        if self.program is None or self.compiled is None or self.compiled.status != "ok":
            return None
        latency = cost_model.compiled_latency(
            self.program, self.compiled.schedules, device,
            scope_counts=self.counts, xla_ops=self.compiled.xla_ops,
        )  # fmt: skip
        return latency.total_s * 1e3


def gather(rows: Sequence[Measured], stages: Stages) -> list[Evidence]:
    """Evidence on every row, in order: traced, and compiled where this machine can.

    What was compiled before comes from the cache, so an interrupted call goes on where it was.
    """
    found: dict[int, Evidence] = {}
    groups: dict[Problem, list[tuple[int, Candidate]]] = defaultdict(list)
    for index, row in enumerate(rows):
        try:
            problem, candidate = _asked(row)
            groups[problem].append((index, candidate))
        except AutotuneError as error:
            found[index] = Evidence(measured=row, reason=str(error))
    for problem, members in groups.items():
        found |= _of_problem(problem, members, rows, stages)
    return [found[index] for index in range(len(rows))]


def _asked(row: Measured) -> tuple[Problem, Candidate]:
    """The row's problem and candidate. Raises AutotuneError for what cannot be built here."""
    kernel = base.load(STAND_INS.get((row.kernel, frozenset(row.config)), row.kernel))
    unknown = set(row.problem) - {"shape", "options", "dtype"}
    if unknown or not isinstance(row.problem.get("shape"), dict):
        raise KernelError("problem: needs shape, and may have options and dtype")
    problem = base.make_problem(
        kernel,
        device=row.device,
        shape=row.problem["shape"],
        options=row.problem.get("options"),
        dtype=row.problem.get("dtype", "bfloat16"),
    )
    device = devices.get(problem.device)
    _check_values(kernel, problem, device, row.config)
    config = _canonical(kernel, problem, device, row.config)
    if reason := base.ask(kernel, "illegal", kernel.illegal, problem, config, device):
        raise KernelError(f"config: {reason}")
    return problem, Candidate.of(config)


def _check_values(
    kernel: Kernel, problem: Problem, device: Device, given: Mapping[str, Any]
) -> None:
    """Raises KernelError for a tunable that is unknown or whose value is illegal by itself."""
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    for name, value in given.items():
        if name not in tunables:
            known = ", ".join(tunables) or "none"
            raise KernelError(f"config: {kernel.name} has no tunable {name!r} (known: {known})")
        if allowed := base.ask(kernel, f"check of {name}", tunables[name].check, value):
            raise KernelError(f"config: {name} {value!r} is not allowed; {allowed}")


def _canonical(
    kernel: Kernel, problem: Problem, device: Device, given: Mapping[str, Any]
) -> dict[str, Any]:
    """`given` in full. A file may be older than the kernel and lack a tunable: null, where the
    kernel takes that to be its own choice, else the default's value.

    Raises KernelError where neither makes a config of it.
    """
    tunables = base.ask(kernel, "tunables", kernel.tunables, problem, device)
    default: Mapping[str, Any] = {}
    if kernel.default is not None:
        default = base.ask(kernel, "default", kernel.default, problem, device)
    fault = KernelError(f"config: {kernel.name} needs {', '.join(tunables)}")
    for start in (dict.fromkeys(tunables), default):
        full = {**{name: start.get(name) for name in tunables}, **given}
        try:
            config = dict(base.ask(kernel, "canonical", kernel.canonical, problem, full))
            _check_values(kernel, problem, device, config)
        except AutotuneError as error:
            fault = KernelError(str(error))
            continue
        return config
    raise fault


def _of_problem(
    problem: Problem, members: list[tuple[int, Candidate]], rows: Sequence[Measured], stages: Stages
) -> dict[int, Evidence]:
    try:
        judge = stages.judge(base.load(problem.kernel), problem)
        distinct = tuple(dict.fromkeys(candidate for _, candidate in members))
        judged = {j.candidate: j for j in stages.model(judge, Space(legal=distinct))}
        traced = [c for c, j in judged.items() if j.program is not None]
        verdicts: dict[Candidate, Compiled] = {}
        if environment.unavailable() is None:
            stages.progress.start(problem.label, "compile", len(traced))
            verdicts = stages.verdicts(judge, _told(traced, stages.progress))
    except AutotuneError as error:
        return {i: Evidence(measured=rows[i], reason=str(error)) for i, _ in members}
    return {i: _evidence(rows[i], judge, judged[c], verdicts.get(c)) for i, c in members}


def _told(candidates: list[Candidate], progress: Progress) -> Iterator[Candidate]:
    """The candidates, each with a step of the bar as a worker takes it."""
    for candidate in candidates:
        yield candidate
        progress.advance()


def _evidence(row: Measured, judge: Judge, judged: Any, compiled: Compiled | None) -> Evidence:
    if judged.program is None:
        return Evidence(measured=row, reason=f"{judged.row.status}: {judged.row.reason}")
    reason = None
    if compiled is not None and compiled.status != "ok":
        reason = f"{compiled.status}: {compiled.reason}"
    evidence = Evidence(
        measured=row,
        device=judge.device,
        program=judged.program,
        counts=dict(judge.scope_counts(judged.candidate)),
        compiled=compiled,
        foreseen=judged.row.status == "pruned",
        reason=reason,
    )
    try:
        evidence.compiled_ms(judge.device)
    except KernelError as error:
        return Evidence(measured=row, reason=str(error))
    return evidence
