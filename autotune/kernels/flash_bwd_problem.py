"""Options, inputs, float64 reference and block space that flash_dq and flash_dkv share."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from autotune import device as devices
from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels import reference
from autotune.kernels.attention import (
    AXES,
    AXIS_DEFAULTS,
    MASK_VALUE,
    AttentionShape,
    allowed_block,
    attention_options,
    block_values,
    check_block,
    check_divides,
    check_heads,
    clamp_block,
)
from autotune.kernels.attention_inputs import gain_of
from autotune.kernels.base import Tunable
from autotune.kernels.flash_bwd import abstract
from autotune.kernels.options import Option, choice, flag
from autotune.problem import Problem

_MAJOR, _MINOR = (512, 1024, 2048, 4096), (512, 1024)
"""Blocks and tiles searched. On v6e a tile of 256 x 256 takes 50 % more cycles a pair than one of
1024 x 1024, one of 2048 x 2048 within 4 % of it at four times the compile time."""

_CHUNK = 512
"""Query rows whose logits the generator of lse and di holds at a time."""


def backward_options() -> dict[str, Option]:
    """Those of all attention kernels, the base of the exponential, and the gradients' dtype.

    `out_dtype: null` is the operands' dtype; `use_exp2` saves a multiplication a pair.
    """
    return {
        **attention_options(),
        "use_exp2": flag(True),
        "out_dtype": choice(None, "bfloat16", "float32"),
    }


def keywords(problem: Problem) -> dict[str, Any]:
    """The problem's options as keyword arguments of `flash_dq` and `flash_dkv`."""
    return {name: problem.options[name] for name in backward_options()}


