"""The strips of `explain` against the prediction they picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_cost_model import make_call, make_schedule, program, step_class, window

from autotune import cost_model, latency
from autotune import device as devices
from autotune.call_record import PallasCall, StepClass
from autotune.evidence import Schedule, ScopeUse
from autotune.explain.facts import Segment
from autotune.explain.timeline import segments

V6E = replace(devices.get("v6e"), issued_step_s=0.2e-6, scalar_cycles=0.5, launch_s=0.0)


def use(bundles: int, scalar: int) -> ScopeUse:
    return ScopeUse(
        bundles=bundles, mxu_rows=0, spill_loads=0, spill_stores=0, units={"SALU": scalar},
        loop_depth=1,
    )  # fmt: skip


def schedule(step: int) -> Schedule:
    return make_schedule({"": use(300, 400), "step": use(step, 20)})


def call(**more: object) -> PallasCall:
    """Ten steps: one in and one out window, a copy of each every step."""
    first, last = (step_class(1, ins=(0,)), step_class(1, next_in=0, copies=0, out=500_000))
    steady = step_class(8, ins=(0,), out=500_000, outs=(1,))
    windows = (
        window(copies=10, bytes_moved=10_000_000),
        window("output", copies=10, bytes_moved=5_000_000),
    )
    return make_call(
        windows=windows, classes=(first, steady, last), fill_bytes=1_000_000, drain_bytes=500_000,
        **more,
    )  # fmt: skip


def ends(bars: tuple[Segment, ...], part: str) -> float:
    return max(s.start_us + s.duration_us for s in bars if s.part.startswith(part))


@pytest.mark.parametrize("step_bundles", [100, 20_000])
@pytest.mark.parametrize("device", [V6E, devices.get("tpu7x")], ids=lambda d: d.name)
@pytest.mark.parametrize("compiled", [True, False])
def test_first_steady_and_last_steps_add_up_to_the_predicted_time(step_bundles, device, compiled):
    whole = program(call())
    schedules = (schedule(step_bundles),) if compiled else ()
    bars = segments(whole, schedules, device, {})
    device = replace(device, launch_s=0.0)
    predicted = (
        cost_model.compiled_latency(whole, schedules, device)
        if compiled
        else cost_model.model_latency(whole, device)
    )
    drawn_us = ends(bars, "first") + 8 * ends(bars, "steady") + ends(bars, "last")
    assert drawn_us == pytest.approx(predicted.total_s * 1e6, rel=1e-9)


def test_no_step_is_in_two_strips():
    def parts(*classes: StepClass) -> list[str]:
        steps = sum(c.steps for c in classes)
        whole = replace(call(), classes=classes, grid=(steps,), grid_steps=steps)
        return list(dict.fromkeys(b.part for b in segments(program(whole), (), V6E, {})))

    first, steady, last = call().classes
    assert parts(first, steady, last) == [
        "first step", "steady step, 8 of 8 between first and last", "last step",
    ]  # fmt: skip
    assert parts(first, last) == ["first step", "last step"]
    assert parts(last) == ["only step"]
    # One kind for the first step and those behind it: of its three, two are between.
    assert parts(replace(steady, steps=3), last) == [
        "first step", "steady step, 2 of 2 between first and last", "last step",
    ]  # fmt: skip
    # The kind of most time is the first step's own: what is drawn between is another.
    long = replace(first, flops=10**12)
    assert parts(long, replace(steady, steps=1), last) == [
        "first step", "steady step, 1 of 1 between first and last", "last step",
    ]  # fmt: skip


def test_the_only_step_waits_for_its_copies_in_and_out():
    (_, _, last) = call().classes
    whole = replace(call(), classes=(last,), grid=(1,), grid_steps=1)
    lanes = {(b.lane, b.label) for b in segments(program(whole), (), V6E, {})}
    assert {("copy in", "this step's blocks"), ("copy out", "this step's blocks")} <= lanes


def test_a_steps_scalar_code_and_fixed_cost_are_part_of_its_compute():
    bars = segments(program(call()), (schedule(1000),), V6E, {})
    clock_mhz = V6E.clock_hz / 1e6
    lengths = {b.label: b.duration_us for b in bars if b.lane == "compute"}
    assert lengths == pytest.approx(
        {"grid step": 0.2, "(pipeline)": (300 + 200) / clock_mhz, "step": (1000 + 10) / clock_mhz}
    )


def test_copies_bound_by_the_hbm_follow_one_another():
    bars = [b for b in segments(program(call()), (schedule(1),), V6E, {}) if "steady" in b.part]
    copied_in, out = (next(b for b in bars if b.lane == lane) for lane in ("copy in", "copy out"))
    assert out.start_us == pytest.approx(copied_in.start_us + copied_in.duration_us)


def test_what_xla_holds_in_vmem_is_not_copied():
    # The schedule allocates a window for the output alone.
    held = replace(schedule(1000), vmem={"output window 0": 2**20})
    bars = segments(program(call()), (held,), V6E, {})
    assert {b.lane for b in bars} == {"compute", "copy out"}
    assert latency.edge_seconds(call(), V6E, frozenset({0}))[0] == 0


def test_a_call_the_compiler_merged_with_another_has_no_strip():
    whole = program(call(), call(name="second"))
    assert {b.call for b in segments(whole, (schedule(1000),), V6E, {})} == {"kernel"}
