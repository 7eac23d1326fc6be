"""`@tilekern.op`: plain JAX code that calls several kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from tilekern.errors import checked
from tilekern.kernel import composite
from tilekern.kernel.choice import Tunable
from tilekern.kernel.composite import Composite
from tilekern.kernel.declared import Declared, required
from tilekern.kernel.op_stages import TracedOp
from tilekern.lower.target import Target
from tilekern.primitive import call


@checked
def op(
    function: None = None, /, *, out_type: Callable[..., Any] | None = None, linear: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Make an op of a JAX function: traced for each target, with that target's blocks, when it is lowered.

    The function takes pytrees of arrays and static keyword-only arguments like a kernel, and returns arrays of the
    types that `out_type` names. Inside, shapes may depend on blocks: split a reduction over programs, then combine.
    A global that it reads keeps its first value, as in a `kernel`.

    Args:
      function: never passed: the decorator is written with arguments, `@tk.op(out_type=...)`.
      out_type: required; the types of the results, as for `kernel`.
      linear: names of inputs in which the results are linear, as for `kernel`; derivatives are stated as a kernel's.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> @tk.op(out_type=lambda x: jax.ShapeDtypeStruct((), x.dtype))
      ... def total(x, *, splits: tk.Block = 4):
      ...     return x.reshape(splits, -1).sum(axis=1).sum()
      >>> total(jnp.ones(8))
      Array(8., dtype=float32)
    """
    return partial(CustomOp, required("op", function, out_type), linear)


class CustomOp(Declared):
    """An op, made by `op`: call it like a function of arrays, inside or outside of `jax.jit`."""

    def __init__(self, out_type: Callable[..., Any], linear: tuple[str, ...], function: Callable[..., Any]) -> None:
        super().__init__(out_type, function, linear=linear)

    @checked
    def trace(self, *args: Any, **keywords: Any) -> TracedOp:
        """Trace the op, and the kernels that it calls, for arrays or `jax.ShapeDtypeStruct`s and static arguments."""
        args, keywords = self.signature.positional(args, keywords)
        family, _ = self._family(args, *self._check(keywords))
        return TracedOp(family)

    def _make_family(
        self, args: tuple[Any, ...], statics: Mapping[str, Any], blocks: Mapping[str, Tunable], target: Target | None
    ) -> tuple[Composite, bool]:
        return composite.op(composite.op_call(self._definition, args, statics, blocks, target)), True

    def _bind(self, family: Composite, args: tuple[Any, ...]) -> Any:
        assert family.declared is not None
        return family.declared.results.pack(call(family, *jax.tree.leaves(args)))
