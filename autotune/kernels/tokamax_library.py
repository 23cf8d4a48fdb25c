"""Tokamax's modules, or one line on how to install them."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from autotune.errors import InputError, KernelError

SPLASH = "tokamax._src.ops.experimental.tpu.splash_attention."
RAGGED_DOT = "tokamax._src.ops.ragged_dot."


def module(name: str) -> Any:
    """A module of Tokamax's. Its kernels lie in private modules: another release may move them.

    Raises:
      InputError: Tokamax is not installed; the message says how to install it.
      KernelError: it is, and lacks the module or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "tokamax":
            raise InputError(
                "Tokamax is not installed; pip install '.[tokamax]' in autotune's checkout",
                path=("kernel",),
            ) from None
        raise KernelError(f"tokamax {metadata.version('tokamax')} has no {error.name}") from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise KernelError(
            f"importing tokamax {metadata.version('tokamax')} raised {type(error).__name__}: {text}"
        ) from error
