"""Kernels for tests of whole sweeps: a default that does not fit, and one that misbehaves."""

from __future__ import annotations

import dataclasses

import compiler_kernels

from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.problem import Problem


def _acts(problem: Problem, config: Config) -> Call:
    """A matmul that does `config["act"]` while it is traced."""
    call, arguments = compiler_kernels.matmul(problem, {"bm": 128, "bk": 128, "bn": 128})

    def program(x, y):  # type: ignore[no-untyped-def]
        compiler_kernels.act(str(config["act"]))
        return call(x, y)

    return program, arguments


ACTS = ("nothing", "abort", "hang", "value error", "not implemented", "assertion", "mlir", "mosaic",
        "runtime")  # fmt: skip


def _act_tunables(problem: Problem, device: Device) -> dict[str, Tunable]:
    return {"act": Tunable(values=ACTS)}


MISBEHAVES = dataclasses.replace(
    compiler_kernels.MATMUL,
    name="misbehaves",
    build=_acts,
    tunables=_act_tunables,
    default=lambda problem, device: {"act": "nothing"},
)


def _scratch_tunables(problem: Problem, device: Device) -> dict[str, Tunable]:
    return {"scratch_mib": Tunable(values=(1, 2, 100)), "vmem_limit_mib": Tunable(values=(64,))}


HUNGRY_DEFAULT = Kernel(
    name="hungry_default",
    axes=("m",),
    build=compiler_kernels.scratch,
    tunables=_scratch_tunables,
    flops=lambda problem: 1000 * problem.shape["m"],
    default=lambda problem, device: {"scratch_mib": 100, "vmem_limit_mib": 64},
)


def _huge_only(problem: Problem, device: Device) -> dict[str, Tunable]:
    return {"scratch_mib": Tunable(values=(100, 200)), "vmem_limit_mib": Tunable(values=(64,))}


NOTHING_FITS = dataclasses.replace(HUNGRY_DEFAULT, name="nothing_fits", tunables=_huge_only)
