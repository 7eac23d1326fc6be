"""The public function inside JAX programs, and its errors."""

import importlib
import inspect
import math
import typing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.flash_attention.problems import Problem, judge
from tilekern.errors import ArgumentError, TargetError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.nn import dot_product_attention

PROBLEM = Problem((2,), 21, 37, 4, 2, 12, 20)
CAUSAL = partial(flash_attention, causal=True, q_offset=3, block_q=16, block_k=16)


# --- inside JAX programs --------------------------------------------------------------------------------------------


def test_the_logsumexp_comes_only_if_asked_for() -> None:
    q, k, v = PROBLEM.normal()
    out, logsumexp = CAUSAL(q, k, v, return_logsumexp=True)
    alone = CAUSAL(q, k, v)
    np.testing.assert_array_equal(alone, out)
    judge((out, logsumexp), q, k, v, causal=True, q_offset=3)


@pytest.mark.parametrize("batch", [(), (3, 1, 2), (0, 2)])
def test_leading_dims_are_a_batch(batch: tuple[int, ...]) -> None:
    q, k, v = replace(PROBLEM, batch=batch).normal()
    out, logsumexp = CAUSAL(q, k, v, return_logsumexp=True)
    flat = CAUSAL(*(x.reshape(-1, *x.shape[len(batch) :]) for x in (q, k, v)), return_logsumexp=True)
    assert (out.shape, logsumexp.shape) == ((*batch, 21, 4, 20), (*batch, 21, 4))
    np.testing.assert_array_equal(out.reshape(-1, 21, 4, 20), flat[0])
    np.testing.assert_array_equal(logsumexp.reshape(-1, 21, 4), flat[1])


def test_one_offset_for_each_element_of_the_batch() -> None:
    q, k, v = Problem((2, 3), 21, 37, 4, 2, 12, 20).normal()
    offsets = jnp.array([[-30, -5, 0], [3, 16, 40]], jnp.int8)
    together = jax.jit(partial(CAUSAL, return_logsumexp=True))(q, k, v, q_offset=offsets)
    judge(together, q, k, v, causal=True, q_offset=np.asarray(offsets, np.int32))


@pytest.mark.parametrize("kind", [int, np.int64])
def test_offsets_of_64_bits_are_not_cut_off(kind: type) -> None:
    q, k, v = PROBLEM.normal()
    with jax.enable_x64(True):
        for huge, same in ((2**40, 37), (-(2**40), -21)):
            found, expected = (CAUSAL(q, k, v, q_offset=kind(offset)) for offset in (huge, same))
            np.testing.assert_array_equal(found, expected)


WIDE = {
    "uint32": [0, 1, 2**31, 2**32 - 1, 2**32 - 4],
    "int64": [0, 2**32, 2**40, -(2**31), 2**63 - 1, -1],
    "uint64": [0, 2**32, 2**63, 2**64 - 1],
}


@pytest.mark.one_backend
@settings(max_examples=15)
@given(data=st.data(), dtype=st.sampled_from([*WIDE]), x64=st.booleans())
def test_integers_of_any_width_keep_their_values(data: st.DataObject, dtype: str, x64: bool) -> None:
    """Ids are equal only where all of their bits are, lengths and offsets beyond the ends are at the ends."""
    q, k, v = (x[:2] for x in Problem((2,), 6, 6, 2, 2, 4, 4).normal())

    def drawn(*shape: int) -> np.ndarray:
        numbers = st.lists(st.sampled_from(WIDE[dtype]), min_size=math.prod(shape), max_size=math.prod(shape))
        return np.array(data.draw(numbers), dtype).reshape(shape)

    of_queries, of_keys, lengths, offsets = drawn(2, 6), drawn(2, 6), np.maximum(drawn(2), 0), drawn(2)
    _, ranks = np.unique(np.stack([of_queries, of_keys]), return_inverse=True)
    small = {
        "segment_ids": tuple(ranks.reshape(2, 2, 6).astype(np.int32)),
        "kv_lengths": np.array([min(int(n), 6) for n in lengths], np.int32),
        "q_offset": np.array([max(-9, min(int(n), 9)) for n in offsets], np.int32),
    }
    with jax.enable_x64(x64):
        found = CAUSAL(q, k, v, segment_ids=(of_queries, of_keys), kv_lengths=lengths, q_offset=offsets)
    np.testing.assert_array_equal(found, CAUSAL(q, k, v, **small))


