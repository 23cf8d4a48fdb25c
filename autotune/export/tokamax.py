"""Tokamax's autotuning cache: one JSON file an operation and device, from `tokamax.splash` boards.

The operations are those behind `tokamax.dot_product_attention` on a TPU. A file maps the arguments
of a call, as JSON text, to configs, as JSON text, with their times. Source of the forms: the data
that Tokamax 0.0.12 and 0.0.17 ship (`tokamax/data/autotuning`), and `_src/autotuning/cache.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import autotune
from autotune import device as devices
from autotune.errors import InputError
from autotune.export.entry import CannotExpressError, Entry, Export

RELEASES = ("0.0.12", "0.0.17")
FORWARD = "pallas_mosaic_tpu_flash_attention"
BACKWARD = "pallas_mosaic_tpu_flash_attention_vjp"
_LAYOUTS = ("q_layout", "k_layout", "v_layout")
_FORWARD_FIELDS = (
    "block_q", "block_kv", "block_kv_compute", *_LAYOUTS, "use_experimental_scheduler",
    "use_base2_exp",
)  # fmt: skip
_BACKWARD_FIELDS = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "use_base2_exp")
_UNASKED = {
    "num_stacked_q_heads": 1, "fuse_reciprocal": True, "qk_diag_skip": False,
    "sv_diag_skip": False, "qk_diag_grid": 2, "dq_reduction_steps": None,
}  # fmt: skip
"""Fields that neither operation's config has -> what its kernel takes then."""
_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def release_of(asked: str | None) -> str:
    """The release to write for: the asked one, else that of the installed Tokamax, else the newest.

    Raises InputError for one whose form is not known.
    """
    if asked is None:
        try:
            installed = metadata.version("tokamax")
        except metadata.PackageNotFoundError:
            return RELEASES[-1]
        return installed if installed in RELEASES else RELEASES[-1]
    if asked not in RELEASES:
        raise InputError(
            f"--tokamax-release {asked!r} is not allowed; its cache is known in the form of "
            f"{', '.join(RELEASES)}"
        )
    return asked


def export(found: Sequence[Entry], *, release: str) -> Export:
    """One cache file a device and operation, named as Tokamax looks for it."""
    files: dict[str, dict[str, Any]] = {}
    refused: list[str] = []
    for entry in found:
        try:
            operation, arguments, config = _expressed(entry, release)
        except CannotExpressError as reason:
            refused.append(f"{entry.told}: {reason}")
            continue
        folder = devices.DEVICES[entry.row.device].kind.lower().replace(" ", "_")
        content = files.setdefault(f"{folder}/{operation}.json", {})
        content.setdefault(_text(arguments), {})[_text(config)] = _times(entry)
    return Export(
        files={name: json.dumps(content, indent=2) + "\n" for name, content in files.items()},
        refused=tuple(refused),
    )


