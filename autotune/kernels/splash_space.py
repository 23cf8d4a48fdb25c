"""The splash problem and its blocks: options, what is legal, what is searched, the defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels import flash_fwd, masks
from autotune.kernels.attention import (
    AttentionShape,
    attention_options,
    block_values,
    check_heads,
    check_shift_option,
)
from autotune.kernels.base import Tunable
from autotune.kernels.mask_table import MaskTable, table_of
from autotune.kernels.matmul_space import limit_reason
from autotune.kernels.options import Option, attention_mask, choice, flag, number
from autotune.problem import Problem

BLOCKS = ("block_q", "block_kv", "block_q_compute", "block_kv_compute")
PARTIAL_MASKS = ("computed", "stored")
TABLE_WORDS = 3
"""int32 a step in SMEM: query block, key block, what to do; stored patterns add one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(flash_fwd.BlockSizes):
    """flash_fwd's tiles, and where a partial block's mask comes from.

    Attributes:
      partial_mask: `stored`: a partial block reads its pattern from memory; `computed`: it compares
        key positions with each row's bounds.
    """

    partial_mask: str = "computed"

    def __post_init__(self) -> None:
        flash_fwd.BlockSizes.__post_init__(self)
        if self.partial_mask not in PARTIAL_MASKS:
            raise ValueError(
                f"partial_mask {self.partial_mask!r} is not one of {', '.join(PARTIAL_MASKS)}"
            )

    def clamped(self, q_len: int, kv_len: int) -> BlockSizes:
        """What runs on these lengths: see `flash_fwd.BlockSizes.clamped`."""
        tiles = flash_fwd.BlockSizes.clamped(self, q_len, kv_len)
        return replace(self, **{name: getattr(tiles, name) for name in BLOCKS})


def block_sizes(problem: Problem, config: Config) -> BlockSizes:
    """The config as the blocks that run. Raises ValueError for one that no chip can run."""
    sizes: BlockSizes = BlockSizes(**config)  # type: ignore[arg-type]
    return sizes.clamped(problem.shape["q_len"], problem.shape["kv_len"])


def options() -> dict[str, Option]:
    """`mask` is an algebra (`masks.parse`); with `segment_ids`, q and kv ids are two more inputs.

    The safe range of `max_logit_const` is `attention.shift_range`.
    """
    shared = {k: o for k, o in attention_options().items() if k != "causal"}
    return {
        "mask": attention_mask(),
        "segment_ids": flag(),
        **shared,
        "max_logit_const": number(positive=False),
        "use_exp2": flag(True),
        "residuals": flag(),
        "out_dtype": choice(None, "bfloat16", "float32"),
    }


def mask_of(problem: Problem) -> masks.Mask:
    return masks.of(problem.options["mask"])


def check(problem: Problem) -> None:
    """Raises InputError for heads that do not group and masks that do not fit the lengths."""
    check_heads(problem)
    check_shift_option(problem)
    q_len, kv_len, mask = problem.shape["q_len"], problem.shape["kv_len"], mask_of(problem)
    for lengths in masks.document_lengths(mask):
        if sum(lengths) != kv_len:
            raise InputError(
                f"document lengths sum to {sum(lengths)}, not kv_len {kv_len}",
                path=("options", "mask"),
            )
    try:
        pairs = masks.rows_of(mask, q_len, kv_len).pairs
    except ValueError as error:
        raise InputError(str(error), path=("shape",)) from None
    if not pairs:
        raise InputError(
            f"mask {json.dumps(problem.options['mask'])} hides everything: none of {q_len} queries "
            f"sees any of {kv_len} keys",
            path=("options", "mask"),
        )


def flops(problem: Problem) -> int:
    """2·(d + dv) per visible pair and head. Run-time segment ids hide more, unknown here."""
    shape = AttentionShape.of(problem)
    pairs = masks.rows_of(mask_of(problem), shape.q_len, shape.kv_len).pairs
    return 2 * (shape.head_dim_qk + shape.head_dim_v) * pairs * shape.batch * shape.q_heads


def table(problem: Problem, sizes: BlockSizes) -> MaskTable:
    """The execution table. Raises ValueError for more blocks than are prepared."""
    q_len, kv_len = problem.shape["q_len"], problem.shape["kv_len"]
    return table_of(mask_of(problem), q_len, kv_len, sizes.block_q, sizes.block_kv)


def table_bytes(sizes: BlockSizes, table: MaskTable) -> int:
    """SMEM the prefetched tables take."""
    return 4 * table.steps * (TABLE_WORDS + (sizes.partial_mask == "stored"))


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why the blocks cannot run, or None: they do not nest, or the table outgrows SMEM."""
    try:
        sizes = block_sizes(problem, config)
        found = table(problem, sizes)
    except ValueError as error:
        return str(error)
    if (reason := limit_reason(sizes.vmem_limit_bytes, device)) is not None:
        return reason
    needed = table_bytes(sizes, found)
    if needed > device.smem_bytes:
        return (
            f"block_q {sizes.block_q} x block_kv {sizes.block_kv} is too small: its table of "
            f"{found.steps} steps takes {needed} bytes of SMEM, {device.name} has "
            f"{device.smem_bytes}"
        )
    return None


def canonical(problem: Problem, config: Config) -> Config:
    """Blocks clamped, nulls resolved, `computed` where no block is cut by the mask."""
    try:
        sizes = block_sizes(problem, config)
        if not table(problem, sizes).partial:
            sizes = replace(sizes, partial_mask="computed")
    except ValueError:
        return config  # `illegal` says why
    return {name: getattr(sizes, name) for name in BlockSizes.__dataclass_fields__}


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """flash_fwd's blocks, from 256 on: smaller blocks fit a mask's edge closer."""
    flash = flash_fwd.tunables(problem, device)
    blocks = {
        name: replace(flash[name], values=block_values(problem.shape[axis], _BLOCKS))
        for name, axis in (("block_q", "q_len"), ("block_kv", "kv_len"))
    }
    source = Tunable(values=PARTIAL_MASKS, check=_allowed_partial_mask)
    return {**flash, **blocks, "partial_mask": source}


_BLOCKS = (256, 512, 1024, 2048)


def _allowed_partial_mask(value: Scalar) -> str | None:
    return None if value in PARTIAL_MASKS else "one of " + ", ".join(PARTIAL_MASKS)


def default(problem: Problem, device: Device) -> Config:
    """128 everywhere, masks computed.

    Source: `BlockSizes.get_default` of JAX's splash_attention_kernel.py (jax 0.10.2 and 0.12.0.1),
    which computes causal and local masks in the kernel.
    """
    return canonical(problem, {"block_q": 128, "block_kv": 128})
