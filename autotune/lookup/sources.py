"""Where leaderboards are looked up: a directory, an environment variable, a package's data."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from autotune import results_folder
from autotune.errors import InputError, shown

VARIABLE = "AUTOTUNE_RESULTS"
PACKAGE = "package:"
DEFAULT = "results"
SETTLED_NS = 1_000_000_000
"""What changed a shorter time ago may change again and bear the same time."""


def source_of(results: str | Path | None) -> str:
    """`results`, else $AUTOTUNE_RESULTS, else `results` in the current directory.

    Raises InputError for what is no path.
    """
    if results is not None:
        if not isinstance(results, str | os.PathLike) or not os.fspath(results):
            raise InputError(f"results: {shown(results)} is not allowed; a folder, or its name")
        return os.fspath(results)
    return os.environ.get(VARIABLE) or DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """What is under a source.

    Attributes:
      files: every leaderboard, in path order.
      folders: where one might come to be, or go -> when that last changed, in ns; None where that
        cannot be told.
      unreadable: an error each for what cannot be looked into.
    """

    files: Sequence[Traversable]
    folders: Mapping[str, int | None] = field(default_factory=dict)
    unreadable: Sequence[InputError] = ()


def listed(source: str) -> Listed:
    """What is under `source`; reads no leaderboard.

    Raises InputError for one that does not exist, other than the default one.
    """
    if source.startswith(PACKAGE):
        data = _package_data(source.removeprefix(PACKAGE))
        return (
            _below(data) if isinstance(data, list) else Listed(files=sorted(_walk(data), key=str))
        )
    root = Path(source)
    if not os.path.lexists(root):
        if source == DEFAULT:
            return Listed(files=(), folders={source: None})
        raise InputError(
            f"results {source!r} do not exist; a directory of leaderboards, or "
            f"{PACKAGE}your_package.folder"
        )
    return Listed(files=[root]) if root.is_file() else _below([root])


def _below(roots: Sequence[Path]) -> Listed:
    """Raises InputError where a root itself cannot be looked into."""
    found = [results_folder.below(root) for root in roots]
    for each in found:
        if not each.folders:
            raise each.unreadable[0]
    unreadable = [error for each in found for error in each.unreadable]
    latest = 0 if unreadable else time.time_ns() - SETTLED_NS  # no folder tells of its permissions
    return Listed(
        files=[file for each in found for file in each.files],
        folders={
            str(folder): since if since < latest else None
            for each in found
            for folder, since in each.folders.items()
        },
        unreadable=unreadable,
    )


def _walk(folder: Traversable) -> Iterator[Traversable]:
    """The leaderboards in an archive."""
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry)
        elif results_folder.is_leaderboard(entry.name):
            yield entry


def _package_data(name: str) -> list[Path] | Traversable:
    """The folders of a package, or of a plain folder inside one. Imports the package."""
    try:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            return _folder_inside(name)
        places = [Path(place) for place in module.__path__]
        if all(place.is_dir() for place in places):
            return places
        return resources.files(module) if module.__file__ else _folder_inside(name)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise InputError(
            f"results {PACKAGE + name!r}: {error}; {PACKAGE}your_package.folder names a folder of "
            "an importable package"
        ) from None


def _folder_inside(name: str) -> Traversable:
    """The last part of `name` as a plain folder of a package in an archive, which the import
    system knows of only where the archive lists folders. Raises ImportError."""
    package, _, folder = name.rpartition(".")
    inside = resources.files(importlib.import_module(package)).joinpath(folder)
    if not inside.is_dir():
        raise ModuleNotFoundError(f"No module named {name!r}")
    return inside
