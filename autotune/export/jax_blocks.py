"""`BlockSizes(...)` expressions for JAX's flash and splash attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from autotune.export.entry import CannotExpressError, Entry, Export

FLASH = "jax.experimental.pallas.ops.tpu.flash_attention"
SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"
Fields = Mapping[str, str | int | bool | None]

_SPLASH_OPTIONS = ("mask", "segment_ids", "scale", "logit_soft_cap", "residuals", "use_exp2")
_FLASH_OPTIONS = ("causal", "scale", "residuals", "use_exp2")
"""Of this project's kernels' options, those that JAX's kernel has too, or that change no output."""
_NOT_THERE = "JAX's kernel has no such tunable"

_SPLASH: Mapping[str, Callable[[Entry, str], str | int | bool]] = {
    **dict.fromkeys(
        ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
         "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
        Entry.block,
    ),
    "use_fused_bwd_kernel": lambda entry, name: entry.one_of(name, {False: False, True: True}),
    **dict.fromkeys(
        ("q_layout", "k_layout", "v_layout"),
        lambda entry, name: entry.one_of(name, {n: n for n in ("HEAD_DIM_MINOR", "SEQ_MINOR")}),
    ),
}  # fmt: skip
"""Field of splash attention's `BlockSizes` -> what makes it of an entry's tunable."""


def splash(entry: Entry) -> Fields:
    """The fields of splash attention's `BlockSizes`.

    Raises CannotExpressError for a kernel whose blocks mean something else, or a problem that
    JAX's cannot run.
    """
    if entry.row.kernel == "jax.splash":
        return _fields_of_splash(entry)
    if entry.row.kernel != "splash":
        raise CannotExpressError(
            f"JAX's flash and splash attention have no {entry.row.kernel} in them"
        )
    entry.asks_only(_SPLASH_OPTIONS, of="JAX's splash attention")
    entry.must_be("partial_mask", "computed", why="JAX's kernel chooses by the mask's class")
    return _own_forward(entry, "partial_mask")


def _fields_of_splash(entry: Entry) -> Fields:
    entry.has_only(_SPLASH, why=_NOT_THERE)
    return {n: made(entry, n) for n, made in _SPLASH.items() if entry.config.get(n) is not None}


def _own_forward(entry: Entry, *others: str) -> Fields:
    """Windows and the keys' sub-block of this project's forward kernels mean what JAX's do.

    `others`: tunables that were looked at.
    """
    name = "block_kv_compute"
    entry.has_only(("block_q", "block_kv", name, "block_q_compute", *others), why=_NOT_THERE)
    block_q, block_kv = entry.block("block_q", "q_len"), entry.block("block_kv", "kv_len")
    entry.must_be("block_q_compute", None, block_q, why=_NOT_THERE)
    compute = block_kv if entry.config.get(name) is None else entry.block(name)
    if block_kv % compute or compute % 128:
        raise CannotExpressError(
            f"its {name} {compute} is no multiple of 128 that divides {block_kv}"
        )
    return {"block_q": block_q, "block_kv": block_kv, name: compute}


def _flash_forward(entry: Entry) -> Fields:
    own = _own_forward(entry)
    return {
        "block_q": own["block_q"],
        "block_k_major": own["block_kv"],
        "block_k": own["block_kv_compute"],
        "block_b": 1,
    }


def _named(**names: str) -> Callable[[Entry], Fields]:
    """Field -> the tunable that it is; of this project's kernels the outer blocks must divide."""

    def fields(entry: Entry) -> Fields:
        entry.has_only(names.values(), why=_NOT_THERE)
        axes = {"block_q_major": "q_len", "block_kv_major": "kv_len"}
        return {field: entry.block(name, axes.get(name)) for field, name in names.items()}

    return fields


def _alike(*names: str) -> Callable[[Entry], Fields]:
    return _named(**{name: name for name in names})


_FORWARD = {
    "jax.flash": _alike("block_q", "block_k_major", "block_k", "block_b"),
    "flash_fwd": _flash_forward,
}
_BACKWARD = {
    "jax.flash_dkv": _alike("block_q_major_dkv", "block_k_major_dkv", "block_k_dkv", "block_q_dkv"),
    "flash_dkv": _named(
        block_q_major_dkv="block_q_major", block_k_major_dkv="block_kv_major",
        block_k_dkv="block_kv", block_q_dkv="block_q",
    ),
    "jax.flash_dq": _alike("block_k_major_dq", "block_k_dq", "block_q_dq"),
    "flash_dq": _named(
        block_k_major_dq="block_kv_major", block_k_dq="block_kv", block_q_dq="block_q_major"
    ),
}  # fmt: skip


