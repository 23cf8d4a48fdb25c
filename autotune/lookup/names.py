"""What a lookup may ask for, so that bad input is told from a result that is not stored.

Of the built-in kernels `built_in.py` says it; of a user's own only what is stored is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autotune.device import Device
from autotune.errors import InputError, UnknownNameError, shown
from autotune.kernels.registry import REGISTRY
from autotune.lookup.built_in import BUILT_IN
from autotune.stored import names_kernel

OWN = "package.module:ATTRIBUTE"


def kernel_called(text: str, kept: Collection[str]) -> str:
    """The kernel's name as it is stored; `kept` are those that are. A user's own goes by its
    folder's name too.

    Raises InputError for a name that is no kernel's.
    """
    if text in kept or text in REGISTRY:
        return text
    if found := [kernel for kernel in sorted(kept) if names_kernel(text, kernel)]:
        return found[0]
    module, colon, attribute = text.partition(":")
    if not colon:
        raise UnknownNameError("kernel", text, {*REGISTRY, *kept, OWN})
    if not attribute.isidentifier() or not all(p.isidentifier() for p in module.split(".")):
        raise InputError(f"kernel: {text!r} is not allowed; a known kernel, or {OWN}")
    return text


def check_axes(kernel: str, shape: Mapping[str, int], axes: Collection[str]) -> None:
    """Raises InputError for an axis that is none of `axes`, and for heads of attention that share
    no heads of keys."""
    for axis in shape:
        if axes and axis not in axes:
            raise UnknownNameError(f"shape entry of {kernel}", axis, axes)
    if kernel in BUILT_IN and {"q_heads", "kv_heads"} <= set(axes):
        q_heads, kv_heads = shape.get("q_heads", 1), shape.get("kv_heads", 1)
        if q_heads % kv_heads:
            raise InputError(f"shape: kv_heads {kv_heads} do not divide q_heads {q_heads}")


def parsed(kernel: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a built-in kernel, normalised as the kernel does it: a soft cap of 0 is null.

    Raises InputError for an option, or a value of one, that the kernel does not take.
    """
    forms, found = BUILT_IN[kernel].options, {}
    for name, value in options.items():
        if name not in forms:
            raise UnknownNameError(f"option of {kernel}", name, forms)
        try:
            found[name] = forms[name].parse(value)
        except ValueError as error:
            raise InputError(f"options.{name}: {shown(value)} is not allowed; {error}") from None
    return found


def check_dtype(kernel: str, chip: Device, dtype: str) -> None:
    """Raises InputError for operands that a built-in kernel, or the chip, does not multiply."""
    allowed = [name for name in BUILT_IN[kernel].dtypes if name in chip.matmul_dtypes]
    if dtype not in allowed:
        listed = ", ".join(allowed) or "another device"
        raise InputError(
            f"dtype: {shown(dtype)} is not allowed; {kernel} on {chip.name} takes {listed}"
        )
