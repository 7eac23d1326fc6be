"""Derivatives of a kernel in float64: forward mode is reverse mode transposed, and both are what differences say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import kind_of
from tilekern.testing.calls import cotangent
from tilekern.testing.simulation import INTERPRETER, run_at

# Steps of the differences, relative to inputs of size 1.
_STEP = 2.0**-17
_ROUNDING, _TRUNCATION = 1e-9, 1e-6
# Two steps whose differences disagree by more have a corner or a jump between them.
_SMOOTH = 1e-3


def derivative_problem(
    function: Callable[..., list[Any]], arrays: Sequence[Array], gradients: Sequence[Array], seed: int
) -> str:
    """The way in which derivatives disagree, in words; "" if they agree.

    Args:
      function: of flat arrays, to flat results.
      arrays: of float64, and of integers.
      gradients: of the results' product with the cotangents of `seed`, by each array of floats.
      seed: of cotangents and tangents.
    """
    moving = [n for n, x in enumerate(arrays) if kind_of(x.dtype) == "float"]
    random: Any = np.random.default_rng(seed)
    tangents: list[Array] = [random.standard_normal(arrays[n].shape) for n in moving]

    def product(*floats: Any) -> Any:
        float_of = dict(zip(moving, floats, strict=True))
        results = function(*(float_of.get(n, x) for n, x in enumerate(arrays)))
        floats_of = [x for x in results if kind_of(np.dtype(x.dtype)) == "float"]
        terms = ((x * cotangent(x, seed + n)).sum() for n, x in enumerate(floats_of))
        return sum(terms, start=jnp.zeros(()))

    def along(step: float) -> float:
        moved: list[Array] = [arrays[n] + step * t for n, t in zip(moving, tangents, strict=True)]
        return float(run_at(INTERPRETER, product, *moved))

    primals = [arrays[n] for n in moving]
    terms: list[Array] = [g * t for g, t in zip(gradients, tangents, strict=True)]
    reverse, size = float(sum(t.sum() for t in terms)), float(sum(np.abs(t).sum() for t in terms)) + _ROUNDING
    forward = float(run_at(INTERPRETER, lambda *floats: jax.jvp(product, floats, tuple(tangents))[1], *primals))
    if not np.isfinite(reverse):
        return ""
    if not abs(forward - reverse) <= _ROUNDING * size:
        return f"jax.jvp gives {forward!r} along a tangent, jax.vjp {reverse!r}: they are not each other's transpose"
    coarse, fine = ((along(h) - along(-h)) / (2 * h) for h in (_STEP, _STEP / 2))
    if not abs(coarse - fine) <= _SMOOTH * size:
        return ""
    if not abs(fine - reverse) <= 10 * abs(coarse - fine) + _TRUNCATION * size:
        return f"the derivative along a tangent is {reverse!r}, differences say {fine!r}"
    return ""
