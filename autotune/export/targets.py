"""The targets, and plain JSON, which takes every board."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autotune import stale
from autotune.errors import UnknownNameError
from autotune.export import jax_blocks, maxtext, tokamax
from autotune.export.entry import Entry, Export

KERNELS = {
    "jax": "jax.splash and jax.flash, and of flash_* and splash what means the same",
    "maxtext": "jax.splash and tokamax.splash, and of splash what means the same",
    "tokamax": "tokamax.splash",
    "json": "every kernel",
}
"""Target -> whose configs it takes, in words."""
TARGETS = tuple(KERNELS)


def export(target: str, found: Sequence[Entry], *, tokamax_release: str | None = None) -> Export:
    """The configs in the form of `target`, with those it cannot express.

    Raises UnknownNameError for another target, InputError for an unknown release of Tokamax.
    """
    if target == "jax":
        return jax_blocks.export(found)
    if target == "maxtext":
        return maxtext.export(found)
    if target == "tokamax":
        return tokamax.export(found, release=tokamax.release_of(tokamax_release))
    if target == "json":
        return _json(found)
    raise UnknownNameError("export target", target, TARGETS)


def _json(found: Sequence[Entry]) -> Export:
    if not found:
        return Export(files={})
    records = [
        {
            "kernel": entry.row.kernel,
            "device": entry.row.device,
            "problem": {"shape": entry.shape, "options": entry.options, "dtype": entry.dtype},
            "problem_name": entry.row.problem_name,
            "problem_key": entry.row.problem_key,
            "config": entry.config,
            "evidence": entry.row.evidence,
            "latency_ms": entry.row.latency_ms,
            "mfu": entry.row.mfu,
            "jax_version": entry.row.jax_version,
            "libtpu_version": entry.row.libtpu_version,
            "stale": stale.reason(entry.row),
        }
        for entry in found
    ]
    return Export(files={"best.json": json.dumps({"configs": records}, indent=2) + "\n"})
