"""docs/kernels.md names what the kernels take, search and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotune import device as devices
from autotune.kernels import base
from autotune.pallas_call import trace

TEXT = (Path(__file__).parent.parent / "docs/kernels.md").read_text()
SECTIONS = {
    "matmul": "matmul",
    "flash_fwd": "flash_fwd",
    "flash_dq": "flash_dq and flash_dkv",
    "flash_dkv": "flash_dq and flash_dkv",
    "splash": "splash",
}
ATTENTION = dict.fromkeys(("q_heads", "kv_heads"), 2) | dict.fromkeys(("q_len", "kv_len"), 600)
SHAPES = {
    "matmul": {"m": 256, "k": 300, "n": 256},
    "attention": {**ATTENTION, "head_dim_qk": 64, "head_dim_v": 64},
}


def words(kernel: str) -> set[str]:
    """What the kernel's section has in code marks; splash's leans on flash_fwd's."""
    titles = {SECTIONS[kernel], *(["flash_fwd"] if kernel != "matmul" else [])}
    parts = [TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in titles]
    return set(re.findall(r"`([^`]+)`", " ".join(parts)))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_documentation_names_every_shape_entry_option_tunable_and_step(name: str) -> None:
    kernel = base.load(name)
    shape = SHAPES.get(name, SHAPES["attention"])
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    chip = devices.get("v6e")
    tunables = kernel.tunables(problem, chip)
    assert kernel.default is not None
    program = trace(*kernel.build(problem, kernel.default(problem, chip)), chip)
    steps = {re.sub(r"_\d+$", "", s) for call in program.calls for s in call.scopes if s}
    missing = {*kernel.axes, *kernel.options, *tunables, *steps} - words(name)
    assert not missing, f"docs/kernels.md does not name {sorted(missing)} of {name}"


@pytest.mark.parametrize("name", SECTIONS)
def test_the_documented_default_is_the_default(name: str) -> None:
    kernel = base.load(name)
    shape = {axis: 4096 if "len" in axis or axis in "mkn" else 128 for axis in kernel.axes}
    problem = base.make_problem(kernel, device="v6e", shape=shape)
    assert kernel.default is not None
    blocks = kernel.default(problem, devices.get("v6e"))
    sizes = {n: size for n, size in blocks.items() if n.startswith("b") and n != "buffers"}
    assert sizes == dict.fromkeys(sizes, 128)
