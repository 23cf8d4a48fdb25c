"""What a compile worker is asked: one candidate of one problem, as JSON for the pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.candidate import Candidate
from autotune.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One candidate to compile, on the device its problem names."""

    problem: Problem
    candidate: Candidate

    def to_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
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
        )
