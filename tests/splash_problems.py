"""Splash problems that its tests share."""

from __future__ import annotations

from typing import Any

from autotune.kernels import splash
from autotune.kernels.base import make_problem
from autotune.problem import Problem

KERNEL = splash.KERNEL
SMALL = {"block_q": 128, "block_kv": 128}
SHAPE = {
    "batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 256, "kv_len": 256,
    "head_dim_qk": 64, "head_dim_v": 64,
}  # fmt: skip
LOCAL = {"all": [{"causal": {}}, {"local": {"left": 60}}]}
DOCUMENTS = {"all": [{"causal": {}}, {"documents": {"lengths": [70, 30, 156]}}]}


def problem(
    options: dict[str, Any] | None = None,
    dtype: str = "float32",
    *,
    device: str = "v6e",
    **shape: int,
) -> Problem:
    return make_problem(
        KERNEL, device=device, shape={**SHAPE, **shape}, options=options or {}, dtype=dtype
    )
