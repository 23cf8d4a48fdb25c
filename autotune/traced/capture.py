"""Traces a function as on a chip that is not there, once for whoever reads or lowers it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from autotune.device import Device
from autotune.traced.marking import Marked, mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A traced function with named kernel parts.

    Attributes:
      marked: its closed jaxpr and who named the parts of each kernel.
    """

    marked: Marked
    _traced: Any
    _device: Device
    _in_mesh: bool
    _options: dict[str, Any]

    def lower(self) -> Any:
        """The lowered function, whose kernels carry a marker at every named part."""
        traced, closed = self._traced, self.marked.jaxpr
        if closed is not traced.jaxpr:
            function = jax.jit(jaxpr_as_fun(closed), **self._options)
            struct: Any = jax.ShapeDtypeStruct
            leaves = [struct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
            with as_on(self._device) if self._in_mesh else contextlib.nullcontext():
                traced = function.trace(*leaves)
        with as_on(self._device):
            return traced.lower()


def capture(
    fn: Callable[..., Any], args: Sequence[Any], device: Device, sharding: Any = None
) -> Capture:
    """Traces `fn(*args)` for `device` and names the parts of its kernels.

    Kernels that ask for the chip while they are traced (`pltpu.get_tpu_info()`) need an abstract
    mesh; those that work eagerly are refused in it and are traced without.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s.
      sharding: of all arguments and results; needed to lower for a device that is not there.

    Raises:
      Whatever `fn` raises.
    """
    options = {} if sharding is None else {"in_shardings": sharding, "out_shardings": sharding}

    def call(*given: Any) -> Any:  # a new function: what `jit` remembers may be of another config
        return fn(*given)

    call.__name__ = getattr(fn, "__name__", type(fn).__name__)
    jitted = jax.jit(call, **options)
    in_mesh = True
    try:
        with as_on(device):
            traced = jitted.trace(*args)
    except Exception as error:
        in_mesh = False
        try:
            traced = jitted.trace(*args)
        except Exception as plain:
            # A kernel that asks for the chip can only fail differently out here.
            raise error if asked_for_chip(plain) else plain from None
    return Capture(
        marked=mark(traced.jaxpr), _traced=traced, _device=device, _in_mesh=in_mesh,
        _options=options,
    )  # fmt: skip


@contextlib.contextmanager
def as_on(device: Device) -> Iterator[None]:
    """What is traced in here asks for its chip and gets `device`, which need not be there."""
    chip = jax.sharding.AbstractDevice(
        device_kind=device.kind, num_cores=device.cores, platform="tpu"
    )
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def asked_for_chip(error: BaseException) -> bool:
    """Whether `error` came of asking what chip this is."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name.startswith("get_tpu_info"):
            return True
        frame = frame.tb_next
    return False
