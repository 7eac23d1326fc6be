"""Writes of the indexer's keys: the definition's result, in place; steps under jit, export and on a mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.kernels.index_scores.test_kernel import check
from tests.kernels.mla_attention.test_pages import PAGE, tables_of_writes
from tilekern.errors import ArgumentError
from tilekern.kernels.index_scores import index_scores, reference, select_keys, write_index_keys, write_reference
from tilekern.testing import in_float64

PAGES, WIDTH, HEADS = 16, 16, 6
QUANTIZED = ["int8", "float8_e4m3fn", "float8_e5m2"]


def problem(dtype: str, cache_dtype: str) -> list[Any]:
    """The arguments of `write_index_keys`: a row of tables that is none, and a length behind the table."""
    random = np.random.default_rng(0)
    tokens, tables = tables_of_writes(random, PAGES)
    new = random.standard_normal((tokens, WIDTH)).astype(jnp.dtype(dtype))
    pool = random.integers(-9, 9, (PAGES, PAGE, WIDTH)).astype(jnp.dtype(cache_dtype))
    return [pool, new, *tables]


def prompt(dtype: str, cache_dtype: str) -> list[Any]:
    """The arguments of `write_index_keys` for three prompts of 9, 1 and 12 keys in a cache that nobody has written.

    The cache holds NaN, or the largest integers. Table entries that nothing needs are random.
    """
    random = np.random.default_rng(1)
    lengths = np.array([9, 1, 12], np.int32)
    table = random.permutation(PAGES)[:12].reshape(3, 4).astype(np.int32)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // PAGE) :] = random.integers(PAGES, 2**31 - 1, 4 - -(-length // PAGE))
    new = random.standard_normal((22, WIDTH)).astype(jnp.dtype(dtype))
    empty = np.full((PAGES, PAGE, WIDTH), 127 if cache_dtype == "int8" else np.nan).astype(jnp.dtype(cache_dtype))
    return [empty, new, lengths, table, np.array([0, 9, 10, 22], np.int32)]


def scales(kind: str) -> Any:
    """No scale, one for all, or one for each key: NaN, which the write must replace."""
    return {"none": None, "one": np.float32(0.07), "keys": np.full((PAGES, PAGE), np.nan, np.float32)}[kind]


def same(found: Any, expected: Any) -> None:
    """All arrays are equal; NumPy does not take NaN of 8 bits for NaN."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


