from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tilekern.errors import ArgumentError
from tilekern.kernels.mla_attention import mla_attention, reference
from tilekern.kernels.mla_attention.cases import CASES, Case
from tilekern.kernels.paged_attention import ragged_paged_attention
from tilekern.testing import assert_close, in_float64

HEADS, WIDTH, ROPE = 6, 32, 8
SETTINGS = {"scale": 0.2, "value_width": WIDTH}
LENGTHS = {"mixed": ((7, 1, 0, 9, 1, 2), (20, 33, 5, 9, 47, 3)), "decode": ((1, 1, 1), (1, 48, 0))}


def problem(
    kind: str = "mixed", dtype: Any = "float32", *, page: int = 8, heads: int = HEADS, seed: int = 0
) -> tuple[list[Any], np.ndarray]:
    """The arguments of `mla_attention`, and True for each token of a sequence.

    There are 3 tokens and a row of the tables behind the last sequence. Latents and entries of tables that nothing
    needs are NaN and random numbers.
    """
    random = np.random.default_rng(seed)
    tokens, lengths = LENGTHS[kind]
    sequences, table = len(tokens), -(-48 // page)
    starts = np.full(sequences + 2, 99, np.int32)
    starts[: sequences + 1] = np.cumsum([0, *tokens])
    total = sum(tokens) + 3
    query = random.standard_normal((total, heads, WIDTH + ROPE)).astype(jnp.dtype(dtype))
    pages = np.full((sequences * table + 4, page, WIDTH + ROPE), np.nan, jnp.dtype(dtype))
    indices = random.permutation(len(pages))[: sequences * table].reshape(sequences, table).astype(np.int32)
    for row, length in zip(indices, lengths, strict=True):
        for n in range(length):
            pages[row[n // page], n % page] = random.standard_normal(WIDTH + ROPE)
        row[-(-length // page) :] = random.integers(-3, 2**31 - 1, table - -(-length // page))
    indices = np.concatenate([indices, random.integers(-(2**31), 2**31 - 1, (1, table))]).astype(np.int32)
    lengths = np.array([*lengths, 7], np.int32)
    return [query, pages, lengths, indices, starts, np.array([sequences], np.int32)], np.arange(total) < sum(tokens)


def check(arguments: list[Any], **keywords: Any) -> None:
    """The kernel agrees with the definition by the rule; blocks are of the kernel alone."""
    blocks = {name: keywords.pop(name) for name in ("few", "parts", "block_q", "gathered") if name in keywords}
    leaves, tree = jax.tree.flatten(arguments)
    dtype = leaves[0].dtype

    def definition(*leaves: Any, dtype: Any = None) -> Any:
        arrays = jax.tree.unflatten(tree, leaves)
        return reference(*arrays, return_logsumexp=True, **SETTINGS, **keywords, dtype=dtype)

    with jax.enable_x64(dtype == np.float64):
        found = mla_attention(*arguments, return_logsumexp=True, **SETTINGS, **keywords, **blocks)
        lows = jax.jit(partial(definition, dtype=dtype))(*leaves)
    for out, oracle, low in zip(found, in_float64(definition, *leaves), lows, strict=True):
        assert_close(out, oracle, np.asarray(low).astype(out.dtype), length=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_floats(kind: str, dtype: str) -> None:
    check(problem(kind, dtype)[0])


@pytest.mark.parametrize("page", [1, 6, 16, 48])
def test_pages(page: int) -> None:
    check(problem(page=page)[0])


@pytest.mark.parametrize("heads", [1, 20])
def test_heads(heads: int) -> None:
    check(problem(heads=heads)[0])


@pytest.mark.parametrize(
    "blocks", [{"few": 1, "parts": 3, "block_q": 1}, {"few": 3, "parts": 7, "block_q": 5}, {"few": 9, "block_q": 64}]
)
def test_blocks_change_rounding_alone(blocks: dict[str, int]) -> None:
    check(problem()[0], **blocks)


def as_pair(latents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Latents and rotated keys in arrays of their own."""
    return latents[..., :WIDTH].copy(), latents[..., WIDTH:].copy()


@pytest.mark.parametrize("separate", ["query", "cache", "all"])
def test_pairs_are_the_one_array(separate: str) -> None:
    arguments, _ = problem()
    expected = mla_attention(*arguments, **SETTINGS)
    query, cache, *tables = arguments
    query = as_pair(query) if separate in ("query", "all") else query
    cache = as_pair(cache) if separate in ("cache", "all") else cache
    np.testing.assert_array_equal(mla_attention(query, cache, *tables, **SETTINGS), expected)


@pytest.mark.one_backend
def test_a_cache_with_a_dim_of_one_head_is_the_same() -> None:
    query, cache, *tables = problem()[0]
    np.testing.assert_array_equal(
        mla_attention(query, cache[:, :, None], *tables, **SETTINGS), mla_attention(query, cache, *tables, **SETTINGS)
    )


def test_it_is_paged_attention_to_one_head_of_keys() -> None:
    query, cache, *tables = problem()[0]
    keys = cache[:, :, None]
    expected = ragged_paged_attention(query, (keys, keys[..., :WIDTH]), *tables, scale=SETTINGS["scale"])
    np.testing.assert_allclose(mla_attention(query, cache, *tables, **SETTINGS), expected, rtol=2e-5, atol=2e-6)


def test_it_is_attention_to_contiguous_keys() -> None:
    """The tables cut and shuffle the keys of each sequence, and do nothing else."""
    query, cache, lengths, table, starts, _ = problem()[0]
    out = mla_attention(query, cache, lengths, table, starts, 6, **SETTINGS)
    for s, (count, length) in enumerate(zip(*LENGTHS["mixed"], strict=True)):
        keys = np.concatenate([cache[page] for page in table[s, : -(-length // 8)]])[:length].astype(np.float64)
        rows = query[starts[s] : starts[s] + count].astype(np.float64)
        scores = np.einsum("tnc,sc->tns", rows, keys) * SETTINGS["scale"]
        last = length - count + np.arange(count)
        weights = np.where(np.arange(length) <= last[:, None, None], np.exp(scores), 0)
        expected = weights / weights.sum(axis=-1, keepdims=True) @ keys[:, :WIDTH]
        np.testing.assert_allclose(out[starts[s] : starts[s] + count], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", ["one", "keys"])
def test_quantized_caches(dtype: str, scales: str) -> None:
    """Scales of keys that nothing needs are NaN, too."""
    arguments, _ = problem(dtype="bfloat16" if scales == "one" else "float32")
    numbers = arguments[1].astype(np.float32)
    unused = np.isnan(numbers).all(axis=2)
    arguments[1] = np.asarray(jnp.asarray(np.nan_to_num(numbers) * (30 if dtype == "int8" else 1)).astype(dtype))
    shape = {"one": (), "keys": numbers.shape[:2]}[scales]
    latent_scale, rope_scale = np.random.default_rng(1).uniform(0.01, 0.05, (2, *shape)).astype(np.float32)
    if scales == "keys":
        latent_scale[unused] = rope_scale[unused] = np.nan
    check(arguments, latent_scale=latent_scale, rope_scale=rope_scale, parts=2)


def test_latents_of_8_bits_beside_rotated_keys_of_16() -> None:
    arguments, _ = problem(dtype="bfloat16")
    latents, ropes = as_pair(arguments[1])
    latents = np.nan_to_num(latents.astype(np.float32) * 30).astype(np.int8)
    arguments[1] = latents, ropes
    check(arguments, latent_scale=1 / 30)


def test_tokens_of_no_sequence_are_0() -> None:
    arguments, exists = problem()
    out, logsumexp = mla_attention(*arguments, return_logsumexp=True, **SETTINGS)
    assert (out[~exists] == 0).all() and (logsumexp[~exists] == -jnp.inf).all()
    assert jnp.isfinite(out).all()


def test_sequences_share_pages() -> None:
    query, cache, lengths, table, starts, count = problem()[0]
    table[1, :2] = table[0, :2]
    check([query, cache, lengths, table, starts, count])


def test_parts_of_sequences_merge_by_their_logsumexp() -> None:
    query, cache, lengths, table, starts, count = problem("decode")[0]
    whole = mla_attention(query, cache, lengths, table, starts, count, **SETTINGS)
    first = np.minimum(lengths, 16)
    run = partial(mla_attention, return_logsumexp=True, **SETTINGS)
    parts = [
        run(query, cache, first, table, starts, count),
        run(query, cache, lengths - first, table[:, 2:], starts, count),
    ]
    largest = jnp.maximum(parts[0][1], parts[1][1])
    weights = [jnp.exp(part[1] - jnp.where(largest == -jnp.inf, 0, largest)) for part in parts]
    total = jnp.where(sum(weights) == 0, 1, sum(weights))
    merged = sum(part[0] * w[..., None] for part, w in zip(parts, weights, strict=True)) / total[..., None]
    np.testing.assert_allclose(merged, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_cases(case: Case, dtype: str) -> None:
    small = case.small()
    arrays = small.arrays(jax.random.key(0), dtype)
    out = mla_attention(*arrays, **small.keywords)
    low = jax.jit(partial(reference, **small.keywords, dtype=dtype))(*arrays)
    oracle = in_float64(partial(reference, **small.keywords), *arrays)
    assert_close(out, oracle, low, length=small.keys)


SMALL = replace(CASES[0].small(), sequences=5)


def test_a_step_of_decoding_is_the_call_of_single_tokens() -> None:
    arrays = SMALL.arrays(jax.random.key(1), "float32")
    run = partial(mla_attention, return_logsumexp=True, **SMALL.keywords)
    for found, expected in zip(run(*arrays, parts=3), run(*arrays, jnp.arange(6)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_a_page_that_is_not_in_the_cache_reads_0() -> None:
    query, cache, lengths, table = SMALL.arrays(jax.random.key(1), "float32")
    zeros, run = cache.at[table[0, 1]].set(0), partial(mla_attention, **SMALL.keywords)
    for number in (-1, 10**6):
        gone = run(query, cache, lengths, table.at[0, 1].set(number))
        np.testing.assert_array_equal(gone, run(query, zeros, lengths, table))


def test_lengths_beyond_the_table() -> None:
    """Keys behind the table do not exist; the tokens, the last ones of the sequence, see all keys that do."""
    query, cache, lengths, table = SMALL.arrays(jax.random.key(1), "float32")
    most, run = table.shape[1] * cache.shape[1], partial(mla_attention, **SMALL.keywords)
    np.testing.assert_array_equal(
        run(query, cache, jnp.full_like(lengths, most + 9), table),
        run(query, cache, jnp.full_like(lengths, most), table),
    )


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_calls_without_tokens_or_heads(shape: tuple[int, int]) -> None:
    tokens, heads = shape
    out, logsumexp = mla_attention(
        jnp.ones((tokens, heads, 12)), jnp.ones((3, 4, 12)), jnp.ones(2, int), jnp.zeros((2, 1), int),
        jnp.zeros(3, int), scale=1, value_width=8, return_logsumexp=True,
    )  # fmt: skip
    assert out.shape == (tokens, heads, 8) and logsumexp.shape == (tokens, heads)


@pytest.mark.parametrize("table", [0, 2])
def test_no_keys_are_0(table: int) -> None:
    lengths = jnp.full(2, 0 if table else 1)
    arrays = jnp.ones((2, 4, 12)), jnp.full((3, 4, 12), jnp.nan), lengths, jnp.zeros((2, table), int)
    assert (mla_attention(*arrays, scale=1, value_width=8) == 0).all()


def test_under_jit_and_vmap() -> None:
    query, cache, lengths, table = SMALL.arrays(jax.random.key(1), "float32")
    function = partial(mla_attention, **SMALL.keywords)
    found = jax.jit(jax.vmap(function, (0, None, None, None)))(jnp.stack([query, query + 1]), cache, lengths, table)
    np.testing.assert_allclose(found[1], function(query + 1, cache, lengths, table), rtol=2e-5, atol=2e-6)


@pytest.mark.one_backend
def test_a_call_is_exported() -> None:
    arguments, _ = problem()
    run = jax.jit(partial(mla_attention, **SETTINGS))
    exported = jax.export.export(run)(*arguments)
    found = jax.export.deserialize(exported.serialize()).call(*arguments)
    np.testing.assert_allclose(found, run(*arguments), rtol=2e-5, atol=2e-6)


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_divide_the_heads(kind: AxisType, recwarn: pytest.WarningsRecorder) -> None:
    """Without a collective, each device with the whole cache."""
    arguments, _ = problem()
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(kind,))
    query = jax.device_put(arguments[0], NamedSharding(mesh, PartitionSpec(None, "heads", None)))
    run = jax.jit(partial(mla_attention, **SETTINGS))
    with jax.set_mesh(mesh):
        compiled = run.lower(query, *arguments[1:]).compile()
        found = compiled(query, *arguments[1:])
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    assert not recwarn.list and found.sharding.spec == PartitionSpec(None, "heads", None)
    np.testing.assert_allclose(found, run(*arguments), rtol=2e-6, atol=2e-7)


# --- wrong calls -----------------------------------------------------------------------------------------------------

QUERY, PAGES, ONES, TABLE = jnp.ones((2, 4, 12)), jnp.ones((3, 4, 12)), jnp.ones(2, int), jnp.zeros((2, 3), int)
ARRAYS = "the arrays of mla_attention do not fit"


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((QUERY[0], PAGES, ONES, TABLE), {}, ARRAYS),
        ((QUERY, PAGES[..., :11], ONES, TABLE), {}, ARRAYS),
        ((QUERY, PAGES[:, :0], ONES, TABLE), {}, ARRAYS),
        ((QUERY, PAGES.astype(jnp.bfloat16), ONES, TABLE), {}, ARRAYS),
        ((QUERY, jnp.ones((3, 4, 2, 12)), ONES, TABLE), {}, ARRAYS),
        ((QUERY, (PAGES, None), ONES, TABLE), {}, ARRAYS),
        ((QUERY, (PAGES[..., :7], PAGES[..., 7:]), ONES, TABLE), {}, ARRAYS),
        ((QUERY, (PAGES[..., :8], PAGES[:2, :, 8:]), ONES, TABLE), {}, ARRAYS),
        (((QUERY[..., :8], QUERY[..., 8:].astype(jnp.bfloat16)), PAGES, ONES, TABLE), {}, ARRAYS),
        ((QUERY, PAGES, ONES, TABLE), {"value_width": 12}, ARRAYS),
        ((QUERY, PAGES, ONES, TABLE), {"value_width": 0}, "value_width must be a static integer of at least 1"),
        ((QUERY, PAGES, ONES[:1], TABLE), {}, "the tables of mla_attention do not fit"),
        ((QUERY, PAGES, ONES + 0.5, TABLE), {}, "the tables of mla_attention do not fit"),
        ((QUERY, PAGES, ONES, TABLE), {"scale": None}, "mla_attention cannot take this scale"),
        ((QUERY, PAGES, ONES, TABLE), {"latent_scale": jnp.ones(4)}, "mla_attention cannot take this latent_scale"),
        ((QUERY, PAGES, ONES, TABLE), {"rope_scale": "1"}, "mla_attention cannot take this rope_scale"),
    ],
)
def test_wrong_calls(arguments: Any, keywords: Any, summary: str) -> None:
    with pytest.raises(ArgumentError, match=summary) as error:
        mla_attention(*arguments, **({"scale": 1.0, "value_width": 8} | keywords))
    assert error.value.fix and error.value.got
