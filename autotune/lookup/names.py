"""Which names a lookup may ask for, so that a typo is told from a result that is not stored.

The kernels, which know their axes and options, import jax; so those of the built-in ones stand
here, and a test holds them to the kernels. Of a user's own only what is stored is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.errors import InputError, UnknownNameError
from autotune.kernels.registry import REGISTRY
from autotune.lookup.library import Stored
from autotune.stored import names_kernel

OWN = "package.module:ATTRIBUTE"
_ATTENTION = "batch q_heads kv_heads q_len kv_len head_dim_qk head_dim_v"
_PAGED = "batch q_heads kv_heads kv_len head_dim page_size"
_BACKWARD = "causal scale logit_soft_cap use_exp2 out_dtype"
_GMM = "groups m k n", "group_sizes transpose_rhs out_dtype"
BUILT_IN: dict[str, tuple[str, str]] = {
    "matmul": ("m k n", "out_dtype epilogue transpose_rhs rhs_dtype"),
    "flash_fwd": (_ATTENTION, f"{_BACKWARD} max_logit_const residuals"),
    "flash_dq": (_ATTENTION, _BACKWARD),
    "flash_dkv": (_ATTENTION, _BACKWARD),
    "splash": (
        _ATTENTION,
        "mask segment_ids scale logit_soft_cap max_logit_const use_exp2 residuals out_dtype",
    ),
    "jax.splash": (
        _ATTENTION,
        "grad mask attn_logits_soft_cap segment_ids save_residuals is_mqa",
    ),
    "jax.flash": (_ATTENTION, "causal sm_scale segment_ids save_residuals"),
    "jax.flash_dq": (_ATTENTION, "causal sm_scale"),
    "jax.flash_dkv": (_ATTENTION, "causal sm_scale"),
    "jax.paged_attention": (_PAGED, "attn_logits_soft_cap"),
    "jax.ragged_paged_attention": (f"{_PAGED} q_len", "sm_scale sliding_window soft_cap"),
    "jax.matmul": ("m k n", "out_dtype"),
    "jax.gmm": _GMM,
    "tokamax.splash": (
        _ATTENTION,
        "mask residuals grad pass scale attn_logits_soft_cap max_logit_const operand_layout",
    ),
    "tokamax.gmm": _GMM,
}
"""Kernel -> (its axes, its options)."""


def kernel_called(text: str, stored: Iterable[Stored]) -> str:
    """The kernel's name as it is stored. A user's own goes by its folder's name too.

    Raises InputError for a name that is no kernel's.
    """
    kept = {s.row.kernel for s in stored}
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


def check_names(
    kernel: str, shape: Mapping[str, int], options: Mapping[str, Any], stored: Sequence[Stored]
) -> None:
    """Raises InputError for an axis or an option that the kernel does not have, and for heads of
    attention that share no heads of keys.

    Of a user's own kernel a stored problem shows the axes; its options at null it does not show.
    """
    own = [s for s in stored if s.row.kernel == kernel]
    axes = {axis for s in own for axis in s.shape}
    if kernel in BUILT_IN:
        axes |= set(BUILT_IN[kernel][0].split())
        known = {name for s in own for name in s.options} | set(BUILT_IN[kernel][1].split())
        for name in options:
            if name not in known:
                raise UnknownNameError(f"option of {kernel}", name, known)
    for axis in shape:
        if axes and axis not in axes:
            raise UnknownNameError(f"shape entry of {kernel}", axis, axes)
    if kernel in BUILT_IN and {"q_heads", "kv_heads"} <= axes:
        q_heads, kv_heads = shape.get("q_heads", 1), shape.get("kv_heads", 1)
        if q_heads % kv_heads:
            raise InputError(f"shape: kv_heads {kv_heads} do not divide q_heads {q_heads}")
