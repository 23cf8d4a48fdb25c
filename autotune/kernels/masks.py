"""Attention masks: an algebra of frozen values, evaluated row by row, never as [L, L].

Query i of `q_len` sits at position i + kv_len - q_len: unequal lengths are aligned bottom-right.
A query sees a few intervals of keys; intersection and union of masks act on those. NumPy only.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_LENGTH = 2**24  # 16 Mi rows: 256 MiB of bounds
MAX_DEPTH = 8
MAX_OFFSET = 2**31


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Intervals:
    """The keys each query row sees, as half-open intervals, sorted and apart from each other.

    Attributes:
      lo, hi: int64[intervals, rows]; unused ones are empty (`lo == hi == kv_len`) and come last.
      kv_len: number of keys.
    """

    lo: Ints
    hi: Ints
    kv_len: int

    def __post_init__(self) -> None:
        if self.lo.shape != self.hi.shape or self.lo.ndim != 2:
            raise ValueError(f"bounds of shapes {self.lo.shape} and {self.hi.shape} do not match")

    @property
    def rows(self) -> int:
        return int(self.lo.shape[1])

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, exactly."""
        return int((self.hi - self.lo).sum())

    def dense(self) -> npt.NDArray[np.bool_]:
        """bool[rows, kv_len]; for small sizes."""
        keys = np.arange(self.kv_len)
        inside = (keys >= self.lo[..., None]) & (keys < self.hi[..., None])
        return np.asarray(inside.any(axis=0))


