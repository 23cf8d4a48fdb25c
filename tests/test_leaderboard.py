"""Leaderboard files: schema, ranks, merging, damage, and writers killed midway."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autotune import leaderboard, stale
from autotune.compiler.fingerprint import kernel_fingerprint
from autotune.errors import DamagedFileError, InputError
from autotune.row import Row


def row(config: dict[str, object] | None = None, **columns: object) -> Row:
    defaults: dict[str, object] = {
        "problem_key": "k1-bfloat16-abc",
        "kernel": "matmul",
        "device": "tpu7x",
        "problem": '{"dtype": "bfloat16", "options": {}, "shape": {"k": 1}}',
        "config": json.dumps(config or {"bm": 128}, sort_keys=True),
        "status": "ok",
        "jax_version": "0.10.2",
        "libtpu_version": "0.0.42.1",
        "kernel_fingerprint": "f",
        "created_at": datetime.now(UTC),
    }
    return Row(**{**defaults, **columns})  # type: ignore[arg-type]


def merge(path: Path, rows: list[Row], **more: bool) -> leaderboard.Board:
    return leaderboard.merge(path, rows, flop_convention="2·m·k·n", **more)


def test_the_file_has_the_columns_and_types_of_the_design(tmp_path: Path) -> None:
    path = tmp_path / "tpu7x" / "matmul" / "k.parquet"
    merge(path, [row(evidence="compiled", latency_compiled_ms=1.0)])
    schema = pq.read_schema(path)
    assert schema.names == [f.name for f in fields(Row)]
    assert schema.field("rank").type == pa.int32()
    assert schema.field("flops").type == pa.int64()
    assert schema.field("samples_ms").type == pa.list_(pa.float64())
    assert schema.field("reason").type == pa.string(), "an all-null column keeps its type (P2)"
    assert schema.field("created_at").type == pa.timestamp("us", tz="UTC")
    assert schema.metadata[b"autotune_schema"] == b"1"
    assert pd.read_parquet(path).loc[0, "config"] == '{"bm": 128}'


def test_a_board_is_small_enough_to_keep_a_thousand_of_them_in_a_repository(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    steps = {"bundles": 813, "cycles": 1021.5, "mxu": 0.91, "spill_loads": 0, "executions": 4096}
    merge(
        path,
        [
            row(
                {"bm": 128 * n, "bk": 128, "bn": 256, "buffers": 2, "vmem_limit_bytes": None},
                evidence="compiled", latency_model_ms=1 / (n + 3), latency_compiled_ms=n / 7,
                flops=2**40, hbm_bytes=2**20 * n, dma_count=7 * n, grid_steps=4096 // n,
                vmem_model_bytes=2**14 * n, vmem_compiled_bytes=2**14 * n + 512,
                scopes=json.dumps({s: {k: v * n for k, v in steps.items()} for s in "abcd"}),
                created_at=datetime(2026, 1, 1, microsecond=997 * n, tzinfo=UTC),
            )
            for n in range(1, 41)
        ],
    )  # fmt: skip
    assert path.stat().st_size < 10_000, "1,080 such boards are to stay under 20 MB"


def test_ranks_never_mix_kinds_of_evidence(tmp_path: Path) -> None:
    board = merge(
        tmp_path / "b.parquet",
        [
            row({"bm": 1}, evidence="model", latency_model_ms=0.1),
            row({"bm": 2}, evidence="compiled", latency_model_ms=0.1, latency_compiled_ms=3.0),
            row({"bm": 3}, evidence="compiled", latency_model_ms=0.2, latency_compiled_ms=2.0),
            row({"bm": 4}, status="oom", reason="VMEM", evidence="compiled", latency_model_ms=0.1),
        ],
    )
    assert [(r.config, r.rank, r.is_best) for r in board.rows] == [
        ('{"bm": 3}', 1, True),
        ('{"bm": 2}', 2, False),
        ('{"bm": 1}', None, False),
        ('{"bm": 4}', None, False),
    ]
    assert [r.latency_ms for r in board.rows] == [2.0, 3.0, 0.1, None]
    assert board.counts == {"candidates": 4, "oom": 1, "not_evaluated": 1, "ranked": 2}


def test_equal_latencies_rank_by_config_text(tmp_path: Path) -> None:
    rows = [row({"bm": n}, evidence="compiled", latency_compiled_ms=1.0) for n in (512, 128, 256)]
    assert [json.loads(r.config)["bm"] for r in leaderboard.ranked(rows)] == [128, 256, 512]


@pytest.mark.parametrize("status", ["pruned", "oom", "timeout", "crashed", "wrong", "failed"])
def test_every_status_but_ok_needs_a_reason(status: str) -> None:
    with pytest.raises(ValueError, match=f"a row of status '{status}' needs a reason"):
        row(status=status)


def test_large_counts_and_empty_configs_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    empty = row(config=None, flops=9007199254740993, samples_ms=[1.5, 2.5])
    empty = replace(empty, config="{}")
    null = row({"bm": 128, "bk": None}, flops=None)
    merge(path, [empty, null])
    stored = {r.config: r for r in leaderboard.read(path).rows}
    assert stored["{}"].flops == 9007199254740993
    assert stored["{}"].samples_ms == [1.5, 2.5]
    assert stored['{"bk": null, "bm": 128}'].flops is None


def test_a_second_run_adds_rows_and_keeps_stronger_evidence(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    merge(path, [row({"bm": 1}, evidence="compiled", latency_compiled_ms=2.0)])
    board = merge(
        path,
        [
            row({"bm": 1}, evidence="model", latency_model_ms=9.0),
            row({"bm": 2}, evidence="compiled", latency_compiled_ms=1.0),
        ],
    )
    assert [(r.config, r.latency_ms) for r in board.rows] == [
        ('{"bm": 2}', 1.0),
        ('{"bm": 1}', 2.0),
    ]


def test_rows_of_other_versions_are_dropped_but_never_for_weaker_evidence(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    merge(path, [row({"bm": 1}, evidence="compiled", latency_compiled_ms=2.0)])
    laptop = row({"bm": 2}, evidence="model", latency_model_ms=1.0, libtpu_version=None)
    assert [r.config for r in merge(path, [laptop]).rows] == ['{"bm": 2}']
    assert [r.config for r in leaderboard.read(path).rows] == ['{"bm": 1}'], "the file must stay"
    newer = row({"bm": 3}, evidence="compiled", latency_compiled_ms=5.0, libtpu_version="0.0.50.1")
    assert [r.config for r in merge(path, [newer]).rows] == ['{"bm": 3}']


def test_a_damaged_file_is_named_and_does_not_hide_the_others(tmp_path: Path) -> None:
    good, bad, empty = (tmp_path / f"{n}.parquet" for n in ("good", "bad", "empty"))
    merge(good, [row()])
    bad.write_bytes(good.read_bytes()[:200])
    empty.touch()
    (tmp_path / ".x.parquet.tmp.parquet").write_bytes(b"half")
    found = list(leaderboard.boards(tmp_path))
    assert [type(f).__name__ for f in found] == ["DamagedFileError", "DamagedFileError", "Board"]
    assert str(found[0]).startswith(f"{bad}: not a readable leaderboard (")
    assert str(found[1]).startswith(f"{empty}: not a readable leaderboard (")


def test_a_parquet_file_that_is_no_leaderboard_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(DamagedFileError, match=r"other\.parquet: not a leaderboard \(lacks config"):
        leaderboard.read(path)


def test_a_damaged_file_is_set_aside_when_a_sweep_writes_over_it(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    path.write_bytes(b"PAR1 cut short")
    with pytest.warns(
        UserWarning, match=r"b\.parquet: not a readable .*; kept as \.b\.parquet\.dam"
    ):
        merge(path, [row()])
    assert len(leaderboard.read(path).rows) == 1
    assert (tmp_path / ".b.parquet.damaged").read_bytes() == b"PAR1 cut short"


def test_an_unwritable_results_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file where a directory is due")
    with pytest.raises(InputError, match=r"results directory .* cannot be written"):
        merge(tmp_path / "results" / "tpu7x" / "b.parquet", [row()])


def test_missing_results_say_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no results at .*; `autotune sweep CONFIG` makes them"):
        list(leaderboard.boards(tmp_path / "none"))


def _append(path: Path, worker: int) -> None:
    for n in range(20):
        merge(path, [row({"worker": worker, "n": n})])


def test_two_processes_writing_one_board_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append, args=(path, n)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(leaderboard.read(path).rows) == 40


_ENDLESS = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_leaderboard import merge, row
n = 0
while True:
    n += 1
    merge(Path({path!r}), [row({{"n": i}}) for i in range(300)])
    print(n, flush=True)
"""


