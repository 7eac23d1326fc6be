"""Writes to a cache in pages: the definition's result, in place, and nothing outside of the tables."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tilekern.errors import ArgumentError
from tilekern.kernels.paged_attention import (
    copy_pages,
    paged_attention,
    ragged_paged_attention,
    reference,
    write_pages,
    write_reference,
)
from tilekern.testing import assert_close, in_float64

pytestmark = pytest.mark.one_backend

PAGES, PAGE, GROUPS, WIDTH = 13, 4, 2, 8
TOKENS, LENGTHS = (3, 1, 0, 6, 1), (9, 1, 4, 6, 40)  # the last length stands behind the table
SCALES = {"none": None, "one": (), "heads": (GROUPS,), "keys": (PAGES, PAGE, GROUPS)}


def tables(seed: int = 0) -> list[np.ndarray]:
    """Lengths, pages and starts of the sequences, a row of tables that is none, and the number of sequences."""
    random = np.random.default_rng(seed)
    table = np.full((len(TOKENS) + 1, 3), -1, np.int32)
    order = iter(random.permutation(PAGES))
    for row, length in zip(table, LENGTHS, strict=False):
        for n in range(min(3, -(-length // PAGE))):
            row[n] = next(order)
    starts = np.full(len(TOKENS) + 2, 99, np.int32)
    starts[:-1] = np.cumsum([0, *TOKENS])
    return [np.array([*LENGTHS, 7], np.int32), table, starts, np.array([len(TOKENS)], np.int32)]


def problem(dtype: Any, cache_dtype: Any, *, separate: bool = False, seed: int = 0) -> list[Any]:
    """The arguments of `write_pages`; two tokens stand behind the last sequence."""
    random = np.random.default_rng(seed)
    total = sum(TOKENS) + 2
    values = WIDTH - 2 if separate else WIDTH
    new = [random.normal(0, 3, (total, GROUPS, n)).astype(jnp.dtype(dtype)) for n in (WIDTH, values)]
    shapes = [(GROUPS, WIDTH), (GROUPS, values)] if separate else [(2 * GROUPS, WIDTH)]
    pools = [random.integers(-9, 9, (PAGES, PAGE, *shape)).astype(jnp.dtype(cache_dtype)) for shape in shapes]
    return [tuple(pools) if separate else pools[0], *new, *tables(seed)]


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_write_is_its_definition(dtype: str, separate: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        arguments = problem(dtype, dtype, separate=separate)
        found, expected = write_pages(*arguments), write_reference(*arguments)
        same(found, expected)
        pools = map(jax.tree.leaves, (found, arguments[0]))
        changed = [(a != b).any(axis=(2, 3)).sum() for a, b in zip(*pools, strict=True)]
        assert {int(n) for n in changed} == {3 + 1 + 6}  # the key of the last sequence has no page


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_write_quantises_as_its_definition_does(cache_dtype: str, scales: str) -> None:
    """Scales of other keys stay, of which some are NaN."""
    arguments, shape = problem("bfloat16", cache_dtype), SCALES[scales]
    random = np.random.default_rng(1)
    key_scale, value_scale = (
        None if shape is None else random.uniform(0.01, 0.1, shape).astype(np.float32) for _ in range(2)
    )
    if scales == "keys":
        key_scale[0, 1] = np.nan
    keywords = {"key_scale": key_scale, "value_scale": value_scale}
    found = jax.jit(partial(write_pages, **keywords))(*arguments)
    same(found, jax.jit(partial(write_reference, **keywords))(*arguments))
    assert found.kv_pages.dtype == cache_dtype


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_scales_of_keys_keep_the_largest_number(cache_dtype: str) -> None:
    arguments = problem("float32", cache_dtype)
    scale = jnp.ones(SCALES["keys"])
    pages, key_scale, _ = write_pages(*arguments, key_scale=scale, value_scale=scale)
    _, new_keys, _, lengths, table, *_ = arguments
    page, place = table[0, (lengths[0] - 1) // PAGE], (lengths[0] - 1) % PAGE
    stored = pages[page, place, ::2].astype(jnp.float32) * key_scale[page, place][:, None]
    largest = np.abs(new_keys[TOKENS[0] - 1]).max(axis=1)
    np.testing.assert_allclose(np.abs(stored).max(axis=1), largest, rtol=2**-22)


@pytest.mark.parametrize(
    "keywords", [{"theta": 100.0}, {"frequencies": np.linspace(1, 0.1, 4, dtype=np.float32), "interleaved": True}]
)
def test_keys_are_rotated_by_their_positions(keywords: Any) -> None:
    arguments = problem("float32", "float32")
    found = write_pages(*arguments, **keywords).kv_pages
    expected = write_reference(*arguments, **keywords).kv_pages
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if x.dtype == np.float32 else x for x in arguments]
        oracle = write_reference(*wide, **keywords).kv_pages
    assert_close(found, oracle, expected, length=2)
    same(found[:, :, 1::2], write_pages(*arguments).kv_pages[:, :, 1::2])


@given(st.lists(st.sampled_from([-(2**31), -PAGES, -1, PAGES, 2**31 - 1]), min_size=18, max_size=18))
def test_pages_that_are_not_in_the_cache_are_not_written(numbers: list[int]) -> None:
    arguments = problem("float32", "float32")
    arguments[4] = np.array(numbers, np.int32).reshape(6, 3)
    same(write_pages(*arguments).kv_pages, arguments[0])


def test_tokens_before_their_sequence_are_not_written() -> None:
    """Two tokens of a sequence of one key: the first one is none."""
    cache, new, table = jnp.zeros((2, 4, 2, 3)), jnp.ones((2, 1, 3)), jnp.array([[1]])
    found = write_pages(cache, new, 2 * new, jnp.array([1]), table, jnp.array([0, 2])).kv_pages
    assert found.sum() == 9 and (found[1, 0, 1] == 2).all()


@pytest.mark.parametrize("shape", [(0, 1, 1), (3, 0, 1), (3, 1, 0)])
def test_calls_without_tokens_pages_or_tables(shape: tuple[int, int, int]) -> None:
    tokens, pages, table = shape
    cache, new = jnp.ones((pages, 4, 2, 3)), jnp.ones((tokens, 1, 3))
    found = write_pages(cache, new, new, jnp.ones(tokens, int), jnp.zeros((tokens, table), int))
    same(found.kv_pages, cache)


# --- writes, then attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "int8")])
def test_a_call_with_new_keys_writes_and_then_attends(dtypes: tuple[str, str]) -> None:
    cache, new_keys, new_values, *tables = problem(*dtypes)
    query = np.random.default_rng(5).standard_normal((len(new_keys), 6, WIDTH)).astype(new_keys.dtype)
    scales = {"key_scale": 0.1, "value_scale": 0.1} if dtypes[1] == "int8" else {}
    new = {"new_keys": new_keys, "new_values": new_values}
    written = write_pages(cache, new_keys, new_values, *tables, **scales)
    out, logsumexp, pages = ragged_paged_attention(query, cache, *tables, **scales, **new, return_logsumexp=True)
    same(pages, written)
    same((out, logsumexp), ragged_paged_attention(query, written.kv_pages, *tables, **scales, return_logsumexp=True))
    expected, pages = reference(query, cache, *tables, **new, **scales)
    same(pages, written)
    oracle = in_float64(partial(reference, **scales), query, written.kv_pages, *tables)
    assert_close(out, oracle, expected, length=64)


def test_a_step_of_decoding_with_new_keys() -> None:
    """Each key has its own scale."""
    cache, new_keys, new_values, lengths, table, *_ = problem("float32", "int8")
    rows = slice(0, len(lengths))
    query, scale = jnp.ones((len(lengths), 4, WIDTH)), jnp.ones(SCALES["keys"])
    new = {"new_keys": new_keys[rows], "new_values": new_values[rows]}
    out, pages = paged_attention(query, cache, lengths, table, key_scale=scale, value_scale=scale, **new)
    written = write_pages(cache, *new.values(), lengths, table, key_scale=scale, value_scale=scale)
    same(pages, written)
    after = paged_attention(query, written[0], lengths, table, key_scale=written[1], value_scale=written[2])
    same(out, after)


# --- copies of pages -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.integers(-3, 9) | st.sampled_from([-(2**31), 2**31 - 1])] * 2), max_size=12))
def test_copies_read_all_sources_first(pairs: list[tuple[int, int]]) -> None:
    """Pages of a chain or a cycle of pairs; the last pair of a target counts."""
    pool, scale = np.arange(7 * 3 * 2, dtype=np.float32).reshape(7, 3, 2), np.arange(7, dtype=np.int8)
    expected = pool.copy(), scale.copy()
    for source, target in pairs:
        if 0 <= source < 7 and 0 <= target < 7:
            expected[0][target], expected[1][target] = pool[source], scale[source]
    numbers = np.array(pairs, np.int32).reshape(-1, 2)
    same(copy_pages((pool, scale), numbers[:, 0], numbers[:, 1]), expected)


# --- in place, on devices, exported ----------------------------------------------------------------------------------


def copies(compiled: Any, shape: str) -> list[str]:
    return [line for line in compiled.as_text().splitlines() if shape in line and " copy(" in line]


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("is_donated", [True, False])
def test_pools_that_are_taken_over_are_written_in_place(cache_dtype: str, is_donated: bool) -> None:
    """A fork of a sequence, then a step of decoding. Of a pool that is not taken over, XLA copies all pages."""

    def step(pages: Any, scale: Any, pairs: Any, query: Any, new: Any, lengths: Any, table: Any) -> Any:
        pages, scale = copy_pages((pages, scale), *pairs)
        scales = {"key_scale": scale, "value_scale": 1.0} if cache_dtype == "int8" else {}
        return paged_attention(query, pages, lengths, table, new_keys=new, new_values=new, **scales)

    dtype = "float32" if cache_dtype == "int8" else cache_dtype
    shapes = {"pages": (512, 16, 4, 64), "scale": (512, 16, 2), "query": (3, 4, 64), "new": (3, 2, 64)}
    dtypes = {"pages": cache_dtype, "scale": "float32", "query": dtype, "new": dtype}
    pages, scale, query, new = (jax.ShapeDtypeStruct(shapes[n], dtypes[n]) for n in shapes)
    pairs, lengths, table = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 5), (3,), (3, 9)))
    run = jax.jit(step, donate_argnums=(0,) if is_donated else ())
    compiled = run.lower(pages, scale, pairs, query, new, lengths, table).compile()
    whole = pages.size * pages.dtype.itemsize
    found = not copies(compiled, "[512,16,4,64]"), compiled.memory_analysis().alias_size_in_bytes
    assert found == (is_donated, whole if is_donated else 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("separate", [False, True])
def test_devices_divide_the_heads_of_a_write(kind: AxisType, separate: bool) -> None:
    arguments = problem("float32", "float32", separate=separate)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(kind,))
    by_head = [NamedSharding(mesh, PartitionSpec(*(None,) * n, "heads", None)) for n in range(3)]
    placed = jax.tree.map(lambda x: jax.device_put(x, by_head[x.ndim - 2]), arguments[:3])
    run = jax.jit(write_pages)
    with jax.set_mesh(mesh):
        compiled = run.lower(*placed, *arguments[3:]).compile()
        found = compiled(*placed, *arguments[3:])
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    same(found, write_pages(*arguments))


def test_writes_are_exported() -> None:
    arguments = problem("float32", "float32")
    exported = jax.export.export(jax.jit(lambda *a: tuple(write_pages(*a))))(*arguments)
    same(jax.export.deserialize(exported.serialize()).call(*arguments)[0], write_pages(*arguments).kv_pages)


# --- wrong calls -----------------------------------------------------------------------------------------------------

CACHE, NEW, ONES, TABLE = jnp.ones((3, 4, 4, 8)), jnp.ones((2, 2, 8)), jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((CACHE, NEW[:, :1], NEW[:, :1], ONES, TABLE), {}, "the arrays of write_pages do not fit"),
        ((CACHE, NEW, NEW[..., :7], ONES, TABLE), {}, "the arrays of write_pages do not fit"),
        ((CACHE, NEW, NEW.astype(jnp.bfloat16), ONES, TABLE), {}, "the arrays of write_pages do not fit"),
        ((CACHE, NEW.astype(jnp.bfloat16), NEW, ONES, TABLE), {}, "the arrays of write_pages do not fit"),
        ((CACHE, NEW, NEW, ONES[:1], TABLE), {}, "the tables of write_pages do not fit"),
        ((CACHE, NEW, NEW, ONES, TABLE), {"key_scale": jnp.ones(3)}, "write_pages cannot take this key_scale"),
        ((CACHE, NEW, NEW, ONES, TABLE), {"value_scale": jnp.ones((3, 4, 2))}, "write_pages cannot take this value"),
    ],
)
def test_wrong_writes(arguments: Any, keywords: Any, summary: str) -> None:
    with pytest.raises(ArgumentError, match=summary) as error:
        write_pages(*arguments, **keywords)
    assert error.value.fix and error.value.got and "query" not in error.value.got


@pytest.mark.parametrize("arguments", [(CACHE, ONES, ONES[:1]), (CACHE, ONES, 1.5 * ONES), ((CACHE, ONES), ONES, ONES)])
def test_wrong_copies(arguments: Any) -> None:
    with pytest.raises(ArgumentError, match="the arrays of copy_pages do not fit"):
        copy_pages(*arguments)


def test_new_keys_without_values() -> None:
    with pytest.raises(ArgumentError, match="new keys and new values come together"):
        paged_attention(jnp.ones((2, 4, 8)), CACHE, ONES, TABLE, new_keys=NEW)
