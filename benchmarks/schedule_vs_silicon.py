"""How well predictions hold on silicon: the table of the README, from measured CSVs.

    python benchmarks/schedule_vs_silicon.py DATA_DIR [--jobs 1] [--seconds N] [--shipped]

DATA_DIR holds `silicon_v6e_splash.csv`, `ironwood_published.csv` and, where Tokamax is installed,
`silicon_tokamax_splash.csv` (docs/calibration.md, Where the measurements come from, has what they
are and how to make them); a file that is missing is left out. On v6e the constants are fitted,
from none, to every third of the forward rows with default layouts; every other row of v6e is
predicted by constants it was not fitted to. tpu7x and v5p have the shipped ones. `--shipped` fits
to all rows instead and prints what `autotune/shipped_calibration.json` holds. `--seconds` bounds
the time spent compiling: rows left over have no compiled evidence (0: what the cache has). Nothing
here needs a TPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from autotune import device as devices
from autotune import versions
from autotune.calibration import data
from autotune.calibration import fit as fitting
from autotune.calibration.evidence_of import Evidence, gather
from autotune.calibration.merit import Merit, Pair, bands, merit
from autotune.calibration.run import Prediction, calibrate
from autotune.constants import Calibration
from autotune.errors import InputError
from autotune.progress import Quiet
from autotune.search.prune import Stages

V6E, IRONWOOD, TOKAMAX = (
    "silicon_v6e_splash.csv", "ironwood_published.csv", "silicon_tokamax_splash.csv",
)  # fmt: skip
NONE = Calibration(device="v6e", constants=dict.fromkeys(fitting.FITTED, 0.0))
"""What the fit on v6e starts from, so that nothing shipped leaks into it."""
SHIPPED = {
    "v6e": ("issued_step_s", "scalar_cycles", "vmem_bytes_per_s"),
    "tpu7x": ("issued_step_s",),
    "v5p": ("issued_step_s",),
}
"""Constants of a device that are fitted to all rows; the others have sources of their own."""
HOST_CLOCK = (V6E,)
"""Files whose times are a host's clock; the others' are the device's own."""
LAUNCH_S = 2e-6
"""Cost of a run by the device's own clock: published copies on tpu7x, extrapolated to no bytes."""
SOURCES = "docs/calibration.md, Where the measurements come from, says how to make them"
PLAIN = ("q_layout", "k_layout", "v_layout")


def rows_of(folder: Path) -> list[data.Measured]:
    """All measured rows; those that constants are fitted to are marked `fit`.

    Raises:
      InputError: the folder has none of the files.
    """
    files = [folder / name for name in (V6E, IRONWOOD, TOKAMAX) if (folder / name).is_file()]
    if not files:
        raise InputError(f"{folder} has none of {V6E}, {IRONWOOD}, {TOKAMAX}; {SOURCES}")
    rows = data.read(files, data.EVALUATE)
    forward = [n for n, row in enumerate(rows) if V6E in row.where and _plain_forward(row)]
    for n in forward[::3]:
        rows[n] = replace(rows[n], part=data.FIT)
    return rows


def _plain_forward(row: data.Measured) -> bool:
    layouts = {row.config.get(name) for name in PLAIN}
    return not row.problem["options"].get("grad") and layouts == {"HEAD_DIM_MINOR"}


def groups(rows: Sequence[Prediction]) -> Iterable[tuple[str, list[Prediction]]]:
    """The table's lines: what they are, and their rows."""

    def chosen(name: str, test: str, device: str = "") -> list[Prediction]:
        return [
            row for row in rows
            if name in row.measured.where and device in ("", row.measured.device)
            and {
                "all": True,
                "forward": _plain_forward(row.measured),
                "layouts": not row.measured.problem["options"].get("grad")
                and not _plain_forward(row.measured),
                "grad": bool(row.measured.problem["options"].get("grad")),
                "no backward": row.measured.problem["options"].get("pass") is None,
                "backward": row.measured.problem["options"].get("pass") is not None,
            }[test]
        ]  # fmt: skip

    yield "v6e, JAX splash forward, default layouts", chosen(V6E, "forward")
    yield "v6e, the same, q sequence-minor", chosen(V6E, "layouts")
    yield "v6e, JAX splash forward + backward", chosen(V6E, "grad")
    yield "tpu7x, published kernels", chosen(IRONWOOD, "all")
    for device in ("tpu7x", "v6e", "v5p"):
        yield f"{device}, Tokamax splash forward, winners", chosen(TOKAMAX, "no backward", device)
    yield "tpu7x, Tokamax splash backward, winners", chosen(TOKAMAX, "backward")


def line(what: str, rows: Sequence[Prediction], evidence: str) -> str:
    """One line of the Markdown table; of how many measured rows, where some have no prediction."""
    pairs = []
    for row in rows:
        compiled = row.predicted_ms if row.evidence == "compiled" else None
        ms = compiled if evidence == "compiled" else row.model_ms
        if ms is not None:
            pairs.append((row.measured.group, (ms, row.measured.measured_ms)))
    # Constants are fitted to compiled evidence only.
    fitted = sum(row.measured.part == data.FIT and row.evidence == "compiled" for row in rows)
    number = f"{len(pairs)}" if len(pairs) == len(rows) else f"{len(pairs)} of {len(rows)}"
    return f"| {what} | {evidence} | {number} ({fitted}) | {_figures(merit(pairs))} |"