def test_kill_9_while_writing_leaves_a_readable_board(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    code = _ENDLESS.format(tests=str(Path(__file__).parent), path=str(path))
    for delay_s in (0.0, 0.011, 0.023):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay_s)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert len(leaderboard.read(path).rows) == 300


def test_an_edited_kernel_that_fails_everywhere_replaces_the_old_board(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    merge(path, [row({"bm": 1}, evidence="compiled", latency_compiled_ms=2.0)])
    failed = row({"bm": 1}, status="failed", reason="ValueError: no", kernel_fingerprint="g")
    merge(path, [failed])
    assert [r.status for r in leaderboard.read(path).rows] == ["failed"]


def test_a_board_has_the_name_its_problem_was_last_given(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    merge(path, [row({"bm": 1}, problem_name="first")])
    board = merge(path, [row({"bm": 2}, problem_name="second")])
    assert {r.problem_name for r in board.rows} == {"second"}


def test_equal_latencies_rank_the_config_that_leaves_more_to_the_kernel_first() -> None:
    rows = [
        row({"bm": 1, "limit": limit}, evidence="compiled", latency_compiled_ms=1.0)
        for limit in (1024, None)
    ]
    assert json.loads(leaderboard.ranked(rows)[0].config)["limit"] is None


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("problem", None, "a row lacks problem"),
        ("kernel", None, "a row lacks kernel"),
        ("config", "{bad", "Expecting property name"),
        ("config", "[1]", r"config is not a JSON object: \[1\]"),
        ("latency_ms", float("nan"), "latency_ms is nan"),
        ("latency_compiled_ms", -1.0, "latency_compiled_ms is -1.0"),
        ("status", "fine", "status 'fine' is not one of ok, pruned"),
        ("problem_key", "", "a row lacks problem_key"),
        ("problem", "{}", "problem has no shape"),
        ("problem", '{"shape": [1]}', "problem has no shape"),
        ("problem", '{"shape": {"m": "x"}}', "problem has m = x"),
        ("problem", '{"shape": {"m": NaN}}', "problem has NaN in it"),
        ("scopes", '{"step": {"cycles": 1e400}}', "scopes has 1e400 in it"),
        ("problem", '{"a":' * 100_000, "problem is nested too deeply"),
        ("config", '{"bm": [1]}', "config has no plain value at bm"),
        ("vmem", '{"x": "much"}', "vmem is not an object of bytes"),
        ("scopes", '{"step": 3}', "scopes is not an object of objects"),
        ("measurement", "[]", "measurement is not a JSON object"),
        ("samples_ms", [float("nan")], "samples_ms has what is no time"),
        ("samples_ms", [None], "samples_ms has what is no time"),
        ("mfu", float("inf"), "mfu is inf"),
        ("flops", -1, "flops is -1"),
        ("created_at", -(2**60), "date value out of range"),
        ("latency_ms", None, "latency None is ranked"),
        ("latency_ms", 0.5, r"latency_ms is 0\.5, latency_compiled_ms 1\.0"),
        ("mfu", 1.2, r"mfu is 1\.2, more than the device's peak"),
        ("jax_version", "0.10.2\nimport os", "jax_version is not one line of text"),
        ("problem", '{"shape": {"m": 1}, "dtype": 5}', "problem has the dtype 5"),
        ("rank", 3, "contradicts itself: 1 rows are the best, and 0 of rank 1"),
        ("is_best", False, "contradicts itself: 0 rows are the best, and 1 of rank 1"),
    ],
)
def test_content_that_no_sweep_writes_is_a_damaged_file(
    tmp_path: Path, column: str, value: object, told: str
) -> None:
    path = tmp_path / "b.parquet"
    merge(path, [row(evidence="compiled", latency_compiled_ms=1.0)])
    table = pq.read_table(path)
    place = table.column_names.index(column)
    whole = type(value) is int  # a time may be a number that pyarrow makes none of itself
    changed = pa.array([value], type=pa.int64() if whole else None)
    changed = changed.cast(table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), changed), path)
    with pytest.raises(DamagedFileError, match=told):
        leaderboard.read(path)


