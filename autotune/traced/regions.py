"""The parts of a kernel body that its author did not name, and the words for them.

A part is a branch of a condition, or a run of equations with matrix products. No jax import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.traced.jaxprs import inner_jaxprs, open_jaxpr

_READS = ("get", "masked_load", "load")
_WRITES = ("swap", "masked_swap", "store", "addupdate")
# Scopes that JAX's own library opens inside kernels.
_LIBRARY_SCOPES = ("sync_cores", "threefry2x32")

Roles = dict[Any, str]
"""Ref variable -> `input`, `output` or `scratch`."""


@dataclass(kw_only=True, slots=True)
class Work:
    """What a piece of a kernel's text does, loops counted once.

    Attributes:
      dots: matrix products.
      selects: element-wise choices on arrays, which is what a mask is.
      vectors: other operations on arrays.
      copies: DMAs started or awaited.
      reads, writes: roles of the Refs whose arrays it loads and stores.
    """

    dots: int = 0
    selects: int = 0
    vectors: int = 0
    copies: int = 0
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)

    @property
    def any(self) -> bool:
        return bool(self.dots or self.vectors or self.selects or self.copies or self.writes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Equations `start` to `stop` of one jaxpr of a kernel, and the dots in the text before."""

    jaxpr: Any
    start: int
    stop: int
    work: Work
    dots_before: int


def own_names(eqn: Any) -> tuple[str, ...]:
    """The author's scopes around an equation, without those that JAX's library adds.

    `jnp.einsum` adds its formula, a transformation its own name.
    """
    return tuple(
        scope.name
        for scope in eqn.source_info.name_stack.stack
        if type(scope).__name__ == "Scope" and _by_author(scope.name)
    )


def _by_author(name: str) -> bool:
    formula = "->" in name or "," in name
    return not (formula or name in _LIBRARY_SCOPES)