def _figures(m: Merit) -> str:
    def share(value: float | None, sign: str = "") -> str:
        return "–" if value is None else f"{value:{sign}.1%}"

    # Winners alone have no order worth a figure: a few runs of each problem, all near its best.
    tau = "–" if m.kendall_tau is None or m.rows < 3 * m.groups else f"{m.kendall_tau:.2f}"
    return " | ".join(
        (tau, share(m.regret_first) if tau != "–" else "–", share(m.median_error),
         share(m.p90_error), share(m.worst_error), share(m.bias, "+"))
    )  # fmt: skip


def shipped(rows: Sequence[data.Measured], stages: Stages) -> None:
    """Prints constants by the forward rows of a device, of Tokamax's two runs of one problem the
    faster, and bands by all of them, as JSON."""
    wanted = [row for row in rows if row.problem["options"].get("pass") is None]
    known = [e for e in gather(wanted, stages) if e.device is not None]
    faster = {id(row) for row in _faster_runs(wanted)}
    for name, fitted in SHIPPED.items():
        start = replace(devices.get(name), launch_s=LAUNCH_S)
        every = [e for e in known if e.measured.device == name]
        slower = [e for e in every if id(e.measured) not in faster]
        own = in_device_time([e for e in every if id(e.measured) in faster], start)
        if found := fitting.fit(own, start, fitted):
            pairs = {kernel: list(rows) for kernel, rows in found.residuals.items()}
            for row in slower:  # not fitted to
                ms = row.compiled_ms(fitting.replaced(start, found.constants))
                if ms is not None:
                    pairs[row.measured.kernel].append((ms, row.measured.measured_ms))
            told = {"rows": found.rows, "constants": found.constants, "compiled": bands(pairs)}
            told["model"] = bands(_by_model([*own, *slower], start))
            print(json.dumps({name: told}))


def _by_model(rows: Sequence[Evidence], device: devices.Device) -> dict[str, list[Pair]]:
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for row in rows:
        if (predicted := row.model_ms(device)) is not None:
            pairs[row.measured.kernel].append((predicted, row.measured.measured_ms))
    return pairs


def _faster_runs(rows: Iterable[data.Measured]) -> list[data.Measured]:
    """`rows`, of Tokamax's two runs of one problem the faster only: runs differ by up to 17 %, and
    what slowed one of them is not in any schedule."""
    kept: list[data.Measured] = []
    fastest: dict[object, data.Measured] = {}
    for row in rows:
        if TOKAMAX not in row.where:
            kept.append(row)
        elif row.group not in fastest or row.measured_ms < fastest[row.group].measured_ms:
            fastest[row.group] = row
    return kept + list(fastest.values())


def in_device_time(rows: Sequence[Evidence], device: devices.Device) -> list[Evidence]:
    """`rows` with a host's clock taken to the device's: less what a launch by the host's clock,
    fitted to those rows alone, exceeds the device's own."""
    by_host = [e for e in rows if any(name in e.measured.where for name in HOST_CLOCK)]
    if not by_host or (found := fitting.fit(by_host, device)) is None:
        return list(rows)
    more_ms = max(0.0, found.constants["launch_s"] - device.launch_s) * 1e3
    print(f"{device.name}: a launch by the host's clock takes {more_ms:.4f} ms more")
    return [
        replace(e, measured=replace(e.measured, measured_ms=e.measured.measured_ms - more_ms))
        if e in by_host else e
        for e in rows
    ]  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("data", type=Path, help="folder of the measured CSVs")
    options.add_argument("--jobs", type=int, default=None)
    options.add_argument("--shipped", action="store_true")
    options.add_argument("--seconds", type=float, default=float("inf"), help="time to compile in")
    chosen = options.parse_args()
    ends = time.monotonic() + chosen.seconds
    with Stages.open(
        jobs=chosen.jobs, timeout_s=1800, fresh=False, progress=Quiet(),
        calibrations={} if chosen.shipped else {"v6e": NONE},
        out_of_time=lambda: time.monotonic() >= ends,
    ) as stages:  # fmt: skip
        if chosen.shipped:
            shipped(rows_of(chosen.data), stages)
            return
        result = calibrate(rows_of(chosen.data), stages)
    here = versions.installed()
    print(f"{datetime.now(UTC).date()}, jax {here['jax']}, libtpu {here['libtpu']}\n")
    print("| rows | evidence | rows (fitted to) | τ | regret | median | p90 | worst | bias |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for what, rows in groups(result.rows):
        for evidence in ("compiled", "model"):
            if any(row.predicted_ms is not None for row in rows):
                print(line(what, rows, evidence))
    for device in result.devices:
        if device.fitted:
            print(f"\n{device.device.name}: {json.dumps(dict(device.fitted.constants))}")
    missing = [row for row in result.rows if row.predicted_ms is None]
    print(f"\n{len(missing)} of {len(result.rows)} rows not predicted")
    for reason in sorted({str(row.reason) for row in missing}):
        print(f"- {reason}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
