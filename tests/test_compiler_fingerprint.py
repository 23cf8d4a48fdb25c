"""A kernel's fingerprint changes with the kernel, and with nothing else."""

import importlib.abc
import importlib.util
import subprocess
import sys

import pytest

from autotune.compiler import fingerprint
from autotune.compiler.fingerprint import kernel_fingerprint, record_fingerprint
from autotune.errors import UnknownNameError


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "my_kernels"
    (folder / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "mine.py": "import numpy\nfrom . import blocks\nfrom my_kernels.deep.masks import mask\n",
        "blocks.py": "def late():\n    from my_kernels import table\n",
        "table.py": "T = 1\n",
        "deep/__init__.py": "",
        "deep/masks.py": "from ..shared import S\nmask = 1\n",
        "shared.py": "S = 1\n",
        "unrelated.py": "U = 1\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


@pytest.mark.parametrize(
    "name", ["mine.py", "blocks.py", "table.py", "deep/masks.py", "shared.py", "__init__.py"]
)
def test_an_edit_of_what_the_kernel_imports_changes_it(package, name):
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    with (package / name).open("a") as file:
        file.write("# changed\n")
    assert kernel_fingerprint("my_kernels.mine:KERNEL") != before


def test_an_edit_of_a_module_it_does_not_import_does_not(package):
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    (package / "unrelated.py").write_text("U = 2\n")
    assert kernel_fingerprint("my_kernels.mine:KERNEL") == before


def test_a_new_import_counts_at_once(package):
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    (package / "shared.py").write_text("S = 1\nfrom . import unrelated\n")
    with_import = kernel_fingerprint("my_kernels.mine:KERNEL")
    (package / "unrelated.py").write_text("U = 2\n")
    assert len({before, with_import, kernel_fingerprint("my_kernels.mine:KERNEL")}) == 3


def test_a_module_beside_a_single_file_kernel_counts(tmp_path, monkeypatch):
    (tmp_path / "flat_kernel.py").write_text("import flat_helper\nimport json\n")
    (tmp_path / "flat_helper.py").write_text("H = 1\n")
    monkeypatch.chdir(tmp_path)
    before = kernel_fingerprint("flat_kernel:KERNEL")
    (tmp_path / "flat_helper.py").write_text("H = 2\n")
    assert kernel_fingerprint("flat_kernel:KERNEL") != before


def test_a_package_without_an_init_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "mine.py").write_text("from bare import other\n")
    (tmp_path / "bare" / "other.py").write_text("O = 1\n")
    monkeypatch.chdir(tmp_path)
    before = kernel_fingerprint("bare.mine:KERNEL")
    (tmp_path / "bare" / "other.py").write_text("O = 2\n")
    assert kernel_fingerprint("bare.mine:KERNEL") != before


def test_an_imported_module_with_a_syntax_error_still_counts(package):
    (package / "table.py").write_text("def (\n")
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    (package / "table.py").write_text("def ((\n")
    assert kernel_fingerprint("my_kernels.mine:KERNEL") != before


def test_an_unknown_module_is_named():
    with pytest.raises(UnknownNameError, match=r"unknown kernel module 'no_such\.module'"):
        kernel_fingerprint("no_such.module:KERNEL")


