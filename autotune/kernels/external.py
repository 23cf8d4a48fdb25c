"""Kernels of the user's own: `package.module:ATTRIBUTE`, or a `Kernel` that no module holds."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import InputError, KernelError, UnknownNameError
from autotune.kernels.base import Kernel
from autotune.kernels.registry import SITES

_CELL = """# A kernel that was defined in a notebook or a script, for the worker processes.
import cloudpickle
KERNEL = cloudpickle.loads({pickled!r})
"""


def load(name: str, beside: str | None = None) -> Kernel:
    """See `base.load`."""
    module_name, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(p.isidentifier() for p in module_name.split(".")):
        raise InputError(
            f"kernel: {name!r} is not allowed; a known kernel, or package.module:ATTRIBUTE",
            path=("kernel",),
        )
    if module_name == "__main__":
        raise InputError(
            f"kernel {name!r}: the running script is no module that worker processes can import; "
            "give the Kernel itself to autotune.tune, or put it into a module",
            path=("kernel",),
        )
    module = _imported(name, module_name, beside)
    _check_not_hidden(name, module, beside)
    _check_installed_as_here(name, module)
    kernel = getattr(module, attribute, None)
    if isinstance(kernel, Kernel):
        return dataclasses.replace(kernel, name=name)
    if kernel is not None:
        raise InputError(
            f"kernel {name!r}: {attribute} is of type {type(kernel).__name__}, not an "
            "autotune.kernels.base.Kernel",
            path=("kernel",),
        )
    own = [n for n, value in vars(module).items() if isinstance(value, Kernel)]
    raise UnknownNameError(f"kernel in {module_name}", attribute, own, path=("kernel",))


def _imported(name: str, module_name: str, beside: str | None) -> ModuleType:
    """The module. The folders searched besides `sys.path` stay on it, for the workers."""
    here = os.getcwd()
    folders = [here] if beside is None or Path(beside).resolve() == Path(here) else [here, beside]
    for folder in folders:
        known = {str(Path(p).resolve()) for p in sys.path}  # "" is the current folder
        if str(Path(folder).resolve()) not in known:
            sys.path.append(folder)  # last: a file here must not shadow an installed module
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None)
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}."):
            raise InputError(
                f"kernel {name!r}: no module {module_name!r} in {' or '.join(folders)} or on "
                "sys.path",
                path=("kernel",),
            ) from None
        text = " ".join(str(error).split())
        raise KernelError(
            f"kernel {name!r}: importing {module_name} raised {type(error).__name__}: {text}"
        ) from error


def _check_not_hidden(name: str, module: ModuleType, beside: str | None) -> None:
    """Raises InputError where the module beside the config is not the one that was imported.

    Another config's folder, or an installed package, has one of the same name. The current folder
    comes first, as documented.
    """
    found = getattr(module, "__file__", None)
    if beside is None or found is None or Path(found).is_relative_to(os.getcwd()):
        return
    stem = Path(beside, *module.__name__.split("."))
    for meant in (stem.with_suffix(".py"), stem / "__init__.py"):
        if meant.is_file() and not meant.samefile(found):
            raise InputError(
                f"kernel {name!r}: {meant} is hidden by {found}; rename one of them",
                path=("kernel",),
            )


def _check_installed_as_here(name: str, module: ModuleType) -> None:
    """Raises InputError where an installed copy was imported and the current folder holds another.

    What is edited here would not be what is tuned or gated.
    """
    top = module.__name__.partition(".")[0]
    folders = list(getattr(sys.modules[top], "__path__", ()))
    installed = Path(folders[0] if folders else str(module.__file__))
    if not SITES.intersection(installed.parts):
        return
    here = Path(os.getcwd(), top if folders else installed.name)
    if (pair := _first_difference(here, installed)) is not None:
        raise InputError(
            f"kernel {name!r}: {pair[0]} is not what is installed as {pair[1]}, which would be "
            "used; install it again, or with pip's --editable",
            path=("kernel",),
        )


@functools.cache
def _first_difference(here: Path, installed: Path) -> tuple[Path, Path] | None:
    """Of two files, or of the sources of two folders: the first pair that is not the same."""
    pairs = [(path, installed / path.relative_to(here)) for path in here.rglob("*.py")]
    for path, copy in pairs if here.is_dir() else [(here, installed)]:
        both = path.is_file() and copy.is_file()
        if both and not filecmp.cmp(path, copy, shallow=False):
            return path, copy
    return None


@contextlib.contextmanager
def importable(kernel: Kernel) -> Iterator[Kernel]:
    """`kernel` under a name by which worker processes find it, while the context lasts.

    One that its module holds is named after it. One from a notebook's cell, a script or a function
    is written, by value, into a module `cell_NAME` of its own; what it uses from other modules
    they must be able to import.

    Raises:
      KernelError: it cannot be written.
    """
    name = _address(kernel)
    if name is not None:
        yield load(name)
        return
    module = "cell_" + "".join(c if c.isalnum() else "_" for c in kernel.name)
    with tempfile.TemporaryDirectory(prefix="autotune-cell-") as folder:
        Path(folder, f"{module}.py").write_text(_CELL.format(pickled=_pickled(kernel)))
        sys.path.append(folder)
        _forget(module)
        try:
            yield load(f"{module}:KERNEL")
        finally:
            sys.path.remove(folder)
            _forget(module)


def _address(kernel: Kernel) -> str | None:
    """`module:ATTRIBUTE` of a kernel that a module holds; None for one of a script or cell."""
    name = getattr(kernel.build, "__module__", None) or "__main__"
    module = sys.modules.get(name)
    if module is None or name == "__main__" or getattr(module, "__spec__", None) is None:
        return None
    held = (n for n, value in vars(module).items() if value is kernel)
    attribute = next(held, None)
    return None if attribute is None else f"{name}:{attribute}"


def _pickled(kernel: Kernel) -> bytes:
    cloudpickle: Any = importlib.import_module("cloudpickle")
    try:
        pickled: bytes = cloudpickle.dumps(kernel)
    except Exception as error:
        text = " ".join(str(error).split())
        raise KernelError(
            f"kernel {kernel.name}: it cannot be sent to worker processes "
            f"({type(error).__name__}: {text}); put it into a module"
        ) from error
    return pickled


def _forget(module: str) -> None:
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
