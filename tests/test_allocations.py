"""The VMEM rules of the traced call against what the real compiler allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from call_kernels import MIB, of, temporary_cases, window_cases

pytestmark = pytest.mark.compiler


def compiled(chip: str, what: str) -> dict[str, Any]:
    script = Path(__file__).with_name("allocations.py")
    done = subprocess.run(
        [sys.executable, str(script), chip, what],
        capture_output=True, text=True, timeout=300, cwd=script.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def check_windows(chip: str) -> None:
    allocations = compiled(chip, "windows")
    for label, built in window_cases():
        call = of(built, chip)
        expected = [[f"{w.role} window", w.buffers * w.window_bytes] for w in call.windows]
        expected += [["scratch operand", s.bytes] for s in call.scratch]
        assert allocations[label] == sorted(expected), f"{chip}, {label}"


def test_windows_buffers_and_scratch_are_what_v5e_allocates() -> None:
    check_windows("v5e")


@pytest.mark.nightly
@pytest.mark.parametrize("chip", ["v6e", "tpu7x", "v5p"])
def test_windows_buffers_and_scratch_are_what_other_chips_allocate(chip: str) -> None:
    check_windows(chip)


def check_temporaries(chip: str) -> None:
    needs = compiled(chip, "temporaries")
    for label, build in temporary_cases():
        bound = of(build(None), chip).temporaries_bytes / MIB
        measured = needs[label] or 0.0
        assert bound <= measured + 0.005, f"{chip}, {label}: {bound} MiB is no lower bound"
    assert of(dict(temporary_cases())["online 1024 x 1024"](None), chip).temporaries_bytes > MIB


def test_the_temporaries_of_an_attention_step_are_a_lower_bound_on_tpu7x() -> None:
    check_temporaries("tpu7x")


@pytest.mark.nightly
@pytest.mark.parametrize("chip", ["v6e", "v5e", "v5p", "v4"])
def test_the_temporaries_of_an_attention_step_are_a_lower_bound_on(chip: str) -> None:
    check_temporaries(chip)