def test_hashing_a_built_in_kernel_imports_neither_it_nor_jax():
    code = (
        "import sys\n"
        "from autotune.compiler.fingerprint import kernel_fingerprint\n"
        "print(kernel_fingerprint('matmul'))\n"
        "assert 'jax' not in sys.modules\n"
        "assert 'autotune.kernels.matmul' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kernel_fingerprint("matmul")
    assert len(record_fingerprint()) == 16


def test_every_built_in_kernel_lies_where_its_fingerprint_looks():
    from autotune.kernels.registry import DISTRIBUTIONS, REGISTRY

    missing = [p for p, package in DISTRIBUTIONS.items() if not importlib.util.find_spec(package)]
    names = [name for name in REGISTRY if name.partition(".")[0] not in missing]
    modules = {REGISTRY[name].partition(":")[0] for name in names}
    assert len({kernel_fingerprint(name) for name in names}) == len(modules)


def test_another_project_s_release_is_part_of_its_kernels_fingerprint(monkeypatch):
    from autotune.compiler import fingerprint

    found = []
    for version in ("1.0", "1.1"):
        monkeypatch.setattr(fingerprint.metadata, "version", lambda name, v=version: v)
        found.append((kernel_fingerprint("tokamax.splash"), kernel_fingerprint("matmul")))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_a_package_that_only_an_import_hook_finds_counts(tmp_path, monkeypatch):
    # How pip installs a package as editable: no folder of sys.path holds it.
    folder = tmp_path / "elsewhere" / "hooked_kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "mine.py").write_text("from hooked_kernels import blocks\n")
    (folder / "blocks.py").write_text("B = 1\n")

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "hooked_kernels":
                return None
            return importlib.util.spec_from_file_location(name, folder / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    before = kernel_fingerprint("hooked_kernels.mine:KERNEL")
    (folder / "blocks.py").write_text("B = 2\n")
    assert kernel_fingerprint("hooked_kernels.mine:KERNEL") != before


def test_an_edit_in_another_package_of_the_repository_changes_it(package, tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("")
    (tmp_path / "common" / "act.py").write_text("from beside_all import A\n")
    (tmp_path / "beside_all.py").write_text("A = 1\n")
    (package / "mine.py").write_text("from common.act import A\n")
    found = {kernel_fingerprint("my_kernels.mine:KERNEL")}
    (tmp_path / "common" / "act.py").write_text("from beside_all import A  # slower\n")
    found.add(kernel_fingerprint("my_kernels.mine:KERNEL"))
    (tmp_path / "beside_all.py").write_text("A = 2\n")
    found.add(kernel_fingerprint("my_kernels.mine:KERNEL"))
    assert len(found) == 3


def test_of_an_installed_distribution_the_version_counts_and_not_its_source(
    package, tmp_path, monkeypatch
):
    site = tmp_path / "env" / "site-packages"
    about = site / "labops-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "labops.py").write_text("O = 1\n")
    (about / "top_level.txt").write_text("labops\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: labops\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    (package / "mine.py").write_text("import labops\n")
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    (site / "labops.py").write_text("O = 2\n")
    assert kernel_fingerprint("my_kernels.mine:KERNEL") == before
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: labops\nVersion: 1.1\n")
    assert kernel_fingerprint("my_kernels.mine:KERNEL") != before


def test_an_import_that_leads_above_the_top_is_no_error_as_a_try_may_have_the_other_way(package):
    (package / "mine.py").write_text(
        "try:\n    from .blocks import B\nexcept ImportError:\n    from dual_helper import B\n"
    )
    (package.parent / "dual_helper.py").write_text(
        "try:\n    from .far import F\nexcept ImportError:\n    F = 1\n"
    )
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    (package.parent / "dual_helper.py").write_text("F = 2\n")
    assert kernel_fingerprint("my_kernels.mine:KERNEL") != before


def test_the_models_hash_does_not_change_with_what_reads_parquet(monkeypatch):
    before = kernel_fingerprint("autotune.search.evaluate:Judge")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "999")
    assert kernel_fingerprint("autotune.search.evaluate:Judge") == before


def test_a_kernel_built_on_one_of_autotunes_has_that_in_its_fingerprint(package, monkeypatch):
    source = fingerprint._text
    (package / "mine.py").write_text("from autotune.kernels import matmul\n")
    before = kernel_fingerprint("my_kernels.mine:KERNEL")
    edited = lambda path: source(path) + ("# edited" if path.name == "matmul.py" else "")
    monkeypatch.setattr(fingerprint, "_text", edited)
    assert kernel_fingerprint("my_kernels.mine:KERNEL") != before