@pytest.mark.one_backend
def test_traced_segments_of_64_bits() -> None:
    q, k, v = Problem((1,), 3, 3, 1, 1, 4, 4).normal()
    with jax.enable_x64(True):
        ids = jnp.array([[0, 2**32, -(2**40)]])
        found = jax.jit(lambda ids: flash_attention(q, k, v, segment_ids=ids))(ids)
    np.testing.assert_allclose(found, v, rtol=1e-6)  # each attends to itself only


def test_jit_scan_and_checkpoint() -> None:
    q, k, v = PROBLEM.normal()
    eager = CAUSAL(q, k, v)
    np.testing.assert_array_equal(jax.jit(CAUSAL)(q, k, v), eager)
    np.testing.assert_array_equal(jax.checkpoint(CAUSAL)(q, k, v), eager)

    def decode(position: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        return position + 1, CAUSAL(query[:, None], k, v, q_offset=position)[:, 0]

    _, stepwise = jax.lax.scan(decode, jnp.int32(3), jnp.moveaxis(q, 1, 0))
    judge((jnp.moveaxis(stepwise, 0, 1), CAUSAL(q, k, v, return_logsumexp=True)[1]), q, k, v, causal=True, q_offset=3)


def test_vmap_is_a_batch() -> None:
    q, k, v = PROBLEM.normal()
    mapped = jax.vmap(partial(CAUSAL, return_logsumexp=True), in_axes=(1, None, 0))
    judge(mapped(q.swapaxes(0, 1), k[0], v), q, np.stack([k[0], k[0]]), v, causal=True, q_offset=3)


@pytest.mark.one_backend
def test_export_and_call() -> None:
    q, k, v = PROBLEM.normal()
    exported = jax.export.export(jax.jit(CAUSAL))(q, k, v)
    np.testing.assert_array_equal(exported.call(q, k, v), CAUSAL(q, k, v))


@pytest.mark.one_backend
def test_many_calls_share_one_computation() -> None:
    q, k, v = Problem((2,), 21, 37, 4, 2, 12, 12).normal()

    def layers(x: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            x = CAUSAL(x, k, v)
        return x

    one, four = (jax.jit(layers, static_argnums=1).lower(q, count).as_text() for count in (1, 4))
    assert one.count("stablehlo.while") == four.count("stablehlo.while") > 0


# --- errors ---------------------------------------------------------------------------------------------------------

SHAPES = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 6)}


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "change",
    [
        {"query": (5, 8)},
        {"query": (5, 4, 8)},
        {"query": (3, 5, 4, 8)},
        {"query": (2, 5, 3, 8)},
        {"query": (2, 5, 4, 6)},
        {"key": (2, 6, 2, 8)},
        {"key": (2, 7, 4, 8)},
        {"key": (2, 7, 0, 8), "value": (2, 7, 0, 6)},
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(change: dict[str, tuple[int, ...]]) -> None:
    shapes = {**SHAPES, **change}
    q, k, v = (jnp.zeros(shape) for shape in shapes.values())
    with pytest.raises(ArgumentError) as caught:
        flash_attention(q, k, v)  # this line
    shown = ", ".join(f"{name} = float32[{', '.join(map(str, shape))}]" for name, shape in shapes.items())
    assert_says(caught.value, "the arrays of flash_attention do not fit", "query[*B, T, N, H]", shown)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("dtypes", "got"),
    [
        (("float32", "bfloat16", "float32"), "key = bfloat16[2, 7, 2, 8]"),
        (("int32", "int32", "int32"), "query = int32[2, 5, 4, 8]"),
        (("float8_e4m3fn",) * 3, "value = float8_e4m3fn[2, 7, 2, 6]"),
    ],
)
def test_dtypes_that_do_not_fit(dtypes: tuple[str, ...], got: str) -> None:
    q, k, v = (jnp.zeros(shape, dtype) for shape, dtype in zip(SHAPES.values(), dtypes, strict=True))
    with pytest.raises(ArgumentError) as caught:
        flash_attention(q, k, v)  # this line
    assert_says(caught.value, "the arrays of flash_attention do not fit", "one float dtype of at least 16 bits", got)


