"""What a traced call needs of VMEM, SMEM and HBM, and whether the compiler will surely refuse it.

A lower bound, never an estimate: doubt goes to the compiler. docs/vmem-and-latency-model.md holds
the measurements behind each rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.device import MIB, Device

if TYPE_CHECKING:
    from autotune.call_record import Dot, PallasCall, Program, Window

SUBLANES, LANES = 8, 128
KINDS = ("window", "scratch", "temporary")
REGISTERS_BYTES = 64 * 8 * 128 * 4
"""The vector registers of a TensorCore: 64 of 8 × 128 words."""
SPILL_FROM = {"v6e": (1024, 512), "tpu7x": (1024, 1024)}
"""(k, n) from which a product with a loaded left block spills most of it; else (512, 256)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One line of a VMEM bill.

    Attributes:
      name: operand label, `scratch 0` or `temporaries`.
      kind: `window`, `scratch` or `temporary`.
      bytes: all its buffers, padded to the native tile.
      may_vanish: it may cost nothing: a window, because XLA may park the whole operand in VMEM
        outside the kernel's limit; scratch, because every step writes it before reading it.
    """

    name: str
    kind: str
    bytes: int
    may_vanish: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.bytes < 0:
            raise ValueError(f"{self.name} has {self.bytes} bytes; 0 or more are allowed")


@dataclass(frozen=True, kw_only=True, slots=True)
class VmemBill:
    """VMEM of one call by allocation, in bytes per TensorCore.

    `total` is with every window in place; `least` is what the compiler cannot do without.
    """

    allocations: tuple[Allocation, ...]

    @property
    def total(self) -> int:
        return sum(a.bytes for a in self.allocations)

    @property
    def least(self) -> int:
        return sum(a.bytes for a in self.allocations if not a.may_vanish)

    @property
    def windows(self) -> int:
        return self._of("window")

    @property
    def scratch(self) -> int:
        return self._of("scratch")

    @property
    def temporaries(self) -> int:
        return self._of("temporary")

    def _of(self, kind: str) -> int:
        return sum(a.bytes for a in self.allocations if a.kind == kind)


def vmem_limit_bytes(call: PallasCall, device: Device) -> int:
    """The call's own limit on its VMEM, or the device's default; bytes per TensorCore."""
    if call.vmem_limit_bytes is None:
        return device.scoped_vmem_bytes
    return call.vmem_limit_bytes


def vmem_bill(call: PallasCall, device: Device) -> VmemBill:
    """VMEM of `call`: windows times buffers, scratch, and temporaries that must leave registers."""
    spare = device.vmem_bytes - vmem_limit_bytes(call, device)
    copied = any(w.array_shape and w.array_shape[-1] % LANES for w in call.windows)
    windows = [
        Allocation(
            name=w.name + (", more buffers" if n else ""),
            kind="window",
            bytes=size,
            may_vanish=n > 0 or (_array_bytes(w) < spare and (copied or _may_be_parked(w, device))),
        )
        for w in call.windows
        if w.memory == "vmem"
        for n, size in enumerate(_buffers(w, call, device))
    ]
    scratch = (
        Allocation(name=s.name, kind="scratch", bytes=s.bytes, may_vanish=not s.carried)
        for s in call.scratch
        if s.memory == "vmem" and s.bytes
    )
    spilled = max((_spilled_bytes(dot, device) for dot in call.dots), default=0)
    temporaries = Allocation(
        name="temporaries", kind="temporary", bytes=max(call.temporaries_bytes, spilled)
    )
    return VmemBill(allocations=(*windows, *scratch, temporaries))


def _spilled_bytes(dot: Dot, device: Device) -> int:
    """Least register spill of a matrix product whose left block is loaded; 0 where in doubt.

    The compiler loads the left block, L bytes, once and keeps it for every pass over the columns,
    far beyond the registers; for f32 at the highest precision it keeps the bf16 parts it splits it
    into. Measured (docs/vmem-and-latency-model.md):

    * bf16, k and n from `SPILL_FROM`: L less at most 192 KiB; with m and k from 1024 (tpu7x:
      m from 2048) L and 336 KiB more; nothing for sure on v6e and tpu7x where k is no multiple of
      1024 (512 x 1536 x 1024 spills 0.37 MiB and none);
    * f32, k and n from 512: 0.9 L and more; 4.1 L and more on v4 to v5p (n from 256 already) and,
      with m up to 512, or m and n up to 1024, on v6e.

    Other widths may need nothing.
    """
    k_from, n_from = SPILL_FROM.get(device.name, (512, 256))
    held, older = dot.m * dot.k * dot.bits // 8, device.generation < 7
    least = 0
    whole = dot.k % k_from == 0 or device.mxu_size == 128
    if dot.loaded and dot.bits == 16 and dot.k >= k_from and dot.n >= n_from and whole:
        big = min(dot.m, dot.k) >= 1024 and dot.n >= 512 and (older or dot.m >= 2048)
        least = held + (REGISTERS_BYTES if big else -REGISTERS_BYTES)
    elif dot.loaded and dot.passes == 6 and dot.k >= 512 and dot.n >= 2 * device.mxu_size:
        parts = device.mxu_size == 128 or (older and (dot.m <= 512 or max(dot.m, dot.n) <= 1024))
        least = (3 * held if parts else held // 2) - REGISTERS_BYTES
    return max(0, least)


def _buffers(window: Window, call: PallasCall, device: Device) -> tuple[int, ...]:
    """Bytes of a window's buffers: those it surely has, then those that it may do without.

    Where the cores of a chip get one parallel index each, a window that only follows that index
    never moves, and has one buffer.
    """
    words = call.dimension_semantics or ()
    pairs = zip(words, call.grid, strict=False)
    shared = math.prod(n for word, n in pairs if word.endswith("parallel"))
    if not 1 < shared <= device.cores or window.buffers < 2:
        return (window.window_bytes * window.buffers,)
    return (window.window_bytes, window.window_bytes * (window.buffers - 1))


def _may_be_parked(window: Window, device: Device) -> bool:
    """Whether XLA may hold an operand in VMEM, so that the kernel allocates no window for it.

    Any operand on tpu7x: inputs up to 22 MiB beside a limit of 32 MiB, not 24; outputs where
    another XLA operation reads them. On the others where XLA makes it or computes meanwhile
    (`traced.surroundings`); one with rows or columns that are no whole tiles it copies first, and
    beside a copy of narrow columns it has time to fetch the others too.
    """
    whole = len(window.array_shape) > 1 and window.array_shape[-2] % SUBLANES == 0
    return device.parks_operands or window.parkable or not whole


def _array_bytes(window: Window) -> int:
    """HBM bytes of the whole operand without padding."""
    elements = 1
    for size in window.array_shape:
        elements *= size
    return -(-elements * window.bits // 8)


def rejection(program: Program, device: Device) -> str | None:
    """Why the compiler will surely refuse `program`, with both numbers; None where it may not."""
    for call in program.calls:
        reason = (
            _vmem_reason(call, device) or _smem_reason(call, device) or _hbm_reason(call, device)
        )
        if reason:
            return f"{call.name}: {reason}" if len(program.calls) > 1 else reason
    return None


def _vmem_reason(call: PallasCall, device: Device) -> str | None:
    limit = vmem_limit_bytes(call, device)
    if limit > device.vmem_bytes:
        return (
            f"VMEM limit {_mib(limit)} is more than the {_mib(device.vmem_bytes)}"
            f" a TensorCore of {device.name} has"
        )
    bill = vmem_bill(call, device)
    allowed = min(limit, device.usable_vmem_bytes)
    if bill.least <= allowed:
        return None
    return f"needs at least {_mib(bill.least)} of VMEM, of {_mib(allowed)} allowed on {device.name}"


def _smem_reason(call: PallasCall, device: Device) -> str | None:
    windows = sum(w.window_bytes * w.buffers for w in call.windows if w.memory == "smem")
    need = windows + sum(s.bytes for s in call.scratch if s.memory == "smem")
    if need <= device.smem_bytes:
        return None
    return f"needs {_mib(need)} of SMEM, of {_mib(device.smem_bytes)} on {device.name}"


def _hbm_reason(call: PallasCall, device: Device) -> str | None:
    """Operands beyond HBM. Operands alike in shape and dtype count once: they may be one array
    (an output aliased to its input, an argument passed twice)."""
    need = sum(_distinct_bytes(call.windows))
    if need <= device.hbm_bytes:
        return None
    return f"operands need {_gib(need)} of HBM, of {_gib(device.hbm_bytes)} on {device.name}"


def _distinct_bytes(windows: Iterable[Window]) -> Iterable[int]:
    return {(w.array_shape, w.dtype): _array_bytes(w) for w in windows}.values()


def _mib(size: int) -> str:
    return f"{size / MIB:.2f} MiB"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
