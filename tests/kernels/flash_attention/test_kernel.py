"""The numbers: everything against the float64 oracle."""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tests.kernels.flash_attention.problems import BLOCKS, DTYPES, Problem, check, judge, naive, problems
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import MemoryOp
from tilekern.ir.text import to_text
from tilekern.ir.types import BOOL
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.arguments import Config, Extras
from tilekern.kernels.flash_attention.cases import CASES, Case
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close, in_float64

GOLDEN = Path(__file__).parent / "golden"
FIXED = Problem((2,), 21, 37, 4, 2, 12, 20)


@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), dtype=st.sampled_from(DTYPES), blocks=st.sampled_from(BLOCKS))
def test_all_shapes_and_keywords(causal: bool, data: st.DataObject, dtype: str, blocks: dict[str, int]) -> None:
    problem = data.draw(problems(causal))
    check(*data.draw(problem.arrays(dtype)), blocks=blocks, **problem.keywords)


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [{}, {"block_q": 21, "block_k": 37}, {"block_q": 1, "block_k": 6}], ids=str)
def test_blocks_do_not_matter(causal: bool, blocks: dict[str, int]) -> None:
    q, k, v = FIXED.normal()
    check(q, k, v, blocks=blocks, causal=causal)


@pytest.mark.parametrize(
    "problem",
    [
        Problem((2,), 3, 4, 0, 0, 8, 8),
        Problem((2,), 3, 4, 4, 2, 0, 8),
        Problem((2,), 3, 4, 4, 2, 8, 0),
        Problem((0,), 3, 4, 4, 2, 8, 8),
    ],
    ids=["no heads", "no width", "no value width", "no batch"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_dims_of_size_zero(problem: Problem, causal: bool) -> None:
    check(*(np.ones(shape, np.float32) for shape in problem.shapes), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(dtype: str, data: st.DataObject) -> None:
    check(*data.draw(FIXED.arrays(dtype, (np.inf, -np.inf, np.nan, 0.0))), blocks={"block_q": 16, "block_k": 8})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=10)
@given(data=st.data())
def test_large_logits(dtype: str, causal: bool, data: st.DataObject) -> None:
    """Of about ±100, where exp overflows float32; so few keys count that the naive error is no mean of many."""
    q, k, v = data.draw(FIXED.arrays(dtype))
    check((q * 30).astype(q.dtype), k, v, blocks={"block_q": 16, "block_k": 8}, causal=causal)


@pytest.mark.parametrize(
    ("dtype", "large"), [("float32", 1e36), ("bfloat16", 1e36), ("float16", 6e4), ("float64", 1e306)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_huge_logits_pick_one_value(dtype: str, large: float, causal: bool) -> None:
    """Logits up to 37 * `large`, near the end of the accumulator's range: a row is the value of its largest logit."""
    q, k, v = (np.zeros(shape, jnp.dtype(dtype)) for shape in FIXED.shapes)
    ranks = np.random.default_rng(0).permutation(37) + 1
    q[..., 0], k[..., 0] = large, ranks[:, None]
    v[:] = np.random.default_rng(1).standard_normal(v.shape)
    keywords = {"causal": causal, "scale": np.log(2)}  # logits in base 2 are then products of q and k, and exact
    with jax.enable_x64(dtype == "float64"):
        out, logsumexp = flash_attention(q, k, v, return_logsumexp=True, block_q=16, block_k=8, **keywords)
    best = np.array([ranks[: t + 1 if causal else None].argmax() for t in range(21)])
    np.testing.assert_array_equal(out, np.repeat(v[:, best], 2, axis=2))
    largest = np.float64(q[0, 0, 0, 0]) * ranks[best] * np.log(2)
    expected = np.broadcast_to(largest[:, None], logsumexp.shape)
    assert_close(logsumexp, expected, expected.astype(logsumexp.dtype))


@pytest.mark.parametrize(
    ("offset", "traced"), [(-21, False), (-5, False), (36, False), (-100, True), (-5, True), (1000, True)]
)
def test_rows_that_attend_to_nothing_and_to_all(offset: int, traced: bool) -> None:
    q, k, v = FIXED.normal()
    q_offset = jnp.int32(offset) if traced else offset
    blocks = {"block_q": 16, "block_k": 8}
    out, logsumexp = flash_attention(q, k, v, causal=True, q_offset=q_offset, return_logsumexp=True, **blocks)
    judge((out, logsumexp), q, k, v, causal=True, q_offset=offset)
    nothing = max(0, min(-offset, 21))
    assert (out[:, :nothing] == 0).all() and (logsumexp[:, :nothing] == -jnp.inf).all()
    assert jnp.isfinite(logsumexp[:, nothing:]).all()
    if offset >= 36:
        full = flash_attention(q, k, v, **blocks)
        assert_close(out, np.asarray(full, np.float64), naive(q, k, v)[0], length=37)


@pytest.mark.one_backend
@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=3)
@given(data=st.data())
def test_the_interpreter_agrees(causal: bool, data: st.DataObject) -> None:
    problem = Problem((2,), 11, 13, 2, 1, 5, 3)
    q, k, v = data.draw(problem.arrays("float32", () if causal else (np.nan, np.inf)))
    offsets = np.array([-3, 4], np.int32)
    blocks = {"block_q": 4, "block_k": 8}
    kernel = flash_attention_forward.trace(
        *(q, k, v, Extras(q_offset=offsets)),
        config=Config(0.5, causal=causal, offset=1),
        return_logsumexp=True,
        **blocks,
    )
    for run in (tk.interpret(kernel), kernel.lower("cpu:xla").compile()):
        out, logsumexp, _ = run(q, k, v, Extras(q_offset=offsets))
        judge((out, logsumexp), q, k, v, causal=causal, scale=0.5, q_offset=offsets + 1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(21, 37), (37, 21), (32, 32)])
def test_jax_nn_means_the_same(causal: bool, queries: int, keys: int) -> None:
    q, k, v = Problem((2,), queries, keys, 4, 2, 12, 12).normal()
    theirs = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))(q, k, v)
    oracle, _ = in_float64(reference, q, k, v, causal=causal)
    low, _ = naive(q, k, v, causal=causal)
    assert_close(theirs, oracle, low, length=keys)
    assert_close(flash_attention(q, k, v, causal=causal, block_q=16, block_k=16), oracle, theirs, length=keys)


