"""Fits a device's constants to measured rows: few, bounded, robust, deterministic."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.calibration.evidence_of import Evidence
from autotune.calibration.merit import Pair
from autotune.constants import BOUNDS
from autotune.device import Device

FITTED = ("issued_step_s", "scalar_cycles", "launch_s")
"""What is fitted: what no published figure tells. Bandwidths and latencies of copies stay."""
SCALES = {
    "issued_step_s": 5e-7, "scalar_cycles": 0.5, "launch_s": 1e-5, "vmem_bytes_per_s": 5e11,
}  # fmt: skip
BEND = 0.05
PULL = 2e-4
FOLDS = 3
LEAST_ROWS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Constants of one device, and what they leave.

    Attributes:
      constants: the fitted ones.
      rows: rows fitted to.
      residuals: kernel -> (predicted, measured) ms of every row, predicted with constants fitted
        without it.
    """

    constants: dict[str, float]
    rows: int
    residuals: dict[str, list[Pair]]


def fit(rows: Sequence[Evidence], device: Device, names: Sequence[str] = FITTED) -> Fit | None:
    """The constants that predict `rows` best; None where there are fewer than `LEAST_ROWS`.

    Minimised is the mean pseudo-Huber loss of log(predicted / measured): squared below
    `BEND`, absolute above, so that no wild row rules; plus a small pull to the device's own
    constants, so that what the rows do not tell stays where it was.

    Args:
      names: which constants; the others keep the device's value.
    """
    usable = [row for row in rows if row.compiled_ms(device) is not None]
    if len(usable) < LEAST_ROWS:
        return None
    constants = _search(usable, device, names)
    residuals: dict[str, list[Pair]] = defaultdict(list)
    for fold in range(FOLDS):
        left_out = usable[fold::FOLDS]
        others = [row for n, row in enumerate(usable) if n % FOLDS != fold]
        without = replaced(device, _search(others, device, names) if others else constants)
        for row in left_out:
            predicted = row.compiled_ms(without)
            assert predicted is not None
            residuals[row.measured.kernel].append((predicted, row.measured.measured_ms))
    return Fit(constants=constants, rows=len(usable), residuals=dict(residuals))


def replaced(device: Device, constants: dict[str, float]) -> Device:
    """`device` with `constants` in place of its own."""
    changed: dict[str, Any] = dict(constants)
    return dataclasses.replace(device, **changed)


def _search(rows: Sequence[Evidence], device: Device, names: Sequence[str]) -> dict[str, float]:
    """Coordinate search with halved steps, from the device's constants and from their least."""
    own = {name: float(getattr(device, name)) for name in names}
    lowest = {name: BOUNDS[name][0] for name in names}
    ends = [_descend(rows, device, start, own) for start in (own, lowest)]
    return min(ends, key=lambda end: end[1])[0]


def _descend(
    rows: Sequence[Evidence], device: Device, start: dict[str, float], own: dict[str, float]
) -> tuple[dict[str, float], float]:
    directions = tuple(_directions(tuple(start)))
    here, lowest = dict(start), _loss(rows, device, start, own)
    step = 1.0
    while step > 0.01:
        moved = False
        for direction in directions:
            there = {n: _bounded(n, here[n] + step * SCALES[n] * d) for n, d in direction.items()}
            there = {**here, **there}
            loss = _loss(rows, device, there, own) if there != here else math.inf
            if loss < lowest - 1e-9:
                here, lowest, moved = there, loss, True
        step = step if moved else step / 2
    return {name: _rounded(name, value) for name, value in here.items()}, lowest


def _directions(names: Sequence[str]) -> Iterator[dict[str, float]]:
    """Moves of the search: one constant alone, and one against another, since they trade."""
    for name in names:
        yield from ({name: 1.0}, {name: -1.0})
    for up, down in itertools.permutations(names, 2):
        yield {up: 1.0, down: -1.0}


def _rounded(name: str, value: float) -> float:
    """Four digits; what adding and subtracting steps left of nothing is nothing."""
    return 0.0 if abs(value) < 1e-6 * SCALES[name] else float(f"{value:.4g}")


def _bounded(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return min(high, max(low, value))


def _loss(
    rows: Sequence[Evidence], device: Device, constants: dict[str, float], own: dict[str, float]
) -> float:
    tried = replaced(device, constants)
    logs = []
    for row in rows:
        predicted = row.compiled_ms(tried)
        assert predicted is not None
        error = math.log(predicted / row.measured.measured_ms)
        logs.append(math.hypot(error, BEND) - BEND)
    pull = sum(abs(constants[n] - own[n]) / SCALES[n] for n in own)
    return math.fsum(logs) / len(logs) + PULL * pull
