"""What is static of one forward attention call, and the names of its operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autotune.kernels.attention import LANES, LOG2_E, AttentionShape, round_up

MAX_CUT_PATTERNS = 4
"""Diagonal positions within a block that get code of their own; beyond, one code masks them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxPlan:
    """Everything static of one call, whatever its mask.

    Attributes:
      block_q, block_kv: the grid's blocks; q_tile, kv_tile: the dots' tiles within them.
      scale, soft_cap, shift: on the logits, in nats; `shift` is the max-logit constant.
      residuals: whether lse and max are outputs.
      track_top: whether each row's largest logit is kept: it is an output, or the only sign that
        a row has seen a key.
      spare_columns: whether V leaves MXU columns idle that can sum l.
    """

    shape: AttentionShape
    block_q: int
    block_kv: int
    q_tile: int
    kv_tile: int
    scale: float
    soft_cap: float | None
    shift: float | None
    use_exp2: bool
    residuals: bool
    track_top: bool
    spare_columns: bool

    @property
    def kv_blocks(self) -> int:
        return -(-self.shape.kv_len // self.block_kv)

    @property
    def q_blocks(self) -> int:
        return -(-self.shape.q_len // self.block_q)

    @property
    def q_uneven(self) -> bool:
        return self.shape.q_len % self.block_q != 0

    @property
    def kv_uneven(self) -> bool:
        return self.shape.kv_len % self.block_kv != 0

    @property
    def acc_width(self) -> int:
        """Lanes of the accumulator: the output's, and at least one for l where the MXU sums it."""
        return round_up(self.shape.head_dim_v + int(self.spare_columns), LANES)

    @property
    def guarded(self) -> bool:
        """Whether logits can leave the anchor's range: not under a constant, nor a tight cap."""
        capped = self.soft_cap is not None and self.soft_cap + math.log(self.shape.kv_len) < 44.0
        return self.shift is None and not capped

    @property
    def unit(self) -> float:
        """Logits are kept in these units per nat: bits for exp2, nats for exp."""
        return LOG2_E if self.use_exp2 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(SoftmaxPlan):
    """Adds flash_fwd's one mask: causal, bottom-right aligned."""

    causal: bool

    @property
    def offset(self) -> int:
        return self.shape.causal_offset

    def cut_patterns(self) -> list[int] | None:
        """Positions of the diagonal in the blocks it cuts, or None when they are too many.

        A position is `kv start - q start - offset`; the pair (r, c) of a block is visible when
        c + position <= r.
        """
        step = math.gcd(self.block_q, self.block_kv)
        lowest, highest = 2 - self.block_kv, self.block_q - 1
        first = lowest + (-self.offset - lowest) % step
        if (highest - first) // step + 1 > MAX_CUT_PATTERNS:
            return None
        return [p for p in range(first, highest + 1, step) if self._occurs(p)]

    def _occurs(self, position: int) -> bool:
        start = position + self.offset  # kv start - q start
        return any(
            (start + i * self.block_q) % self.block_kv == 0
            and 0 <= (start + i * self.block_q) // self.block_kv < self.kv_blocks
            for i in range(min(self.q_blocks, 4 * self.block_kv))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Refs:
    """The kernel's operands; None where the plan has no use for one.

    q [block_q, d], k [block_kv, d], v [block_kv, dv], out [block_q, dv], lse and top_out
    [1, block_q]; scratch: acc and backup [block_q, acc_width]; anchor, top, total and total_backup
    [block_q, 128]; bad int32[1].
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    top_out: Any
    acc: Any
    backup: Any
    anchor: Any
    top: Any
    total: Any
    total_backup: Any
    bad: Any
