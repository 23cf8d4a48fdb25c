"""What is asked of a kernel's call before it is traced or compiled: a breach is one clear line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autotune.candidate import Config
from autotune.errors import AutotuneError, KernelError
from autotune.kernels.base import Call, Kernel, ask
from autotune.problem import Problem


def built(kernel: Kernel, problem: Problem, config: Config) -> Call:
    """`kernel.build(problem, config)`: a function and its abstract arguments.

    Raises:
      KernelError: it gave something else.
    """
    call = kernel.build(problem, config)
    if not (isinstance(call, tuple) and len(call) == 2 and callable(call[0])):
        raise KernelError(
            f"kernel {kernel.name}: build gave {_kind(call)}, not (function, arguments)"
        )
    function, arguments = call
    if not isinstance(arguments, Sequence):
        raise KernelError(
            f"kernel {kernel.name}: build gave the arguments as {_kind(arguments)}, not a tuple of "
            "jax.ShapeDtypeStruct"
        )
    for n, argument in enumerate(arguments):
        if not hasattr(argument, "shape") or not hasattr(argument, "dtype"):
            raise KernelError(
                f"kernel {kernel.name}: argument {n} of build is {_kind(argument)}, not a "
                "jax.ShapeDtypeStruct"
            )
    return function, tuple(arguments)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return "a tuple of " + (", ".join(type(v).__name__ for v in value) or "nothing")
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def checked_output(kernel: Kernel, problem: Problem, call: Call) -> Call:
    """`call`, which raises KernelError while traced where its outputs' shapes are not as expected.

    Expected are those of `kernel.output`, else of a reference in jnp; one in NumPy cannot be
    traced, and says nothing.
    """
    function, arguments = call
    wanted = _wanted(kernel, problem, arguments)
    if wanted is None:
        return call
    source, want = wanted

    def checked(*arrays: Any) -> Any:
        given = function(*arrays)
        if (got := _shapes(given)) != want:
            text = f"the call returns {_listed(got)}, its {source} {_listed(want)}"
            raise KernelError(f"kernel {kernel.name}: {text}")
        return given

    # A `functools.partial` has no name of its own.
    checked.__name__ = getattr(function, "__name__", kernel.name)
    return checked, arguments


def _wanted(
    kernel: Kernel, problem: Problem, arguments: tuple[Any, ...]
) -> tuple[str, list[tuple[int, ...]]] | None:
    if kernel.output is not None:
        return "output", _shapes(ask(kernel, "output", kernel.output, problem))
    if kernel.reference is None:
        return None
    traced = _traced(kernel.reference, problem, arguments)
    return None if traced is None else ("reference", _shapes(traced))


def _traced(reference: Any, problem: Problem, arguments: tuple[Any, ...]) -> Any:
    try:
        return jax.eval_shape(lambda *arrays: reference(problem, *arrays), *arguments)
    except AutotuneError:
        raise
    except Exception:  # NumPy refuses tracers in several ways
        return None


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return [tuple(getattr(leaf, "shape", ())) for leaf in leaves]


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes) or "nothing"
