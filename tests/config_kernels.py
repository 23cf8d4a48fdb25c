"""Kernels for the tests of configs and spaces: rules only, nothing to run."""

from __future__ import annotations

from typing import Any

from autotune.candidate import Config, Scalar
from autotune.device import Device
from autotune.errors import InputError
from autotune.kernels.base import Call, Kernel, Option, Tunable, choice, flag, number
from autotune.problem import Problem


def _build(problem: Problem, config: Config) -> Call:
    raise AssertionError("loading a config builds no call")


def _multiple_of_128(value: Scalar) -> str | None:
    # No test of the type: `overrides` must cope with a rule that only knows numbers.
    return None if value > 0 and value % 128 == 0 else "a multiple of 128"  # type: ignore


def _compute(value: Scalar) -> str | None:
    return None if value is None else _multiple_of_128(value)


def _tunables(problem: Problem, device: Device) -> dict[str, Tunable]:
    def limit(value: Scalar) -> str | None:
        fits = value is None or 0 < value <= device.vmem_bytes  # type: ignore[operator]
        return None if fits else f"null, or up to {device.vmem_bytes}"

    return {
        "block_q": Tunable(values=(128, 256, 512), check=_multiple_of_128),
        "block_kv": Tunable(values=(128, 256), check=_multiple_of_128),
        "block_kv_compute": Tunable(values=(None, 128), check=_compute),
        "fused": Tunable(values=(False, True)),
        "order": Tunable(values=("qk", "kq")),
        "vmem_limit_bytes": Tunable(values=(None,), check=limit),
    }


def _canonical(problem: Problem, config: Config) -> Config:
    block_kv = min(config["block_kv"], problem.shape["kv_len"])  # type: ignore[type-var]
    return {
        **config,
        "block_q": min(config["block_q"], problem.shape["q_len"]),  # type: ignore[type-var]
        "block_kv": block_kv,
        "block_kv_compute": config["block_kv_compute"] or block_kv,
    }


def _illegal(problem: Problem, config: Config, device: Device) -> str | None:
    block, compute = config["block_kv"], config["block_kv_compute"]
    if block % compute:  # type: ignore[operator]
        return f"block_kv_compute {compute} does not divide block_kv {block}"
    return None


DEFAULT: dict[str, Scalar] = {
    "block_q": 1024, "block_kv": 1024, "block_kv_compute": None, "fused": False,
    "order": "qk", "vmem_limit_bytes": None,
}  # fmt: skip


def _check(problem: Problem) -> None:
    q_heads, kv_heads = problem.shape["q_heads"], problem.shape["kv_heads"]
    if q_heads % kv_heads:
        raise InputError(
            f"kv_heads {kv_heads} do not divide q_heads {q_heads}", path=("shape", "kv_heads")
        )


def _lengths(value: Any) -> Any:
    if not isinstance(value, list) or not all(type(v) is int and v > 0 for v in value):
        raise ValueError("a list of lengths")
    return value


KERNEL = Kernel(
    name="toy",
    axes=("q_heads", "kv_heads", "q_len", "kv_len", "window"),
    axis_defaults={"window": 1},
    build=_build,
    tunables=_tunables,
    flops=lambda problem: 1,
    options={
        "causal": flag(),
        "cap": number(positive=True),
        "epilogue": choice("none", "none", "relu"),
        "lengths": Option(parse=_lengths),
        "window": number(positive=True),
    },
    dtypes=("bfloat16", "float32", "int8", "float8_e4m3b11fnuz"),
    check=_check,
    illegal=_illegal,
    canonical=_canonical,
    default=lambda problem, device: DEFAULT,
)


def _broken(problem: Problem) -> None:
    raise LookupError("lost\nmy way")


BROKEN = Kernel(
    name="broken",
    axes=("m",),
    build=_build,
    tunables=lambda problem, device: {},
    flops=lambda problem: 1,
    check=_broken,
)

NOT_A_KERNEL = 5
