"""A smaller problem with the same blocks, where the problem itself is too large to check."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune import device as devices
from autotune.candidate import Candidate, Config, Scalar
from autotune.errors import AutotuneError
from autotune.problem import Problem

if TYPE_CHECKING:
    from autotune.call_record import PallasCall
    from autotune.kernels.base import Kernel

BLOCKS = 3
"""Blocks an axis keeps where it has them: a wrong index map may show from the third on only
(jax-ml/jax#30259)."""
_SMALL = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Structure:
    """Per call the grid, and per window block shape and blocks an axis."""

    grids: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, calls: tuple[PallasCall, ...]) -> _Structure:
        windows = [w for call in calls for w in call.windows if w.memory == "vmem"]
        return cls(
            grids=tuple(call.grid for call in calls),
            blocks=tuple(w.block_shape for w in windows),
            counts=tuple(
                tuple(-(-size // block) for size, block in zip(w.array_shape, w.block_shape,
                                                               strict=True))
                for w in windows
            ),
        )  # fmt: skip

    def kept_by(self, other: _Structure) -> bool:
        """Whether `other` has the same blocks, and on every axis as many, or `BLOCKS`."""
        if self.blocks != other.blocks or len(self.grids) != len(other.grids):
            return False
        mine, others = (*self.grids, *self.counts), (*other.grids, *other.counts)
        return all(
            len(a) == len(b) and all(n >= min(m, BLOCKS) for m, n in zip(a, b, strict=True))
            for a, b in zip(mine, others, strict=True)
        )


def reduced(kernel: Kernel, problem: Problem, config: Config) -> Problem:
    """A problem as small as can be found on which `config` runs with the same block structure.

    Every axis on its own, and two whose names end alike (`q_heads` and `kv_heads`) together, so
    that their difference or their grouping stays: `BLOCKS` blocks an axis, its edge block included.
    `problem` itself where nothing smaller will do.

    Raises whatever building or tracing the candidate raises.
    """
    whole = _structure(kernel, problem, config)
    done: set[str] = set()
    for axes in _groups(problem.shape):
        if done.intersection(axes):
            continue
        for sizes in _attempts({axis: problem.shape[axis] for axis in axes}, config):
            smaller = _smaller(kernel, problem, {**problem.shape, **sizes}, config)
            if smaller is not None and whole.kept_by(_structure(kernel, smaller, config)):
                problem = smaller
                done.update(axes)
                break
    return problem


def lightened(kernel: Kernel, problem: Problem, config: Config, *, max_flops: int) -> tuple[
    Problem, Config
]:  # fmt: skip
    """`(problem, config)` reduced until one run has at most `max_flops`, if it can.

    First the problem alone, then with every block of `config` halved, in step, down to 128.
    """
    while True:
        smaller = reduced(kernel, problem, config)
        if kernel.flops(smaller) <= max_flops:
            return smaller, config
        halved = {name: _halved(value, problem) for name, value in config.items()}
        if halved == dict(config) or not _runs(kernel, problem, halved):
            return smaller, config
        config = halved


def _halved(value: Scalar, problem: Problem) -> Scalar:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    is_block = 256 <= value <= max(problem.shape.values()) and value % 256 == 0
    return value // 2 if is_block else value


def _runs(kernel: Kernel, problem: Problem, config: Config) -> bool:
    device = devices.get(problem.device)
    canonical = Candidate.of(kernel.canonical(problem, config))
    legal = kernel.illegal(problem, config, device) is None
    return legal and canonical == Candidate.of(config)


def _smaller(
    kernel: Kernel, problem: Problem, shape: Mapping[str, int], config: Config
) -> Problem | None:
    """The problem at `shape`; None where the kernel or the config would not have it."""
    from autotune.kernels.base import make_problem

    options = {k: v for k, v in problem.options.items() if k not in problem.defaults}
    try:
        smaller = make_problem(
            kernel, device=problem.device, shape=shape, options=options, dtype=problem.dtype
        )
        return smaller if _runs(kernel, smaller, config) else None
    except (AutotuneError, ValueError):
        return None


def _structure(kernel: Kernel, problem: Problem, config: Config) -> _Structure:
    from autotune.pallas_call import trace

    function, arguments = kernel.build(problem, config)
    return _Structure.of(trace(function, arguments, devices.get(problem.device)).calls)


def _groups(shape: Mapping[str, int]) -> list[tuple[str, ...]]:
    pairs = [
        (a, b)
        for a, b in itertools.combinations(shape, 2)
        if "_" in a and a.rpartition("_")[2] == b.rpartition("_")[2]
    ]
    return [*pairs, *((axis,) for axis in shape)]


def _attempts(sizes: Mapping[str, int], config: Config) -> Iterator[dict[str, int]]:
    """Smaller sizes of one axis or a pair, smallest first."""
    if len(sizes) == 1:
        ((axis, size),) = sizes.items()
        yield from ({axis: n} for n in _sizes(size, config))
        return
    (a, size_a), (b, size_b) = sorted(sizes.items(), key=lambda item: -item[1])
    found = {(n + size_a - size_b, n) for n in _sizes(size_b, config)}
    if size_a % size_b == 0:
        group = size_a // size_b
        found |= {(n * g, n) for n in _SMALL for g in (min(group, 2), group) if n < size_b}
    for n_a, n_b in sorted(found, key=lambda pair: (pair[0] * pair[1], pair)):
        yield {a: n_a, b: n_b}


def _sizes(size: int, config: Config) -> list[int]:
    """`BLOCKS` blocks of any of the config's, with the remainder of `size` as the last one."""
    blocks = {
        v for v in config.values() if isinstance(v, int) and not isinstance(v, bool) and v > 1
    }
    found = set(_SMALL)
    for block in blocks | {128}:
        edge = size % block
        found.add(BLOCKS * block if edge == 0 else (BLOCKS - 1) * block + edge)
    return sorted(n for n in found if n < size)
