"""What a worker says of a candidate: a typed record, nothing parsed here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from autotune import call_record
from autotune.call_record import Program

STATUSES = ("ok", "pruned", "oom", "unsupported", "failed", "timeout", "crashed")


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
      loops: of all this, what lies in rolled loops inside the scope: first what is one loop deep,
        then what is two, …
    """

    bundles: int
    mxu_rows: int
    spill_loads: int
    spill_stores: int
    units: dict[str, int]
    loop_depth: int
    loops: tuple[ScopeUse, ...] = ()

    def outside_loops(self) -> ScopeUse:
        """What one run of the scope runs once."""
        return ScopeUse(
            bundles=self.bundles - sum(loop.bundles for loop in self.loops),
            mxu_rows=self.mxu_rows - sum(loop.mxu_rows for loop in self.loops),
            spill_loads=self.spill_loads - sum(loop.spill_loads for loop in self.loops),
            spill_stores=self.spill_stores - sum(loop.spill_stores for loop in self.loops),
            units={
                unit: slots - sum(loop.units.get(unit, 0) for loop in self.loops)
                for unit, slots in self.units.items()
            },
            loop_depth=self.loop_depth,
        )


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
class XlaOp:
    """What XLA runs around the kernels: one instruction of the scheduled module.

    Attributes:
      name, opcode: as in the module; an asynchronous pair is one op under its start's name.
      bytes_read, bytes_written: HBM bytes of one run, from the shapes in their layouts, tiling
        padded; of an operand that is only sliced or updated, the slice.
      estimated_cycles: XLA's own figure for one run; None where it gives none.
      repeats: runs in one run of the program (loops around it).
      vmem_bytes: bytes read and written of values that XLA keeps in VMEM.
      asynchronous: it is started and awaited apart, and may overlap what runs between.
    """

    name: str
    opcode: str
    bytes_read: int
    bytes_written: int
    estimated_cycles: int | None
    repeats: int = 1
    vmem_bytes: int = 0
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The verdict on one candidate; of a `trace` task, which no compiler sees, the program.

    Attributes:
      status: `ok`, `pruned` (a rule of the kernel's `build` or of grids, before any compiler),
        `oom`, `unsupported`, `failed`, `timeout` or `crashed`.
      reason: one line, for every status but `ok`.
      schedules: one per `pallas_call`, in program order; of a `compile` task only.
      xla_ops: what runs around the kernels, in the module's order; of a `compile` task only.
      program: the traced `pallas_call`s; of a `trace` task only.
      compile_seconds: trace + lower + compile in the worker.
      jax_version, libtpu_version: what compiled it.
      limit_s, limit_bytes: the limit on time or host memory that ended it, where one did.
      repeatable: whether the same compiler, under the same limits, says so again; False for a
        worker that was killed from outside or found no memory on the machine.
    """

    status: str
    reason: str | None = None
    schedules: tuple[Schedule, ...] = field(default_factory=tuple)
    xla_ops: tuple[XlaOp, ...] = ()
    program: Program | None = None
    compile_seconds: float | None = None
    jax_version: str | None = None
    libtpu_version: str | None = None
    limit_s: float | None = None
    limit_bytes: int | None = None
    repeatable: bool = True

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {', '.join(STATUSES)}")
        if (self.status == "ok") != (self.reason is None):
            raise ValueError("a reason belongs to every status but ok, and to no other")

    def holds_under(self, timeout_s: float, memory_limit_bytes: int) -> bool:
        """Whether a stored verdict stands: it was not ended by a limit that has been raised."""
        return (self.limit_s is None or self.limit_s >= timeout_s) and (
            self.limit_bytes is None or self.limit_bytes >= memory_limit_bytes
        )


def to_json(compiled: Compiled) -> dict[str, Any]:
    """`compiled` as plain JSON values; `from_json` gives it back."""
    return asdict(compiled)


def from_json(record: dict[str, Any]) -> Compiled:
    """The `Compiled` that `to_json` wrote. Raises TypeError, KeyError or ValueError for another."""
    program = record.get("program")
    return Compiled(
        **{
            **record,
            "schedules": tuple(_schedule(s) for s in record["schedules"]),
            "xla_ops": tuple(XlaOp(**op) for op in record.get("xla_ops", ())),
            "program": None if program is None else call_record.from_json(program),
        }
    )


def _schedule(record: dict[str, Any]) -> Schedule:
    scopes = {name: _scope_use(use) for name, use in record["scopes"].items()}
    return Schedule(**{**record, "scopes": scopes})


def _scope_use(record: dict[str, Any]) -> ScopeUse:
    return ScopeUse(**{**record, "loops": tuple(map(_scope_use, record.get("loops", ())))})
