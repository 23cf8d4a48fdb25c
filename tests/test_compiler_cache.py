"""The store of verdicts: whole entries or none, and a key for everything that matters."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune import evidence
from autotune.candidate import Candidate
from autotune.compiler.cache import Cache, CacheWarning, CompileCache, content_key, default_folder
from autotune.compiler.task import Task
from autotune.evidence import Compiled, Schedule, ScopeUse
from autotune.problem import Problem

UNITS = {"MXU": 3, "VALU": 4}
USE = ScopeUse(bundles=10, mxu_rows=48, spill_loads=1, spill_stores=2, units=UNITS, loop_depth=1)
SCHEDULE = Schedule(
    name="tile",
    bundles=12,
    prologue_bundles=2,
    capacity={"MXU": 2, "VALU": 4},
    scopes={"": USE, "step/inner-1": USE},
    vmem_bytes=1 << 20,
    vmem={"scratch": 1 << 20},
)
OK = Compiled(
    status="ok",
    schedules=(SCHEDULE,),
    compile_seconds=0.125,
    jax_version="0.10.2",
    libtpu_version="0.0.42.1",
)
KEY = content_key({"a": 1})


def task(shape=None, dtype="bfloat16", device="tpu7x", options=None, **config):
    return Task(
        problem=Problem(
            kernel="matmul",
            device=device,
            shape=shape or {"m": 512, "k": 512, "n": 512},
            dtype=dtype,
            options=options or {},
        ),
        candidate=Candidate.of(config or {"bm": 128}),
    )


def compile_cache(folder, *, fingerprint="f", timeout_s=10.0, memory_limit_bytes=1 << 30):
    return CompileCache(
        Cache(folder),
        fingerprint=fingerprint,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
    )


def test_a_record_comes_back_as_it_was_stored(tmp_path):
    cache = compile_cache(tmp_path)
    assert cache.get(task()) is None
    cache.put(task(), OK)
    assert cache.get(task()) == OK


def test_evidence_survives_json():
    assert evidence.from_json(json.loads(json.dumps(evidence.to_json(OK)))) == OK


@pytest.mark.parametrize(
    ("status", "reason"), [("ok", "why"), ("oom", None), ("fine", "no such status")]
)
def test_a_verdict_that_contradicts_itself_cannot_be_made(status, reason):
    with pytest.raises(ValueError, match=r"reason belongs|is none of"):
        Compiled(status=status, reason=reason)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"ok"', '"no"'),
        lambda text: "\x00" * len(text),
    ],
    ids=["empty", "truncated", "edited", "zeros"],
)
def test_a_damaged_entry_is_named_and_written_again(tmp_path, damage):
    warnings = []
    cache = Cache(tmp_path, warn=warnings.append)
    cache.put(KEY, evidence.to_json(OK))
    (path,) = tmp_path.rglob("*.json")
    path.write_text(damage(path.read_text()))
    assert cache.get(KEY) is None
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert "damaged" in warnings[0]
    cache.put(KEY, evidence.to_json(OK))
    assert cache.get(KEY) == json.loads(json.dumps(evidence.to_json(OK)))


def test_a_binary_entry_and_one_of_another_name_are_damaged(tmp_path):
    warnings = []
    cache = Cache(tmp_path, warn=warnings.append)
    cache.put(KEY, {"n": 1})
    (path,) = tmp_path.rglob("*.json")
    other = content_key({"a": 2})
    moved = tmp_path / other[:2] / f"{other}.json"
    moved.parent.mkdir(exist_ok=True)
    path.rename(moved)
    assert cache.get(other) is None
    moved.write_bytes(b"\xff\xfe\x00")
    assert cache.get(other) is None
    assert len(warnings) == 2


def test_a_damaged_entry_is_a_warning_by_default(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"n": 1})
    next(tmp_path.rglob("*.json")).write_text("x")
    with pytest.warns(CacheWarning, match="is damaged"):
        assert cache.get(KEY) is None


def test_a_folder_that_cannot_be_written_is_done_without_and_named_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    warnings = []
    cache = Cache(tmp_path / "file" / "cache", warn=warnings.append)
    assert cache.get(KEY) is None
    cache.put(KEY, {"n": 1})
    cache.put(KEY, {"n": 2})
    assert len(warnings) == 1
    assert str(tmp_path / "file" / "cache") in warnings[0]


def test_entries_that_may_not_be_read_are_named_once(tmp_path, monkeypatch):
    def refuse(self, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    warnings = []
    cache = Cache(tmp_path, warn=warnings.append)
    assert [cache.get(content_key({"n": n})) for n in range(3)] == [None, None, None]
    assert len(warnings) == 1
    assert f"{tmp_path}" in warnings[0]
    assert "Permission denied" in warnings[0]


def test_the_folder_is_the_environments_else_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("AUTOTUNE_CACHE_DIR")
    assert default_folder().name == "autotune"


def test_every_part_of_the_identity_has_a_key_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    cache = compile_cache(tmp_path)
    keys = [
        cache.key(task()),
        cache.key(task(bm=256)),
        cache.key(task(bm=True)),
        cache.key(task(bm="128")),
        cache.key(task(shape={"m": 1024, "k": 512, "n": 512})),
        cache.key(task(dtype="float32")),
        cache.key(task(device="v6e")),
        cache.key(task(options={"epilogue": "relu"})),
        cache.key(task(bm=128, vmem_limit_bytes=98304 * 1024)),
        compile_cache(tmp_path, fingerprint="g").key(task()),
    ]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=98304")
    keys.append(compile_cache(tmp_path).key(task()))
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    keys.append(compile_cache(tmp_path).key(task()))
    versions = {"jax": "0.10.2", "libtpu": "0.0.43"}
    monkeypatch.setattr("autotune.compiler.environment.versions", lambda: versions)
    keys.append(compile_cache(tmp_path).key(task()))
    assert len(set(keys)) == len(keys)


def test_the_users_name_for_a_problem_is_no_part_of_the_key(tmp_path):
    cache = compile_cache(tmp_path)
    problem = Problem(kernel="matmul", device="v6e", shape={"m": 8}, name="mine")
    unnamed = Problem(kernel="matmul", device="v6e", shape={"m": 8})
    candidate = Candidate.of({"bm": 8})
    assert cache.key(Task(problem=problem, candidate=candidate)) == cache.key(
        Task(problem=unnamed, candidate=candidate)
    )


def test_a_timeout_holds_until_the_limit_is_raised(tmp_path):
    late = Compiled(status="timeout", reason="took longer than 10 s", limit_s=10.0)
    compile_cache(tmp_path, timeout_s=10.0).put(task(), late)
    assert compile_cache(tmp_path, timeout_s=5.0).get(task()) == late
    assert compile_cache(tmp_path, timeout_s=10.0).get(task()) == late
    assert compile_cache(tmp_path, timeout_s=20.0).get(task()) is None


def test_a_memory_limit_holds_until_it_is_raised(tmp_path):
    big = Compiled(status="failed", reason="took 2 GiB", limit_bytes=1 << 30)
    compile_cache(tmp_path).put(task(), big)
    assert compile_cache(tmp_path).get(task()) == big
    assert compile_cache(tmp_path, memory_limit_bytes=2 << 30).get(task()) is None


def test_what_another_program_may_have_caused_is_not_stored(tmp_path):
    killed = Compiled(status="crashed", reason="ended with SIGKILL", repeatable=False)
    compile_cache(tmp_path).put(task(), killed)
    assert compile_cache(tmp_path).get(task()) is None


WRITER = """
import sys
from pathlib import Path
from autotune.compiler.cache import Cache, content_key
cache = Cache(Path(sys.argv[1]))
print("writing", flush=True)
n = 0
while True:
    n += 1
    cache.put(content_key({"n": n % 5}), {"n": n, "filler": "x" * 200_000})
"""


def test_a_writer_killed_at_any_moment_leaves_whole_entries_only(tmp_path):
    for delay_s in (0.0, 0.03, 0.11):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for writer in writers:
            writer.stdout.readline()
        time.sleep(delay_s)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        warnings = []
        cache = Cache(tmp_path, warn=warnings.append)
        for n in range(5):
            record = cache.get(content_key({"n": n}))
            assert record is None or record["n"] % 5 == n
        assert warnings == [], "a reader never sees half an entry"
    assert list(tmp_path.rglob("*.json")), "the writers wrote something in the time they had"


def test_what_a_killed_writer_left_half_written_is_removed_later(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"n": 1})
    folder = next(tmp_path.rglob("*.json")).parent
    old, new, other = (folder / f".{name}.tmp" for name in ("autotune-1", "autotune-2", "other"))
    old.write_text("half")
    new.write_text("half, and its writer may be at work")
    other.write_text("another program's")
    for path in (old, other):
        os.utime(path, (0, 0))
    cache.put(KEY, {"n": 2})
    assert not old.exists()
    assert new.exists()
    assert other.exists()
