"""The worker that owns the TPU: a job a line on stdin, answers on its own pipe.

Expendable: a kernel may hang the chip or abort the process. Started by `tpu.py`, and by
`interpreted.py` for the CPU.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax  # before anything else may ask for a device

from autotune.child import Answer, serve
from autotune.compiler.task import Task
from autotune.compiler.verdict import classify
from autotune.errors import AutotuneError, KernelError
from autotune.measure.bench import Bench, OversizeError
from autotune.measure.check import Checked
from autotune.measure.inputs import UnfitError
from autotune.measure.timing import Effort
from autotune.measure.trace import TraceError


def main(answers_fd: int) -> None:
    """Serves until stdin ends. The first line says the platform."""
    with serve(answers_fd) as (next_job, answer):
        hello = next_job()
        try:
            bench = Bench(hello["platform"])
            bench.verify()
        except (AutotuneError, RuntimeError) as error:
            answer({"failed": " ".join(str(error).split())})
            return
        answer({"ready": True, "device_kind": bench.device.device_kind, "jax": jax.__version__})
        while True:
            _do(bench, next_job(), answer)


def _do(bench: Bench, job: dict[str, Any], answer: Answer) -> None:
    match job["do"]:
        case "clear":
            bench.clear()
            answer({"end": True})
        case "compile":
            _compile(bench, job, answer)
        case "check":
            answer(_checked(lambda: bench.check(job["name"], job["seed"])))
        case "interpret":
            answer(_checked(lambda: bench.interpret(Task.from_json(job["task"]), job["seed"])))
        case "time":
            answer(_times(bench, job))


def _compile(bench: Bench, job: dict[str, Any], answer: Answer) -> None:
    """Says of each candidate when it is begun and what became of it, then that all is done."""

    def one(name: str, record: dict[str, Any]) -> None:
        answer({"begun": name})
        verdict: dict[str, Any] = {"status": "ok", "reason": None, "twin": None}
        try:
            verdict["twin"] = bench.compile(name, Task.from_json(record))
        except (Exception, SystemExit) as error:
            verdict |= _verdict(error)
        answer({"done": name, **verdict})

    with ThreadPoolExecutor(job["threads"]) as threads:
        list(threads.map(lambda item: one(*item), job["tasks"].items()))
    answer({"end": True})


def _checked(run: Any) -> dict[str, Any]:
    """The check's record; `tainted` where the device raised and is not to be trusted any more."""
    try:
        return {"checked": run().to_json(), "tainted": False}
    except (Exception, SystemExit) as error:
        verdict = _verdict(error)
        known = isinstance(error, KernelError | UnfitError)
        return {"checked": Checked(**verdict, how="not checked").to_json(), "tainted": not known}


def _times(bench: Bench, job: dict[str, Any]) -> dict[str, Any]:
    samples: dict[str, Any] = {}
    failed: dict[str, dict[str, Any]] = {}
    try:
        found = bench.time(
            job["names"], timer=job["timer"], effort=Effort(**job["effort"]), seed=job["seed"]
        )
    except (Exception, SystemExit) as error:
        return {"samples": {}, "failed": dict.fromkeys(job["names"], _verdict(error)),
                "tainted": True}  # fmt: skip
    for name, times in found.items():
        if isinstance(times, TraceError):
            failed[name] = {"status": "failed", "reason": str(times)}
        else:
            samples[name] = times
    return {"samples": samples, "failed": failed, "tainted": False}


def _verdict(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OversizeError):
        return {"status": "oom", "reason": str(error)}
    if isinstance(error, KernelError | UnfitError):
        return {"status": "failed", "reason": str(error)}
    verdict = asdict(classify(error))
    # Host code that the program called: what it raised stands behind its traceback.
    raised = re.findall(r"^[A-Za-z_][\w.]*(?:Error|Exception): .+$", str(error), re.MULTILINE)
    if raised and "Traceback (most recent call last)" in str(error):
        verdict["reason"] = " ".join(raised[-1].split())[:500]
    return {"status": verdict["status"], "reason": verdict["reason"]}


if __name__ == "__main__":
    main(int(sys.argv[1]))
