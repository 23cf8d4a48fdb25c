"""Candidate and evidence in, leaderboard row out. No jax import."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from autotune import cost_model, versions
from autotune.candidate import Candidate
from autotune.device import Device
from autotune.errors import KernelError
from autotune.measure.record import Measured, usable
from autotune.problem import Problem
from autotune.row import Row

if TYPE_CHECKING:
    from autotune.call_record import PallasCall, Program
    from autotune.evidence import Compiled, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A candidate after the model stage; `program` is None where tracing gave none."""

    candidate: Candidate
    row: Row
    program: Program | None = None

    @property
    def survives(self) -> bool:
        return self.row.status == "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Turns evidence on the candidates of one problem into rows.

    Attributes:
      flops: the problem's fixed FLOP count.
      kernel_fingerprint: of the source the candidates are built from.
      method_fingerprint: of the models, the dump's parser and the user's compiler flags.
      peak_dtype: the dtype the MXU multiplies, whose peak MFU is against; None is the problem's.
      scope_counts: a candidate's executions of scopes that rest on run-time data, as its kernel
        states them.
    """

    problem: Problem
    device: Device
    flops: int
    kernel_fingerprint: str
    method_fingerprint: str | None = None
    peak_dtype: str | None = None
    scope_counts: Callable[[Candidate], Mapping[str, int]] = lambda candidate: {}

    def rejected(self, candidate: Candidate, status: str, reason: str) -> Judged:
        """A candidate that ends before any model evidence: illegal, or failing to trace."""
        return Judged(candidate=candidate, row=self._row(candidate, status, reason))

    def modelled(self, candidate: Candidate, program: Program) -> Judged:
        """Model evidence: VMEM fit, traffic, and roofline with a fixed overhead a step."""
        try:
            counts = self.scope_counts(candidate)
        except KernelError as error:
            return self.rejected(candidate, "failed", str(error))
        reason = cost_model.rejection(program, self.device)
        latency = cost_model.model_latency(program, self.device, scope_counts=counts)
        bills = [cost_model.vmem_bill(call, self.device).total for call in program.calls]
        limits = [cost_model.vmem_limit_bytes(call, self.device) for call in program.calls]
        row = replace(
            self._row(candidate, "pruned" if reason else "ok", reason),
            latency_model_ms=latency.total_s * 1e3,
            executed_flops=sum(call.executed_with(counts) for call in program.calls),
            hbm_bytes=sum(call.hbm_bytes for call in program.calls),
            dma_count=sum(call.dma_count for call in program.calls),
            grid_steps=sum(call.grid_steps for call in program.calls),
            vmem_model_bytes=max(bills, default=None),
            vmem_limit_bytes=min(limits, default=None),
            scopes=json.dumps(_executions(program, counts), sort_keys=True),
            vmem=json.dumps(_bill(program, self.device), sort_keys=True),
        )
        return Judged(candidate=candidate, row=self._rated(row), program=program)

    def compiled(self, judged: Judged, compiled: Compiled) -> Row:
        """`judged.row` with what the compiler said; its verdict replaces the model's."""
        by_compiler = compiled.status in ("ok", "oom", "unsupported")
        row = replace(
            judged.row,
            status=compiled.status,
            reason=compiled.reason,
            evidence="compiled" if by_compiler else judged.row.evidence,
            compile_seconds=compiled.compile_seconds,
        )
        if compiled.status != "ok":
            return self._rated(row)
        assert judged.program is not None
        try:
            return self._scheduled(row, judged, compiled)
        except KernelError as error:
            return self._rated(replace(row, status="failed", reason=str(error)))

    def _scheduled(self, row: Row, judged: Judged, compiled: Compiled) -> Row:
        """`row` with what the final schedules say. Raises KernelError for another program's."""
        program, counts = judged.program, self.scope_counts(judged.candidate)
        assert program is not None
        schedules = compiled.schedules
        latency = cost_model.compiled_latency(
            program, schedules, self.device, scope_counts=counts, xla_ops=compiled.xla_ops
        )
        uses = [use for s in schedules for use in s.scopes.values()]
        row = replace(
            row,
            latency_compiled_ms=latency.total_s * 1e3,
            cycles=latency.cycles,
            bundles=sum(s.bundles for s in schedules),
            spill_loads=sum(u.spill_loads for u in uses),
            spill_stores=sum(u.spill_stores for u in uses),
            vmem_compiled_bytes=max((s.vmem_bytes for s in schedules), default=None),
            mxu_utilization=cost_model.mxu_utilization(
                program, schedules, self.device, scope_counts=counts
            ),
            scopes=json.dumps(_scopes(program, schedules, self.device, counts), sort_keys=True),
            vmem=json.dumps(_allocations(program, schedules), sort_keys=True),
        )
        return self._rated(row)

    def measured(self, row: Row, measured: Measured) -> Row:
        """`row` with what measuring said; its verdict replaces the compiler's.

        A time that is none (not finite, not above 0) or that another kind of device took is a
        failed measurement: neither may ever win.
        """
        details = {n: v for n, v in measured.details.items() if v != float("inf")}
        by_device = measured.status in ("ok", "wrong", "oom")
        row = replace(
            row,
            status=measured.status,
            reason=measured.reason,
            evidence="measured" if by_device else row.evidence,
            latency_measured_ms=None,
            samples_ms=None,
            timer=measured.timer,
            measurement=json.dumps(details, sort_keys=True),
        )
        if measured.status == "ok" and (fault := self._timing_fault(measured)):
            row = replace(row, status="failed", reason=fault)
        if row.status != "ok":
            return self._rated(row)
        samples = list(measured.samples_ms)
        return self._rated(replace(row, latency_measured_ms=measured.median_ms, samples_ms=samples))

    def _timing_fault(self, measured: Measured) -> str | None:
        """Why the samples are no times of this device; None where they are."""
        if not usable(measured.samples_ms):
            return f"a measured time is not a finite number above 0: {list(measured.samples_ms)}"
        if measured.timer != "replay" and measured.device_kind != self.device.kind:
            return f"measured on {measured.device_kind}, not on {self.device.kind}"
        return None

    def _row(self, candidate: Candidate, status: str, reason: str | None) -> Row:
        here = versions.installed()
        return Row(
            problem_key=self.problem.key,
            problem_name=self.problem.name,
            kernel=self.problem.kernel,
            device=self.problem.device,
            problem=self.problem.json,
            config=candidate.json,
            status=status,
            reason=reason,
            is_default=candidate.is_default,
            flops=self.flops,
            jax_version=here["jax"],
            libtpu_version=here["libtpu"],
            autotune_version=here["autotune"],
            kernel_fingerprint=self.kernel_fingerprint,
            method_fingerprint=self.method_fingerprint,
            created_at=datetime.now(UTC),
        )

    def _rated(self, row: Row) -> Row:
        """`row` with MFU, effective TFLOP/s and the band of its strongest latency.

        A latency that beats the chip's peak is no latency: such a row fails, so that a fault in a
        model or a timer can never win.
        """
        latency_ms = row.latency_measured_ms or row.latency_compiled_ms or row.latency_model_ms
        if row.status != "ok" or latency_ms is None:
            return replace(
                row, mfu=None, effective_tflops=None, latency_low_ms=None, latency_high_ms=None
            )
        seconds = latency_ms / 1e3
        dtype = self.peak_dtype or self.problem.dtype
        mfu = cost_model.mfu(self.flops, seconds, self.device, dtype)
        if suspect := cost_model.suspect_reason(mfu):
            return replace(row, status="failed", reason=suspect)
        tflops = cost_model.effective_tflops(self.flops, seconds)
        low_ms, high_ms = self._band(row, latency_ms)
        return replace(
            row, mfu=mfu, effective_tflops=tflops, latency_low_ms=low_ms, latency_high_ms=high_ms
        )

    def _band(self, row: Row, latency_ms: float) -> tuple[float | None, float | None]:
        """Milliseconds that the true latency lies between, 9 times of 10.

        Of samples their own 5 % and 95 % quantiles, and none of a single one, which says nothing of
        its noise; of a prediction the calibration's residuals.
        """
        if row.latency_measured_ms is not None:
            samples = sorted(row.samples_ms or ())
            if len(samples) < 2:
                return None, None
            last = len(samples) - 1
            return samples[round(0.05 * last)], samples[round(0.95 * last)]
        evidence = "compiled" if row.latency_compiled_ms is not None else "model"
        width = self.device.band(evidence, self.problem.kernel)
        return latency_ms / (1 + width), latency_ms * (1 + width)


