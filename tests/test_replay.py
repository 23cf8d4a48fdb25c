"""Recordings: what is read, what matches, what is refused, and what a bad time becomes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from autotune.calibration import data
from autotune.candidate import Candidate
from autotune.errors import InputError
from autotune.kernels import base
from autotune.kernels.base import make_problem
from autotune.measure.replay import Replay
from autotune.problem import Problem

CONFIG = {"bm": 256, "bk": 512, "bn": 512, "grid_order": "mn", "buffers": 2,
          "vmem_limit_bytes": None}  # fmt: skip
SHAPE = {"m": 256, "k": 512, "n": 512}


def problem(**shape: int) -> Problem:
    return make_problem(base.load("matmul"), device="v6e", shape={**SHAPE, **shape})


def row(
    latency_ms: object = 0.5, config: dict[str, object] = CONFIG, **more: object
) -> dict[str, object]:
    given = {"shape": SHAPE, "dtype": "bfloat16", "options": {}} | more
    return {"kernel": "matmul", "device": "v6e", "problem": json.dumps(given),
            "config": json.dumps(config), "latency_ms": latency_ms}  # fmt: skip


def recorded(folder: Path, *rows: dict[str, object], name: str = "r.csv") -> Replay:
    path = folder / name
    frame = pd.DataFrame(list(rows))
    frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path)
    return Replay(path)


@pytest.mark.parametrize("name", ["r.csv", "r.parquet"])
def test_rows_of_one_configuration_are_its_samples(tmp_path: Path, name: str) -> None:
    replay = recorded(tmp_path, row(0.5), row(0.7), row(0.9, {**CONFIG, "bn": 256}), name=name)
    samples = replay.samples(problem())
    assert list(samples.values()) == [(0.5, 0.7), (0.9,)]
    ((candidate, measured),) = replay.measure(problem(), [next(iter(samples))])
    assert candidate.config["bn"] == 512
    assert (measured.status, measured.timer, measured.samples_ms) == ("ok", "replay", (0.5, 0.7))
    assert measured.median_ms == pytest.approx(0.6)


def test_problems_match_whether_defaults_are_written_or_left_out(tmp_path: Path) -> None:
    options = problem().options
    written, left_out = row(0.5), row(0.6, {**CONFIG, "bn": 256})
    written["problem"] = json.dumps({"shape": SHAPE, "dtype": "bfloat16", "options": dict(options)})
    left_out["problem"] = json.dumps({"shape": SHAPE})
    assert len(recorded(tmp_path, written, left_out).samples(problem())) == 2
    assert not recorded(tmp_path, written, left_out).samples(problem(m=512))


def test_rows_of_other_kernels_devices_and_impossible_problems_are_no_match(tmp_path: Path) -> None:
    other = [{**row(), "kernel": "of.nobody"}, {**row(), "device": "v5e"}, row(shape={"m": 0})]
    replay = recorded(tmp_path, *other, row())
    assert len(replay.samples(problem())) == 1
    assert [p.device for p in replay.problems()] == ["v5e", "v6e"]


@pytest.mark.parametrize(
    "config", [{}, {"bm": 256}, {**CONFIG, "bm": 100}, {**CONFIG, "bm": "wide"}, {**CONFIG, "x": 1}]
)
def test_configs_that_are_illegal_here_are_left_out(
    tmp_path: Path, config: dict[str, object]
) -> None:
    assert list(recorded(tmp_path, row(), row(0.1, config)).samples(problem())) == [
        Candidate.of(CONFIG)  # type: ignore[arg-type]
    ]


def test_a_tunable_that_a_recording_leaves_out_is_null(tmp_path: Path) -> None:
    short = {name: value for name, value in CONFIG.items() if value is not None}
    samples = recorded(tmp_path, row(0.5), row(0.6, short)).samples(problem())
    assert samples == {Candidate.of(CONFIG): (0.5, 0.6)}  # type: ignore[arg-type]


@pytest.mark.parametrize("time", ["", "0", "-1", "inf", "-inf", "nan"])
def test_a_time_that_is_none_is_kept_for_the_judge_to_fail(tmp_path: Path, time: str) -> None:
    (samples,) = recorded(tmp_path, row(time)).samples(problem()).values()
    assert not (math.isfinite(samples[0]) and samples[0] > 0)


def test_a_leaderboards_rows_that_were_not_measured_are_no_recording(tmp_path: Path) -> None:
    rows = [
        {**row(), "evidence": "compiled", "status": "ok", "samples_ms": None},
        {**row(0.6, {**CONFIG, "bn": 256}), "evidence": "measured", "status": "ok",
         "samples_ms": [0.5, 0.6, 0.7]},
        {**row(0.4, {**CONFIG, "bk": 256}), "evidence": "measured", "status": "wrong",
         "samples_ms": None},
    ]  # fmt: skip
    replay = recorded(tmp_path, *rows, name="board.parquet")
    assert list(replay.samples(problem()).values()) == [(0.5, 0.6, 0.7)]


def test_a_recording_is_known_by_its_content(tmp_path: Path) -> None:
    first = recorded(tmp_path, row(), name="a.csv")
    assert first.source == recorded(tmp_path, row(), name="b.csv").source
    assert first.source != recorded(tmp_path, row(0.6), name="c.csv").source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency_ms": "fast"}, r"line 3: latency_ms 'fast' is not allowed; a number of milli"),
        ({"config": "[1]"}, r"line 3: config '\[1\]' is not allowed; a JSON object"),
        ({"config": '{"a":' * 5000}, r"line 3: config .* is not allowed; a JSON object"),
        ({"problem": '{"shape": [1]}'}, r"line 3: problem.shape \[1\] is not allowed; a JSON obj"),
        ({"problem": '{"options": 3}'}, r"line 3: problem.options 3 is not allowed; a JSON obj"),
        ({"problem": '{"dtype": 3}'}, r"line 3: problem.dtype 3 is not allowed; a text"),
        ({"problem": "{"}, r"line 3: problem '\{' is not allowed; a JSON object"),
    ],
)
def test_a_bad_row_is_one_line_that_names_it(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=rf"^--replay .*r\.csv, {message}"):
        recorded(tmp_path, row(), {**row(), **change})


def test_files_that_are_no_recording_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--replay .*none\.csv cannot be read: No such file"):
        Replay(tmp_path / "none.csv")
    (tmp_path / "x.csv").write_text("kernel,device\n")
    with pytest.raises(InputError, match=r"lacks problem, config, latency_ms; its columns must be"):
        Replay(tmp_path / "x.csv")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        Replay(tmp_path / "x.parquet")
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="neither CSV nor Parquet"):
        Replay(tmp_path / "x.bin")


def test_a_recording_that_answers_to_no_problem_is_bad_input_that_says_what_it_has(
    tmp_path: Path,
) -> None:
    replay = recorded(tmp_path, row())
    replay.check_answers([problem(m=512), problem()])
    with pytest.raises(InputError, match=r"no row is of a problem of the configs; it has "
                       r"matmul m=256 k=512 n=512 on v6e$"):  # fmt: skip
        replay.check_answers([problem(m=512)])
    replay = recorded(tmp_path, {**row(), "kernel": "of.nobody"})
    with pytest.raises(InputError, match=r"of the configs; it has of\.nobody on v6e$"):
        replay.check_answers([problem()])
    replay = recorded(tmp_path, row(0.1, {**CONFIG, "bm": 100}))
    with pytest.raises(InputError, match="are of configs that are not legal there"):
        replay.check_answers([problem()])
    many = recorded(tmp_path, *[row(shape={**SHAPE, "m": 256 * n}) for n in range(2, 10)])
    with pytest.raises(InputError, match=r"m=1792 k=512 n=512 on v6e and 2 more$"):
        many.check_answers([problem()])


def test_a_recorded_candidate_outside_the_space_joins_it(tmp_path: Path) -> None:
    from autotune import device as devices
    from autotune.search import space

    kernel, wanted = base.load("matmul"), {**CONFIG, "vmem_limit_bytes": 48 * 2**20}
    narrow = space.candidates(
        kernel, problem(), devices.get("v6e"), {"bm": (256,), "buffers": (2,)}
    )
    samples = recorded(tmp_path, row(), row(0.4, wanted)).samples(problem())
    joined = narrow.joined(samples)
    assert set(samples) <= set(joined.legal)
    assert len(joined.legal) == len(set(joined.legal))
    assert joined.joined(samples) == replace(joined)


def test_the_csv_of_the_documentation_is_a_recording(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs" / "measuring.md"
    (text,) = re.findall(r"```csv\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (tmp_path / "r.csv").write_text(text)
    replay = Replay(tmp_path / "r.csv")
    (recorded_problem,) = replay.problems()
    assert list(replay.samples(recorded_problem).values()) == [(0.0171,)]
    (measured,) = data.read([tmp_path / "r.csv"], data.FIT)
    assert (measured.config["bk"], measured.measured_ms) == (1024, 0.0171)
