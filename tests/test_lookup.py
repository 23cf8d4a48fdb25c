"""Stored best configs: exact or an explicit miss, never another device's, without jax."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from boards import problem, row, store, store_matmul
from test_cli import call

import autotune
from autotune.errors import InputError, NoResultError
from autotune.lookup import StaleResultsWarning, best_config, forget, library, sources

SHAPE = {"m": 4096, "k": 7168, "n": 18432}
ATTENTION = {
    "batch": 1, "q_heads": 8, "kv_heads": 8, "q_len": 4096, "kv_len": 4096, "head_dim_qk": 128,
    "head_dim_v": 128,
}  # fmt: skip
FLASH_DEFAULTS = {"causal": False, "use_exp2": True, "residuals": False, "logit_soft_cap": None}
BLOCKS = {"block_q": 1024, "block_kv": 512}


@pytest.fixture(autouse=True)
def nothing_read_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AUTOTUNE_RESULTS", raising=False)
    forget()
    yield
    forget()


def store_flash(results: Path, blocks: dict[str, Any] = BLOCKS, **about: Any) -> None:
    asked = problem("flash_fwd", {**ATTENTION, **about.pop("shape", {})}, defaults=FLASH_DEFAULTS,
                    **about)  # fmt: skip
    store(results, row(asked, blocks, 1.0))


def ask_flash(results: Path, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return best_config(
        "flash_fwd", ATTENTION, device="v6e", options=options, results=results, **more
    )


def test_the_best_config_is_a_dict_that_says_where_it_comes_from(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE, about={"name": "up-projection"})
    found = autotune.best_config("matmul", SHAPE, device="v6e", results=tmp_path)
    assert found == {"bm": 512, "bk": 512, "bn": 512, "grid_order": "mn", "buffers": 2,
                     "vmem_limit_bytes": None}  # fmt: skip
    assert found.found.match == "exact"
    assert found.found.evidence == "compiled"
    assert found.found.latency_ms == 1.0
    assert found.found.problem_name == "up-projection"
    assert found.found.reason is None


def test_another_device_is_a_miss_even_where_the_nearest_would_do(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    for on_miss in ("error", "nearest"):
        with pytest.raises(NoResultError, match="on v5p; matmul was tuned for v6e") as error:
            best_config("matmul", SHAPE, device="v5p", results=tmp_path, on_miss=on_miss)
        assert error.value.exit_status == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kernel": "jax.matmul"}, "there are results for matmul"),
        ({"kernel": "my.module:KERNEL"}, "there are results for matmul"),
        ({"dtype": "float32"}, "it was tuned in bfloat16"),
        ({"shape": {**SHAPE, "m": 4097}}, "other shapes of it were tuned"),
        ({"options": {"transpose_rhs": True}}, "that shape was tuned with options {}"),
    ],
)
def test_a_miss_says_what_there_is_instead(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    store_matmul(tmp_path, **SHAPE)
    asked: dict[str, Any] = {"kernel": "matmul", "shape": SHAPE, "device": "v6e"} | change
    kernel, shape = asked.pop("kernel"), asked.pop("shape")
    with pytest.raises(NoResultError) as error:
        best_config(kernel, shape, results=tmp_path, **asked)
    assert told in str(error.value)
    assert isinstance(error.value, LookupError)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "use_exp2": True},
        {"causal": True, "use_exp2": True, "residuals": False},
        {"causal": True, "logit_soft_cap": None},
        {"causal": True, "use_exp2": True, "residuals": False, "logit_soft_cap": None},
    ],
    ids=lambda options: ",".join(options),
)
def test_options_at_their_defaults_may_be_given_or_left_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    store_flash(tmp_path, options={"causal": True})
    assert ask_flash(tmp_path, options) == BLOCKS


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": False}, {"causal": True, "use_exp2": False},
        {"causal": True, "logit_soft_cap": 30},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_with_another_value_is_another_problem(
    options: dict[str, Any], tmp_path: Path
) -> None:
    store_flash(tmp_path, options={"causal": True})
    for on_miss in ("error", "nearest"):
        with pytest.raises(NoResultError):
            ask_flash(tmp_path, options, on_miss=on_miss)


WRONG_NAMES = {
    "kernel": ({"kernel": "matmull"}, "unknown kernel 'matmull'; did you mean 'matmul'? (known: "),
    "no kernel": ({"kernel": "a b:C"}, "kernel: 'a b:C' is not allowed; a known kernel, or packag"),
    "axis": ({"shape": {"mm": 1}}, "unknown shape entry of matmul 'mm'; did you mean 'm'? (known:"),
    "option": ({"options": {"epilog": None}}, "unknown option of matmul 'epilog'; did you mean 'e"),
    "dtype": ({"dtype": "bf16"}, "dtype: 'bf16' is not allowed; bfloat16, float32, float8_"),
}  # fmt: skip


@pytest.mark.parametrize("stored", [False, True], ids=["nothing stored", "stored"])
@pytest.mark.parametrize("case", WRONG_NAMES)
def test_a_name_that_is_wrong_whatever_is_stored_is_bad_input_and_no_miss(
    case: str, stored: bool, tmp_path: Path
) -> None:
    if stored:
        store_matmul(tmp_path, **SHAPE)
    change, told = WRONG_NAMES[case]
    asked: dict[str, Any] = {"kernel": "matmul", "shape": SHAPE, "device": "v6e"} | change
    for on_miss in ("error", "nearest", "default"):
        with pytest.raises(InputError) as error:
            best_config(**asked, results=tmp_path, on_miss=on_miss)
        assert told in str(error.value)


def test_a_users_kernel_goes_by_its_address_and_by_its_folders_name(tmp_path: Path) -> None:
    board = store(tmp_path, row(problem("my.module:KERNEL", {"rows": 8}), {"block": 8}, 1.0))
    for name in ("my.module:KERNEL", board.path.parent.name):
        ask = partial(best_config, name, device="v6e", results=tmp_path)
        assert ask({"rows": 8}) == {"block": 8}
        assert ask({"rows": 8}).found.kernel == "my.module:KERNEL"
        with pytest.raises(InputError, match="KERNEL 'row'; did you mean 'rows'"):
            ask({"row": 8})
        with pytest.raises(NoResultError):  # which options it has, only its import would tell
            ask({"rows": 8}, options={"gate": True})


def test_problems_that_differ_in_one_option_are_told_apart(tmp_path: Path) -> None:
    store_flash(tmp_path, {"block_q": 1, "block_kv": 1})
    store_flash(tmp_path, {"block_q": 2, "block_kv": 2}, options={"logit_soft_cap": 30})
    for folder in (tmp_path, *tmp_path.rglob("*")):  # so that all is answered from one reading
        os.utime(folder, (1, 1))
    assert ask_flash(tmp_path)["block_q"] == 1
    assert ask_flash(tmp_path, {"logit_soft_cap": 30.0})["block_q"] == 2, "30.0 is 30"
    assert ask_flash(tmp_path, {"logit_soft_cap": None})["block_q"] == 1


def test_masks_are_compared_by_what_they_mean(tmp_path: Path) -> None:
    causal = {"causal": {"offset": 0}}
    local = {"all": [causal, {"local": {"left": 1024, "right": None}}]}
    for mask, block in ((causal, 1), (local, 2)):
        about = problem("splash", ATTENTION, options={"mask": mask}, defaults={"mask": causal})
        store(tmp_path, row(about, {"block_q": block}, 1.0))

    def ask(**options: Any) -> Any:
        return best_config("splash", ATTENTION, device="v6e", options=options, results=tmp_path)

    assert ask()["block_q"] == ask(mask={"causal": {}})["block_q"] == 1
    assert ask(mask={"all": [{"local": {"left": 1024}}, {"causal": {}}]})["block_q"] == 2


def test_an_axis_left_out_is_1(tmp_path: Path) -> None:
    store_flash(tmp_path)
    shape = {k: v for k, v in ATTENTION.items() if k != "batch"}
    assert best_config("flash_fwd", shape, device="v6e", results=tmp_path) == BLOCKS
    with pytest.raises(NoResultError):
        best_config("flash_fwd", {**shape, "batch": 2}, device="v6e", results=tmp_path)


def test_keys_of_the_real_kernels_are_found_with_and_without_their_defaults(tmp_path: Path) -> None:
    from autotune.kernels import base

    shape = {k: v for k, v in ATTENTION.items() if k != "batch"}
    for name in ("flash_fwd", "flash_dq", "flash_dkv"):
        kernel = base.load(name)
        about = base.make_problem(kernel, device="v6e", shape=shape, options={"causal": True})
        store(tmp_path, row(about, BLOCKS, 1.0))
        for options in ({"causal": True}, dict(about.options)):
            found = best_config(name, shape, device="v6e", options=options, results=tmp_path)
            assert found.found.problem_key == about.key


def test_nearest_takes_the_closest_shape_whose_blocks_divide_the_asked_one(tmp_path: Path) -> None:
    store_matmul(tmp_path, 2048, 2048, 2048, tile={"bm": 256})
    store_matmul(tmp_path, 4096, 4096, 4096, tile={"bm": 1024})
    ask = {"k": 2048, "n": 4096}
    found = best_config(
        "matmul", {"m": 3072, **ask}, device="v6e", results=tmp_path, on_miss="nearest"
    )
    assert found["bm"] == 1024
    assert found.found.match == "nearest"
    assert found.found.problem["shape"] == {"m": 4096, "k": 4096, "n": 4096}
    assert "nearest of 2 stored shapes" in (found.found.reason or "")
    assert "k 4096 for 2048, m 4096 for 3072" in (found.found.reason or "")
    found = best_config(
        "matmul", {"m": 3328, **ask}, device="v6e", results=tmp_path, on_miss="nearest"
    )
    assert found["bm"] == 256, "3328 is no multiple of 1024"
    with pytest.raises(
        NoResultError, match="the nearest does not fit: its bm 1024 does not divide"
    ):
        best_config("matmul", {"m": 3000, **ask}, device="v6e", results=tmp_path, on_miss="nearest")


def test_shapes_on_both_sides_of_a_power_of_two_have_one_answer_each(tmp_path: Path) -> None:
    for m in (16384, 32768):
        store_matmul(tmp_path, m, 1024, 1024, tile={"bm": m // 32})
    ask = lambda m: best_config(
        "matmul", {"m": m, "k": 1024, "n": 1024}, device="v6e", results=tmp_path, on_miss="nearest"
    )
    assert ask(32768).found.match == "exact"
    assert ask(32256)["bm"] == 512, "32256 is nearer to 32768, whose block of 1024 does not fit it"
    with pytest.raises(NoResultError, match="bm 1024 does not divide m = 32767"):
        ask(32767)


def test_nearest_of_a_users_kernel_says_that_its_blocks_were_not_checked(tmp_path: Path) -> None:
    store(tmp_path, row(problem("my.module:KERNEL", {"rows": 1024}), {"block": 256}, 1.0))
    found = best_config(
        "my.module:KERNEL", {"rows": 1000}, device="v6e", results=tmp_path, on_miss="nearest"
    )
    assert found == {"block": 256}, "which does not divide 1000, for all that is known here"
    told = found.found.reason or ""
    assert "whether its blocks suit the asked shape was not checked" in told
    assert "rows 1024 for 1000" in told


def test_of_a_kernel_that_was_given_an_axis_each_problem_is_found_by_its_own(
    tmp_path: Path,
) -> None:
    for shape, block in (({"rows": 8}, 1), ({"rows": 8, "columns": 4}, 2)):
        store(tmp_path, row(problem("my.module:KERNEL", shape), {"block": block}, 1.0))
    ask = partial(best_config, "my.module:KERNEL", device="v6e", results=tmp_path)
    assert ask({"rows": 8}) == {"block": 1}
    assert ask({"rows": 8, "columns": 4}) == {"block": 2}
    assert ask({"rows": 8, "columns": 8}, on_miss="nearest") == {"block": 2}
    assert ask({"rows": 16}, on_miss="nearest") == {"block": 1}


def test_an_exact_result_comes_before_the_nearest(tmp_path: Path) -> None:
    store_matmul(tmp_path, 1024, 1024, 1024, tile={"bm": 256})
    store_matmul(tmp_path, 2048, 1024, 1024)
    found = best_config("matmul", {"m": 1024, "k": 1024, "n": 1024}, device="v6e",
                        results=tmp_path, on_miss="nearest")  # fmt: skip
    assert (found["bm"], found.found.match) == (256, "exact")


def test_the_default_comes_from_the_kernel_and_says_that_nothing_was_tuned(tmp_path: Path) -> None:
    found = best_config("matmul", SHAPE, device="v6e", results=tmp_path, on_miss="default")
    assert (found["bm"], found["bk"], found["bn"]) == (128, 128, 128)
    assert found.found.match == "default"
    assert found.found.evidence is None
    assert "this is the kernel's default, not tuned" in (found.found.reason or "")
    store_matmul(tmp_path, **SHAPE)
    stored = best_config("matmul", SHAPE, device="v6e", results=tmp_path, on_miss="default")
    assert stored["bm"] == 512, "what was swept meanwhile counts"


def test_measured_comes_before_compiled_and_the_evidence_is_named(tmp_path: Path) -> None:
    store_matmul(tmp_path / "b", **SHAPE, evidence="measured", tile={"bm": 1024},
                 timer="device_profile")  # fmt: skip
    store_matmul(tmp_path / "a", **SHAPE, latency_ms=0.1)
    found = best_config("matmul", SHAPE, device="v6e", results=tmp_path)
    assert found["bm"] == 1024
    assert (found.found.evidence, found.found.timer) == ("measured", "device_profile")


@pytest.mark.parametrize("newer", ["a", "b"])
def test_of_one_kind_of_evidence_the_newest_comes_first(newer: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        made = datetime(2026, 11, 2 if folder == newer else 1, tzinfo=UTC)
        store_matmul(tmp_path / folder, **SHAPE, tile={"bm": 1024 if folder == newer else 256},
                     created_at=made)  # fmt: skip
        near = {**SHAPE, "m": 8192}
        store_matmul(tmp_path / folder, **near, tile={"bm": 2048 if folder == newer else 128},
                     created_at=made)  # fmt: skip
    ask = partial(best_config, "matmul", device="v6e", results=tmp_path, on_miss="nearest")
    assert ask(SHAPE)["bm"] == 1024
    assert ask({**SHAPE, "m": 16384})["bm"] == 2048


def test_a_candidate_that_was_never_ranked_is_no_result(tmp_path: Path) -> None:
    about = problem("matmul", SHAPE)
    store(tmp_path, row(about, {"bm": 1}, None, status="oom", reason="VMEM"))
    with pytest.raises(NoResultError):
        best_config("matmul", SHAPE, device="v6e", results=tmp_path)


def test_another_release_of_jax_warns_once(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE, jax_version="0.4.30", libtpu_version="0.0.41")
    ask = lambda: best_config("matmul", SHAPE, device="v6e", results=tmp_path)
    with pytest.warns(StaleResultsWarning, match=r"stale: jax 0\.4\.30 → .*libtpu 0\.0\.41 → "):
        assert ask().found.stale
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask().found.stale


@pytest.mark.parametrize(
    ("made", "here", "stale"),
    [
        ("0.10.2", "0.10.3", False),
        ("0.10.2", "0.12.0.1", True),
        ("0.0.42", "0.0.42.1", False),
        ("0.0.41", "0.0.43", True),
        ("1.2", "1.3", False),
        ("1.9", "2.0", True),
    ],
)
def test_a_release_is_a_version_up_to_its_first_number_that_is_not_0(
    made: str, here: str, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune import stale as staleness
    from autotune import versions

    monkeypatch.setattr(versions, "installed", lambda: {"jax": here, "libtpu": None})
    old = row(problem("none:KERNEL", {"m": 1}), {}, 1.0, jax_version=made, libtpu_version="0.0.1")
    assert (staleness.outdated(old) is not None) == stale
    assert staleness.reason(old) == f"stale: jax {made} → {here}", "`reason` tells any difference"


def test_results_come_from_the_argument_then_the_variable_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask = lambda **more: best_config("matmul", SHAPE, device="v6e", **more)["bm"]
    with pytest.raises(NoResultError, match="there are results for no kernel"):
        ask()
    store_matmul(tmp_path / "results", **SHAPE, tile={"bm": 1024})
    assert ask() == 1024
    store_matmul(tmp_path / "other", **SHAPE, tile={"bm": 256})
    monkeypatch.setenv("AUTOTUNE_RESULTS", "other")
    assert ask() == 256
    assert ask(results="results") == 1024
    monkeypatch.setenv("AUTOTUNE_RESULTS", "gone")
    with pytest.raises(InputError, match="results 'gone' do not exist"):
        ask()


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
def test_results_ship_as_the_data_of_a_package(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shipped_{zipped}"
    package = tmp_path / name
    store_matmul(package / "tuned", **SHAPE)
    (package / "__init__.py").write_text("")
    (package / "tuned" / "__init__.py").write_text("")
    where = tmp_path
    if zipped:
        where = tmp_path / "all.zip"
        with zipfile.ZipFile(where, "w") as archive:
            for path in package.rglob("*"):
                archive.write(path, path.relative_to(tmp_path))
        package.rename(tmp_path / "gone")
    monkeypatch.syspath_prepend(str(where))
    found = best_config("matmul", SHAPE, device="v6e", results=f"package:{name}.tuned")
    assert found["bm"] == 512
    with pytest.raises(InputError, match="package:nobody_has_this"):
        best_config("matmul", SHAPE, device="v6e", results="package:nobody_has_this")


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
def test_a_plain_folder_inside_a_package_needs_no_init(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shipped_plain_{zipped}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    store_matmul(tmp_path / name / "tuned", **SHAPE)
    where = tmp_path
    if zipped:
        where = tmp_path / "plain.zip"
        with zipfile.ZipFile(where, "w") as archive:
            for path in (tmp_path / name).rglob("*.p*"):
                archive.write(path, path.relative_to(tmp_path))
        (tmp_path / name).rename(tmp_path / "gone")
    monkeypatch.syspath_prepend(str(where))
    found = best_config("matmul", SHAPE, device="v6e", results=f"package:{name}.tuned")
    assert found["bm"] == 512


def test_a_board_that_was_swept_again_is_read_again(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    ask = lambda: best_config("matmul", SHAPE, device="v6e", results=tmp_path)["bm"]
    assert ask() == 512
    store_matmul(tmp_path, **SHAPE, tile={"bm": 2048})
    assert ask() == 2048


@pytest.mark.parametrize("known", [False, True], ids=["new", "rewritten"])
def test_a_board_that_is_written_while_the_results_are_first_read_is_found(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        store_matmul(tmp_path / "a", **SHAPE)
    store_matmul(tmp_path / "b", 8, 8, 8)
    monkeypatch.setattr(sources, "SETTLED_NS", 0)  # a second look would find it anyway
    read, behind = library._best_of, []

    def slowly(file: Path, *more: Any) -> Any:
        best = read(file, *more)
        if "/b/" in str(file) and not behind:  # the reader is past `a` by then
            behind.append(store_matmul(tmp_path / "a", **SHAPE, tile={"bm": 2048}))
        return best

    monkeypatch.setattr(library, "_best_of", slowly)
    best_config("matmul", {"m": 8, "k": 8, "n": 8}, device="v6e", results=tmp_path)
    assert best_config("matmul", SHAPE, device="v6e", results=tmp_path)["bm"] == 2048


def test_an_exact_result_that_is_swept_later_comes_before_the_nearest(tmp_path: Path) -> None:
    store_matmul(tmp_path, 2048, 7168, 18432, tile={"bm": 256})
    ask = partial(best_config, "matmul", SHAPE, device="v6e", results=tmp_path, on_miss="nearest")
    assert [ask()["bm"] for _ in range(2)] == [256, 256]
    store_matmul(tmp_path, **SHAPE)
    assert ask().found.match == "exact"
    next(tmp_path.rglob("*m4096*.parquet")).unlink()
    assert ask().found.match == "nearest"


def test_a_damaged_board_that_is_mended_in_place_is_found(tmp_path: Path) -> None:
    path = store_matmul(tmp_path, **SHAPE).path
    content = path.read_bytes()
    path.write_bytes(content[:100])
    for folder in (tmp_path, *tmp_path.rglob("*")):
        os.utime(folder, (1, 1))
    ask = partial(best_config, "matmul", SHAPE, device="v6e", results=tmp_path)
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(NoResultError):
        ask()
    with pytest.raises(NoResultError):
        ask()  # and is not told again
    path.write_bytes(content)
    assert ask()["bm"] == 512


def test_a_source_of_one_file_is_read_again_once_it_has_a_best(tmp_path: Path) -> None:
    about = problem("matmul", SHAPE)
    path = store(tmp_path, row(about, {"bm": 1}, None, status="oom", reason="VMEM")).path
    ask = partial(best_config, "matmul", SHAPE, device="v6e", results=path)
    with pytest.raises(NoResultError):
        ask()
    store(tmp_path, row(about, {"bm": 2}, 1.0))
    assert ask() == {"bm": 2}


def test_a_board_written_over_in_place_is_read_again_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    path = store_matmul(results, **SHAPE).path
    store_matmul(results, 8, 8, 8)
    other = store_matmul(tmp_path / "other", **SHAPE, tile={"bm": 256}).path.read_bytes()
    for folder in (results, *(f for f in results.rglob("*") if f.is_dir())):
        os.utime(folder, (1, 1))
    ask = partial(best_config, "matmul", SHAPE, device="v6e", results=results)
    assert ask()["bm"] == 512
    read, opened = library._best_of, []
    monkeypatch.setattr(
        library, "_best_of", lambda file, *more: (opened.append(file), read(file, *more))[1]
    )
    path.write_bytes(other)
    assert ask()["bm"] == 256
    assert opened == [path]
    modified = path.stat().st_mtime_ns
    path.write_bytes(other)  # of the same size, and with the old time, as some copying tools do
    os.utime(path, ns=(modified, modified))
    assert ask()["bm"] == 256
    assert opened == [path, path]


def test_a_folder_that_changed_just_before_it_was_listed_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added within the resolution of the file system's clock leaves its time as it was."""
    store_matmul(tmp_path, 8, 8, 8)
    folders = [tmp_path, *(f for f in tmp_path.rglob("*") if f.is_dir())]
    changed_ns = 10**18
    now = SimpleNamespace(time_ns=lambda: changed_ns + 500_000_000)
    monkeypatch.setattr(sources, "time", now)

    def at_the_same_time() -> None:
        for folder in folders:
            os.utime(folder, ns=(changed_ns, changed_ns))

    at_the_same_time()
    ask = partial(best_config, "matmul", SHAPE, device="v6e", results=tmp_path)
    with pytest.raises(NoResultError):
        ask()
    store_matmul(tmp_path, **SHAPE)
    at_the_same_time()
    assert ask()["bm"] == 512


