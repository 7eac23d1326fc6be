"""`region`: names for parts of a kernel, by scopes of JAX, which reach each equation that is traced in them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from tilekern._jax import JaxprEqn
from tilekern.errors import ArgumentError, checked
from tilekern.lang import state
from tilekern.lang.tiles import describe

# A scope of JAX whose name has this prefix is a region. JAX opens scopes of its own, too.
_PREFIX = "tilekern region: "


@checked
def region(name: str) -> AbstractContextManager[object]:
    """Give a name to the operations that are traced in the context. Results and speed do not depend on it.

    with tk.region("scores"):
        s = tk.dot(q[i], k[j].T)

    Regions in regions have paths: "scores/mask". Derived gradients have the regions of the operations that they come
    from. Profiles show the names where the target has a place for them: see "Costs and profiles" in the reference.
    """
    state.current("tk.region")
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        raise ArgumentError(
            "the name of a region is no text",
            expected="a str of at least one character, which is known when the kernel is traced",
            got=f"name = {describe(name)}",
            fix='write with tk.region("scores"):',
        )
    return jax.named_scope(_PREFIX + name)


def regions_of(eqn: JaxprEqn) -> str:
    """The path of regions around an equation in its own jaxpr, outermost first: "scores/mask", "" for none."""
    names = [scope.name for scope in eqn.source_info.name_stack.stack]
    return "/".join(name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
