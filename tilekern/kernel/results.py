"""The results of a kernel, from its `out_type` and `donate`; `Zeros` and `Sum`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError, checked
from tilekern.ir.records import record
from tilekern.ir.types import FOUR_BITS, DType, Role, is_dtype
from tilekern.lang.tiles import describe


def _type_of_one(name: str, aval: Any) -> Any:
    if isinstance(aval, jax.ShapeDtypeStruct) or _jax.is_array(aval):
        return aval
    raise ArgumentError(
        f"{name} takes the type of one array",
        expected="a jax.ShapeDtypeStruct",
        got=f"aval = {describe(aval)}",
        fix=f"write {name}(jax.ShapeDtypeStruct(shape, dtype)) for each array of the output",
    )


@dataclass(frozen=True, init=False)
class Zeros:
    """In `out_type`: an output that starts at 0, of which programs may leave elements unwritten.

    Attributes:
      aval: its shape and dtype, a `jax.ShapeDtypeStruct`.
    """

    aval: Any

    @checked
    def __init__(self, aval: Any) -> None:
        object.__setattr__(self, "aval", _type_of_one("tk.Zeros", aval))


@dataclass(frozen=True, init=False)
class Sum:
    """In `out_type`: an output that is a sum over programs, each of which does `out.at[...].add(value)`.

    Deterministic, also for floats, which are added in float32 or better and rounded once. Neither loaded nor stored.

    Attributes:
      aval: its shape and dtype, a `jax.ShapeDtypeStruct`.
    """

    aval: Any

    @checked
    def __init__(self, aval: Any) -> None:
        object.__setattr__(self, "aval", _type_of_one("tk.Sum", aval))


_ROLES: dict[type, Role] = {Zeros: "zeros", Sum: "sum"}


@record
class Results:
    """The results of a kernel for given argument types.

    Attributes:
      trees: a pytree of `jax.ShapeDtypeStruct` for each result: donated inputs, then outputs.
      roles: for each output a pytree with the role of each of its arrays.
      single: True if the only result is returned as it is, and not in a tuple.
    """

    trees: tuple[Any, ...]
    roles: tuple[Any, ...]
    single: bool

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The results that are output parameters."""
        return self.trees[len(self.trees) - len(self.roles) :]

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Arrays in the structure that a call returns."""
        packed = jax.tree.unflatten(_jax.structure(self.trees), leaves)
        return packed[0] if self.single else packed


def results(name: str, donated: Sequence[Any], declared: Any) -> Results:
    """The results of the kernel `name`, whose `out_type` returned `declared`.

    Args:
      name: the name of the kernel, for errors.
      donated: the types of the donated inputs, which come first.
      declared: the type of the only output, or a tuple with an entry for each output.

    Raises:
      ArgumentError: `declared` has something that is no type of an array.
    """
    single = not isinstance(declared, tuple)
    outputs: tuple[Any, ...] = (declared,) if single else declared  # pyright: ignore[reportUnknownVariableType] -- the user's
    for leaf in jax.tree.leaves(outputs):
        _check_output(name, _aval(leaf))
    trees = (*donated, *jax.tree.map(_plain, outputs))
    roles: tuple[Any, ...] = jax.tree.map(_role, outputs)
    return Results(trees, roles, len(trees) == 1 and (single or not outputs))


def _aval(leaf: Any) -> Any:
    return leaf.aval if isinstance(leaf, (Zeros, Sum)) else leaf


def _role(leaf: Any) -> Role:
    roles: list[Role] = [role for kind, role in _ROLES.items() if isinstance(leaf, kind)]
    return roles[0] if roles else "out"


def _plain(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = _aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _is_stored(dtype: DType, shape: tuple[Any, ...]) -> bool:
    return is_dtype(dtype) or (dtype in FOUR_BITS and len(shape) > 0)


def _is_size(size: Any) -> bool:
    return jax.export.is_symbolic_dim(size) or (hasattr(size, "__index__") and size >= 0)


def _check_output(name: str, leaf: Any) -> None:
    dtype, shape = (cast(Any, getattr(leaf, part, None)) for part in ("dtype", "shape"))
    is_array = dtype is not None and isinstance(shape, tuple) and not jnp.issubdtype(dtype, jax.dtypes.extended)
    if is_array and _is_stored(np.dtype(dtype), cast(Any, shape)):
        if not all(map(_is_size, cast(Any, shape))):
            raise ArgumentError(
                f"out_type of {name} returned a shape with a size that is none",
                expected="integers of at least 0",
                got=f"shape = {leaf.shape}",
                fix="compute the shape from the inputs' shapes, which may be smaller than out_type supposes",
            )
        return
    raise ArgumentError(
        f"out_type of {name} returned something that is no array type",
        expected="jax.ShapeDtypeStruct, in a pytree for each output; None for an output that is not wanted",
        got=describe(leaf),
        fix="return jax.ShapeDtypeStruct(shape, dtype)",
    )
