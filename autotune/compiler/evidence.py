"""What the TPU compiler says of a candidate: a typed record, nothing parsed here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeUse:
    """One named scope in the program text of one kernel.

    Attributes:
      bundles: VLIW bundles; one issues a cycle.
      mxu_rows: rows streamed by matmul instructions, each counted at the bf16 rate (a row of an
        instruction that takes twice as long counts twice), summed over MXUs.
      spill_loads, spill_stores: register spills in the text.
      units: unit name of the utilisation table (MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL,
        VSTORE, VSTORE:SPILL, SALU) -> issued slots.
      loop_depth: of most of its bundles; the grid's own loop is depth 1.
    """

    bundles: int
    mxu_rows: int
    spill_loads: int
    spill_stores: int
    units: dict[str, int]
    loop_depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The final schedule of one `pallas_call`.

    Attributes:
      name: the call's name.
      bundles: whole program text. `scopes[""]` is what lies outside any named scope, loop
        body and prologue together; `prologue_bundles` of those are outside the grid's loop.
      capacity: unit name -> slots a bundle.
      vmem_bytes: sum of the VMEM allocations; `vmem` the same by tag (`input window 0`,
        `output window 0`, `scratch`, `internal scratch`, …).
    """

    name: str
    bundles: int
    prologue_bundles: int
    capacity: dict[str, int]
    scopes: dict[str, ScopeUse]
    vmem_bytes: int
    vmem: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The verdict on one candidate.

    Attributes:
      status: `ok`, `oom`, `unsupported`, `failed`, `timeout` or `crashed`.
      reason: one line, for every status but `ok`.
      schedules: one per `pallas_call`, in program order.
      compile_seconds: trace + lower + compile in the worker.
      jax_version, libtpu_version: what compiled it.
    """

    status: str
    reason: str | None = None
    schedules: tuple[Schedule, ...] = field(default_factory=tuple)
    compile_seconds: float | None = None
    jax_version: str | None = None
    libtpu_version: str | None = None
