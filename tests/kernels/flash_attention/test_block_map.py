"""The tiles that a mask leaves something of: against brute force; and the errors."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.tree_util import Partial

from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention.block_map import BlockMap, block_map
from tilekern.testing import lengths

pytestmark = pytest.mark.one_backend


# --- what is found --------------------------------------------------------------------------------------------------


@st.composite
def masks(draw: Any, least: int = 0) -> Any:
    """Masks with full and empty regions, that are 1 along some dims; and the size of all regions."""
    sizes = [draw(st.integers(1, 2)) for _ in range(2)] + [max(least, draw(lengths(8))) for _ in range(2)]
    sizes = [1 if draw(st.sampled_from([False, False, True])) else size for size in sizes]
    region = draw(st.sampled_from([1, 3, 4]))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    kinds = random.choice(3, (*sizes[:2], *(math.ceil(size / region) for size in sizes[2:])), p=[0.4, 0.3, 0.3])
    kinds = kinds.repeat(region, axis=2).repeat(region, axis=3)[:, :, : sizes[2], : sizes[3]]
    return np.where(kinds == 2, random.random(sizes) < 0.5, kinds == 1)


BLOCKS = st.fixed_dictionaries({"block_q": st.sampled_from([1, 3, 4, 8, 40]), "block_k": st.sampled_from([1, 3, 4, 8])})


@settings(max_examples=settings().max_examples // 5)  # each compiles several programs
@given(masks(), BLOCKS, st.sampled_from([np.asarray, jnp.asarray]))
def test_an_array(mask: Any, blocks: dict[str, int], kind: Any) -> None:
    check(block_map(kind(mask), **blocks), mask, blocks)


@settings(max_examples=settings().max_examples // 5)  # each compiles several programs
@given(masks(), BLOCKS, st.integers(0, 17), st.integers(0, 17))
def test_an_array_that_broadcasts(mask: Any, blocks: dict[str, int], queries: int, keys: int) -> None:
    queries, keys = (n if size == 1 else size for n, size in zip((queries, keys), mask.shape[2:], strict=True))
    found = block_map(mask, queries=queries, keys=keys, **blocks)
    check(found, np.broadcast_to(mask, (*mask.shape[:2], queries, keys)), blocks)


@settings(max_examples=settings().max_examples // 5)  # each compiles several programs
@given(masks(least=1), BLOCKS, st.booleans())
def test_a_function_with_arrays(mask: Any, blocks: dict[str, int], jit: bool) -> None:
    def found(table: Any) -> BlockMap:
        batch, heads, queries, keys = mask.shape
        mask_mod = Partial(lambda table, b, n, i, j: table[b, n, i, j], table)
        return block_map(mask_mod, queries=queries, keys=keys, batch=batch, heads=heads, **blocks)

    check((jax.jit(found) if jit else found)(mask), mask, blocks)


@pytest.mark.sweep(5)
@settings(max_examples=settings().max_examples // 6)
@given(lengths(8), lengths(8), BLOCKS)
@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, n, i, j: j <= i,
        lambda b, n, i, j: (i // 4 + j // 4 + b) % 2 == 0,
        lambda b, n, i, j: i < 0,
        lambda b, n, i, j: j >= n,
        lambda b, n, i, j: True,
    ],
    ids=["causal", "checkerboard", "nothing", "columns", "everything"],
)
def test_a_function(mask_mod: Any, queries: int, keys: int, blocks: dict[str, int]) -> None:
    shape = 2, 3, queries, keys
    mask = np.broadcast_to(mask_mod(*np.indices(shape, sparse=True)), shape)
    check(block_map(mask_mod, queries=queries, keys=keys, batch=2, heads=3, **blocks), mask, blocks)


def test_it_passes_through_jit() -> None:
    mask = np.tril(np.ones((1, 1, 20, 20), bool))
    found = jax.jit(partial(block_map, block_q=8, block_k=4))(mask)
    same = jax.jit(lambda x: x)(found)
    assert isinstance(same, BlockMap) and same.block("queries") == 8 and same.block("keys") == 4
    check(same, mask, {"block_q": 8, "block_k": 4})


def test_a_function_is_never_a_whole_matrix() -> None:
    size, rows = 2**14, 128
    found = partial(block_map, lambda b, n, i, j: j <= i, queries=size, keys=size, block_q=rows, block_k=rows)
    memory = jax.jit(found).lower().compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= 4 * rows * size  # an int32 for each element of a tile


def check(found: BlockMap, mask: Any, blocks: dict[str, int]) -> None:
    """Everything is as brute force finds it."""
    assert (found.block_q, found.block_k) == (blocks["block_q"], blocks["block_k"])
    sizes = blocks["block_q"], blocks["block_k"]
    check_along(found.along("keys"), mask, *sizes)
    check_along(found.along("queries"), mask.swapaxes(2, 3), *sizes[::-1])


def check_along(found: tuple[jax.Array, ...], mask: Any, rows: int, columns: int) -> None:
    batch, heads = mask.shape[:2]
    tiles = math.ceil(mask.shape[2] / rows), math.ceil(mask.shape[3] / columns)
    numbers, full, live = map(np.asarray, found)
    assert all(x.dtype == np.int32 for x in found)
    assert (numbers.shape, full.shape, live.shape) == ((batch, heads, *tiles), *((batch, heads, tiles[0]),) * 2)
    for b, n, row in np.ndindex(full.shape):
        of_row = mask[b, n, row * rows : (row + 1) * rows]
        tile_of = [of_row[:, column * columns : (column + 1) * columns] for column in range(tiles[1])]
        fulls = [column for column, tile in enumerate(tile_of) if tile.all()]
        partials = [column for column, tile in enumerate(tile_of) if tile.any() and not tile.all()]
        assert (full[b, n, row], live[b, n, row]) == (len(fulls), len(fulls) + len(partials))
        dead = tiles[1] - live[b, n, row]
        assert numbers[b, n, row].tolist() == [*fulls, *partials, *[0] * dead]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "options", "got"),
    [
        (np.ones((1, 1, 3, 4)), {}, "mask = float64[1, 1, 3, 4]"),
        (np.ones((3, 4), bool), {}, "mask = bool[3, 4]"),
        (None, {}, "mask = None"),
        (np.ones((1, 1, 3, 4), bool), {"queries": 5}, "queries = 5"),
        (np.ones((1, 1, 3, 4), bool), {"keys": 1}, "keys = 1"),
    ],
    ids=["floats", "two dims", "None", "queries", "keys"],
)
def test_arrays_that_are_no_mask(mask: Any, options: dict[str, int], got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        block_map(mask, **options)
    assert "the mask of block_map does not fit" in caught.value.summary
    assert "bool[B|1, N|1, T|1, S|1]" in caught.value.expected and got in caught.value.got and caught.value.fix


@pytest.mark.parametrize(
    ("mask_mod", "got"),
    [
        (lambda b, n, i, j: 1.0 * (j <= i), "float32[128, 4]"),
        (lambda b, n, i, j: i - j, "int32[128, 4]"),
        (lambda b, n, i, j: (j <= i)[None], "bool[1, 128, 4]"),
        (lambda b, n, i, j: None, "None"),
        (Partial(lambda x, b, n, i, j: x[j], np.ones(4)), "[1, 4]"),
    ],
    ids=["floats", "integers", "three dims", "None", "Partial"],
)
def test_functions_that_return_no_mask(mask_mod: Any, got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        block_map(mask_mod, queries=3, keys=4)
    assert "mask_mod of block_map does not return a mask" in caught.value.summary
    assert "bool" in caught.value.expected and got in caught.value.got and caught.value.fix


@pytest.mark.parametrize("missing", ["queries", "keys"])
def test_a_function_needs_lengths(missing: str) -> None:
    options = {"queries": 3, "keys": 4}
    del options[missing]
    with pytest.raises(ArgumentError) as caught:
        block_map(lambda b, n, i, j: j <= i, **options)
    assert "needs the lengths" in caught.value.summary and f"{missing} = None" in caught.value.got
    assert "queries = T and keys = S" in caught.value.expected and caught.value.fix


@pytest.mark.parametrize(
    ("options", "expected", "got"),
    [
        ({"block_q": 0}, ">= 1", "block_q = 0"),
        ({"block_k": -1}, ">= 1", "block_k = -1"),
        ({"block_k": 2.0}, ">= 1", "block_k = 2.0 (float)"),
        ({"queries": -1}, ">= 0", "queries = -1"),
        ({"keys": "4"}, ">= 0", "keys = '4' (str)"),
        ({"batch": None}, ">= 0", "batch = None"),
        ({"heads": True}, ">= 0", "heads = True (bool)"),
    ],
    ids=str,
)
def test_sizes_that_are_none(options: dict[str, Any], expected: str, got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        block_map(lambda b, n, i, j: j <= i, **{"queries": 3, "keys": 4, **options})
    assert "must be a static integer" in caught.value.summary and caught.value.fix
    assert expected in caught.value.expected and got in caught.value.got
