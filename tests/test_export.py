"""Exports: loaded by the real library where it is installed, and nothing lost unseen."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from boards import problem, row, store, store_matmul
from ruamel.yaml import YAML
from test_cli import call

from autotune import export as exports
from autotune.export import Entry
from autotune.export.entry import WIDTH, CannotExpressError
from autotune.kernels import base

SHAPE = {
    "batch": 4, "q_heads": 16, "kv_heads": 16, "q_len": 4096, "kv_len": 4096, "head_dim_qk": 128,
    "head_dim_v": 128,
}  # fmt: skip
LAYOUTS = {"q_layout": "HEAD_DIM_MINOR", "k_layout": "SEQ_MINOR", "v_layout": "HEAD_DIM_MINOR"}
SPLASH = {"block_q": 1024, "block_kv": 2048, "block_kv_compute": 512, **LAYOUTS}
GRAD = {
    **SPLASH, "block_q_dkv": 512, "block_kv_dkv": 1024, "block_kv_dkv_compute": 512,
    "block_q_dq": 512, "block_kv_dq": 1024, "use_fused_bwd_kernel": False,
}  # fmt: skip
FLASH = {"block_q": 512, "block_k_major": 1024, "block_k": 512, "block_b": 1}
FLASH_DQ = {"block_q_dq": 512, "block_k_major_dq": 1024, "block_k_dq": 512}
FLASH_DKV = {
    "block_q_major_dkv": 1024, "block_q_dkv": 512, "block_k_major_dkv": 1024, "block_k_dkv": 512,
}  # fmt: skip
OWN_DQ = {"block_q_major": 512, "block_kv_major": 2048, "block_kv": 1024}
OWN_DKV = {"block_q_major": 1024, "block_q": 512, "block_kv_major": 2048, "block_kv": 1024}
OWN = {
    "block_q": 512, "block_kv": 1024, "block_q_compute": 512, "block_kv_compute": 512,
    "vmem_limit_bytes": None,
}  # fmt: skip
TOKAMAX = {
    "block_q": 1024, "block_kv": 1024, "block_kv_compute": 512, "q_layout": 1, "k_layout": 2,
    "v_layout": 1, "use_base2_exp": True, "use_experimental_scheduler": True,
}  # fmt: skip
TOKAMAX_BACKWARD = {
    "block_q_dkv": 2048, "block_kv_dkv": 2048, "block_kv_dkv_compute": 512, "use_base2_exp": True,
    "dq_reduction_steps": None, "q_layout": 1, "k_layout": 1, "v_layout": 1,
}  # fmt: skip


def keep(results: Path, kernel: str, config: dict[str, Any], **about: Any) -> None:
    columns = {n: about.pop(n) for n in ("samples_ms", "evidence") if n in about}
    asked = problem(kernel, {**SHAPE, **about.pop("shape", {})}, **{"name": kernel, **about})
    store(results, row(asked, config, 1.5, **columns))


def entry(kernel: str, config: dict[str, Any], **about: Any) -> Entry:
    asked = problem(kernel, {**SHAPE, **about.pop("shape", {})}, name="a", **about)
    return Entry(row=row(asked, config, 1.5), shape=asked.shape, options=asked.options,
                 dtype=asked.dtype, config=config)  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    status, out, err = call(capsys, "export", *arguments)
    assert status == 0, err
    return out, err


def sizes_of(text: str) -> Any:
    """The expression's value, with what the import that stands above it as a comment brings."""
    (line,) = (line for line in text.splitlines() if line.startswith("# from "))
    names: dict[str, Any] = {}
    exec(line.removeprefix("# "), names)
    return eval(text, names)


@pytest.mark.parametrize("config", [SPLASH, GRAD], ids=["forward", "grad"])
def test_jaxs_splash_loads_in_jax_with_every_field(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "jax.splash", config, options={"grad": config is GRAD})
    out, err = run(capsys, "jax", str(tmp_path))
    sizes = sizes_of(out)
    for name, value in config.items():
        got = getattr(sizes, name)
        assert (got.name if "layout" in name else got) == value
    assert sizes.has_backward_blocks == (config is GRAD)
    assert "1.500 ms compiled" in out
    assert not err


