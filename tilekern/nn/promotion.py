"""Dtypes and precisions of arguments, by the rules of JAX and Flax."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames
from tilekern.kernels.checks import refusal

hide_frames(__file__)

# Algorithms of JAX for products of float32, in the words of kernels; None multiplies as float32.
_ALGORITHMS = {
    "DEFAULT": None,
    "F32_F32_F32": None,
    "F64_F64_F64": None,
    "BF16_BF16_F32_X9": None,
    "TF32_TF32_F32_X3": None,
    "TF32_TF32_F32": "tf32",
    "BF16_BF16_F32": "bf16",
    "BF16_BF16_F32_X3": "bf16x3",
    "BF16_BF16_F32_X6": "bf16x6",
}


def promoted(arrays: tuple[Any, ...], dtype: Any = None) -> tuple[Any, ...]:
    """The arrays cast to one dtype, as Flax' `promote_dtype` does; None stays None.

    Without `dtype` it is the dtype to which the arrays promote, float32 at least for integers.
    """
    values = [None if x is None else jnp.asarray(x) for x in arrays]
    if dtype is None:
        dtype = jnp.result_type(*(x for x in values if x is not None))
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.promote_types(jnp.float32, dtype)
    return tuple(None if x is None else x.astype(dtype) for x in values)


def algorithm_of(function: str, precision: Any, *, exact: bool = False) -> str | None:
    """The name that kernels have for a precision of JAX: "BF16_BF16_F32" -> "bf16", `jax.lax.Precision.HIGH` -> None.

    None multiplies as float32.

    Args:
      function: the name for errors.
      precision: as of `jax.lax.dot_general`; of a pair, for both operands, if it is one.
      exact: the function has no other products than exact ones.

    Raises:
      ArgumentError: kernels have no such algorithm, or the function has not.
    """
    pair = cast(tuple[Any, ...], precision) if isinstance(precision, tuple | list) else (precision,)
    algorithms = {_algorithm(part) for part in pair}
    if len(algorithms) == 1 and (algorithms == {None} or not (exact or "unknown" in algorithms)):
        return algorithms.pop()
    names = [name for name, algorithm in _ALGORITHMS.items() if algorithm is None or not exact]
    expected = f"None, a jax.lax.Precision or its name, or one of {', '.join(names)}"
    raise refusal(function, "precision", expected, precision, "leave it out: float32 multiplies as float32")


def _algorithm(precision: Any) -> str | None:
    name = getattr(precision, "name", precision)
    if name in _ALGORITHMS:
        return _ALGORITHMS[name]
    try:
        jax.lax.Precision(precision)  # all of them are satisfied by exact products, and so is None
    except ValueError:
        return "unknown"
    return None
