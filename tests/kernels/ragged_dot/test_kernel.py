import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.ragged_dot import ragged_dot, reference
from tilekern.kernels.ragged_dot.cases import CASES, Case
from tilekern.kernels.ragged_dot.kernel import cuda_blocks, ragged_dot_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = (
    {},
    {"block_m": 8, "block_n": 16, "block_k": 8},
    {"block_m": 5, "block_n": 7, "block_k": 3},
    {"block_m": 1, "block_n": 16, "block_k": 32},
)
naive = jax.jit(reference)


def check(lhs: Any, rhs: Any, sizes: Any, **blocks: int) -> None:
    with jax.enable_x64(lhs.dtype == np.float64):
        out, low = ragged_dot(lhs, rhs, sizes, **blocks), naive(lhs, rhs, sizes)
    assert_close(out, in_float64(reference, lhs, rhs, sizes), low, length=lhs.shape[1])


def group_sizes(groups: int, rows: int) -> st.SearchStrategy[np.ndarray]:
    """Sizes of so many groups, empty ones among them; together fewer than the rows, as many, or more."""
    sizes = st.integers(0, max(rows, 1)) | st.just(0) | st.just(8)
    return st.lists(sizes, min_size=groups, max_size=groups).map(lambda n: np.array(n, np.int32))


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), m=lengths(8), n=st.sampled_from([0, 1, 16, 19]), k=st.sampled_from([0, 1, 16, 21]))
def test_floats(dtype: str, data: st.DataObject, m: int, n: int, k: int) -> None:
    groups = data.draw(st.sampled_from([1, 4]))
    lhs, rhs = (data.draw(arrays(jnp.dtype(dtype), shape)) for shape in ((m, k), (groups, k, n)))
    check(lhs, rhs, data.draw(group_sizes(groups, m)), **data.draw(st.sampled_from(BLOCKS)))


@pytest.mark.parametrize("blocks", BLOCKS)
@given(data=st.data())
def test_any_borders(blocks: dict[str, int], data: st.DataObject) -> None:
    """Borders inside of tiles and between them, several in one tile, empty groups, rows that no group has."""
    lhs, rhs = (data.draw(arrays(np.float32, shape)) for shape in ((21, 6), (5, 6, 9)))
    sizes = data.draw(group_sizes(5, 8))
    check(lhs, rhs, sizes, **blocks)
    inside = np.minimum(sizes, 21 - np.minimum(np.cumsum(sizes) - sizes, 21))
    theirs = jax.lax.ragged_dot(lhs, rhs, inside, precision="highest")
    assert_close(theirs, in_float64(reference, lhs, rhs, sizes), naive(lhs, rhs, sizes), length=6)
    assert (ragged_dot(lhs, rhs, sizes, **blocks)[sizes.sum() :] == 0).all()


@given(data=st.data(), sizes=group_sizes(3, 9))
def test_nan_and_infinities_stay_in_their_group(data: st.DataObject, sizes: np.ndarray) -> None:
    specials = [np.inf, -np.inf, np.nan, 0.0]
    lhs, rhs = (data.draw(arrays(np.float32, shape, specials)) for shape in ((19, 6), (3, 6, 9)))
    check(lhs, rhs, sizes, block_m=8, block_n=4, block_k=4)


@pytest.mark.parametrize("transposed", [False, True])
@given(data=st.data(), sizes=group_sizes(5, 8), blocks=st.sampled_from(BLOCKS))
def test_programs_that_own_groups(
    transposed: bool, data: st.DataObject, sizes: np.ndarray, blocks: dict[str, int]
) -> None:
    """As `test_any_borders`, and NaN stays in its group."""
    lhs, rhs = (data.draw(arrays(np.float32, shape, [np.nan])) for shape in ((21, 6), (5, 6, 9)))
    ends = np.minimum(np.cumsum(sizes, dtype=np.int32), 21)
    given = rhs.swapaxes(1, 2) if transposed else rhs
    out = ragged_dot_forward(lhs, given, ends, transpose_rhs=transposed, owned="groups", **blocks)
    assert_close(out, in_float64(reference, lhs, rhs, sizes), naive(lhs, rhs, sizes), length=6)
    assert (out[sizes.sum() :] == 0).all()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("rows", "owned"), [(64, "groups"), (8, "rows")], ids=["most groups have rows", "most groups may be empty"]
)
def test_tpus_own_groups_by_the_schedule(rows: int, owned: str) -> None:
    lhs, rhs, sizes = Case("case", rows, 128, 256, 8).arrays(jax.random.key(0), jnp.bfloat16)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    plan = ragged_dot_forward.trace(lhs, rhs, ends).lower("tpu:v5e").plan
    assert ("g: 8 steps" in plan) == (owned == "groups")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_sizes_of_any_integer_dtype(dtype: str) -> None:
    """Their sum need not fit their dtype."""
    lhs, rhs, sizes = np.ones((300, 1), np.float32), np.arange(3.0).reshape(3, 1, 1), np.array([100, 100, 90])
    out = ragged_dot(lhs, rhs.astype(np.float32), sizes.astype(dtype))
    np.testing.assert_array_equal(out[:, 0], np.repeat([0, 1, 2, 0], [100, 100, 90, 10]))


