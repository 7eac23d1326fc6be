"""Attention of each token to the keys that it selects: DeepSeek Sparse Attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.mla_attention.test_kernel import LENGTHS, ROPE, SETTINGS, WIDTH, as_pair, check, problem
from tilekern.errors import ArgumentError
from tilekern.kernels.index_scores import select_keys
from tilekern.kernels.mla_attention import mla_attention


def selection(arguments: list[Any], count: int = 9, seed: int = 1) -> np.ndarray:
    """int32[T, count]: positions that the tokens see, each at most once, among others that they do not see."""
    random = np.random.default_rng(seed)
    query, _, _, _, starts, _ = arguments
    chosen = random.choice([-1, -(2**31), 48, 10**6, 2**31 - 1], (len(query), count)).astype(np.int32)
    for t in range(starts[-2]):
        order = random.permutation(48)[: random.integers(0, count + 1)]
        chosen[t, random.permutation(count)[: len(order)]] = order
    return chosen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_floats(kind: str, dtype: str) -> None:
    """Latents that no token sees are NaN."""
    arguments, _ = problem(kind, dtype)
    check(arguments, selected=selection(arguments))


@pytest.mark.parametrize("page", [1, 6, 48])
@pytest.mark.parametrize("separate", [False, True])
def test_pages(page: int, separate: bool) -> None:
    arguments, _ = problem(page=page)
    chosen = selection(arguments, 30)
    if separate:
        arguments[0], arguments[1] = as_pair(arguments[0]), as_pair(arguments[1])
    check(arguments, selected=chosen, parts=2)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_caches(dtype: str, gathered: bool) -> None:
    arguments, _ = problem()
    latents = arguments[1]
    unused = np.isnan(latents).all(axis=2)
    arguments[1] = np.asarray(jnp.asarray(np.nan_to_num(latents) * 20).astype(dtype))
    scale, other = np.random.default_rng(1).uniform(0.01, 0.05, (2, *unused.shape)).astype(np.float32)
    scale[unused] = other[unused] = np.nan
    scales = {"latent_scale": scale, "rope_scale": other}
    check(arguments, selected=selection(arguments), **scales, parts=2, gathered=gathered)


def test_all_keys_in_any_order_are_plain_attention() -> None:
    arguments, _ = problem()
    every = np.random.default_rng(0).permuted(np.tile(np.arange(48, dtype=np.int32), (len(arguments[0]), 1)), axis=1)
    found = mla_attention(*arguments, **SETTINGS, selected=every, return_logsumexp=True)
    for ours, theirs in zip(found, mla_attention(*arguments, **SETTINGS, return_logsumexp=True), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_token_that_selects_nothing_is_0() -> None:
    arguments, _ = problem()
    none = np.full((len(arguments[0]), 4), -1, np.int32)
    for chosen in (none, none[:, :0]):
        out, logsumexp = mla_attention(*arguments, **SETTINGS, selected=chosen, return_logsumexp=True)
        assert (out == 0).all() and (logsumexp == -jnp.inf).all()


def test_a_page_that_is_not_in_the_cache_has_latents_of_0() -> None:
    arguments, _ = problem()
    query, latents, _, table, *_ = arguments
    chosen, token = np.full((len(query), 3), -1, np.int32), arguments[4][1]  # the token of the sequence of 33 keys
    chosen[token] = 2, 17, 30
    missing, zeros = table.copy(), latents.copy()
    missing[1, 2] = 10**6
    zeros[table[1, 2]] = 0
    found = mla_attention(query, latents, arguments[2], missing, *arguments[4:], **SETTINGS, selected=chosen)
    expected = mla_attention(query, zeros, *arguments[2:], **SETTINGS, selected=chosen)
    np.testing.assert_allclose(found[token], expected[token], rtol=2e-5, atol=2e-6)


def test_a_step_of_sparse_attention() -> None:
    """The indexer's keys, new latents and attention to the best four keys, under jit, for both forms of calls."""
    arguments, _ = problem("decode")
    query, latents, lengths, table, starts, count = arguments
    random = np.random.default_rng(2)
    keys = random.standard_normal((*latents.shape[:2], 8)).astype(np.float32)
    of_index = random.standard_normal((len(query), 3, 8)).astype(np.float32)
    weights, new = random.standard_normal((len(query), 3)).astype(np.float32), query[:, 0] / 2

    @jax.jit
    def step(latents: Any) -> Any:
        tables = lengths, table, starts, count
        chosen = select_keys(of_index, weights, keys, *tables, num_keys=4)
        return chosen, mla_attention(query, latents, *tables, **SETTINGS, selected=chosen, new_latents=new)

    chosen, (out, pages) = step(latents)
    expected = mla_attention(query, pages.kv_pages, *arguments[2:], **SETTINGS, selected=chosen)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    assert (np.sort(chosen[1])[:3] >= 0).all() and out.shape == (len(query), query.shape[1], WIDTH)


# --- programs --------------------------------------------------------------------------------------------------------

QUERY, LATENTS = jnp.ones((2, 4, WIDTH + ROPE)), jnp.ones((3, 4, WIDTH + ROPE))
ONES, TABLE = jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "selected", [jnp.ones((2, 3)), jnp.ones(2, int), jnp.ones((3, 3), int)], ids=["floats", "one dim", "tokens"]
)
def test_wrong_selections(selected: Any) -> None:
    with pytest.raises(ArgumentError, match="mla_attention cannot take this selected") as error:
        mla_attention(QUERY, LATENTS, ONES, TABLE, **SETTINGS, selected=selected)
    assert "-1" in error.value.fix
