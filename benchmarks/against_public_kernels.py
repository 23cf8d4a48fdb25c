"""Compiles this project's kernels and the public ones for the same problems, and prints ratios.

    python benchmarks/against_public_kernels.py [--device v6e ...] [--trials 24] [--only NAME]

Both sides are tuned by the same search under the same budget; what is compared is the best
candidate's predicted latency (compiled evidence, the work XLA does around each kernel included).
A ratio above 1 means that this project's kernel is predicted to be faster. Tokamax's splash is
compared where `pip install '.[tokamax]' in autotune's checkout` has been done. No TPU takes part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import autotune
from autotune import versions
from autotune.errors import AutotuneError

DEVICES = ("v6e", "tpu7x", "v5p")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Kernels whose latencies add up, each with its options."""

    kernels: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """One problem, this project's kernels and another's."""

    name: str
    shape: Mapping[str, int]
    ours: Side
    theirs: Side


def attention(length: int, *, heads: int = 32, head_dim: int = 128) -> dict[str, int]:
    return {
        "batch": 1, "q_heads": heads, "kv_heads": heads, "q_len": length, "kv_len": length,
        "head_dim_qk": head_dim, "head_dim_v": head_dim,
    }  # fmt: skip


def contests() -> Iterator[Contest]:
    yield Contest(
        name="matmul 4096 x 7168 x 18432", shape={"m": 4096, "k": 7168, "n": 18432},
        ours=Side(kernels=("matmul",)), theirs=Side(kernels=("jax.matmul",)),
    )  # fmt: skip
    causal = {"causal": True}
    for length in (4096, 8192):
        shape = attention(length)
        yield Contest(
            name=f"flash forward, causal, 32 x {length} x 128", shape=shape,
            ours=Side(kernels=("flash_fwd",), options=causal),
            theirs=Side(kernels=("jax.flash",), options=causal),
        )  # fmt: skip
        yield Contest(
            name=f"flash backward, causal, 32 x {length} x 128", shape=shape,
            ours=Side(kernels=("flash_dq", "flash_dkv"), options=causal),
            theirs=Side(kernels=("jax.flash_dq", "jax.flash_dkv"), options=causal),
        )  # fmt: skip
        mask = {"mask": {"causal": {}}}
        # Arrays as Tokamax's kernel takes them: no change of layout is charged to it.
        for other, more in (("jax.splash", {}), ("tokamax.splash", {"operand_layout": "bhtd"})):
            yield Contest(
                name=f"splash forward, causal, 32 x {length} x 128", shape=shape,
                ours=Side(kernels=("splash",)),
                theirs=Side(kernels=(other,), options={**mask, **more}),
            )  # fmt: skip


def best_ms(side: Side, shape: Mapping[str, int], device: str, trials: int) -> float:
    """The sum of each kernel's best predicted latency. Raises AutotuneError for no survivor."""
    total = 0.0
    for kernel in side.kernels:
        board = autotune.tune(
            kernel, shape=dict(shape), options=dict(side.options), device=device, trials=trials,
            until="compile", timeout=1200,
        )  # fmt: skip
        best = board[board.is_best]
        if best.empty:
            raise AutotuneError(f"{kernel}: no candidate survived")
        total += float(best.latency_compiled_ms.iloc[0])
    return total


def rows(devices: Sequence[str], trials: int, only: str) -> Iterator[tuple[str, ...]]:
    """Table rows: contest, device, ours, theirs, ratio."""
    for contest in contests():
        if only not in f"{contest.name} {' '.join(contest.theirs.kernels)}":
            continue
        for device in devices:
            names = " + ".join(contest.theirs.kernels)
            try:
                theirs = best_ms(contest.theirs, contest.shape, device, trials)
                ours = best_ms(contest.ours, contest.shape, device, trials)
            except AutotuneError as error:
                yield contest.name, names, device, "–", "–", str(error)
                continue
            yield (
                contest.name, names, device, f"{ours:.3f}", f"{theirs:.3f}",
                f"{theirs / ours:.2f}×",
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", action="append", help="a chip; may be repeated")
    parser.add_argument("--trials", type=int, default=24, help="candidates compiled a kernel")
    parser.add_argument("--only", default="", help="contests whose name contains this")
    given = parser.parse_args(arguments)
    here = versions.installed()
    print(f"jax {here['jax']}, libtpu {here['libtpu']}; {given.trials} candidates a kernel\n")
    print("| problem | against | chip | ours ms | theirs ms | ours is faster by |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows(given.device or DEVICES, given.trials, given.only):
        print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
