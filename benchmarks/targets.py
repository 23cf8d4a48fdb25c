"""Measures the speed and memory targets of the sweep and prints a table of them.

    python benchmarks/targets.py [--install]

Times `autotune --help`, the model stage on 1,000 matmul candidates, and a first and a second
`autotune sweep configs/dsv3.yaml` in an empty cache, with the peak memory of the process tree.
`--install` adds `make sweep` on a fresh clone, installation included. Run on an idle machine;
the targets are for two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
AUTOTUNE = [sys.executable, "-m", "autotune"]
MODEL_CONFIG = """
device: tpu7x
problems:
  - kernel: matmul
    shape: {m: 4096, k: 7168, n: 18432}
    space:
      bm: [128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280]
      bk: [128, 256, 512, 896, 1024, 1792, 2048, 3584, 7168, 768]
      bn: [128, 256, 512, 768, 1024, 1152, 1536, 2048, 2304, 4608]
      grid_order: mn
      buffers: 2
      vmem_limit_bytes: null
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Wall time and peak resident memory of a command and all its children."""

    seconds: float
    peak_bytes: int


def measure(command: Sequence[str], *, cwd: Path, cache: Path) -> Run:
    """Runs `command` to its end, sampling the memory of its process tree ten times a second."""
    environment = {**os.environ, "AUTOTUNE_CACHE_DIR": str(cache)}
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        tree, peak = psutil.Process(process.pid), 0
        while process.poll() is None:
            peak = max(peak, _resident(tree))
            time.sleep(0.1)
        error = process.stderr.read().decode() if process.stderr else ""
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {error}")
    return Run(seconds=time.monotonic() - started, peak_bytes=peak)


def _resident(tree: psutil.Process) -> int:
    total = 0
    try:
        for process in [tree, *tree.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def main() -> None:
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        cache, results = work / "cache", str(work / "results")
        dsv3 = [*AUTOTUNE, "sweep", str(ROOT / "configs/dsv3.yaml"), "--results", results]
        model = work / "model.yaml"
        model.write_text(MODEL_CONFIG)

        measure([*AUTOTUNE, "--help"], cwd=ROOT, cache=cache)  # byte code is written once
        rows.append(("autotune --help", "0.5 s", _seconds([*AUTOTUNE, "--help"], cache)))
        only_model = [*AUTOTUNE, "sweep", str(model), "--until", "model", "--results", results]
        rows.append(("model stage, 1,000 matmul candidates", "20 s", _seconds(only_model, cache)))
        first = measure(dsv3, cwd=ROOT, cache=cache)
        rows.append(("autotune sweep configs/dsv3.yaml", "–", f"{first.seconds:.1f} s"))
        rows.append(("  its peak memory", "8 GiB", f"{first.peak_bytes / 2**30:.1f} GiB"))
        rows.append(("the same again", "5 s", _seconds(dsv3, cache)))
        if "--install" in sys.argv[1:]:
            clone = work / "clone"
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            shutil.rmtree(cache)
            fresh = measure(["make", "sweep"], cwd=clone, cache=cache)
            rows.append(("make sweep from nothing", "600 s", f"{fresh.seconds:.1f} s"))
    print(f"{'what':<40} {'target':>8} {'measured':>10}")
    for what, target, measured in rows:
        print(f"{what:<40} {target:>8} {measured:>10}")


def _seconds(command: Sequence[str], cache: Path) -> str:
    return f"{measure(command, cwd=ROOT, cache=cache).seconds:.2f} s"


if __name__ == "__main__":
    main()
