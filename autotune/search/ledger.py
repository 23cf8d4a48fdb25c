"""What is done and by whom: a study of a stage of a problem, in which each candidate is one trial.

A trial is begun by one sweep (RUNNING, with its owner) and ends with the candidate's record, which
all others take from there: no candidate is worked on twice, and hosts need no common file system.
What a sweep that died had begun is closed, and begun anew by whoever wants it next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from autotune.candidate import Candidate, Scalar
from autotune.search.fleet import Fleet, study_id

CONFIG, OWNER, LATENCY, RECORD = "config", "owner", "latency_ms", "record"
"""A trial's attributes. One that ended without a record was lost, and counts for nothing."""
POLL_S = 0.2

Record = TypeVar("Record")
Work = Callable[[Iterable[Candidate]], Iterator[tuple[Candidate, Record]]]
"""Does candidates, pulled one by one as there is room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """What a study is about; its parts make the study's name.

    Attributes:
      stage: `compile`, `measure`, or `confirm` with the number of candidates measured before.
      subject: kernel, device and problem key.
      method: versions and sources that records depend on.
      candidates: all legal ones. A study never sees others: Optuna refuses a parameter whose values
        change, whatever their order was.
    """

    stage: str
    subject: str
    method: str
    candidates: frozenset[Candidate]

    @property
    def family(self) -> str:
        """Of the studies that differ in their space only, and so share records."""
        return f"{self.subject} {self.stage} {_digest(self.method)}"

    @property
    def name(self) -> str:
        return f"{self.family} space {_digest(*sorted(c.json for c in self.candidates))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec(Generic[Record]):
    """A stage's records as JSON and back, the latency of one, and whether one still holds here."""

    encode: Callable[[Record], dict[str, Any]]
    decode: Callable[[dict[str, Any]], Record]
    latency_ms: Callable[[Candidate, Record], float | None]
    holds: Callable[[Record], bool] = lambda record: True