def test_device_folders_behind_links_are_looked_up(tmp_path: Path) -> None:
    store_matmul(tmp_path / "disk", **SHAPE)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "v6e").symlink_to(tmp_path / "disk" / "v6e")
    (tmp_path / "disk" / "v6e" / "loop").symlink_to(tmp_path / "results")
    (tmp_path / "results" / "v5e").symlink_to("unmounted")
    with pytest.warns(UserWarning, match=r"skipped .*v5e: cannot be read \(No such file"):
        found = best_config("matmul", SHAPE, device="v6e", results=tmp_path / "results")
    assert found["bm"] == 512


def test_a_board_that_contradicts_itself_answers_nothing(tmp_path: Path) -> None:
    path = store_matmul(tmp_path, **SHAPE).path
    other = store_matmul(tmp_path, 8, 8, 8).path
    other.write_bytes(path.read_bytes())
    table = pq.read_table(path, partitioning=None)
    place = table.column_names.index("is_best")
    every = pa.array([True] * table.num_rows)
    pq.write_table(table.set_column(place, table.schema.field(place), every), path)
    with (
        pytest.warns(UserWarning, match="contradicts itself") as told,
        pytest.raises(NoResultError, match="there are results for no kernel"),
    ):
        best_config("matmul", SHAPE, device="v6e", results=tmp_path)
    assert sorted(str(w.message).partition("itself: ")[2][:16] for w in told) == [
        "2 rows are the b", "its rows are of ",
    ]  # fmt: skip


