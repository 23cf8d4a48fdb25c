"""The matmul's tile: what is legal, what is searched, what users have without tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.candidate import Config, Scalar
from autotune.device import MIB, Device
from autotune.kernels.attention import round_up
from autotune.kernels.base import Tunable
from autotune.problem import Problem

SUBLANES, LANES = 8, 128
GRID_ORDERS = ("mn", "nm")
BUFFERS = (1, 2, 3)
# The windows of a `pallas_call` take no more ("Only single (1) and double (2) buffering are
# supported. Got 3.", jax 0.10.2 and 0.12.0.1); a third takes a pipeline within the kernel.
MOST_WINDOW_BUFFERS = 2

# Output tiles from 256: a 256-wide MXU wants both sides at least that, and below it the fixed cost
# of a grid step (0.4 - 0.7 us) is more than its arithmetic. 2048 x 2048 already takes 48 MiB of
# VMEM with bk 1024.
_OUTPUT_BLOCKS = (256, 512, 1024, 2048)
# K blocks from 512: a shorter step is all overhead; longer than 2048 only costs VMEM.
_K_BLOCKS = (512, 1024, 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    """Tile of one grid step, and how the grid walks. Raises ValueError for an impossible one.

    Attributes:
      bm, bk, bn: rows of x, the contracted axis, columns of the output. On the chip bm must be a
        multiple of 8 and bk and bn of 128, or the whole axis.
      grid_order: `mn`: m is the outer grid axis; `nm`: n is.
      buffers: VMEM buffers per input window; 3 gives a copy two steps of time.
      vmem_limit_bytes: the kernel's VMEM limit; None is the compiler's default.
    """

    bm: int
    bk: int
    bn: int
    grid_order: str = "mn"
    buffers: int = 2
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("bm", "bk", "bn"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} {size} is below 1")
        if self.grid_order not in GRID_ORDERS:
            raise ValueError(f"grid_order {self.grid_order!r} is not one of {GRID_ORDERS}")
        if self.buffers not in BUFFERS:
            raise ValueError(f"buffers {self.buffers} is not one of {BUFFERS}")

    def check(self, m: int, k: int, n: int) -> None:
        """Raises ValueError, with both numbers, for a block that does not suit its axis."""
        for name, size, axis, length, tile in (
            ("bm", self.bm, "m", m, SUBLANES),
            ("bk", self.bk, "k", k, LANES),
            ("bn", self.bn, "n", n, LANES),
        ):
            if size != length and size % tile:
                raise ValueError(
                    f"{name} {size} is neither a multiple of {tile} nor axis {axis} = {length}"
                )
            if size > round_up(length, tile):
                raise ValueError(f"{name} {size} is larger than axis {axis} = {length}")


def block_sizes(config: Config) -> BlockSizes:
    """The config as `BlockSizes`. Raises ValueError for one that no chip can run."""
    return BlockSizes(**config)  # type: ignore[arg-type]


def _tiles(problem: Problem) -> dict[str, tuple[str, int, int]]:
    """tunable -> (axis, its length, the multiple a block of it must be)."""
    return {
        name: (axis, problem.shape[axis], tile)
        for name, axis, tile in (("bm", "m", SUBLANES), ("bk", "k", LANES), ("bn", "n", LANES))
    }


def tunables(problem: Problem, device: Device) -> Mapping[str, Tunable]:
    """bm x bk x bn of at most 4 x 4 x 4 values, two grid orders and two VMEM limits.

    The VMEM limit is searched at the compiler's default and near all of the core's memory: values
    between only change which tiles fit.
    """
    blocks = {
        name: Tunable(
            values=_values(length, tile, _K_BLOCKS if name == "bk" else _OUTPUT_BLOCKS),
            check=_block_check(axis, length, tile),
        )
        for name, (axis, length, tile) in _tiles(problem).items()
    }
    return {
        **blocks,
        "grid_order": Tunable(values=GRID_ORDERS, check=_member_check(GRID_ORDERS)),
        "buffers": Tunable(values=_buffers(device), check=_buffers_check),
        "vmem_limit_bytes": vmem_limit_tunable(device),
    }


def vmem_limit_tunable(device: Device) -> Tunable:
    """null (the compiler's default) and, where the core has more, 15/16 of its VMEM.

    The rest is left to XLA and the compiler's own scratch. A limit above the core's VMEM is
    refused: the compiler takes any number and fails only when the memory is really used.
    """
    most = device.vmem_bytes - device.vmem_bytes // 16
    raised = (most,) if most > device.scoped_vmem_bytes else ()

    def check(value: Scalar) -> str | None:
        allowed = f"null, or a multiple of 1 MiB up to {device.vmem_bytes} ({device.name}'s VMEM)"
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool) and value % MIB == 0
        return None if whole and 0 < int(value) <= device.vmem_bytes else allowed

    return Tunable(values=(None, *raised), check=check)


def limit_reason(limit: int | None, device: Device) -> str | None:
    """Why `vmem_limit_bytes` cannot be, with both numbers; None where it can."""
    if limit is None or limit <= device.vmem_bytes:
        return None
    return f"vmem_limit_bytes {limit} is above {device.name}'s VMEM of {device.vmem_bytes}"


def _values(length: int, tile: int, choices: Sequence[int]) -> tuple[int, ...]:
    """The choices that the axis holds; all of a short axis; a divisor where no choice divides."""
    values = [choice for choice in choices if choice <= length]
    if length <= choices[-1]:
        values.append(length)
    elif all(length % value for value in values[-2:]):
        # Without an even split the last block is partly wasted, and a K edge is masked.
        divisors = [b for b in range(choices[0], choices[-1], tile) if length % b == 0]
        values += divisors[-1:]
    return tuple(sorted(set(values)))


def _block_check(axis: str, length: int, tile: int) -> Callable[[Scalar], str | None]:
    def check(value: Scalar) -> str | None:
        allowed = f"a multiple of {tile} up to {round_up(length, tile)}, or {length}, all of {axis}"
        if isinstance(value, bool) or not isinstance(value, int):
            return allowed
        fits = value == length or (value % tile == 0 and 0 < value <= round_up(length, tile))
        return None if fits else allowed

    return check


def _member_check(members: Sequence[str]) -> Callable[[Scalar], str | None]:
    return lambda value: None if value in members else "one of " + ", ".join(members)


def _buffers(device: Device) -> tuple[int, ...]:
    """2 and 3; 2 where a JAX device has two cores, for the third buffer's pipeline uses only one.

    With 1, no copy overlaps any arithmetic.
    """
    return (2, 3) if device.cores == 1 else (2,)


def _buffers_check(value: Scalar) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return None if whole and value in BUFFERS else "1, 2 or 3"


def canonical(problem: Problem, config: Config) -> Config:
    """One grid order where both are the same walk: m or n is a single block."""
    single = any(
        isinstance(size := config[name], int) and size >= problem.shape[axis]
        for name, axis in (("bm", "m"), ("bn", "n"))
    )
    return {**config, "grid_order": "mn"} if single else config


def illegal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why the config cannot run on this problem and device, with both numbers; None when it can."""
    try:
        blocks = block_sizes(config)
        blocks.check(*(problem.shape[axis] for axis in "mkn"))
    except (ValueError, TypeError) as error:
        return str(error)
    return limit_reason(blocks.vmem_limit_bytes, device)


def default(problem: Problem, device: Device) -> Config:
    """128 cubed, the defaults of the `matmul` that JAX's Pallas matmul guide gives its readers.

    Source: docs.jax.dev, "Pallas TPU: matrix multiplication" (docs/pallas/tpu/matmul.md), whose
    wrapper has bm = bk = bn = 128; `jax.experimental.pallas.ops.tpu.matmul` has no default tile.
    """
    blocks = {
        name: min(128, length)  # all of a shorter axis, which is legal whatever its length
        for name, (_, length, _) in _tiles(problem).items()
    }
    return {**blocks, "grid_order": "mn", "buffers": 2, "vmem_limit_bytes": None}
