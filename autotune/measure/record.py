"""What measuring says of a candidate: raw samples and the check before them. No jax import."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("ok", "wrong", "failed", "timeout", "crashed", "oom", "unsupported")
TIMERS = ("device_profile", "host_clock", "replay")
METHOD = 1
"""Version of how times are taken. Raise it with any change that moves them: rows carry it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The outcome of measuring one candidate. Statistics are derived, never stored.

    Attributes:
      status: as in the leaderboard, `pruned` left out; `reason`: for every status but `ok`.
      samples_ms: raw times of single runs, in the order they were taken; of an `ok` record only.
      timer: `device_profile` (the device's own clock), `host_clock` (asked for; an empty program's
        time taken off) or `replay` (recorded elsewhere).
      scope: what a sample spans. `module`: the whole compiled program, with what XLA moves before
        and after the kernel. A recording says what it knows.
      error, tolerance: largest error found against the reference and what was allowed
        (`check.compare`); None where nothing was compared.
      checked: how correctness was checked, in words: at which size, or that there was no reference.
      seed: of the drawn inputs.
      shared_with: config (JSON) of the candidate whose identical program was timed for both.
      seconds: compiling, checking and timing together.
      device_kind: `jax.Device.device_kind` that ran it; None for a recording.
      method: `METHOD` of the autotune that took the samples.
    """

    status: str
    reason: str | None = None
    samples_ms: tuple[float, ...] = ()
    timer: str = "device_profile"
    scope: str = "module"
    error: float | None = None
    tolerance: float | None = None
    checked: str | None = None
    seed: int | None = None
    shared_with: str | None = None
    seconds: float | None = None
    device_kind: str | None = None
    method: int = METHOD

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {', '.join(STATUSES)}")
        if self.timer not in TIMERS:
            raise ValueError(f"timer {self.timer!r} is none of {', '.join(TIMERS)}")
        if (self.status == "ok") != (self.reason is None):
            raise ValueError("a reason belongs to every status but ok, and to no other")
        if bool(self.samples_ms) != (self.status == "ok"):
            raise ValueError("samples belong to status ok, and to no other")

    @property
    def median_ms(self) -> float | None:
        """The latency: the middle sample. None without samples."""
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def spread(self) -> float | None:
        """Half the range of the middle half of the samples, as a share of the median."""
        if not self.samples_ms or not self.median_ms:
            return None
        ordered = sorted(self.samples_ms)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.75))
        return (high - low) / (2 * self.median_ms)

    @property
    def details(self) -> dict[str, Any]:
        """What the leaderboard's `measurement` column says beside the samples."""
        names = ("scope", "error", "tolerance", "checked", "seed", "shared_with", "seconds",
                 "device_kind", "method")  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def usable(samples_ms: Sequence[float]) -> bool:
    """Whether every sample is a time: finite and above 0, a picosecond to thirty years, so that
    ratios are numbers. A fault must never look fast."""
    return all(1e-9 <= sample <= 1e12 for sample in samples_ms)  # what is no number is neither


def to_json(measured: Measured) -> dict[str, Any]:
    """`measured` as plain JSON values; `from_json` gives it back. Errors that are inf are text."""
    record = asdict(measured)
    record["samples_ms"] = list(measured.samples_ms)
    if measured.error is not None and not math.isfinite(measured.error):
        record["error"] = "inf"
    return record


def from_json(record: Mapping[str, Any]) -> Measured:
    """The `Measured` that `to_json` wrote. Raises TypeError or ValueError for another."""
    samples = tuple(float(sample) for sample in record["samples_ms"])
    error = record.get("error")
    return Measured(
        **{**record, "samples_ms": samples, "error": None if error is None else float(error)}
    )