def test_another_compiler_or_kernel_source_makes_a_row_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"jax": "0.12.0.1", "libtpu": "0.0.50.1", "autotune": "0.1.0"}
    monkeypatch.setattr(stale.versions, "installed", lambda: here)
    today = kernel_fingerprint("matmul")
    assert stale.reason(row(kernel_fingerprint=today)) == (
        "stale: jax 0.10.2 → 0.12.0.1, libtpu 0.0.42.1 → 0.0.50.1"
    )
    now = {"jax_version": "0.12.0.1", "libtpu_version": "0.0.50.1"}
    assert stale.reason(row(**now, kernel_fingerprint=today)) is None
    assert stale.reason(row(**now)) == "stale: the kernel's source changed"
    assert stale.reason(row(**now, kernel="gone.module:KERNEL")) is None


def test_times_of_a_recording_are_never_ranked_beside_those_of_a_device(tmp_path: Path) -> None:
    def timed(bm: int, latency_ms: float, timer: str) -> Row:
        return row({"bm": bm}, evidence="measured", latency_measured_ms=latency_ms, timer=timer)

    path = tmp_path / "k.parquet"
    merge(path, [timed(128, 0.1, "replay"), timed(256, 0.2, "replay")])
    board = merge(path, [timed(256, 0.9, "device_profile")])
    assert [(r.config, r.latency_ms) for r in board.rows if r.rank] == [('{"bm": 256}', 0.9)]
    board = merge(path, [timed(256, 0.2, "replay"), timed(128, 0.5, "host_clock")])
    assert [(r.config, r.latency_ms) for r in board.rows if r.rank] == [('{"bm": 256}', 0.9)]
    assert {r.timer for r in board.rows} == {"device_profile", "host_clock"}


