"""Sweeps that share a storage: every candidate once, whoever dies, and one answer for all."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import optuna
import postgresql_server
import psutil
import pytest
from fleet_worker import CODEC, survivors, topic, true_ms
from optuna.trial import TrialState

from autotune.candidate import Candidate
from autotune.errors import InputError
from autotune.search import storage
from autotune.search.fleet import SEATS, Fleet, Identity, joined
from autotune.search.ledger import Ledger
from autotune.search.storage import Storage

WORKER = Path(__file__).parent / "fleet_worker.py"
SIZE = 4
NIGHTLY = pytest.mark.nightly
FILE_FIRST = ("sqlite", *(pytest.param(k, marks=NIGHTLY) for k in ("journal", "postgresql")))
SERVER_FIRST = ("postgresql", *(pytest.param(k, marks=NIGHTLY) for k in ("sqlite", "journal")))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if postgresql_server.binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg")
    with postgresql_server.running() as url:
        yield url


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new storage of the kind that the test names."""
    if request.param != "postgresql":
        return f"{'sqlite:///' if request.param == 'sqlite' else 'journal://'}{tmp_path}/studies"
    return _new_database(request.getfixturevalue("server"))


def _new_database(server: str) -> str:
    import psycopg

    name = f"d{time.monotonic_ns()}"
    with psycopg.connect(f"{server}postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return server + name


def start(url: str, log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, WORKER, url, str(log), str(SIZE)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer_of(worker: subprocess.Popen[str]) -> dict[str, float]:
    out, err = worker.communicate(timeout=120)
    assert (worker.returncode, err) == (0, ""), err
    answer: dict[str, float] = json.loads(out)
    return answer


def events(log: Path) -> list[tuple[int, str, str]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [(pid, what, config) for pid, what, config in map(json.loads, lines)]


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    """Of the only study that has any."""
    with closing(storage.opened(url)) as opened:
        (name,) = (n for n in optuna.study.get_all_study_names(opened.backend) if n != SEATS)
        return optuna.load_study(study_name=name, storage=opened.backend).trials


@pytest.mark.parametrize("url", FILE_FIRST, indirect=True)
def test_four_workers_share_the_work_and_end_with_the_same_answer(url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [start(url, log) for _ in range(4)]
    answers = [answer_of(worker) for worker in workers]
    everything = {j.candidate.json: true_ms(j.candidate) for j in survivors(SIZE)}
    assert answers == [everything] * 4
    begun = Counter(config for _, what, config in events(log) if what == "begin")
    assert begun == dict.fromkeys(everything, 1), "a candidate is timed once"
    assert len({pid for pid, *_ in events(log)}) > 1, "no worker has all of it"
    assert Counter(t.state for t in trials(url)) == {TrialState.COMPLETE: SIZE**2}


@pytest.mark.parametrize("url", SERVER_FIRST, indirect=True)
def test_kill_9_at_random_moments_loses_and_repeats_nothing_finished(
    url: str, tmp_path: Path
) -> None:
    log, chance = tmp_path / "log", random.Random(6)
    workers = [start(url, log) for _ in range(4)]
    killed = []
    while len(killed) < 3:
        count = len(events(log))
        while len(events(log)) < count + chance.randint(1, 5):
            assert any(w.poll() is None for w in workers), "killed too late"
            time.sleep(chance.random() / 100)
        victim = workers.pop(chance.randrange(len(workers)))
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        killed.append(victim.pid)
        workers.append(start(url, log))
    answers = [answer_of(worker) for worker in workers]
    assert answers == [{j.candidate.json: true_ms(j.candidate) for j in survivors(SIZE)}] * 4
    begun = [(pid, config) for pid, what, config in events(log) if what == "begin"]
    for config, count in Counter(config for _, config in begun).items():
        lost = [pid for pid, other in begun if other == config and pid in killed]
        assert count - len(lost) <= 1, f"{config} was timed {count} times, {len(lost)} of them lost"
    states = Counter(t.state for t in trials(url))
    assert states[TrialState.COMPLETE] == SIZE**2
    assert states[TrialState.RUNNING] == states[TrialState.WAITING] == 0
    assert states[TrialState.FAIL] <= len(killed), "what a killed worker had begun, and no more"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_kill_9_of_the_only_worker_and_again_goes_on_from_there(url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = start(url, log)
    while len(events(log)) < 5:
        assert worker.poll() is None, worker.communicate()
        time.sleep(0.005)
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    before = events(log)
    finished = {config for _, what, config in before if what == "end"}
    assert len(answer_of(start(url, log))) == SIZE**2
    again = [config for _, what, config in events(log)[len(before) :] if what == "begin"]
    repeated = finished & set(again)
    assert len(repeated) <= 1, "the last one may have ended and not been stored"
    assert len(again) == len(set(again))
    states = Counter(t.state for t in trials(url))
    assert (states[TrialState.COMPLETE], states[TrialState.RUNNING]) == (SIZE**2, 0)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Storage]:
    with closing(storage.opened(f"sqlite:///{tmp_path}/studies.db")) as opened:
        yield opened


JUDGED = survivors(2)
FIRST, *OTHERS = (j.candidate for j in JUDGED)
ELSEWHERE = Identity(host="another machine", pid=1, started=0.0)


def never() -> bool:
    return False


def begun(ledger: Ledger[float], candidate: Candidate) -> bool:
    """Begins a candidate and leaves it so."""
    return list(ledger._claims([candidate], never)) == [candidate]


def states_of(opened: Storage) -> Counter[str]:
    names = [n for n in optuna.study.get_all_study_names(opened.backend) if n != SEATS]
    return Counter(
        t.state.name
        for name in names
        for t in optuna.load_study(study_name=name, storage=opened.backend).trials
    )


def done(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, float]]:
    yield from ((candidate, 2.0) for candidate in candidates)


def test_a_host_that_falls_silent_gives_its_candidate_back(shared: Storage) -> None:
    lost = Fleet(shared, identity=ELSEWHERE, beat_s=1000)
    assert begun(Ledger(lost, topic(JUDGED), CODEC), FIRST)
    with joined(shared, grace_s=0.3) as fleet, Ledger(fleet, topic(JUDGED), CODEC) as ledger:
        started = time.monotonic()
        assert dict(ledger.share([FIRST], done, never)) == {FIRST: 2.0}
        assert 0.3 <= time.monotonic() - started < 20
    assert states_of(shared) == {"FAIL": 1, "COMPLETE": 1}


def test_a_host_that_beats_keeps_what_it_has_begun_however_long_it_takes(shared: Storage) -> None:
    slow = Fleet(shared, identity=ELSEWHERE, beat_s=0.02)
    with Ledger(slow, topic(JUDGED), CODEC) as theirs:
        assert begun(theirs, FIRST)
        with joined(shared, grace_s=1.0) as fleet, Ledger(fleet, topic(JUDGED), CODEC) as ledger:
            soon = time.monotonic() + 2
            assert not dict(ledger.share([FIRST], done, lambda: time.monotonic() > soon))
            assert dict(ledger.share(OTHERS, done, never)) == dict.fromkeys(OTHERS, 2.0)
    slow.leave()


def test_what_was_given_back_is_stored_once_even_if_its_first_host_returns(shared: Storage) -> None:
    slow = Fleet(shared, identity=ELSEWHERE, beat_s=1000)
    theirs = Ledger(slow, topic(JUDGED), CODEC)
    assert begun(theirs, FIRST)
    with joined(shared, grace_s=0.1) as fleet, Ledger(fleet, topic(JUDGED), CODEC) as ledger:
        assert dict(ledger.share([FIRST], done, never)) == {FIRST: 2.0}
    assert not theirs._finish(FIRST, 99.0), "they learn that they were given up"
    assert dict(theirs.share([FIRST], done, never)) == {FIRST: 2.0}, "and take what is there"
    slow.leave()


def test_a_sweep_that_is_interrupted_gives_back_what_it_has_begun(shared: Storage) -> None:
    with joined(shared) as fleet:

        def interrupted(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, float]]:
            assert list(candidates) == [FIRST]
            raise KeyboardInterrupt
            yield

        with pytest.raises(KeyboardInterrupt), Ledger(fleet, topic(JUDGED), CODEC) as ledger:
            next(ledger.share([FIRST], interrupted, never))
        assert states_of(shared) == {"FAIL": 1}
        with Ledger(fleet, topic(JUDGED), CODEC) as ledger:
            assert dict(ledger.share([FIRST], done, never)) == {FIRST: 2.0}


def test_a_record_that_was_stored_before_its_sweep_died_counts(shared: Storage) -> None:
    dead = Fleet(shared, identity=replace(Identity.own(), pid=2**22 + 1), beat_s=1000)
    ledger = Ledger(dead, topic(JUDGED), CODEC)
    begun(ledger, FIRST)
    ledger._close = lambda number: None  # type: ignore[method-assign]  # killed before the end
    ledger._finish(FIRST, 3.0)
    assert states_of(shared) == {"RUNNING": 1}
    with joined(shared) as fleet, Ledger(fleet, topic(JUDGED), CODEC) as ledger:
        assert dict(ledger.share([FIRST], done, never)) == {FIRST: 3.0}, "not timed again"
    assert states_of(shared) == {"COMPLETE": 1}


def test_failures_are_stored_and_never_win(shared: Storage) -> None:
    with joined(shared) as fleet, Ledger(fleet, topic(JUDGED), CODEC) as ledger:
        failed = iter([(FIRST, -1.0)])
        assert dict(ledger.share([FIRST], lambda c: (list(c), failed)[1], never)) == {FIRST: -1.0}
        assert dict(ledger.share([FIRST], done, never)) == {FIRST: -1.0}, "known, not repeated"
    assert states_of(shared) == {"FAIL": 1}


def test_a_wider_space_is_a_new_study_that_takes_over_what_is_known(shared: Storage) -> None:
    with joined(shared) as fleet:
        with Ledger(fleet, topic(JUDGED), CODEC) as ledger:
            dict(ledger.share([FIRST], done, never))
        names = set(optuna.study.get_all_study_names(shared.backend))
        with Ledger(fleet, topic(JUDGED[::-1]), CODEC) as ledger:
            assert set(optuna.study.get_all_study_names(shared.backend)) == names, "order is none"
        wider = survivors(3)
        with Ledger(fleet, topic(wider), CODEC) as ledger:
            assert len(optuna.study.get_all_study_names(shared.backend)) == len(names) + 1
            wanted = [j.candidate for j in wider]
            worked = []

            def work(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, float]]:
                worked.extend(candidates)
                yield from done(worked)

            assert len(dict(ledger.share(wanted, work, never))) == 9
            assert FIRST not in worked, "one of nine was known"
            assert len(worked) == 8


def test_another_method_shares_nothing_and_fresh_begins_anew(shared: Storage) -> None:
    with joined(shared) as fleet:
        for topic_, fresh in ((topic(JUDGED), False), (topic(JUDGED, "another"), False),
                              (topic(JUDGED), True)):  # fmt: skip
            with Ledger(fleet, topic_, CODEC, fresh=fresh) as ledger:
                assert begun(ledger, FIRST), "nobody had it"
                assert ledger._finish(FIRST, 2.0)
        with Ledger(fleet, topic(JUDGED), CODEC) as ledger:
            assert dict(ledger.share([FIRST], done, never)) == {FIRST: 2.0}
    assert states_of(shared) == {"COMPLETE": 3}


def test_parts_of_a_batch_go_by_the_number_of_hosts_that_time(shared: Storage) -> None:
    with joined(shared) as fleet:
        assert fleet.part("k", 4) == 4
        fleet.measures(["k"])
        assert fleet.part("k", 4) == 4
        other = Fleet(shared, identity=ELSEWHERE)
        other.measures(["k"])
        assert (fleet.part("k", 4), fleet.part("another", 4)) == (2, 4)
        assert fleet.is_measured("k")
        other.measured("k")
        fleet.measured("k")
        assert not fleet.is_measured("k")
        other.leave()


def test_a_process_of_this_host_is_known_by_number_and_start() -> None:
    own = Identity.own()
    assert own.runs_here(own.host)
    assert replace(own, started=own.started + 5).runs_here(own.host) is False, "a number used again"
    assert replace(own, pid=2**22 + 1).runs_here(own.host) is False
    assert own.runs_here("another machine") is None
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert replace(own, pid=ended.pid).runs_here(own.host) is False, "killed, not yet reaped"


def test_a_seat_is_used_again(shared: Storage) -> None:
    for _ in range(3):
        with joined(shared) as fleet:
            assert fleet._seat == "host 0001"


@pytest.mark.parametrize("content", [b"a note without an end", b"two\nlines", b"\0" * 100])
def test_a_file_that_is_no_journal_is_refused_as_it_is(tmp_path: Path, content: bytes) -> None:
    note = tmp_path / "note"
    note.write_bytes(content)
    with pytest.raises(InputError, match=r"journal .*note cannot be used: it is no journal"):
        storage.opened(f"journal://{note}")
    assert note.read_bytes() == content


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder nobody can write to")
def test_a_folder_in_which_no_lock_can_be_made_is_one_line_and_no_wait() -> None:
    with pytest.raises(InputError, match=r"cannot be used: .*/proc/\.x\.lock"):
        storage.opened("journal:///proc/x")


def test_a_line_torn_by_a_kill_does_not_spoil_a_journal(tmp_path: Path) -> None:
    url = f"journal://{tmp_path}/studies"
    with closing(storage.opened(url)) as opened, joined(opened):
        pass
    whole = (tmp_path / "studies").read_bytes()
    (tmp_path / "studies").write_bytes(whole + whole.splitlines()[-1][:20])
    with closing(storage.opened(url)) as opened, joined(opened) as fleet:
        assert fleet.alive(fleet.identity.text)
    with closing(storage.opened(url)) as opened:
        assert optuna.study.get_all_study_names(opened.backend) == [SEATS]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://me:secret@host/db", "--storage mysql://… is not allowed; postgresql://user:"),
        ("results.db", "--storage 'results.db' is not allowed; postgresql://"),
        ("sqlite://", "--storage sqlite://… is not allowed; postgresql://"),
        ("journal://", "--storage journal://… is not allowed; postgresql://"),
        ("sqlite:////no/such/folder/x.db", "is not allowed; /no/such/folder does not exist"),
        ("journal:///tmp", "is not allowed; is a directory"),
        ("sqlite:///:memory:", "is not allowed; a file, without ?options"),
        ("sqlite:////tmp/x.db?mode=ro", "is not allowed; a file, without ?options"),
    ],
)
def test_a_url_of_no_storage_is_one_line(url: str, message: str) -> None:
    with pytest.raises(InputError, match=r"^--storage ") as raised:
        storage.check(url)
    assert message in str(raised.value)
    assert "secret" not in str(raised.value)


def test_without_psycopg_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install '\.\[fleet\]'"):
        storage.check("postgresql://user:secret@host/db")


def test_a_port_that_is_no_number_is_one_line_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(InputError, match=r"^--storage postgresql://… is not allowed") as raised:
        storage.opened("postgresql://me:secret@host:port/db")
    assert "secret" not in str(raised.value)


def test_a_server_that_does_not_answer_is_one_line_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(InputError) as raised:
        storage.opened("postgresql://me:secret@127.0.0.1:1/db")
    assert "postgresql://me:***@127.0.0.1:1/db cannot be used: connection" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "studies.db").write_text("no database, " * 1000)
    with pytest.raises(
        InputError, match=r"sqlite .*studies\.db cannot be used: file is not a data"
    ):
        storage.opened(f"sqlite:///{tmp_path}/studies.db")
