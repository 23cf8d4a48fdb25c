"""The chips: hardware figures per JAX device, with their sources. No jax import.

Figures are those of JAX's own table (`pltpu.get_tpu_info_for_chip`); a test
compares every one of them with the installed JAX, so that this copy cannot drift.
A JAX device is one TensorCore on v5e, v6e and tpu7x and the whole two-core
megacore chip on v4 and v5p; compute, bandwidth and HBM are per JAX device, VMEM,
SMEM and MXU figures per TensorCore.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import UnknownNameError

MIB = 2**20


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
      hbm_bytes, hbm_bytes_per_s: memory and its peak bandwidth per JAX device.
      peak_ops_per_s: dtype name -> peak multiply-add throughput (2 ops each) per JAX device.
      matmul_dtypes: operand dtypes the MXU multiplies, from `TpuInfo.is_matmul_supported`.
      step_overhead_s: fixed cost of a grid step; `skip_overhead_s`: of a step that does nothing.
      overhead_source: where those two come from.
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
    hbm_bytes: int
    hbm_bytes_per_s: float
    peak_ops_per_s: dict[str, float]
    matmul_dtypes: frozenset[str]
    step_overhead_s: float
    skip_overhead_s: float
    overhead_source: str

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

    def peak(self, dtype: str) -> float | None:
        """Peak multiply-add ops/s per JAX device for operands of `dtype`; None where unknown."""
        return self.peak_ops_per_s.get(dtype)

    def sublanes(self, bits: int) -> int:
        """Rows of one native VMEM tile for elements of `bits` bits: 8 · (32 / bits), at least 8."""
        return 8 * max(1, 32 // bits)


_FP8_5_6 = frozenset({"float32", "bfloat16", "int8", "int4", "float8_e5m2", "float8_e4m3b11fnuz"})
_V6E_FIT = "fitted to 16 JAX splash block choices measured on v6e (docs/architecture.md)"
_NEAREST_V6E = "nearest generation with data (v6e); not fitted for this chip"

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="v4", kind="TPU v4", topology="v4:2x2x1", generation=4, cores=2,
            num_mxus=4, mxu_size=128, vmem_bytes=16 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=16 * MIB, hbm_bytes=34_400_000_000, hbm_bytes_per_s=1.23e12,
            peak_ops_per_s={"bfloat16": 2.75e14},
            matmul_dtypes=frozenset({"float32", "bfloat16"}),
            step_overhead_s=0.4e-6, skip_overhead_s=0.3e-6, overhead_source=_NEAREST_V6E,
        ),
        Device(
            name="v5e", kind="TPU v5 lite", topology="v5e:2x2", generation=5, cores=1,
            num_mxus=4, mxu_size=128, vmem_bytes=128 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=16 * MIB, hbm_bytes=17_200_000_000, hbm_bytes_per_s=8.2e11,
            peak_ops_per_s={"bfloat16": 1.97e14, "int8": 3.94e14, "int4": 7.88e14},
            matmul_dtypes=_FP8_5_6,
            step_overhead_s=0.4e-6, skip_overhead_s=0.3e-6, overhead_source=_NEAREST_V6E,
        ),
        Device(
            name="v5p", kind="TPU v5", topology="v5p:2x2x1", generation=5, cores=2,
            num_mxus=4, mxu_size=128, vmem_bytes=64 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=16 * MIB, hbm_bytes=103_000_000_000, hbm_bytes_per_s=2.46e12,
            peak_ops_per_s={"bfloat16": 4.59e14, "int8": 9.18e14, "int4": 1.84e15},
            matmul_dtypes=_FP8_5_6,
            step_overhead_s=0.4e-6, skip_overhead_s=0.3e-6, overhead_source=_NEAREST_V6E,
        ),
        Device(
            name="v6e", kind="TPU v6 lite", topology="v6e:2x2", generation=6, cores=1,
            num_mxus=2, mxu_size=256, vmem_bytes=128 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=32 * MIB, hbm_bytes=34_400_000_000, hbm_bytes_per_s=1.64e12,
            peak_ops_per_s={
                "bfloat16": 9.2e14, "int8": 1.84e15, "int4": 3.68e15,
                "float8_e5m2": 9.2e14, "float8_e4m3b11fnuz": 9.2e14,
            },
            matmul_dtypes=_FP8_5_6,
            step_overhead_s=0.4e-6, skip_overhead_s=0.3e-6, overhead_source=_V6E_FIT,
        ),
        Device(
            name="tpu7x", kind="TPU7x", topology="tpu7x:2x2x1", generation=7, cores=1,
            num_mxus=2, mxu_size=256, vmem_bytes=64 * MIB, smem_bytes=MIB,
            scoped_vmem_bytes=32 * MIB, hbm_bytes=103_000_000_000, hbm_bytes_per_s=3.7e12,
            peak_ops_per_s={
                "bfloat16": 1.155e15, "float8_e4m3fn": 2.3e15, "float8_e5m2": 2.3e15,
            },
            matmul_dtypes=frozenset({"float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"}),
            step_overhead_s=0.7e-6, skip_overhead_s=0.3e-6,
            overhead_source="step: fitted to four published Ironwood timings; skip: v6e's",
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