def _expressed(entry: Entry, release: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(operation, arguments, config). Raises CannotExpressError."""
    options = entry.options
    if entry.row.device not in devices.DEVICES:
        raise CannotExpressError("there is no such device")
    if entry.row.kernel != "tokamax.splash":
        raise CannotExpressError(f"its cache is of Tokamax's kernels, not of {entry.row.kernel}")
    if options.get("grad"):
        raise CannotExpressError(
            "grad times both passes as one, which its cache keeps apart; tune `residuals: true` "
            "and `pass: backward`"
        )
    if options.get("operand_layout", "bthd") != "bthd":
        raise CannotExpressError("dot_product_attention takes operands in the layout bthd only")
    if options.get("max_logit_const") is not None:
        raise CannotExpressError("its cache has no place for max_logit_const")
    backward = options.get("pass") == "backward"
    for name, value in _UNASKED.items():
        entry.must_be(name, value, why="its cache has no field for it")
    if backward:
        for name in _LAYOUTS:
            entry.must_be(name, 1, why="its backward pass has no field for it")
    names = _BACKWARD_FIELDS if backward else _FORWARD_FIELDS
    entry.has_only((*names, *_LAYOUTS, *_UNASKED), why="its cache has no field for it")
    defaults = {"use_experimental_scheduler": False, "use_base2_exp": True,
                **dict.fromkeys(_LAYOUTS, 1)}  # fmt: skip
    config = {n: entry.config.get(n, defaults.get(n)) for n in names}
    for name in names:
        if name.startswith("block"):
            config[name] = entry.block(name)
    arguments = _arguments(entry, release, backward=backward)
    return (BACKWARD if backward else FORWARD), arguments, config


def _arguments(entry: Entry, release: str, *, backward: bool) -> dict[str, Any]:
    """The call's arguments, as `bind` fills them in, those with no array in them at their
    defaults."""
    options = entry.options
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None or (release == "0.0.12" and dtype != "bf16"):
        raise CannotExpressError(f"the form of {entry.dtype} in its cache is not known")

    def array(kind: str, *axes: str) -> str:
        return f"{kind}[{','.join(str(entry.size(axis)) for axis in axes)}]"

    q = array(dtype, "batch", "q_len", "q_heads", "head_dim_qk")
    out = array(dtype, "batch", "q_len", "q_heads", "head_dim_v")
    stats = array("f32", "batch", "q_heads", "q_len")
    of_backward = {"residuals": [stats, stats], "out": out, "dout": out} if backward else {}
    return {
        **of_backward,
        "q": q,
        "k": array(dtype, "batch", "kv_len", "kv_heads", "head_dim_qk"),
        "v": array(dtype, "batch", "kv_len", "kv_heads", "head_dim_v"),
        "precision": _precision(release),
        "logits_dtype": "float32",
        # Rounded as there: the last bit is part of the key.
        "logits_scale": options.get("scale") or 1 / math.sqrt(entry.size("head_dim_qk")),
        "bias": None,
        "logits_soft_cap": options.get("attn_logits_soft_cap"),
        "mask": _mask(options.get("mask", {"causal": {"offset": 0}}), release),
        "dropout_mask": None,
        "dropout_rate": 0.0,
        "paging_info": None,
        "q_indices": None,
        "k_indices": None,
        "normalize_output": True,
        "return_residuals": bool(options.get("residuals")) and not backward,
    }


def _precision(release: str) -> list[Any]:
    """What `precision=None` becomes."""
    if release == "0.0.12":
        return ["BF16_BF16_F32", "BF16_BF16_F32"]
    return [["DEFAULT", "DEFAULT"], ["DEFAULT", "DEFAULT"]]


def _mask(mask: dict[str, Any], release: str) -> dict[str, Any]:
    """A full or a causal mask; Tokamax aligns causal ones top-left, as `tokamax.splash` does."""
    causal = mask == {"causal": {"offset": 0}} or mask == {"causal": {}}
    if not causal and mask != {"full": {}}:
        raise CannotExpressError(
            f"its mask is {json.dumps(mask)}; dot_product_attention is cached for full and causal "
            "ones (others are arrays there)"
        )
    ends = {"q_start": None, "q_end": None, "k_start": None, "k_end": None}
    if release == "0.0.12":
        return {"bool_mask": None, **ends, "is_causal": causal}
    window = {"offset": 0, "window_size": None} if causal else None
    return {"bool_mask": None, **ends, "causal_mask": window}


def _times(entry: Entry) -> dict[str, Any]:
    """Tokamax's record of a benchmark: samples, or the predicted time where there are none.

    `metadata` says which, since Tokamax itself only knows measured times.
    """
    row = entry.row
    return {
        "compile_time_ms": (row.compile_seconds or 0.0) * 1e3,
        "lower_time_ms": 0.0,
        "evaluation_times_ms": row.samples_ms or [row.latency_ms],
        "metadata": {"source": f"autotune {autotune.__version__}", "evidence": row.evidence},
    }


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