def _executions(program: Program, counts: Mapping[str, int]) -> dict[str, dict[str, int | None]]:
    return {
        _label(program, call, name): {"executions": _runs(call, name, counts)}
        for call in program.calls
        for name in call.scopes
    }


def _runs(call: PallasCall, scope: str, counts: Mapping[str, int]) -> int | None:
    """Executions over the grid: the trace's count, else what the kernel states, else unknown."""
    traced = call.scopes.get(scope)
    return counts.get(scope) if traced is None else traced


def _scopes(
    program: Program,
    schedules: tuple[Schedule, ...],
    device: Device,
    counts: Mapping[str, int],
) -> dict[str, dict[str, object]]:
    """The `scopes` column: per scope bundles, cycles of one run, spills, unit use, executions."""
    return {
        _label(program, call, name): {
            "bundles": use.bundles,
            "cycles": cost_model.scope_cycles(use, device),
            "mxu_limit_cycles": cost_model.mxu_limit_cycles(use, device),
            "spill_loads": use.spill_loads,
            "spill_stores": use.spill_stores,
            "units": use.units,
            "executions": _runs(call, name, counts),
        }
        for call, schedule in cost_model.matched(program, schedules)
        for name, use in schedule.scopes.items()
    }


def _bill(program: Program, device: Device) -> dict[str, int]:
    """The `vmem` column before compiling: the model's bill."""
    return {
        _label(program, call, allocation.name): allocation.bytes
        for call in program.calls
        for allocation in cost_model.vmem_bill(call, device).allocations
        if allocation.bytes
    }


def _allocations(program: Program, schedules: tuple[Schedule, ...]) -> dict[str, int]:
    """The `vmem` column of a compiled row: the compiler's allocations."""
    return {
        _label(program, call, name): size
        for call, schedule in cost_model.matched(program, schedules)
        for name, size in schedule.vmem.items()
        if size
    }


def _label(program: Program, call: PallasCall, scope: str) -> str:
    """Scope name as shown: "" is the pipeline's own code; with its call where there are several."""
    shown = scope or "(pipeline)"
    if len(program.calls) == 1:
        return shown
    index = next(i for i, other in enumerate(program.calls) if other is call)
    return f"{index}.{call.name}/{shown}"
