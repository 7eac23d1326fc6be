"""One call of a kernel, as data: the types of its arguments, their numbers, static arguments, and who transforms it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import F64, DType, dtype_name, kind_of
from tilekern.testing.values import Numbers, values

# Arrays of at most so many elements stand in a script as they are.
_LITERAL = 64


@dataclass(frozen=True)
class Call:
    """A call of a kernel, an op, or a function around them.

    Attributes:
      tree: the structure of the positional arguments.
      types: of the arrays among them.
      keywords: static arguments and blocks.
      numbers: the kind of the numbers in the arrays.
      seed: of the numbers.
      in_axes: for each array, the dim along which `jax.vmap` stacks it; None for all of them: there is no vmap.
      size: of the batch.
      gradient: True for the gradient by all arrays of floats, for random cotangents.
    """

    tree: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    numbers: Numbers = "normal"
    seed: int = 0
    in_axes: tuple[int | None, ...] | None = None
    size: int = 2
    gradient: bool = False

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays, flat."""
        shapes = [_stacked(t.shape, axis, self.size) for t, axis in zip(self.types, self._axes, strict=True)]
        pairs = enumerate(zip(shapes, self.types, strict=True))
        return tuple(values(self.numbers, t.dtype, shape, self.seed + n) for n, (shape, t) in pairs)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return jax.tree.unflatten(self.tree, self.arrays)

    @property
    def dtype(self) -> DType:
        """The dtype that the call counts under: of its first array of floats, or else of its first array."""
        floats = [t.dtype for t in self.types if kind_of(np.dtype(t.dtype)) == "float"]
        return np.dtype([*floats, *(t.dtype for t in self.types), np.dtype(np.float32)][0])

    @property
    def needs_x64(self) -> bool:
        """True if an array has 64 bits."""
        return any(np.dtype(t.dtype).itemsize == 8 for t in self.types)

    @property
    def _axes(self) -> tuple[int | None, ...]:
        return self.in_axes or tuple(None for _ in self.types)

    def function(self, of: Callable[..., Any], keywords: Mapping[str, Any] | None = None) -> Callable[..., list[Any]]:
        """The flat results of a function for flat arrays, batched and differentiated as the call is."""
        with_keywords = partial(of, **(self.keywords if keywords is None else keywords))

        def flat(*arrays: Any) -> list[Any]:
            return jax.tree.leaves(with_keywords(*jax.tree.unflatten(self.tree, arrays)))

        if self.in_axes is not None:
            flat = jax.vmap(flat, in_axes=self.in_axes, axis_size=self.size)
        return partial(_gradients, flat, self.seed) if self.gradient else flat

    def __str__(self) -> str:
        types = ", ".join(f"{dtype_name(np.dtype(t.dtype))}{list(t.shape)}" for t in self.types)
        parts = [types, *(f"{n}={v!r}" for n, v in self.keywords.items()), f"{self.numbers} numbers, seed {self.seed}"]
        parts += [f"vmap of {self.size} over {self.in_axes}"] if self.in_axes else []
        return "; ".join([*parts, *(["gradient"] if self.gradient else [])])

    def script(self, function: Any, targets: Sequence[str], reference: Any = None) -> str:
        """A program that makes this call again, and compares."""
        names = [f"x{n}" for n in range(len(self.types))]
        lines = ["import numpy as np", "import ml_dtypes", "", "import tilekern", "from tilekern import testing"]
        called, right = _name(function, "kernel"), _name(reference, "reference")
        lines += [_import(function, called), *([] if reference is None else [_import(reference, right)])]
        lines += ["", *(f"{n} = {self._array(n, x)}" for n, x in zip(names, enumerate(self.arrays), strict=True))]
        tree = jax.tree.unflatten(self.tree, [_Name(n) for n in names])
        options = [f"targets={list(targets)!r}", *(f"{n}={v!r}" for n, v in self.keywords.items())]
        options += [f"reference={right}"] if reference is not None else []
        options += [f"in_axes={self.in_axes!r}"] if self.in_axes else []
        options += [f"gradient=True, seed={self.seed}"] if self.gradient else []
        lines.append(f"print(testing.compare({', '.join([called, *map(repr, tree), *options])}))")
        return "\n".join(lines) + "\n"

    def _array(self, name: str, numbered: tuple[int, Array]) -> str:
        number, x = numbered
        dtype = f"ml_dtypes.{x.dtype}" if x.dtype.kind == "V" or hasattr(ml_dtypes, str(x.dtype)) else f"np.{x.dtype}"
        if x.size > _LITERAL:
            return f"testing.values({self.numbers!r}, {dtype_name(x.dtype)!r}, {x.shape}, seed={self.seed + number})"
        shown = repr(x.astype(F64).tolist() if kind_of(x.dtype) == "float" else x.tolist())
        shown = shown.replace("nan", "np.nan").replace("inf", "np.inf")
        return f"np.array({shown}, {dtype})" + (f".reshape({x.shape})" if not x.size else "")


class _Name(str):
    """A name that prints as itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _stacked(shape: Sequence[int], axis: int | None, size: int) -> tuple[int, ...]:
    return tuple(shape) if axis is None else (*shape[:axis], size, *shape[axis:])


def _gradients(function: Callable[..., list[Any]], seed: int, *arrays: Any) -> list[Any]:
    """The gradient by all arrays of floats of the results' product with random cotangents."""
    moving = [n for n, x in enumerate(arrays) if kind_of(np.dtype(x.dtype)) == "float"]

    def of_floats(*floats: Any) -> list[Any]:
        float_of = dict(zip(moving, floats, strict=True))
        results = function(*(float_of.get(n, x) for n, x in enumerate(arrays)))
        return [x for x in results if kind_of(np.dtype(x.dtype)) == "float"]

    results, pull = cast(Any, jax).vjp(of_floats, *(jnp.asarray(arrays[n]) for n in moving))
    return list(pull([cotangent(x, seed + n) for n, x in enumerate(results)]))


def cotangent(x: Any, seed: int) -> Any:
    """A random cotangent of a result, of multiples of 1/8, which all dtypes hold."""
    numbers = np.random.default_rng(seed).integers(-8, 9, x.shape) / 8
    return jnp.asarray(numbers.astype(x.dtype))


def with_dtype(call: Call, dtype: DType) -> Call:
    """The call with floats of a dtype."""
    types = [
        jax.ShapeDtypeStruct(t.shape, dtype if kind_of(np.dtype(t.dtype)) == "float" else t.dtype) for t in call.types
    ]
    return replace(call, types=tuple(types))


def _name(function: Any, fallback: str) -> str:
    name = str(getattr(function, "__qualname__", ""))
    return name if name.isidentifier() else fallback


def _import(function: Any, name: str) -> str:
    """The line that imports a function, or a comment where no import can find it."""
    module = inspect.getmodule(function) or inspect.getmodule(inspect.unwrap(function))
    importable = module is not None and all(part.isidentifier() for part in module.__name__.split("."))
    if module is None or not importable or module.__name__ == "__main__" or getattr(module, name, None) is not function:
        return f"# Define {name} here, or import it."
    return f"from {module.__name__} import {name}"
