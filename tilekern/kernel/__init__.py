"""`@tilekern.kernel`: from a Python function over tiles to a JAX function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from tilekern import _jax, source
from tilekern.errors import ArgumentError
from tilekern.kernel.family import Definition, Family, Schedule, check_argument
from tilekern.kernel.signature import Block, Signature, of_function, static_key
from tilekern.kernel.stages import Compiled, Lowered, Traced, interpret
from tilekern.lower.target import Target, resolve
from tilekern.primitive import kernel_call_p

# How many argument types a kernel remembers its traces for, before it starts anew.
_FAMILIES = 512

__all__ = ["Block", "Compiled", "Kernel", "Lowered", "Signature", "Traced", "interpret", "kernel"]


def kernel(*, out_type: Callable[..., Any]) -> Callable[[Callable[..., None]], Kernel]:
    """Make a JAX function of a function over refs.

    The decorated function's positional parameters are pytrees of `Ref`s, inputs first, then outputs; its keyword-only
    parameters are static, those annotated with `tk.Block` are block sizes. It stores every element of every output.

    Args:
      out_type: called with the inputs as `jax.ShapeDtypeStruct`s, and with those static arguments (blocks excepted)
        that it has parameters for; returns the type of the output, or a tuple with one entry (a type, a pytree of
        types, or None) for each output parameter.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
      ... def double(x, out, *, block: tk.Block = 128):
      ...     i = tk.parallel(x.shape[0], block)
      ...     out[i] = x[i] * 2
      >>> double(jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """
    return partial(Kernel, out_type)


class Kernel:
    """A kernel, made by `kernel`: call it like a function of arrays, inside or outside of `jax.jit`.

    Calls take the inputs and any keyword-only arguments, and `target=` to lower for that target's blocks.
    """

    def __init__(self, out_type: Callable[..., Any], function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        loc = source.of_function(function.__code__)
        with source.at(loc):
            self.signature: Signature = of_function(function)
        self._schedules: dict[str, Schedule] = {}
        self._definition = Definition(function, out_type, self.signature, self._schedules, loc)
        self._calls: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._families: dict[tuple[Any, ...], Family] = {}

    def __repr__(self) -> str:
        return f"<tilekern kernel {self.signature.name}>"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the kernel; see the class."""
        try:
            call = self._calls[static_key(keywords)] if keywords else self._calls[()]
        except (KeyError, TypeError):
            args, keywords = self.signature.positional(args, keywords)
            call = self._prepare(keywords)
        return call(*args)

    def schedule(self, target: str) -> Callable[[Schedule], Schedule]:
        """Declare the blocks for all targets whose name starts with `target`; the longest such name decides.

        The decorated function gets the inputs as `jax.ShapeDtypeStruct`s, and by keyword those static arguments, and
        the name of the `target`, that it has parameters for. It returns a dict of blocks.
        """

        def register(schedule: Schedule) -> Schedule:
            self._schedules[target] = schedule
            return schedule

        return register

    def trace(self, *args: Any, **keywords: Any) -> Traced:
        """Trace the kernel for arrays or `jax.ShapeDtypeStruct`s and static arguments."""
        args, keywords = self.signature.positional(args, keywords)
        statics, blocks, target = self._check(keywords)
        return Traced(self._family_for(args, statics, blocks, target))

    # --- calls ---

    def _check(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int], Target | None]:
        """Static arguments, blocks and target of a call."""
        target = keywords.get("target")
        given = {n: v for n, v in keywords.items() if n in self.signature.blocks and v is not None}
        statics = self.signature.check_statics(keywords)
        blocks = self.signature.check_blocks(given, "the call")
        return statics, blocks, None if target is None else resolve(target)

    def _prepare(self, keywords: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of the arrays for given static arguments: jitted, so that JAX dispatches repeated calls."""
        statics, blocks, target = self._check(keywords)
        key = static_key(keywords)
        if key in self._calls:
            return self._calls[key]

        def call(*args: Any) -> Any:
            family = self._family_for(args, statics, blocks, target)
            if family.captures_tracers:
                # The values of this call must not be found again by the next: call without any cache from now on.
                self._calls[key] = call
            leaves = _jax.bind(kernel_call_p, *jax.tree.leaves(args), *family.captured, family=family)
            return family.pack(leaves)

        call.__name__ = self.signature.name
        return self._calls.setdefault(key, jax.jit(call))

    def _family_for(
        self, args: tuple[Any, ...], statics: Mapping[str, Any], blocks: Mapping[str, int], target: Target | None
    ) -> Family:
        with_paths, tree = _jax.flatten_with_path(args)
        types = tuple(check_argument(self.signature.name, self._name_of(path), leaf) for path, leaf in with_paths)
        if len(args) > len(self.signature.arrays):
            raise ArgumentError(
                f"{self.signature.name} takes fewer arrays",
                expected=f"the inputs among {', '.join(self.signature.arrays)}",
                got=f"{len(args)} positional arguments",
                fix="outputs are not passed; static arguments go by keyword",
            )
        key = (tree, types, static_key(statics), static_key(blocks), target, _jax.x64_enabled())
        if key in self._families:
            return self._families[key]
        family = Family(self._definition, jax.tree.unflatten(tree, types), statics, blocks, target)
        if not family.captures_tracers:
            if len(self._families) >= _FAMILIES:
                self._families.clear()
            self._families[key] = family
        return family

    def _name_of(self, path: tuple[Any, ...]) -> str:
        position: int = path[0].idx
        names = self.signature.arrays
        name = names[position] if position < len(names) else f"argument {position}"
        return name + jax.tree_util.keystr(path[1:])