def holds_pipeline(jaxpr: Any) -> bool:
    """Whether a kernel holds a `pltpu.emit_pipeline`, kept as one equation or unfolded."""
    return any(
        eqn.primitive.name == "emit_pipeline"
        or any(scope.name.startswith("ep_") for scope in eqn.source_info.name_stack.stack)
        or any(map(holds_pipeline, inner_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def author_scopes(jaxpr: Any) -> set[str]:
    """Every scope name the author gave inside a jaxpr."""
    names: set[str] = set()
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        names.update(own_names(eqn))
        for inner in inner_jaxprs(eqn):
            names |= author_scopes(inner)
    return names


def roles(body: Any, grid_mapping: Any) -> Roles:
    """Roles of a kernel's operands: prefetched tables (scalars, none), inputs, outputs, scratch."""
    first = grid_mapping.num_index_operands
    counts = {"input": grid_mapping.num_inputs, "output": grid_mapping.num_outputs}
    found: Roles = {}
    for role, count in counts.items():
        found.update(dict.fromkeys(body.invars[first : first + count], role))
        first += count
    return found | dict.fromkeys(body.invars[first:], "scratch")


def regions(body: Any, known: Roles, grid: Sequence[Any]) -> list[Region]:
    """The unnamed parts of a kernel body, in the order of the text; outer ones before inner."""
    has_dots = bool(_work(body.eqns, known).dots)
    planner = _Planner(has_dots=has_dots, same_way=_same_way(body, grid))
    planner.walk(body, known, keep_all=False)
    return planner.found


def _same_way(body: Any, grid: Sequence[Any]) -> set[int]:
    """Ids of conditions that go the same way at every step, by grid extents alone.

    The compiler makes straight code of them and mixes it with the rest, which a marker would stop:
    with one key block, marked init and finalize cost JAX's splash 3 % of its schedule.
    """
    fixed: set[Any] = set()
    found: set[int] = set()
    for eqn in body.eqns:
        name = eqn.primitive.name
        if name in ("program_id", "num_programs"):
            extent = grid[eqn.params["axis"]] if eqn.params["axis"] < len(grid) else None
            same = isinstance(extent, int) and (extent == 1 or name == "num_programs")
        else:
            same = not eqn.effects and all(hasattr(a, "val") or a in fixed for a in eqn.invars)
        if name == "cond" and (hasattr(eqn.invars[0], "val") or eqn.invars[0] in fixed):
            found.add(id(eqn))
        if same:
            fixed.update(eqn.outvars)
    return found


def words(found: Sequence[Region], taken: set[str]) -> list[str]:
    """A name for each region: init, step, masked_step, skip, finalize or branch, then numbered.

    A step multiplies matrices or, in a kernel that never does, computes on what it was given; the
    masked one chooses between elements more than another step does. What comes before the steps is
    init; after them finalize, or skip where it stores without having read anything.
    """
    with_dots = any(r.work.dots for r in found)
    steps = [r for r in found if _is_step(r.work, with_dots)]
    total = max((r.dots_before + r.work.dots for r in found), default=0)
    fewest = min((r.work.selects for r in steps), default=0)
    first, last = (found.index(steps[0]), found.index(steps[-1])) if steps else (0, -1)
    names, used = [], set(taken)
    for n, region in enumerate(found):
        work = region.work
        before = region.dots_before == 0 if with_dots else n < first
        after = region.dots_before == total if with_dots else n > last
        if _is_step(work, with_dots):
            word = "masked_step" if work.selects > fewest else "step"
        elif not steps or not work.writes:
            word = "branch"
        elif before:
            word = "init"
        elif after:
            word = "finalize" if work.reads else "skip"
        else:
            word = "branch"
        names.append(_numbered(word, used))
        used.add(names[-1])
    return names


def _is_step(work: Work, with_dots: bool) -> bool:
    return bool(work.dots) if with_dots else "input" in work.reads and bool(work.vectors)


def _numbered(word: str, used: set[str]) -> str:
    number = 1
    while True:
        bare = number == 1 and word != "branch"
        name = word if bare else f"{word}_{number}"
        if name not in used:
            return name
        number += 1


@dataclass(kw_only=True, slots=True)
class _Planner:
    """Walks a kernel in the order of its text and notes the parts to name."""

    has_dots: bool
    same_way: set[int]
    found: list[Region] = field(default_factory=list)
    dots: int = 0
    seen: set[int] = field(default_factory=set)

    def walk(self, jaxpr: Any, known: Roles, *, keep_all: bool) -> None:
        """Names what is unnamed at this level: branches, and runs with dots (all with work)."""
        if id(jaxpr) in self.seen:  # one function in two places: named where it was met first
            self.dots += _work(jaxpr.eqns, known).dots
            return
        self.seen.add(id(jaxpr))
        start = 0
        for n, eqn in enumerate(jaxpr.eqns):
            if own_names(eqn):
                self._run(jaxpr, start, n, known, keep_all)
                self.dots += _work([eqn], known).dots
                start = n + 1
            elif self._splits(eqn, known):
                self._run(jaxpr, start, n, known, keep_all)
                self._descend(eqn, known, keep_all)
                start = n + 1
        self._run(jaxpr, start, len(jaxpr.eqns), known, keep_all)

    def _splits(self, eqn: Any, known: Roles) -> bool:
        """Whether an equation is named part by part: a condition, or what holds nothing else.

        A loop whose turns are not known to the text is named inside, so that the name is run once
        a turn.
        """
        if eqn.primitive.name == "cond" and id(eqn) not in self.same_way:
            return True
        if any(author_scopes(inner) for inner in inner_jaxprs(eqn)):
            return True
        work = _work([eqn], known)
        if eqn.primitive.name == "while" and self._heavy(work):
            return True
        only_in_conds = self._heavy(work) and not self._heavy(_work([eqn], known, conds=False))
        return only_in_conds and id(eqn) not in self.same_way

    def _heavy(self, work: Work) -> bool:
        return bool(work.dots) if self.has_dots else bool(work.vectors or work.selects)

    def _descend(self, eqn: Any, known: Roles, keep_all: bool) -> None:
        for inner, own in inside(eqn, known):
            if eqn.primitive.name == "cond":
                self._branch(inner, own)
            else:
                self.walk(inner, own, keep_all=keep_all)

    def _branch(self, branch: Any, known: Roles) -> None:
        work = _work(branch.eqns, known)
        if not work.any:
            return
        direct = _work(branch.eqns, known, conds=False)
        only_in_conds = self._heavy(work) and not self._heavy(direct)
        loops = [eqn for eqn in branch.eqns if eqn.primitive.name == "while"]
        if only_in_conds or self._heavy(_work(loops, known)) or author_scopes(branch):
            self.walk(branch, known, keep_all=True)
        elif id(branch) not in self.seen:
            self.seen.add(id(branch))
            self._add(branch, 0, len(branch.eqns), work, known)
        else:
            self.dots += work.dots

    def _run(self, jaxpr: Any, start: int, stop: int, known: Roles, keep_all: bool) -> None:
        works = [_work([eqn], known) for eqn in jaxpr.eqns[start:stop]]
        busy = [start + n for n, work in enumerate(works) if work.any or work.reads]
        if not busy:
            return
        start, stop = busy[0], busy[-1] + 1
        work = _work(jaxpr.eqns[start:stop], known)
        if self._heavy(work) or (keep_all and work.any):
            self._add(jaxpr, start, stop, work, known)

    def _add(self, jaxpr: Any, start: int, stop: int, work: Work, known: Roles) -> None:
        self.found.append(
            Region(jaxpr=jaxpr, start=start, stop=stop, work=work, dots_before=self.dots)
        )
        self._inner(jaxpr.eqns[start:stop], known)

    def _inner(self, eqns: Sequence[Any], known: Roles) -> None:
        """Branches within a named part that store or multiply: they run less often than it."""
        for eqn in eqns:
            if eqn.primitive.name == "dot_general":
                self.dots += 1
            for inner, own in inside(eqn, known):
                work = _work(inner.eqns, own)
                own_part = eqn.primitive.name == "cond" and id(eqn) not in self.same_way
                if own_part and (work.dots or work.writes) and id(inner) not in self.seen:
                    self.seen.add(id(inner))
                    self._add(inner, 0, len(inner.eqns), work, own)
                else:
                    self._inner(inner.eqns, own)


def inside(eqn: Any, known: Roles) -> Iterator[tuple[Any, Roles]]:
    """Every jaxpr an equation holds, with the roles of the Refs it is given."""
    name, params = eqn.primitive.name, eqn.params
    operands = eqn.invars
    if name == "cond":
        pairs = [(branch, operands[1:]) for branch in params["branches"]]
    elif name == "while":
        pairs = [(params["body_jaxpr"], operands[params["cond_nconsts"] :])]
    else:
        pairs = [(inner, operands) for inner in inner_jaxprs(eqn)]
    for inner, given in pairs:
        jaxpr = open_jaxpr(inner)[0]
        if len(jaxpr.invars) == len(given):
            atoms: Sequence[Any] = jaxpr.invars
            own: Roles = {}
        else:  # run_scoped: operands are its constants, its arguments the Refs it makes
            atoms, own = jaxpr.constvars, dict.fromkeys(jaxpr.invars, "scratch")
        for var, atom in zip(atoms, given, strict=False):
            if not hasattr(atom, "val") and atom in known:
                own[var] = known[atom]
        yield jaxpr, own


def _work(eqns: Sequence[Any], known: Roles, *, conds: bool = True) -> Work:
    """The work of some equations, with or without what lies in the branches of conditions."""
    total = Work()
    for eqn in eqns:
        _count(eqn, known, total)
        if eqn.primitive.name == "cond" and not conds:
            continue
        for inner, own in inside(eqn, known):
            part = _work(inner.eqns, own, conds=conds)
            total.dots += part.dots
            total.selects += part.selects
            total.vectors += part.vectors
            total.copies += part.copies
            total.reads |= part.reads
            total.writes |= part.writes
    return total


def _count(eqn: Any, known: Roles, total: Work) -> None:
    name = eqn.primitive.name
    if name in _READS:
        if _is_array(eqn.outvars[0]):
            total.reads.add(known.get(eqn.invars[0], "scratch"))
    elif name in _WRITES:
        if any(not hasattr(atom, "val") and _is_array(atom) for atom in eqn.invars[1:2]):
            total.writes.add(known.get(eqn.invars[0], "scratch"))
    elif name.startswith("dma_"):
        total.copies += 1
    elif name == "dot_general":
        total.dots += 1
    elif any(_is_array(var) for var in eqn.outvars) and not any(True for _ in inner_jaxprs(eqn)):
        total.selects += name == "select_n"
        total.vectors += name != "select_n"


def _is_array(atom: Any) -> bool:
    return bool(getattr(atom.aval, "shape", ()))
