"""Measured rows in, constants, bands and figures of merit out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune import versions
from autotune.calibration import fit as fitting
from autotune.calibration.data import EVALUATE, FIT, Measured
from autotune.calibration.evidence_of import Evidence, gather
from autotune.calibration.fit import Fit
from autotune.calibration.merit import Merit, Pair, bands, merit
from autotune.constants import Calibration
from autotune.device import Device
from autotune.search.prune import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One input row with what is predicted for it.

    Attributes:
      predicted_ms: by the strongest evidence there is, which `evidence` names; None with a reason.
      model_ms: by model evidence.
      low_ms, high_ms: the band around `predicted_ms`.
    """

    measured: Measured
    predicted_ms: float | None = None
    model_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    evidence: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejects:
    """Rows the compiler refused for memory, those of them the model foresaw, and rows the model
    refused that compiled."""

    refused: int
    foreseen: int
    false: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """One device's part.

    Attributes:
      device: with the constants the predictions were made with.
      fitted: what was fitted; None where the device had too few rows to fit.
      merits: `fit` or `evaluate` -> evidence -> figures.
    """

    device: Device
    fitted: Calibration | None
    merits: dict[str, dict[str, Merit]]
    rejects: Rejects


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Devices in order of name, and every input row in order."""

    devices: tuple[DeviceResult, ...]
    rows: tuple[Prediction, ...]

    @property
    def calibrations(self) -> list[Calibration]:
        return [d.fitted for d in self.devices if d.fitted]


def calibrate(rows: Sequence[Measured], stages: Stages) -> Result:
    """Fits the devices of the rows marked `fit`, and predicts every row.

    A device without rows to fit keeps the constants it has, which `DeviceResult.device` tells.
    """
    known = gather(rows, stages)
    by_device: dict[str, list[Evidence]] = defaultdict(list)
    for evidence in known:
        if evidence.device is not None:
            by_device[evidence.device.name].append(evidence)
    results, chips = [], {}
    for name in sorted(by_device):
        result = _of_device(by_device[name])
        results.append(result)
        chips[name] = result.device
    return Result(
        devices=tuple(results),
        rows=tuple(_prediction(e, chips.get(e.measured.device)) for e in known),
    )


def _of_device(rows: list[Evidence]) -> DeviceResult:
    start = rows[0].device
    assert start is not None
    own = [row for row in rows if row.measured.part == FIT]
    found = fitting.fit(own, start)
    calibration = _calibration(start, found, own) if found else None
    device = calibration.applied(start) if calibration else start
    merits = {}
    for part in (FIT, EVALUATE):
        members = [row for row in rows if row.measured.part == part]
        if members:
            merits[part] = {
                "compiled": _merit(members, device, "compiled"),
                "model": _merit(members, device, "model"),
            }
    refused = [row for row in rows if row.refused]
    return DeviceResult(
        device=device,
        fitted=calibration,
        merits=merits,
        rejects=Rejects(
            refused=len(refused),
            foreseen=sum(row.foreseen for row in refused),
            false=sum(row.foreseen and row.compiled_ms(device) is not None for row in rows),
        ),
    )


def _calibration(start: Device, found: Fit, rows: Sequence[Evidence]) -> Calibration:
    kernels = sorted({row.measured.kernel for row in rows if row.reason is None})
    source = f"fitted to {found.rows} measured rows of {', '.join(kernels)}"
    model: dict[str, list[Pair]] = defaultdict(list)
    for row in rows:
        if (predicted := row.model_ms(start)) is not None:
            model[row.measured.kernel].append((predicted, row.measured.measured_ms))
    return Calibration(
        device=start.name,
        constants=found.constants,
        sources=dict.fromkeys(found.constants, source),
        bands={"compiled": bands(found.residuals), "model": bands(model)},
        rows=found.rows,
        made_with={**versions.installed(), "date": datetime.now(UTC).date().isoformat()},
    )


def _merit(rows: Sequence[Evidence], device: Device, evidence: str) -> Merit:
    pairs = []
    for row in rows:
        ms = row.compiled_ms(device) if evidence == "compiled" else row.model_ms(device)
        if ms is not None:
            pairs.append((row.measured.group, (ms, row.measured.measured_ms)))
    return merit(pairs)


def _prediction(row: Evidence, device: Device | None) -> Prediction:
    if device is None or row.reason is not None:
        return Prediction(measured=row.measured, reason=row.reason)
    compiled, model = row.compiled_ms(device), row.model_ms(device)
    evidence = "compiled" if compiled is not None else "model"
    predicted = compiled if compiled is not None else model
    if predicted is None:
        return Prediction(measured=row.measured, reason="no evidence of this row")
    width = device.band(evidence, row.measured.kernel)
    return Prediction(
        measured=row.measured, predicted_ms=predicted, model_ms=model, evidence=evidence,
        low_ms=predicted / (1 + width), high_ms=predicted * (1 + width),
    )  # fmt: skip
