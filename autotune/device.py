"""The chips: hardware figures per JAX device, with their sources. No jax import.

Figures are those of JAX's own table (`pltpu.get_tpu_info_for_chip`); a test
compares every one of them with the installed JAX, so that this copy cannot drift.
A JAX device is one TensorCore on v5e, v6e and tpu7x and the whole two-core
megacore chip on v4 and v5p; compute, bandwidth and HBM are per JAX device, VMEM,
SMEM and MXU figures per TensorCore.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import DeviceBusyError, UnknownNameError

KIB = 2**10
MIB = 2**20
UNKNOWN_BANDS = {"model": 1.75, "compiled": 0.25}
"""Bands where nothing was measured on the chip: wider than those of any chip that was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One JAX device of a TPU generation.

    Attributes:
      name: what configs and result folders say, e.g. `tpu7x`.
      kind: `jax.Device.device_kind` of an attached chip.
      topology: name for `jax.experimental.topologies.get_topology_desc`.
      generation: JAX's TPU generation number.
      cores: TensorCores behind one JAX device.
      num_mxus, mxu_size: matrix units per TensorCore, and the side of one.
      vmem_bytes, smem_bytes: on-chip memory per TensorCore.
      scoped_vmem_bytes: default limit for a kernel's VMEM. Source: the compiler's own
        refusals ("limit 16.00M"), jax 0.10.2 + libtpu 0.0.42.1 and jax 0.12.0.1 + libtpu 0.0.50.1.
      reserved_vmem_bytes: of `vmem_bytes`, what no kernel gets whatever its limit. Source: the
        largest scratch that compiles, by bisection to 4 KiB, on both stacks (the smaller where
        they differ: tpu7x keeps 64 KiB back on libtpu 0.0.50.1 and nothing on 0.0.42.1).
      parks_operands: XLA may hold a whole small input in VMEM, so that it needs no window.
      hbm_bytes, hbm_bytes_per_s: memory and its peak bandwidth per JAX device.
      hbm_efficiency: share of that peak a copy reaches. Source: 8 GiB copied on tpu7x at 3.21e12
        B/s, read and write together (AI-Hypercomputer accelerator-microbenchmarks, Ironwood,
        hbm.md); the other chips take tpu7x's for want of their own.
      dma_bytes_per_s, dma_latency_s: rate of one copy on its own and the time before its first
        byte; None and 0 where nobody measured. Source (tpu7x): two published Ironwood matmuls
        (blocks 512 and 1024 cubed, one copy of 0.5 and 2 MiB an operand and step: 1.148 and 3.333
        us a step). They put the same kernel with blocking copies at 6.7 us a step; it took 6.8.
      peak_ops_per_s: dtype name -> peak multiply-add throughput (2 ops each) per JAX device.
      matmul_dtypes: operand dtypes the MXU multiplies, from `TpuInfo.is_matmul_supported`.
      step_overhead_s: fixed cost of a grid step where no schedule is known (model evidence);
        `skip_overhead_s`: of a step that does nothing.
      scalar_cycles: cycles a slot of the scalar unit costs beyond its bundle.
      issued_step_s: fixed cost of a grid step beyond its compiled code.
      launch_s: fixed cost of one run of a compiled program.
      op_overhead_s: fixed cost of an XLA operation around the kernels.
      vmem_bytes_per_s: rate at which what such an operation reads and writes passes through a core,
        from HBM or VMEM alike.
      bands: evidence -> kernel ("*" for any other) -> half width of the band around a predicted
        latency, as a share of it: what 90 % of the calibration's residuals stayed within.
      sources: constant -> where it comes from, for those that are fitted or taken from elsewhere.
    """

    name: str
    kind: str
    topology: str
    generation: int
    cores: int
    num_mxus: int
    mxu_size: int
    vmem_bytes: int
    smem_bytes: int
    scoped_vmem_bytes: int
    reserved_vmem_bytes: int
    parks_operands: bool
    hbm_bytes: int
    hbm_bytes_per_s: float
    hbm_efficiency: float
    dma_bytes_per_s: float | None = None
    dma_latency_s: float = 0.0
    peak_ops_per_s: dict[str, float]
    matmul_dtypes: frozenset[str]
    step_overhead_s: float
    skip_overhead_s: float
    scalar_cycles: float = 0.0
    issued_step_s: float = 0.0
    launch_s: float = 0.0
    op_overhead_s: float = 0.0
    vmem_bytes_per_s: float = 2e13
    bands: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_vmem_bytes(self) -> int:
        """VMEM of a TensorCore that kernels can have."""
        return self.vmem_bytes - self.reserved_vmem_bytes

    @property
    def copy_bytes_per_s(self) -> float:
        """HBM bandwidth that copies reach, per JAX device; reads and writes together."""
        return self.hbm_bytes_per_s * self.hbm_efficiency

    @property
    def mxu_rows_per_cycle(self) -> int:
        """bf16 rows one MXU takes a cycle: 1 up to v5p, 2 on v6e and tpu7x.

        Source: peak / (2 · mxus · size²) against the published clock; the compiler's simulator.
        """
        return 2 if self.mxu_size == 256 else 1

    @property
    def clock_hz(self) -> float:
        """TensorCore clock: bf16 peak / (2 · MXUs · size² · rows per cycle), all cores."""
        macs = self.cores * self.num_mxus * self.mxu_size**2 * self.mxu_rows_per_cycle
        return self.peak_ops_per_s["bfloat16"] / (2 * macs)

    def band(self, evidence: str, kernel: str) -> float:
        """Half width of the band around a latency predicted for `kernel`, as a share of it."""
        known = self.bands.get(evidence, {})
        return known.get(kernel, known.get("*", UNKNOWN_BANDS.get(evidence, 0.0)))

    def peak(self, dtype: str) -> float | None:
        """Peak multiply-add ops/s per JAX device for operands of `dtype`; None where unknown."""
        return self.peak_ops_per_s.get(dtype)


_FP8_5_6 = frozenset({"float32", "bfloat16", "int8", "int4", "float8_e5m2", "float8_e4m3b11fnuz"})
# Constants that are fitted, not printed on a data sheet, are data: changing one leaves the hash of
# this file, and with it every cached compile, alone. `benchmarks/schedule_vs_silicon.py` fits them.
_SHIPPED = json.loads(Path(__file__).with_name("shipped_calibration.json").read_text("utf-8"))


def _constants(name: str) -> dict[str, Any]:
    """A device's part of the shipped calibration, as fields of `Device`."""
    part = _SHIPPED["devices"][name]
    return {**part["constants"], "sources": part["sources"], "bands": part["bands"]}


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="v4", kind="TPU v4", topology="v4:2x2x1", generation=4, cores=2,
            num_mxus=4, mxu_size=128, vmem_bytes=16 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=16 * MIB, reserved_vmem_bytes=0, parks_operands=False,
            hbm_bytes=34_400_000_000, hbm_bytes_per_s=1.23e12,
            peak_ops_per_s={"bfloat16": 2.75e14},
            matmul_dtypes=frozenset({"float32", "bfloat16"}),
            **_constants("v4"),
        ),
        Device(
            name="v5e", kind="TPU v5 lite", topology="v5e:2x2", generation=5, cores=1,
            num_mxus=4, mxu_size=128, vmem_bytes=128 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=16 * MIB, reserved_vmem_bytes=0, parks_operands=False,
            hbm_bytes=17_200_000_000, hbm_bytes_per_s=8.2e11,
            peak_ops_per_s={"bfloat16": 1.97e14, "int8": 3.94e14, "int4": 7.88e14},
            matmul_dtypes=_FP8_5_6,
            **_constants("v5e"),
        ),
        Device(
            name="v5p", kind="TPU v5", topology="v5p:2x2x1", generation=5, cores=2,
            num_mxus=4, mxu_size=128, vmem_bytes=64 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=16 * MIB, reserved_vmem_bytes=64 * KIB, parks_operands=False,
            hbm_bytes=103_000_000_000, hbm_bytes_per_s=2.46e12,
            peak_ops_per_s={"bfloat16": 4.59e14, "int8": 9.18e14, "int4": 1.84e15},
            matmul_dtypes=_FP8_5_6,
            **_constants("v5p"),
        ),
        Device(
            name="v6e", kind="TPU v6 lite", topology="v6e:2x2", generation=6, cores=1,
            num_mxus=2, mxu_size=256, vmem_bytes=128 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=32 * MIB, reserved_vmem_bytes=64 * KIB, parks_operands=False,
            hbm_bytes=34_400_000_000, hbm_bytes_per_s=1.64e12,
            peak_ops_per_s={
                "bfloat16": 9.2e14, "int8": 1.84e15, "int4": 3.68e15,
                "float8_e5m2": 9.2e14, "float8_e4m3b11fnuz": 9.2e14,
            },
            matmul_dtypes=_FP8_5_6,
            **_constants("v6e"),
        ),
        Device(
            name="tpu7x", kind="TPU7x", topology="tpu7x:2x2x1", generation=7, cores=1,
            num_mxus=2, mxu_size=256, vmem_bytes=64 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=32 * MIB, reserved_vmem_bytes=0, parks_operands=True,
            hbm_bytes=103_000_000_000, hbm_bytes_per_s=3.7e12,
            peak_ops_per_s={
                "bfloat16": 1.155e15, "float8_e4m3fn": 2.3e15, "float8_e5m2": 2.3e15,
            },
            matmul_dtypes=frozenset({"float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"}),
            **_constants("tpu7x"),
        ),
    )
}  # fmt: skip


