"""Tiles in registers: NumPy arrays with Triton's arithmetic, and products that have been started."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import kind_of, round_to


class Tile:
    """A tile, or a scalar."""

    def __init__(self, data: Any) -> None:
        self.data: Array = np.asarray(data)

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return self.data.dtype

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        """The same elements in another dtype, floats rounded to nearest; or their bits."""
        if bitcast:
            return Tile(self.data.view(dtype))
        floats = kind_of(self.data.dtype) == kind_of(np.dtype(dtype)) == "float"
        return Tile(round_to(self.data, np.dtype(dtype)) if floats else self.data.astype(dtype))

    def __getitem__(self, index: Any) -> Tile:
        return Tile(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __invert__(self) -> Tile:
        return Tile(~self.data)

    def __index__(self) -> int:
        return int(self.data)

    def _of(self, other: Any, function: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
        if not isinstance(other, Tile | bool | int | float):
            return NotImplemented
        pair = self.data, other.data if isinstance(other, Tile) else other
        return Tile(function(*(pair[::-1] if swapped else pair)))


def _install(name: str, function: Callable[[Any, Any], Any]) -> None:
    def plain(self: Tile, other: Any) -> Any:
        return self._of(other, function)  # pyright: ignore[reportPrivateUsage] -- methods of the class

    def swapped(self: Tile, other: Any) -> Any:
        return self._of(other, function, swapped=True)  # pyright: ignore[reportPrivateUsage] -- as above

    setattr(Tile, f"__{name}__", plain)
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Tile, f"__r{name}__", swapped)


def _divided(x: Any, y: Any) -> Any:
    """The quotient of integers, rounded toward zero as in Triton."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def _remainder(x: Any, y: Any) -> Any:
    return x - _divided(x, y) * y


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
):
    _install(_name, getattr(operator, f"{_name}_" if _name in ("and", "or") else _name))
_install("floordiv", _divided)
_install("mod", _remainder)


class Started:
    """A product that may still be under way: its value exists once it has been waited for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.value: Array = np.empty(0, np.float32)


def integer(value: Any) -> int:
    """A scalar as a number of Python."""
    return int(value.data) if isinstance(value, Tile) else int(value)


def elements(value: Any) -> Any:
    """The elements of a tile; a number stays a number, and takes the dtype of the other operand."""
    return value.data if isinstance(value, Tile) else value