def operands(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, do in the problem's dtype; lse, di [batch, q_heads, q_len] f32."""
    s, dtype = AttentionShape.of(problem), jnp.dtype(problem.dtype)
    queries, keys = (s.batch, s.q_heads, s.q_len), (s.batch, s.kv_heads, s.kv_len)
    shapes = (
        (*queries, s.head_dim_qk),
        (*keys, s.head_dim_qk),
        (*keys, s.head_dim_v),
        (*queries, s.head_dim_v),
    )
    rows = abstract(queries, jnp.float32)
    return (*(abstract(shape, dtype) for shape in shapes), rows, rows)


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """q, k, v, do: standard normals, q times `logit_gain`; lse and di: what a forward pass on them
    leaves behind."""
    how = _attention_keywords(problem)
    return draw_backward(key, operands(problem), **how, gain=gain_of(problem))  # type: ignore[no-any-return]


def _attention_keywords(problem: Problem) -> dict[str, Any]:
    shape = AttentionShape.of(problem)
    return {
        "scale": shape.scale(problem.options["scale"]),
        "soft_cap": problem.options["logit_soft_cap"],
        "causal": problem.options["causal"],
    }


@functools.partial(
    jax.jit,
    static_argnums=1,
    static_argnames=("scale", "soft_cap", "causal", "offset", "gain"),
)
def draw_backward(
    key: jax.Array,
    like: tuple[jax.ShapeDtypeStruct, ...],
    *,
    scale: float,
    soft_cap: float | None,
    causal: bool,
    offset: int | None = None,
    gain: float = 1.0,
) -> tuple[jax.Array, ...]:
    """q, k, v, do: standard normals, q times `gain`; lse and di: what a forward pass on them gives.

    `like`: these six, abstract. `causal` shows query i the keys up to i + `offset`, aligned
    bottom-right unless given.
    """
    keys = jax.random.split(key, 4)
    q, k, v, do = (
        jax.random.normal(each, a.shape, a.dtype) for each, a in zip(keys, like[:4], strict=True)
    )
    q = (q * gain).astype(q.dtype)
    group = q.shape[1] // k.shape[1]
    shift = k.shape[2] - q.shape[2] if offset is None else offset
    length = -(-q.shape[2] // _CHUNK) * _CHUNK

    def one_head(head: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, do, k, v = head

        def rows(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, do, first = chunk
            s = scale * jnp.dot(q.astype(jnp.float32), k.astype(jnp.float32).T, precision="highest")
            s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
            if causal:
                last = first + shift + jnp.arange(_CHUNK)[:, None]
                seen = jnp.arange(k.shape[0])[None] <= last
                s = jnp.where(seen, s, -jnp.inf)
            lse = jax.nn.logsumexp(s, axis=1)
            live = jnp.isfinite(lse)
            p = jnp.exp(s - jnp.where(live, lse, 0.0)[:, None])
            o = jnp.dot(p, v.astype(jnp.float32), precision="highest").astype(v.dtype)
            di = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=1)
            return jnp.where(live, lse, MASK_VALUE), di

        def chunks(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, length - x.shape[0]), (0, 0)))
            return x.reshape(-1, _CHUNK, x.shape[1])

        first = jnp.arange(0, length, _CHUNK)
        lse, di = lax.map(rows, (chunks(q), chunks(do), first))
        return lse.reshape(-1)[: q.shape[0]], di.reshape(-1)[: q.shape[0]]

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    repeated = (jnp.repeat(x, group, axis=1) for x in (k, v))
    lse, di = lax.map(one_head, (heads(q), heads(do), *(heads(x) for x in repeated)))
    return q, k, v, do, lse.reshape(q.shape[:3]), di.reshape(q.shape[:3])


def reference_gradients(problem: Problem, *arrays: Any) -> tuple[Any, Any, Any]:
    """dq, dk, dv in float64 of q, k, v, do.

    lse and di are left unread: a residual that is wrong must not be wrong on both sides.
    """
    operands = reference.f64(*arrays[:4])
    shape, options = AttentionShape.of(problem), _attention_keywords(problem)
    mask = reference.causal_mask(shape.q_len, shape.kv_len) if options["causal"] else None
    return reference.attention_gradients(
        *operands, scale=options["scale"], soft_cap=options["soft_cap"], mask=mask
    )


def transposes_output(problem: Problem, *head_dims: int) -> bool:
    """Whether gradients are best accumulated transposed on the problem's device.

    Streaming head_dim rows past a tile of scores beats streaming the tile's 256 rows past a half
    empty tile of k, on a 256-wide MXU. Up to v5p a transposed operand streams at half the rate
    (twice the vmatmul instructions, libtpu 0.0.42.1), and head_dim 128 fills the MXU anyway.
    """
    width = devices.get(problem.device).mxu_size
    return width == 256 and any(head_dim % width for head_dim in head_dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class MajorMinor:
    """Base of block sizes: `block_q_major`, `block_kv_major`, and minor blocks within them.

    Raises ValueError, with both numbers, for one that no chip can run.
    """

    def __post_init__(self) -> None:
        for name in self.names():
            check_block(name, getattr(self, name))
        for minor, major in self._nested():
            check_divides(minor, getattr(self, minor), major, getattr(self, major))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def _nested(cls) -> list[tuple[str, str]]:
        return [(n, f"{n}_major") for n in cls.names() if not n.endswith("_major")]

    def clamped(self, q_len: int, kv_len: int) -> Self:
        """What runs on these lengths: a major block no longer than its padded axis.

        A minor block that no longer divides its major one becomes their common divisor.
        """
        lengths = {"block_q_major": q_len, "block_kv_major": kv_len}
        sizes = {n: clamp_block(getattr(self, n), length) for n, length in lengths.items()}
        sizes |= {n: math.gcd(getattr(self, n), sizes[major]) for n, major in self._nested()}
        return type(self)(**sizes)


def shared_entries(blocks: type[MajorMinor]) -> dict[str, Any]:
    """What both backward kernels' `Kernel` says of problems and of their blocks, in rows.

    Default 128 each. Source: `BlockSizes.get_default` of JAX's flash_attention.py (jax 0.10.2 and
    0.12.0.1), where block_q_dq, block_q_major_dkv and all their like are 128.
    """
    names = blocks.names()

    def tunables(problem: Problem, device: Device) -> dict[str, Tunable]:
        def values(name: str) -> tuple[int, ...]:
            length = problem.shape["q_len" if name.startswith("block_q") else "kv_len"]
            return block_values(length, _MAJOR if name.endswith("_major") else _MINOR)

        return {name: Tunable(values=values(name), check=allowed_block) for name in names}

    def clamped(problem: Problem, config: Config) -> MajorMinor:
        sizes: Any = blocks
        return sizes(**config).clamped(problem.shape["q_len"], problem.shape["kv_len"])  # type: ignore[no-any-return]

    def illegal(problem: Problem, config: Config, device: Device) -> str | None:
        try:
            clamped(problem, config)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def canonical(problem: Problem, config: Config) -> Config:
        try:
            runs = clamped(problem, config)
        except (ValueError, TypeError):
            return config  # `illegal` says why
        return {name: getattr(runs, name) for name in names}

    return {
        "axes": AXES,
        "axis_defaults": AXIS_DEFAULTS,
        "options": backward_options(),
        "check": check_heads,
        "inputs": inputs,
        "tunables": tunables,
        "illegal": illegal,
        "canonical": canonical,
        "default": lambda problem, device: dict.fromkeys(names, 128),
    }
