"""Conventions of public functions: launch options of products, and old names of arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, cast

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError

hide_frames(__file__)


class Launch(TypedDict, total=False):
    """How a product is launched: options that change no result beyond rounding, each left to the schedule if None.

    Attributes:
      block_m: rows of a tile.
      block_n: columns of a tile.
      block_k: terms that are summed at a time.
      num_warps: warps of a GPU's program.
      num_stages: iterations of a GPU's loop that may have loads in flight.
      num_ctas: thread blocks of a cluster.
    """

    block_m: int | None
    block_n: int | None
    block_k: int | None
    num_warps: int | None
    num_stages: int | None
    num_ctas: int | None


LAUNCH = tuple(Launch.__annotations__)


def check_launch(function: str, launch: Mapping[str, Any], without: tuple[str, ...] = ()) -> None:
    """Raise an `ArgumentError` for a keyword that is no launch option of a product.

    Args:
      function: the name of the function, for the error.
      launch: the keywords of a call.
      without: launch options that the function lacks.
    """
    names = [name for name in LAUNCH if name not in without]
    for name, value in launch.items():
        if name not in names:
            raise ArgumentError(
                f"{function} has no keyword argument {name!r}",
                expected=f"a parameter of {function}, or a launch option: {', '.join(names)}",
                got=f"{name} = {describe(value)}",
                fix=f"see help({function})",
            )


def renamed[F: Callable[..., Any]](**names: str) -> Callable[[F], F]:
    """Decorator of a public function whose arguments have new names: `renamed(old="new")`.

    For one version the old names are taken, too, with a DeprecationWarning at the caller's line.

    Raises:
      ArgumentError: a call gives an argument by its old and its new name.
    """

    def decorate(function: F) -> F:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for old in [keyword for keyword in keywords if keyword in names]:
                if names[old] in keywords:
                    raise ArgumentError(
                        f"{name} is given one argument by two names",
                        expected=f"{names[old]}=..., the name of the argument",
                        got=f"{old} = {describe(keywords[old])}, {names[old]} = {describe(keywords[names[old]])}",
                        fix=f"drop {old}=, the name of earlier versions",
                    )
                message = f"{old}= of {name} is {names[old]}= now; the next version will not take {old}="
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                keywords[names[old]] = keywords.pop(old)
            return function(*args, **keywords)

        return cast(F, call)

    return decorate