@pytest.mark.parametrize("target", ["jax", "maxtext"])
def test_no_line_is_longer_than_a_screen_whatever_the_mask(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = {"all": [{"causal": {}}, {"documents": {"lengths": [32] * 128}}]}
    name = "training, forward and backward passes of packed documents, by splash attention"
    keep(tmp_path, "jax.splash", GRAD, options={"mask": mask, "grad": True}, name=name)
    out, _ = run(capsys, target, str(tmp_path))
    assert max(map(len, out.splitlines())) <= WIDTH
    comments = " ".join(line.lstrip("# ") for line in out.splitlines() if line.startswith("#"))
    assert f"mask={json.dumps(mask)}" in comments, "nothing is left out"
    if target == "jax":
        assert sizes_of(out).block_q_dkv == 512
        compile(out, "block_sizes.py", "exec")


def test_a_fused_backward_pass_has_no_dq_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = {**GRAD, "use_fused_bwd_kernel": True, "block_q_dq": None, "block_kv_dq": None}
    keep(tmp_path, "jax.splash", fused, options={"grad": True})
    sizes = sizes_of(run(capsys, "jax", str(tmp_path))[0])
    assert sizes.use_fused_bwd_kernel
    assert sizes.has_backward_blocks
    settings = YAML(typ="safe").load(run(capsys, "maxtext", str(tmp_path))[0])
    assert settings["sa_use_fused_bwd_kernel"] is True
    assert "sa_block_q_dq" not in settings


def test_the_three_boards_of_jaxs_flash_are_one_expression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "jax.flash", FLASH, options={"causal": True})
    sizes = sizes_of(run(capsys, "jax", str(tmp_path))[0])
    assert not sizes.has_backward_blocks
    keep(tmp_path, "jax.flash_dq", FLASH_DQ, options={"causal": True})
    out, err = run(capsys, "jax", str(tmp_path))
    assert not sizes_of(out).has_backward_blocks
    assert err.startswith("autotune: not exported: jax.flash_dq (jax.flash_dq) on v6e: BlockSizes")
    assert "both dq and dkv, or of neither" in err
    keep(tmp_path, "jax.flash_dkv", FLASH_DKV, options={"causal": True})
    sizes = sizes_of(run(capsys, "jax", str(tmp_path))[0])
    assert sizes.has_backward_blocks
    for name, value in {**FLASH, **FLASH_DQ, **FLASH_DKV}.items():
        assert getattr(sizes, name) == value


def test_of_two_forwards_of_one_problem_the_second_is_refused_not_lost() -> None:
    found = [entry("jax.flash", {**FLASH, "block_q": block_q}, options={"save_residuals": saved})
             for block_q, saved in ((256, False), (512, True))]  # fmt: skip
    made = exports.export("jax", found)
    assert "block_q=256" in made.files["block_sizes.py"]
    assert 'BlockSizes has one forward; that with {"save_residuals": false}' in made.refused[0]