def test_no_groups() -> None:
    assert (ragged_dot(jnp.ones((3, 2)), jnp.ones((0, 2, 4)), jnp.zeros(0, jnp.int32)) == jnp.zeros((3, 4))).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    lhs, rhs, sizes = case.arrays(jax.random.key(0), dtype)
    assert (lhs.shape, rhs.shape) == ((case.rows, case.inner), (case.groups, case.inner, case.columns))
    assert sizes.sum() == case.rows
    check(lhs, rhs, sizes, block_m=16, block_n=32, block_k=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    lhs, rhs, sizes = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(ragged_dot, lhs, rhs, sizes).shape == (case.rows, case.columns)


@pytest.mark.one_backend
@settings(max_examples=5)
@given(data=st.data(), sizes=group_sizes(3, 9))
def test_the_interpreter_agrees(data: st.DataObject, sizes: np.ndarray) -> None:
    lhs, rhs = (data.draw(arrays(np.float32, shape)) for shape in ((19, 6), (3, 6, 9)))
    ends = np.minimum(np.cumsum(sizes, dtype=np.int32), 19)
    traced = ragged_dot_forward.trace(lhs, rhs, ends, block_m=8, block_n=4, block_k=4)
    oracle, low = in_float64(reference, lhs, rhs, sizes), naive(lhs, rhs, sizes)
    assert_close(tk.interpret(traced)(lhs, rhs, ends), oracle, low, length=6)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "got"),
    [
        ((2, 3), (4, 2, 5), jnp.zeros(4, jnp.int32), "lhs = float32[2, 3], rhs = float32[4, 2, 5]"),
        ((2, 3), (3, 5), jnp.zeros(4, jnp.int32), "rhs = float32[3, 5]"),
        ((1, 2, 3), (4, 3, 5), jnp.zeros(4, jnp.int32), "lhs = float32[1, 2, 3]"),
        ((2, 3), (4, 3, 5), jnp.zeros(3, jnp.int32), "group_sizes = int32[3]"),
        ((2, 3), (4, 3, 5), jnp.zeros(4), "group_sizes = float32[4]"),
        ((2, 3), (4, 3, 5), [1, 1, 0, 0], "group_sizes = [1, 1, 0, 0] (list)"),
    ],
)
def test_arrays_that_do_not_fit(lhs: tuple[int, ...], rhs: tuple[int, ...], sizes: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        ragged_dot(jnp.zeros(lhs), jnp.zeros(rhs), sizes)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_arrays_of_different_dtypes() -> None:
    with pytest.raises(ArgumentError, match=re.escape("lhs = float32[2, 2], rhs = bfloat16[1, 2, 2]")):
        ragged_dot(jnp.zeros((2, 2)), jnp.zeros((1, 2, 2), jnp.bfloat16), jnp.array([2]))


def exact_ends(sizes: np.ndarray, rows: int) -> list[int]:
    """Ends of the groups, in Python's integers."""
    ends = [min(sum(map(int, sizes[: g + 1])), rows) for g in range(len(sizes))]
    return [0, *ends]


SIZES = st.integers(0, 9) | st.sampled_from([2**7 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])


@settings(max_examples=20)
@given(sizes=st.lists(SIZES, min_size=4, max_size=4), x64=st.booleans(), traced=st.booleans(), data=st.data())
def test_large_sizes_end_at_the_last_row(sizes: list[int], x64: bool, traced: bool, data: st.DataObject) -> None:
    """Sums of sizes do not wrap around, in any dtype that holds them, with 64-bit types on or off."""
    most = max(sizes)
    dtypes = [d for d in ("int8", "int32", "uint32", "int64", "uint64") if np.iinfo(d).max >= most]
    given = np.array(sizes, data.draw(st.sampled_from(dtypes)))
    ends = exact_ends(given, 11)
    with jax.enable_x64(x64):
        # What JAX itself makes of an array before a traced function sees it is not ours.
        group_sizes = jnp.asarray(given) if traced else given
        ends = exact_ends(np.asarray(group_sizes), 11)
        if min(np.asarray(group_sizes), default=0) < 0:
            return
        out = ragged_dot(jnp.ones((11, 1)), jnp.arange(1.0, 5.0).reshape(4, 1, 1), group_sizes, block_m=4)
    expected = np.zeros(11)
    for g in range(4):
        expected[ends[g] : ends[g + 1]] = g + 1
    np.testing.assert_array_equal(out[:, 0], expected)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@given(
    rows=st.sampled_from([1, 24, 300, 5000]),
    groups=st.sampled_from([1, 8, 64]),
    columns=st.sampled_from([0, 200, 4096]),
    inner=st.integers(1, 5000),
    products=st.sampled_from([1, 2]),
    dtype=st.sampled_from(FLOATS[:3]),
)
def test_blocks_of_gpus_are_powers_of_two(
    target: str, rows: int, groups: int, columns: int, inner: int, products: int, dtype: str
) -> None:
    shapes = (rows, inner), (groups, inner, columns or 512)
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    blocks = cuda_blocks(*operands, tk.device(target), columns=columns, products=products)
    assert all(n.bit_count() == 1 for name, n in blocks.items() if name != "num_stages"), blocks
