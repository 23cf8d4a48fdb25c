"""Where each built-in kernel lies. No jax import: a fingerprint needs a kernel's source only."""

from __future__ import annotations

REGISTRY: dict[str, str] = {
    "matmul": "autotune.kernels.matmul",
    "flash_fwd": "autotune.kernels.flash_fwd",
    "flash_dq": "autotune.kernels.flash_dq",
    "flash_dkv": "autotune.kernels.flash_dkv",
    "splash": "autotune.kernels.splash",
}
"""Kernel name -> its module, which holds it as `KERNEL`, or `module:ATTRIBUTE`."""


def place_of(name: str) -> tuple[str, str]:
    """(module, attribute) of the built-in kernel called `name`."""
    module, _, attribute = REGISTRY[name].partition(":")
    return module, attribute or "KERNEL"