def _fields_of_flash(entry: Entry) -> Fields:
    """Raises CannotExpressError for what JAX's flash attention cannot run, as it would refuse it or
    take it for another problem."""
    if not entry.row.kernel.startswith("jax."):
        entry.asks_only(_FLASH_OPTIONS, of="JAX's flash attention")
        _check_alike(entry, "head_dim_qk", "head_dim_v", "JAX's flash attention needs both alike")
        if (head_dim := entry.size("head_dim_qk")) > 128 and head_dim % 128:
            raise CannotExpressError(f"its head_dim_qk {head_dim} is no multiple of 128, as there")
        if entry.options.get("causal"):
            _check_alike(entry, "q_len", "kv_len", "there queries then see other keys")
    return (_FORWARD | _BACKWARD)[entry.row.kernel](entry)


def _check_alike(entry: Entry, one: str, other: str, why: str) -> None:
    if entry.size(one) != entry.size(other):
        raise CannotExpressError(
            f"its {one} {entry.size(one)} is not its {other} {entry.size(other)}; {why}"
        )


def export(found: Sequence[Entry]) -> Export:
    """One expression a splash board, and one a flash problem: its forward, dkv and dq together."""
    blocks: list[str] = []
    refused: list[str] = []
    flash = [e for e in found if e.row.kernel in _FORWARD | _BACKWARD]
    for group in _groups(flash):
        used, fields, reasons = _flash(group)
        refused += reasons
        if used:
            blocks.append(_text(FLASH, used, fields))
    for entry in found:
        if entry in flash:
            continue
        try:
            blocks.append(_text(SPLASH, [entry], splash(entry)))
        except CannotExpressError as reason:
            refused.append(f"{entry.told}: {reason}")
    files = {"block_sizes.py": "\n".join(blocks)} if blocks else {}
    return Export(files=files, refused=tuple(refused))


def _groups(found: Iterable[Entry]) -> list[list[Entry]]:
    """Boards of one attention problem: same kernels' family, device, shape, dtype, mask, scale."""
    groups: dict[str, list[Entry]] = {}
    for entry in found:
        family = entry.row.kernel.partition("flash")[0]
        options = [entry.options.get(n) for n in ("causal", "sm_scale", "scale")]
        key = json.dumps([family, entry.row.device, entry.shape, entry.dtype, options],
                         sort_keys=True)  # fmt: skip
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _flash(group: Sequence[Entry]) -> tuple[list[Entry], Fields, list[str]]:
    """(boards used, fields, refusals). `BlockSizes` needs the forward's blocks, and those of dq
    and dkv both or neither."""
    made: dict[str, tuple[Entry, Fields]] = {}
    refused: list[str] = []
    for entry in group:
        kernel = entry.row.kernel
        role = kernel.rpartition("_")[2] if kernel in _BACKWARD else "forward"
        try:
            if role in made:
                options = json.dumps(made[role][0].options)
                raise CannotExpressError(f"BlockSizes has one {role}; that with {options} took it")
            made[role] = entry, _fields_of_flash(entry)
        except CannotExpressError as reason:
            refused.append(f"{entry.told}: {reason}")
    lacking = None
    if "forward" not in made:
        lacking, made_of = "BlockSizes needs the blocks of the forward pass too", {}
    elif len(made) == 2:
        lacking = "BlockSizes needs the blocks of both dq and dkv, or of neither"
        made_of = {"forward": made["forward"]}
    else:
        made_of = made
    refused += [f"{e.told}: {lacking}" for name, (e, _) in made.items() if name not in made_of]
    in_order = [made_of[name] for name in ("forward", "dkv", "dq") if name in made_of]
    fields = {name: value for _, own in in_order for name, value in own.items()}
    return [entry for entry, _ in in_order], fields, refused


def _text(module: str, used: Sequence[Entry], fields: Fields) -> str:
    lines = [line for entry in used for line in entry.comments]
    kernels = {entry.row.kernel for entry in used}
    if not all(kernel.startswith("jax.") for kernel in kernels):
        lines.append(f"# Tuned on {', '.join(sorted(kernels))}: the same blocks of another kernel.")
    heads = [used[0].shape.get(axis, 1) for axis in ("q_heads", "kv_heads")]
    if module == FLASH and heads[0] != heads[1]:
        times = heads[0] // heads[1]
        lines.append(f"# It takes a key head a query head: repeat those of k and v {times} times.")
    names = "BlockSizes, QKVLayout" if any("layout" in n for n in fields) else "BlockSizes"
    lines.append(f"# from {module} import {names}")
    lines.append("BlockSizes(")
    for name, value in fields.items():
        text = f"QKVLayout.{value}" if name.endswith("_layout") else repr(value)
        lines.append(f"    {name}={text},")
    return "\n".join([*lines, ")", ""])
