"""The rule for VMEM that values need beyond windows and scratch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from call_kernels import BF16, F32, MIB, attention, matmul, of, one, shaped
from jax.experimental import pallas as pl

QUARTER = MIB // 4


def held(mib: int) -> int:
    """What a tile of 1 to 8 MiB spills that is held: 7 of 10 bytes, 6 below 2 MiB."""
    return mib * MIB * (7 if mib > 1 else 6) // 10


@pytest.mark.parametrize(
    ("block_q", "block_kv", "online", "size"),
    [
        (1024, 1024, True, held(4)),
        (1024, 1024, False, 2 * MIB - 3 * QUARTER),
        (512, 2048, True, held(4)),
        (256, 256, True, 0),
        (512, 256, True, 0),
        (512, 512, True, held(1)),
        (2048, 2048, True, 8 * MIB - QUARTER),
        (512, 512, False, 0),
        (4096, 256, False, 0),
        (4096, 256, True, held(4)),
    ],
)
def test_a_held_score_tile_counts_seven_tenths_and_a_streaming_one_half_less_thrice_the_registers(
    block_q: int, block_kv: int, online: bool, size: int
) -> None:
    assert of(attention(block_q, block_kv, online=online)).temporaries_bytes == size


def test_a_matmul_accumulating_into_scratch_has_none_that_can_be_proved() -> None:
    assert of(matmul(8192, 8192, 8192, 2048, 1024, 2048)).temporaries_bytes == 0


def tile(step: Any) -> int:
    """Temporaries of `step(q, k)`, both [2048, 128], whose value is summed into the output."""

    def kernel(q: Any, k: Any, z: Any) -> None:
        z[...] += step(q, k)

    spec = pl.BlockSpec((2048, 128), lambda i: (i, 0))
    fn = pl.pallas_call(
        kernel, name="tile", grid=(4,), in_specs=[spec, spec], out_specs=spec,
        out_shape=shaped((8192, 128), F32),
    )  # fmt: skip
    return one(fn, *[shaped((8192, 128), BF16)] * 2).temporaries_bytes


def scores(q: Any, k: Any) -> Any:
    return jnp.dot(q[...], k[...].T, preferred_element_type=F32)


def weigh(p: Any, k: Any) -> Any:
    return jnp.dot(p.astype(BF16), k[...], preferred_element_type=F32)


def test_a_tile_that_is_only_summed_up_needs_no_room() -> None:
    assert tile(lambda q, k: jnp.sum(jnp.exp(scores(q, k)), axis=1, keepdims=True)) == 0


def test_a_tile_is_followed_through_jits_branches_and_loops() -> None:
    streamed = 8 * MIB - 3 * QUARTER

    def branch(q: Any, k: Any) -> Any:
        s = scores(q, k)
        return jax.lax.cond(pl.program_id(0) > 1, lambda: weigh(s, k), lambda: q[...].astype(F32))

    def loop(q: Any, k: Any) -> Any:
        def turn(n: Any, total: Any) -> Any:
            return total + weigh(jnp.exp(scores(q, k)), k)

        return jax.lax.fori_loop(0, pl.program_id(0), turn, jnp.zeros((2048, 128), F32))

    assert tile(lambda q, k: weigh(jax.jit(jnp.exp)(scores(q, k)), k)) == streamed
    assert tile(branch) == streamed
    assert tile(loop) == streamed


def test_a_maximum_of_another_tile_does_not_hold_this_one() -> None:
    def step(q: Any, k: Any) -> Any:
        other = jnp.max(scores(k, q), axis=1, keepdims=True)
        return weigh(jnp.exp(scores(q, k) - other), k)

    assert tile(step) == 8 * MIB - 3 * QUARTER


def test_two_tiles_that_meet_before_the_next_dot_are_both_held() -> None:
    def step(q: Any, k: Any) -> Any:
        return weigh(jnp.exp(scores(q, k)) * (scores(k, q) - 1.0), k)

    assert tile(step) == 8 * MIB - QUARTER


def test_a_batched_tile_counts_one_member_of_the_batch() -> None:
    def step(q: Any, k: Any) -> Any:
        left = q[...].reshape(2, 1024, 128)
        right = k[...].reshape(2, 1024, 128)
        s = jnp.einsum("bqd,bkd->bqk", left, right, preferred_element_type=F32)
        p = jnp.exp(s - jnp.max(s, axis=2, keepdims=True)).astype(BF16)
        return jnp.einsum("bqk,bkd->bqd", p, right, preferred_element_type=F32).reshape(2048, 128)

    assert tile(step) == held(4)
