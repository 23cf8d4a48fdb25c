"""The space of a problem: which candidates there are, and which are illegal and why."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import config_kernels
import pytest

from autotune import config
from autotune import device as devices
from autotune.candidate import Candidate, Scalar
from autotune.errors import InputError, KernelError
from autotune.kernels.base import Kernel, Tunable, load, make_problem
from autotune.problem import Problem
from autotune.search import space
from autotune.search.space import Space, candidates

V6E = devices.get("v6e")
TOY = config_kernels.KERNEL


def problem(*, kernel: Kernel = TOY, q_len: int = 512, kv_len: int = 512) -> Problem:
    shape = {"q_heads": 8, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    return make_problem(kernel, device="v6e", shape=shape)


def toy(**changes: Any) -> Kernel:
    return dataclasses.replace(TOY, **changes)


def blocks(found: Space, name: str) -> set[Scalar]:
    return {candidate.config[name] for candidate in found.legal}


def test_the_default_comes_first_and_is_marked() -> None:
    found = candidates(TOY, problem(), V6E)
    first, *rest = found.legal
    assert first.is_default
    assert first.config["block_q"] == 512, "the default of 1024 is clamped to the axis"
    assert not any(c.is_default for c in rest)
    assert first not in rest


def test_a_default_inside_the_product_is_one_candidate() -> None:
    inside = {**config_kernels.DEFAULT, "block_q": 256, "block_kv": 256}
    found = candidates(toy(default=lambda p, d: inside), problem(), V6E)
    plain = candidates(toy(default=None), problem(), V6E)
    assert len(found.legal) == len(plain.legal), "it is counted once"
    assert [c.is_default for c in found.legal].count(True) == 1
    assert not any(c.is_default for c in plain.legal), "no default is invented"


def test_the_default_stays_where_overrides_leave_it_out() -> None:
    found = candidates(TOY, problem(), V6E, {"block_q": (128,)})
    assert found.legal[0].is_default
    assert found.legal[0].config["block_q"] == 512
    assert blocks(found, "block_q") == {128, 512}


def test_an_illegal_default_is_kept_with_its_reason() -> None:
    bad = {**config_kernels.DEFAULT, "block_kv": 384, "block_kv_compute": 256}
    found = candidates(toy(default=lambda p, d: bad), problem(), V6E)
    assert not any(c.is_default for c in found.legal)
    first = found.illegal[0]
    assert first.candidate.is_default
    assert first.reason == "block_kv_compute 256 does not divide block_kv 384"


def test_blocks_longer_than_the_axis_are_one_candidate() -> None:
    """Field report B7: 128, 256 and 512 on an axis of 128."""
    found = candidates(TOY, problem(q_len=128, kv_len=128), V6E)
    assert blocks(found, "block_q") == {128}
    assert len(found.legal) == len({c.json for c in found.legal}) == 4  # fused x order


def test_null_for_the_compute_block_is_no_second_row() -> None:
    """Field report B5: compute must divide the fetched block; null is that block."""
    overrides = {"block_kv": (384,), "block_kv_compute": (None, 128, 256, 384)}
    found = candidates(toy(default=None), problem(), V6E, overrides)
    assert blocks(found, "block_kv_compute") == {128, 384}
    assert {i.reason for i in found.illegal} == {
        "block_kv_compute 256 does not divide block_kv 384"
    }
    assert len(found.illegal) == 3 * 2 * 2, "each illegal point is kept: block_q x fused x order"


def test_the_order_is_that_of_the_product_on_every_run() -> None:
    first, second = (candidates(TOY, problem(), V6E) for _ in range(2))
    assert first == second
    configs = [c.config for c in candidates(toy(default=None), problem(), V6E).legal]
    assert [c["order"] for c in configs[:4]] == ["qk", "kq", "qk", "kq"], (
        "the last tunable is fastest"
    )
    assert configs == sorted(configs, key=lambda c: c["block_q"]), "the first is slowest"  # type: ignore[arg-type,return-value]


def test_a_product_too_large_is_refused_before_it_is_made() -> None:
    started = time.monotonic()
    overrides = {
        "block_q": tuple(range(128, 128 * 2001, 128)),
        "block_kv": tuple(range(128, 128 * 2001, 128)),
    }
    with pytest.raises(InputError) as error:
        candidates(TOY, problem(), V6E, overrides)
    assert str(error.value) == (
        "space: 32000000 combinations (block_q 2000 x block_kv 2000 x block_kv_compute 2 x fused 2 "
        "x order 2 x vmem_limit_bytes 1); at most 50000: narrow a tunable"
    )
    assert time.monotonic() - started < 1


def test_overrides_that_leave_no_legal_candidate_are_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(
        "device: v6e\nproblems:\n- kernel: config_kernels:KERNEL\n"
        "  shape: {q_heads: 8, kv_heads: 2, q_len: 512, kv_len: 512}\n"
        "  space: {block_kv: 384, block_kv_compute: 256}\n"
    )
    (spec,) = config.load("x.yaml").problems
    with pytest.raises(InputError) as error:
        space.of(spec)
    assert str(error.value) == (
        "x.yaml:5: problems[0].space: leaves no legal candidate: block_kv=384 "
        "block_kv_compute=256: block_kv_compute 256 does not divide block_kv 384 (and 11 more)"
    )


def test_a_pinned_block_that_suits_no_usual_partner_takes_the_defaults() -> None:
    def tunables(problem: Problem, device: Any) -> dict[str, Tunable]:
        compute = Tunable(values=(256,))
        return {**TOY.tunables(problem, device), "block_kv_compute": compute}

    default = {**config_kernels.DEFAULT, "block_kv": 128, "block_kv_compute": 128}
    kernel = toy(tunables=tunables, default=lambda p, d: default)
    found = candidates(kernel, problem(), V6E, {"block_kv": (256, 384)})
    pairs = {(c.config["block_kv"], c.config["block_kv_compute"]) for c in found.legal}
    assert pairs == {(128, 128), (256, 256), (384, 128)}, "only 384 needs the default's 128"
    assert {i.candidate.config["block_kv"] for i in found.illegal} == {384}


def test_a_kernel_with_no_legal_point_of_its_own_is_no_input_error() -> None:
    none = toy(illegal=lambda p, c, d: None if c["block_q"] == 1024 else "too small", default=None)
    found = candidates(none, problem(), V6E)
    assert found.legal == ()
    assert len(found.illegal) == 3 * 3 * 2 * 2, "every distinct point has its reason"


def test_values_that_only_look_equal_are_two_candidates() -> None:
    """Field report O8: True is not 1, and 128 is not "128"."""
    tunables = {"x": Tunable(values=(1, True, "1", None))}
    kernel = toy(
        tunables=lambda p, d: tunables, canonical=lambda p, c: c, illegal=lambda p, c, d: None,
        default=None,
    )  # fmt: skip
    found = candidates(kernel, problem(), V6E)
    assert [c.config["x"] for c in found.legal] == [1, True, "1", None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"default": lambda p, d: {"block_q": 1}}, "canonical raised KeyError: 'block_kv'"),
        ({"canonical": lambda p, c: {"x": 1}}, "kernel toy: canonical gave ['x'], its "),
        ({"canonical": lambda p, c: {**c, "order": [1]}}, "config entry order=[1] is not a scalar"),
        ({"illegal": lambda p, c, d: 1 / 0}, "kernel toy: illegal raised ZeroDivisionError: "),
        ({"tunables": lambda p, d: p.shape["x"]}, "the problem's shape has no 'x', only q_heads, "),
        ({"tunables": lambda p, d: {"bm": (1, 2)}}, "tunable bm is [1, 2], not a Tunable(values="),
    ],
)  # fmt: skip
def test_a_kernel_that_breaks_its_contract_is_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(KernelError) as error:
        candidates(toy(**changes), problem(), V6E)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_every_shipped_problem_has_its_default_and_a_space_of_known_size() -> None:
    for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")):
        for spec in config.load(path).problems:
            found = space.of(spec)
            label = f"{path.name} {spec.problem.label} on {spec.problem.device}"
            refused = [i.reason for i in found.illegal if i.candidate.is_default]
            if load(spec.problem.kernel).default is not None:
                assert found.legal[0].is_default or "SMEM" in refused[0], f"{label}: {refused}"
            assert 2 <= len(found.legal) <= 2000, f"{label}: {len(found.legal)} candidates"
            assert all(isinstance(c, Candidate) for c in found.legal)
