"""The environment of a measuring worker: a chip's own, or a plain CPU's."""

from __future__ import annotations

from collections.abc import Mapping

# What keeps compile-only libtpu away from the chip would keep it away here too.
_HIDES_THE_CHIP = {
    "JAX_PLATFORMS": None,
    "ALLOW_MULTIPLE_LIBTPU_LOAD": None,
    "TPU_ACCELERATOR_TYPE": "none",
}
_OWN = {
    # An executable out of a cache hides what a changed flag or a newer compiler does.
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    # Unfiltered, so that an error can be told apart by who raised it.
    "JAX_TRACEBACK_FILTERING": "off",
}


def measuring_environment(parent: Mapping[str, str], *, platform: str) -> dict[str, str]:
    """The user's variables, without those that hide a chip; on `cpu`, with one that does.

    Host-side work (references, tables) needs JAX's CPU backend beside the TPU.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
        and not (name in _HIDES_THE_CHIP and _HIDES_THE_CHIP[name] in (None, value))
    }
    platforms = "cpu" if platform == "cpu" else f"{platform},cpu"
    return {**kept, **_OWN, "JAX_PLATFORMS": platforms}
