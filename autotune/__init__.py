"""Finds the best block sizes of Pallas TPU kernels, mostly without a TPU."""

import importlib
from typing import Any

__version__ = "0.1.0"

# No import statements, and their types in `__init__.pyi`: this file is part of every kernel's
# fingerprint, and with it would be whatever it imports.
_LAZY = {"best_config": "autotune.lookup", "tune": "autotune.tuning"}
"""Public name -> the module it is imported from at its first use, since that takes a while."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
