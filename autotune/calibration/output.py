"""A calibration as a terminal table and as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from autotune import versions
from autotune.calibration.data import FIT
from autotune.calibration.fit import LEAST_ROWS
from autotune.calibration.merit import Merit
from autotune.calibration.run import DeviceResult, Prediction, Result
from autotune.constants import constant_lines, described

PARTS = {"fit": "rows fitted to", "evaluate": "rows not fitted to"}
TOO_FEW = "too few rows to fit to"


def write_json(result: Result, written: Path | None, file: IO[str]) -> None:
    """One document: devices, rows, versions, and the file the constants went to."""
    document = {
        "devices": {d.device.name: _device(d) for d in result.devices},
        "rows": [_row(row) for row in result.rows],
        "made_with": versions.installed(),
        "written": str(written) if written else None,
    }
    json.dump(document, file, indent=2)
    file.write("\n")


def _device(result: DeviceResult) -> dict[str, Any]:
    return {
        "constants": {n: v for n, (v, _) in described(result.device).items()},
        "sources": {n: source for n, (_, source) in described(result.device).items()},
        "fitted": sorted(result.fitted.constants) if result.fitted else [],
        "fitted_rows": result.fitted.rows if result.fitted else 0,
        "merit": {
            part: {evidence: asdict(m) for evidence, m in by.items()}
            for part, by in result.merits.items()
        },
        "bands": {evidence: dict(by) for evidence, by in result.device.bands.items()},
        "rejects": asdict(result.rejects),
    }


def _row(row: Prediction) -> dict[str, Any]:
    m = row.measured
    error = row.predicted_ms / m.measured_ms - 1 if row.predicted_ms else None
    return {
        "kernel": m.kernel, "device": m.device, "problem": m.problem, "config": m.config,
        "measured_ms": m.measured_ms, "predicted_ms": row.predicted_ms, "set": m.part,
        "reason": row.reason, "evidence": row.evidence, "error": error,
        "predicted_model_ms": row.model_ms, "latency_low_ms": row.low_ms,
        "latency_high_ms": row.high_ms, "where": m.where,
    }  # fmt: skip


def write_table(result: Result, written: Path | None, file: IO[str]) -> None:
    """Per device its constants and figures of merit; then the rows without a prediction."""
    for device in result.devices:
        _write_device(device, file)
    missing = [row for row in result.rows if row.predicted_ms is None]
    if missing:
        print(f"{len(missing)} of {len(result.rows)} rows are not predicted:", file=file)
        for row in missing:
            m = row.measured
            blocks = " ".join(f"{k}={v}" for k, v in m.config.items() if v is not None)
            print(f"  {m.kernel} {blocks} ({m.where}): {row.reason}", file=file)
        print(file=file)
    if written:
        print(f"constants written to {written}", file=file)
    elif not result.calibrations:
        print("no constants fitted, nothing written", file=file)


def _write_device(result: DeviceResult, file: IO[str]) -> None:
    device = result.device
    print(device.name, file=file)
    for line in constant_lines(device):
        print(line, file=file)
    print(f"\n  {'':32} rows   tau  regret  of three  median    p90  worst   bias", file=file)
    for part, by in result.merits.items():
        told = TOO_FEW if part == FIT and result.fitted is None else PARTS[part]
        for evidence, merit in by.items():
            print(f"  {told + ', ' + evidence:<32} {_figures(merit)}", file=file)
    if result.fitted is None and FIT in result.merits:
        rows = result.merits[FIT]["compiled"].rows
        print(
            f"  no constants fitted: {rows} of the rows to fit compiled, {LEAST_ROWS} are needed; "
            "the constants above are those it had",
            file=file,
        )
    if by_kernel := device.bands.get("compiled"):
        told = ", ".join(f"{'all' if k == '*' else k} ±{w:.1%}" for k, w in by_kernel.items())
        print(f"  band of compiled evidence: {told}", file=file)
    r = result.rejects
    if r.refused or r.false:
        print(
            f"  compiler refusals the model foresees: {r.foreseen} of {r.refused}; "
            f"refused wrongly: {r.false}",
            file=file,
        )
    print(file=file)


def _figures(merit: Merit) -> str:
    def share(value: float | None, width: int, sign: str = "") -> str:
        return f"{'–':>{width}}" if value is None else f"{value:>{sign}{width}.1%}"

    tau = f"{'–':>5}" if merit.kendall_tau is None else f"{merit.kendall_tau:5.2f}"
    return (
        f"{merit.rows:4} {tau} {share(merit.regret_first, 7)} {share(merit.regret_of_three, 9)}"
        f" {share(merit.median_error, 7)} {share(merit.p90_error, 6)}"
        f" {share(merit.worst_error, 6)} {share(merit.bias, 6, '+')}"
    )
