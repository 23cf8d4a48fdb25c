"""Which scratch the compiler must really hold: what a kernel reads before it wrote it anew.

Scratch that a step writes in full before every read is a value like any other, and the compiler
drops the buffer; a 64 MiB one compiled on tpu7x (libtpu 0.0.42 and 0.0.50). It does not where the
read lies in a branch and the write outside of it: seen on v5e, v6e and tpu7x, on both.
"""

from __future__ import annotations

from typing import Any

from autotune.traced.inner_pipeline import PRIMITIVE, closed_over
from autotune.traced.jaxprs import called_jaxpr, open_jaxpr

_READS = ("get", "addupdate", "masked_load", "load")
_WRITES = ("swap", "masked_swap", "store")


def is_carried(jaxpr: Any, ref: Any) -> bool:
    """Whether a kernel body may read `ref` before it wrote all of it in the same step, or reads it
    in a branch on run-time data that did not write it.

    False where it never reads it, or in doubt. The target or source of a DMA is carried: a copy
    needs the buffer whatever else happens.
    """
    body = open_jaxpr(jaxpr)[0]
    return _first_use(body, ref) == "read" or _read_in_branch(body, ref)


def _read_in_branch(jaxpr: Any, ref: Any) -> bool:
    """Whether a branch that the compiler cannot resolve reads `ref` before it writes it."""
    for eqn in jaxpr.eqns:
        if not any(atom is ref for atom in eqn.invars):
            continue
        branches = eqn.params["branches"] if eqn.primitive.name == "cond" else ()
        inner = branches or tuple(filter(None, [called_jaxpr(eqn)]))
        operands = eqn.invars[1:] if branches else eqn.invars
        parts = [(open_jaxpr(part)[0], _inner(part, operands, ref)) for part in inner]
        open_ended = bool(branches) and _on_data(jaxpr, eqn.invars[0])
        if open_ended and any(_first_use(*part) == "read" for part in parts):
            return True
        if any(_read_in_branch(*part) for part in parts):
            return True
    return False


def _on_data(jaxpr: Any, atom: Any) -> bool:
    """Whether a value comes from memory: one made of grid indices may be a constant in the end."""
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    waiting, seen = [atom], set()
    while waiting:
        var = waiting.pop()
        if hasattr(var, "val") or var in seen or var not in made_by:
            continue
        seen.add(var)
        if made_by[var].primitive.name in _READS:
            return True
        waiting += made_by[var].invars
    return False


def _first_use(jaxpr: Any, ref: Any) -> str | None:
    """`read` or `written`, whichever surely comes first in the text; None for neither."""
    for eqn in jaxpr.eqns:
        if not any(atom is ref for atom in eqn.invars):
            continue
        use = _use(eqn, ref)
        if use is not None:
            return use
    return None


def _use(eqn: Any, ref: Any) -> str | None:
    name = eqn.primitive.name
    if name in _READS or name.startswith("dma_"):
        return "read"
    if name in _WRITES:
        whole = eqn.invars[0] is ref and eqn.invars[1].aval.shape == ref.aval.shape
        return "written" if whole else None
    if name == "cond":
        uses = [
            _first_use(open_jaxpr(branch)[0], _inner(branch, eqn.invars[1:], ref))
            for branch in eqn.params["branches"]
        ]
        if "read" in uses:
            return "read"
        return "written" if set(uses) == {"written"} else None
    if name == "scan":
        return _read_only(eqn.params["jaxpr"], eqn.invars, ref)
    if name == "while":
        skipped = eqn.params["cond_nconsts"]
        return _read_only(eqn.params["body_jaxpr"], eqn.invars[skipped:], ref)
    if name == PRIMITIVE:
        return _first_use(open_jaxpr(eqn.params["body_jaxpr"])[0], closed_over(eqn, ref))
    inner = called_jaxpr(eqn)
    if inner is None:
        return None
    return _first_use(open_jaxpr(inner)[0], _inner(inner, eqn.invars, ref))


def _read_only(body: Any, operands: Any, ref: Any) -> str | None:
    """A loop's first use of `ref` where it is a read: the loop may not run, and write nothing."""
    use = _first_use(open_jaxpr(body)[0], _inner(body, operands, ref))
    return use if use == "read" else None


def _inner(jaxpr: Any, operands: Any, ref: Any) -> Any:
    """The variable that stands for `ref` inside; None, which nothing is, where there is none."""
    inside = open_jaxpr(jaxpr)[0].invars
    return next((v for v, atom in zip(inside, operands, strict=False) if atom is ref), None)
