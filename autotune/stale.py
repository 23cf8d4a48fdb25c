"""Whether a stored row still speaks of what is here: jax, libtpu, and the kernel's source."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from autotune import versions
from autotune.compiler.fingerprint import kernel_fingerprint
from autotune.errors import AutotuneError
from autotune.row import Row


def reason(row: Row) -> str | None:
    """`stale: ` and the `changes`; None where nothing changed."""
    return f"stale: {told}" if (told := changes(row)) else None


def changes(row: Row) -> str | None:
    """What changed since a stored row was made, in one line; None where nothing did.

    A package or kernel that is not installed here says nothing about the row.
    """
    changed = [f"{package} {made} → {here}" for package, made, here in _versions(row)]
    today = _fingerprint(row.kernel)
    if today and row.kernel_fingerprint and today != row.kernel_fingerprint:
        changed.append("the kernel's source changed")
    return ", ".join(changed) or None


def outdated(row: Row) -> str | None:
    """As `changes`, of other releases of jax or libtpu only, and without reading any source.

    A release is a version up to its first number that is not 0, as semantic versioning has it:
    jax 0.10.2 and 0.10.3 are one release, libtpu 0.0.42.1 and 0.0.43 are two.
    """
    changed = [
        f"{package} {made} → {here}"
        for package, made, here in _versions(row)
        if _release(made) != _release(here)
    ]
    return ", ".join(changed) or None


def _versions(row: Row) -> Iterator[tuple[str, str, str]]:
    """(package, version the row was made with, version here) of those that differ."""
    installed = versions.installed()
    for package, made in (("jax", row.jax_version), ("libtpu", row.libtpu_version)):
        here = installed[package]
        if made and here and made != here:
            yield package, made, here


def _release(version: str) -> tuple[str, ...]:
    numbers = version.split(".")
    zeros = len(list(itertools.takewhile(lambda n: n == "0", numbers)))
    return tuple(numbers[: zeros + 1])


@functools.cache
def _fingerprint(kernel: str) -> str | None:
    try:
        return kernel_fingerprint(kernel)
    except (AutotuneError, OSError):
        return None
