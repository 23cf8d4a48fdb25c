"""Finds the best block sizes of Pallas TPU kernels, mostly without a TPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.lookup import best_config as best_config

__version__ = "0.1.0"

_LAZY = {"best_config": "autotune.lookup"}
"""Public name -> the module it is imported from at its first use, since that takes a while."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
