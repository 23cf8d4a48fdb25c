"""Workers that abort, hang or eat memory cost one candidate each, and leave nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from autotune.candidate import Candidate
from autotune.compiler import environment
from autotune.compiler.environment import compile_flags, unavailable, worker_environment
from autotune.compiler.pool import CompilePool
from autotune.compiler.process import remove_stale_dumps
from autotune.compiler.task import Task
from autotune.errors import InputError, NoCompilerError
from autotune.problem import Problem

needs_compiler = [
    pytest.mark.compiler,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
B256 = {"bm": 256, "bk": 256, "bn": 256}
PROBLEM = {"device": "tpu7x", "shape": dict.fromkeys("mkn", 512)}


def task(act=None, **config):
    kernel = "MISBEHAVE" if act else "MATMUL"
    return Task(
        problem=Problem(kernel=f"compiler_kernels:{kernel}", **PROBLEM),
        candidate=Candidate.of({"act": act} if act else config or B256),
    )


def workers():
    return [p for p in psutil.Process().children() if "autotune.compiler.worker" in p.cmdline()]


def dumps(pid):
    return list(Path(tempfile.gettempdir()).glob(f"autotune-compile-{pid}-*"))


@pytest.fixture(scope="module")
def pool():
    with CompilePool(jobs=1, timeout_s=120) as pool:
        yield pool
    assert workers() == [], "a closed pool leaves no process"
    assert dumps(os.getpid()) == [], "and no folder"


def test_a_task_survives_json():
    problem = Problem(
        kernel="matmul",
        device="v6e",
        shape={"m": 8},
        options={"epilogue": "relu", "cap": None},
        dtype="int8",
        name="mine",
        defaults=frozenset({"cap"}),
    )
    one = Task(problem=problem, candidate=Candidate.of({"b": 8, "a": None}, is_default=True))
    back = Task.from_json(one.to_json())
    assert back == one
    assert back.problem.key == problem.key
    assert back.problem.name == "mine"
    assert back.candidate.is_default


def test_the_workers_environment_is_its_own_and_keeps_the_users_flags():
    parent = {
        "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=98304",
        "JAX_COMPILATION_CACHE_DIR": "/somewhere",
        "JAX_PLATFORMS": "tpu",
        "HOME": "/home/me",
    }
    child = worker_environment(parent, "/dump")
    assert child["LIBTPU_INIT_ARGS"].startswith("--xla_tpu_scoped_vmem_limit_kib=98304 ")
    assert "--xla_jf_dump_to=/dump" in child["LIBTPU_INIT_ARGS"]
    assert child["JAX_PLATFORMS"] == "cpu"
    assert child["HOME"] == "/home/me"
    assert "JAX_COMPILATION_CACHE_DIR" not in child
    assert parent["JAX_PLATFORMS"] == "tpu"
    assert compile_flags(parent) == {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=98304"}


def test_without_libtpu_one_sentence_says_so(monkeypatch):
    found = environment.importlib.util.find_spec
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: None if name == "libtpu" else found(name),
    )
    with (
        CompilePool(jobs=1) as pool,
        pytest.raises(NoCompilerError, match="libtpu, the TPU compiler, is not installed"),
    ):
        list(pool.run([task()]))


def test_asking_whether_one_can_compile_does_not_import_jax():
    code = (
        "import sys\n"
        "from autotune.compiler.pool import unavailable\n"
        "unavailable()\n"
        "assert 'jax' not in sys.modules and 'libtpu' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "bad", [{"jobs": 0}, {"timeout_s": 0}, {"memory_limit_bytes": -1}], ids=str
)
def test_impossible_limits_are_refused(bad):
    with pytest.raises(InputError, match=r"jobs: 0 is not allowed|must be positive"):
        CompilePool(**bad)


def test_dump_folders_of_dead_processes_are_removed_and_of_living_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"autotune-compile-{dead.pid}-x").mkdir()
    (tmp_path / f"autotune-compile-{os.getpid()}-x").mkdir()
    (tmp_path / "autotune-compile-notes").mkdir()
    remove_stale_dumps()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"autotune-compile-{os.getpid()}-x",
        "autotune-compile-notes",
    ]


class TestWorkers:
    pytestmark = needs_compiler

    def test_c4_every_raising_candidate_is_a_failed_row_with_its_reason(self, pool):
        acts = {
            "value error": "ValueError: block 96 does not divide 100",
            "not implemented": "NotImplementedError: no such epilogue",
            "assertion": "AssertionError raised at compiler_kernels.py:",
            "mlir": "MLIRError: ('the verifier said no', [])",
            "mosaic": "MosaicError: my own words",
            "runtime": "JaxRuntimeError: something broke",
        }
        found = {t.candidate.config["act"]: c for t, c in pool.run([task(act) for act in acts])}
        assert found.keys() == acts.keys()
        for act, reason in acts.items():
            assert found[act].status == "failed"
            assert found[act].reason.startswith(reason)

    def test_kernels_may_print_ask_for_the_chip_or_compute_a_table_while_traced(self, pool):
        acts = ["print", "ask for the chip", "eager table"]
        for done, compiled in pool.run([task(act) for act in acts]):
            assert compiled.status == "ok", (done.candidate.config, compiled.reason)

    def test_tracing_alone_gives_the_program_and_asks_no_compiler(self, pool):
        traced = Task(problem=task().problem, candidate=task().candidate, kind="trace")
        ((_, answer),) = pool.run([traced])
        assert answer.status == "ok", answer.reason
        assert [call.name for call in answer.program.calls] == ["tile"]
        assert answer.program.calls[0].grid == (2, 2, 2)
        assert answer.schedules == ()

    def test_an_unknown_kernel_is_a_failed_row(self, pool):
        names = ("compiler_kernels:NOPE", "compiler_kernels:NOT_A_KERNEL", "no_such:K", "nope")
        tasks = [
            Task(problem=Problem(kernel=n, **PROBLEM), candidate=Candidate.of(B256)) for n in names
        ]
        for _, compiled in pool.run(tasks):
            assert compiled.status == "failed"
            assert "kernel" in compiled.reason

    def test_an_aborting_worker_costs_one_candidate(self, pool):
        tasks = [task(), task("abort"), task("check fails"), task()]
        found = [compiled for _, compiled in pool.run(tasks)]
        assert [c.status for c in found] == ["ok", "crashed", "crashed", "ok"]
        assert found[1].reason == "the compile worker ended with SIGABRT"
        assert found[2].reason == (
            "the compiler aborted: emitter.cc:42] Check failed: a == b (SIGABRT)"
        )
        assert found[1].libtpu_version

    def test_a_candidate_that_exits_or_scribbles_costs_one_candidate(self, pool):
        found = [c for _, c in pool.run([task("exit"), task("scribble"), task()])]
        assert [c.status for c in found] == ["failed", "crashed", "ok"]
        assert found[0].reason == "SystemExit: 3"
        assert found[1].reason == "the worker's answer was overwritten by something else"

    def test_a_worker_killed_while_idle_costs_no_candidate(self, pool):
        list(pool.run([task("value error")]))
        for worker in workers():
            worker.kill()
            worker.wait()
        ((_, compiled),) = pool.run([task()])
        assert compiled.status == "ok", compiled.reason

    def test_c2_a_hanging_candidate_is_a_timeout_and_what_it_started_is_gone(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("AUTOTUNE_TEST_PID_FILE", str(tmp_path / "pids"))
        with CompilePool(jobs=1, timeout_s=2) as quick:
            list(quick.run([task("value error")]))  # the start of the worker is not the candidate's
            started = time.monotonic()
            ((_, compiled),) = quick.run([task("start another and hang")])
            took_s = time.monotonic() - started
            assert compiled.status == "timeout"
            assert compiled.reason == "tracing and compiling took longer than 2 s"
            assert compiled.limit_s == 2
            assert took_s < 5
            for pid in (tmp_path / "pids").read_text().split():
                assert not _runs(int(pid)), "the worker's whole group is killed"

    def test_a_worker_that_eats_memory_is_failed_with_the_numbers(self):
        with CompilePool(jobs=1, timeout_s=60, memory_limit_bytes=768 << 20) as small:
            found = [compiled for _, compiled in small.run([task("eat memory"), task()])]
        assert [c.status for c in found] == ["failed", "ok"]
        assert "GiB of host memory, the limit of a worker is 0.75 GiB" in found[0].reason
        assert found[0].limit_bytes == 768 << 20

    def test_tasks_are_pulled_one_for_each_free_worker(self, pool):
        pulled = []

        def tasks():
            for n in range(3):
                pulled.append(n)
                yield task("value error")

        for n, _ in enumerate(pool.run(tasks())):
            assert len(pulled) == n + 1

    def test_leaving_the_loop_early_ends_the_compiling_and_the_pool_goes_on(self, pool):
        started = time.monotonic()
        for _, compiled in pool.run([task("value error"), task("hang")]):
            assert compiled.status == "failed"
            break
        with contextlib.suppress(StopIteration):
            running = pool.run([task(), task("hang")])
            next(running)
            running.close()
        assert time.monotonic() - started < 30, "the hanging candidate sleeps for a minute"
        ((_, compiled),) = pool.run([task()])
        assert compiled.status == "ok"

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
    def test_workers_end_with_their_parent(self, how, tmp_path):
        code = (
            "import sys; sys.path[:0] = sys.argv[1:2]\n"
            "from test_compiler_pool import CompilePool, task, workers\n"
            "with CompilePool(jobs=2, timeout_s=100) as pool:\n"
            "    for _ in pool.run([task('value error'), task('hang'), task('hang')]):\n"
            "        print(*(w.pid for w in workers()), flush=True)\n"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        os.kill(parent.pid, how)
        _, stderr = parent.communicate(timeout=30)
        if how == signal.SIGINT:
            assert "KeyboardInterrupt" in stderr
            assert dumps(parent.pid) == []
        deadline = time.monotonic() + 10
        while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in pids if _runs(pid)]
        assert dumps(parent.pid) == []


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
