"""What lookups know of the built-in kernels without their import is what the kernels say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from boards import row, store

from autotune import device as devices
from autotune.errors import InputError, KernelError, NoResultError
from autotune.kernels import base
from autotune.kernels.base import Kernel
from autotune.kernels.registry import REGISTRY
from autotune.lookup import best_config, forget, library
from autotune.lookup.built_in import BUILT_IN
from autotune.lookup.library import Stored
from autotune.lookup.query import misfit
from autotune.problem import Problem
from autotune.stored import problem_of

ATTENTION = {"q_heads": 8, "kv_heads": 8, "q_len": 512, "kv_len": 512, "head_dim_qk": 128,
             "head_dim_v": 128}  # fmt: skip
PAGED = {"q_heads": 8, "kv_heads": 8, "kv_len": 512, "head_dim": 128}
MATMUL = {"m": 512, "k": 512, "n": 512}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.0, 0.5, -0.5, 30, 1e30, 1e39, float("inf"), float("nan"),
    10**400, "", "yes", "none", "gelu", "relu", "bfloat16", "float32", "int8", "float8_e5m2",
    "backward", "bthd", "bhtd", [], [1], [256, 256], [0.5], [True], [-1, 513], {}, {"causal": {}},
    {"full": {}}, {"local": {"left": 64}}, {"local": {}}, {"all": [{"full": {}}, {"causal": {}}]},
]  # fmt: skip
LENGTHS = (1, 128, 192, 576, 1000, 1024, 1536, 2048, 4080, 4096, 4224, 8192)
POOLS: dict[str, tuple[int, ...]] = {
    "m": (8, 100, 576, 1000, 1024, 1536, 4096, 8000, 8192),
    "k": (64, 128, 192, 576, 1024, 1408, 4096, 4224, 7168),
    "n": (64, 128, 576, 1024, 1152, 1728, 4096, 13824),
    "groups": (1, 8),
    "batch": (1, 2, 3, 32),
    "q_heads": (8, 24),
    "kv_heads": (1, 2, 3, 8, 24),
    "q_len": LENGTHS,
    "kv_len": LENGTHS,
    "head_dim_qk": (128,),
    "head_dim_v": (128,),
    "head_dim": (128,),
    "page_size": (16, 64),
}
ASKED: dict[str, list[dict[str, Any]]] = {
    "splash": [{}, {"mask": {"full": {}}}],
    "jax.splash": [{}, *3 * [{"grad": True}]],  # of whose configs few are legal
    "jax.flash": [{}, {"causal": True}, {"segment_ids": True}],
    "tokamax.splash": [{}, {"grad": True}],
}
"""Options on which the rules for blocks depend."""


@pytest.fixture(autouse=True)
def nothing_read_yet() -> Iterator[None]:
    forget()
    yield
    forget()


def loaded(name: str) -> Kernel:
    try:
        return base.load(name)
    except InputError:
        pytest.skip(f"{name} is of another project, which is not installed")


def shape_of(kernel: Kernel) -> dict[str, int]:
    known = {**ATTENTION, **PAGED, **MATMUL, "groups": 2}
    return {axis: known[axis] for axis in kernel.axes if axis not in kernel.axis_defaults}


def test_every_built_in_kernel_is_known() -> None:
    assert set(BUILT_IN) == set(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_axes_and_dtypes_and_options_are_the_kernels(name: str) -> None:
    kernel, facts = loaded(name), BUILT_IN[name]
    assert sorted(facts.axes) == sorted(kernel.axes)
    assert dict(facts.axis_defaults) == dict(kernel.axis_defaults)
    assert sorted(facts.dtypes) == sorted(kernel.dtypes)
    assert sorted(facts.options) == sorted(kernel.options)
    for option, form in facts.options.items():
        assert form.default == kernel.options[option].default, option


def parsed(parse: Any, value: Any) -> tuple[type, Any]:
    try:
        found = parse(value)
    except ValueError as error:
        return ValueError, str(error)
    return type(found), found


@pytest.mark.parametrize("name", REGISTRY)
def test_values_of_options_are_taken_and_refused_as_by_the_kernel(name: str) -> None:
    kernel = loaded(name)
    for option, form in BUILT_IN[name].options.items():
        for value in VALUES:
            theirs = parsed(kernel.options[option].parse, value)
            assert parsed(form.parse, value) == theirs, (option, value)


@pytest.mark.parametrize("name", REGISTRY)
def test_what_was_swept_with_an_option_is_found_with_it(name: str, tmp_path: Path) -> None:
    """`logit_soft_cap: 0` sweeps under the key of null."""
    kernel, shape = loaded(name), {**shape_of(loaded(name))}
    asked, stored = 0, set()
    for option in kernel.options:
        for value in VALUES:
            try:
                about = base.make_problem(
                    kernel, device="v6e", shape=shape, options={option: value}
                )
            except (InputError, KernelError):
                continue
            if about.key not in stored:
                stored.add(about.key)
                store(tmp_path, row(about, {}, 1.0))
                forget()
            found = best_config(name, shape, device="v6e", options={option: value},
                                results=tmp_path)  # fmt: skip
            assert found.found.problem_key == about.key, (option, value)
            asked += 1
    assert asked > len(kernel.options), "every option has two values at least"


def test_a_soft_cap_of_0_is_one_that_is_off_and_a_negative_one_is_bad_input(tmp_path: Path) -> None:
    kernel = base.load("flash_fwd")
    about = base.make_problem(kernel, device="v6e", shape=ATTENTION, options={"causal": True})
    store(tmp_path, row(about, {"block_q": 1}, 1.0))

    def ask(cap: Any) -> dict[str, Any]:
        return best_config("flash_fwd", ATTENTION, device="v6e", results=tmp_path,
                           options={"causal": True, "logit_soft_cap": cap})  # fmt: skip

    assert ask(0) == ask(0.0) == ask(None) == {"block_q": 1}
    with pytest.raises(InputError, match="logit_soft_cap: -1 is not allowed; a positive number"):
        ask(-1)


def test_an_axis_left_out_has_the_kernels_default_size(tmp_path: Path) -> None:
    kernel = base.load("jax.paged_attention")
    for page_size, pages in ((16, 4), (1, 8)):
        about = base.make_problem(kernel, device="v6e", shape={**PAGED, "page_size": page_size})
        store(tmp_path, row(about, {"pages_per_compute_block": pages}, 1.0))
    ask = lambda shape: best_config(kernel.name, shape, device="v6e", results=tmp_path)
    assert ask(PAGED)["pages_per_compute_block"] == 4
    assert ask({**PAGED, "page_size": 1})["pages_per_compute_block"] == 8


def test_a_dtype_that_the_kernel_or_the_chip_does_not_multiply_is_bad_input(tmp_path: Path) -> None:
    for name, shape, device, told in (
        ("flash_fwd", ATTENTION, "v6e", "flash_fwd on v6e takes bfloat16, float32"),
        ("matmul", MATMUL, "v4", "matmul on v4 takes bfloat16, float32"),
    ):
        with pytest.raises(InputError, match=f"dtype: 'int8' is not allowed; {told}"):
            best_config(name, shape, device=device, dtype="int8", results=tmp_path)


def drawn(kernel: Kernel, device: str, options: dict[str, Any], draw: random.Random) -> Problem:
    """A possible problem, half of whose axes are those of the last one drawn."""
    while True:
        shape = {axis: draw.choice(POOLS[axis]) for axis in kernel.axes}
        if kernel.name.startswith("jax.flash"):
            shape["kv_heads"] = shape["q_heads"]
        try:
            return base.make_problem(kernel, device=device, shape=shape, options=options)
        except InputError:
            continue


def configs(kernel: Kernel, problem: Problem, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Legal ones, as a leaderboard has them."""
    device = devices.get(problem.device)
    tunables = kernel.tunables(problem, device)
    tried = [{name: draw.choice(t.values) for name, t in tunables.items()} for _ in range(8)]
    if kernel.default is not None:
        tried.append(dict(kernel.default(problem, device)))
    for config in tried:
        config = dict(kernel.canonical(problem, config))
        if refusal(kernel, problem, config) is None:
            yield config


