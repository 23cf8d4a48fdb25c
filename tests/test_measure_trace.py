"""Device times out of traces with the structure of a TPU's, and out of a real one of the CPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from autotune.measure.trace import TraceError, durations_ms

A, B = "jit_autotune_00000", "jit_autotune_00001"


def line(name, events, *, start_ns=0):
    """Events are (metadata id, offset us, duration us)."""
    rows = "".join(
        f"events {{ metadata_id: {i} offset_ps: {int(o * 1e6)} duration_ps: {int(d * 1e6)} }}\n"
        for i, o, d in events
    )
    return f'lines {{ name: "{name}" timestamp_ns: {start_ns}\n{rows} }}\n'


def plane(name, names, *lines):
    metadata = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}\n' for i, n in names.items()
    )
    return f'planes {{ name: "{name}"\n{"".join(lines)}{metadata} }}\n'


def tpu_plane(number, modules, names=None):
    """A core's plane: steps, modules, and operations inside them, shorter than their module."""
    names = names or {1: f"{A}(1234567890)", 2: f"{B}(987)", 3: "jit_generate(55)", 9: "matmul.1"}
    operations = [(9, o + d / 4, d / 2) for _, o, d in modules]
    return plane(
        f"/device:TPU:{number}",
        names,
        line("Steps", [(9, o, d) for _, o, d in modules]),
        line("XLA Modules", modules),
        line("XLA Ops", operations),
    )


HOST = plane("/host:CPU", {1: "PjitFunction"}, line("python", [(1, 0, 1000)]))


def read(*planes):
    return durations_ms_of("".join(planes))


def durations_ms_of(text, runs=None):
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    return durations_ms(profile, runs or {A: 2, B: 2})


def test_a_modules_time_is_that_of_its_event_not_of_the_operations_in_it():
    modules = [(1, 0, 10), (2, 20, 30), (2, 60, 31), (1, 100, 11)]
    found = read(HOST, tpu_plane(0, modules))
    assert found[A] == pytest.approx([0.010, 0.011])
    assert found[B] == pytest.approx([0.030, 0.031])


def test_runs_are_in_order_of_time_whatever_the_order_in_the_file():
    found = read(tpu_plane(0, [(1, 100, 11), (2, 60, 31), (1, 0, 10), (2, 20, 30)]))
    assert found[A] == pytest.approx([0.010, 0.011])


def test_other_programs_in_between_are_left_out():
    modules = [(3, 0, 500), (1, 600, 10), (2, 700, 30), (3, 750, 9), (1, 800, 10), (2, 900, 30)]
    assert read(tpu_plane(0, modules))[A] == pytest.approx([0.010, 0.010])


def test_of_several_cores_the_slowest_counts_run_by_run():
    first = [(1, 0, 10), (2, 20, 30), (1, 60, 12), (2, 80, 30)]
    second = [(1, 0, 11), (2, 20, 29), (1, 60, 11), (2, 80, 35)]
    found = read(tpu_plane(0, first), tpu_plane(1, second))
    assert found[A] == pytest.approx([0.011, 0.012])
    assert found[B] == pytest.approx([0.030, 0.035])


def test_a_core_that_ran_nothing_is_no_fault():
    modules = [(1, 0, 10), (2, 20, 30), (1, 60, 12), (2, 80, 30)]
    found = read(tpu_plane(0, modules), tpu_plane(1, [(3, 0, 7)]), tpu_plane(2, []))
    assert found[A] == pytest.approx([0.010, 0.012])


def test_a_missing_event_costs_its_program_all_its_times_and_no_other():
    found = read(tpu_plane(0, [(1, 0, 10), (2, 20, 30), (2, 60, 31)]))
    assert isinstance(found[A], TraceError)
    assert str(found[A]) == "the trace holds 1 of 2 runs on /device:TPU:0"
    assert found[B] == pytest.approx([0.030, 0.031])


def test_a_missing_event_on_the_second_core_is_seen():
    whole = [(1, 0, 10), (2, 20, 30), (1, 60, 12), (2, 80, 30)]
    found = read(tpu_plane(0, whole), tpu_plane(1, whole[:3]))
    assert str(found[B]) == "the trace holds 1 of 2 runs on /device:TPU:1"
    assert found[A] == pytest.approx([0.010, 0.012])


def test_an_event_too_many_is_an_error_too():
    found = read(tpu_plane(0, [(1, 0, 10), (1, 20, 10), (1, 40, 10), (2, 60, 1), (2, 80, 1)]))
    assert str(found[A]) == "the trace holds 3 of 2 runs on /device:TPU:0"


def test_a_device_without_events_gives_no_time_and_never_zero():
    found = read(HOST, tpu_plane(0, []))
    assert {str(error) for error in found.values()} == {"the trace holds 0 of 2 runs"}


def test_an_event_of_no_length_is_no_time():
    found = read(tpu_plane(0, [(1, 0, 0), (2, 20, 30), (1, 60, 12), (2, 80, 30)]))
    assert str(found[A]) == "the trace holds a run that took no time"


def test_a_trace_without_a_device_plane_names_what_it_has():
    with pytest.raises(TraceError, match=r"no device plane \(it has Task Environment\)"):
        durations_ms_of(plane("Task Environment", {}))
    with pytest.raises(TraceError, match=r"no device plane \(it has none\)"):
        durations_ms_of("")


def test_a_name_that_begins_like_another_is_another():
    names = {1: f"{A}(1)", 2: f"{A}_reduced(2)"}
    found = durations_ms_of(tpu_plane(0, [(1, 0, 10), (2, 20, 30), (1, 60, 12)], names), {A: 2})
    assert found[A] == pytest.approx([0.010, 0.012])


def test_a_real_trace_of_the_cpu_backend_has_every_run_of_every_program(tmp_path: Path):
    def made(name, times):
        def program(x):
            for _ in range(times):
                x = jnp.tanh(x @ x)
            return x

        program.__name__ = name
        return jax.jit(program)

    x = jnp.ones((256, 256))
    programs = {"autotune_00000": made("autotune_00000", 1), "other": made("other", 40)}
    for program in programs.values():
        jax.block_until_ready(program(x))
    order = ["autotune_00000", "other", "other", "autotune_00000", "other"]
    with jax.profiler.trace(str(tmp_path)):
        for name in order:
            jax.block_until_ready(programs[name](x))
    (file,) = tmp_path.rglob("*.xplane.pb")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = durations_ms(ProfileData.from_file(str(file)), {A: 2, "jit_other": 3, B: 1})
    assert len(found[A]) == 2
    assert len(found["jit_other"]) == 3
    assert min(found["jit_other"]) > 0
    assert sum(found["jit_other"]) / 3 > sum(found[A]) / 2, "40 products take longer than one"
    assert str(found[B]) == "the trace holds 0 of 1 runs"
