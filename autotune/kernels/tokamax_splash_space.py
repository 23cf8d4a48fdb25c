"""The tunables of Tokamax's splash attention: fields of its `SplashConfig`, and its own rules.

Which there are depends on the release and the problem: a tunable that cannot matter is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune import device as devices
from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import shown
from autotune.kernels import jax_blocks as blocks
from autotune.kernels import masks, tokamax_library
from autotune.kernels.attention import LANES, AttentionShape, allowed_block
from autotune.kernels.base import Tunable
from autotune.kernels.masks import Causal, Full, Mask
from autotune.problem import Problem

library = tokamax_library.module(tokamax_library.SPLASH + "splash_attention_kernel")

FIELDS = frozenset(f.name for f in dataclasses.fields(library.SplashConfig))
LAYOUTS = ("q_layout", "k_layout", "v_layout")
FORWARD = ("block_q", "block_kv", "block_kv_compute")
BACKWARD = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
DIAGONAL = ("qk_diag_skip", "sv_diag_skip", "qk_diag_grid")
STACKED = "num_stacked_q_heads"
TILES = (128, 256, 512, 1024, 2048)
"""Blocks searched, those below 1024 on shorter sequences only, as Tokamax's own search does."""
WIDEST_TILE = 4096  # won in public runs where no block is masked, and there only
COMPUTE_TILES = (256, 512, 1024)


def mask_of(problem: Problem) -> Mask:
    return masks.of(problem.options["mask"])


def has_forward(problem: Problem) -> bool:
    return problem.options["pass"] is None


def has_backward(problem: Problem) -> bool:
    return bool(problem.options["grad"]) or problem.options["pass"] == "backward"


def splash_config(problem: Problem, config: Config) -> Any:
    """The `SplashConfig` of a candidate, options of the problem in it; what is unsaid is Tokamax's.

    A backward pass alone takes its blocks for the forward ones too, which nothing runs, as
    Tokamax's own backward operation does. Raises ValueError, with Tokamax's text, for what it
    refuses.
    """
    layouts = {n: library.QKVLayout(config[n]) for n in LAYOUTS if n in config}
    given = {**config, **layouts}
    if not has_backward(problem):
        given |= dict.fromkeys((*BACKWARD, "block_q_dq", "block_kv_dq"))
    elif not has_forward(problem):
        given |= {own: given[other] for own, other in zip(FORWARD, BACKWARD, strict=True)}
    return dataclasses.replace(
        library.SplashConfig.get_default(),
        attn_logits_soft_cap=problem.options["attn_logits_soft_cap"],
        max_logit_const=problem.options["max_logit_const"],
        **given,
    )


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """Tunable name -> its values."""
    shape, mask = AttentionShape.of(problem), mask_of(problem)
    found: dict[str, Tunable] = {}
    if has_forward(problem):
        found |= _blocks(FORWARD, shape, mask)
    if has_backward(problem):
        found |= _blocks(BACKWARD, shape, mask)
        found["dq_reduction_steps"] = _choice(None, values=(None, 3))
    # Public searches of the backward pass left the layouts alone; `space:` can widen them.
    layouts = (1, 2) if not has_backward(problem) else (1,)
    found |= {name: _choice(*layouts, values=(1, 2)) for name in LAYOUTS}
    found["use_base2_exp"] = _choice(True, values=(True, False))
    if has_forward(problem):
        found["use_experimental_scheduler"] = _choice(False, True)
        if problem.options["residuals"] or problem.options["grad"]:
            found["fuse_reciprocal"] = _choice(True, values=(True, False))
        if STACKED in FIELDS and shape.group > 1:
            stacks = tuple(n for n in range(1, shape.group + 1) if shape.group % n == 0)
            found[STACKED] = _choice(*(n for n in stacks if n in (1, 2, 4)), values=stacks)
    if mask == Causal() and FIELDS.issuperset(DIAGONAL):
        found["qk_diag_skip"] = _choice(False, True)
        if has_forward(problem):
            found["sv_diag_skip"] = _choice(False, True)
        found["qk_diag_grid"] = _choice(2, values=(2, 4, 8))
    return found


def _choice(*searched: Scalar, values: tuple[Scalar, ...] | None = None) -> Tunable:
    """A tunable of a few values, `searched` of which are tried unasked."""
    allowed = [shown(value) for value in values or searched]  # tells true from 1

    def check(value: Scalar) -> str | None:
        return None if shown(value) in allowed else "one of " + ", ".join(allowed)

    return Tunable(values=searched, check=check)


def _blocks(names: tuple[str, str, str], shape: AttentionShape, mask: Mask) -> dict[str, Tunable]:
    q, kv, compute = names
    tiles = (*TILES, WIDEST_TILE) if mask == Full() else TILES
    return {
        q: Tunable(values=_tiles(shape.q_len, tiles), check=allowed_block),
        kv: Tunable(values=_tiles(shape.kv_len, tiles), check=allowed_block),
        compute: Tunable(
            values=tuple(t for t in COMPUTE_TILES if shape.kv_len % t == 0) or (LANES,),
            check=allowed_block,
        ),
    }


def _tiles(length: int, tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Those that divide `length`; of them those of at least 1024, else the largest two."""
    dividing = [t for t in tiles if length % t == 0]
    return tuple(t for t in dividing if t >= 1024) or tuple(dividing[-2:]) or (LANES,)


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why Tokamax refuses the config, or None."""
    shape = problem.shape
    for names, here in ((FORWARD, has_forward(problem)), (BACKWARD, has_backward(problem))):
        if here:
            q, kv, compute = ((n, _size(config[n])) for n in names)
            for (name, size), axis in ((q, "q_len"), (kv, "kv_len")):
                if shape[axis] % size:
                    return f"{name} {size} does not divide {axis} {shape[axis]}"
            if kv[1] % compute[1]:
                return f"{compute[0]} {compute[1]} does not divide {kv[0]} {kv[1]}"
    try:
        splash_config(problem, config)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def _size(value: Scalar) -> int:
    assert isinstance(value, int)
    return value


def _lengths(problem: Problem) -> dict[str, int]:
    names = (*FORWARD, *BACKWARD)
    return {n: problem.shape["q_len" if n.startswith("block_q") else "kv_len"] for n in names}


def canonical(problem: Problem, config: Config) -> Config:
    """What runs: fields left out are Tokamax's own, null compute blocks the whole block, blocks
    over their axis the axis; no diagonal grid where nothing is skipped."""
    own = library.SplashConfig.get_default()
    names = tunables(problem, devices.get(problem.device))
    full = {name: config[name] if name in config else _plain(getattr(own, name)) for name in names}
    full |= {name: value for name, value in config.items() if name not in names}
    full = dict(blocks.clamped(full, _lengths(problem)))
    for outer, inner in ((FORWARD[1], FORWARD[2]), (BACKWARD[1], BACKWARD[2])):
        if inner in full and full[inner] is None:
            full[inner] = full[outer]
    if not (full.get("qk_diag_skip") or full.get("sv_diag_skip")) and "qk_diag_grid" in full:
        full["qk_diag_grid"] = 2
    return full


def _plain(value: Any) -> Scalar:
    return int(value) if isinstance(value, library.QKVLayout) else value


def default(problem: Problem, device: Device) -> Config:
    """`SplashConfig.get_default()` of the installed release, which its makers take unasked."""
    return canonical(problem, {})