def test_heads_that_share_no_keys_are_bad_input_even_where_the_nearest_would_do(
    tmp_path: Path,
) -> None:
    store_flash(tmp_path)
    shape = {**ATTENTION, "q_heads": 6, "kv_heads": 4}
    for on_miss in ("error", "nearest", "default"):
        with pytest.raises(InputError, match="kv_heads 4 do not divide q_heads 6"):
            best_config("flash_fwd", shape, device="v6e", results=tmp_path, on_miss=on_miss)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_that_was_forked_while_another_thread_read_gets_an_answer(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    code = f"""
import os, threading, autotune
from autotune.lookup import library
ask = lambda: autotune.best_config("matmul", {SHAPE}, device="v6e", results={str(tmp_path)!r})
read, reading, forked = library._best_of, threading.Event(), threading.Event()
def slowly(*about):
    reading.set()
    forked.wait()
    return read(*about)
library._best_of = slowly
thread = threading.Thread(target=ask)
thread.start()
reading.wait()
child = os.fork()
forked.set()
os.write(1, f"{{ask()['bm']}}\\n".encode())  # one write, whole beside the other's
if child:
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["512", "512"]


def test_a_damaged_file_is_named_and_hides_no_other(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut short")
    (tmp_path / ".x.parquet").write_bytes(b"unfinished")
    with pytest.warns(UserWarning, match=r"skipped .*cut\.parquet: not a readable leaderboard"):
        assert best_config("matmul", SHAPE, device="v6e", results=tmp_path)["bm"] == 512


def test_content_that_no_sweep_writes_is_a_damaged_file_here_too(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    path = store_matmul(tmp_path, 8, 8, 8).path
    table = pq.read_table(path, partitioning=None)
    place = table.column_names.index("config")
    lists = pa.array(["[1]"] * table.num_rows, type=table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), lists), path)
    with pytest.warns(UserWarning, match="config is not a JSON object"):
        assert best_config("matmul", SHAPE, device="v6e", results=tmp_path)["bm"] == 512


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "tpu9"}, "unknown device 'tpu9'"),
        ({"shape": {"m": 0}}, "shape.m: 0 is not allowed"),
        ({"shape": {"m": 2.5}}, "shape.m: 2.5 is not allowed"),
        ({"shape": {"m": True}}, "shape.m: true is not allowed"),
        ({"on_miss": "guess"}, "on_miss: 'guess' is not allowed; error, default, nearest"),
        ({"options": {"scale": object}}, "is not allowed; a JSON value"),
        ({"options": [1]}, "options: [1] is not allowed; a mapping"),
        ({"shape": None}, "shape: null is not allowed; a mapping"),
        ({"shape": {"m": 10**400}}, "shape.m: a number of 1329 bits is not allowed"),
        ({"dtype": ["x"]}, 'dtype: ["x"] is not allowed'),
        ({"results": 5}, "results: 5 is not allowed; a folder, or its name"),
    ],
)
def test_bad_input_says_what_is_allowed(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"shape": SHAPE, "device": "v6e", "results": tmp_path} | change
    with pytest.raises(InputError) as error:
        best_config("matmul", asked.pop("shape"), **asked)
    assert told in str(error.value)


def test_a_device_may_be_named_as_jax_names_it(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    assert best_config("matmul", SHAPE, device="TPU v6 lite", results=tmp_path)["bm"] == 512


@pytest.mark.parametrize("on_miss", ["exact", "error", "nearest", "default"])
def test_a_lookup_opens_no_leaderboard_once_the_results_are_read(
    on_miss: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How fast that is: benchmarks/lookup_speed.py."""
    for m in range(1, 11):
        store_matmul(tmp_path, 512 * m, 1024, 1024)
    for folder in (tmp_path, *tmp_path.rglob("*")):
        os.utime(folder, (1, 1))
    asked = {"m": 512 * (5 if on_miss == "exact" else 11), "k": 1024, "n": 1024}
    on_miss = "error" if on_miss == "exact" else on_miss

    def ask() -> None:
        with contextlib.suppress(NoResultError):
            best_config("matmul", asked, device="v6e", results=tmp_path, on_miss=on_miss)

    opened: list[str] = []
    what = library._what
    monkeypatch.setattr(
        library, "_what", lambda file, *a: opened.append(str(file)) or what(file, *a)
    )
    ask()
    assert len(opened) == 10
    for _ in range(3):
        ask()
    assert len(opened) == 10


def test_many_threads_get_the_same_answer_and_none_can_spoil_it(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    answers: list[dict[str, Any]] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        for _ in range(20):
            found = best_config("matmul", SHAPE, device="v6e", results=tmp_path)
            answers.append(dict(found))
            found["bm"] = -1

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 160
    assert {answer["bm"] for answer in answers} == {512}


def test_neither_the_import_nor_a_lookup_imports_jax(tmp_path: Path) -> None:
    store_matmul(tmp_path, **SHAPE)
    code = f"""
import sys, autotune
from autotune.errors import InputError
assert not {{"jax", "pandas", "pyarrow"}} & set(sys.modules), "import autotune is light"
for on_miss in ("error", "nearest"):
    found = autotune.best_config("matmul", {SHAPE}, device="v6e", results={str(tmp_path)!r},
                                 on_miss=on_miss)
try:
    autotune.best_config("matmul", {{"m": 7}}, device="v6e", results={str(tmp_path)!r})
except LookupError:
    pass
try:
    autotune.best_config("matmul", {{"mm": 7}}, device="v6e", results={str(tmp_path)!r})
except InputError:
    pass
assert "jax" not in sys.modules
print(found["bm"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "512\n"


def test_best_prints_the_config_with_its_origin_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_flash(tmp_path, options={"causal": True}, name="attention")
    sizes = ",".join(f"{k}={v}" for k, v in ATTENTION.items() if k != "batch")
    asked = ["best", "flash_fwd", "--results", str(tmp_path)]
    by_shape = [*asked, "--shape", sizes, "--device", "v6e"]
    status, out, err = call(capsys, *by_shape, "--option", "causal=true")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert answer["config"] == BLOCKS
    assert (answer["match"], answer["evidence"]) == ("exact", "compiled")
    for same in (
        [*by_shape, "--option", "causal=True", "--option", "use_exp2=true"],
        [*asked, "--problem", "attention"],
        [*asked, "--problem", answer["problem_key"], "--device", "v6e"],
    ):
        assert json.loads(call(capsys, *same)[1]) == answer


def test_best_says_that_the_results_are_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_matmul(tmp_path, **SHAPE, libtpu_version="0.0.41")
    status, out, err = call(
        capsys, "best", "matmul", "--shape", "m=4096,k=7168,n=18432", "--device", "v6e",
        "--results", str(tmp_path),
    )  # fmt: skip
    assert status == 0
    assert err.startswith("autotune: stale: libtpu 0.0.41 → ")
    assert json.loads(out)["stale"].startswith("stale: libtpu 0.0.41")


def test_best_names_a_damaged_file_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_matmul(tmp_path, **SHAPE, about={"name": "up"})
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut short")
    asked = ["best", "matmul", "--problem", "up", "--results", str(tmp_path)]
    status, out, err = call(capsys, *asked)
    assert (status, json.loads(out)["config"]["bm"], err.count("\n")) == (0, 512, 1)
    assert err.startswith(f"autotune: skipped {tmp_path}/cut.parquet: not a readable leaderboard")


BAD = {
    "no shape": ([], 2, "needs one of --shape"),
    "both": (["--shape", "m=1", "--problem", "x"], 2, "needs one of --shape"),
    "no device": (["--shape", "m=1"], 2, "needs --device"),
    "no size": (["--shape", "m", "--device", "v6e"], 2, "--shape 'm' is not allowed; NAME=VALUE"),
    "size": (["--shape", "m=1k", "--device", "v6e"], 2, "--shape m=1k is not allowed"),
    "zero": (["--shape", "m=0", "--device", "v6e"], 2, "--shape m=0 is not allowed"),
    "twice": (["--shape", "m=1,m=2", "--device", "v6e"], 2, "m is given twice"),
    "option": (["--shape", "m=1", "--device", "v6e", "--option", "causal"], 2, "--option 'causal'"),
    "device": (["--shape", "m=1", "--device", "v9"], 2, "unknown device 'v9'"),
    "option of a name": (["--problem", "x", "--option", "a=1"], 2, "--option belongs to --shape"),
    "axis": (["--shape", "mm=1", "--device", "v6e"], 2, "unknown shape entry of matmul 'mm'"),
    "option name": (
        ["--shape", "m=1", "--device", "v6e", "--option", "epi=1"], 2, "unknown option of matmul"),
    "option value": (
        ["--shape", "m=1", "--device", "v6e", "--option", "transpose_rhs=yes"], 2,
        "options.transpose_rhs: 'yes' is not allowed; true or false"),
    "option value, nearest": (
        ["--shape", "m=1", "--device", "v6e", "--option", "epilogue=1", "--on-miss", "nearest"], 2,
        "options.epilogue: 1 is not allowed; one of none, relu, gelu, silu"),
    "dtype": (["--shape", "m=1", "--device", "tpu7x", "--dtype", "int8"], 2,
              "dtype: 'int8' is not allowed; matmul on tpu7x takes bfloat16, float32"),
    "too long": (["--shape", "m=2147483649", "--device", "v6e"], 2, "whole number from 1 to 2^31"),
    "name": (["--problem", "x"], 4, "no stored result in"),
    "name on a chip": (["--problem", "up", "--device", "v5p"], 4, "on v5p (stored: up)"),
    "two": (["--problem", "up"], 2,
            "is not one problem but 2, of which --device or --problem KEY picks one"),
    "miss": (["--shape", "m=1,k=1,n=1", "--device", "v5p"], 4, "tuned for tpu7x, v6e"),
    "on miss": (["--shape", "m=1", "--device", "v6e", "--on-miss", "x"], 2, "--on-miss 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_best_is_one_line_and_its_status_where_there_is_no_answer(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected, told = BAD[case]
    for device in ("v6e", "tpu7x"):
        store_matmul(tmp_path, **SHAPE, about={"device": device, "name": "up"})
    status, out, err = call(capsys, "best", "matmul", "--results", str(tmp_path), *arguments)
    assert (status, out, err.count("\n")) == (expected, "", 1)
    assert told in err


def test_best_tells_a_kernel_it_does_not_know_from_a_problem_it_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, row(problem("my.module:KERNEL", {"rows": 8}, name="up"), {"block": 8}, 1.0))
    for name, problem_name, expected, told in (
        ("my.module.KERNEL", "up", 0, ""),
        ("my.module:KERNEL", "down", 4, "(stored: up)"),
        ("KERNEL", "up", 2, "unknown kernel 'KERNEL'"),
    ):
        asked = ["best", name, "--problem", problem_name, "--results", str(tmp_path)]
        status, _, err = call(capsys, *asked)
        assert (status, told in err) == (expected, True), (name, err)
    assert "my.module:KERNEL, package.module:ATTRIBUTE, splash" in err, "how to name one's own"


def test_what_reads_leaderboards_is_no_part_of_a_kernels_fingerprint() -> None:
    tree = ast.parse(Path(autotune.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert names == {"importlib", "typing"}, "an edited report would make every kernel's rows stale"
    assert {name: getattr(autotune, name).__name__ for name in autotune._LAZY} == {
        name: name for name in autotune._LAZY
    }
