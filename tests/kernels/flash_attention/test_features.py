"""All features at once, values and gradients, by the rule; and each by itself where it has corners of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.tree_util import Partial

from tests.kernels.flash_attention.features import Featured, features, grads, in_float64, judge_all, values
from tilekern.kernels.flash_attention import block_map, flash_attention
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close

BLOCKS = {"block_q": 16, "block_k": 32, "backward_block_q": 32, "backward_block_k": 16}
ATTEND = partial(flash_attention, return_logsumexp=True)

# Each example compiles a dozen programs; in interpreters these are slow, too.
EXAMPLES = {"xla": 4, "llvm": 4, "triton": 1, "mosaic": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_values_and_gradients_of_all_features(dtype: str, backend: str) -> None:
    examples = max(1, EXAMPLES[backend] * settings().max_examples // 50 // (1 if dtype == "float32" else 4))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        featured = data.draw(features(dtype, longest=70 if backend in ("xla", "llvm") else 17))
        blocks = data.draw(st.sampled_from([{}, BLOCKS])) if backend in ("xla", "llvm") else {}
        judge_all(grads(ATTEND, featured, **blocks), featured)

    check()


# --- each by itself ---------------------------------------------------------------------------------------------------


def problem(queries: int, keys: int, batch: int = 2, heads: int = 4, groups: int = 2, width: int = 16) -> list[Any]:
    """Query, key and value."""
    random = np.random.default_rng(0)
    shapes = (queries, heads), (keys, groups), (keys, groups)
    return [random.standard_normal((batch, *shape, width), np.float32) for shape in shapes]


def prefix(b: Any, n: Any, i: Any, j: Any) -> Any:
    return (j <= i) | (j < 40)


def documents(ids: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return ids[b, i] == ids[b, j]


def by_head(b: Any, n: Any, i: Any, j: Any) -> Any:
    return j % (n + 1) == 0


IDS = np.sort(np.random.default_rng(1).integers(0, 4, (2, 180), np.int32))
MODS: dict[str, Any] = {"prefix": prefix, "documents": Partial(documents, IDS), "by_head": by_head}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", MODS)
def test_block_maps_change_nothing(name: str, backend: str) -> None:
    """Lengths of several tiles of the map, and of others; a map that the call makes, and that of a dense mask."""
    if backend in ("triton", "mosaic"):
        pytest.skip("needs a backend that is not interpreted")
    carries = {"mask_mod": MODS[name]}
    featured = Featured(*problem(150, 180), *((carries, {}) if isinstance(MODS[name], Partial) else ({}, carries)))
    blocks = {"block_q": 32, "block_k": 16}
    i, j = jnp.arange(150)[:, None], jnp.arange(180)[None, :]
    bn = ((b, n) for b in range(2) for n in range(4))
    dense = np.stack([np.broadcast_to(MODS[name](b, n, i, j), (150, 180)) for b, n in bn]).reshape(2, 4, 150, 180)
    made = block_map(MODS[name], queries=150, keys=180, batch=2, heads=4, block_q=64, block_k=32)
    judge_all(values(ATTEND, featured), featured)
    # Blocks that divide no power of two: the call's own map follows them.
    judge_all(grads(ATTEND, featured, block_q=100, block_k=48, backward_block_q=30), featured)
    plain = grads(ATTEND, featured, block_map=made, **blocks)
    judge_all(plain, featured)
    masked = grads(ATTEND, Featured(featured.q, featured.k, featured.v, {"mask": dense}), **blocks)
    for key, value in plain.items():
        np.testing.assert_allclose(value, masked[key], rtol=1e-4, atol=1e-5, err_msg=key)


def test_what_is_empty_is_not_computed(backend: str) -> None:
    """NaN does no harm in a tile that is left out, and spreads from one that is not."""
    if backend == "mosaic":
        pytest.skip("needs a backend that is not interpreted")
    q, k, v = problem(64, 256, batch=1)
    spoiled = [np.where(np.arange(256)[:, None, None] >= 128, np.nan, x) for x in (k, v)]
    blocks = {"block_q": 32, "block_k": 32, "backward_block_q": 32, "backward_block_k": 32}

    def attend(**keywords: Any) -> bool:
        gradients = jax.jit(jax.grad(lambda q: flash_attention(q, *spoiled, **keywords, **blocks).sum()))(q)
        return bool(np.isfinite(gradients).all())

    ids = np.arange(64)[None] // 16, np.arange(256)[None] // 16
    far = np.arange(64)[:, None] + 64 >= np.arange(256)[None, :]
    assert not attend()
    assert attend(causal=True) and attend(window=(None, 60)) and attend(segment_ids=ids)
    assert attend(q_offset=np.array([-3]), causal=True) and attend(kv_lengths=np.array([128]))
    made = block_map(far[None, None], block_q=32, block_k=32)
    assert attend(mask=far[None, None], block_map=made)


def of_long_tables(diagonal: Any, rows: Any, columns: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    """Read at n twice, at i and a number, at j and what is made of n; once more at i."""
    return s * diagonal[n, n] + rows[i, 1] * columns[n % 2, j] - rows[i, 0]


def test_carried_arrays_may_be_longer_than_there_are_positions() -> None:
    random = np.random.default_rng(1)
    carried = (random.standard_normal(shape, np.float32) for shape in ((6, 5), (40, 2), (3, 50)))
    featured = Featured(*problem(19, 23), {"score_mod": Partial(of_long_tables, *carried)}, {"causal": True})
    judge_all(grads(ATTEND, featured), featured)


@pytest.mark.parametrize("empty", ["queries", "keys", "both"])
def test_no_queries_or_no_keys(empty: str) -> None:
    q, k, v = problem(0 if empty != "keys" else 5, 0 if empty != "queries" else 7)
    out, logsumexp = flash_attention(q, k, v, return_logsumexp=True)
    assert (np.asarray(out) == 0).all() and np.isneginf(logsumexp).all()
    for gradient in jax.grad(lambda *x: flash_attention(*x).sum(), (0, 1, 2))(q, k, v):
        assert (np.asarray(gradient) == 0).all()


def of_table(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[n, i, j]


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (5, 0)])
def test_an_array_without_elements_is_carried(queries: int, keys: int) -> None:
    q, k, v = problem(queries, keys)
    table = np.zeros((4, queries, keys), np.float32)

    def total(q: Any, table: Any) -> jax.Array:
        return flash_attention(q, k, v, score_mod=Partial(of_table, table)).sum()

    for gradient in jax.grad(total, (0, 1))(q, table):
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("width", "value_width"), [(16, 512), (512, 16), (192, 128), (80, 72)])
def test_wide_heads(width: int, value_width: int) -> None:
    q, k, _ = problem(19, 23, 1, 2, 1, width)
    v = problem(19, 23, 1, 2, 1, value_width)[2]
    featured = Featured(q, k, v, statics={"causal": True})
    judge_all(grads(ATTEND, featured), featured)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("precision", ["highest", "tf32", "bf16x3", ("bf16x3", None), (None, "tf32")], ids=str)
def test_precision(precision: Any, backend: str) -> None:
    """A backend may ignore what only lowers precision; here, it may not lose more than a product of bfloat16 does."""
    q, k, v = problem(19, 23)
    found = flash_attention(q, k, v, precision=precision)
    with jax.enable_x64(True):
        exact = np.asarray(reference(*(x.astype(np.float64) for x in (q, k, v)))[0])
    low, _ = reference(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)))
    error, naive = (float(np.abs(np.asarray(x, np.float64) - exact).max()) for x in (found, low))
    assert error <= (naive if precision != "highest" else 1e-5)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    q, k, v = problem(64, 128)
    ones, zeros = np.ones_like(v), np.zeros_like(q)
    out = np.asarray(flash_attention(zeros, k, ones, dropout_rate=0.25, dropout_key=jax.random.key(0)))
    # Each is the mean of 128 weights that are 0, or 1 / 0.75 with probability 0.75.
    deviation = np.sqrt(0.25 / 0.75 / 128)
    assert abs(out[..., 0].mean() - 1) < 6 * deviation / np.sqrt(out[..., 0].size)
    assert 0.9 * deviation < out[..., 0].std() < 1.1 * deviation
    again = flash_attention(zeros, k, ones, dropout_rate=0.25, dropout_key=jax.random.key_data(jax.random.key(0)))
    np.testing.assert_array_equal(out, again)
    assert (np.asarray(flash_attention(q, k, v, dropout_rate=1.0, dropout_key=jax.random.key(0))) == 0).all()


def test_broadcast_dropout_is_that_of_the_first_head_everywhere() -> None:
    q, k, v = problem(24, 40)
    zeros, ones = np.zeros_like(q), np.ones_like(v)
    keywords = {"dropout_rate": 0.5, "dropout_key": jax.random.key(4)}
    alike, own = (
        np.asarray(flash_attention(zeros, k, ones, dropout_broadcast=flag, **keywords))[..., 0]
        for flag in (True, False)
    )
    np.testing.assert_array_equal(alike, np.broadcast_to(own[:1, :, :1], own.shape))
    assert (own != alike).any(axis=(0, 1))[1:].all()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(5, 3), (None, 3), (5, None), (60, 60), (0, 0)], ids=str)
def test_far_offsets_of_a_window(window: Any, causal: bool, backend: str) -> None:
    """Offsets at which no query, some and all queries see a key, and beyond."""
    if backend in ("triton", "mosaic"):
        pytest.skip("needs a backend that is not interpreted")
    offsets = np.array([-(2**31), -90, -25, -19, 0, 22, 31, 90, 2**31 - 1], np.int32)
    q, k, v = problem(19, 23, batch=9)
    featured = Featured(q, k, v, {"q_offset": offsets}, {"window": window, "causal": causal})
    judge_all(values(ATTEND, featured), featured)
    oracle, low = values(reference, in_float64(featured))["out"], values(reference, featured)["out"]
    for b in (1, 3, 5, 7):
        one = flash_attention(q[b], k[b], v[b], q_offset=int(offsets[b]), **featured.statics)
        assert_close(one, oracle[b], low[b], length=16 + 23)


def test_a_window_beyond_all_positions_is_none() -> None:
    q, k, v = problem(19, 23)
    found, expected = (flash_attention(q, k, v, window=window, q_offset=-4) for window in ((2**40, 2**40), None))
    np.testing.assert_array_equal(found, expected)


def test_an_offset_of_each_element_and_a_static_one_mean_the_same() -> None:
    q, k, v = problem(33, 40)
    attend: Callable[..., Any] = partial(flash_attention, window=(9, 3), causal=False, return_logsumexp=True)
    for found, expected in zip(attend(q, k, v, q_offset=5), attend(q, k, v, q_offset=np.full(2, 5)), strict=True):
        np.testing.assert_array_equal(found, expected)
