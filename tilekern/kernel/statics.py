"""Static arguments: the key that tells them apart, and Python numbers in the place of NumPy's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, replace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np


def static_key(keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """A cache key that tells apart values that are equal in Python where a body may compute with their difference.

    1, True, 1.0 and NumPy's scalars of this value are equal in Python, and 0.0 and -0.0 are: here they differ. The same
    holds for elements of tuples and frozensets, and for the fields of a dataclass that its `__eq__` compares. Any other
    object is compared by its class and its own `__eq__`, and so is a field that cannot be hashed.
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


def python_numbers(value: Any) -> Any:
    """A static argument with a Python int, float or bool in the place of each number of NumPy.

    A number of NumPy has a dtype, which tiles take on: `np.float64(3)` times a tile of float32 is a tile of float64
    under `jax.enable_x64`. A Python number takes on the dtype of the tile. Numbers in tuples, lists and dataclasses are
    replaced, too; arrays stay, also arrays without dims.
    """
    if isinstance(value, np.generic):
        return _of_numpy(cast(Any, value))
    kind = cast(type[Any], type(value))
    if isinstance(value, (tuple, list)):
        parts = list(map(python_numbers, cast(list[Any], value)))
        if all(a is b for a, b in zip(parts, cast(list[Any], value), strict=True)):
            return cast(Any, value)
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    fields: dict[str, Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    fields_of_init = {name: getattr(value, name) for name, field in fields.items() if field.init}
    changed = {name: new for name, old in fields_of_init.items() if (new := python_numbers(old)) is not old}
    return replace(value, **changed) if changed else value


def _of_numpy(value: Any) -> Any:
    for kind, number in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if jnp.issubdtype(value.dtype, kind):
            return number(value)
    return value
