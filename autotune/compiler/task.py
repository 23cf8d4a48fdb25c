"""What a worker is asked: to trace or to compile one candidate, as JSON for the pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.candidate import Candidate
from autotune.problem import Problem

KINDS = ("trace", "compile")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One candidate, and what is wanted of it on the device its problem names.

    Attributes:
      kind: `trace`, which gives the traced program, or `compile`, which gives the compiler's
        verdict and schedules.
    """

    problem: Problem
    candidate: Candidate
    kind: str = "compile"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(KINDS)}")

    def to_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "kind": self.kind,
            "kernel": problem.kernel,
            "device": problem.device,
            "shape": dict(problem.shape),
            "options": dict(problem.options),
            "dtype": problem.dtype,
            "name": problem.name,
            "defaults": sorted(problem.defaults),
            "config": self.candidate.config,
            "is_default": self.candidate.is_default,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Task:
        fields = {k: record[k] for k in ("kernel", "device", "shape", "options", "dtype", "name")}
        return cls(
            problem=Problem(**fields, defaults=frozenset(record["defaults"])),
            candidate=Candidate.of(record["config"], is_default=record["is_default"]),
            kind=record["kind"],
        )
