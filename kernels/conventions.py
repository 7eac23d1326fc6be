"""Conventions of public functions: launch options of products, and old names of arguments and of imports."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, cast

from tilekern.authoring import describe, hide_frames, unknown_keyword
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
            raise no_keyword(function, name, value, names)


def no_keyword(function: str, keyword: str, value: object, options: Iterable[str]) -> ArgumentError:
    """The error for a keyword that is neither a parameter nor an option of a function of `tilekern.kernels`."""
    public = getattr(importlib.import_module("tilekern.kernels"), function)
    parameters = inspect.signature(public).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    return unknown_keyword(function, keyword, value, names, options)


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


def moved(package: str, **modules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a folder, for names that its modules export now: `moved(__name__, Config="arguments")`.

    For one version `from package import Config` works, too, with a DeprecationWarning at the importing line.
    """

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = f"{package}.{modules[name]}"
        message = f"{package} does not export {name} any longer; write `from {module} import {name}`"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), name)

    return attribute


def with_names_of(folder: types.ModuleType, function: Any) -> Any:
    """The function, with the names of its folder as attributes: `softmax.softmax`, `softmax.reference`.

    Earlier `from tilekern.kernels import softmax` gave the folder. For one version programs that were written for it
    work, with a DeprecationWarning at the line of the call.
    """
    if isinstance(function, types.FunctionType):
        for name in folder.__all__:
            setattr(function, name, _warns(getattr(folder, name), folder.__name__, name))
    return function


def _warns(function: Callable[..., Any], package: str, name: str) -> Callable[..., Any]:
    folder = package.rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        message = f"{folder} of tilekern.kernels is the function now; write `from {package} import {name}`"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return function(*args, **keywords)

    return call
