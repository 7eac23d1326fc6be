"""Choices: keyword-only parameters that select one of a few ways to compute the same results."""

from __future__ import annotations

import inspect
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np

from tilekern.errors import ArgumentError
from tilekern.ir.records import record
from tilekern.lang.tiles import describe

type Tunable = int | str
"""A block size or a launch option, an int; or a value of a choice, a str, an int or a bool."""

if TYPE_CHECKING:
    type Choice[T] = Annotated[T, "a choice"]
    """Annotates a keyword-only parameter of a kernel as a choice among ways to compute the same results."""
else:

    class Choice[T]:
        """Annotates a keyword-only parameter of a kernel or op as a choice among ways to compute the same results.

        `tk.Choice[Literal["rows", "groups"]]` has the values of the `Literal`: strings, ints or bools, no two of them
        equal. `tk.Choice[bool]` has False and True. With all values the results are equal, but for the rounding of
        floats. So a choice is tunable, as a `tk.Block` is: the call gives it, else a schedule, else it has its default.
        `out_type` does not see it.

        Example:
          >>> from typing import Literal
          >>> import jax, jax.numpy as jnp, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
          ... def row_sums(x, out, *, by: tk.Choice[Literal["sums", "products"]] = "sums"):
          ...     i = tk.parallel(x.shape[0], 2)
          ...     ones = jnp.ones((x.shape[1], 1), x.dtype)
          ...     out[i] = x[i].sum(axis=1) if by == "sums" else tk.dot(x[i], ones)[:, 0]
          >>> row_sums(jnp.ones((2, 3)), by="products")
          Array([3., 3.], dtype=float32)
        """


@record
class Values:
    """The values of a choice.

    Attributes:
      values: the values, in the order of the annotation; no two are equal.
      default: one of the values; `inspect.Parameter.empty` if the parameter has no default.
    """

    values: tuple[Tunable, ...]
    default: Any = inspect.Parameter.empty

    @property
    def hint(self) -> str:
        """The annotation of the parameter in the signature of calls, as text."""
        return f"Literal[{', '.join(map(repr, self.values))}] | None"

    def check(self, name: str, value: Any, origin: str) -> Tunable:
        """The value of the choice `name` that equals `value`, which may be a bool, int or str of NumPy.

        Args:
          name: the name of the parameter.
          value: what a call or a schedule gives.
          origin: names the call or the schedule in errors.

        Raises:
          ArgumentError: it is none of the values.
        """
        plain: Any = value
        if isinstance(value, np.bool_ | np.integer | np.str_):
            plain = cast(Any, value).item()
        for own in self.values:
            # 1 is not True here, although they are equal in Python.
            if type(own) is type(plain) and own == plain:
                return own
        raise ArgumentError(
            f"{origin} gives {name} a value that is none of its choices",
            expected=f"one of {', '.join(map(repr, self.values))}",
            got=f"{name} = {describe(value)}",
            fix=f"give {name} one of these values, or leave it out",
        )


def values_of(kernel: str, name: str, hint: Any, default: Any) -> Values | None:
    """The values of the parameter `name`, by its annotation; None if the annotation is not of a choice.

    Args:
      kernel: the name of the kernel, for errors.
      name: the name of the parameter.
      hint: the annotation; a string if its names could not be resolved.
      default: the default, or `inspect.Parameter.empty`.

    Raises:
      ArgumentError: the annotation names no values, or the default is none of them.
    """
    is_choice = hint is Choice or typing.get_origin(hint) is Choice
    if isinstance(hint, str):
        is_choice = hint.partition("[")[0].rpartition(".")[2] == "Choice"
    if not is_choice:
        return None
    values = _values(*typing.get_args(hint))
    if not values or len(set(values)) < len(values) or not all(type(v) in (str, int, bool) for v in values):
        raise ArgumentError(
            f"the values of the choice {name} of {kernel} are not known",
            expected="tk.Choice[bool], or tk.Choice[Literal[...]] of strings, ints or bools, no two of them equal",
            got=f"{name}: {hint if isinstance(hint, str) or values else 'tk.Choice'}",
            fix=f'write {name}: tk.Choice[Literal["first", "second"]], of names that the module defines',
        )
    choice = Values(values)
    if default is inspect.Parameter.empty:
        return choice
    return Values(values, choice.check(name, default, f"the default of {kernel}"))


def _values(hint: Any = None) -> tuple[Any, ...]:
    if isinstance(hint, typing.TypeAliasType):
        return _values(hint.__value__)
    if hint is bool:
        return (False, True)
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
