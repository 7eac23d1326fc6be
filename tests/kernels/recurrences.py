"""Checks that tests of recurrences share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from tilekern.testing import assert_close, in_float64


def check(function: Callable[..., Any], definition: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """Compare both results of a recurrence with its definition, by the rule."""
    dtype = arrays[0].dtype
    with jax.enable_x64(dtype == np.float64):
        found, lows = function(*arrays), jax.jit(partial(definition, dtype=dtype))(*arrays)
    for out, oracle, low in zip(found, in_float64(definition, *arrays), lows, strict=True):
        assert_close(out, oracle, low, length=arrays[0].shape[1] + arrays[0].shape[-1])


def check_gradients(function: Callable[..., Any], definition: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """Of all arrays, with random cotangents."""
    low_of = partial(definition, dtype=arrays[0].dtype)
    random = np.random.default_rng(9)
    types = jax.eval_shape(low_of, *arrays)
    cotangents = [random.standard_normal(t.shape).astype(t.dtype) for t in types]
    found = jax.jit(lambda a, c: _pulled(function, a, tuple(c)))(arrays, cotangents)
    lows = jax.jit(lambda a, c: _pulled(low_of, a, tuple(c)))(arrays, cotangents)
    count = len(arrays)
    oracles = in_float64(lambda *a: _pulled(definition, a[:count], tuple(a[count:])), *arrays, *cotangents)
    for out, oracle, low in zip(found, oracles, lows, strict=True):
        assert_close(out, oracle, low, length=arrays[0].shape[1] * 12, factor=3)


def _pulled(function: Any, arrays: Any, cotangents: Any) -> Any:
    return jax.vjp(function, *arrays)[1](cotangents)


def packed(tokens: int, *, batch: int = 2) -> Any:
    """Ids of runs of one token, of a chunk of 8, over the border of chunks, and, in the second row, of all tokens."""
    ids = np.zeros((batch, tokens), np.int32)
    for number, start in enumerate((1, 8, 16, 21, 37)):
        ids[0, start:] = 5 - number
    return ids