def _canonical(lo: Ints, hi: Ints, kv_len: int) -> Intervals:
    """Sorts, merges what touches, and drops interval slots that no row needs."""
    empty = hi <= lo
    lo, hi = np.where(empty, kv_len, lo), np.where(empty, kv_len, hi)
    if len(lo) > 1:
        order = np.argsort(lo, axis=0, kind="stable")
        lo, hi = np.take_along_axis(lo, order, 0), np.take_along_axis(hi, order, 0)
        reach = np.maximum.accumulate(hi, axis=0)
        opens = np.ones(lo.shape, dtype=bool)
        opens[1:] = lo[1:] > reach[:-1]
        slot, row = np.cumsum(opens, axis=0) - 1, np.arange(lo.shape[1])
        merged_lo, merged_hi = np.full_like(lo, kv_len), np.full_like(hi, kv_len)
        for k in range(len(lo) - 1, -1, -1):  # the first member of a merged group is written last
            merged_lo[slot[k], row] = lo[k]
        for k in range(len(lo)):  # `reach` grows, so its last member wins
            merged_hi[slot[k], row] = reach[k]
        lo, hi = merged_lo, merged_hi
    used = max(1, int((hi > lo).sum(axis=0).max(initial=0)))
    return Intervals(lo=lo[:used], hi=hi[:used], kv_len=kv_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Full:
    """Every query sees every key."""

    def json(self) -> dict[str, Any]:
        return {"full": {}}

    def intervals(self, positions: Ints, kv_len: int) -> Intervals:
        return _canonical(
            np.zeros((1, len(positions)), np.int64),
            np.full((1, len(positions)), kv_len, np.int64),
            kv_len,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Causal:
    """Query at p sees keys up to p + offset, both ends in."""

    offset: int = 0

    def json(self) -> dict[str, Any]:
        return {"causal": {"offset": self.offset}}

    def intervals(self, positions: Ints, kv_len: int) -> Intervals:
        hi = np.clip(positions + self.offset + 1, 0, kv_len)[None]
        return _canonical(np.zeros_like(hi), hi, kv_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Query at p sees keys p - left … p + right, both ends in; None is no limit on that side."""

    left: int | None = None
    right: int | None = None

    def json(self) -> dict[str, Any]:
        return {"local": {"left": self.left, "right": self.right}}

    def intervals(self, positions: Ints, kv_len: int) -> Intervals:
        lo = positions - (MAX_OFFSET if self.left is None else self.left)
        hi = positions + 1 + (MAX_OFFSET if self.right is None else self.right)
        return _canonical(np.clip(lo, 0, kv_len)[None], np.clip(hi, 0, kv_len)[None], kv_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Documents of `lengths` tokens packed one after the other: a query sees its own only.

    A position in no document (before the first, past the last) sees nothing and is not seen.
    """

    lengths: tuple[int, ...]

    def json(self) -> dict[str, Any]:
        return {"documents": {"lengths": list(self.lengths)}}

    def intervals(self, positions: Ints, kv_len: int) -> Intervals:
        edges = np.concatenate([[0], np.cumsum(np.asarray(self.lengths, dtype=np.int64))])
        document = np.searchsorted(edges, positions, side="right")
        inside = (document > 0) & (document < len(edges))
        safe = np.where(inside, document, 1)
        lo, hi = np.minimum(edges[safe - 1], kv_len), np.minimum(edges[safe], kv_len)
        return _canonical(lo[None], np.where(inside, hi, lo)[None], kv_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllOf:
    """Seen where every part lets it be seen."""

    parts: tuple[Mask, ...]

    def json(self) -> dict[str, Any]:
        return {"all": [part.json() for part in self.parts]}

    def intervals(self, positions: Ints, kv_len: int) -> Intervals:
        both = Full().intervals(positions, kv_len)
        for part in self.parts:
            more = part.intervals(positions, kv_len)
            lo = np.maximum(both.lo[:, None], more.lo[None]).reshape(-1, both.rows)
            hi = np.minimum(both.hi[:, None], more.hi[None]).reshape(-1, both.rows)
            both = _canonical(lo, hi, kv_len)
        return both


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyOf:
    """Seen where at least one part lets it be seen."""

    parts: tuple[Mask, ...]

    def json(self) -> dict[str, Any]:
        return {"any": [part.json() for part in self.parts]}

    def intervals(self, positions: Ints, kv_len: int) -> Intervals:
        found = [part.intervals(positions, kv_len) for part in self.parts]
        lo, hi = np.concatenate([f.lo for f in found]), np.concatenate([f.hi for f in found])
        return _canonical(lo, hi, kv_len)


Mask = Full | Causal | Local | Documents | AllOf | AnyOf


@functools.lru_cache(maxsize=16)
def rows_of(mask: Mask, q_len: int, kv_len: int) -> Intervals:
    """The keys each of `q_len` queries sees among `kv_len`, aligned bottom-right.

    Raises ValueError for lengths over `MAX_LENGTH`.
    """
    if max(q_len, kv_len) > MAX_LENGTH:
        raise ValueError(f"masks go up to {MAX_LENGTH} queries and keys, not {q_len} x {kv_len}")
    return mask.intervals(np.arange(q_len, dtype=np.int64) + (kv_len - q_len), kv_len)


def document_lengths(mask: Mask) -> list[tuple[int, ...]]:
    """The lengths of every `documents` part, wherever it stands in `mask`."""
    if isinstance(mask, Documents):
        return [mask.lengths]
    if isinstance(mask, AllOf | AnyOf):
        return [lengths for part in mask.parts for lengths in document_lengths(part)]
    return []


def parse(value: Any) -> dict[str, Any]:
    """The canonical JSON form of a mask as YAML gives it; a kernel's `Option.parse`.

    Equal forms mean the same: defaults filled in, nested `all` / `any` flattened, parts sorted and
    without repeats, `full` dropped where it changes nothing.

    Raises:
      ValueError: says what is allowed.
    """
    return of(value).json()


def of(value: Any, depth: int = 0) -> Mask:
    """The mask of a YAML or JSON value. Raises ValueError, which says what is allowed."""
    if depth > MAX_DEPTH:
        raise ValueError(f"masks nest at most {MAX_DEPTH} deep")
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"a mask is one entry, e.g. {{causal: {{}}}}, out of {', '.join(_FORMS)}")
    ((name, body),) = value.items()
    if name not in _FORMS:
        near = difflib.get_close_matches(str(name), _FORMS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"a mask is one of {', '.join(_FORMS)}, not {name!r}{hint}")
    return _FORMS[name](body, depth)


def _fields(name: str, body: Any, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    listed = ", ".join(allowed) or "nothing, write {}"
    if not isinstance(body, Mapping):
        raise ValueError(f"{name} takes a mapping of {listed}, not {body!r}")
    for key in body:
        if key not in allowed:
            raise ValueError(f"{name} takes {listed}, not {key!r}")
    return body


def _whole(what: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_OFFSET:
        raise ValueError(f"{what} is a whole number from {least} to {MAX_OFFSET}, not {value!r}")
    return value


def _full(body: Any, depth: int) -> Mask:
    _fields("full", body, ())
    return Full()


def _causal(body: Any, depth: int) -> Mask:
    offset = _fields("causal", body, ("offset",)).get("offset", 0)
    return Causal(offset=_whole("causal offset", offset, -MAX_OFFSET))


def _local(body: Any, depth: int) -> Mask:
    given = _fields("local", body, ("left", "right"))
    left, right = (
        None if given.get(side) is None else _whole(f"local {side}", given[side], 0)
        for side in ("left", "right")
    )
    if left is None and right is None:
        raise ValueError("local needs left, right or both; a side left out has no limit")
    return Local(left=left, right=right)


def _documents(body: Any, depth: int) -> Mask:
    lengths = _fields("documents", body, ("lengths",)).get("lengths")
    if not isinstance(lengths, list | tuple) or not lengths:
        raise ValueError(f"documents needs lengths, a list such as [1000, 3096], not {lengths!r}")
    return Documents(lengths=tuple(_whole("a document length", n, 1) for n in lengths))


def _parts(name: str, body: Any, depth: int) -> list[Mask]:
    if not isinstance(body, list | tuple) or not body:
        raise ValueError(f"{name} takes a list of masks, not {body!r}")
    same = AllOf if name == "all" else AnyOf
    flat: list[Mask] = []
    for part in (of(item, depth + 1) for item in body):
        flat.extend(part.parts if isinstance(part, same) else (part,))
    by_text = {json.dumps(part.json(), sort_keys=True): part for part in flat}
    return [by_text[text] for text in sorted(by_text)]


def _all(body: Any, depth: int) -> Mask:
    parts = [part for part in _parts("all", body, depth) if part != Full()]
    if len(parts) < 2:
        return parts[0] if parts else Full()
    return AllOf(parts=tuple(parts))


def _any(body: Any, depth: int) -> Mask:
    parts = _parts("any", body, depth)
    if Full() in parts:
        return Full()
    return parts[0] if len(parts) == 1 else AnyOf(parts=tuple(parts))


_FORMS: dict[str, Callable[[Any, int], Mask]] = {
    "full": _full,
    "causal": _causal,
    "local": _local,
    "documents": _documents,
    "all": _all,
    "any": _any,
}