def test_a_softmax_in_bfloat16_would_be_found() -> None:
    """The rule is sharp enough: float32 inputs need float32 throughout, and the diagonal must be right."""
    q, k, v = FIXED.normal()
    for wrong in (
        reference(q, k, v, causal=True, dtype=jnp.bfloat16),
        reference(q, k, v, causal=True, q_offset=1),
        reference(q, k, v, causal=True, scale=0.2887),
    ):
        with pytest.raises(AssertionError, match="too far from the oracle"):
            judge(wrong, q, k, v, causal=True)


# --- real models ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case) -> None:
    check(*case.arrays(jax.random.key(0), "bfloat16"), blocks={"block_q": 32, "block_k": 32}, **case.keywords)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_cases_keep_what_is_awkward(case: Case) -> None:
    small = case.small()
    assert small.queries % 32 == case.queries % 32 and small.keys % 32 == case.keys % 32
    assert max(small.queries, small.keys) < 96 and small.heads <= 16 and small.width <= 64
    assert small.width * case.value_width == small.value_width * case.width
    assert small.heads % small.groups == 0 and (small.heads > small.groups) == (case.heads > case.groups)
    assert (small.queries == small.keys, small.causal) == (case.queries == case.keys, case.causal)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_sizes_are_traced(case: Case) -> None:
    avals = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    out, logsumexp = jax.eval_shape(partial(flash_attention, return_logsumexp=True, **case.keywords), *avals)
    assert (out.shape, out.dtype) == ((case.batch, case.queries, case.heads, case.value_width), jnp.bfloat16)
    assert (logsumexp.shape, logsumexp.dtype) == ((case.batch, case.queries, case.heads), jnp.float32)


# --- the block IR ---------------------------------------------------------------------------------------------------


def traced(problem: Problem, causal: bool, return_logsumexp: bool, block_n: int = 1) -> Func:
    avals = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in problem.shapes)
    keywords = {"config": Config(0.25, causal=causal), "block_q": 32, "block_k": 16, "block_n": block_n}
    return flash_attention_forward.trace(*avals, Extras(), return_logsumexp=return_logsumexp, **keywords).ir


FUNCS = {
    "divisible_full": partial(traced, Problem((2,), 64, 64, 4, 2, 16, 16), causal=False, return_logsumexp=True),
    "heads_together": partial(
        traced, Problem((2,), 4, 64, 6, 2, 16, 16), causal=True, return_logsumexp=True, block_n=3
    ),
    "ragged_causal": partial(traced, Problem((2,), 100, 70, 4, 4, 16, 24), causal=True, return_logsumexp=False),
}


@pytest.mark.parametrize("name", FUNCS)
def test_the_ir_is_as_it_was(name: str) -> None:
    """UPDATE_GOLDEN=1 writes the files anew; read their diff."""
    file, text = GOLDEN / f"{name}.txt", to_text(FUNCS[name]())
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.one_backend
@pytest.mark.parametrize(("name", "masked"), [("divisible_full", False), ("ragged_causal", True)])
def test_masks_are_elided_where_nothing_is_masked(name: str, masked: bool) -> None:
    func = FUNCS[name]()
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    masks = [
        op for op in fold.body.walk() if any(v.tile.dtype == BOOL and v.tile.shape == (32, 16) for v in op.results)
    ]
    assert bool(masks) == masked
    accesses = [op for op in func.walk() if isinstance(op, MemoryOp)]
    assert not any(op.masked for op in accesses)
    assert all(op.access.in_bounds for op in accesses) != masked
