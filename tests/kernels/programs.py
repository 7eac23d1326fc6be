"""The parts of a program: calls of kernels, and arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax


def calls(jaxpr: Any, name: str) -> int:
    """The number of calls of a kernel in a program."""
    return sum(eqn.primitive.name == "tilekern_call" and str(eqn.params["callee"]) == name for eqn in equations(jaxpr))


def arrays_of(jaxpr: Any) -> Iterator[Any]:
    """The types of all arrays that a program makes."""
    return (v.aval for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "size"))


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and of those inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for leaf in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