def test_a_problem_is_meant_by_its_whole_name_before_any_part_of_one(tmp_path: Path) -> None:
    boards = [
        merge(tmp_path / f"{key}.parquet", [row(problem_name=name, problem_key=key)])
        for name, key in (("even", "k1-a"), ("uneven", "k2-b"), (None, "even-c"))
    ]
    keys = lambda text: [b.rows[0].problem_key for b in leaderboard.named(boards, text)]
    assert keys("even") == ["k1-a"]
    assert keys("k2-b") == ["k2-b"]
    assert keys("neve") == ["k2-b"]
    assert keys("eve") == ["k1-a", "k2-b", "even-c"]
    assert keys("matmul") == ["k1-a", "k2-b", "even-c"], "a kernel's name stands for its problems"
    assert not keys("odd")


def _two(path: Path) -> pa.Table:
    rows = [row({"bm": n}, evidence="compiled", latency_compiled_ms=float(n)) for n in (1, 2)]
    merge(path, rows)
    return pq.read_table(path)


def _with(table: pa.Table, column: str, values: list[object]) -> pa.Table:
    place = table.column_names.index(column)
    kind = table.schema.field(place)
    return table.set_column(place, kind, pa.array(values, type=kind.type))


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("is_best", [True, True], "2 rows are the best, and 1 of rank 1"),
        ("is_best", [False, True], "the best row is not that of rank 1"),
        ("rank", [1, 1], "1 rows are the best, and 2 of rank 1"),
        ("kernel", ["matmul", "splash"], "rows of more than one kernel: matmul, splash"),
        ("device", ["v6e", "v5e"], "rows of more than one device: v5e, v6e"),
        ("problem_key", ["k1", "k2"], "rows of more than one problem_key: k1, k2"),
    ],
)
def test_rows_that_contradict_one_another_are_a_damaged_file(
    tmp_path: Path, column: str, values: list[object], told: str
) -> None:
    path = tmp_path / "b.parquet"
    pq.write_table(_with(_two(path), column, values), path)
    with pytest.raises(DamagedFileError, match=f"contradicts itself: {told}"):
        leaderboard.read(path)


