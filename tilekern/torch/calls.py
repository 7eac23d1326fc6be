"""What a call from PyTorch runs in JAX: the results, and for derivatives what the backward pass needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.errors import ArgumentError

Name = int | str  # of an argument: its position, or its keyword


@dataclass(frozen=True)
class CallKey:
    """What distinguishes calls beside the types of their tensors.

    Attributes:
      function: a JAX function of arrays, such as a kernel.
      arrays: the names of the arguments that are tensors.
      static: all other arguments, by name.
      needs: for each tensor True if its gradient will be asked for.
    """

    function: Callable[..., Any]
    arrays: tuple[Name, ...]
    static: tuple[tuple[Name, Hashable], ...]
    needs: tuple[bool, ...]


@dataclass(frozen=True)
class Plan:
    """A call for tensors of given types.

    Attributes:
      results: the types of the results.
      residuals: the types of what `run` returns behind the results.
      run: from the arrays to the results and residuals, compiled.
      backward: from the arrays, all that `run` returned, and the cotangents of the results to the gradients of those
        arrays that need one, compiled.
    """

    results: tuple[jax.ShapeDtypeStruct, ...]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    run: Callable[..., tuple[jax.Array, ...]]
    backward: Callable[..., tuple[jax.Array, ...]]


@dataclass
class Call:
    """All plans of a key.

    Attributes:
      key: the key.
      single: True if the function returns one array, not a sequence; known once a plan is made.
      present: for each element of a sequence True if it is an array, not None.
      plans: by the types of the arrays.
    """

    key: CallKey
    single: bool = True
    present: tuple[bool, ...] = (True,)
    plans: dict[Any, Plan] = field(default_factory=dict[Any, Plan])

    def plan(self, types: Sequence[jax.ShapeDtypeStruct]) -> Plan:
        """The plan for arrays of these types."""
        key = tuple((t.shape, t.dtype) for t in types)
        if key not in self.plans:
            self.plans[key] = self._planned(types)
        return self.plans[key]

    def _planned(self, types: Sequence[jax.ShapeDtypeStruct]) -> Plan:
        trees: list[Any] = []

        def forward(*arrays: Any) -> tuple[list[Any], list[Any]]:
            """The results, and the leaves of the function that maps cotangents of results to gradients."""
            if not any(self.key.needs):
                return self._results(arrays), []
            results, pullback = self._pullback(arrays)
            trees[:] = [jax.tree.structure(pullback)]
            return results, jax.tree.leaves(pullback)

        closed = jax.make_jaxpr(forward)(*types).jaxpr
        count = len(jax.eval_shape(forward, *types)[0])
        sources = _sources(closed.invars, closed.outvars[:count], closed.outvars[count:])
        kept = [number for number, source in enumerate(sources) if source is None]

        def run(*arrays: Any) -> tuple[Any, ...]:
            results, leaves = forward(*arrays)
            return (*results, *(leaves[number] for number in kept))

        def backward(arrays: Sequence[Any], returned: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            values, own = [*arrays, *returned[:count]], iter(returned[count:])
            leaves = [next(own) if source is None else values[source] for source in sources]
            pairs = zip(returned[:count], cotangents, strict=True)
            return jax.tree.unflatten(trees[0], leaves)([c if is_inexact(r) else _nothing(r) for r, c in pairs])

        returned = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in jax.eval_shape(run, *types)]
        return Plan(tuple(returned[:count]), tuple(returned[count:]), jax.jit(run), jax.jit(backward))

    @cached_property
    def gradient(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The backward pass as a function of the arrays, then of the cotangents of all results that are no integers.

        It computes the forward pass again, so that derivatives by the arrays are complete. It returns the gradients of
        the arrays that need one.
        """

        def gradient(*operands: Any) -> tuple[jax.Array, ...]:
            arrays, cotangents = operands[: len(self.key.needs)], iter(operands[len(self.key.needs) :])
            results, pullback = self._pullback(arrays)
            return tuple(pullback([next(cotangents) if is_inexact(r) else _nothing(r) for r in results]))

        gradient.__name__ = f"gradient_of_{name_of(self.key.function)}"
        return gradient

    def _pullback(self, arrays: Sequence[Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The results, and the function from their cotangents to the gradients of the arrays that need one."""
        needs = self.key.needs

        def of_moving(*moved: Any) -> list[Any]:
            moving = iter(moved)
            return self._results([next(moving) if n else array for array, n in zip(arrays, needs, strict=True)])

        vjp = cast("Any", jax.vjp)  # its result is declared in part
        return vjp(of_moving, *(array for array, n in zip(arrays, needs, strict=True) if n))

    def _results(self, arrays: Sequence[Any]) -> list[Any]:
        arguments = {**dict(self.key.static), **dict(zip(self.key.arrays, arrays, strict=True))}
        positional = [arguments[name] for name in sorted(name for name in arguments if isinstance(name, int))]
        keywords = {name: value for name, value in arguments.items() if isinstance(name, str)}
        results = self.key.function(*positional, **keywords)
        self.single = not isinstance(results, (tuple, list))
        sequence: list[Any] = [results] if self.single else list(results)
        self.present = tuple(result is not None for result in sequence)
        arrays_only = [result for result in sequence if result is not None]
        if not all(isinstance(result, jax.Array) for result in arrays_only):
            raise ArgumentError(
                f"{name_of(self.key.function)} returns what is no tensor",
                expected="an array, or a tuple of arrays and None",
                got=f"{[type(result).__name__ for result in arrays_only]}",
                fix="wrap a function that returns a tuple",
            )
        return arrays_only


def is_inexact(result: Any) -> bool:
    """True for an array of floats or complex numbers, which has a cotangent."""
    return jnp.issubdtype(result.dtype, jnp.inexact)


def _nothing(result: Any) -> Any:
    """The cotangent of an array of integers."""
    return np.zeros(result.shape, jax.dtypes.float0)


def name_of(function: Callable[..., Any]) -> str:
    """The function's name, for messages."""
    return getattr(function, "__name__", type(function).__name__)


def _sources(inputs: Sequence[Any], results: Sequence[Any], leaves: Sequence[Any]) -> list[int | None]:
    """For each leaf the number of the input or result that it equals, counted inputs first; None for another value."""
    places: Mapping[int, int] = {id(v): n for n, v in reversed(list(enumerate((*inputs, *results))))}
    return [places.get(id(leaf)) for leaf in leaves]
