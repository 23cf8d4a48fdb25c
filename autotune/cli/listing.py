"""`autotune kernels` and `autotune devices`: what there is."""

from __future__ import annotations

from autotune.cli.app import app
from autotune.errors import InputError


@app.command(epilog="Example: autotune kernels")
def kernels() -> None:
    """List the kernels: their shape entries, options and dtypes."""
    from autotune.kernels import base
    from autotune.kernels.registry import REGISTRY

    for name in REGISTRY:
        try:
            kernel = base.load(name)
        except InputError as error:  # another project's kernel, which is not installed here
            print(f"{name}\n  {error}")
            continue
        print(f"{name}\n  shape    {', '.join(kernel.axes)}")
        print(f"  options  {', '.join(kernel.options) or 'none'}")
        print(f"  dtypes   {', '.join(kernel.dtypes)}\n  FLOPs    {kernel.flop_convention}")


@app.command(epilog="Example: autotune devices")
def devices() -> None:
    """List the devices: peaks per JAX device, VMEM per core, the constants that predictions rest on
    and their sources. A calibration file's take the place of those shipped."""
    from autotune import constants
    from autotune.device import DEVICES, MIB

    known = constants.load()
    for d in (constants.calibrated(device, known) for device in DEVICES.values()):
        peaks = ", ".join(f"{k} {v / 1e12:.0f}" for k, v in d.peak_ops_per_s.items())
        print(f"{d.name}  ({d.kind!r}, {d.cores} TensorCore{'s' * (d.cores > 1)} a JAX device)")
        print(f"  peak TFLOP/s  {peaks}\n  HBM           {d.hbm_bytes / 1e9:.1f} GB, ", end="")
        print(
            f"{d.hbm_bytes_per_s / 1e9:.0f} GB/s\n  VMEM          {d.vmem_bytes // MIB} MiB, ",
            end="",
        )
        print(f"{d.scoped_vmem_bytes // MIB} MiB unless raised")
        for line in constants.constant_lines(d):
            print(line)
