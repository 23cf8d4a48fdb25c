"""The calibration file: a device's fitted constants, and what `devices.get` says with them applied.

Read by every stage that predicts; written by `autotune calibrate`. No jax import.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from autotune import whole_file
from autotune.device import DEVICES, Device
from autotune.errors import DamagedFileError, InputError

VARIABLE = "AUTOTUNE_CALIBRATION"
UNITS = {"_hz": (1e-9, "GHz"), "bytes_per_s": (1e-12, "TB/s"), "_s": (1e6, "µs")}
FORMAT = 1
BOUNDS: dict[str, tuple[float, float]] = {
    "step_overhead_s": (0.0, 5e-6),
    "skip_overhead_s": (0.0, 5e-6),
    "issued_step_s": (0.0, 5e-6),
    "scalar_cycles": (0.0, 5.0),
    "launch_s": (0.0, 1e-4),
    "op_overhead_s": (0.0, 2e-5),
    "hbm_efficiency": (0.4, 1.0),
    "dma_latency_s": (0.0, 5e-6),
    "dma_bytes_per_s": (1e10, 1e13),
    "vmem_bytes_per_s": (1e11, 1e14),
}
"""What may be fitted, as fields of `Device`, and the range that is physically possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """One device's part of a calibration file.

    Attributes:
      constants: field of `Device` (one of `BOUNDS`) -> value.
      sources: constant -> where it comes from, in words.
      bands: as `Device.bands`.
      rows: measured rows the constants were fitted to; `made_with`: versions of jax, libtpu and
        autotune, and the date.
    """

    device: str
    constants: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict)
    bands: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rows: int = 0
    made_with: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device {self.device!r} is not one of {', '.join(DEVICES)}")
        for name, value in self.constants.items():
            if name not in BOUNDS:
                raise ValueError(f"constant {name!r} is not one of {', '.join(BOUNDS)}")
            low, high = BOUNDS[name]
            if not _is_number(value) or not low <= value <= high:
                raise ValueError(f"{name} {value!r} is not a number from {low:g} to {high:g}")
        for evidence, by_kernel in self.bands.items():
            for kernel, width in by_kernel.items():
                if not _is_number(width) or not 0 <= width < 100:
                    raise ValueError(f"band of {evidence} {kernel} is {width!r}, not a share")

    def applied(self, device: Device) -> Device:
        """`device` with these constants in place of its own."""
        changed: dict[str, Any] = {name: float(value) for name, value in self.constants.items()}
        changed["bands"] = {**device.bands, **self.bands}
        changed["sources"] = {**device.sources, **self.sources}
        return dataclasses.replace(device, **changed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def default_path() -> Path:
    """`$AUTOTUNE_CALIBRATION`, else `calibration.json` in the platform's user config folder."""
    named = os.environ.get(VARIABLE)
    return (
        Path(named) if named else Path(platformdirs.user_config_dir("autotune"), "calibration.json")
    )


def load(path: Path | None = None) -> dict[str, Calibration]:
    """Device name -> its calibration; empty where there is no file and none was named.

    Raises:
      InputError: a file that was named does not exist.
      DamagedFileError: it cannot be read.
    """
    named = path is not None or (VARIABLE in os.environ and bool(os.environ[VARIABLE]))
    path = path or default_path()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise InputError(
                f"no calibration file at {path}; `autotune calibrate` makes one"
            ) from None
        return {}
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path}: not a readable calibration file ({error})") from None
    try:
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r} is not {FORMAT}")
        found = [Calibration(device=name, **part) for name, part in record["devices"].items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path}: not a calibration file ({error})") from None
    return {calibration.device: calibration for calibration in found}


def write(path: Path, calibrations: Iterable[Calibration]) -> None:
    """Writes them by temporary file and rename; other devices in the file stay.

    Raises:
      InputError: the file cannot be written.
    """
    kept = load(path) if path.exists() else {}
    kept |= {calibration.device: calibration for calibration in calibrations}
    devices = {}
    for name in sorted(kept):
        part = dataclasses.asdict(kept[name])
        del part["device"]
        devices[name] = part
    text = json.dumps({"format": FORMAT, "devices": devices}, indent=2, sort_keys=True) + "\n"
    try:
        whole_file.write(path, text.encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def calibrated(device: Device, calibrations: Mapping[str, Calibration] | None = None) -> Device:
    """`device` with the constants of the calibration file, where that has some for it.

    Raises what `load` does.
    """
    known = load() if calibrations is None else calibrations
    found = known.get(device.name)
    return found.applied(device) if found else device


def fingerprint(device: Device) -> str:
    """12 hex digits for the constants a prediction rests on; bands are no part of it."""
    values = {name: getattr(device, name) for name in BOUNDS}
    text = json.dumps({"device": device.name, "clock": device.clock_hz, **values}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def described(device: Device) -> dict[str, tuple[float, str]]:
    """Constant -> (value, source) of everything a prediction for the device rests on."""
    clock = ("clock_hz", device.clock_hz, "bf16 peak over the matrix units' size")
    told = {clock[0]: (clock[1], clock[2])}
    for name in BOUNDS:
        value = getattr(device, name)
        if value is not None:
            told[name] = (value, device.sources.get(name, _UNFITTED[name]))
    return told


_UNFITTED = {
    **dict.fromkeys(BOUNDS, "not fitted for this chip"),
    "op_overhead_s": "none seen beside the operations' bytes",
    "hbm_efficiency": "tpu7x's: 8 GiB copied at 3.21e12 B/s, of 3.7e12",
    "dma_latency_s": "not measured on this chip: copies are taken to reach the HBM's rate",
}


def constant_lines(device: Device) -> Iterator[str]:
    """A line for each constant that predictions for the device rest on, with its source."""
    for name, (value, source) in described(device).items():
        yield f"  {name:<18} {_shown(name, value):>12}  {source}"


def _shown(name: str, value: float) -> str:
    for ending, (scale, unit) in UNITS.items():
        if name.endswith(ending):
            return f"{value * scale:.4g} {unit}"
    return f"{value:.4g}"
