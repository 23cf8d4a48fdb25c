"""The gate: stored best configs against today's kernel, jax and libtpu, or against fresh times."""

from autotune.gate.measured import opener
from autotune.gate.output import annotate, write_json, write_table
from autotune.gate.request import Request
from autotune.gate.run import check
from autotune.gate.verdict import Verdict, exit_status

__all__ = [
    "Request",
    "Verdict",
    "annotate",
    "check",
    "exit_status",
    "opener",
    "write_json",
    "write_table",
]
