"""`best_config`: the tuned block sizes of a problem, from stored leaderboards."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune import stale
from autotune.candidate import Scalar
from autotune.errors import InputError, NoResultError, shown
from autotune.lookup import library, sources
from autotune.lookup.built_in import BUILT_IN
from autotune.lookup.library import Library, StaleResultsWarning, Stored
from autotune.lookup.query import Query, distance, misfit

OnMiss = Literal["error", "default", "nearest"]
ON_MISS = ("error", "default", "nearest")
_MOST_ANSWERS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """What a config was found for, and on what grounds.

    Attributes:
      match: `exact`, `nearest`, or `default` (the kernel's own, nothing stored).
      reason: one line, for `nearest` and `default`.
      problem: shape, options and dtype of the stored problem; for `default`, of the asked one.
      evidence: `measured`, `compiled` or `model`; None for a default.
      latency_ms: of the stored problem, by that evidence.
      stale: what changed since: versions of jax and libtpu, the kernel's source; else None.
    """

    match: str
    kernel: str
    device: str
    problem: Mapping[str, Any]
    reason: str | None = None
    problem_name: str | None = None
    problem_key: str | None = None
    evidence: str | None = None
    timer: str | None = None
    latency_ms: float | None = None
    mfu: float | None = None
    jax_version: str | None = None
    libtpu_version: str | None = None
    stale: str | None = None
    path: str | None = None


class BestConfig(dict[str, Scalar]):
    """A config, to be passed on as `**config`; `found` says where it comes from."""

    __slots__ = ("found",)

    def __init__(self, config: Mapping[str, Scalar], found: Match) -> None:
        super().__init__(config)
        self.found = found


def best_config(
    kernel: str,
    shape: Mapping[str, int],
    *,
    device: str,
    options: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    on_miss: OnMiss = "error",
    results: str | Path | None = None,
) -> BestConfig:
    """The best stored config of a problem, measured before compiled before modelled.

    Imports no jax, is thread-safe, and takes microseconds once the results are read. Never answers
    with another device, dtype or options; with another shape only under `on_miss="nearest"`.

    Args:
      kernel: as in the config file: `matmul`, `jax.splash`, `package.module:ATTRIBUTE` …; of a
        user's own also the name of its folder under the results, `package.module.ATTRIBUTE`.
      shape: axis -> size. An axis left out has the kernel's default size, else 1.
      device: `tpu7x`, `v6e` …, or `jax.Device.device_kind` of one.
      options: the kernel's; those at their defaults may be left out.
      on_miss: `error`; `nearest`, the nearest stored shape whose blocks divide the asked one (not
        checked of a user's own kernel, as `found.reason` says);
        `default`, the kernel's own default, for which the kernel and so jax are imported.
      results: a directory or file of leaderboards, or `package:your_package.folder`; else
        $AUTOTUNE_RESULTS, else `results` in the current directory.

    Warns:
      StaleResultsWarning: once a leaderboard, for one made with another release of jax or libtpu.

    Raises:
      NoResultError: nothing stored answers (it is a LookupError too).
      InputError: a name that is wrong whatever is stored (of a device, a kernel, a dtype, one of
        the kernel's axes or options), an option's value or a dtype that a built-in kernel does not
        take, a size below 1 or above 2^31, results that do not exist.
    """
    if on_miss not in ON_MISS:
        raise InputError(f"on_miss: {shown(on_miss)} is not allowed; {', '.join(ON_MISS)}")
    query = Query.of(kernel, shape, device=device, options=options, dtype=dtype)
    source = sources.source_of(results)
    answer = _found(query, source, on_miss)
    if answer.stored is not None:
        _warn_once(answer.stored, answer.found)
    return BestConfig(answer.config, answer.found)


def match_of(stored: Stored, *, reason: str | None = None) -> Match:
    """What is known of a stored row; `reason` says why it stands in for the asked problem."""
    row = stored.row
    return Match(
        match="nearest" if reason else "exact",
        reason=reason,
        kernel=row.kernel,
        device=row.device,
        problem={"shape": stored.shape, "options": stored.options, "dtype": stored.dtype},
        problem_name=row.problem_name,
        problem_key=row.problem_key,
        evidence=row.evidence,
        timer=row.timer,
        latency_ms=row.latency_ms,
        mfu=row.mfu,
        jax_version=row.jax_version,
        libtpu_version=row.libtpu_version,
        stale=stale.reason(row),
        path=stored.path,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What answers a query, and the stored row that it rests on, where it rests on one."""

    config: Mapping[str, Scalar]
    found: Match
    stored: Stored | None = None

    @property
    def holds(self) -> bool:
        return self.stored is None or self.stored.unchanged


def _found(query: Query, source: str, on_miss: str) -> _Answer:
    """What answers, from memory where nothing changed since: of an exact answer its own file, of
    any other the folders too, since a better one may have been swept.

    Raises NoResultError, and InputError for a name that the kernel does not have.
    """
    asked = (
        query.kernel, query.device, query.dtype, on_miss, tuple(query.shape.items()),
        _text(query.options),
    )  # fmt: skip
    known: _Answer | str | None = library.opened(source).answers.get(asked)
    if isinstance(known, _Answer) and known.found.match == "exact" and known.holds:
        return known
    shelf = library.opened(source, fresh=True)
    known = shelf.answers.get(asked)
    if known is None or (isinstance(known, _Answer) and not known.holds):
        known = _answered(query, shelf, on_miss)
        if isinstance(known, _Answer) and not known.holds:  # written over in place
            shelf = library.opened(source, rewritten=True)
            known = _answered(query, shelf, on_miss)
        if len(shelf.answers) >= _MOST_ANSWERS:
            shelf.answers.clear()
        shelf.answers[asked] = known
    if isinstance(known, str):
        raise NoResultError(known)
    return known


def _answered(query: Query, shelf: Library, on_miss: str) -> _Answer | str:
    """The answer, or why there is none. Raises InputError for what the kernel does not have."""
    query = query.checked(shelf)
    alike = _alike(query, shelf)
    exact = next((s for shape, s in query.beside(alike) if shape == s.shape), None)
    if exact is not None:
        return _Answer(config=exact.config, found=match_of(exact), stored=exact)
    absent = _absent(query, shelf)
    if on_miss == "default":
        return _default(query, absent)
    if on_miss == "nearest":
        return _nearest(query, alike, absent)
    return f"{absent}; `autotune sweep` makes one"


def _alike(query: Query, shelf: Library) -> Sequence[Stored]:
    """What is stored of the same kernel, device, dtype and options; kept for other shapes' sake."""
    asked = (query.place, _text(query.options))
    if asked not in shelf.alike:
        if len(shelf.alike) >= _MOST_ANSWERS:
            shelf.alike.clear()
        there = shelf.shelves.get(query.place, ())
        shelf.alike[asked] = tuple(s for s in there if query.same_options(s))
    return shelf.alike[asked]


def _text(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _nearest(query: Query, alike: Sequence[Stored], absent: str) -> _Answer | str:
    near = [(distance(shape, s), shape, s) for shape, s in query.beside(alike)]
    near.sort(key=lambda each: each[0])  # stable: stronger evidence, then newer, stays first
    first_misfit = None
    for away, shape, stored in near:
        reason = misfit(shape, stored)
        if reason is None:
            why = _why(
                shape, stored, f"nearest of {len(near)} stored shapes (log2 distance {away:.2f})"
            )
            return _Answer(config=stored.config, found=match_of(stored, reason=why), stored=stored)
        first_misfit = first_misfit or reason
    return f"{absent}; the nearest does not fit: {first_misfit}" if first_misfit else absent


def _why(shape: Mapping[str, int], stored: Stored, nearest: str) -> str:
    changed = ", ".join(f"{a} {n} for {shape[a]}" for a, n in stored.shape.items() if n != shape[a])
    suits = (
        "its blocks suit the asked shape by the kernel's rules, but nothing was tried on it"
        if stored.row.kernel in BUILT_IN
        else "whether its blocks suit the asked shape was not checked: only the kernel's import "
        "would tell"
    )
    return f"{nearest}: {changed}; same kernel, device, dtype and options; {suits}"


def _absent(query: Query, shelf: Library) -> str:
    """One line: what was not found, and the closest thing that was."""
    told = f"no stored result in {shelf.source} for {query.text}"
    if query.kernel not in shelf.axes:
        return f"{told}; there are results for {', '.join(sorted(shelf.axes)) or 'no kernel'}"
    tuned = [place[1:] for place in shelf.shelves if place[0] == query.kernel]
    if not any(device == query.device for device, _ in tuned):
        chips = sorted({device for device, _ in tuned})
        return f"{told}; {query.kernel} was tuned for {', '.join(chips)}"
    there = shelf.shelves.get(query.place)
    if there is None:
        dtypes = sorted(dtype for device, dtype in tuned if device == query.device)
        return f"{told}; it was tuned in {', '.join(dtypes)}"
    shaped = next((s for shape, s in query.beside(there) if shape == s.shape), None)
    if shaped is not None:
        return f"{told}; that shape was tuned with options {json.dumps(shaped.options)}"
    return f"{told}; other shapes of it were tuned"


def _default(query: Query, reason: str) -> _Answer | str:
    """The kernel's default. Imports the kernel, and with it jax."""
    from autotune import device as devices
    from autotune.kernels import base

    kernel = base.load(query.kernel)
    problem = base.make_problem(
        kernel, device=query.device, shape=query.shape, options=query.options, dtype=query.dtype
    )
    if kernel.default is None:
        return f"{reason}; and kernel {query.kernel} states no default"
    config = base.ask(kernel, "default", kernel.default, problem, devices.get(query.device))
    config = base.ask(kernel, "canonical", kernel.canonical, problem, config)
    return _Answer(
        config=config,
        found=Match(
            match="default",
            reason=f"{reason}; this is the kernel's default, not tuned",
            kernel=query.kernel,
            device=query.device,
            problem=json.loads(problem.json),
            problem_key=problem.key,
        ),
    )


_warned: dict[str | None, object] = {}


def _warn_once(stored: Stored, found: Match) -> None:
    if found.stale is None or stale.outdated(stored.row) is None:
        return
    mine = object()
    if _warned.setdefault(found.path, mine) is not mine:  # one step, so that no other thread warns
        return
    warnings.warn(
        f"{found.kernel} {found.problem_name or found.problem_key}: {found.stale}; sweep again",
        StaleResultsWarning,
        stacklevel=3,
    )
