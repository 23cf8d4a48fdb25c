"""JAX's paged attention as a kernel to tune: decoding, one query a sequence over a paged cache.

The kernel scales nothing: q comes scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import paged_attention as jax_paged

from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels import jax_blocks as blocks
from autotune.kernels import jax_pages as pages
from autotune.kernels import reference as references
from autotune.kernels.attention_inputs import draw, logit_gain
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.options import number
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
MEGACORE = (None, "kv_head", "batch")


def _build(problem: Problem, config: Config) -> Call:
    s, dtype = problem.shape, jnp.dtype(problem.dtype)
    lengths = np.full(s["batch"], s["kv_len"], np.int32)
    table = pages.page_table(problem)

    def paged_attention(q: Any, k_pages: Any, v_pages: Any) -> Any:
        return jax_paged.paged_attention(
            q, k_pages, v_pages, lengths, table,
            attn_logits_soft_cap=problem.options["attn_logits_soft_cap"], **config,
        )  # fmt: skip

    cache = abstract((s["kv_heads"], table.size, s["page_size"], s["head_dim"]), dtype)
    return paged_attention, (
        abstract((s["batch"], s["q_heads"], s["head_dim"]), dtype),
        cache,
        cache,
    )


def _tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    count = pages.pages_per_sequence(problem)
    modes = [mode for mode in MEGACORE if _why_no_megacore(problem, mode, device) is None]
    return {
        "pages_per_compute_block": blocks.block(
            pages.searched(problem, blocks.divisors(count, 1)), count
        ),
        "megacore_mode": blocks.one_of(*MEGACORE, values=tuple(modes)),
        "inline_seq_dim": blocks.one_of(False, True),
    }


def _why_no_megacore(problem: Problem, mode: Any, device: Device) -> str | None:
    if mode is None:
        return None
    if device.cores < 2:
        return f"megacore_mode {mode} hangs on {device.name}, which has one TensorCore a JAX device"
    axis = "kv_heads" if mode == "kv_head" else "batch"
    if problem.shape[axis] % 2:
        return f"megacore_mode {mode} needs an even {axis}, not {problem.shape[axis]}"
    return None


def _illegal(problem: Problem, config: Config, device: Device) -> str | None:
    name, count = "pages_per_compute_block", pages.pages_per_sequence(problem)
    reason = blocks.why_not_dividing(name, config.get(name), "the pages of a sequence,", count)
    return reason or _why_no_megacore(problem, config.get("megacore_mode"), device)


def _inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    gain = logit_gain(problem.options["attn_logits_soft_cap"], 1.0)
    arguments = _build(problem, {})[1]
    return draw(key, arrays=arguments, scale=gain * problem.shape["head_dim"] ** -0.5)


def _reference(problem: Problem, q: Any, k_pages: Any, v_pages: Any) -> Any:
    # [kv_heads, pages, page_size, head_dim] -> [batch, kv_heads, kv_len, head_dim]
    k, v = (
        np.moveaxis(pages.gathered(problem, np.moveaxis(np.asarray(p), 0, 2)), 2, 1)
        for p in (k_pages, v_pages)
    )
    cap = problem.options["attn_logits_soft_cap"]
    q = np.asarray(q)[:, :, None]
    return references.attention(q, k, v, scale=1.0, soft_cap=cap)[0][:, :, 0]


def _flops(problem: Problem) -> int:
    s = problem.shape
    return 4 * s["head_dim"] * s["kv_len"] * s["q_heads"] * s["batch"]


KERNEL = Kernel(
    name="jax.paged_attention",
    axes=("batch", "q_heads", "kv_heads", "kv_len", "head_dim", "page_size"),
    axis_defaults={"batch": 1, "page_size": 16},
    build=_build,
    tunables=_tunables,
    flops=_flops,
    flop_convention="QKᵀ and PV: 2·(d + dv) per key of each sequence and q head",
    options={"attn_logits_soft_cap": number(positive=True)},
    check=pages.check_heads,
    illegal=_illegal,
    inputs=_inputs,
    reference=_reference,
)
