"""`Incomparable`: comparisons and truth values that raise, in the place of Python's defaults."""

from __future__ import annotations

from typing import Any

from tilekern.errors import TilekernError


class Incomparable:
    """Base of objects that stand for values and have none themselves. Python would compare them by identity.

    `x is None`, dicts and sets work as for any object.
    """

    def no_value(self, use: str, *others: Any) -> TilekernError:
        """The error about a comparison by the operator `use`, or about a truth value: "bool"."""
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
