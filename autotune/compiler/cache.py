"""A content-addressed store of JSON records, one file an entry, safe against `kill -9`."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from autotune import evidence, whole_file
from autotune.compiler import environment
from autotune.compiler.fingerprint import record_fingerprint
from autotune.compiler.task import Task
from autotune.evidence import Compiled


class CacheWarning(UserWarning):
    """A cache entry that cannot be read or written; the work goes on without it."""


def default_folder() -> Path:
    """`$AUTOTUNE_CACHE_DIR`, else the user's cache folder of the platform."""
    named = os.environ.get("AUTOTUNE_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("autotune"))


def content_key(identity: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of everything a record depends on."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Records by key. A damaged or unwritable entry warns and is done without.

    Args:
      folder: None is `default_folder()`.
      warn: gets one line for each damaged entry, and one in all for a folder that cannot be
        written; None issues a `CacheWarning`.
    """

    def __init__(self, folder: Path | None = None, warn: Callable[[str], None] | None = None):
        self.folder = default_folder() if folder is None else folder
        self._warn = warn or _issue_warning
        self._readable = self._writable = True

    def get(self, key: str) -> dict[str, Any] | None:
        """The record stored under `key`, or None when there is none that is whole."""
        path = self._path(key)
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            told = getattr(error, "strerror", None) or "not text"
            if not isinstance(error, PermissionError):
                self._warn(f"cache entry {path} cannot be read ({told}); done again")
            elif self._readable:  # one of another user is seldom alone
                self._readable = False
                self._warn(f"cache entries such as {path} cannot be read ({told}); done again")
            return None
        checksum, _, body = text.partition("\n")
        if _checksum(key, body) != checksum:
            self._warn(f"cache entry {path} is damaged; done again")
            return None
        record: dict[str, Any] = json.loads(body)
        return record

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Stores `record`, whole or not at all; what was under `key` is replaced."""
        if not self._writable:
            return
        path = self._path(key)
        body = json.dumps(record, separators=(",", ":"))
        try:
            whole_file.write(path, f"{_checksum(key, body)}\n{body}".encode())
        except OSError as error:
            self._writable = False
            self._warn(f"cache folder {self.folder} cannot be written ({error.strerror or error})")

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def _checksum(key: str, body: str) -> str:
    """Over the key too: an entry under another's name is damaged."""
    return hashlib.sha256(f"{key}\n{body}".encode()).hexdigest()


def _issue_warning(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=3)


class CompileCache:
    """Verdicts of the compiler, by everything they depend on.

    Stored is what the same compiler says again: `ok`, `oom`, `unsupported`, `failed` for what the
    candidate raised, `crashed` for the compiler's own abort. A `timeout`, or `failed` for host
    memory, is stored with its limit and holds until the limit is raised, so that a second sweep
    does not wait for it again. Not stored is what another program may have caused: a worker killed
    from outside, a machine without memory.

    Args:
      cache: where.
      fingerprint: `kernel_fingerprint` of the kernel's module.
      timeout_s, memory_limit_bytes: the limits of the pool that compiles what is missing.
    """

    def __init__(
        self, cache: Cache, *, fingerprint: str, timeout_s: float, memory_limit_bytes: int
    ) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._constant = {
            "kind": "compiled",
            "kernel_fingerprint": fingerprint,
            "record_fingerprint": record_fingerprint(),
            "versions": environment.versions(),
            "flags": environment.compile_flags(os.environ),
        }

    def key(self, task: Task) -> str:
        """The task's key: kernel source, problem, config, device, versions and flags."""
        problem = task.problem
        return content_key(
            {
                **self._constant,
                "kernel": problem.kernel,
                "device": problem.device,
                "problem": problem.json,
                "problem_key": problem.key,
                "config": task.candidate.json,
            }
        )

    def get(self, task: Task) -> Compiled | None:
        """The stored verdict, where it still holds."""
        record = self._cache.get(self.key(task))
        if record is None:
            return None
        compiled = evidence.from_json(record)
        holds = compiled.holds_under(self._timeout_s, self._memory_limit_bytes)
        return compiled if holds else None

    def put(self, task: Task, compiled: Compiled) -> None:
        """Stores a verdict that holds; leaves others alone."""
        if compiled.repeatable:
            self._cache.put(self.key(task), evidence.to_json(compiled))
