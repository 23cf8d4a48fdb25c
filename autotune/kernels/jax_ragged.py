"""JAX's ragged paged attention as a kernel to tune: sequences of q_len new tokens each.

A sequence's queries are its last tokens: query i sees keys up to kv_len - q_len + i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_ragged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_kernel
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.candidate import Config
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels import jax_pages as pages
from autotune.kernels import reference as references
from autotune.kernels.attention_inputs import draw, logit_gain
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.kernels.jax_blocks import why_no_size
from autotune.kernels.matmul_space import vmem_limit_tunable
from autotune.kernels.options import Option, factor, key_count, number
from autotune.problem import Problem

abstract: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
QUERIES = (8, 16, 32, 64, 128)


def _options() -> dict[str, Option]:
    """The function's own."""
    return {
        "sm_scale": factor(),
        "sliding_window": key_count(),
        "soft_cap": number(positive=True),
    }


def _check(problem: Problem) -> None:
    """Raises InputError for heads that do not group or tile, and for more queries than keys."""
    pages.check_heads(problem)
    s = problem.shape
    if s["q_len"] > s["kv_len"]:
        raise InputError(
            f"q_len {s['q_len']} is larger than kv_len {s['kv_len']}; queries are the last tokens "
            "of their sequence",
            path=("shape", "q_len"),
        )
    try:
        _heads_a_block(problem)
    except ValueError as error:
        raise InputError(str(error), path=("shape", "kv_heads")) from None


def _heads_a_block(problem: Problem) -> tuple[int, int]:
    """q heads and combined (k and v) heads of a grid step, by JAX's rule."""
    dtype, s = jnp.dtype(problem.dtype), problem.shape
    rule: Callable[..., tuple[int, int]] = jax_kernel.get_min_heads_per_blk
    return rule(s["q_heads"], 2 * s["kv_heads"], dtype, dtype)


def _build(problem: Problem, config: Config) -> Call:
    s, dtype, options = problem.shape, jnp.dtype(problem.dtype), problem.options
    lengths = np.full(s["batch"], s["kv_len"], np.int32)
    starts = np.arange(s["batch"] + 1, dtype=np.int32) * np.int32(s["q_len"])
    table, sequences = pages.page_table(problem), np.array([s["batch"]], np.int32)

    def ragged_paged_attention(q: Any, kv_pages: Any) -> Any:
        return jax_ragged.ragged_paged_attention(
            q, kv_pages, lengths, table, starts, sequences, **options, **config
        )

    q = abstract((s["batch"] * s["q_len"], s["q_heads"], s["head_dim"]), dtype)
    # A page holds k and v of a head next to each other.
    cache = abstract((table.size, s["page_size"], 2 * s["kv_heads"], s["head_dim"]), dtype)
    return ragged_paged_attention, (q, cache)


def _tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    count, tokens = (
        pages.pages_per_sequence(problem),
        problem.shape["batch"] * problem.shape["q_len"],
    )
    powers = [2**n for n in range(count.bit_length())]
    queries = tuple(n for n in QUERIES if n < 2 * tokens) or QUERIES[:1]
    return {
        "num_kv_pages_per_block": pages.up_to(pages.searched(problem, powers), count),
        "num_queries_per_block": pages.up_to(queries, 2**20),
        "vmem_limit_bytes": _vmem_limit(problem, device),
    }


def _vmem_limit(problem: Problem, device: Device) -> Tunable:
    """The default limit where the largest key block searched fits it with a quarter to spare."""
    s, limit = problem.shape, vmem_limit_tunable(device)
    tokens = min(pages.MOST_TOKENS, pages.pages_per_sequence(problem) * s["page_size"])
    itemsize = jnp.dtype(problem.dtype).itemsize
    buffers = 2 * tokens * _heads_a_block(problem)[1] * s["head_dim"] * itemsize
    fits = buffers <= device.scoped_vmem_bytes * 3 // 4
    return Tunable(values=limit.values[:1] if fits else limit.values[-1:], check=limit.check)