def test_a_board_under_the_key_of_another_problem_is_damaged_and_never_ranked_in(
    tmp_path: Path,
) -> None:
    mine, other = "k1-bfloat16-0123456789ab", "k2-bfloat16-ba9876543210"
    path, elsewhere = (tmp_path / f"{key}.parquet" for key in (mine, other))
    merge(elsewhere, [row({"bm": 9}, problem_key=other)])
    path.write_bytes(elsewhere.read_bytes())
    with pytest.raises(DamagedFileError, match=f"its rows are of the problem {other}"):
        leaderboard.read(path)
    with pytest.warns(UserWarning, match="written anew"):
        board = merge(path, [row({"bm": 1}, problem_key=mine)])
    assert [r.config for r in board.rows] == ['{"bm": 1}']
    renamed = elsewhere.rename(tmp_path / "best.parquet")
    assert leaderboard.read(renamed).rows, "a name that is no problem's key contradicts nothing"
    with pytest.warns(UserWarning, match="holds rows of the device tpu7x, not v6e"):
        board = merge(renamed, [row({"bm": 2}, problem_key=other, device="v6e")])
    assert [r.config for r in board.rows] == ['{"bm": 2}']


def test_a_board_without_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    pq.write_table(_two(path).slice(0, 0), path)
    (found,) = leaderboard.boards(tmp_path)
    assert str(found) == f"{path}: not a leaderboard (holds no rows)"


def test_a_sweep_that_says_the_same_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    rows = lambda second, one=1.0: [
        row({"bm": n}, evidence="compiled", latency_compiled_ms=ms, compile_seconds=second + n,
            created_at=datetime(2026, 1, 1, second=second, tzinfo=UTC))
        for n, ms in ((1, one), (2, 2.0))
    ]  # fmt: skip
    merge(path, rows(1))
    os.utime(path, ns=(0, 0))
    content = path.read_bytes()
    board = merge(path, rows(2))
    assert (path.stat().st_mtime_ns, path.read_bytes()) == (0, content)
    assert board.rows == leaderboard.read(path).rows
    board = merge(path, rows(3, one=4.0))
    assert [(r.config, r.rank, r.compile_seconds) for r in board.rows] == [
        ('{"bm": 2}', 1, 3.0),
        ('{"bm": 1}', 2, 4.0),
    ], "a row that says the same stays, though its rank is another"
    assert board.rows == leaderboard.read(path).rows


def test_folders_behind_links_are_read_once_each_and_loops_end(tmp_path: Path) -> None:
    results, disk = tmp_path / "results", tmp_path / "disk"
    merge(results / "v6e" / "b.parquet", [row()])
    merge(disk / "_mine.KERNEL" / "c.parquet", [row()])
    merge(results / ".checkpoints" / "d.parquet", [row()])
    (results / "v5e").symlink_to(disk, target_is_directory=True)
    (results / "again").symlink_to("v6e", target_is_directory=True)
    (results / "v6e" / "loop").symlink_to(results, target_is_directory=True)
    (disk / "loop").symlink_to(disk, target_is_directory=True)
    paths = [f.path.relative_to(results) for f in leaderboard.boards(results)]
    assert [str(p) for p in paths] == ["v5e/_mine.KERNEL/c.parquet", "v6e/b.parquet"]


