"""Versions of what evidence depends on, without importing any of it."""

from __future__ import annotations

from importlib import metadata

_PACKAGES = {"jax": "jax", "libtpu": "libtpu", "autotune": "pallas-autotune"}


def installed() -> dict[str, str | None]:
    """Versions of jax, libtpu and autotune here; None for one that is not installed."""
    return {name: _version(package) for name, package in _PACKAGES.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