def test_backward_blocks_without_a_forward_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "flash_fwd", {**OWN, "block_q_compute": 256})
    keep(tmp_path, "flash_dq", OWN_DQ)
    status, out, err = call(capsys, "export", "jax", str(tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "flash_fwd (flash_fwd) on v6e: its block_q_compute is 256" in err
    assert "flash_dq (flash_dq) on v6e: BlockSizes needs the blocks of the forward pass too" in err


def test_this_projects_kernels_are_exported_where_the_blocks_mean_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "flash_fwd", OWN)
    keep(tmp_path, "flash_dq", OWN_DQ)
    keep(tmp_path, "flash_dkv", OWN_DKV)
    sizes = sizes_of(text := run(capsys, "jax", str(tmp_path))[0])
    assert (sizes.block_q, sizes.block_k_major, sizes.block_k, sizes.block_b) == (512, 1024, 512, 1)
    assert (sizes.block_q_dq, sizes.block_k_major_dq, sizes.block_k_dq) == (512, 2048, 1024)
    assert (sizes.block_q_major_dkv, sizes.block_q_dkv) == (1024, 512)
    assert (sizes.block_k_major_dkv, sizes.block_k_dkv) == (2048, 1024)
    assert "# Tuned on flash_dkv, flash_dq, flash_fwd: the same blocks of another kernel." in text
    assert sizes_of(run(capsys, "jax", str(_only(tmp_path, "splash", OWN)))[0]).block_kv == 1024


def _only(tmp_path: Path, kernel: str, config: dict[str, Any]) -> Path:
    keep(tmp_path / kernel, kernel, config)
    return tmp_path / kernel


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_q_compute": 256}, "block_q_compute is 256; JAX's kernel has no such tunable"),
        ({"partial_mask": "stored"}, 'partial_mask is "stored"; JAX\'s kernel chooses by'),
        ({"block_q": 768, "block_q_compute": 768}, "block_q 768 does not divide q_len 4096"),
        ({"block_kv_compute": 384}, "384 is no multiple of 128 that divides 1024"),
        ({"block_kv_compute": 64}, "64 is no multiple of 128 that divides 1024"),
        ({"block_q": None}, "its block_q is null, not a block size"),
    ],
)
def test_blocks_that_mean_something_else_are_refused_with_the_reason(
    change: dict[str, Any], told: str
) -> None:
    made = exports.export("jax", [entry("splash", {**OWN, **change})])
    assert not made.files
    assert told in made.refused[0]


UNKNOWN = {
    "jax.splash": SPLASH, "jax.flash": FLASH, "splash": OWN, "flash_fwd": OWN,
    "tokamax.splash": TOKAMAX,
}  # fmt: skip


@pytest.mark.parametrize("kernel", UNKNOWN)
@pytest.mark.parametrize("target", ["jax", "maxtext", "tokamax"])
def test_no_target_drops_a_tunable_it_does_not_know(kernel: str, target: str) -> None:
    here = entry(kernel, UNKNOWN[kernel])
    plain = exports.export(target, [here])
    null = exports.export(target, [dataclasses.replace(here, config={**here.config, "new": None})])
    assert null == plain, "a null is the kernel's own choice, which nothing loses"
    odd = exports.export(target, [dataclasses.replace(here, config={**here.config, "new": 7})])
    assert not odd.files
    assert bool(plain.refused) != ("its new is 7; " in odd.refused[0])


@pytest.mark.parametrize(
    ("kernel", "config"),
    [("flash_dq", OWN_DQ), ("flash_dkv", OWN_DKV), ("jax.flash_dq", FLASH_DQ),
     ("jax.flash_dkv", FLASH_DKV)],
)  # fmt: skip
def test_nor_does_a_backward_pass(kernel: str, config: dict[str, Any]) -> None:
    limited = entry(kernel, {**config, "vmem_limit_bytes": 1 << 26})
    told = "its vmem_limit_bytes is 67108864; JAX's kernel has no such tunable"
    assert told in exports.export("jax", [limited]).refused[0]


def test_nor_does_a_tokamax_backward_pass_or_its_diagonal_grid() -> None:
    backward = entry("tokamax.splash", {**TOKAMAX_BACKWARD, "new": 7}, options={"pass": "backward"})
    grid = entry("tokamax.splash", {**TOKAMAX, "qk_diag_grid": 4})
    for target in ("maxtext", "tokamax"):
        first, second = exports.export(target, [backward, grid]).refused
        assert "its new is 7" in first
        assert "its qk_diag_grid is 4" in second


@pytest.mark.parametrize(
    ("kernel", "about", "told"),
    [
        ("flash_fwd", {"options": {"logit_soft_cap": 30.0}}, "has logit_soft_cap=30.0; JAX's"),
        ("flash_fwd", {"options": {"max_logit_const": 0.0}}, "has max_logit_const=0.0; JAX's"),
        ("flash_dq", {"options": {"out_dtype": "float32"}}, 'has out_dtype="float32"; JAX\'s'),
        ("flash_fwd", {"shape": {"head_dim_qk": 192}}, "head_dim_qk 192 is not its head_dim_v 128"),
        ("flash_fwd", {"shape": {"head_dim_qk": 192, "head_dim_v": 192}}, "192 is no multiple of"),
        ("flash_fwd", {"shape": {"q_len": 2048}, "options": {"causal": True}},
         "q_len 2048 is not its kv_len 4096; there queries then see other keys"),
        ("splash", {"options": {"max_logit_const": 10.0}}, "has max_logit_const=10.0; JAX's spl"),
    ],
)  # fmt: skip
def test_a_problem_that_jax_s_kernel_cannot_run_is_refused(
    kernel: str, about: dict[str, Any], told: str
) -> None:
    made = exports.export("jax", [entry(kernel, OWN_DQ if kernel == "flash_dq" else OWN, **about)])
    assert not made.files
    assert told in made.refused[0]


