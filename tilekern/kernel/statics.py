"""Static arguments: the key that tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, cast

import numpy as np


def static_key(keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """A cache key that tells apart values that are equal in Python where a body may compute with their difference.

    Equal in Python, but not here: 1, True, 1.0 and NumPy's scalars of this value; 0.0 and -0.0. The same holds for
    elements of tuples and frozensets, and for the fields of a dataclass that its `__eq__` compares. Any other object is
    known by its class and its own `__eq__`, and so is a field that cannot be hashed.
    """
    return tuple((name, _exact(value)) for name, value in keywords.items())


_PLAIN = frozenset({int, bool, str, type(None)})
"""Classes whose values are equal only if nothing tells them apart."""


def _exact(value: Any) -> Any:
    kind = cast(type[Any], type(value))
    if kind in _PLAIN:
        return kind, value
    if issubclass(kind, np.generic):
        return kind, value.tobytes()
    if issubclass(kind, float):
        return kind, float(value).hex()
    if issubclass(kind, tuple):
        return (kind, *map(_exact, value))
    if issubclass(kind, frozenset):
        return kind, frozenset(map(_exact, value))
    fields: dict[str, Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    exact = [_exact(getattr(value, name)) for name, field in fields.items() if field.compare]
    # The value comes last: NumPy's scalars in it do not compare with everything.
    return (kind, *(exact if is_hashable(tuple(exact)) else [e if is_hashable(e) else None for e in exact]), value)


def is_hashable(value: Any) -> bool:
    """True if a value can be hashed, all parts of it included."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
