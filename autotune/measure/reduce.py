"""A smaller problem with the same blocks, where the problem itself is too large to check."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune import device as devices
from autotune.candidate import Candidate, Config, Scalar
from autotune.errors import AutotuneError
from autotune.problem import Problem

if TYPE_CHECKING:
    from autotune.call_record import PallasCall, Program
    from autotune.kernels.base import Kernel

BLOCKS = 3
"""Blocks an axis keeps where it has them: a wrong index map may show from the third on only
(jax-ml/jax#30259)."""
LANES = 128
_SMALL = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Structure:
    """Per call the grid; per window and axis block size, blocks, and whether one lies inside.

    `copies`: what an interpreter spends its time on; smaller pages are more of them.
    """

    grids: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    inside: tuple[tuple[bool, ...], ...]
    copies: int

    @classmethod
    def of(cls, calls: tuple[PallasCall, ...]) -> _Structure:
        windows = [w for call in calls for w in call.windows if w.memory == "vmem"]
        axes = [list(zip(w.array_shape, w.block_shape, strict=True)) for w in windows]
        return cls(
            grids=tuple(call.grid for call in calls),
            blocks=tuple(w.block_shape for w in windows),
            counts=tuple(tuple(-(-size // block) for size, block in pairs) for pairs in axes),
            inside=tuple(tuple(block <= size for size, block in pairs) for pairs in axes),
            copies=sum(call.dma_count for call in calls),
        )

    def kept_by(self, other: _Structure) -> bool:
        """Whether `other` has the same blocks, and on every axis as many, or `BLOCKS`."""
        if (self.blocks, self.inside) != (other.blocks, other.inside):
            return False
        if len(self.grids) != len(other.grids):
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

    Raises KernelError for whatever building or tracing the candidate raises.
    """
    whole = least = _structure(kernel, problem, config)
    done: set[str] = set()
    for axes in _groups(problem.shape):
        if done.intersection(axes):
            continue
        for sizes in _attempts({axis: problem.shape[axis] for axis in axes}, config):
            smaller = _smaller(kernel, problem, sizes, config)
            if smaller and whole.kept_by(smaller[1]) and smaller[1].copies <= least.copies:
                problem, least = smaller
                done.update(axes)
                break
    return problem


def in_whole_tiles(kernel: Kernel, problem: Problem) -> Problem | None:
    """`problem` with every axis that has more than a block of lanes a whole number of them; None
    where the kernel cannot have such sizes."""
    long = {axis: n for axis, n in problem.shape.items() if n > LANES}
    with contextlib.suppress(AutotuneError):
        return _resized(kernel, problem, {a: -(-n // LANES) * LANES for a, n in long.items()})
    return None


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
    from autotune.kernels.base import ask

    device = devices.get(problem.device)
    canonical = ask(kernel, "canonical", kernel.canonical, problem, config)
    legal = ask(kernel, "illegal", kernel.illegal, problem, config, device) is None
    return legal and Candidate.of(canonical) == Candidate.of(config)


def _smaller(
    kernel: Kernel,
    problem: Problem,
    sizes: Mapping[str, int],
    config: Config,
) -> tuple[Problem, _Structure] | None:
    """The problem with `sizes` for some axes, where `config` runs on it."""
    try:
        smaller = _resized(kernel, problem, sizes)
        if _runs(kernel, smaller, config):
            return smaller, _structure(kernel, smaller, config)
    except AutotuneError:
        pass  # a size that the kernel cannot have
    return None


def _resized(kernel: Kernel, problem: Problem, sizes: Mapping[str, int]) -> Problem:
    from autotune.kernels.base import make_problem

    options = {k: v for k, v in problem.options.items() if k not in problem.defaults}
    return make_problem(
        kernel, device=problem.device, shape={**problem.shape, **sizes}, options=options,
        dtype=problem.dtype,
    )  # fmt: skip


def _structure(kernel: Kernel, problem: Problem, config: Config) -> _Structure:
    """Raises KernelError for whatever building or tracing the candidate raises."""
    from autotune.kernels.base import ask
    from autotune.pallas_call import trace

    def traced() -> Program:
        function, arguments = kernel.build(problem, config)
        return trace(function, arguments, devices.get(problem.device))

    program: Program = ask(kernel, "build", traced)
    return _Structure.of(program.calls)


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
    for block in blocks | {LANES}:
        edge = size % block
        found.add(BLOCKS * block if edge == 0 else (BLOCKS - 1) * block + edge)
    return sorted(n for n in found if n < size)
