"""What a traced `pallas_call` says of itself: grid, windows, scratch, DMAs, branches, FLOPs.

Records only, and no jax import; `pallas_call.trace` fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One operand as the kernel sees it, block by block.

    Attributes:
      role: `input` or `output`.
      name: operand label for bills, e.g. `input 0`.
      array_shape, block_shape: elements; a squeezed block axis is 1.
      dtype: element type name; `bits` its width.
      memory: `vmem`, `smem`, or `hbm` for an operand left where it is (no window).
      buffers: buffering levels of the pipeline (1 where the index never changes, as the
        compiler does it).
      copies: DMAs over the grid: a block index equal to the step before needs none.
      bytes_copied: HBM bytes of those copies, clipped at the array's edge.
      window_bytes: VMEM of one buffer, padded to the native tile.
      bytes_moved: `bytes_copied` in whole native tiles, which is what a DMA moves: a head
        dimension of 64 costs the traffic of 128.
      exact: False where the index map rests on run-time data; then every step counts as a copy.
      parkable: XLA may hold the operand in VMEM, outside the kernel's limit.
    """

    role: str
    name: str
    array_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    dtype: str
    bits: int
    memory: str
    buffers: int
    copies: int
    bytes_copied: int
    window_bytes: int
    bytes_moved: int = 0
    exact: bool = True
    parkable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """One scratch operand: VMEM / SMEM bytes padded to the native tile (semaphores are 0).

    `carried`: a step may read it before it wrote it. Other scratch is a value that the compiler may
    keep anywhere, and costs nothing for sure. `prefetched`: a table read before the first step.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    memory: str
    bytes: int
    carried: bool = True
    prefetched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A matrix product in the kernel's text: [m, k] · [k, n].

    Attributes:
      m: rows, all batches together.
      dtype: the wider operand's; `bits` are those of the left operand.
      passes: products the MXU makes of one (6 for f32 at the highest precision).
      loaded: the left operand is a block as it was loaded, not a computed value.
      count: times it stands in the text.
    """

    m: int
    k: int
    n: int
    dtype: str
    bits: int
    passes: int = 1
    loaded: bool = False
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepClass:
    """Grid steps that do the same: one entry of the pipeline timeline.

    Compute of a step overlaps the copy-in of the next step and the copy-out of the one before.

    Attributes:
      steps: how many grid steps are of this class.
      scopes: scope name -> how often it runs in one such step (0-count scopes left out).
      next_in_bytes, next_in_copies: input DMAs issued for the step after.
      prev_out_bytes, prev_out_copies: output DMAs of the step before.
      flops: FLOPs of the dots executed in one such step.
      next_in_windows, prev_out_windows: which of `PallasCall.windows` those DMAs are of.

    Bytes are whole native tiles (`Window.bytes_moved`).
    """

    steps: int
    scopes: dict[str, int]
    next_in_bytes: int
    next_in_copies: int
    prev_out_bytes: int
    prev_out_copies: int
    flops: int = 0
    next_in_windows: tuple[int, ...] = ()
    prev_out_windows: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PallasCall:
    """One `pallas_call` of a program.

    Attributes:
      name: the call's `name=`; the compiler's dump files carry it.
      grid: grid extents; `grid_steps` their product (1 for an empty grid).
      dimension_semantics: per grid axis, or None where the call does not say.
      vmem_limit_bytes: the call's own limit, None for the device default.
      windows, scratch: operands and scratch.
      temporaries_bytes: VMEM that values of the kernel body need beyond windows and scratch: a
        measured lower bound (`temporaries.temporaries_bytes`), 0 where in doubt.
      scopes: scope name -> executions over the whole grid. "" is code outside any named scope.
        None as a count: the trace cannot tell (run-time data).
      scope_flops: scope name -> FLOPs of the dots executed in it over the whole grid.
      executed_flops: all dots over the whole grid, whole blocks and padding included; a branch
        on run-time data counts as taken (`executed_with` corrects it).
      classes: the timeline; their `steps` sum to `grid_steps`.
      fill_bytes, drain_bytes: HBM bytes copied in before the first step, out after the last.
      parallel_splits: how many TensorCores of one device can share the grid (1, or the device's
        cores where an axis is `parallel`).
      core_steps: grid steps of the busiest core: with P the product of all `parallel` extents,
        ceil(P / cores) · steps / P. Source: loop limits in v5p and v4 megacore schedules (both
        compilers; `ceil` of the product, not of one axis). 0 where a record does not say.
      repeats: times one run of the program makes this call (a call inside a scan).
      scope_regions: scope name -> times it stands in the program text (unrolled loops, both
        branches of a cond). Cycles of a scope = its bundles · executions / regions.
      loops: scope name -> of the rolled loops in it, first those one loop deep, then those two
        deep …: iterations over the grid, and how many such loops stand in the text. Iterations
        that the trace cannot tell count as one.
      hand_copies, hand_bytes: copies from or to HBM that the kernel starts itself over the grid
        (`make_async_copy`), and their bytes; those on run-time data count as made once a step.
      revisited_axes: grid axes along which an output block is revisited.
      branches: per `cond` of the kernel, in program order, the executions of each branch over the
        grid; None where its predicate rests on run-time data.
      dots: the matrix products in the text, each distinct one once.
      marking: who told the kernel's parts apart: `named` by its author's scopes, `marked` by
        autotune, `named and marked`, or `none` where it has no parts.
    """

    name: str
    grid: tuple[int, ...]
    grid_steps: int
    dimension_semantics: tuple[str, ...] | None
    vmem_limit_bytes: int | None
    windows: tuple[Window, ...]
    scratch: tuple[Scratch, ...]
    temporaries_bytes: int
    scopes: dict[str, int | None]
    scope_flops: dict[str, int]
    executed_flops: int
    classes: tuple[StepClass, ...]
    fill_bytes: int
    drain_bytes: int
    parallel_splits: int
    core_steps: int = 0
    repeats: int = 1
    scope_regions: dict[str, int] = field(default_factory=dict)
    loops: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    hand_copies: int = 0
    hand_bytes: int = 0
    revisited_axes: tuple[int, ...] = ()
    branches: tuple[tuple[int | None, ...], ...] = ()
    dots: tuple[Dot, ...] = ()
    marking: str = "named"

    @property
    def dma_count(self) -> int:
        return sum(w.copies for w in self.windows) + self.hand_copies

    @property
    def hbm_bytes(self) -> int:
        return sum(w.bytes_copied for w in self.windows) + self.hand_bytes

    def allocations(self) -> dict[str, Window]:
        """The compiler's name for the VMEM of each window: `input window 2`, `output window 0`.

        It numbers inputs behind the prefetched tables, outputs from 0.
        """
        first = {"input": sum(s.prefetched for s in self.scratch), "output": 0}
        found = {}
        for window in self.windows:
            found[f"{window.role} window {first[window.role]}"] = window
            first[window.role] += 1
        return found

    def executed_with(self, counts: Mapping[str, int]) -> int:
        """Executed FLOPs, with `counts` for scopes whose executions rest on run-time data.

        `executed_flops` takes such a branch as run at every step; a kernel that knows better says
        so in its `scope_counts`. Scopes that the trace could count are not overruled.
        """
        total = self.executed_flops
        for scope, count in counts.items():
            if scope in self.scope_flops and self.scopes.get(scope, 0) is None:
                assumed = sum(c.steps * c.scopes.get(scope, 0) for c in self.classes)
                flops = self.scope_flops[scope]
                total += flops * count // assumed - flops if assumed else 0
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """All `pallas_call`s of a traced function, in program order."""

    calls: tuple[PallasCall, ...] = field(default_factory=tuple)


def from_json(record: dict[str, Any]) -> Program:
    """The `Program` that `dataclasses.asdict` and JSON made `record` of.

    Raises TypeError or KeyError for another record.
    """
    return Program(calls=tuple(_call(call) for call in record["calls"]))


def _call(record: dict[str, Any]) -> PallasCall:
    semantics = record["dimension_semantics"]
    return PallasCall(
        **{
            **record,
            "grid": tuple(record["grid"]),
            "dimension_semantics": None if semantics is None else tuple(semantics),
            "windows": tuple(_shaped(Window, w) for w in record["windows"]),
            "scratch": tuple(_shaped(Scratch, s) for s in record["scratch"]),
            "classes": tuple(_shaped(StepClass, c) for c in record["classes"]),
            "loops": {
                scope: tuple((trips, copies) for trips, copies in levels)
                for scope, levels in record["loops"].items()
            },
            "revisited_axes": tuple(record["revisited_axes"]),
            "branches": tuple(tuple(b) for b in record["branches"]),
            "dots": tuple(Dot(**d) for d in record["dots"]),
        }
    )


def _shaped(kind: type[T], record: dict[str, Any]) -> T:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})
