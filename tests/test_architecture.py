"""The layer rule, the modules that may import jax, and what must start fast without it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "errors": 0, "page": 1,
    "candidate": 1, "constants": 1, "child": 1, "device": 1, "problem": 1, "progress": 1, "row": 1,
    "results_folder": 1, "strict_yaml": 1, "versions": 1, "whole_file": 1,
    "config": 2, "config_schema": 2, "matrix": 2, "overrides": 2,
    "cost_model": 2, "latency": 2, "kernels": 2, "leaderboard": 2, "pallas_call": 2,
    "board_file": 2, "call_record": 1, "evidence": 1, "traced": 2, "vmem_model": 2,
    "stored": 2,
    "compiler": 3, "measure": 3, "search.evaluate": 3, "search.prune": 3, "search.space": 3,
    "calibration": 4, "explain": 4, "export": 4, "gate": 4, "lookup": 4, "report": 4, "stale": 4,
    "search.crew": 4, "search.fleet": 4, "search.ledger": 4, "search.order": 4, "search.shared": 4,
    "search.storage": 4, "search.study": 4, "search.tpe": 4,
    "plan": 5, "sweep": 5,
    "__main__": 6, "cli": 6, "tuning": 6,
}  # fmt: skip
MAY_IMPORT_JAX = ("kernels", "pallas_call", "traced", "compiler.worker", "measure.worker")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "autotune").with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    found.pop("__init__", None)
    return found


def layer(module: str) -> int | None:
    for name in (".".join(module.split(".")[:2]), module.split(".")[0]):
        if name in LAYERS:
            return LAYERS[name]
    return None


def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute imports of a module, each with whether it happens when the module is imported."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                found.append((base, at_import))
                found.extend((f"{base}.{alias.name}", at_import) for alias in child.names)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                visit(child, at_import and not lazy)

    visit(ast.parse(path.read_text()), True)
    return found


def test_the_table_in_the_documentation_has_every_module_in_its_layer() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.*) \|$", text, re.MULTILINE)
    told = {
        (name.rstrip("/").removeprefix("search/"), int(number))
        for number, row in rows
        for name in re.findall(r"`([^`]+)`", row)
    }
    assert {(name.removeprefix("search."), number) for name, number in LAYERS.items()} <= told


@pytest.mark.parametrize("module", modules())
def test_imports_point_down_only(module: str) -> None:
    own = layer(module)
    if own is None:
        assert module in ("search",), f"{module} has no layer; give it one here and in the design"
        return
    upward = [
        name
        for name, _ in imports(modules()[module])
        if name.startswith("autotune.") and (layer(name.removeprefix("autotune.")) or 0) > own
    ]
    assert not upward, f"{module} imports a higher layer"


@pytest.mark.parametrize("module", modules())
def test_jax_is_imported_where_kernels_are_traced_or_compiled_only(module: str) -> None:
    if module.startswith(MAY_IMPORT_JAX):
        return
    eager = [n for n, at_import in imports(modules()[module]) if at_import and n.startswith("jax")]
    assert not eager, f"{module} imports jax when it is imported"


@pytest.mark.parametrize(
    "arguments",
    [[c, "--help"] for c in ("sweep", "gate", "report", "best", "export")] + [["--help"]],
)
def test_help_does_not_import_jax_pandas_or_optuna(arguments: list[str]) -> None:
    assert _imported(f"""
        from autotune import cli
        cli.app({arguments!r}, standalone_mode=False)
    """).isdisjoint({"jax", "optuna", "pandas", "pyarrow"})


def test_import_autotune_and_report_do_not_import_jax(tmp_path: Path) -> None:
    assert _imported(f"""
        import autotune
        from autotune import cli
        try:
            cli.app(["report", {str(tmp_path)!r}], standalone_mode=False)
        except SystemExit:
            pass
    """).isdisjoint({"jax"})


def _imported(code: str) -> set[str]:
    program = "\n".join(line[8:] for line in code.splitlines())
    tail = "\nimport sys; print('\\nMODULES', *{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program + tail], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("MODULES")[1].split())
