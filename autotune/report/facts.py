"""What a problem is, in words: its sizes, dtype and options."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autotune.errors import printable
from autotune.row import Row


def shape(row: Row) -> str:
    """`m=4096 k=7168; float32 causal=true`: what a title has in brackets."""
    axes = json.loads(row.problem)["shape"]
    sizes = " ".join(f"{axis}={size}" for axis, size in axes.items())
    told = [v if k == "dtype" else f"{k}={v}" for k, v in facts(row).items() if k not in axes]
    return printable(f"{sizes}; {' '.join(told)}" if told else sizes)


def facts(row: Row) -> dict[str, str]:
    """What a problem is: its sizes, its dtype where it is not bfloat16, and of its options what is
    on or has a value, as text."""
    problem = json.loads(row.problem)
    told = {axis: str(size) for axis, size in problem["shape"].items()}
    dtype = problem.get("dtype") or "bfloat16"
    if dtype != "bfloat16":
        told["dtype"] = _option(dtype)
    return told | options_on(problem.get("options") or {})


def options_on(options: Mapping[str, object]) -> dict[str, str]:
    """Of a problem's options what is on or has a value, as text."""
    return {k: _option(v) for k, v in options.items() if _on(v)}


def _on(value: object) -> bool:
    return bool(value) and value not in ("none", {"full": {}})


def _option(value: object) -> str:
    text = value if isinstance(value, str) else mask(value)
    text = json.dumps(value, ensure_ascii=False) if text is None else text
    return text if len(text) <= 60 else f"{text[:57]}…"


def mask(value: object) -> str | None:
    """`causal & 9 documents`, of a mask's stored form (`kernels.masks`); None for what is none."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((name, body),) = value.items()
    if name in ("all", "any") and isinstance(body, list):
        told = [mask(part) for part in body]
        inner = [f"({one})" if one and {"&", "or"} & set(one.split()) else one for one in told]
        return None if None in told else (" & " if name == "all" else " or ").join(map(str, inner))
    if name not in ("full", "causal", "local", "documents") or not isinstance(body, dict):
        return None
    if isinstance(lengths := body.get("lengths"), list):
        few = "+".join(map(str, lengths))
        return f"documents {few}" if len(lengths) <= 4 else f"{len(lengths)} documents"
    sizes = {k: v for k, v in body.items() if v is not None and (k, v) != ("offset", 0)}
    if set(sizes) == {"left"}:
        return f"{name} {sizes['left']}"
    return " ".join([name, *(f"{side}={size}" for side, size in sizes.items())])
