"""Whether a stored row still speaks of what is here: jax, libtpu, and the kernel's source."""

from __future__ import annotations

import functools

from autotune import versions
from autotune.compiler.fingerprint import kernel_fingerprint
from autotune.errors import AutotuneError
from autotune.row import Row


def reason(row: Row) -> str | None:
    """Why a stored row may no longer hold here, in one line; None where nothing changed.

    A package or kernel that is not installed here says nothing about the row.
    """
    here = versions.installed()
    changed = [
        f"{package} {made} → {here[package]}"
        for package, made in (("jax", row.jax_version), ("libtpu", row.libtpu_version))
        if made and here[package] and made != here[package]
    ]
    today = _fingerprint(row.kernel)
    if today and row.kernel_fingerprint and today != row.kernel_fingerprint:
        changed.append("the kernel's source changed")
    return "stale: " + ", ".join(changed) if changed else None


@functools.cache
def _fingerprint(kernel: str) -> str | None:
    try:
        return kernel_fingerprint(kernel)
    except (AutotuneError, OSError):
        return None
