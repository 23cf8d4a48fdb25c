"""Hashes of source text: a kernel's, and that of the code which shapes a compiled record."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Set
from importlib import metadata
from pathlib import Path

from autotune.errors import UnknownNameError
from autotune.kernels.registry import DISTRIBUTIONS, REGISTRY, SITES, place_of

# What decides how a candidate is compiled and how its dump becomes a record.
_RECORD_MODULES = (
    "autotune.call_record",
    "autotune.compiler.dump",
    "autotune.compiler.environment",
    "autotune.compiler.hlo",
    "autotune.evidence",
    "autotune.compiler.process",
    "autotune.compiler.program",
    "autotune.compiler.task",
    "autotune.compiler.verdict",
    "autotune.compiler.worker",
    "autotune.device",
    "autotune.kernels.base",
    "autotune.traced.capture",
    "autotune.traced.jaxprs",
    "autotune.traced.marking",
    "autotune.traced.regions",
)
_ELSEWHERE = frozenset({"autotune", "jax", "jaxlib", "libtpu", "numpy"})
"""Top-level modules of installed distributions that another part of a cache key speaks for, or
that shape no compiled code."""


def kernel_fingerprint(kernel: str) -> str:
    """Hash over the source of the kernel's module and of what it imports, directly or not.

    That is all of its own top-level package, and every module that no installed distribution
    holds: beside it, in another package of the repository, in an editable install. Of an installed
    distribution it is the version (also of another project's kernel, `registry.DISTRIBUTIONS`);
    Python and what stands in `environment.versions` are left out. Of autotune a user's kernel has
    the kernels it is built on; `record_fingerprint` speaks for the rest. autotune's own modules
    have no versions in theirs: pyproject's pins go with them.

    Imports inside functions count too. Nothing is imported. An edited kernel has another
    fingerprint; an edited report has not, because imports point down only.

    Args:
      kernel: registry name, or `package.module:ATTRIBUTE`.

    Raises:
      UnknownNameError: there is no such kernel or module, or it has no Python source.
    """
    if ":" in kernel:
        module = kernel.partition(":")[0]
    elif kernel in REGISTRY:
        module = place_of(kernel)[0]
    else:
        raise UnknownNameError("kernel", kernel, REGISTRY)
    if _source(module) is None:
        raise UnknownNameError("kernel module", module, ())
    found: dict[str, Path] = {}
    installed: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or top in sys.stdlib_module_names:
            continue
        foreign = top != module.partition(".")[0] and not _is_built_on(name)
        if foreign and (top in _ELSEWHERE or _is_installed(top)):
            installed.add(top)
        # None also for a function or class: `from module import function` names the module too.
        elif (path := _source(name)) is not None:
            found[name] = path
            waiting += _imports(path, _stamp(path), name)
    texts = {name: _text(path) for name, path in found.items()}
    if not module.startswith("autotune."):
        texts |= {f"version of {d}": _version(d) for d in _distributions(installed - _ELSEWHERE)}
    if distribution := DISTRIBUTIONS.get(kernel.partition(".")[0] if ":" not in kernel else ""):
        texts[f"version of {distribution}"] = _version(distribution)
    return _digest(texts)


def record_fingerprint() -> str:
    """Hash over the source of autotune's modules that shape a compiled record."""
    root = Path(__file__).parents[2]
    files = {name: root.joinpath(*name.split(".")).with_suffix(".py") for name in _RECORD_MODULES}
    return _digest({name: _text(path) for name, path in files.items()})


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise UnknownNameError("package", distribution, ()) from None


def _is_built_on(name: str) -> bool:
    return name.startswith("autotune.kernels.") and name not in _RECORD_MODULES


def _is_installed(top: str) -> bool:
    """Whether a top-level module is a copy in a folder of installed distributions."""
    path, folders = _locate_top(top)
    places = [*([path] if path else []), *map(Path, folders)]
    return any(SITES.intersection(place.parts) for place in places)


def _distributions(tops: Set[str]) -> list[str]:
    """The installed distributions that hold any of the top-level modules."""
    if not tops:
        return []
    holders = metadata.packages_distributions()
    return sorted({name for top in tops for name in holders.get(top, ())})


def _digest(texts: dict[str, str]) -> str:
    total = hashlib.sha256()
    for name in sorted(texts):
        total.update(f"{name}\0{hashlib.sha256(texts[name].encode()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _source(name: str) -> Path | None:
    """The source file of a module, found as an import would, without importing its parents."""
    top, *parts = name.split(".")
    path, folders = _locate_top(top)
    for part in parts:
        path, folders = _locate(part, folders)
    return path


def _locate_top(top: str) -> tuple[Path | None, list[str]]:
    """As `_locate`, for a top-level name: asks the import system, whose finders know of editable
    installs that no folder of `sys.path` shows, and then the current folder."""
    try:
        spec = importlib.util.find_spec(top)  # imports nothing for a name without a dot
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None:
        return _locate(top, [os.getcwd()])
    path = Path(spec.origin).resolve() if spec.origin and spec.origin.endswith(".py") else None
    return path, [str(Path(f).resolve()) for f in spec.submodule_search_locations or ()]


def _locate(part: str, folders: list[str]) -> tuple[Path | None, list[str]]:
    """(source file, folders of its submodules); no file for a namespace package."""
    namespaces = []
    for folder in folders:
        base = Path(folder or ".").resolve() / part
        if (base / "__init__.py").is_file():
            return base / "__init__.py", [str(base)]
        if base.with_name(f"{part}.py").is_file():
            return base.with_name(f"{part}.py"), []
        if base.is_dir():
            namespaces.append(str(base))
    return None, namespaces


@functools.cache
def _imports(path: Path, stamp: tuple[int, int], module: str) -> frozenset[str]:
    """Names of the modules a source file may import; some are functions or classes of a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = {package} - {""}
    try:
        tree = ast.parse(_text(path))
    except SyntaxError:  # it cannot be imported either, and its text counts all the same
        return frozenset(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # it cannot be imported either; a `try` may have the other way
                    continue
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(names)
