"""`Incomparable`: comparisons, truth values and operators that raise, instead of Python's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.errors import TilekernError

# Ufuncs that NumPy calls for its operators, and the method of the other operand for the same operator.
_REFLECTED = {
    "add": "__radd__",
    "subtract": "__rsub__",
    "multiply": "__rmul__",
    "divide": "__rtruediv__",
    "equal": "__eq__",
    "not_equal": "__ne__",
    "less": "__gt__",
    "less_equal": "__ge__",
    "greater": "__lt__",
    "greater_equal": "__le__",
}


def _refused(use: str) -> Callable[..., Any]:
    """Make an operator that raises."""

    def operator(self: Incomparable, *others: Any) -> Any:
        raise self.no_value(use, *others)

    return operator


class Incomparable:
    """Base of objects without a value, such as refs and tiles, which Python would compare by identity.

    `x is None`, dicts and sets work as for any object. A subclass may define the operators that it supports.
    """

    __add__: Any = _refused("+")
    __radd__: Any = _refused("+")
    __sub__: Any = _refused("-")
    __rsub__: Any = _refused("-")
    __mul__: Any = _refused("*")
    __rmul__: Any = _refused("*")
    __truediv__: Any = _refused("/")
    __rtruediv__: Any = _refused("/")
    __floordiv__: Any = _refused("//")
    __rfloordiv__: Any = _refused("//")
    __mod__: Any = _refused("%")
    __rmod__: Any = _refused("%")
    __pow__: Any = _refused("**")
    __rpow__: Any = _refused("**")
    __matmul__: Any = _refused("@")
    __rmatmul__: Any = _refused("@")
    __and__: Any = _refused("&")
    __rand__: Any = _refused("&")
    __or__: Any = _refused("|")
    __ror__: Any = _refused("|")
    __xor__: Any = _refused("^")
    __rxor__: Any = _refused("^")
    __lshift__: Any = _refused("<<")
    __rlshift__: Any = _refused("<<")
    __rshift__: Any = _refused(">>")
    __rrshift__: Any = _refused(">>")
    __neg__: Any = _refused("-")
    __pos__: Any = _refused("+")
    __invert__: Any = _refused("~")
    __abs__: Any = _refused("abs")
    __float__: Any = _refused("float")
    __int__: Any = _refused("int")
    __len__: Any = _refused("len")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Hook of NumPy: operators of its scalars and arrays call this object's operator; other ufuncs are refused."""
        others = [x for x in inputs if x is not self]
        if ufunc.__name__ in _REFLECTED and len(others) == 1:
            return getattr(self, _REFLECTED[ufunc.__name__])(others[0])
        raise self.no_value(f"np.{ufunc.__name__}")

    def __format__(self, specification: str) -> str:
        if specification:
            raise self.no_value(f"format by {specification!r} of ")
        return str(self)

    def no_value(self, use: str, *others: Any) -> TilekernError:
        """Make the error for an operator `use` with other operands, or for a use of the object alone, as in "bool"."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        raise self.no_value("==", other)

    def __ne__(self, other: object) -> bool:
        raise self.no_value("!=", other)

    def __lt__(self, other: object) -> bool:
        raise self.no_value("<", other)

    def __le__(self, other: object) -> bool:
        raise self.no_value("<=", other)

    def __gt__(self, other: object) -> bool:
        raise self.no_value(">", other)

    def __ge__(self, other: object) -> bool:
        raise self.no_value(">=", other)

    def __contains__(self, value: object) -> bool:
        raise self.no_value("contains", value)

    def __bool__(self) -> bool:
        raise self.no_value("bool")

    __hash__ = object.__hash__