def _illegal(problem: Problem, config: Config, device: Device) -> str | None:
    name, count = "num_kv_pages_per_block", pages.pages_per_sequence(problem)
    for each in (name, "num_queries_per_block"):
        if reason := why_no_size(each, config.get(each)):
            return reason
    if config[name] > count:  # type: ignore[operator]
        return f"{name} {config[name]} is larger than the {count} pages of a sequence"
    limit = config.get("vmem_limit_bytes")
    if limit is not None and int(limit) > device.vmem_bytes:
        return f"vmem_limit_bytes {limit} is above {device.name}'s VMEM of {device.vmem_bytes}"
    return None


def _default(problem: Problem, device: Device) -> Config:
    """What the function takes where it is given none: JAX's own table of tuned sizes.

    Its `get_tuned_block_sizes` reads that table for the attached TPU; here it is read for the
    problem's. Without an entry: 128 pages and 32 queries a block, 32 and 32 on v4.
    """
    s = problem.shape
    q_heads, combined = _heads_a_block(problem)
    count, tokens = pages.pages_per_sequence(problem), s["batch"] * s["q_len"]
    sizes = (q_heads, combined // 2, s["head_dim"], s["page_size"], tokens, count)
    simplify: Callable[..., Any] = tuned_block_sizes.simplify_key
    key = simplify((problem.dtype, problem.dtype, *sizes))
    name = " ".join(device.kind.split()[:2])  # "TPU v6 lite" is "TPU v6" there
    fallback = (32, 32) if device.name == "v4" else (128, 32)
    found = tuned_block_sizes.TUNED_BLOCK_SIZES.get(name, {})
    block_pages, queries = fallback if device.name == "v4" else found.get(key, fallback)
    return {
        "num_kv_pages_per_block": min(count, block_pages),
        "num_queries_per_block": min(tokens, queries),
        "vmem_limit_bytes": None,
    }


def _seen(problem: Problem) -> np.ndarray:
    """int64[2, q_len]: first key a query sees, and the one after its last."""
    s, window = problem.shape, problem.options["sliding_window"]
    end = np.arange(s["q_len"], dtype=np.int64) + s["kv_len"] - s["q_len"] + 1
    return np.stack([np.zeros_like(end) if window is None else np.maximum(end - window, 0), end])


def _flops(problem: Problem) -> int:
    first, end = _seen(problem)
    s = problem.shape
    return 4 * s["head_dim"] * int((end - first).sum()) * s["q_heads"] * s["batch"]


def _inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    spread = problem.options["sm_scale"] * problem.shape["head_dim"] ** 0.5
    gain = logit_gain(problem.options["soft_cap"], 1.0) / spread
    return draw(key, arrays=_build(problem, {})[1], scale=float(gain))


def _reference(problem: Problem, q: Any, kv_pages: Any) -> Any:
    s, options = problem.shape, problem.options
    cache = pages.gathered(problem, kv_pages)  # [batch, kv_len, 2 · kv_heads, head_dim]
    k, v = (np.moveaxis(cache[:, :, each::2], 2, 1) for each in (0, 1))
    queries = np.asarray(q).reshape(s["batch"], s["q_len"], s["q_heads"], s["head_dim"])
    first, end = (bound[:, None] for bound in _seen(problem))
    keys = np.arange(s["kv_len"])
    out, _, _ = references.attention(
        np.moveaxis(queries, 2, 1), k, v, scale=options["sm_scale"], soft_cap=options["soft_cap"],
        mask=(keys >= first) & (keys < end),
    )  # fmt: skip
    return np.moveaxis(out, 1, 2).reshape(q.shape)


KERNEL = Kernel(
    name="jax.ragged_paged_attention",
    axes=("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "page_size"),
    axis_defaults={"batch": 1, "q_len": 1, "page_size": 16},
    build=_build,
    tunables=_tunables,
    flops=_flops,
    flop_convention="QKᵀ and PV: 2·(d + dv) per visible (query, key) pair and q head",
    options=_options(),
    check=_check,
    illegal=_illegal,
    default=_default,
    inputs=_inputs,
    reference=_reference,
    interpretable=False,  # it bitcasts a ref, which neither JAX's interpreter can index
)
