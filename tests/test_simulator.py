"""The cost model's cycles against the compiler's own simulator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
]


def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "simulator_check.py"
    spec = importlib.util.spec_from_file_location("simulator_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [1, 3, 4], ids=["v6e bf16", "v6e f32", "v5e f32"])
def test_matmul_cycles_are_within_a_tenth_of_the_compilers_own_simulator(number: int) -> None:
    check = benchmark()
    simulated, predicted = check.simulated_and_predicted(check.CASES[number])
    assert predicted == pytest.approx(simulated, rel=0.1)
