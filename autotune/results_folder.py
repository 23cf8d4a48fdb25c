"""Which leaderboards lie below a folder, through links, each once; and what cannot be opened."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path

from autotune.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What is below a folder, sorted.

    Attributes:
      files: leaderboards, which are not yet read.
      folders: those that were looked into -> when they had last changed before that, in ns.
      unreadable: an error a folder, or a link, that cannot be followed.
    """

    files: list[Path] = field(default_factory=list)
    folders: dict[Path, int] = field(default_factory=dict)
    unreadable: list[InputError] = field(default_factory=list)


def below(root: Path) -> Found:
    """Every file `*.parquet` below the folder `root`; names that begin with `.` are others'
    business, and so are files whose names begin with `_`.

    Links to folders are followed, and a folder that several lead to counts once: as itself rather
    than as a link.
    """
    found = Found()
    seen: set[tuple[int, int]] = set()
    waiting = deque([root])
    while waiting:
        folder = waiting.popleft()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                for path, is_link in _folders(folder, found):
                    waiting.append(path) if is_link else waiting.appendleft(path)
                found.folders[folder] = status.st_mtime_ns
        except OSError as error:
            found.unreadable.append(unreadable(folder, error))
    found.files.sort()
    return found


def _folders(folder: Path, found: Found) -> Iterator[tuple[Path, bool]]:
    """The folders in `folder`, each with whether it is a link; files go into `found`."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.startswith("."):
                continue
            path = folder / entry.name
            try:
                if entry.is_dir():
                    yield path, entry.is_symlink()
                elif is_leaderboard(entry.name) and entry.is_file():  # to read a pipe never ends
                    found.files.append(path)
                elif entry.is_symlink():
                    path.stat()  # of a link to nothing nobody knows that it was no folder
            except OSError as error:
                found.unreadable.append(unreadable(path, error))


def is_leaderboard(name: str) -> bool:
    """Whether a file of this name counts as one."""
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def unreadable(path: Path | Traversable, error: OSError) -> InputError:
    """The error of a file or folder that is there and cannot be opened."""
    return InputError(f"{path}: cannot be read ({error.strerror or error})", file=path)