def test_what_changes_no_output_is_no_reason_to_refuse() -> None:
    options = {"use_exp2": True, "residuals": True, "scale": 0.5, "out_dtype": "bfloat16"}
    wide = entry("flash_fwd", OWN, options=options, shape={"q_len": 2048})
    capped = entry("splash", {**OWN, "partial_mask": "computed"}, options={"logit_soft_cap": 30.0})
    assert exports.export("jax", [wide, capped]).refused == ()


def test_backward_blocks_join_the_forward_of_their_own_scale_and_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"kv_heads": 4}
    keep(tmp_path, "flash_fwd", OWN, options={"scale": 0.5}, shape=heads, name="other")
    keep(tmp_path, "flash_fwd", OWN, options={"scale": 0.25}, shape=heads, name="own")
    keep(tmp_path, "flash_dq", OWN_DQ, options={"scale": 0.25}, shape=heads)
    keep(tmp_path, "flash_dkv", OWN_DKV, options={"scale": 0.25}, shape=heads)
    texts = run(capsys, "jax", str(tmp_path))[0].split("\n\n")
    own, other = sorted(texts, key=len, reverse=True)
    assert ("# own (flash_fwd)" in own, "# other (flash_fwd)" in other) == (True, True)
    assert [sizes_of(text).has_backward_blocks for text in (own, other)] == [True, False]


def test_jax_s_flash_attention_takes_what_is_exported_of_grouped_queries_as_the_comment_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    for kernel, config in (("flash_fwd", OWN), ("flash_dq", OWN_DQ), ("flash_dkv", OWN_DKV)):
        keep(tmp_path, kernel, config, options={"causal": True}, shape={"kv_heads": 4})
    text, err = run(capsys, "jax", str(tmp_path))
    assert not err
    assert "# It takes a key head a query head: repeat those of k and v 4 times." in text
    sizes = sizes_of(text)
    q = jax.ShapeDtypeStruct((4, 16, 4096, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((4, 4, 4096, 128), jnp.bfloat16)

    def loss(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, 4, axis=1) for x in (k, v))
        return flash_attention(q, k, v, causal=True, block_sizes=sizes).astype(jnp.float32).sum()

    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, k, k)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_what_a_target_cannot_express_is_listed_and_the_rest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "jax.splash", SPLASH)
    store_matmul(tmp_path, 512, 512, 512, about={"name": "up"})
    reasons = {
        "jax": "JAX's flash and splash attention have no matmul in them",
        "maxtext": "MaxText's sa_ settings are of splash, not matmul",
    }
    for target, told in reasons.items():
        out, err = run(capsys, target, str(tmp_path))
        assert "block_q" in out
        assert err == f"autotune: not exported: up (matmul) on v6e: {told}\n"


def test_maxtexts_settings_are_those_of_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "jax.splash", GRAD, options={"grad": True})
    settings = YAML(typ="safe").load(run(capsys, "maxtext", str(tmp_path))[0])
    assert settings == {
        "sa_block_q": 1024, "sa_block_kv": 2048, "sa_block_kv_compute": 512,
        "sa_block_q_dkv": 512, "sa_block_kv_dkv": 1024, "sa_block_kv_dkv_compute": 512,
        "sa_block_q_dq": 512, "sa_block_kv_dq": 1024, "sa_use_fused_bwd_kernel": False,
        "sa_q_layout": "HEAD_DIM_MINOR", "sa_k_layout": "SEQ_MINOR",
        "sa_v_layout": "HEAD_DIM_MINOR",
    }  # fmt: skip