def refusal(kernel: Kernel, problem: Problem, config: Mapping[str, Any]) -> str | None:
    """Why the kernel does not run `config`, by any of its own rules."""
    device = devices.get(problem.device)
    if reason := kernel.illegal(problem, dict(config), device):
        return reason
    tunables = kernel.tunables(problem, device)
    refused = ((name, tunables[name].check(config[name])) for name in config if name in tunables)
    return next((f"{name}: {reason}" for name, reason in refused if reason), None)


def changed(kernel: Kernel, stored: Problem, draw: random.Random) -> Problem | None:
    """The stored problem with one or two axes of another size, where that is a possible one."""
    shape = dict(stored.shape)
    for axis in draw.sample(kernel.axes, draw.choice((1, 2))):
        times = (shape[axis] * 2, shape[axis] * 3, max(1, shape[axis] // 2))
        shape[axis] = draw.choice((*POOLS[axis], *times))
    try:
        return base.make_problem(
            kernel, device=stored.device, shape=shape, options=stored.options, dtype=stored.dtype
        )
    except InputError:
        return None


@pytest.mark.parametrize("name", REGISTRY)
def test_a_config_that_fits_another_shape_is_legal_there_by_the_kernels_own_rules(
    name: str,
) -> None:
    kernel, draw = loaded(name), random.Random(name)
    fitting = refused = 0
    for _ in range(80):
        device = draw.choice(("v6e", "v5p", "tpu7x"))
        about = drawn(kernel, device, draw.choice(ASKED.get(name, [{}])), draw)
        for config in configs(kernel, about, draw):
            stored = Stored(row=row(about, config, 1.0), shape=about.shape, options={},
                            dtype=about.dtype, config=config, path="", stamp=None)  # fmt: skip
            for _ in range(6):
                asked = changed(kernel, about, draw)
                if asked is None:
                    continue
                if misfit(asked.shape, stored) is not None:
                    refused += 1
                    continue
                fitting += 1
                assert refusal(kernel, asked, config) is None, (config, about.shape, asked.shape)
    assert fitting > 50, "a rule that refuses everything proves nothing"
    assert refused > 10, "nor do shapes that everything fits"


REPORTED: list[tuple[str, dict[str, int], dict[str, int], dict[str, Any], str | None]] = [
    ("jax.paged_attention", {"kv_len": 4096}, {"kv_len": 4080}, {"pages_per_compute_block": 64},
     "its pages_per_compute_block 64 does not divide pages a sequence = 255"),
    ("jax.paged_attention", {"kv_heads": 8}, {"q_heads": 9, "kv_heads": 3},
     {"pages_per_compute_block": 4, "megacore_mode": "kv_head"},
     "its megacore_mode kv_head needs an even kv_heads, not 3"),
    ("jax.ragged_paged_attention", {"kv_len": 4096}, {"kv_len": 128},
     {"num_kv_pages_per_block": 16}, "16 is larger than pages a sequence = 8"),
    ("jax.gmm", {"m": 8192}, {"m": 8000}, {"tile_m": 1024}, "tile_m 1024 does not divide m = 8000"),
    ("jax.matmul", {"k": 4096}, {"k": 4224}, {"block_k": 1024}, "1024 does not divide k = 4224"),
    ("matmul", {"n": 576}, {"n": 13824}, {"bn": 576},
     "its bn 576 is neither a multiple of 128 nor all of n"),
    ("matmul", {"k": 7168}, {"k": 7168, "m": 1024}, {"bm": 512, "bk": 2048}, None),
    ("matmul", {"n": 1000}, {"n": 2000}, {"bn": 1000},
     "its bn 1000 is neither a multiple of 128 nor all of n"),
    ("jax.splash", {}, {"q_len": 768}, {"block_q": 256, "block_kv": 512, "block_q_dkv": 512},
     "its block_q_dkv 512 does not divide q_len = 768"),
    ("flash_fwd", {}, {"q_len": 1000}, {"block_q": 512, "block_kv": 512},
     "its block_q 512 does not divide q_len = 1000"),
    ("splash", {}, {"kv_len": 1000}, {"block_q": 512, "block_kv": 256},
     "its block_kv 256 does not divide kv_len = 1000"),
    ("flash_dkv", {}, {"kv_len": 1000}, {"block_q_major": 512, "block_kv_major": 512},
     "its block_kv_major 512 does not divide kv_len = 1000"),
    ("splash", {}, {"q_len": 65536, "kv_len": 65536}, {"block_q": 128, "block_kv": 128},
     "its table of 262144 blocks may take 4194304 bytes of SMEM, more than there is"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stored", "asked", "config", "told"), REPORTED)
def test_nearest_gives_no_block_that_the_kernel_refuses(
    name: str, stored: dict[str, int], asked: dict[str, int], config: dict[str, Any],
    told: str | None, tmp_path: Path,
) -> None:  # fmt: skip
    kernel, shape = base.load(name), shape_of(base.load(name))
    about = base.make_problem(kernel, device="v6e", shape={**shape, **stored})
    store(tmp_path, row(about, config, 1.0))
    asked = {**shape, **stored, **asked}
    ask = lambda: best_config(name, asked, device="v6e", results=tmp_path, on_miss="nearest")
    if told is None:
        assert ask() == config
        assert "suit the asked shape by the kernel's rules" in (ask().found.reason or "")
    else:
        with pytest.raises(NoResultError) as error:
            ask()
        assert "the nearest does not fit: its" in str(error.value)
        assert told in str(error.value)


@pytest.mark.nightly
def test_nearest_on_the_shipped_results_gives_nothing_illegal() -> None:
    results, draw = Path(__file__).parent.parent / "results", random.Random(0)
    shelves = library.opened(str(results)).shelves
    answered: Counter[str] = Counter()
    for each in (s for shelf in shelves.values() for s in draw.sample(shelf, min(len(shelf), 12))):
        kernel, about = problem_of(each.row)
        for _ in range(9):
            asked = changed(kernel, about, draw)
            if asked is None:
                continue
            try:
                found = best_config(kernel.name, asked.shape, device=asked.device,
                                    options=asked.options, results=results,
                                    on_miss="nearest")  # fmt: skip
            except NoResultError:
                continue
            answered[kernel.name] += 1
            assert refusal(kernel, asked, found) is None, (dict(found), asked.shape)
    assert set(answered) == {kernel for kernel, _, _ in shelves}, answered
