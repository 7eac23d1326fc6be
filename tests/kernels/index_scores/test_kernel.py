from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu.item import lowerings_of
from tilekern.errors import ArgumentError
from tilekern.kernels.index_scores import index_scores, reference, select_keys, select_reference
from tilekern.kernels.index_scores.cases import CASES, Case
from tilekern.lower.target import resolve
from tilekern.testing import assert_close, in_float64

HEADS, WIDTH = 6, 16
LENGTHS = {"mixed": ((7, 1, 0, 9, 1, 2), (20, 33, 5, 9, 47, 1)), "decode": ((1, 1, 1), (1, 48, 0))}


def problem(kind: str = "mixed", dtype: Any = "float32", *, page: int = 8, exact: bool = False) -> list[Any]:
    """The arguments of `index_scores`; with `exact`, of small integers, whose sums are exact in any order.

    There are 3 tokens and a row of the tables behind the last sequence. The last sequence has more tokens than keys.
    Keys and entries of tables that nothing needs are NaN and random numbers.
    """
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        drawn = random.integers(-2, 3, shape) if exact else random.standard_normal(shape)
        return drawn.astype(jnp.dtype(dtype))

    tokens, lengths = LENGTHS[kind]
    sequences, table = len(tokens), -(-48 // page)
    starts = np.full(sequences + 2, 99, np.int32)
    starts[: sequences + 1] = np.cumsum([0, *tokens])
    total = sum(tokens) + 3
    pages = np.full((sequences * table + 4, page, WIDTH), np.nan, jnp.dtype(dtype))
    indices = random.permutation(len(pages))[: sequences * table].reshape(sequences, table).astype(np.int32)
    for row, length in zip(indices, lengths, strict=True):
        for n in range(length):
            pages[row[n // page], n % page] = numbers(WIDTH)
        row[-(-length // page) :] = random.integers(-3, 2**31 - 1, table - -(-length // page))
    indices = np.concatenate([indices, random.integers(-(2**31), 2**31 - 1, (1, table))]).astype(np.int32)
    query, weights = numbers(total, HEADS, WIDTH), numbers(total, HEADS)
    return [query, weights, pages, np.array([*lengths, 7], np.int32), indices, starts, np.array([sequences], np.int32)]


def check(arguments: list[Any], *, key_scale: Any = None, **blocks: Any) -> None:
    """The kernel agrees with the definition by the rule."""
    dtype = arguments[0].dtype
    definition = partial(reference, key_scale=key_scale)
    with jax.enable_x64(dtype == np.float64):
        found = index_scores(*arguments, key_scale=key_scale, **blocks)
        low = jax.jit(partial(definition, dtype=dtype))(*arguments)
    oracle = in_float64(definition, *arguments)
    seen = np.isfinite(oracle)
    np.testing.assert_array_equal(np.isfinite(found), seen)
    assert (np.asarray(found)[~seen] == -np.inf).all()
    assert_close(*(np.where(seen, x, 0) for x in (found, oracle, np.asarray(low).astype(found.dtype))), length=WIDTH)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_floats(kind: str, dtype: str) -> None:
    check(problem(kind, dtype))


@pytest.mark.parametrize("page", [1, 6, 16, 48])
def test_pages(page: int) -> None:
    check(problem(page=page))


@pytest.mark.parametrize("block_k", [2, 4, 16, 48])
def test_blocks_change_rounding_alone(block_k: int) -> None:
    check(problem(), block_k=block_k)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("of_keys", [False, True])
def test_quantized_caches(dtype: str, of_keys: bool) -> None:
    """Scales of keys that nothing needs are NaN, too; a negative one counts before the relu."""
    arguments = problem(dtype="bfloat16")
    keys = arguments[2].astype(np.float32)
    unused = np.isnan(keys).all(axis=2)
    arguments[2] = np.asarray(jnp.asarray(np.nan_to_num(keys) * (30 if dtype == "int8" else 1)).astype(dtype))
    scale = np.random.default_rng(1).uniform(-0.05, 0.05, keys.shape[:2]).astype(np.float32)
    scale[unused] = np.nan
    check(arguments, key_scale=scale if of_keys else np.float32(0.04))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_cases(case: Case, dtype: str) -> None:
    check(list(case.small().arrays(jax.random.key(0), dtype)))


def test_a_page_that_is_not_in_the_cache_reads_0() -> None:
    arguments = problem(exact=True)
    arguments[4][1, 2] = 10**6
    scores = np.asarray(index_scores(*arguments))
    token = arguments[5][1]
    assert (scores[token, 16:24] == 0).all() and np.isfinite(scores[token, :33]).all()


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_calls_without_tokens_heads_or_width(shape: tuple[int, int, int]) -> None:
    tokens, _, width = shape
    cache, lengths, table = jnp.ones((3, 4, width)), jnp.ones(tokens, int), jnp.zeros((tokens, 2), int)
    out = index_scores(jnp.ones(shape), jnp.ones(shape[:2]), cache, lengths, table)
    np.testing.assert_array_equal(out, np.where(np.arange(8) < 1, 0, -np.inf) + np.zeros((tokens, 1)))


def test_an_empty_table_has_no_keys() -> None:
    arguments = jnp.ones((2, 4, 8)), jnp.ones((2, 4)), jnp.ones((3, 4, 8)), jnp.ones(2, int), jnp.zeros((2, 0), int)
    assert index_scores(*arguments).shape == (2, 0)
    assert (select_keys(*arguments, num_keys=3) == -1).all()


def test_a_cache_with_a_dim_of_one_head_is_the_same() -> None:
    query, weights, keys, *tables = problem()
    np.testing.assert_array_equal(
        index_scores(query, weights, keys[:, :, None], *tables), index_scores(query, weights, keys, *tables)
    )


def test_under_jit_and_vmap() -> None:
    query, *arguments = problem()
    run = jax.jit(jax.vmap(lambda q: index_scores(q, *arguments)))
    found = run(jnp.stack([query, query + 1]))
    np.testing.assert_allclose(found[1], index_scores(query + 1, *arguments), rtol=2e-5, atol=2e-5)


# --- the best keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_keys", [1, 5, 48, 60])
@pytest.mark.parametrize("kind", LENGTHS)
def test_the_best_keys_are_those_of_the_definition(kind: str, num_keys: int) -> None:
    """Scores of small integers are exact, and many are equal: the earlier key comes first."""
    arguments = problem(kind, exact=True)
    found = select_keys(*arguments, num_keys=num_keys)
    np.testing.assert_array_equal(found, select_reference(*arguments, num_keys=num_keys))
    assert found.dtype == jnp.int32


@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v6e"])
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")])
@pytest.mark.one_backend
def test_pages_are_copied_as_they_lie_in_memory(target: str, page: int, dtypes: tuple[str, str]) -> None:
    """Each page of a tile is a block of its own; a pool that fits the vector memory may be copied whole."""
    for lowering in lowered(target, page, *dtypes):
        lines = [line for line in str(lowering.plan).splitlines() if " keys[" in line]
        assert len(lines) == max(1, min(256, 16 * page) // page)
        assert all(f"blocked [{page}, 128]" in line and "XLA" not in line for line in lines), lines


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float8_e5m2"), ("float32", "float32")])
@pytest.mark.one_backend
def test_nothing_spills(target: str, dtypes: tuple[str, str]) -> None:
    pytest.importorskip("triton", reason="needs triton")
    for lowering in lowered(target, 64, *dtypes):
        assert lowering.compile().resources.spills == 0


def lowered(target: str, page: int, dtype: str, cache_dtype: str) -> Any:
    """The lowerings of 512 tokens of 16 sequences, up to 8,192 keys each, in a pool for 256 sequences."""
    query, weights = jax.ShapeDtypeStruct((512, 64, 128), dtype), jax.ShapeDtypeStruct((512, 64), "float32")
    cache = jax.ShapeDtypeStruct((256 * 8192 // page, page, 128), cache_dtype)
    tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((16,), (16, 8192 // page), (17,)))
    return lowerings_of(index_scores, [query, weights, cache, *tables], resolve(target))


# --- wrong calls -----------------------------------------------------------------------------------------------------

QUERY, WEIGHTS, KEYS = jnp.ones((2, 4, 8)), jnp.ones((2, 4)), jnp.ones((3, 4, 8))
ONES, TABLE = jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arguments", "keywords", "summary"),
    [
        ((QUERY[0], WEIGHTS, KEYS, ONES, TABLE), {}, "the arrays of index_scores do not fit"),
        ((QUERY, WEIGHTS[:, :3], KEYS, ONES, TABLE), {}, "the arrays of index_scores do not fit"),
        ((QUERY, WEIGHTS.astype(int), KEYS, ONES, TABLE), {}, "the arrays of index_scores do not fit"),
        ((QUERY, WEIGHTS, KEYS[..., :7], ONES, TABLE), {}, "the arrays of index_scores do not fit"),
        ((QUERY, WEIGHTS, KEYS.astype(jnp.bfloat16), ONES, TABLE), {}, "the arrays of index_scores do not fit"),
        ((QUERY, WEIGHTS, KEYS[:, :, None].repeat(2, 2), ONES, TABLE), {}, "the arrays of index_scores do not fit"),
        ((QUERY, WEIGHTS, KEYS, ONES[:1], TABLE), {}, "the tables of index_scores do not fit"),
        ((QUERY, WEIGHTS, KEYS, ONES, TABLE), {"key_scale": jnp.ones(3)}, "index_scores cannot take this key_scale"),
    ],
)
def test_wrong_calls(arguments: Any, keywords: Any, summary: str) -> None:
    with pytest.raises(ArgumentError, match=summary) as error:
        index_scores(*arguments, **keywords)
    assert error.value.fix and error.value.got


@pytest.mark.one_backend
@pytest.mark.parametrize("num_keys", [0, 1.5, "8"])
def test_wrong_numbers_of_keys(num_keys: Any) -> None:
    with pytest.raises(ArgumentError, match="num_keys must be a static integer of at least 1"):
        select_keys(QUERY, WEIGHTS, KEYS, ONES, TABLE, num_keys=num_keys)
