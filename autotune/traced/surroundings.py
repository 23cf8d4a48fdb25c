"""Which operands of a program's kernels XLA may hold in VMEM because of what it runs around them.

An operand that XLA makes, or has the time to fetch while it makes others, may lie in VMEM outside
the kernel's limit, and the kernel then has no window for it. Seen on v5e and v6e (both compilers):
the row numbers JAX's splash makes of constants; every small operand of JAX's flash backward pass,
around which softmax statistics are broadcast; every operand of a second kernel. A program that is
one kernel and reshapes has all its windows there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.traced.jaxprs import called_jaxpr, inner_jaxprs, open_jaxpr

_MOVES_NOTHING = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "slice",
     "squeeze"}
)  # fmt: skip
"""What costs XLA nothing where the result has the elements of the operand."""


@dataclass(slots=True)
class Surroundings:
    """What XLA does around the kernels of a program.

    Attributes:
      kernels: how many there are.
      busy: whether it computes anything of run-time data.
      made: per `pallas_call` equation, by `id`, and operand: whether XLA makes it, of constants
        too.
    """

    kernels: int = 0
    busy: bool = False
    made: dict[int, tuple[bool, ...]] = field(default_factory=dict)

    def parkable(self, eqn: Any, operand: int | None) -> bool:
        """Whether XLA may hold an operand of the kernel `eqn`, or with None a result, in VMEM."""
        if self.busy or self.kernels > 1:
            return True
        made = self.made.get(id(eqn), ())
        return operand is not None and operand < len(made) and made[operand]


def surroundings(closed: Any) -> Surroundings:
    """The surroundings of the kernels in a traced function."""
    found = Surroundings()
    jaxpr, _ = open_jaxpr(closed)
    _walk(jaxpr, [False] * len(jaxpr.invars), {}, found)
    return found


def _walk(
    jaxpr: Any, made: Sequence[bool], fixed: Mapping[Any, bool], found: Surroundings
) -> list[bool]:
    """Follows which values XLA makes; constants and what is made of them alone are `fixed`."""
    by_xla: dict[Any, bool] = dict(zip(jaxpr.invars, made, strict=True))
    constant: dict[Any, bool] = {**dict.fromkeys(jaxpr.constvars, True), **fixed}

    def is_made(atom: Any) -> bool:
        return hasattr(atom, "val") or by_xla.get(atom, False)

    def is_fixed(atom: Any) -> bool:
        return hasattr(atom, "val") or constant.get(atom, False)

    for eqn in jaxpr.eqns:
        name, same = eqn.primitive.name, all(map(is_fixed, eqn.invars))
        results = [True] * len(eqn.outvars)
        inner = None if name == "scan" else called_jaxpr(eqn)
        if name == "pallas_call":
            found.kernels += 1
            found.made[id(eqn)] = tuple(map(is_made, eqn.invars))
        elif inner is not None and len(open_jaxpr(inner)[0].invars) == len(eqn.invars):
            body = open_jaxpr(inner)[0]
            within = {v: is_fixed(a) for v, a in zip(body.invars, eqn.invars, strict=True)}
            results = _walk(body, list(map(is_made, eqn.invars)), within, found)
        elif _moves_nothing(eqn):
            results = [is_made(eqn.invars[0])]
        else:
            found.busy |= not same
            for other in inner_jaxprs(eqn):  # loops and branches: XLA's own in any case
                body = open_jaxpr(other)[0]
                _walk(body, [True] * len(body.invars), {}, found)
        by_xla.update(zip(eqn.outvars, results, strict=True))
        constant.update(dict.fromkeys(eqn.outvars, same))
    return [is_made(atom) for atom in jaxpr.outvars]


def _moves_nothing(eqn: Any) -> bool:
    if eqn.primitive.name not in _MOVES_NOTHING:
        return False
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return bool(before.size == after.size and before.dtype == after.dtype)
