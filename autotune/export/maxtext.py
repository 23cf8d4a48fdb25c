"""MaxText's `sa_…` settings, from boards of the splash attentions that it runs.

Source of the names: class `SplashAttention` of MaxText's configs/types.py. A name that an older
MaxText does not have is refused there, so nothing is lost unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.export import jax_blocks
from autotune.export.entry import CannotExpressError, Entry, Export

_NO_SETTING = "MaxText has no setting for it"
_LAYOUT_NAMES = ("q_layout", "k_layout", "v_layout")
_LAYOUTS = {1: "HEAD_DIM_MINOR", 2: "SEQ_MINOR"}
"""Tokamax's `QKVLayout` values -> names."""
_TOKAMAX = {
    "use_experimental_scheduler": "use_splash_scheduler",
    "use_base2_exp": "sa_use_base2_exp",
    "fuse_reciprocal": "sa_fuse_reciprocal",
    "dq_reduction_steps": "dq_reduction_steps",
}
"""Tokamax's field -> the setting, of a MaxText that runs its splash."""
_BLOCKS = (
    "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
    "block_kv_dkv_compute",
)  # fmt: skip
_DROPPED = {
    "num_stacked_q_heads": 1, "qk_diag_skip": False, "sv_diag_skip": False, "qk_diag_grid": 2,
}  # fmt: skip
"""What MaxText has no setting for -> the value that Tokamax takes unasked."""


def export(found: Sequence[Entry]) -> Export:
    """A YAML document a board, for `base.yml`'s place or as `name=value` arguments."""
    documents: list[str] = []
    refused: list[str] = []
    for entry in found:
        try:
            lines = [f"{name}: {_yaml(value)}" for name, value in settings(entry).items()]
        except CannotExpressError as reason:
            refused.append(f"{entry.told}: {reason}")
            continue
        documents.append("\n".join([*entry.comments, *lines, ""]))
    files = {"maxtext.yml": "---\n".join(documents)} if documents else {}
    return Export(files=files, refused=tuple(refused))


def settings(entry: Entry) -> dict[str, int | str | bool]:
    """Setting -> value. Raises CannotExpressError for a kernel that MaxText does not run."""
    if entry.row.kernel == "tokamax.splash":
        return _tokamax(entry)
    if entry.row.kernel not in ("jax.splash", "splash"):
        raise CannotExpressError(f"MaxText's sa_ settings are of splash, not {entry.row.kernel}")
    fields = dict(jax_blocks.splash(entry))
    if entry.row.kernel == "jax.splash" and "block_q_dkv" in fields:
        fields.setdefault("use_fused_bwd_kernel", False)
    return {f"sa_{name}": value for name, value in fields.items() if value is not None}


def _tokamax(entry: Entry) -> dict[str, int | str | bool]:
    """Settings of `use_tokamax_splash`, whose backward pass is always the fused one."""
    for name, own in _DROPPED.items():
        entry.must_be(name, own, why=_NO_SETTING)
    entry.has_only((*_BLOCKS, *_LAYOUT_NAMES, *_TOKAMAX, *_DROPPED), why=_NO_SETTING)
    config = entry.config
    found: dict[str, int | str | bool] = {"use_tokamax_splash": True}
    for name in _BLOCKS:
        if config.get(name) is not None:
            found[f"sa_{name}"] = entry.block(name)
    if "sa_block_q_dkv" in found:
        found["sa_use_fused_bwd_kernel"] = True
    for name in _LAYOUT_NAMES:
        if name in config:
            found[f"sa_{name}"] = entry.one_of(name, _LAYOUTS)
    return found | {
        setting: config[field]
        for field, setting in _TOKAMAX.items()
        if config.get(field) is not None
    }


def _yaml(value: int | str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
