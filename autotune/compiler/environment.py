"""Whether this machine can compile, and the environment that a compile worker runs in."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

from autotune.versions import installed

# Compile-only libtpu, quiet and next to others: no metadata server, no lock file, no log files.
# Never set in the parent: on a TPU host the measuring process must not have these.
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "none",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    # A compile that JAX's own cache answers has no dump, and hides what a changed flag does.
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    # Unfiltered, so that an error can be told apart by who raised it.
    "JAX_TRACEBACK_FILTERING": "off",
}
_DUMP_FLAGS = (
    "--xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final.* "
    "--xla_enable_custom_call_region_trace=true"
)


def unavailable() -> str | None:
    """Why nothing can be compiled on this machine, in one sentence; None where it can."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed, so kernels can be neither traced nor compiled"
    if importlib.util.find_spec("libtpu") is None:
        return (
            "libtpu, the TPU compiler, is not installed (it exists for Linux x86-64 only), "
            "so candidates cannot be compiled; evidence ends at the model"
        )
    return None


def versions() -> dict[str, str | None]:
    """Versions of the installed jax and libtpu: what compiles, so part of every cache key."""
    found = installed()
    return {name: found[name] for name in ("jax", "libtpu")}


def scoped_vmem_bytes(parent: Mapping[str, str]) -> int | None:
    """The default VMEM limit that the user's LIBTPU_INIT_ARGS set; None where they set none."""
    given = re.findall(r"--xla_tpu_scoped_vmem_limit_kib=(\d+)", parent.get("LIBTPU_INIT_ARGS", ""))
    return int(given[-1]) * 1024 if given else None


def worker_environment(parent: Mapping[str, str], dump_folder: str) -> dict[str, str]:
    """The environment of a worker that dumps to `dump_folder`.

    The user's own LIBTPU_INIT_ARGS are kept, ahead of those that the dump needs.
    """
    kept = {k: v for k, v in parent.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    args = f"{parent.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={dump_folder} {_DUMP_FLAGS}"
    return {**kept, **_QUIET, "LIBTPU_INIT_ARGS": args.strip()}


def compile_flags(parent: Mapping[str, str]) -> dict[str, str]:
    """The user's own variables that change what a compile says; part of every cache key.

    Everything for libtpu and XLA, and JAX's switches (matmul precision, x64, …).
    """
    overridden = {*_QUIET, "JAX_LOGGING_LEVEL", "JAX_LOG_COMPILES"}
    flags = {
        name: " ".join(value.split())
        for name, value in parent.items()
        if (name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS") or name.startswith("JAX_"))
        and not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
        and name not in overridden
    }
    return {name: value for name, value in sorted(flags.items()) if value}