def test_arguments_that_are_no_arrays() -> None:
    with pytest.raises(ArgumentError) as caught:
        flash_attention([1.0], None, 2)  # this line
    assert_says(caught.value, "the arrays", "query[*B", "query = [1.0] (list), key = None (NoneType), value = 2 (int)")


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("offset", "got"),
    [
        (True, "True (bool)"),
        (1.5, "1.5 (float)"),
        (np.float32(1), "1.0 (float)"),  # numbers of NumPy are taken as Python's
        (np.zeros(3, np.int32), "int32[3]"),
        (np.zeros((2, 1), np.int32), "int32[2, 1]"),
    ],
    ids=str,
)
def test_offsets_that_do_not_fit(offset: Any, got: str) -> None:
    q, k, v = map(jnp.zeros, SHAPES.values())
    with pytest.raises(ArgumentError) as caught:
        flash_attention(q, k, v, causal=True, q_offset=offset)  # this line
    expected = "an int, or an integer array of shape () or [2]"
    assert_says(caught.value, "q_offset of flash_attention must be an integer", expected, f"q_offset = {got}")


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("keywords", "summary", "got"),
    [
        ({"scale": "large"}, "flash_attention cannot take this scale", "scale = 'large' (str)"),
        ({"causal": 1}, "flash_attention cannot take this causal", "causal = 1 (int)"),
        ({"block_q": 0}, "block_q", "block_q = 0"),
        ({"block_k": 1.5}, "block_k", "block_k = 1.5"),
    ],
    ids=str,
)
def test_keywords_that_do_not_fit(keywords: dict[str, Any], summary: str, got: str) -> None:
    q, k, v = map(jnp.zeros, SHAPES.values())
    with pytest.raises(ArgumentError) as caught:
        flash_attention(q, k, v, **keywords)  # this line
    assert_says(caught.value, summary, "", got)


def test_targets_that_do_not_exist() -> None:
    q, k, v = map(jnp.zeros, SHAPES.values())
    with pytest.raises(TargetError) as caught:
        flash_attention(q, k, v, target="abacus")  # this line
    assert_says(caught.value, "there is no such target", "cpu", "target = 'abacus'")
    np.testing.assert_array_equal(flash_attention(q, k, v, target="cpu:xla"), jnp.zeros((2, 5, 4, 6)))


def test_the_line_is_found_inside_jit() -> None:
    q, k, v = map(jnp.zeros, SHAPES.values())

    def attend(q: jax.Array) -> jax.Array:
        return flash_attention(q, k, v[:, 1:])  # this line

    with pytest.raises(ArgumentError) as caught:
        jax.jit(attend)(q)
    assert_says(caught.value, "the arrays of flash_attention do not fit", "", "value = float32[2, 6, 2, 6]")


def assert_says(error: Any, summary: str, expected: str, got: str) -> None:
    """The parts of a message; and the user's line, which has the comment."""
    assert summary in error.summary and expected in error.expected and got in error.got and error.fix
    assert error.loc.file == __file__ and "# this line" in error.loc.snippet()


@pytest.mark.one_backend
@pytest.mark.parametrize("function", [flash_attention, dot_product_attention])
def test_the_options_that_overloads_share_are_those_of_the_function(function: Any) -> None:
    options = typing.get_type_hints(importlib.import_module(function.__module__).Options)
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"return_logsumexp", "return_residual"}
    blocks = {"block_q", "block_k", "block_n", "backward_block_q", "backward_block_k", "num_warps", "num_stages"}
    assert set(options) == keywords | (blocks if function is flash_attention else set())
