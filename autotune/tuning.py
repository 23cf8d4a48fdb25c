"""`autotune.tune`: one sweep from a script or a notebook, its leaderboard as a DataFrame."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune import device as devices
from autotune import overrides, sweep
from autotune.config import Config, ProblemSpec
from autotune.errors import InputError, UnknownNameError, shown
from autotune.kernels import base, external
from autotune.kernels.base import Kernel
from autotune.leaderboard import Board
from autotune.plan import Plan
from autotune.progress import Quiet
from autotune.row import SCHEMA, Row

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("shape", "options", "dtype", "device", "name")
"""What a problem consists of."""
UNTIL = ("model", "compile", "measure")


def tune(
    kernel: str | Kernel,
    problem: Mapping[str, Any] | None = None,
    *,
    shape: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    dtype: Any = None,
    device: str | Sequence[str] | None = None,
    name: str | None = None,
    space: Mapping[str, Any] | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    until: str | None = None,
    results: str | Path | None = None,
    seed: int = 0,
    jobs: int | None = None,
    timeout: float = 300.0,
    fresh: bool = False,
) -> pd.DataFrame:
    """Tunes one kernel on one problem and returns its leaderboard, best first.

        >>> import autotune
        >>> board = autotune.tune("matmul", shape={"m": 4096, "k": 7168, "n": 18432}, device="v6e")
        >>> board.loc[board.is_best, ["config", "latency_ms", "evidence"]]

    Args:
      kernel: the name of a kernel (`autotune kernels` lists them), `package.module:ATTRIBUTE`, or a
        `Kernel` of yours. One from a notebook's cell or a script is sent to the worker processes by
        value; what it uses from other modules they must be able to import.
      problem: a mapping of `shape`, `options`, `dtype`, `device` and `name`, which may be given as
        arguments of their own instead.
      shape: axis -> size.
      options: the kernel's options; its defaults where left out.
      dtype: of the operands, a name or `jnp.float32` and the like; bfloat16 unless given.
      device: name of a chip, or a list of them, whose leaderboards come one below the other; the
        attached TPU unless given.
      name: a label, for tables.
      space: tunable -> a value or a list of values, in place of the kernel's own.
      trials: candidates to compile at most; 48 unless given. `seconds`: time for compiling.
      until: last stage, `model`, `compile` or `measure`; as far as this machine can unless given.
      results: a folder the leaderboard is merged into, as `autotune sweep --results` does; None
        writes nothing but the compile cache.
      seed: of the search.
      jobs: worker processes.
      timeout: seconds that one candidate may take.
      fresh: ignore cached evidence and a stored leaderboard.

    Returns:
      A DataFrame of a row a candidate, in the columns of a stored leaderboard: `config` and
      `problem` are JSON text, `status` says how a candidate ended and `reason` why, `latency_ms` is
      by the row's `evidence`, `rank` is null for candidates that were not ranked. Whole numbers are
      nullable `Int64`. It has no row of rank 1 where no candidate survived.

    Raises:
      InputError: anything wrong in the arguments, in one line: the problem, the space, a number.
      KernelError: the kernel broke its contract.
      NoCompilerError, NoTpuError: `until` names a stage that this machine cannot run.
    """
    parts = _parts(problem, shape=shape, options=options, dtype=dtype, device=device, name=name)
    _check_numbers(trials=trials, seconds=seconds, timeout=timeout, jobs=jobs, seed=seed)
    if until not in (None, *UNTIL):
        raise UnknownNameError("stage for until", str(until), UNTIL)
    names = _device_names(parts.pop("device", None))
    with _loaded(kernel) as found, _folder(results) as folder:
        specs = tuple(_spec(found, parts, each, space) for each in names)
        plan = Plan(
            until=until, results=folder, jobs=jobs, timeout_s=timeout, seed=seed, trials=trials,
            seconds=seconds, fresh=fresh,
        )  # fmt: skip
        boards = sweep.run([Config(path="autotune.tune", problems=specs)], plan, Quiet())
        return _frame(boards)


def _parts(problem: Mapping[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """The problem's parts, from the mapping and the arguments. Raises InputError for a clash."""
    if problem is not None and not isinstance(problem, Mapping):
        raise InputError(f"problem: {shown(problem)} is not allowed; a mapping of its parts")
    parts = dict(problem or {})
    for part in parts:
        if part not in PARTS:
            raise UnknownNameError("part of a problem", str(part), PARTS)
    for part, value in arguments.items():
        if value is not None and part in parts:
            raise InputError(f"{part}: given in the problem and as an argument; give it once")
        if value is not None:
            parts[part] = value
    if not isinstance(parts.get("name", ""), str):
        raise InputError(f"name: {shown(parts['name'])} is not allowed; a text")
    for part in ("shape", "options"):
        if not isinstance(parts.get(part, {}), Mapping):
            raise InputError(f"{part}: {shown(parts[part])} is not allowed; a mapping")
    return parts


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if value is None:
            continue
        whole = name not in ("seconds", "timeout")
        least = 0 if name == "seed" else 1 if whole else None
        kind = int if whole else int | float
        good = isinstance(value, kind) and not isinstance(value, bool)
        if not good or not (value > 0 if least is None else value >= least):
            allowed = "a number above 0" if least is None else f"a whole number of at least {least}"
            raise InputError(f"{name}: {shown(value)} is not allowed; {allowed}")


