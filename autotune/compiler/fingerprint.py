"""Hashes of source text: a kernel's, and that of the code which shapes a compiled record."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import UnknownNameError

# What decides how a candidate is compiled and how its dump becomes a record.
_RECORD_MODULES = ("dump", "environment", "evidence", "program", "task", "verdict", "worker")


def kernel_fingerprint(module: str) -> str:
    """Hash over the source of `module` and of all it imports from its own top-level package.

    Imports inside functions count too. Nothing is imported: an edited kernel has another
    fingerprint, an edited report has not, because imports point down only.

    Args:
      module: dotted name of the module that defines the kernel.

    Raises:
      UnknownNameError: there is no such module, or it has no Python source.
    """
    root = module.partition(".")[0]
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = _source(name)
        if path is None:
            if name == module:
                raise UnknownNameError("kernel module", module, ())
            continue  # `from package import function`: the package itself is on the list
        found[name] = path
        is_package = path.name == "__init__.py"
        waiting += [n for n in _imports(_text(path), name, is_package) if _within(n, root)]
    return _digest({name: _text(path) for name, path in found.items()})


def record_fingerprint() -> str:
    """Hash over the source of this package's modules that shape a compiled record."""
    folder = Path(__file__).parent
    return _digest({name: _text(folder / f"{name}.py") for name in _RECORD_MODULES})


def _within(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _digest(texts: dict[str, str]) -> str:
    total = hashlib.sha256()
    for name in sorted(texts):
        total.update(f"{name}\0{hashlib.sha256(texts[name].encode()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def _text(path: Path) -> str:
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _read(path: Path, changed_ns: int, size: int) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _source(name: str) -> Path | None:
    """The source file of a module, found as an import would, without importing its parents."""
    folders: list[str] | None = list(sys.path)
    path: Path | None = None
    for part in name.split("."):
        if folders is None:
            return None
        path, folders = _locate(part, folders)
        if path is None and folders is None:
            return None
    return path


def _locate(part: str, folders: list[str]) -> tuple[Path | None, list[str] | None]:
    for folder in folders:
        base = Path(folder or ".")
        if (base / part / "__init__.py").is_file():
            return base / part / "__init__.py", [str(base / part)]
        if (base / f"{part}.py").is_file():
            return base / f"{part}.py", None
    return None, None


def _imports(text: str, module: str, is_package: bool) -> Iterator[str]:
    """Names of modules `text` may import; some may be functions or classes of a module."""
    package = module if is_package else module.rpartition(".")[0]
    yield package
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
