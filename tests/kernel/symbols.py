"""Types with symbolic sizes, and programs that are exported with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.testing import assert_close

SCOPE = jax.export.SymbolicScope()


def symbol(*shape: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A type in whose shape the strings, such as "b", are symbols."""
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(", ".join(map(str, shape)), scope=SCOPE), dtype)


def exported(function: Callable[..., Any], *types: Any, vjp_order: int = 0) -> Callable[..., Any]:
    again = jax.export.deserialize(jax.export.export(jax.jit(function))(*types).serialize(vjp_order))
    return jax.jit(again.call)


def close(found: Any, static: Any, arrays: Sequence[np.ndarray]) -> None:
    """Assert that a result is that of a call of known sizes, but for rounding in sums over all elements of `arrays`."""
    low = np.asarray(static)
    assert_close(found, low.astype(np.float64), low, length=sum(x.size for x in arrays))
