"""Calibration: files in, constants that are found again, figures of merit against closed forms."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import cli, constants, leaderboard
from autotune import device as devices
from autotune.calibration import data, fit
from autotune.calibration.evidence_of import Evidence
from autotune.calibration.merit import bands, half_width, kendall_tau, merit, quantile, regret
from autotune.calibration.output import write_table
from autotune.calibration.run import DeviceResult, Rejects, Result
from autotune.call_record import Dot, PallasCall, Program, StepClass
from autotune.constants import Calibration
from autotune.errors import DamagedFileError, InputError
from autotune.evidence import Compiled, Schedule, ScopeUse, XlaOp
from autotune.row import Row, indistinguishable

V6E = devices.get("v6e")
HEADER = "kernel,device,problem,config,latency_ms,note\n"
PROBLEM = '"{""shape"": {""m"": 256, ""k"": 256, ""n"": 256}}"'


def csv_file(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "measured.csv"
    path.write_text(header + "".join(line + "\n" for line in lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.app(["calibrate", *arguments], standalone_mode=False)
    out, err = capsys.readouterr()
    return status or 0, out, err


# Data


def test_a_csv_gives_its_rows_and_other_columns_are_ignored(tmp_path: Path):
    path = csv_file(tmp_path, f'matmul,v6e,{PROBLEM},"{{""bm"": 128}}",1.5,by hand')
    (row,) = data.read([path], data.FIT)
    assert (row.kernel, row.device, row.measured_ms, row.part) == ("matmul", "v6e", 1.5, "fit")
    assert row.problem == {"shape": {"m": 256, "k": 256, "n": 256}}
    assert row.config == {"bm": 128}
    assert row.where == f"{path}:2"


def test_a_leaderboard_gives_its_measured_rows_only(tmp_path: Path):
    common = {
        "problem_key": "p", "kernel": "matmul", "device": "v6e", "status": "ok",
        "problem": '{"shape": {"k": 1, "m": 1, "n": 1}}',
    }  # fmt: skip
    rows = [
        Row(config='{"bm": 1}', evidence="measured", latency_measured_ms=2.0, **common),
        Row(config='{"bm": 2}', evidence="compiled", latency_compiled_ms=1.0, **common),
    ]
    leaderboard.merge(tmp_path / "p.parquet", rows, flop_convention="none")
    for path in (tmp_path, tmp_path / "p.parquet"):
        (row,) = data.read([path], data.EVALUATE)
        assert (row.config, row.measured_ms, row.part) == ({"bm": 1}, 2.0, "evaluate")


BAD_FILES = {
    "missing column": ("kernel,device\nmatmul,v6e\n", "lacks problem, config, latency_ms"),
    "no rows": (HEADER, "holds no measured row"),
    "no JSON": (HEADER + "matmul,v6e,nonsense,{},1\n", "problem 'nonsense' is not allowed"),
    "a list": (HEADER + "matmul,v6e,{},[],1\n", "config '[]' is not allowed; a JSON object"),
    "zero": (HEADER + "matmul,v6e,{},{},0\n", "latency_ms '0' is not allowed"),
    "words": (HEADER + "matmul,v6e,{},{},fast\n", "latency_ms 'fast' is not allowed"),
    "not finite": (HEADER + "matmul,v6e,{},{},inf\n", "latency_ms 'inf' is not allowed"),
    "no kernel": (HEADER + ",v6e,{},{},1\n", "kernel is missing"),
    "empty": ("", "lacks kernel"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_line_and_status_2(case: str, tmp_path: Path, capsys):
    text, want = BAD_FILES[case]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    output = tmp_path / "calibration.json"
    status, out, err = run(capsys, str(path), "--output", str(output))
    assert (status, out) == (2, "")
    assert want in err
    assert err.count("\n") == 1
    assert str(path) in err
    assert not output.exists(), "nothing is written for bad input"


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"\xff\xfe\x00 not text"])
def test_a_damaged_file_is_one_line_and_status_2(content: bytes, tmp_path: Path, capsys):
    path = tmp_path / "damaged.parquet"
    path.write_bytes(content)
    status, _, err = run(capsys, str(path))
    assert status == 2
    assert err.count("\n") == 1
    assert str(path) in err


def test_a_missing_file_is_one_line_and_status_2(tmp_path: Path, capsys):
    status, _, err = run(capsys, str(tmp_path / "none.csv"))
    assert status == 2
    assert "does not exist" in err


def test_rows_that_cannot_be_built_are_listed_with_the_reason(tmp_path: Path, capsys):
    path = csv_file(
        tmp_path,
        f'xla.dot,tpu7x,{PROBLEM},"{{}}",1.45,XLA',
        f'matmul,tpu9,{PROBLEM},"{{""bm"": 128}}",1,no such chip',
        f'matmul,v6e,{PROBLEM},"{{""block"": 128}}",1,no such tunable',
        f'matmul,v6e,{PROBLEM},"{{""bm"": 100}}",1,illegal',
        'matmul,v6e,"{""shape"": {""m"": 256}}",{},1,a shape that lacks axes',
        'matmul,v6e,{},{},1,no shape',
    )  # fmt: skip
    output = tmp_path / "calibration.json"
    status, out, _ = run(capsys, str(path), "--format", "json", "--output", str(output))
    document = json.loads(out)
    reasons = [row["reason"] for row in document["rows"]]
    assert status == 0
    assert [row["predicted_ms"] for row in document["rows"]] == [None] * 6
    wants = ("'xla.dot'", "'tpu9'", "no tunable 'block'", "100", "lacks 'k'", "needs shape")
    for reason, want in zip(reasons, wants, strict=True):
        assert want in (reason or ""), f"{reason!r} says {want!r}"
    assert document["devices"] == {}
    assert document["written"] is None
    assert not output.exists(), "without a fitted constant there is nothing to write"
    first = document["rows"][0]
    assert (first["kernel"], first["device"], first["set"]) == ("xla.dot", "tpu7x", "fit")
    assert first["measured_ms"] == 1.45
    assert first["config"] == {}


def test_the_table_lists_them_too(tmp_path: Path, capsys):
    path = csv_file(tmp_path, f'xla.dot,tpu7x,{PROBLEM},"{{}}",1.45,XLA')
    status, out, _ = run(capsys, str(path))
    assert status == 0
    assert "1 of 1 rows are not predicted" in out
    assert "xla.dot" in out
    assert "no constants fitted" in out


def test_rows_too_few_to_fit_are_not_said_to_be_fitted_to():
    one = merit([("p", (1.1, 1.0))])
    device = DeviceResult(
        device=V6E, fitted=None, merits={"fit": {"compiled": one, "model": one}},
        rejects=Rejects(refused=0, foreseen=0, false=0),
    )  # fmt: skip
    text = io.StringIO()
    write_table(Result(devices=(device,), rows=()), None, text)
    assert "too few rows to fit to, compiled" in text.getvalue()
    assert "rows fitted to" not in text.getvalue()
    assert "no constants fitted: 1 of the rows to fit compiled, 3 are needed" in text.getvalue()


@pytest.mark.compiler
def test_measured_rows_are_compiled_fitted_and_predicted(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    shape = '"{""shape"": {""m"": 512, ""k"": 512, ""n"": 512}}"'
    blocks = '"{{""bm"": {0}, ""bk"": {0}, ""bn"": {0}}}"'
    times = ((128, 0.05), (256, 0.02), (512, 0.015))
    path = csv_file(tmp_path, *(f"matmul,v6e,{shape},{blocks.format(b)},{ms}," for b, ms in times))
    output = tmp_path / "calibration.json"
    arguments = (str(path), "--output", str(output), "--jobs", "1")
    status, out, _ = run(capsys, *arguments, "--format", "json")
    document = json.loads(out)
    assert status == 0
    for row in document["rows"]:
        assert row["predicted_ms"] > 0
        assert (row["evidence"], row["set"], row["reason"]) == ("compiled", "fit", None)
        assert row["latency_low_ms"] < row["predicted_ms"] < row["latency_high_ms"]
    chip = document["devices"]["v6e"]
    assert chip["fitted"] == sorted(fit.FITTED)
    assert chip["merit"]["fit"]["compiled"]["rows"] == 3
    assert constants.load(output)["v6e"].rows == 3
    assert document["written"] == str(output)
    monkeypatch.setenv(constants.VARIABLE, str(output))
    status, table, _ = run(capsys, *arguments)
    assert status == 0
    assert "fitted to 3 measured rows of matmul" in table
    again = constants.load(output)["v6e"].constants
    assert again == {name: chip["constants"][name] for name in fit.FITTED}, "the same twice"


# Figures of merit


def test_kendall_counts_pairs_of_one_problem_only():
    one = [(1.0, 1.0), (2.0, 2.0), (3.0, 1.5)]  # three pairs, one out of order
    two = [(5.0, 9.0), (6.0, 8.0)]  # one pair, out of order
    assert kendall_tau([one]) == pytest.approx(1 / 3)
    assert kendall_tau([one, two]) == 0
    assert kendall_tau([[(1.0, 2.0)]]) is None
    assert kendall_tau([[(1.0, 2.0), (1.0, 3.0)]]) == 0, "equal predictions tell nothing"


def test_regret_is_what_the_choice_costs_over_the_best():
    group = [(1.0, 1.2), (2.0, 1.1), (3.0, 1.5), (4.0, 1.0)]
    assert regret(group, 1) == pytest.approx(0.2)
    assert regret(group, 3) == pytest.approx(0.1)
    assert regret(group, 4) == 0


def test_errors_are_relative_to_the_measurement():
    found = merit([("p", (1.1, 1.0)), ("p", (2.0, 2.0)), ("q", (0.8, 1.0))])
    assert (found.rows, found.groups) == (3, 1)
    assert found.median_error == pytest.approx(0.1)
    assert found.worst_error == pytest.approx(0.2)
    assert found.bias == 0
    assert merit([]).median_error is None


def test_quantiles_interpolate():
    assert quantile([0.0, 1.0, 2.0], 0.5) == 1
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9)
    assert quantile([4.0], 0.9) == 4


def test_the_band_holds_nine_rows_of_ten_both_ways():
    pairs = [(1.0, 1.0)] * 9 + [(1.0, 2.0)]
    assert half_width(pairs, 0.9) == pytest.approx(0.1)
    assert half_width([(1.0, 0.5)]) == half_width([(0.5, 1.0)]) == 1


def test_a_kernel_with_few_rows_shares_the_band_of_all():
    few, many = [(1.0, 1.5)], [(1.0, 1.1)] * 6
    found = bands({"few": few, "many": many})
    assert set(found) == {"many", "*"}
    assert found["many"] == pytest.approx(0.1 * (1 + 2 / 6)), "few rows: a wider band"
    assert found["*"] > found["many"]
    assert bands({}) == {}


# Fit


def evidence(steps: int, salu: int, bundles: int, measured_ms: float = 1.0) -> Evidence:
    """A call of `steps` steps with `bundles` of compute and a pipeline of `salu` scalar slots."""

    def use(n: int, scalar: int) -> ScopeUse:
        return ScopeUse(
            bundles=n, mxu_rows=0, spill_loads=0, spill_stores=0, units={"SALU": scalar},
            loop_depth=1,
        )  # fmt: skip

    call = PallasCall(
        name="k", grid=(steps,), grid_steps=steps, dimension_semantics=None,
        vmem_limit_bytes=None, windows=(), scratch=(), temporaries_bytes=0,
        scopes={"": steps, "step": steps}, scope_flops={"step": steps * 1000},
        executed_flops=steps * 1000, fill_bytes=0, drain_bytes=0, parallel_splits=1,
        classes=(
            StepClass(
                steps=steps, scopes={"step": 1}, next_in_bytes=0, next_in_copies=0,
                prev_out_bytes=0, prev_out_copies=0, flops=1000,
            ),
        ),
        dots=(Dot(m=8, k=128, n=128, dtype="bfloat16", bits=16),),
    )  # fmt: skip
    schedule = Schedule(
        name="k", bundles=bundles, prologue_bundles=0, capacity={},
        scopes={"": use(200, salu), "step": use(bundles, 0)}, vmem_bytes=0, vmem={},
    )  # fmt: skip
    return Evidence(
        measured=data.Measured(
            kernel="k", device="v6e", problem={}, config={"steps": steps, "bundles": bundles},
            measured_ms=measured_ms, part="fit", where="here",
        ),
        device=V6E,
        program=Program(calls=(call,)),
        compiled=Compiled(status="ok", schedules=(schedule,)),
    )  # fmt: skip


def rows_measured_with(truth: dict[str, float], noise: float = 0.0) -> list[Evidence]:
    found = []
    for n, (steps, salu, bundles) in enumerate(
        [(64, 100, 9000), (256, 300, 3000), (1024, 100, 800), (2048, 500, 400), (128, 50, 20000),
         (4096, 30, 1000), (512, 700, 700), (32, 10, 40000), (1024, 400, 1500)]
    ):  # fmt: skip
        row = evidence(steps, salu, bundles)
        ms = row.compiled_ms(replace(V6E, **truth))
        assert ms is not None
        measured = ms * (1 + noise * (-1) ** n)
        found.append(replace(row, measured=replace(row.measured, measured_ms=measured)))
    return found


TRUTH = {"issued_step_s": 3e-7, "scalar_cycles": 1.5, "launch_s": 6e-6}


def test_the_constants_that_made_the_rows_are_found_again():
    found = fit.fit(rows_measured_with(TRUTH), V6E)
    assert found is not None
    assert found.rows == 9
    for name, value in TRUTH.items():
        assert found.constants[name] == pytest.approx(value, rel=0.2), name
    errors = sorted(abs(p / m - 1) for p, m in found.residuals["k"])
    assert errors[6] < 0.03, "most rows are predicted by a fit that left them out"


def test_one_wild_row_does_not_move_the_fit():
    rows = rows_measured_with(TRUTH)
    wild = replace(rows[3], measured=replace(rows[3].measured, measured_ms=50.0))
    found = fit.fit([*rows[:3], wild, *rows[4:]], V6E)
    assert found is not None
    assert found.constants["issued_step_s"] == pytest.approx(3e-7, rel=0.4)


def test_a_fit_is_the_same_twice_and_stays_within_physical_bounds():
    rows = rows_measured_with(TRUTH, noise=0.02)
    first, second = fit.fit(rows, V6E), fit.fit(rows, V6E)
    assert first == second
    assert first is not None
    fast = [replace(r, measured=replace(r.measured, measured_ms=1e-6)) for r in rows]
    found = fit.fit(fast, V6E)
    assert found is not None
    for name, value in found.constants.items():
        low, high = constants.BOUNDS[name]
        assert low <= value <= high, name


def test_too_few_rows_are_not_fitted():
    assert fit.fit(rows_measured_with(TRUTH)[:2], V6E) is None


def test_only_the_constants_that_are_named_are_fitted():
    truth = {**TRUTH, "scalar_cycles": V6E.scalar_cycles, "launch_s": V6E.launch_s}
    found = fit.fit(rows_measured_with(truth), V6E, ("issued_step_s",))
    assert found is not None
    assert found.constants == pytest.approx({"issued_step_s": 3e-7}, rel=0.05)


def test_the_rate_of_xlas_operations_is_found_again_too():
    ops = [XlaOp(name="copy", opcode="copy", bytes_read=n * 10**6, bytes_written=0,
                 vmem_bytes=n * 10**6, estimated_cycles=None) for n in (500, 50, 1000)]  # fmt: skip
    truth = replace(V6E, vmem_bytes_per_s=9e11)
    rows = []
    for row, op in zip(rows_measured_with(TRUTH), ops, strict=False):
        row = replace(row, compiled=replace(row.compiled, xla_ops=(op,)))
        measured = replace(row.measured, measured_ms=row.compiled_ms(truth))
        rows.append(replace(row, measured=measured))
    found = fit.fit(rows, V6E, ("vmem_bytes_per_s",))
    assert found is not None
    assert found.constants == pytest.approx({"vmem_bytes_per_s": 9e11}, rel=0.05)


def test_a_constant_that_explains_nothing_is_exactly_nothing():
    none = dict.fromkeys(TRUTH, 0.0)
    found = fit.fit(rows_measured_with(none), replace(V6E, **TRUTH))
    assert found is not None
    assert all(value == 0 or value > 1e-10 for value in found.constants.values()), found.constants


# The calibration file


def calibration(**more) -> Calibration:
    fields = {
        "device": "v6e", "constants": {"launch_s": 3e-6}, "sources": {"launch_s": "a test"},
        "bands": {"compiled": {"*": 0.1, "matmul": 0.05}}, "rows": 7,
        "made_with": {"jax": "1"},
    } | more  # fmt: skip
    return Calibration(**fields)


def test_a_calibration_comes_back_and_is_applied(tmp_path: Path):
    path = tmp_path / "folder" / "calibration.json"
    constants.write(path, [calibration()])
    constants.write(path, [calibration(device="v5e", constants={"issued_step_s": 1e-6})])
    stored = constants.load(path)
    assert set(stored) == {"v6e", "v5e"}, "another device's constants stay"
    assert stored["v6e"] == calibration()
    chip = constants.calibrated(V6E, stored)
    assert chip.launch_s == 3e-6
    assert chip.sources["launch_s"] == "a test"
    assert chip.scalar_cycles == V6E.scalar_cycles, "what was not fitted is the device's own"
    assert (chip.band("compiled", "matmul"), chip.band("compiled", "splash")) == (0.05, 0.1)
    assert constants.calibrated(devices.get("v4"), stored) is devices.get("v4")


def test_rows_made_with_other_constants_have_another_fingerprint():
    chip = calibration().applied(V6E)
    assert constants.fingerprint(chip) != constants.fingerprint(V6E)
    widened = replace(V6E, bands={"compiled": {"*": 9.0}})
    assert constants.fingerprint(widened) == constants.fingerprint(V6E)


def test_sweep_reads_the_file_that_the_variable_names(tmp_path: Path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(constants.VARIABLE, str(path))
    with pytest.raises(InputError, match="no calibration file at"):
        constants.load()
    constants.write(path, [calibration()])
    assert constants.calibrated(V6E).launch_s == 3e-6


def test_devices_lists_every_constant_with_its_source_and_a_files_in_place_of_the_shipped(
    tmp_path: Path, capsys, monkeypatch
):
    path = tmp_path / "calibration.json"
    constants.write(path, [calibration()])
    monkeypatch.setenv(constants.VARIABLE, str(path))
    assert not cli.app(["devices"], standalone_mode=False)
    out = capsys.readouterr().out
    v6e = out[out.index("v6e  (") : out.index("tpu7x  (")]
    lines = {line.split()[0]: line for line in v6e.splitlines()[1:]}
    assert lines["launch_s"].split(maxsplit=3)[1:] == ["3", "µs", "a test"]
    assert "public rows of v6e" in lines["scalar_cycles"]
    for name in constants.BOUNDS:
        assert name in lines or getattr(V6E, name) is None, name


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{", "not a readable calibration file"),
        ("[]", "not a calibration file"),
        ('{"format": 2, "devices": {}}', "format 2 is not 1"),
        ('{"format": 1, "devices": {"tpu9": {"constants": {}}}}', "'tpu9' is not one of"),
        ('{"format": 1, "devices": {"v6e": {"constants": {"pi": 3}}}}', "'pi' is not one of"),
        ('{"format": 1, "devices": {"v6e": {"constants": {"launch_s": -1}}}}', "-1 is not"),
        ('{"format": 1, "devices": {"v6e": {"constants": {"launch_s": true}}}}', "True is not"),
        ('{"format": 1, "devices": {"v6e": {"constants": {}, "bands": {"model": {"*": -1}}}}}',
         "band of model"),
    ],
)  # fmt: skip
def test_a_damaged_calibration_says_what_is_wrong(text: str, want: str, tmp_path: Path):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(DamagedFileError) as caught:
        constants.load(path)
    assert want in str(caught.value)
    assert str(path) in str(caught.value)


# Bands on rows


def row(latency: float, width: float | None, evidence_kind: str = "compiled") -> Row:
    return Row(
        problem_key="p", kernel="k", device="v6e", problem="{}", config="{}", status="ok",
        evidence=evidence_kind, latency_ms=latency,
        latency_low_ms=None if width is None else latency / (1 + width),
        latency_high_ms=None if width is None else latency * (1 + width),
    )  # fmt: skip


def test_rows_within_a_band_cannot_be_told_apart():
    assert indistinguishable(row(1.0, 0.1), row(1.09, 0.1))
    assert not indistinguishable(row(1.0, 0.1), row(1.2, 0.1))
    assert not indistinguishable(row(1.0, None), row(1.0, None)), "old rows have no band"
    assert not indistinguishable(row(1.0, 0.1, "model"), row(1.0, 0.1))


def test_a_device_without_data_has_a_wide_band():
    assert devices.get("v4").band("compiled", "matmul") > V6E.band("compiled", "jax.splash")
    assert math.isclose(devices.get("v4").band("compiled", "x"), devices.UNKNOWN_BANDS["compiled"])
    for evidence, unknown in devices.UNKNOWN_BANDS.items():
        measured = [chip.bands.get(evidence, {}).get("*", 0.0) for chip in devices.DEVICES.values()]
        assert 0.0 < max(measured) < unknown