def test_maxtext_runs_tokamaxs_splash_under_settings_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "tokamax.splash", TOKAMAX)
    keep(tmp_path, "jax.splash", SPLASH)
    text, _ = run(capsys, "maxtext", str(tmp_path))
    of_jax, of_tokamax = YAML(typ="safe").load_all(text)
    assert "use_tokamax_splash" not in of_jax
    assert of_tokamax == {
        "use_tokamax_splash": True, "sa_block_q": 1024, "sa_block_kv": 1024,
        "sa_block_kv_compute": 512, "sa_q_layout": "HEAD_DIM_MINOR", "sa_k_layout": "SEQ_MINOR",
        "sa_v_layout": "HEAD_DIM_MINOR", "use_splash_scheduler": True, "sa_use_base2_exp": True,
    }  # fmt: skip
    (fused,) = YAML(typ="safe").load_all(
        exports.export("maxtext", [entry("tokamax.splash", TOKAMAX_BACKWARD)]).files["maxtext.yml"]
    )
    assert fused["sa_use_fused_bwd_kernel"] is True, "its backward pass is always the fused one"
    unsaid = {name: value for name, value in GRAD.items() if name != "use_fused_bwd_kernel"}
    two_kernels = exports.export("maxtext", [entry("jax.splash", unsaid)]).files["maxtext.yml"]
    assert "sa_use_fused_bwd_kernel: false" in two_kernels
    stacked = entry("tokamax.splash", {**TOKAMAX, "num_stacked_q_heads": 2})
    assert "no setting for it" in exports.export("maxtext", [stacked]).refused[0]


@pytest.mark.parametrize("release", ["0.0.12", "0.0.17"])
def test_tokamaxs_cache_has_the_form_of_its_release(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "tokamax.splash", TOKAMAX, device="tpu7x", evidence="measured",
         samples_ms=[1.5, 1.6])  # fmt: skip
    out, _ = run(capsys, "tokamax", str(tmp_path), "--tokamax-release", release)
    ((arguments, configs),) = json.loads(out).items()
    ((config, times),) = configs.items()
    assert json.loads(config) == TOKAMAX
    assert times["evaluation_times_ms"] == [1.5, 1.6]
    assert times["metadata"]["evidence"] == "measured"
    asked = json.loads(arguments)
    assert (asked["q"], asked["k"]) == ("bf16[4,4096,16,128]", "bf16[4,4096,16,128]")
    assert asked["logits_scale"] == 0.08838834764831843, "to the last bit"
    assert asked["mask"] == {
        "bool_mask": None, "q_start": None, "q_end": None, "k_start": None, "k_end": None,
        **({"is_causal": True} if release == "0.0.12" else
           {"causal_mask": {"offset": 0, "window_size": None}}),
    }  # fmt: skip


def test_tokamaxs_cache_has_the_dtype_of_the_operands() -> None:
    wide = entry("tokamax.splash", TOKAMAX, dtype="float32")
    made = exports.export("tokamax", [wide], tokamax_release="0.0.17")
    ((arguments, _),) = json.loads(*made.files.values()).items()
    assert [json.loads(arguments)[name] for name in "qkv"] == ["f32[4,4096,16,128]"] * 3
    assert exports.export("tokamax", [wide], tokamax_release="0.0.12").refused