def of_indexer(tokens: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """query[tokens, HEADS, WIDTH] and the weights of heads, standard normal."""
    random = np.random.default_rng(2)
    shapes = (tokens, HEADS, WIDTH), (tokens, HEADS)
    query, weights = (random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    return query, weights


# --- writes -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_backend
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_write_is_its_definition(dtype: str, with_head: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        arguments = problem(dtype, dtype)
        expected = write_reference(*arguments).key_pages
        pool = arguments[0][:, :, None] if with_head else arguments[0]
        found = write_index_keys(pool, *arguments[1:])
    assert found.key_pages.shape == pool.shape and found.key_scale is None
    same(found.key_pages.reshape(expected.shape), expected)
    assert (np.asarray(expected) != arguments[0]).any(axis=2).sum() == 3 + 1 + 6  # the last key has no page


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", ["none", "one", "keys"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_a_write_quantises_as_its_definition_does(cache_dtype: str, kind: str) -> None:
    """Exactly the numbers of the definition; scales of other keys stay NaN."""
    keywords, arguments = {"key_scale": scales(kind)}, problem("bfloat16", cache_dtype)
    found = jax.jit(partial(write_index_keys, **keywords))(*arguments)
    same(found, jax.jit(partial(write_reference, **keywords))(*arguments))
    assert found.key_pages.dtype == cache_dtype
    if kind == "keys":
        assert np.isfinite(found.key_scale).sum() == 3 + 1 + 6


@pytest.mark.one_backend
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_a_key_is_within_half_a_unit_of_its_number(cache_dtype: str) -> None:
    """Of the exact number: int8 within half a scale, float8 within half a unit in the last place of its 3 or 2 bits."""
    cache, new, lengths, table, starts = prompt("float32", cache_dtype)
    pages, scale = write_index_keys(cache, new, lengths, table, starts, key_scale=scales("keys"))
    position = np.concatenate([np.arange(n) for n in lengths])
    place = table[np.repeat(np.arange(3), lengths), position // PAGE], position % PAGE
    stored, scale = np.asarray(pages, np.float64)[place], np.asarray(scale, np.float64)[place][:, None]
    largest, exact = float(jnp.finfo(cache_dtype).max) if cache_dtype != "int8" else 127.0, new.astype(np.float64)
    np.testing.assert_allclose(scale[:, 0], np.abs(exact).max(axis=1) / largest, rtol=2**-23)
    bits = {"int8": None, "float8_e4m3fn": 4, "float8_e5m2": 3}[cache_dtype]
    half = scale / 2 if bits is None else np.maximum(np.abs(exact) * 2.0**-bits, scale * 2.0**-10)
    assert (np.abs(stored * scale - exact) <= half * (1 + 2**-20)).all()


@pytest.mark.one_backend
@pytest.mark.parametrize("page", [-(2**31), -PAGES, -1, PAGES, 2**31 - 1])
def test_pages_that_are_not_in_the_cache_are_not_written(page: int) -> None:
    arguments = problem("float32", "int8")
    arguments[3] = np.full((6, 3), page, np.int32)
    before = arguments[0], np.ones((PAGES, PAGE), np.float32)
    same(write_index_keys(*arguments, key_scale=before[1]), before)


@pytest.mark.one_backend
@pytest.mark.parametrize("shape", [(0, 1, 1), (3, 0, 1), (3, 1, 0)])
def test_calls_without_tokens_pages_or_tables(shape: tuple[int, int, int]) -> None:
    tokens, pages, table = shape
    cache, scale = jnp.ones((pages, 4, 12), "int8"), jnp.ones((pages, 4))
    tables = jnp.ones(tokens, int), jnp.zeros((tokens, table), int)
    same(write_index_keys(cache, jnp.ones((tokens, 12)), *tables, key_scale=scale), (cache, scale))


@pytest.mark.one_backend
@pytest.mark.parametrize("cache_dtype", ["float32", *QUANTIZED])
@pytest.mark.parametrize("is_donated", [True, False])
def test_caches_that_are_taken_over_are_written_in_place(cache_dtype: str, is_donated: bool) -> None:
    """Keys and scales, by a step that also reads them. Of a cache that is not taken over, XLA copies all pages."""
    pages, scale = (jax.ShapeDtypeStruct((512, 16, *dims), d) for dims, d in (((64,), cache_dtype), ((), "float32")))
    cache = (pages,) if cache_dtype == "float32" else (pages, scale)
    shapes = (3, 64), (3, HEADS, 64), (3, HEADS)
    new, query, weights = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    tables = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (3, 9)))

    def step(cache: Any, new: Any, query: Any, weights: Any, tables: Any) -> Any:
        pages = write_index_keys(cache[0], new, *tables, key_scale=None if len(cache) == 1 else cache[1])
        selected = select_keys(query, weights, pages.key_pages, *tables, num_keys=5, key_scale=pages.key_scale)
        return tuple(x for x in pages if x is not None), selected

    run = jax.jit(step, donate_argnums=(0,) if is_donated else ())
    compiled = run.lower(cache, new, query, weights, tables).compile()
    copies = [line for line in compiled.as_text().splitlines() if "[512,16" in line and " copy(" in line]
    whole = sum(x.size * x.dtype.itemsize for x in cache)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert (not copies, aliased) == (is_donated, whole if is_donated else 0)


# --- steps: keys are written, scored and selected ---------------------------------------------------------------------


def step(cache: Any, scale: Any, new: Any, query: Any, weights: Any, *tables: Any) -> Any:
    """The cache, its scales, scores of all keys and the best five keys of each token."""
    pages = write_index_keys(cache, new, *tables, key_scale=scale)
    options = {"key_scale": pages.key_scale}
    scores = index_scores(query, weights, pages.key_pages, *tables, **options)
    return pages, scores, select_keys(query, weights, pages.key_pages, *tables, num_keys=5, **options)


def of_step(cache_dtype: str) -> list[Any]:
    """The arguments of `step` for prompts in float32."""
    cache, new, *tables = prompt("float32", cache_dtype)
    return [cache, scales("keys"), new, *of_indexer(len(new)), *tables]


@pytest.mark.parametrize("cache_dtype", ["same", *QUANTIZED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_keys_have_the_scores_of_the_definition(dtype: str, cache_dtype: str) -> None:
    """The scores of the written cache by the rule against float64; pages and scales that nobody wrote are NaN."""
    cache, new, *tables = prompt(dtype, dtype if cache_dtype == "same" else cache_dtype)
    pages = write_index_keys(cache, new, *tables, key_scale=None if cache_dtype == "same" else scales("keys"))
    query, weights = of_indexer(len(new), dtype)
    check([query, weights, np.asarray(pages.key_pages), *tables], key_scale=pages.key_scale)


@pytest.mark.one_backend
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_a_step_under_jit_and_export(cache_dtype: str) -> None:
    """Exported code is portable: scores differ by rounding, and no two of them are so close that keys would change."""
    arguments = of_step(cache_dtype)
    (pages, scale), scores, selected = step(*arguments)
    tables = arguments[5:]
    exact = in_float64(partial(reference, key_scale=scale), *arguments[3:5], pages, *tables)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    seen = np.isfinite(np.take_along_axis(exact, order, axis=1))
    same(selected, np.where(seen, order, -1))
    run = jax.jit(lambda *a: (tuple(step(*a)[0]), *step(*a)[1:]))
    exported = jax.export.deserialize(jax.export.export(run)(*arguments).serialize())
    for found in (run(*arguments), exported.call(*arguments)):
        same((found[0], found[2]), ((pages, scale), selected))
        np.testing.assert_allclose(found[1], scores, rtol=2e-5, atol=2e-5)


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_divide_the_tokens(kind: AxisType) -> None:
    """Each device scores some tokens against the whole cache, without an exchange; XLA gathers scores to select."""
    cache, new, *tables = prompt("float32", "int8")
    pages = write_index_keys(cache, new, *tables, key_scale=scales("keys"))
    query, weights = of_indexer(len(new))
    arrays = query[:20], weights[:20], pages.key_pages, *tables[:2], np.array([0, 9, 10, 20], np.int32)
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(kind,))
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("tokens",), ()))
    placed = [jax.device_put(x, rows if n < 2 else everywhere) for n, x in enumerate(arrays)]
    scale = jax.device_put(pages.key_scale, everywhere)
    for function in (index_scores, partial(select_keys, num_keys=5)):
        run = jax.jit(function)
        with jax.set_mesh(mesh):
            compiled = run.lower(*placed, key_scale=scale).compile()
            found = compiled(*placed, key_scale=scale)
        same(found, run(*arrays, key_scale=pages.key_scale))
        assert found.sharding.spec[0] == "tokens"
        exchanges = [x for x in ("all-gather", "all-reduce", "all-to-all", "permute") if x in compiled.as_text()]
        assert exchanges == ([] if function is index_scores else ["all-gather"])


@pytest.mark.one_backend
def test_devices_divide_the_sequences_and_their_pages() -> None:
    """Under `jax.shard_map` each device has a pool for its sequences, whose tables count pages of this pool."""
    random, devices, sequences = np.random.default_rng(3), 4, 2
    rows = devices * sequences
    cache = np.zeros((devices * PAGES, PAGE, WIDTH), np.int8), np.ones((devices * PAGES, PAGE), np.float32)
    new = random.standard_normal((rows, WIDTH)).astype(np.float32)
    lengths = random.integers(1, 3 * PAGE, rows).astype(np.int32)
    table = np.concatenate([random.permutation(PAGES)[: sequences * 3].reshape(-1, 3) for _ in range(devices)])
    arrays = *cache, new, *of_indexer(rows), lengths, table.astype(np.int32)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))
    parts = [step(*(np.split(x, devices)[d] for x in arrays)) for d in range(devices)]
    same(run(*arrays), jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
    text = run.lower(*arrays).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "permute"))


# --- wrong calls -----------------------------------------------------------------------------------------------------

CACHE, NEW, ONES, TABLE = jnp.ones((3, 4, 12)), jnp.ones((2, 12)), jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((CACHE, NEW[:, :11], ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((CACHE, NEW[:, None], ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((CACHE, NEW.astype(int), ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((CACHE, NEW.astype(jnp.bfloat16), ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((CACHE[:, :, None].repeat(2, 2), NEW, ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((CACHE[:, :0], NEW, ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((3, NEW, ONES, TABLE), {}, "the arrays of write_index_keys do not fit"),
        ((CACHE, NEW, ONES[:1], TABLE), {}, "the tables of write_index_keys do not fit"),
        ((CACHE, NEW, ONES, TABLE), {"key_scale": jnp.ones(3)}, "write_index_keys cannot take this key_scale"),
        ((CACHE, NEW, ONES, TABLE), {"key_scale": jnp.ones((3, 4))}, "write_index_keys cannot take this key_scale"),
    ],
)
def test_wrong_writes(arguments: Any, keywords: Any, summary: str) -> None:
    with pytest.raises(ArgumentError, match=summary) as error:
        write_index_keys(*arguments, **keywords)
    assert error.value.fix and error.value.got
