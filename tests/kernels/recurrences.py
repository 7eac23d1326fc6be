"""Checks that tests of recurrences share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

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


_STARTS = (0, 1, 3, 5, 8, 16, 21, 37)


def packed(tokens: int, *, batch: int = 2) -> Any:
    """Ids of the `runs`, which take turns at two numbers, and in the other rows of one run.

    Runs are of one token, of a chunk of 8, and over the border of chunks; the first chunk has four.
    """
    ids = np.zeros((batch, tokens), np.int32)
    for number, (start, stop) in enumerate(runs(tokens)):
        ids[0, start:stop] = 5 * (number % 2)
    return ids


def runs(tokens: int) -> Iterator[tuple[int, int]]:
    """The begin and the end of each run of `packed`."""
    return pairwise([*(start for start in _STARTS if start < tokens), tokens])


def tokens_of(arrays: Sequence[Any], tokens: slice) -> list[Any]:
    """Some tokens of the arrays [B, T, C]; arrays of fewer dims as they are."""
    return [x[:, tokens] if x.ndim == 3 else x for x in arrays]


def check_packed(run: Callable[..., Any], arrays: Sequence[Any], state: Any, tolerance: float) -> None:
    """Compare a call of packed sequences of one row with a call for each sequence."""
    tokens = arrays[0].shape[1]
    out, last = run(*arrays, state, segment_ids=packed(tokens, batch=1))
    for start, stop in runs(tokens):
        alone, last_alone = run(*tokens_of(arrays, slice(start, stop)), None if start else state)
        np.testing.assert_allclose(out[:, start:stop], alone, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(last, last_alone, rtol=tolerance, atol=tolerance)


def check_decoding(run: Callable[..., Any], arrays: Sequence[Any], state: Any, tolerance: float) -> None:
    """Compare a call in small blocks with a call for each token."""
    whole, last = run(*arrays, state, block_t=3, block_c=5)
    for t in range(arrays[0].shape[1]):
        out, state = run(*tokens_of(arrays, slice(t, t + 1)), state)
        np.testing.assert_allclose(out, whole[:, t : t + 1], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(state, last, rtol=tolerance, atol=tolerance)


def repeated_ids(batch: int, tokens: int) -> st.SearchStrategy[Any]:
    """Ids int32[batch, tokens] of three numbers, so that most come again behind another one."""
    of_row = st.lists(st.tuples(st.sampled_from([0, 7, -3]), st.integers(1, 6)), min_size=tokens, max_size=tokens)

    def ids(rows: list[list[tuple[int, int]]]) -> Any:
        return np.array([np.repeat(*zip(*row, strict=True))[:tokens] for row in rows], np.int32)

    return st.lists(of_row, min_size=batch, max_size=batch).map(ids)
