"""What lookups must know of the built-in kernels, whose own modules import jax.

Axes, options, dtypes, and which tunable is a block of which axis. Tests hold all of it to the
kernels: the blocks by asking each kernel's own `illegal` about shapes drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune import device as devices
from autotune.kernels.options import (
    Option,
    attention_mask,
    choice,
    factor,
    flag,
    key_count,
    number,
    row_counts,
)

PAGES, GROUP = "pages a sequence", "q heads a kv head"
"""Axes that follow from others, and that some tunable is a block of."""
_TABLE_WORDS = 4
"""int32 that a step of splash's table takes in SMEM, at most."""

Misfit = Callable[[Mapping[str, int], Mapping[str, Any], str], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A tunable as the block of an axis. It divides the axis, and is a multiple of `tile` or all of
    it; where `parts`, the axis may also end in a part of a block.

    A few kernels take more than that: what does not divide leaves work for nothing.
    """

    axis: str
    tile: int = 1
    parts: bool = False

    def misfit(self, name: str, value: int, size: int) -> str | None:
        """Why `value` suits no axis of `size`; None where it does."""
        if self.parts:
            large = f"its {name} {value} is larger than {self.axis} = {size}"
            return large if value > size else None
        if value < 1 or size % value:
            return f"its {name} {value} does not divide {self.axis} = {size}"
        if value % self.tile:  # stored, it was all of its axis
            return f"its {name} {value} is neither a multiple of {self.tile} nor all of {self.axis}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One kernel's.

    Attributes:
      axis_defaults: axes that a config may leave out, with their size.
      blocks: tunable -> the block it is.
      misfit: `(asked shape, stored config, device) -> reason | None`, for a rule of another kind.
    """

    axes: tuple[str, ...]
    options: Mapping[str, Option]
    blocks: Mapping[str, Block]
    axis_defaults: Mapping[str, int] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    misfit: Misfit = lambda shape, config, device: None

    def filled_in(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` with those left out at their defaults."""
        return {**{name: option.default for name, option in self.options.items()}, **options}


def size_of(axis: str, shape: Mapping[str, int]) -> int | None:
    """The size of an axis, one that follows from others included; None where there is no such."""
    if axis == PAGES:
        return -(-shape.get("kv_len", 1) // shape.get("page_size", 1))
    if axis == GROUP:
        return shape.get("q_heads", 1) // shape.get("kv_heads", 1)
    return shape.get(axis)


def _paged_misfit(shape: Mapping[str, int], config: Mapping[str, Any], device: str) -> str | None:
    mode = config.get("megacore_mode")
    axis = {"kv_head": "kv_heads", "batch": "batch"}.get(mode or "")
    if axis is None or shape.get(axis, 1) % 2 == 0:
        return None
    return f"its megacore_mode {mode} needs an even {axis}, not {shape.get(axis, 1)}"


def _splash_misfit(shape: Mapping[str, int], config: Mapping[str, Any], device: str) -> str | None:
    """How many steps the table has only the mask tells; here, all that it can have."""
    steps = 1
    for name, axis in (("block_q", "q_len"), ("block_kv", "kv_len")):
        block = config.get(name)
        if not isinstance(block, int) or block < 1:
            return f"its {name} is {block}"
        steps *= -(-shape.get(axis, 1) // block)
    most = 4 * steps * _TABLE_WORDS
    if most <= devices.get(device).smem_bytes:
        return None
    return f"its table of {steps} blocks may take {most} bytes of SMEM, more than there is"


_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")
_MATMUL_DTYPES = ("bfloat16", "float32", "int8", *_FLOAT8)
_BF16_OR_F32 = choice(None, "bfloat16", "float32")
_OFF_AT_0 = number(positive=True)
_AXES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim_qk", "head_dim_v")
_PAGED = ("batch", "q_heads", "kv_heads", "kv_len", "head_dim", "page_size")
_Q, _KV = Block(axis="q_len"), Block(axis="kv_len")
"""Blocks within these divide them, and so stay legal where these do."""
_OWN: dict[str, Any] = {
    "axes": _AXES,
    "axis_defaults": {"batch": 1},
    "blocks": {"block_q": _Q, "block_kv": _KV},
}
_BACKWARD = {
    "causal": flag(),
    "scale": _OFF_AT_0,
    "logit_soft_cap": _OFF_AT_0,
    "use_exp2": flag(True),
    "out_dtype": _BF16_OR_F32,
}
_MAJOR = {"block_q_major": _Q, "block_kv_major": _KV}
_FLASH: dict[str, Any] = {"axes": _AXES, "axis_defaults": {"batch": 1}}
_CAUSAL = {"causal": flag(), "sm_scale": factor()}
_GMM = Facts(
    axes=("groups", "m", "k", "n"),
    options={"group_sizes": row_counts(), "transpose_rhs": flag(), "out_dtype": _BF16_OR_F32},
    blocks={
        "tile_m": Block(axis="m", tile=8),
        "tile_k": Block(axis="k", tile=128),
        "tile_n": Block(axis="n", tile=128),
    },
)

BUILT_IN: dict[str, Facts] = {
    "matmul": Facts(
        axes=("m", "k", "n"),
        options={
            "out_dtype": choice(None, "bfloat16", "float32", "int32", *_FLOAT8, "int8"),
            "epilogue": choice("none", "none", "relu", "gelu", "silu"),
            "transpose_rhs": flag(),
            "rhs_dtype": choice(None, *_MATMUL_DTYPES),
        },
        dtypes=_MATMUL_DTYPES,
        blocks={
            "bm": Block(axis="m", tile=8),
            "bk": Block(axis="k", tile=128),
            "bn": Block(axis="n", tile=128),
        },
    ),
    "flash_fwd": Facts(
        options={**_BACKWARD, "max_logit_const": number(positive=False), "residuals": flag()},
        **_OWN,
    ),
    "flash_dq": Facts(options=_BACKWARD, **{**_OWN, "blocks": _MAJOR}),
    "flash_dkv": Facts(options=_BACKWARD, **{**_OWN, "blocks": _MAJOR}),
    "splash": Facts(
        options={
            "mask": attention_mask(),
            "segment_ids": flag(),
            "scale": _OFF_AT_0,
            "logit_soft_cap": _OFF_AT_0,
            "max_logit_const": number(positive=False),
            "use_exp2": flag(True),
            "residuals": flag(),
            "out_dtype": _BF16_OR_F32,
        },
        misfit=_splash_misfit,
        **_OWN,
    ),
    "jax.splash": Facts(
        options={
            "grad": flag(),
            "mask": attention_mask(),
            "attn_logits_soft_cap": _OFF_AT_0,
            "segment_ids": flag(),
            "save_residuals": flag(),
            "is_mqa": flag(),
        },
        blocks={
            "block_q": _Q, "block_kv": _KV, "block_q_dkv": _Q, "block_kv_dkv": _KV,
            "block_q_dq": _Q, "block_kv_dq": _KV,
        },
        **_FLASH,
    ),
    "jax.flash": Facts(
        options={**_CAUSAL, "segment_ids": flag(), "save_residuals": flag()},
        blocks={
            "block_q": _Q, "block_k_major": _KV, "block_k": Block(axis="kv_len", tile=128),
            "block_b": Block(axis="batch"),
        },
        **_FLASH,
    ),
    "jax.flash_dq": Facts(
        options=_CAUSAL,
        blocks={"block_q_dq": _Q, "block_k_major_dq": _KV},
        **_FLASH,
    ),
    "jax.flash_dkv": Facts(
        options=_CAUSAL,
        blocks={"block_q_major_dkv": _Q, "block_k_major_dkv": _KV},
        **_FLASH,
    ),
    "jax.paged_attention": Facts(
        axes=_PAGED,
        axis_defaults={"batch": 1, "page_size": 16},
        options={"attn_logits_soft_cap": _OFF_AT_0},
        blocks={"pages_per_compute_block": Block(axis=PAGES)},
        misfit=_paged_misfit,
    ),
    "jax.ragged_paged_attention": Facts(
        axes=(*_PAGED, "q_len"),
        axis_defaults={"batch": 1, "q_len": 1, "page_size": 16},
        options={"sm_scale": factor(), "sliding_window": key_count(), "soft_cap": _OFF_AT_0},
        blocks={"num_kv_pages_per_block": Block(axis=PAGES, parts=True)},
    ),
    "jax.matmul": Facts(
        axes=("m", "k", "n"),
        options={"out_dtype": _BF16_OR_F32},
        blocks={
            "block_m": Block(axis="m", tile=8),
            "block_k": Block(axis="k", tile=128),
            "block_n": Block(axis="n", tile=128),
        },
    ),
    "jax.gmm": _GMM,
    "tokamax.splash": Facts(
        options={
            "mask": attention_mask(),
            "residuals": flag(),
            "grad": flag(),
            "pass": choice(None, "backward"),
            "scale": _OFF_AT_0,
            "attn_logits_soft_cap": _OFF_AT_0,
            "max_logit_const": number(positive=False),
            "operand_layout": choice("bthd", "bthd", "bhtd"),
        },
        blocks={
            "block_q": _Q, "block_kv": _KV, "block_q_dkv": _Q, "block_kv_dkv": _KV,
            "num_stacked_q_heads": Block(axis=GROUP),
        },
        **_FLASH,
    ),
    "tokamax.gmm": _GMM,
}  # fmt: skip