def get(name: str) -> Device:
    """The device called `name`. Raises UnknownNameError listing the known ones."""
    try:
        return DEVICES[name]
    except (KeyError, TypeError):
        raise UnknownNameError("device", name, DEVICES, path=("device",)) from None


def of_kind(kind: str) -> Device | None:
    """The device whose `jax.Device.device_kind` is `kind`; None when autotune does not know it."""
    return next((d for d in DEVICES.values() if d.kind == kind), None)


_BUSY = re.compile(r"The TPU is already in use[^.\n]*")
"""How libtpu 0.0.42 and 0.0.50 begin to say so."""


def attached(*, timeout_s: float = 120.0) -> Device | None:
    """The TPU attached to this machine; None where there is none.

    Asked of JAX in a process of its own: a chip belongs to the process that opened it, and this
    one must leave it to the worker that measures. Takes about two seconds.

    Raises:
      UnknownNameError: a TPU of a kind that autotune has no figures for.
      DeviceBusyError: another process has it; libtpu's own words say which.
    """
    ask = "import jax; print('kind:' + jax.devices('tpu')[0].device_kind)"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            # What the compile workers set so as to need no chip would hide the one that is there.
            env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"},
        )
    except subprocess.TimeoutExpired:
        return None
    rows = asked.stdout.splitlines()
    kinds = [row.removeprefix("kind:") for row in rows if row.startswith("kind:")]
    if not kinds and (busy := _BUSY.search(asked.stderr or "")):
        raise DeviceBusyError(f"{busy[0].strip()}: wait for it to end, or use --until compile")
    if not kinds:
        return None
    device = of_kind(kinds[0])
    if device is None:
        raise UnknownNameError("kind of TPU", kinds[0], (d.kind for d in DEVICES.values()))
    return device