def test_several_caches_go_into_the_folders_tokamax_looks_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in ("v6e", "tpu7x"):
        keep(tmp_path, "tokamax.splash", TOKAMAX, device=device)
    keep(tmp_path, "tokamax.splash", TOKAMAX_BACKWARD, options={"pass": "backward"})
    status, out, err = call(capsys, "export", "tokamax", str(tmp_path))
    assert (status, out) == (2, "")
    assert "takes 3 files" in err
    folder = tmp_path / "cache"
    out, _ = run(capsys, "tokamax", str(tmp_path), "--output", str(folder))
    assert not out
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.json")) == [
        "tpu7x/pallas_mosaic_tpu_flash_attention.json",
        "tpu_v6_lite/pallas_mosaic_tpu_flash_attention.json",
        "tpu_v6_lite/pallas_mosaic_tpu_flash_attention_vjp.json",
    ]


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({}, {"grad": True}, "grad times both passes as one"),
        ({}, {"mask": {"local": {"left": 1, "right": None}}}, "its mask is"),
        ({}, {"max_logit_const": 30.0}, "no place for max_logit_const"),
        ({}, {"operand_layout": "bhtd"}, "bthd only"),
        ({"num_stacked_q_heads": 2}, {}, "its num_stacked_q_heads is 2"),
        ({"qk_diag_skip": True}, {}, "its qk_diag_skip is true"),
        ({"fuse_reciprocal": False}, {}, "its fuse_reciprocal is false"),
    ],
)
def test_what_tokamaxs_cache_has_no_field_for_is_refused(
    change: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    made = exports.export("tokamax", [entry("tokamax.splash", {**TOKAMAX, **change},
                                            options=options)])  # fmt: skip
    assert not made.files
    assert told in made.refused[0]


LOAD = """
import sys
import jax, jax.numpy as jnp
from importlib import metadata
from tokamax._src.autotuning import cache
from tokamax._src.ops.attention import pallas_mosaic_tpu as forward
from tokamax._src.ops.attention import pallas_mosaic_tpu_vjp as backward
folder = sys.argv[1]
read = lambda name: open(f"{folder}/tpu7x/pallas_mosaic_tpu_flash_attention{name}.json").read()
array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
op = forward.PallasMosaicTpuFlashAttention()
loaded = cache._get_cache_adapter(op).validate_json(read(""))
by_key = {op.bind(**k).autotuning_cache_key: v for k, v in loaded.items()}
q = array(4, 4096, 16, 128)
asked = op.bind(q, q, q, is_causal=True)
config = by_key[asked.autotuning_cache_key].fastest_config
assert (config.block_q, config.block_kv_compute, int(config.k_layout)) == (1024, 512, 2), config
assert config.use_experimental_scheduler is True
op = backward.PallasMosaicTpuFlashAttentionVjp()
((arguments, times),) = cache._get_cache_adapter(op).validate_json(read("_vjp")).items()
assert times.fastest_config.block_q_dkv == 2048
assert arguments["dout"].shape == (4, 4096, 16, 128), arguments
print(metadata.version("tokamax"))
"""


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is an extra")
def test_tokamax_loads_its_cache_and_finds_the_config_of_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    keep(results, "tokamax.splash", TOKAMAX, device="tpu7x")
    keep(results, "tokamax.splash", TOKAMAX_BACKWARD, device="tpu7x", options={"pass": "backward"})
    run(capsys, "tokamax", str(results), "--output", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "cache")],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_json_takes_every_board_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_matmul(tmp_path, 512, 512, 512, about={"name": "up"})
    keep(tmp_path, "flash_fwd", {**OWN, "block_q_compute": 256})
    document = json.loads(run(capsys, "json", str(tmp_path))[0])
    assert [c["kernel"] for c in document["configs"]] == ["flash_fwd", "matmul"]
    assert document["configs"][0]["config"]["block_q_compute"] == 256
    assert document["configs"][1]["problem"]["shape"] == {"m": 512, "k": 512, "n": 512}
    only = json.loads(run(capsys, "json", str(tmp_path), "--problem", "up", "--device", "v6e")[0])
    assert [c["problem_name"] for c in only["configs"]] == ["up"]