def _device_names(given: Any) -> list[str]:
    """Each device once. Raises InputError for none."""
    if given is None or given == "auto":
        attached = devices.attached()
        if attached is None:
            known = ", ".join(devices.DEVICES)
            raise InputError(f"device: no TPU is attached, so name one of {known}")
        return [attached.name]
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names:
        raise InputError(f"device: {shown(given)} is not allowed; a name or a list of at least one")
    return list(dict.fromkeys(devices.get(name).name for name in names))


@contextlib.contextmanager
def _loaded(kernel: str | Kernel) -> Iterator[Kernel]:
    if isinstance(kernel, Kernel):
        with external.importable(kernel) as found:
            yield found
    elif isinstance(kernel, str):
        yield base.load(kernel)
    else:
        raise InputError(
            f"kernel: {shown(kernel)} is not allowed; a name, package.module:ATTRIBUTE or a Kernel"
        )


@contextlib.contextmanager
def _folder(results: str | Path | None) -> Iterator[Path]:
    if results is not None:
        if not isinstance(results, str | Path):
            raise InputError(f"results: {shown(results)} is not allowed; a folder")
        yield Path(results)
        return
    with tempfile.TemporaryDirectory(prefix="autotune-tune-") as folder:
        yield Path(folder)


def _spec(
    kernel: Kernel, parts: Mapping[str, Any], device: str, space: Mapping[str, Any] | None
) -> ProblemSpec:
    problem = base.make_problem(
        kernel,
        device=device,
        shape={axis: _plain(size) for axis, size in parts.get("shape", {}).items()},
        options=parts.get("options"),
        dtype=_dtype_name(parts.get("dtype", "bfloat16")),
        name=parts.get("name"),
    )
    if space is not None and (not isinstance(space, Mapping) or not space):
        raise InputError(f"space: {shown(space)} is not allowed; tunable -> value or list")
    given = {
        n: [_plain(each) for each in v] if isinstance(v, list | tuple | range) else _plain(v)
        for n, v in (space or {}).items()
    }
    checked = overrides.checked(kernel, problem, devices.get(device), given)
    return ProblemSpec(problem=problem, space=checked, where="autotune.tune")


def _dtype_name(given: Any) -> Any:
    """`jnp.bfloat16` and the like by their names; what is no dtype as it is."""
    if given is None or isinstance(given, str):
        return given
    try:
        return np.dtype(given).name
    except TypeError:
        return given


def _plain(value: Any) -> Any:
    """A NumPy number, as notebooks have them, as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _frame(boards: Sequence[Board]) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    rows = [row for board in boards for row in board.rows]
    columns = {f.name: [getattr(row, f.name) for row in rows] for f in fields(Row)}
    # Without a type that has a null, a column of whole numbers and nulls would become floats.
    whole = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
    frame: pd.DataFrame = pa.table(columns, schema=SCHEMA).to_pandas(types_mapper=whole.get)
    return frame
