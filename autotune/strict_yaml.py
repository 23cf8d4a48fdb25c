"""Strict YAML 1.2: text in, plain values and the line of each out; every fault is one line.

The parser is ruamel.yaml's; what its events mean is decided here. Words stay words (`on`, `no`,
`010`, `1:30`, `1_024`, `0x10`), a number without a fractional part is a whole number however
it is written (`2048.0`, `1e3`), a repeated key is an error, and aliases are counted before
they are expanded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from autotune.errors import InputError, shown

MAX_BYTES = 256 * 2**10
MAX_ENTRIES = 100_000
MAX_DEPTH = 50

Keys = tuple[str | int, ...]
"""Where a value stands: `("problems", 0, "shape", "m")`."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True)
_WORDS |= dict.fromkeys(("false", "False", "FALSE"), False)
# What YAML 1.2 calls printable; the rest is a binary file.
_UNPRINTABLE = re.compile("[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def dotted(keys: Keys) -> str:
    """`problems[0].shape.m`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    text = text.removeprefix(".")
    return text if text.isprintable() else ascii(text)[1:-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A read file. `value` shares no object between two places, aliased or not."""

    path: str
    value: Any
    lines: Mapping[Keys, int]

    def line(self, keys: Keys) -> int:
        """Line, from 1, of the entry at `keys`, or of the nearest one that holds it."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines.get(keys, 1)

    def where(self, keys: Keys) -> str:
        """`configs/x.yaml:12: problems[0].shape.m`."""
        place = f"{self.path}:{self.line(keys)}"
        return f"{place}: {dotted(keys)}" if keys else place

    def error(self, keys: Keys, message: str) -> InputError:
        """The one-line error of what stands at `keys`."""
        message = message if message.isprintable() else ascii(message)[1:-1]
        return InputError(f"{self.where(keys)}: {message}", path=keys)


def read(path: str | Path) -> Document:
    """The one document of a file.

    Raises InputError, with file and line, for a file that cannot be read, is no UTF-8 text, is
    larger than `MAX_BYTES`, or is no strict YAML 1.2.
    """
    name = str(path)
    root = _Builder(name).build(_text(name))
    if root is None or root.value is None:
        raise InputError(f"{name}: is empty; a config has the keys device and problems")
    values = _Values(name)
    value = values.of(root, ())
    return Document(path=name, value=value, lines=values.lines)


def _text(name: str) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{name}: is a directory; a YAML file is needed") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name}: cannot be read: {reason}") from None
    if b"\0" in data:
        raise InputError(f"{name}: is a binary file; a YAML file is needed")
    if len(data) > MAX_BYTES:
        raise InputError(f"{name}: is larger than {MAX_BYTES // 2**10} KiB, the most a config has")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name}:{line}: byte {data[error.start]:#04x} is not UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if bad := _UNPRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise InputError(f"{name}:{line}: character U+{ord(bad[0]):04X} is not allowed in YAML")
    return text


@dataclass(kw_only=True, slots=True)
class _Node:
    """A value as written. `size` and `depth` are those after expanding aliases."""

    line: int
    value: Any = None  # a scalar, list[_Node], or dict[str, tuple[key line, _Node]]
    merged: list[_Node] = field(default_factory=list)
    anchor: str | None = None
    key: _Node | None = None
    size: int = 1
    depth: int = 1
    not_finite: str | None = None  # the text of a number that no double holds


class _Builder:
    """Builds the nodes of one document from the parser's events, without recursion."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[_Node] = []
        self._anchors: dict[str, _Node] = {}
        self._root: _Node | None = None
        self._line = 1

    def build(self, text: str) -> _Node | None:
        """The root node; None where the text has no document."""
        documents = 0
        try:
            for event in YAML(typ="safe", pure=True).parse(text):
                if isinstance(event, DocumentStartEvent):
                    documents += 1
                    self._start_document(event, documents)
                self._take(event)
        except MarkedYAMLError as error:
            raise self._syntax_error(error, text) from None
        except (YAMLError, ValueError, IndexError) as error:
            # ruamel raises the last two for escapes beyond Unicode and broken directives.
            raise self._error(self._line, f"is not YAML: {_one_line(error)}") from None
        return self._root

    def _error(self, line: int, message: str) -> InputError:
        return InputError(f"{self._name}:{line}: {message}")

    def _syntax_error(self, error: MarkedYAMLError, text: str) -> InputError:
        rows = text.split("\n")
        mark = error.problem_mark or error.context_mark
        line = min(mark.line + 1, len(rows) - (rows[-1] == "")) if mark else 1
        row = rows[max(line, 1) - 1]
        if "\t" in row[: len(row) - len(row.lstrip())]:
            return self._error(line, "a tab indents this line; YAML allows spaces only")
        return self._error(
            max(line, 1), f"is not YAML: {_one_line(error.problem or error.context)}"
        )

    def _start_document(self, event: Any, count: int) -> None:
        line = event.start_mark.line + 1
        if count > 1:
            raise self._error(line, "a second document starts here; a config is one document")
        if event.version and tuple(event.version) != (1, 2):
            version = ".".join(map(str, event.version))
            raise self._error(line, f"YAML {version} is not allowed; a config is YAML 1.2")

    def _take(self, event: Any) -> None:
        self._line = line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            self._add(self._aliased(event.anchor, line))
        elif isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent):
            if event.tag is not None:
                raise self._error(line, f"the tag {shown(event.tag)} is not allowed; plain values")
            self._start(event, line)
        elif isinstance(event, SequenceEndEvent | MappingEndEvent):
            node = self._open.pop()
            if node.key is not None:
                raise self._error(node.line, "a key has no value")
            self._finish(node)

    def _start(self, event: Any, line: int) -> None:
        node = _Node(line=line, anchor=event.anchor)
        if isinstance(event, ScalarEvent):
            node.value = self._scalar(event, line)
            if isinstance(node.value, float) and not math.isfinite(node.value):
                node.not_finite = event.value
            self._finish(node)
        else:
            node.value = [] if isinstance(event, SequenceStartEvent) else {}
            self._open.append(node)
            if len(self._open) > MAX_DEPTH:
                raise self._error(line, f"nested deeper than {MAX_DEPTH} levels")

    def _scalar(self, event: Any, line: int) -> Any:
        text: str = event.value
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise self._error(line, f"{shown(text)} is not Unicode text")
        if event.style is not None:  # quoted, or a block of text
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            return int(text)
        if _NOT_FINITE.fullmatch(text):
            return math.inf
        if not _FLOAT.fullmatch(text):
            return text
        number = float(text)
        return int(number) if number.is_integer() and abs(number) <= 2**53 else number

    def _aliased(self, anchor: str, line: int) -> _Node:
        if anchor in self._anchors:
            return self._anchors[anchor]
        if any(node.anchor == anchor for node in self._open):
            raise self._error(line, f"the alias {shown(anchor)} stands inside what it stands for")
        raise self._error(line, f"the alias {shown(anchor)} has no anchor of that name before it")

    def _finish(self, node: _Node) -> None:
        if node.anchor is not None:
            self._anchors[node.anchor] = node
        self._add(node)

    def _add(self, node: _Node) -> None:
        """Puts a finished value into the innermost open list or mapping."""
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        parent.size += node.size
        parent.depth = max(parent.depth, node.depth + 1)
        if parent.size > MAX_ENTRIES or parent.depth > MAX_DEPTH:
            limit = f"{MAX_ENTRIES} entries or {MAX_DEPTH} levels"
            raise self._error(parent.line, f"with its aliases this is more than {limit}")
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif parent.key is None:
            parent.key = node
        else:
            key, parent.key = parent.key, None
            self._add_entry(parent, key, node)

    def _add_entry(self, parent: _Node, key: _Node, node: _Node) -> None:
        name = key.value
        if not isinstance(name, str):
            text = "that is a list or mapping" if isinstance(name, list | dict) else shown(name)
            raise self._error(key.line, f"the key {text} is not allowed; a word")
        if name in parent.value or (name == "<<" and parent.merged):
            first = parent.value[name][0] if name != "<<" else parent.line
            raise self._error(
                key.line, f"the key {shown(name)} is repeated (first on line {first})"
            )
        if name != "<<":
            parent.value[name] = (key.line, node)
            return
        parent.merged = node.value if isinstance(node.value, list) else [node]
        if not parent.merged or not all(isinstance(n.value, dict) for n in parent.merged):
            raise self._error(key.line, "<< merges a mapping or a list of mappings, nothing else")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _entries(node: _Node) -> dict[str, tuple[int, _Node]]:
    """A mapping's entries: its own win over merged ones, earlier merged ones over later."""
    entries: dict[str, tuple[int, _Node]] = {}
    for merged in reversed(node.merged):
        entries.update(_entries(merged))
    entries.update(node.value)
    return entries


class _Values:
    """Nodes as plain values, each place with its own copy, and the lines of all places."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lines: dict[Keys, int] = {}

    def of(self, node: _Node, keys: Keys) -> Any:
        self.lines.setdefault(keys, node.line)
        if isinstance(node.value, list):
            return [self.of(item, (*keys, i)) for i, item in enumerate(node.value)]
        if isinstance(node.value, dict):
            entries = _entries(node)
            self.lines.update(((*keys, name), line) for name, (line, _) in entries.items())
            return {name: self.of(item, (*keys, name)) for name, (_, item) in entries.items()}
        if node.not_finite is not None:
            where = f"{self._name}:{node.line}: {dotted(keys)}"
            raise InputError(f"{where}: {node.not_finite[:60]} is not allowed; a finite number")
        return node.value