BAD = {
    "target": (["keras", "."], "'keras'"),
    "no results": (["jax", "gone"], "no results at gone"),
    "no match": (["jax", "r", "--problem", "x"], "no best config matching --problem 'x' in r"),
    "another device": (["jax", "r", "--device", "v4"], "matching --device 'v4' in r"),
    "device": (["jax", "r", "--device", "v9"], "unknown device 'v9'"),
    "nothing": (["maxtext", "r"], "nothing here can be exported to maxtext: up (matmul) on v6e: "),
    "release": (["tokamax", "r", "--tokamax-release", "9"], "--tokamax-release '9'"),
    "output": (["json", "r", "--output", "none/x"], "--output none/x cannot be written"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, told = BAD[case]
    monkeypatch.chdir(tmp_path)
    store_matmul(Path("r"), 512, 512, 512, about={"name": "up"})
    before = sorted(tmp_path.rglob("*"))
    status, out, err = call(capsys, "export", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert sorted(tmp_path.rglob("*")) == before


def test_real_boards_keys_are_the_names_the_exports_read() -> None:
    """The tunables of the kernels themselves, so that a renamed one is not lost unseen."""
    from autotune import device as devices

    shape = {k: v for k, v in SHAPE.items() if k != "batch"}
    chip = devices.get("v6e")
    for name in ("jax.splash", "jax.flash", "flash_fwd", "splash"):
        kernel = base.load(name)
        about = base.make_problem(kernel, device="v6e", shape=shape)
        assert kernel.default is not None
        config = dict(kernel.canonical(about, kernel.default(about, chip)))
        found = Entry(row=row(about, config, 1.0), shape=about.shape, options=about.options,
                      dtype=about.dtype, config=config)  # fmt: skip
        made = exports.export("jax", [found])
        assert not made.refused, made.refused


def test_a_refusal_is_an_error_of_its_own() -> None:
    with pytest.raises(CannotExpressError, match="its block_q is true"):
        entry("splash", {"block_q": True}).block("block_q")


@pytest.mark.parametrize(
    ("kernel", "config", "told"),
    [
        ("jax.splash", {**SPLASH, "block_q": 0}, "its block_q is 0, not a block size"),
        ("jax.splash", {**SPLASH, "block_kv": -128}, "its block_kv is -128, not a block size"),
        ("jax.splash", {**SPLASH, "block_kv_compute": 1.5}, "its block_kv_compute is 1.5, not a"),
        ("jax.splash", {**SPLASH, "q_layout": "X, y=1"}, "its q_layout is 'X, y=1', which is unk"),
        ("jax.splash", {**GRAD, "use_fused_bwd_kernel": "x"}, "its use_fused_bwd_kernel is 'x'"),
        ("flash_fwd", {**OWN, "block_q": 0}, "its block_q is 0, not a block size"),
        ("flash_fwd", {**OWN, "block_kv_compute": "z"}, "its block_kv_compute is 'z', not a block"),
        ("splash", {**OWN, "block_kv_compute": True}, "its block_kv_compute is true, not a block"),
    ],
)
@pytest.mark.parametrize("target", ["jax", "maxtext"])
def test_a_config_with_odd_values_is_refused_in_words(
    kernel: str, config: dict[str, Any], told: str, target: str
) -> None:
    made = exports.export(target, [entry(kernel, config)])
    assert not made.files
    if (kernel, target) != ("flash_fwd", "maxtext"):
        assert told in made.refused[0]


def test_a_problem_that_lacks_an_axis_is_refused_in_words() -> None:
    odd = dataclasses.replace(entry("flash_fwd", OWN), shape={"m": 1})
    assert exports.export("jax", [odd]).refused[0].endswith("its problem has no head_dim_qk")
    odd = dataclasses.replace(entry("tokamax.splash", TOKAMAX), shape={"m": 1})
    assert "its problem has no " in exports.export("tokamax", [odd]).refused[0]


def test_refusals_tell_apart_what_shares_a_name_and_say_what_would_narrow_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device, q_len in (("v6e", 1024), ("v6e", 2048), ("v5e", 1024), ("v5p", 1024)):
        keep(tmp_path, "flash_dq", {}, shape={"q_len": q_len}, device=device)
    status, _, err = call(capsys, "export", "tokamax", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "exported to tokamax: flash_dq (flash_dq) on v5e: " in err
    assert err.endswith("; tokamax takes tokamax.splash\n")
    assert "flash_dq (flash_dq) on v6e [batch=4 head_dim_qk=128 " in err
    assert "and 1 more, of which --device and --problem would leave fewer" in err


def test_a_problem_called_even_is_exported_without_uneven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "jax.splash", SPLASH, name="even")
    keep(tmp_path, "jax.splash", SPLASH, name="uneven", shape={"batch": 8})
    out, _ = run(capsys, "json", str(tmp_path), "--problem", "even")
    assert [c["problem_name"] for c in json.loads(out)["configs"]] == ["even"]
