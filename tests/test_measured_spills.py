"""Formulas of tiles, and the spills that were measured of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from call_kernels import BF16, F32, MIB, attention, shaped
from jax.experimental import pallas as pl

from autotune import device
from autotune.device import DEVICES, KIB
from autotune.kernels import base
from autotune.pallas_call import trace
from autotune.traced import measured_spills as spills
from autotune.traced.capture import capture
from autotune.traced.measured_spills import Size
from autotune.traced.outer_code import find_calls
from autotune.traced.tile_formulas import Use, tile_uses

V5E = device.get("v5e")
ONLINE = "bf16(exp(sub(dot[bf16],~))) @ bf16"


def uses_of(fn: Any, args: Any) -> list[Use]:
    (call,) = find_calls(capture(fn, args, V5E).marked.jaxpr)
    return tile_uses(call.eqn.params["jaxpr"])


def call(step: Any) -> Any:
    """A call of `step(q, k)`, both [512, 128] bf16, whose value is summed into the output."""

    def kernel(q: Any, k: Any, z: Any) -> None:
        z[...] += step(q, k)

    spec = pl.BlockSpec((512, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, name="call", grid=(4,), in_specs=[spec, spec], out_specs=spec,
        out_shape=shaped((2048, 128), F32),
    )  # fmt: skip


ARGS = [shaped((2048, 128), BF16)] * 2


def scores(q: Any, k: Any) -> Any:
    return jnp.dot(q[...], k[...].T, preferred_element_type=F32)


def weigh(p: Any, k: Any) -> Any:
    return jnp.dot(p.astype(BF16), k[...], preferred_element_type=F32)


def test_a_formula_names_what_lies_between_two_products() -> None:
    def masked(q: Any, k: Any) -> Any:
        s = scores(q, k) * 0.5
        s = jnp.where(jax.lax.broadcasted_iota(jnp.int32, s.shape, 1) < 3, s, -1e9)
        return weigh(jnp.exp(s - jnp.max(s, axis=1, keepdims=True)), k)

    def met(q: Any, k: Any) -> Any:
        return weigh(jnp.exp(scores(q, k)) * (scores(k, q) - 1.0), k)

    def on_the_right(q: Any, k: Any) -> Any:
        p = jnp.exp(scores(q, k)).astype(BF16)
        return jnp.dot(q[...].T, p, preferred_element_type=F32).T

    assert [u.formula for u in uses_of(*attention(512, 512, online=True))] == [ONLINE]
    assert [
        u.formula for step in (masked, met, on_the_right) for u in uses_of(call(step), ARGS)
    ] == [
        "bf16(exp(sub(select_n(.,.,mul(dot[bf16],.)),~))) @ bf16",
        "bf16(mul(exp(dot[bf16]),sub(dot[bf16],.))) @ bf16",
        "bf16 @ bf16(exp(dot[bf16]))",
    ]


def test_the_dtypes_and_the_precision_of_the_products_belong_to_a_formula() -> None:
    def exact(q: Any, k: Any) -> Any:
        high = jax.lax.Precision.HIGHEST
        q, k = (x[...].astype(F32) for x in (q, k))
        return jnp.dot(jnp.exp(jnp.dot(q, k.T, precision=high)), k, precision=high)

    (use,) = uses_of(call(exact), ARGS)
    assert use.formula == "exp(dot[f32 highest]) @ f32 highest"


def test_a_formula_that_doubles_with_every_step_stays_short() -> None:
    def step(q: Any, k: Any) -> Any:
        p = scores(q, k)
        for _ in range(64):
            p = p * p
        return weigh(p, k)

    (use,) = uses_of(call(step), ARGS)
    assert len(use.formula) < 10


def test_the_size_of_tiles_is_that_of_the_largest() -> None:
    def two(q: Any, k: Any) -> Any:
        half = jnp.exp(jnp.dot(q[...], k[:256].T, preferred_element_type=F32))
        return weigh(jnp.exp(scores(q, k)), k) + weigh(half, k.at[:256])

    assert spills.size_of(uses_of(call(two), ARGS)) == Size(512, 512, 128, 128)
    assert spills.size_of(uses_of(*attention(256, 1024, online=True))) == Size(256, 1024, 128, 128)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    rows = [
        [256, 512, 128, 128, 100],
        [512, 512, 128, 128, 1000],
        [512, 1024, 128, 128, 900],
    ]
    data = {"libtpu": ["9.9"], "tiles": [{"formulas": [ONLINE], "kib": {"v5e": rows}}]}
    monkeypatch.setattr(spills, "DATA", tmp_path / "data.json")
    spills.DATA.write_text(json.dumps(data))
    monkeypatch.setattr(spills, "installed", lambda: {"libtpu": "9.9"})
    spills._data.cache_clear()
    yield
    spills._data.cache_clear()


def billed(on: str, block_q: int, block_kv: int, *, head_dim: int = 128) -> int:
    uses = uses_of(*attention(block_q, block_kv, online=True, head_dim=head_dim))
    return spills.measured_bytes(uses, device.get(on))


@pytest.mark.usefixtures("table")
def test_a_tile_is_billed_what_one_of_its_formula_and_size_spilled() -> None:
    assert billed("v5e", 256, 512) == 100 * KIB
    assert billed("v5e", 512, 1024) == 900 * KIB
    assert billed("v5e", 512, 512, head_dim=64) == billed("v5e", 512, 512, head_dim=256) == 0
    assert billed("v5e", 512, 2048) == 0, "another size"
    assert billed("v5p", 256, 512) == billed("v4", 256, 512) == int(97 * KIB)
    assert billed("v6e", 512, 512) == 0, "another chip"


@pytest.mark.usefixtures("table")
def test_another_compiler_than_those_asked_is_not_answered_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spills, "installed", lambda: {"libtpu": "10.0"})
    assert billed("v5e", 512, 512) == 0
    monkeypatch.setattr(spills, "installed", lambda: {"libtpu": None})
    assert billed("v5e", 512, 512) > 0


@pytest.mark.usefixtures("table")
def test_a_kernel_of_another_formula_is_left_to_the_rule() -> None:
    uses = uses_of(*attention(512, 512, online=False))
    assert spills.measured_bytes(uses, V5E) == 0
    assert spills.measured_bytes([], V5E) == 0


def test_the_data_are_of_known_chips_and_of_both_compilers() -> None:
    stored = json.loads(spills.DATA.read_text())
    assert stored["libtpu"] == ["0.0.42.1", "0.0.50.1"]
    assert {chip for entry in stored["tiles"] for chip in entry["kib"]} <= DEVICES.keys()
    assert not spills.ALIKE.keys() & {chip for entry in stored["tiles"] for chip in entry["kib"]}


def own(kernel: str, on: str, **config: int) -> int:
    shape = {
        "batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 2048, "kv_len": 2048,
        "head_dim_qk": 128, "head_dim_v": 128,
    }  # fmt: skip
    made = base.load(kernel)
    problem = base.make_problem(made, device=on, shape=shape, dtype="bfloat16")
    fn, args = made.build(problem, config)
    return trace(fn, args, device.get(on)).calls[0].temporaries_bytes


@pytest.mark.skipif(
    spills.installed()["libtpu"] not in (None, "0.0.42.1", "0.0.50.1"), reason="not measured"
)
def test_what_attentions_own_kernels_spill_is_billed_within_an_eighth() -> None:
    # libtpu 0.0.42.1: 2.211 and 4.820 MiB (dq), 1.672 (dkv), 3.695 (forward, v5e), 3.906 (tpu7x).
    blocks = {"block_q_major": 1024, "block_kv_major": 1024}
    forward = {"block_q_compute": 512, "block_kv_compute": 1024}
    for measured, bill in (
        (2.211, own("flash_dq", "v5e", **blocks, block_kv=512)),
        (4.820, own("flash_dq", "v5p", **blocks, block_kv=1024)),
        (1.672, own("flash_dkv", "v5e", **blocks, block_q=1024, block_kv=512)),
        (3.695, own("flash_fwd", "v5e", block_q=2048, block_kv=1024, **forward)),
        (3.906, own("flash_dq", "tpu7x", **blocks, block_kv=1024)),
    ):
        assert 0.875 * measured <= bill / MIB <= measured
