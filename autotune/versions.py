"""Versions of what evidence depends on, without importing any of it."""

from __future__ import annotations

import functools
from importlib import metadata

import autotune


@functools.cache
def installed() -> dict[str, str | None]:
    """Versions of jax, libtpu and autotune here; None for one that is not installed."""
    return {"jax": _version("jax"), "libtpu": _version("libtpu"), "autotune": autotune.__version__}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
