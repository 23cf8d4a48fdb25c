"""Where each built-in kernel lies. No jax import: a fingerprint needs a kernel's source only."""

from __future__ import annotations

REGISTRY: dict[str, str] = {
    "matmul": "autotune.kernels.matmul",
    "flash_fwd": "autotune.kernels.flash_fwd",
    "flash_dq": "autotune.kernels.flash_dq",
    "flash_dkv": "autotune.kernels.flash_dkv",
    "splash": "autotune.kernels.splash",
    "jax.splash": "autotune.kernels.jax_splash",
    "jax.flash": "autotune.kernels.jax_flash:FLASH",
    "jax.flash_dq": "autotune.kernels.jax_flash:FLASH_DQ",
    "jax.flash_dkv": "autotune.kernels.jax_flash:FLASH_DKV",
    "jax.paged_attention": "autotune.kernels.jax_paged",
    "jax.ragged_paged_attention": "autotune.kernels.jax_ragged",
    "jax.matmul": "autotune.kernels.jax_matmul",
    "jax.gmm": "autotune.kernels.jax_gmm",
    "tokamax.splash": "autotune.kernels.tokamax_splash",
    "tokamax.gmm": "autotune.kernels.tokamax_gmm",
}
"""Kernel name -> its module, which holds it as `KERNEL`, or `module:ATTRIBUTE`."""

DISTRIBUTIONS: dict[str, str] = {"tokamax": "tokamax"}
"""Prefix of a kernel's name -> the installed package its source lies in, where that is neither
this one nor jax; its version is part of the kernel's fingerprint."""

SITES = frozenset({"site-packages", "dist-packages"})
"""Names of the folders that distributions are installed into."""


def place_of(name: str) -> tuple[str, str]:
    """(module, attribute) of the built-in kernel called `name`."""
    module, _, attribute = REGISTRY[name].partition(":")
    return module, attribute or "KERNEL"
