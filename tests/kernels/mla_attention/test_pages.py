"""Writes of latents: the definition's result, in place, and nothing outside of the tables."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.kernels.mla_attention import mla_attention, reference, write_latents, write_reference
from tilekern.testing import assert_close, in_float64

pytestmark = pytest.mark.one_backend

PAGES, PAGE, WIDTH, ROPE = 13, 4, 16, 8
SCALES = {"none": None, "one": (), "keys": (PAGES, PAGE)}


def tables_of_writes(random: np.random.Generator, pages: int) -> tuple[int, list[np.ndarray]]:
    """(tokens, [kv_lens, page_indices, cu_q_lens, num_seqs]) of five sequences in a cache of `pages` pages.

    Two of the tokens are in no sequence, a row of tables is none, and a length is behind its table.
    """
    tokens, lengths = (3, 1, 0, 6, 1), (9, 1, 4, 6, 40)
    table = np.full((6, 3), -1, np.int32)
    order = iter(random.permutation(pages))
    for row, length in zip(table, lengths, strict=False):
        for n in range(min(3, -(-length // PAGE))):
            row[n] = next(order)
    starts = np.full(7, 99, np.int32)
    starts[:6] = np.cumsum([0, *tokens])
    return sum(tokens) + 2, [np.array([*lengths, 7], np.int32), table, starts, np.array([5], np.int32)]


def problem(dtype: str, cache_dtype: str, form: str = "array") -> list[Any]:
    """The arguments of `write_latents`: a row of tables that is none, and a length behind the table."""
    random = np.random.default_rng(0)
    tokens, tables = tables_of_writes(random, PAGES)
    new = random.standard_normal((tokens, WIDTH + ROPE)).astype(jnp.dtype(dtype))
    pool = random.integers(-9, 9, (PAGES, PAGE, WIDTH + ROPE)).astype(jnp.dtype(cache_dtype))
    cache = {"array": pool, "head": pool[:, :, None], "pair": (pool[..., :WIDTH], pool[..., WIDTH:])}[form]
    if form == "pair":
        new = new[..., :WIDTH], new[..., WIDTH:]
    return [cache, new, *tables]


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("form", ["array", "head", "pair"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_write_is_its_definition(dtype: str, form: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        arguments = problem(dtype, dtype, form)
        found = write_latents(*arguments, value_width=WIDTH)
        pools, before = jax.tree.leaves(found.kv_pages), jax.tree.leaves(arguments[0])
        assert [x.shape for x in pools] == [x.shape for x in before]
        if form == "head":
            arguments[0], pools = arguments[0][:, :, 0], [pools[0][:, :, 0]]
        same(pools, write_reference(*arguments, value_width=WIDTH).kv_pages)
        before = jax.tree.leaves(arguments[0])
        changed = {int((a != b).any(axis=2).sum()) for a, b in zip(pools, before, strict=True)}
        assert changed == {3 + 1 + 6}  # the key of the last sequence has no page


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_write_quantises_as_its_definition_does(cache_dtype: str, scales: str) -> None:
    """Latents and rotated keys have scales of their own; scales of other keys stay."""
    shape, random = SCALES[scales], np.random.default_rng(1)
    latent_scale, rope_scale = (
        None if shape is None else random.uniform(0.01, 0.1, shape).astype(np.float32) for _ in range(2)
    )
    keywords = {"latent_scale": latent_scale, "rope_scale": rope_scale, "value_width": WIDTH}
    arguments = problem("bfloat16", cache_dtype)
    found = jax.jit(partial(write_latents, **keywords))(*arguments)
    same(found, jax.jit(partial(write_reference, **keywords))(*arguments))
    assert found.kv_pages.dtype == cache_dtype


def test_rotated_keys_are_rotated_by_their_positions() -> None:
    arguments, keywords = problem("float32", "float32"), {"theta": 100.0, "interleaved": True, "value_width": WIDTH}
    found = write_latents(*arguments, **keywords).kv_pages
    oracle = in_float64(lambda *arrays: write_reference(*arrays, **keywords).kv_pages, *arguments)
    assert_close(found, oracle, write_reference(*arguments, **keywords).kv_pages, length=2)
    same(found[..., :WIDTH], write_latents(*arguments, value_width=WIDTH).kv_pages[..., :WIDTH])


@pytest.mark.parametrize("page", [-(2**31), -PAGES, -1, PAGES, 2**31 - 1])
def test_pages_that_are_not_in_the_cache_are_not_written(page: int) -> None:
    arguments = problem("float32", "float32")
    arguments[3] = np.full((6, 3), page, np.int32)
    same(write_latents(*arguments, value_width=WIDTH).kv_pages, arguments[0])


@pytest.mark.parametrize("shape", [(0, 1, 1), (3, 0, 1), (3, 1, 0)])
def test_calls_without_tokens_pages_or_tables(shape: tuple[int, int, int]) -> None:
    tokens, pages, table = shape
    cache, new = jnp.ones((pages, 4, 12)), jnp.ones((tokens, 12))
    found = write_latents(cache, new, jnp.ones(tokens, int), jnp.zeros((tokens, table), int), value_width=8)
    same(found.kv_pages, cache)


@pytest.mark.parametrize("form", ["array", "pair"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "int8")])
def test_a_call_with_new_latents_writes_and_then_attends(dtypes: tuple[str, str], form: str) -> None:
    cache, new, *tables = problem(*dtypes, form)
    dtype = jnp.dtype(dtypes[0])
    query = np.random.default_rng(5).standard_normal((12 + 1, 6, WIDTH + ROPE)).astype(dtype)
    scales = {"latent_scale": 0.1, "rope_scale": 0.1} if dtypes[1] == "int8" else {}
    settings = {"value_width": WIDTH, **scales}
    written = write_latents(cache, new, *tables, **settings)
    run = partial(mla_attention, scale=0.2, return_logsumexp=True, **settings)
    out, logsumexp, pages = run(query, cache, *tables, new_latents=new)
    same(pages, written)
    same((out, logsumexp), run(query, written.kv_pages, *tables))
    expected, pages = reference(query, cache, *tables, scale=0.2, new_latents=new, **settings)
    same(pages, written)
    leaves, tree = jax.tree.flatten((query, written.kv_pages, *tables))
    oracle = in_float64(lambda *x: reference(*jax.tree.unflatten(tree, x), scale=0.2, **settings), *leaves)
    assert_close(out, oracle, expected, length=64)


@pytest.mark.parametrize("form", ["array", "head", "pair"])
@pytest.mark.parametrize("is_donated", [True, False])
def test_pools_that_are_taken_over_are_written_in_place(form: str, is_donated: bool) -> None:
    """Of a pool that is not taken over, XLA copies all pages."""

    def step(pages: Any, query: Any, new: Any, lengths: Any, table: Any) -> Any:
        return mla_attention(query, pages, lengths, table, scale=0.1, value_width=64, new_latents=new)

    last = {"array": ((80,),), "head": ((1, 80),), "pair": ((64,), (16,))}[form]
    pages = [jax.ShapeDtypeStruct((512, 16, *dims), "float32") for dims in last]
    query, new = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 4, 80), (3, 80)))
    lengths, table = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (3, 9)))
    run = jax.jit(step, donate_argnums=(0,) if is_donated else ())
    compiled = run.lower(tuple(pages) if form == "pair" else pages[0], query, new, lengths, table).compile()
    copies = [line for line in compiled.as_text().splitlines() if "[512,16," in line and " copy(" in line]
    whole = sum(x.size * 4 for x in pages)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert (not copies, aliased) == (is_donated, whole if is_donated else 0)


CACHE, NEW, ONES, TABLE = jnp.ones((3, 4, 12)), jnp.ones((2, 12)), jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((CACHE, NEW[:, :11], ONES, TABLE), {}, "the arrays of write_latents do not fit"),
        ((CACHE, NEW[:, None], ONES, TABLE), {}, "the arrays of write_latents do not fit"),
        ((CACHE, NEW.astype(jnp.bfloat16), ONES, TABLE), {}, "the arrays of write_latents do not fit"),
        ((CACHE, NEW, ONES[:1], TABLE), {}, "the tables of write_latents do not fit"),
        ((CACHE, NEW, ONES, TABLE), {"latent_scale": jnp.ones(3)}, "write_latents cannot take this latent_scale"),
        ((CACHE, NEW, ONES, TABLE), {"rope_scale": jnp.ones((3, 4))}, "write_latents cannot take this rope_scale"),
    ],
)
def test_wrong_writes(arguments: Any, keywords: Any, summary: str) -> None:
    with pytest.raises(ArgumentError, match=summary) as error:
        write_latents(*arguments, value_width=8, **keywords)
    assert error.value.fix and error.value.got and "query" not in error.value.got