def test_what_cannot_be_opened_is_named_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(tmp_path / "v6e" / "b.parquet", [row()])
    merge(tmp_path / "locked" / "c.parquet", [row()])
    (tmp_path / "v5e").symlink_to("no longer mounted")
    (tmp_path / "v6e" / "a.parquet").symlink_to("gone.parquet")
    scandir = os.scandir

    def refused(folder: Path) -> object:
        if Path(folder).name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    *errors, board = leaderboard.boards(tmp_path)
    assert isinstance(board, leaderboard.Board)
    assert {type(e) for e in errors} == {InputError}, "nothing is wrong with their content"
    assert sorted(str(e).removeprefix(f"{tmp_path}/") for e in errors) == [
        "locked: cannot be read (Permission denied)",
        "v5e: cannot be read (No such file or directory)",
        "v6e/a.parquet: cannot be read (No such file or directory)",
    ]
    with pytest.raises(InputError, match=r"locked: cannot be read \(Permission denied\)"):
        next(leaderboard.boards(tmp_path / "locked"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_board_that_cannot_be_opened_is_not_damaged_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "b.parquet"
    merge(path, [row({"bm": 1})])
    before = path.read_bytes()

    def refused(_: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        with pytest.raises(InputError, match=r"b\.parquet: cannot be read \(") as error:
            merge(path, [row({"bm": 2})])
    assert os.strerror(number) in str(error.value)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == ["b.parquet"]
    assert path.read_bytes() == before


def test_what_was_set_aside_first_is_kept_too(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    for content in (b"first", b"second"):
        path.write_bytes(content)
        with pytest.warns(UserWarning, match="written anew"):
            merge(path, [row()])
    assert (tmp_path / ".b.parquet.damaged").read_bytes() == b"first"
    assert (tmp_path / ".b.parquet.damaged.1").read_bytes() == b"second"


def test_names_of_columns_that_are_no_text_or_come_twice_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    table = _two(path)
    path.write_bytes(path.read_bytes().replace(b"spill_loads", b"spill_\xff\xfeads"))
    with pytest.raises(DamagedFileError, match=r"b\.parquet: not a .*leaderboard \("):
        leaderboard.read(path)
    path.unlink()
    _two(path)
    path.write_bytes(path.read_bytes().replace(b"spill_loads", b"spill_lo`ds"))
    with pytest.raises(DamagedFileError, match="lacks spill_loads, and has 'spill_lo`ds'"):
        leaderboard.read(path)
    twice = table.append_column(table.schema.field("mfu"), table.column("mfu"))
    pq.write_table(twice, path)
    with pytest.raises(DamagedFileError, match="has the column mfu more than once"):
        leaderboard.read(path)


def test_a_flipped_bit_in_a_value_never_reads_as_another_value(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    _two(path)
    rows, content = leaderboard.read(path).rows, path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    noticed = 0
    for place in range(4, len(content) - footer, 13):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert leaderboard.read(path).rows == rows
        except DamagedFileError:
            noticed += 1
    assert noticed > 100


def test_columns_of_others_stay_beside_the_rows_that_stay(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    pq.write_table(_two(path).append_column("note", pa.array(["of 1", "of 2"])), path)
    at = lambda n, ms: row({"bm": n}, evidence="compiled", latency_compiled_ms=ms)
    merge(path, [at(1, 1.0), at(2, 0.5), at(3, 3.0)])
    table = pq.read_table(path, columns=["config", "note"])
    assert table.to_pylist() == [
        {"config": '{"bm": 2}', "note": None},
        {"config": '{"bm": 1}', "note": "of 1"},
        {"config": '{"bm": 3}', "note": None},
    ]


def test_a_board_of_a_newer_release_is_read_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    table = _two(path).append_column("joules", pa.array([1.0, 2.0]))
    newer = table.replace_schema_metadata({"autotune_schema": "2"})
    pq.write_table(newer, path)
    assert len(leaderboard.read(path).rows) == 2
    with pytest.raises(
        InputError, match=r"a newer release of autotune wrote it \(schema 2, here 1"
    ):
        merge(path, [row({"bm": 3})])
    with pytest.raises(InputError, match="a newer release of autotune wrote it"):
        leaderboard.check_mergeable(path)
    assert pq.read_table(path).equals(newer)
    pq.write_table(_with(newer, "evidence", ["simulated", "simulated"]), path)
    with pytest.raises(InputError, match=r"'simulated' is not one of .*; a newer one wrote it"):
        merge(path, [row({"bm": 3})])


def test_nothing_is_written_where_another_config_than_the_asked_would_be_the_best(
    tmp_path: Path,
) -> None:
    path = tmp_path / "b.parquet"
    _two(path)
    before = path.read_bytes()
    slower = row({"bm": 2}, evidence="compiled", latency_compiled_ms=1.5)
    with pytest.raises(InputError, match=r'\{"bm": 1\} would be the best, not \{"bm": 2\}'):
        leaderboard.merge(path, [slower], flop_convention="2·m·k·n", best=slower.config)
    assert path.read_bytes() == before


def test_results_behind_a_link_to_nothing_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to("unmounted")
    with pytest.raises(InputError, match="results is not a directory"):
        leaderboard.check_writable(tmp_path / "results")