class Ledger(Generic[Record]):
    """The trials of one topic, as a context manager that gives back what it has not finished.

    Args:
      fresh: begin a study of its own, which takes nothing over.
    """

    def __init__(
        self, fleet: Fleet, topic: Topic, codec: Codec[Record], *, fresh: bool = False
    ) -> None:
        self._fleet, self._codec = fleet, codec
        self._storage, self._backend = fleet.storage, fleet.storage.backend
        self._axes = axes(topic.candidates)
        self._begun: dict[Candidate, int] = {}
        self._outdated: frozenset[int] = frozenset()
        with self._storage.exclusive():
            run, relatives = self._relatives(topic.family, fresh=fresh)
            self._study = study_id(self._storage, topic.name + (f" run {run}" if run else ""))
            self._release_dead(self._trials())
        ended = self._ended(self._study).values()
        self._outdated = frozenset(t.number for t in ended if not codec.holds(self._record(t)))
        self._inherited: dict[str, Any] = {}
        for relative in relatives:
            for config, trial in self._ended(relative).items():
                if relative != self._study and codec.holds(self._record(trial)):
                    self._inherited.setdefault(config, trial)

    def __enter__(self) -> Ledger[Record]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._storage.exclusive():
            for number in self._begun.values():
                self._close(number)
        self._begun.clear()

    def share(
        self, wanted: Sequence[Candidate], work: Work[Record], stop: Callable[[], bool]
    ) -> Iterator[tuple[Candidate, Record]]:
        """The record of each candidate, made here or by another sweep, as it becomes known.

        Once `stop()`, nothing more is begun, and what others have begun is not waited for.
        """
        left = {candidate.json: candidate for candidate in wanted}
        while left:
            stopped = stop()
            for config, trial in self._known(left).items():
                yield left.pop(config), self._record(trial)
            if stopped or not left:
                return
            begun = False
            for candidate, record in work(self._claims(self._open(left), stop)):
                begun = True
                if self._finish(candidate, record):
                    yield left.pop(candidate.json), record
            if not begun:
                time.sleep(POLL_S)

    def _known(self, wanted: dict[str, Candidate]) -> dict[str, Any]:
        """Config -> the trial that ended with its record, taken over from a relative if need be."""
        known = self._ended(self._study)
        for config in wanted.keys() & self._inherited.keys() - known.keys():
            with self._storage.exclusive():
                known = self._ended(self._study)
                if config not in known:
                    attributes = self._inherited[config].user_attrs
                    self._create(wanted[config], self._inherited[config].state, attributes)
                    known[config] = self._inherited[config]
        return {config: known[config] for config in wanted if config in known}

    def _open(self, wanted: dict[str, Candidate]) -> list[Candidate]:
        """Those that seem to be free: a look that needs no lock, as most have none to claim."""
        taken = {
            trial.user_attrs.get(CONFIG)
            for trial in self._trials()
            if self._counts(trial)
            and (trial.state.is_finished() or self._fleet.alive(trial.user_attrs.get(OWNER)))
        }
        return [candidate for config, candidate in wanted.items() if config not in taken]

    def _claims(self, wanted: Sequence[Candidate], stop: Callable[[], bool]) -> Iterator[Candidate]:
        """Those of `wanted` that nobody has, each begun here as it is pulled."""
        for candidate in wanted:
            if stop():
                return
            if self._claim(candidate):
                yield candidate

    def _claim(self, candidate: Candidate) -> bool:
        from optuna.trial import TrialState

        with self._storage.exclusive():
            trials = self._trials()
            if self._release_dead(trials):
                trials = self._trials()
            if any(t.user_attrs.get(CONFIG) == candidate.json and self._counts(t) for t in trials):
                return False
            attributes = {CONFIG: candidate.json, OWNER: self._fleet.identity.text}
            self._begun[candidate] = self._create(candidate, TrialState.RUNNING, attributes)
            return True

    def _finish(self, candidate: Candidate, record: Record) -> bool:
        """Stores a record; False where others had given this sweep up, and the candidate back.

        The latency comes before the record: what has a record has all.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        number = self._begun.pop(candidate)
        latency_ms = self._codec.latency_ms(candidate, record)
        text = json.dumps(self._codec.encode(record), separators=(",", ":"))
        with self._storage.exclusive():
            try:
                if latency_ms is not None:
                    self._backend.set_trial_user_attr(number, LATENCY, latency_ms)
                self._backend.set_trial_user_attr(number, RECORD, text)
            except UpdateFinishedTrialError:
                return False
            self._close(number)
        return True

    def _release_dead(self, trials: Iterable[Any]) -> bool:
        """Closes what sweeps that died had begun; whether there was any."""
        running = [trial for trial in trials if not trial.state.is_finished()]
        owners = {trial.user_attrs.get(OWNER) for trial in running}
        dead = {who for who in owners if not self._fleet.alive(who)}
        for trial in running:
            if trial.user_attrs.get(OWNER) in dead:
                self._close(trial._trial_id)
        return bool(dead)

    def _close(self, number: int) -> None:
        """Ends a trial: with its latency, as a failure that has a record, or as lost."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        attributes = self._backend.get_trial(number).user_attrs
        latency_ms = attributes.get(LATENCY) if RECORD in attributes else None
        state = TrialState.FAIL if latency_ms is None else TrialState.COMPLETE
        values = None if latency_ms is None else [latency_ms]
        with contextlib.suppress(UpdateFinishedTrialError):  # closed by those who gave us up
            self._backend.set_trial_state_values(number, state, values)

    def _create(self, candidate: Candidate, state: Any, attributes: dict[str, Any]) -> int:
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import create_trial

        trial = create_trial(
            state=state,
            value=attributes.get(LATENCY) if state.name == "COMPLETE" else None,
            params=candidate.config,
            distributions={n: CategoricalDistribution(self._axes[n]) for n in candidate.config},
            user_attrs=attributes,
        )
        number: int = self._backend.create_new_trial(self._study, trial)
        return number

    def _counts(self, trial: Any) -> bool:
        """Whether a trial stands for its candidate: at work, or ended with a record that holds."""
        if not trial.state.is_finished():
            return True
        return RECORD in trial.user_attrs and trial.number not in self._outdated

    def _ended(self, study: int) -> dict[str, Any]:
        """Config -> the trial that ended with its record."""
        outdated = self._outdated if study == self._study else ()
        return {
            trial.user_attrs[CONFIG]: trial
            for trial in reversed(self._trials(study))
            if trial.state.is_finished()
            and RECORD in trial.user_attrs
            and trial.number not in outdated
        }

    def _record(self, trial: Any) -> Record:
        return self._codec.decode(json.loads(trial.user_attrs[RECORD]))

    def _trials(self, study: int | None = None) -> list[Any]:
        number = self._study if study is None else study
        trials: list[Any] = self._backend.get_all_trials(number, deepcopy=False)
        return trials

    def _relatives(self, family: str, *, fresh: bool) -> tuple[int, list[int]]:
        """(run to work in, studies whose records hold for it): the newest, or a new one."""
        import optuna

        runs: dict[int, list[int]] = {}
        for study in optuna.study.get_all_study_names(self._backend):
            if study.startswith(f"{family} space "):
                run = int(study.partition(" run ")[2] or 0)
                runs.setdefault(run, []).append(self._backend.get_study_id_from_name(study))
        newest = max(runs, default=-1)
        return (newest + 1, []) if fresh else (max(newest, 0), runs.get(newest, []))


def axes(candidates: Iterable[Candidate]) -> dict[str, list[Scalar]]:
    """Tunable -> its values among the candidates, in a fixed order."""
    values: dict[str, dict[str, Scalar]] = {}
    for candidate in candidates:
        for name, value in candidate.items:
            values.setdefault(name, {})[repr(value)] = value
    return {n: sorted(v.values(), key=_value_order) for n, v in sorted(values.items())}


def _value_order(value: Scalar) -> tuple[str, float, str]:
    numeric = isinstance(value, int | float)
    return (type(value).__name__, float(value) if numeric else 0.0, str(value))  # type: ignore[arg-type]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
