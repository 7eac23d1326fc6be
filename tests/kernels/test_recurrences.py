"""Packed sequences in all recurrences, where numbers come again: within a chunk, and behind its border."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.recurrences import packed, repeated_ids
from tests.kernels.token_by_token import BATCH, RECURRENCES, starts_of
from tilekern.kernels.linear_attention import linear_attention
from tilekern.kernels.recurrences import as_runs
from tilekern.testing import assert_close, in_float64

TOKENS = 21
NAMES = pytest.mark.parametrize("name", RECURRENCES)
OF_EACH_MODULE = pytest.mark.parametrize("name", ["linear_attention", "causal_conv1d", "rg_lru", "selective_scan"])


@partial(jax.jit, static_argnums=(0, 1))
def pulled(name: str, block_t: int, arrays: Any, cotangents: Any, ids: Any) -> Any:
    """Both results and the cotangents of all arrays."""
    function = partial(RECURRENCES[name].function, segment_ids=ids, block_t=block_t)
    found, pull = jax.vjp(function, *arrays)
    return [*found, *pull(cotangents)]


@cache
def definition(name: str) -> Callable[..., Any]:
    """The same token by token, of where sequences begin, two cotangents and the arrays."""

    def of_tokens(starts: Any, out: Any, last: Any, *arrays: Any) -> Any:
        found, pull = jax.vjp(partial(RECURRENCES[name].definition, starts), *arrays)
        return [*found, *pull((out, last))]

    return of_tokens


@NAMES
@settings(max_examples=8)
@given(ids=repeated_ids(BATCH, TOKENS), block_t=st.sampled_from([8, 32]), seed=st.integers(0, 99))
def test_results_and_gradients_of_packed_sequences(name: str, ids: Any, block_t: int, seed: int) -> None:
    """In three chunks, and in one of more tokens than there are."""
    arrays = RECURRENCES[name].problem(TOKENS, seed)
    random = np.random.default_rng(seed + 1)
    types = jax.eval_shape(partial(RECURRENCES[name].definition, starts_of(ids)), *arrays)
    cotangents = tuple(random.standard_normal(t.shape).astype(np.float32) for t in types)

    found = pulled(name, block_t, arrays, cotangents, ids)
    given = starts_of(ids), *cotangents, *arrays
    oracles, lows = in_float64(definition(name), *given), jax.jit(definition(name))(*given)
    for x, oracle, low in zip(found, oracles, lows, strict=True):
        assert_close(x, oracle, np.asarray(low), length=TOKENS * 12, factor=3)


@NAMES
def test_tokens_of_other_sequences_are_multiplied_by_zero(name: str) -> None:
    """The bits of a number's sequences are the same beside any others."""
    recurrence, ids = RECURRENCES[name], packed(TOKENS)
    of_zero = ids == 0

    def changed(x: Any) -> Any:
        grown = np.where(of_zero.reshape(*of_zero.shape, *[1] * (x.ndim - 2)), x, 64 * x)
        return grown.astype(x.dtype)

    arrays = recurrence.problem(TOKENS)
    beside = [changed(x) if x.shape[:2] == ids.shape else x for x in arrays]
    function = jax.jit(partial(recurrence.function, block_t=8))
    out, other = (function(*a, segment_ids=ids)[0] for a in (arrays, beside))
    np.testing.assert_array_equal(out[of_zero], other[of_zero])
    assert (out[~of_zero] != other[~of_zero]).any()


@OF_EACH_MODULE
def test_ids_of_any_integers(name: str) -> None:
    """Numbers that 32 bits, or JAX without 64-bit types, would take for the same are different."""
    arrays = RECURRENCES[name].problem(TOKENS)
    function = partial(RECURRENCES[name].function, block_t=8)
    expected = function(*arrays, segment_ids=packed(TOKENS))
    far = [("int8", -128, 127), ("uint8", 0, 255), ("int16", -1, 0), ("uint32", 0, 2**32 - 1)]
    far += [("int32", -(2**31), 2**31 - 1), ("int64", 0, 2**32), ("int64", -(2**63), 2**63 - 1), ("uint64", 0, 2**63)]
    for dtype, zero, other in far:
        ids = np.where(packed(TOKENS) == 0, np.dtype(dtype).type(zero), np.dtype(dtype).type(other))
        for found, x in zip(function(*arrays, segment_ids=ids), expected, strict=True):
            np.testing.assert_array_equal(found, x, err_msg=f"{dtype} {zero} {other}")


@pytest.mark.one_backend
def test_traced_ids_of_64_bits() -> None:
    ids = np.array([[0, 2**32, 2**32, 0, -(2**63)], [1, 1, 1, 1, 1]])
    with jax.enable_x64(True):
        found = jax.jit(as_runs)(jax.numpy.asarray(ids))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(starts_of(np.asarray(found)), starts_of(ids))
    assert as_runs(ids[:, :0]).shape == (2, 0)


@OF_EACH_MODULE
def test_vmap_of_ids(name: str) -> None:
    """Ids of each run, for arrays that all runs share."""
    arrays = RECURRENCES[name].problem(TOKENS)
    ids = np.stack([packed(TOKENS), np.roll(packed(TOKENS), 3, axis=1), np.zeros((BATCH, TOKENS), np.int32)])
    function = partial(RECURRENCES[name].function, *arrays, block_t=8)
    mapped = jax.vmap(lambda ids: function(segment_ids=ids))(ids)
    for n, of_run in enumerate(ids):
        for found, x in zip(mapped, function(segment_ids=of_run), strict=True):
            np.testing.assert_allclose(found[n], x, rtol=1e-6, atol=1e-6)


@pytest.mark.one_backend
def test_many_sequences_in_a_long_chunk() -> None:
    """Sums of log decays of more than 297 tokens with decays of 0 do not round those of the others."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((1, 640, 1, 2)).astype(np.float32) for _ in range(3))
    decays = np.full((1, 640, 1), -0.002, np.float32)
    ids = np.minimum(np.arange(640), 500)[None] % 2
    given = starts_of(ids), query, key, value, decays, np.zeros((1, 1, 2, 2), np.float32)
    found = linear_attention(*given[1:], segment_ids=ids, block_t=640)
    oracles = in_float64(RECURRENCES["linear_attention"].definition, *given)
    for x, oracle in zip(found, oracles, strict=True):
        assert_close(x, oracle, oracle.astype(np.float32), length=640)
