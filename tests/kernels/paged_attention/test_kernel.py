from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tilekern.errors import ArgumentError
from tilekern.kernels.paged_attention import paged_attention, ragged_paged_attention, reference
from tilekern.kernels.paged_attention.cases import CASES, Case
from tilekern.testing import assert_close, in_float64

HEADS, GROUPS, WIDTH = 6, 2, 16
LENGTHS = {"mixed": ((7, 1, 0, 9, 1, 2), (20, 33, 5, 9, 47, 3)), "decode": ((1, 1, 1), (1, 48, 0))}
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def problem(
    kind: str = "mixed", dtype: Any = "float32", *, page: int = 8, seed: int = 0, spare: int = 3
) -> tuple[list[Any], np.ndarray]:
    """The arguments of `ragged_paged_attention`, and True for each token of a sequence.

    There are `spare` tokens and a row of the tables behind the last sequence. Keys and entries of tables that nothing
    needs are NaN and random numbers.
    """
    random = np.random.default_rng(seed)
    tokens, lengths = LENGTHS[kind]
    sequences, table = len(tokens), -(-48 // page)
    starts = np.full(sequences + 2, 99, np.int32)
    starts[: sequences + 1] = np.cumsum([0, *tokens])
    total = sum(tokens) + spare
    query = random.standard_normal((total, HEADS, WIDTH)).astype(jnp.dtype(dtype))
    pages = np.full((sequences * table + 4, page, 2 * GROUPS, WIDTH), np.nan, jnp.dtype(dtype))
    indices = random.permutation(len(pages))[: sequences * table].reshape(sequences, table).astype(np.int32)
    for row, length in zip(indices, lengths, strict=True):
        for n in range(length):
            pages[row[n // page], n % page] = random.standard_normal(pages.shape[2:])
        row[-(-length // page) :] = random.integers(-3, 2**31 - 1, table - -(-length // page))
    indices = np.concatenate([indices, random.integers(-(2**31), 2**31 - 1, (1, table))]).astype(np.int32)
    lengths = np.array([*lengths, 7], np.int32)
    return [query, pages, lengths, indices, starts, np.array([sequences], np.int32)], np.arange(total) < sum(tokens)


def check(arguments: list[Any], **keywords: Any) -> None:
    """The kernel agrees with the definition by the rule; blocks are of the kernel alone."""
    blocks = {name: keywords.pop(name) for name in ("few", "parts", "block_q") if name in keywords}
    leaves, tree = jax.tree.flatten(arguments)

    def definition(*leaves: Any, dtype: Any = None) -> Any:
        return reference(*jax.tree.unflatten(tree, leaves), return_logsumexp=True, **keywords, dtype=dtype)

    with jax.enable_x64(arguments[0].dtype == np.float64):
        found = ragged_paged_attention(*arguments, return_logsumexp=True, **keywords, **blocks)
        lows = jax.jit(partial(definition, dtype=arguments[0].dtype))(*leaves)
    for out, oracle, low in zip(found, in_float64(definition, *leaves), lows, strict=True):
        assert_close(out, oracle, np.asarray(low).astype(out.dtype), length=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LENGTHS)
def test_floats(kind: str, dtype: str) -> None:
    check(problem(kind, dtype)[0])


@pytest.mark.parametrize("page", [1, 6, 16, 48])
def test_pages(page: int) -> None:
    check(problem(page=page)[0])


@pytest.mark.parametrize(
    "blocks", [{"few": 1, "parts": 3, "block_q": 1}, {"few": 3, "parts": 7, "block_q": 5}, {"few": 9, "block_q": 64}]
)
def test_blocks_change_rounding_alone(blocks: dict[str, int]) -> None:
    check(problem()[0], **blocks)


@pytest.mark.parametrize("window", [1, 5, 100])
def test_windows(window: int) -> None:
    """A page before all windows of a sequence may hold anything."""
    arguments, _ = problem(page=4)
    if window == 5:
        arguments[1][arguments[3][1, :7]] = np.nan
    check(arguments, window=window, parts=2, few=1)


def test_bounds_scales_and_sinks() -> None:
    arguments, _ = problem()
    sinks = np.linspace(-1, 3, HEADS, dtype=np.float32)
    check(arguments, softcap=2.0, scale=0.7, sinks=sinks, parts=2)
    sinks[1] = -np.inf
    check(arguments, sinks=sinks, window=6)


def as_pair(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values in arrays of their own; values have fewer elements."""
    return pages[:, :, ::2].copy(), pages[:, :, 1::2, :10].copy()


def test_keys_and_values_in_two_arrays() -> None:
    arguments, _ = problem()
    arguments[1] = as_pair(arguments[1])
    check(arguments, parts=2)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", ["one", "heads", "keys"])
def test_quantized_caches(dtype: str, scales: str) -> None:
    """Scales of keys that nothing needs are NaN, too."""
    arguments, _ = problem(dtype="bfloat16" if scales == "heads" else "float32")
    pages = np.nan_to_num(arguments[1].astype(np.float32))
    unused = np.isnan(arguments[1].astype(np.float32)).all(axis=(2, 3))
    arguments[1] = np.asarray(jnp.asarray(pages * (30 if dtype == "int8" else 1)).astype(dtype))
    random = np.random.default_rng(1)
    shape = {"one": (), "heads": (GROUPS,), "keys": (*pages.shape[:2], GROUPS)}[scales]
    scale, other = random.uniform(0.01, 0.05, (2, *shape)).astype(np.float32)
    if scales == "keys":
        scale[unused] = other[unused] = np.nan
    check(arguments, key_scale=scale, value_scale=other, parts=2)


def test_tokens_of_no_sequence_are_0() -> None:
    arguments, exists = problem()
    out, logsumexp = ragged_paged_attention(*arguments, return_logsumexp=True)
    assert (out[~exists] == 0).all() and (logsumexp[~exists] == -jnp.inf).all()
    assert jnp.isfinite(out).all()


@pytest.mark.one_backend
def test_parts_of_sequences_merge_by_their_logsumexp() -> None:
    """A prefix that sequences share, in one call, and what follows it, in another one: the whole."""
    arguments, _ = problem("decode")
    query, pages, lengths, indices, starts, count = arguments
    whole = ragged_paged_attention(*arguments)
    first = np.minimum(lengths, 16)
    tokens = np.arange(len(query)) - 1
    parts = [
        ragged_paged_attention(query, pages, first, indices, starts, count, return_logsumexp=True),
        ragged_paged_attention(query, pages, lengths - first, indices[:, 2:], starts, count, return_logsumexp=True),
    ]
    largest = jnp.maximum(parts[0][1], parts[1][1])
    weights = [jnp.exp(part[1] - jnp.where(largest == -jnp.inf, 0, largest)) for part in parts]
    total = jnp.where(sum(weights) == 0, 1, sum(weights))
    merged = sum(part[0] * w[..., None] for part, w in zip(parts, weights, strict=True)) / total[..., None]
    assert tokens.size
    np.testing.assert_allclose(merged, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_cases(case: Case, dtype: str) -> None:
    small = case.small()
    arrays = small.arrays(jax.random.key(0), dtype)
    out = paged_attention(*arrays, **small.keywords)
    low = jax.jit(partial(reference, **small.keywords, dtype=dtype))(*arrays)
    oracle = in_float64(partial(reference, **small.keywords), *arrays)
    assert_close(out, oracle, low, length=small.keys)


def test_a_step_of_decoding_is_the_call_of_single_tokens() -> None:
    query, cache, lengths, table = replace(CASES[0].small(), sequences=5).arrays(jax.random.key(1), "float32")
    found = paged_attention(query, cache, lengths, table, parts=3)
    np.testing.assert_allclose(
        found, ragged_paged_attention(query, cache, lengths, table, jnp.arange(6)), rtol=2e-5, atol=2e-6
    )


def test_a_page_that_is_not_in_the_cache_reads_0() -> None:
    query, cache, lengths, table = CASES[0].small().arrays(jax.random.key(1), "float32")
    gone, zeros = table.at[0, 1].set(10**6), cache.at[table[0, 1]].set(0)
    np.testing.assert_array_equal(
        paged_attention(query, cache, lengths, gone), paged_attention(query, zeros, lengths, table)
    )


def test_lengths_beyond_the_table() -> None:
    """Keys behind the table do not exist; the tokens, the last ones of the sequence, see all keys that do."""
    query, cache, lengths, table = CASES[0].small().arrays(jax.random.key(1), "float32")
    most = table.shape[1] * cache.shape[1]
    np.testing.assert_array_equal(
        paged_attention(query, cache, jnp.full_like(lengths, most + 9), table),
        paged_attention(query, cache, jnp.full_like(lengths, most), table),
    )


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_calls_without_tokens_or_heads(shape: tuple[int, int]) -> None:
    tokens, heads = shape
    cache = jnp.ones((3, 4, 2 * heads, 8))
    out, logsumexp = ragged_paged_attention(
        jnp.ones((tokens, heads, 8)), cache, jnp.ones(2, int), jnp.zeros((2, 1), int), jnp.zeros(3, int),
        return_logsumexp=True,
    )  # fmt: skip
    assert out.shape == (tokens, heads, 8) and logsumexp.shape == (tokens, heads)


def test_an_empty_table_has_no_keys() -> None:
    out = paged_attention(jnp.ones((2, 4, 8)), jnp.ones((3, 4, 4, 8)), jnp.ones(2, int), jnp.zeros((2, 0), int))
    assert (out == 0).all()


def test_under_jit_and_vmap() -> None:
    query, cache, lengths, table = CASES[0].small().arrays(jax.random.key(1), "float32")
    run = jax.jit(jax.vmap(paged_attention, (0, None, None, None)))
    found = run(jnp.stack([query, query + 1]), cache, lengths, table)
    np.testing.assert_allclose(found[1], paged_attention(query + 1, cache, lengths, table), rtol=2e-5, atol=2e-6)


@pytest.mark.one_backend
def test_a_call_is_exported() -> None:
    arguments, _ = problem()
    exported = jax.export.export(jax.jit(ragged_paged_attention))(*arguments)
    found = jax.export.deserialize(exported.serialize()).call(*arguments)
    np.testing.assert_allclose(found, ragged_paged_attention(*arguments), rtol=2e-5, atol=2e-6)


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("separate", [False, True])
def test_devices_divide_the_heads(kind: AxisType, separate: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Without a collective; XLA, which merges parts, rounds arrays of other shapes otherwise."""
    arguments, _ = problem()
    pages = arguments[1]
    arguments[1] = (pages[:, :, ::2].copy(), pages[:, :, 1::2].copy()) if separate else pages
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(kind,))
    by_head = [NamedSharding(mesh, PartitionSpec(*(None,) * n, "heads", None)) for n in range(3)]
    query = jax.device_put(arguments[0], by_head[1])
    placed = jax.tree.map(lambda x: jax.device_put(x, by_head[2]), arguments[1])
    run = jax.jit(ragged_paged_attention)
    with jax.set_mesh(mesh):
        compiled = run.lower(query, placed, *arguments[2:]).compile()
        found = compiled(query, placed, *arguments[2:])
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    assert not recwarn.list and found.sharding.spec == PartitionSpec(None, "heads", None)
    np.testing.assert_allclose(found, run(*arguments), rtol=2e-6, atol=2e-7)


# --- wrong calls -----------------------------------------------------------------------------------------------------

QUERY, PAGES, ONES, TABLE = jnp.ones((2, 4, 8)), jnp.ones((3, 4, 4, 8)), jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((QUERY[0], PAGES, ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, PAGES[:, :, :3], ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, PAGES[..., :7], ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, PAGES.astype(jnp.bfloat16), ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, (PAGES, None), ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, (PAGES,), ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, (PAGES, PAGES[:2]), ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY[:, :3], PAGES, ONES, TABLE), {}, "the arrays of paged_attention do not fit"),
        ((QUERY, PAGES, ONES[:1], TABLE), {}, "the tables of paged_attention do not fit"),
        ((QUERY, PAGES, ONES + 0.5, TABLE), {}, "the tables of paged_attention do not fit"),
        ((QUERY, PAGES, ONES, TABLE[0]), {}, "the tables of paged_attention do not fit"),
        ((QUERY, PAGES, ONES, TABLE), {"window": 0}, "window must be a static integer of at least 1"),
        ((QUERY, PAGES, ONES, TABLE), {"softcap": 0}, "paged_attention cannot take this softcap"),
        ((QUERY, PAGES, ONES, TABLE), {"scale": "1"}, "paged_attention cannot take this scale"),
        ((QUERY, PAGES, ONES, TABLE), {"sinks": ONES * 1.0}, "paged_attention cannot take this sinks"),
        ((QUERY, PAGES, ONES, TABLE), {"key_scale": jnp.ones(4)}, "paged_attention cannot take this key_scale"),
    ],
)
def test_wrong_calls(arguments: Any, keywords: Any, summary: str) -> None:
    with pytest.raises(ArgumentError, match=summary) as error:
        paged_attention(*arguments, **keywords)
    assert error.value.fix and error.value.got


@pytest.mark.one_backend
@pytest.mark.parametrize("num_seqs", [-1, 3, 1.5, jnp.ones(2, int)])
def test_wrong_numbers_of_sequences(num_seqs: Any) -> None:
    with pytest.raises(ArgumentError, match="takes no such number of sequences"):
        ragged_paged_attention(QUERY, PAGES, ONES, TABLE, jnp.arange(3), num_seqs)
