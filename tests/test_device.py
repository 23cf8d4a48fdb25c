"""Every hardware figure equals the installed JAX's own table, per JAX device."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from autotune import device as devices
from autotune.device import DEVICES, MIB, Device
from autotune.errors import UnknownNameError

CHIPS = {
    "v4": pltpu.ChipVersion.TPU_V4, "v5e": pltpu.ChipVersion.TPU_V5E,
    "v5p": pltpu.ChipVersion.TPU_V5P, "v6e": pltpu.ChipVersion.TPU_V6E,
    "tpu7x": pltpu.ChipVersion.TPU_7X,
}  # fmt: skip
DTYPES = (
    "float32", "bfloat16", "float16", "int8", "int4", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3b11fnuz",
)  # fmt: skip
PEAKS = {
    "bfloat16": "bf16_ops_per_second", "int8": "int8_ops_per_second",
    "int4": "int4_ops_per_second",
}  # fmt: skip
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)


def table(device: Device):
    """JAX's figures, which are all per TensorCore."""
    return pltpu.get_tpu_info_for_chip(CHIPS[device.name], device.cores)


@every_device
def test_memory_bandwidth_and_mxus_are_jaxs(device: Device):
    info = table(device)
    assert device.generation == info.generation
    assert device.num_mxus == info.num_mxus
    assert device.mxu_size == info.mxu_column_size
    assert device.vmem_bytes == info.vmem_capacity_bytes
    assert device.smem_bytes == info.smem_capacity_bytes
    assert device.hbm_bytes == device.cores * info.hbm_capacity_bytes
    assert device.hbm_bytes_per_s == device.cores * info.mem_bw_bytes_per_second


@every_device
def test_peaks_are_jaxs_and_left_out_where_jax_has_none(device: Device):
    info = table(device)
    for dtype, field in PEAKS.items():
        assert device.peak(dtype) == (device.cores * getattr(info, field) or None), dtype
    fp8 = {dtype for dtype in device.peak_ops_per_s if dtype.startswith("float8")}
    assert all(
        device.peak(dtype) == (device.cores * info.fp8_ops_per_second or None) for dtype in fp8
    )
    if info.fp8_ops_per_second:
        assert fp8 == {d for d in device.matmul_dtypes if d.startswith("float8")}
    assert device.peak("float32") is None, "JAX's table has no f32 peak"


@every_device
def test_matmul_dtypes_are_those_jax_says_the_mxu_multiplies(device: Device):
    info = table(device)
    supported = {
        name for name in DTYPES if info.is_matmul_supported(getattr(jnp, name), getattr(jnp, name))
    }
    assert device.matmul_dtypes == supported


def test_s8_figures_are_per_jax_device_not_per_chip():
    tpu7x, v5p = devices.get("tpu7x"), devices.get("v5p")
    assert (tpu7x.cores, v5p.cores) == (1, 2)
    assert tpu7x.peak("bfloat16") == 1.155e15
    assert tpu7x.hbm_bytes_per_s == 3.7e12
    assert v5p.peak("bfloat16") == 4.59e14


@pytest.mark.parametrize(
    ("name", "ghz"), [("v4", 1.05), ("v5e", 1.50), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.20)]
)
def test_the_clock_follows_from_the_peak(name: str, ghz: float):
    assert devices.get(name).clock_hz == pytest.approx(ghz * 1e9, rel=0.003)


@pytest.mark.compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@every_device
def test_the_topology_gives_devices_of_the_kind(device: Device, monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "none", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    more = {"chip_config_name": "megacore"} if device.cores > 1 else {}
    found = topologies.get_topology_desc(device.topology, platform="tpu", **more).devices[0]
    assert found.device_kind == device.kind
    assert found.num_cores == device.cores


@every_device
def test_limits_leave_room_and_constants_have_a_source(device: Device):
    assert 0 < device.scoped_vmem_bytes <= device.usable_vmem_bytes <= device.vmem_bytes
    assert device.scoped_vmem_bytes == {4: 16, 5: 16, 6: 32, 7: 32}[device.generation] * MIB
    assert 0 < device.copy_bytes_per_s < device.hbm_bytes_per_s
    assert 0 <= device.skip_overhead_s <= device.step_overhead_s
    assert device.sources["step_overhead_s"]
    assert device.sources["skip_overhead_s"]
    assert (device.dma_bytes_per_s is None) == (device.dma_latency_s == 0)


def test_a_device_is_found_by_name_and_by_kind():
    assert devices.get("v6e").kind == "TPU v6 lite"
    assert devices.of_kind("TPU7x") is devices.get("tpu7x")
    assert devices.of_kind("TPU99") is None


@pytest.mark.parametrize("name", ["v6", "TPU99", "", None, ["v6e"], {}])
def test_an_unknown_name_lists_the_known_ones(name: object):
    with pytest.raises(UnknownNameError, match=r"known: tpu7x, v4, v5e, v5p, v6e") as caught:
        devices.get(name)  # type: ignore[arg-type]
    assert caught.value.path == ("device",)
    assert repr(name) in str(caught.value)


def test_the_nearest_name_is_offered():
    with pytest.raises(UnknownNameError, match="did you mean 'tpu7x'"):
        devices.get("tpu7")
