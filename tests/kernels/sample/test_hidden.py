"""Tokens of products against those of the logits; scores that nearly tie; what fits into memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tilekern as tk
from tests.kernels.sample.test_kernel import KEY, assert_best_agree, chi_squared, words_of
from tilekern.errors import ArgumentError
from tilekern.kernels import QuantizedArray
from tilekern.kernels.sample import hidden_reference, sample, sample_hidden
from tilekern.kernels.sample.best_of_parts import best_of_parts, best_tokens, certain_token, merged
from tilekern.kernels.sample.checks import rates_of_rows
from tilekern.kernels.sample.completed import certain_tokens_of_filters, completed_tokens
from tilekern.kernels.sample.fixed_point import gumbel
from tilekern.kernels.sample.part_candidates import candidates_of_parts
from tilekern.kernels.sample.product import Form, Operands
from tilekern.testing import in_float64

SCALE = np.float32(2**20 * np.log2(np.e))


def operands(rows: int, width: int, words: int, dtype: Any = "float32") -> tuple[np.ndarray, np.ndarray]:
    """hidden and weight whose products and sums are exact in every order: logits are multiples of 1/8."""
    random = np.random.default_rng(width + words)
    hidden = random.integers(-3, 4, (rows, width)) / 2
    return hidden.astype(jnp.dtype(dtype)), (random.integers(-2, 3, (width, words)) / 4).astype(jnp.dtype(dtype))


def logits_of(hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(hidden, np.float32) @ np.asarray(weight, np.float32)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    "rate", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2, "temperature": 2.0}], ids=str
)
def test_tokens_are_those_of_the_logits(dtype: str, rate: dict[str, Any]) -> None:
    hidden, weight = operands(5, 19, 83, dtype)
    expected = np.asarray(sample(logits_of(hidden, weight), KEY, **rate))
    with jax.enable_x64(dtype == "float64"):
        for blocks in ({}, {"block_v": 32, "block_d": 8}):
            np.testing.assert_array_equal(sample_hidden(hidden, weight, KEY, **rate, **blocks), expected)


def test_bias_penalties_transposed_weights_and_rates_of_rows() -> None:
    hidden, weight = operands(5, 19, 83)
    bias = (np.arange(83) % 5 / 4).astype(np.float32)
    keywords: Any = {
        "temperature": np.float32([0.0, 0.5, 1.0, 2.0, 9.0]),
        "counts": np.arange(5 * 83).reshape(5, 83) % 4 - 1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": np.float32([0.1, -0.5, 0.5, 0.0, 1.0]),
    }
    expected = np.asarray(sample(logits_of(hidden, weight) + bias, KEY, **keywords))
    plain = partial(sample_hidden, hidden, weight, KEY, bias=bias, **keywords)
    np.testing.assert_array_equal(plain(), expected)
    turned = sample_hidden(hidden, weight.T, KEY, bias=bias, transpose_weight=True, block_v=16, **keywords)
    np.testing.assert_array_equal(turned, expected)


@pytest.mark.parametrize(
    ("dtype", "words", "blocks", "transposed", "rate"),
    [
        ("int8", 84, (2, 21), False, {"top_p": 0.6}),
        ("int8", 83, (1, 1), True, {}),
        ("int4", 83, (1, 83), False, {}),
        ("int4", 83, (2, 83), True, {"top_k": 5}),
        ("int4", 40, (32, 40), False, {}),  # of single numbers: applied in memory
        ("float8_e4m3fn", 84, (2, 1), False, {"temperature": 0.0}),
        ("float4_e2m1fn", 300, (2, 300), False, {"min_p": 0.2}),
    ],
)
def test_quantized_weights(
    dtype: str, words: int, blocks: tuple[int, int], transposed: bool, rate: dict[str, Any]
) -> None:
    """The tokens of the dequantised weight: all products and sums are exact."""
    hidden, _ = operands(5, 32, words)
    random = np.random.default_rng(3)
    values = jnp.asarray(random.integers(-2, 3, (32, words))).astype(dtype)
    weight = QuantizedArray(values, jnp.asarray(2.0 ** random.integers(-3, 1, blocks), jnp.float32))
    expected = sample(logits_of(hidden, np.asarray(weight.dequantize())), KEY, **rate)
    turned = QuantizedArray(values.T, weight.scales.T) if transposed else weight
    np.testing.assert_array_equal(sample_hidden(hidden, turned, KEY, transpose_weight=transposed, **rate), expected)


def test_softcap() -> None:
    """No two scores are so close here that roundings of tanh would differ."""
    hidden, weight = operands(5, 19, 83)
    expected = in_float64(partial(hidden_reference, softcap=2.0), hidden, weight, KEY)
    np.testing.assert_array_equal(sample_hidden(hidden, weight, KEY, softcap=2.0), expected)
    assert (np.asarray(sample_hidden(hidden, weight, KEY, softcap=0.01)) != expected).any()


def test_infinities_nan_and_an_empty_sum() -> None:
    """Rows that one pass cannot decide: `is_certain` says so, and the tokens are those of `sample`."""
    inf, nan = np.inf, np.nan
    x = np.float32([[-inf, 1, nan, 0], [-inf] * 4, [0, inf, 1, inf], [nan, nan, nan, 2], [1e38, 3e38, -3e38, 0]])
    hidden = np.ones((1, 1), np.float32)
    for row in x:
        for rate in ({}, {"temperature": 0.0}, {"temperature": 1e-30}, {"temperature": inf}):
            found = sample_hidden(hidden, row[None], KEY, **rate)
            assert found.tolist() == sample(row[None], KEY, **rate, min_p=0.0).tolist(), (row, rate)
    empty = sample_hidden(np.zeros((2, 0), np.float32), np.zeros((0, 9), np.float32), KEY)
    assert empty.tolist() == sample(np.zeros((2, 9), np.float32), KEY).tolist()


def nearly_tied(rows: int, words: int) -> np.ndarray:
    """float32 logits of rows by `words_of` in which a second score differs from the best one by up to 300 units."""
    random, number_of = np.random.default_rng(0), np.arange(words, dtype=np.uint32)
    noise = np.float64(jax.vmap(lambda row: gumbel(tk.random_bits(row, number_of)))(words_of(rows)))
    x = random.normal(0, 2, (rows, words))
    scores = x * SCALE + noise
    best, other = np.argmax(scores, axis=1), random.integers(0, words, rows)
    units = random.integers(-300, 300, rows)
    of_row = np.arange(rows)
    x[of_row, other] = (scores[of_row, best] + units - noise[of_row, other]) / SCALE
    return x.astype(np.float32)


def test_scores_that_nearly_tie() -> None:
    """Second tokens whose scores differ from the best by a few units: one pass claims no other token than `sample`."""
    rows = 400
    x = nearly_tied(rows, 8)
    expected = np.asarray(sample(x, KEY))
    arrays = Operands(np.eye(rows, dtype=np.float32), x), words_of(rows), np.full(rows, SCALE), None
    found = np.asarray(certain_token(*best_tokens(*arrays, form=Form()), arrays[2]))
    certain = found >= 0
    np.testing.assert_array_equal(found[certain], expected[certain])
    assert 0.2 < certain.mean() < 0.95  # both kinds occur
    np.testing.assert_array_equal(sample_hidden(*arrays[0][:2], KEY), expected)


@pytest.mark.parametrize(
    "rate", [{"top_k": 7}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.8, "min_p": 0.001}, {"top_k": 300}], ids=str
)
def test_filters_by_candidates_of_parts(rate: dict[str, Any]) -> None:
    """Rows with candidates that suffice, and rows whose largest logits share lanes; ties at the edge; greedy rows."""
    rows, words = 8, 1500
    x = np.round(np.random.default_rng(4).standard_normal((rows, words)) * 16).astype(np.float32) / 8
    x[1, 5 : 5 + 3 * 1024 : 128] += 9  # all in one lane
    x[2, 40:60] = 9  # equal ones
    x[3], x[4, 2:] = 0, -np.inf
    x[5, 700] = np.nan
    heat = np.float32([1, 1, 1, 1, 1, 2, 0, 0])
    x[7, [11, 12]] = 30
    expected = np.asarray(sample(x, KEY, temperature=heat, **rate))
    hidden = np.eye(rows, dtype=np.float32)
    # NaN and infinities would spread through zeros of the product.
    weight = np.where(np.isfinite(x), x, 0)
    found = sample_hidden(hidden, weight, KEY, temperature=heat, **rate)
    finite = np.isfinite(x).all(axis=1)
    np.testing.assert_array_equal(np.asarray(found)[finite], expected[finite])
    for row in np.flatnonzero(~finite):
        one = words_of(rows)[row]
        alone = partial(sample_hidden, hidden[:1, :1], x[row : row + 1], temperature=heat[row], **rate)
        assert (
            alone(jax.random.wrap_key_data(one)).tolist()
            == sample(x[row : row + 1], jax.random.wrap_key_data(one), temperature=heat[row], **rate).tolist()
        )


def test_candidates_tell_most_rows() -> None:
    """And never a token that is not the token of `sample`."""
    x = np.random.default_rng(5).standard_normal((64, 2000)).astype(np.float32) * 3
    x[::8, 3 : 3 + 3 * 128 : 128] = 20, 21, 22  # three in a lane of one part, of which a candidate is missing
    operands_of_rows = Operands(np.eye(64, dtype=np.float32), x)
    rates = rates_of_rows("", (64,), 2000, 1.0, 12, 0.9, None)
    found = np.asarray(certain_tokens_of_filters(operands_of_rows, words_of(64), rates, None, form=Form(), parts=2))
    expected = np.asarray(sample(x, KEY, top_k=12, top_p=0.9))
    certain = found >= 0
    np.testing.assert_array_equal(found[certain], expected[certain])
    assert not certain[::8].any() and certain.mean() > 0.5


@pytest.mark.one_backend
def test_frequencies_of_many_draws() -> None:
    """χ² of 200,000 draws."""
    p = np.array([0.38, 0.3, 0.15, 0.1, 0.04, 0.02, 0.01])
    hidden, weight = jnp.ones((200_000, 1)), jnp.log(jnp.array(p, jnp.float32))[None]
    counts = np.bincount(np.asarray(sample_hidden(hidden, weight, jax.random.key(1))), minlength=7)
    assert chi_squared(counts, 200_000 * p) < 5


@pytest.mark.one_backend
def test_frequencies_of_draws_by_a_quantized_weight() -> None:
    """χ² of 200,000 draws, for the probabilities of the dequantised weight."""
    weight = QuantizedArray.quantize(jnp.log(jnp.array([[0.38, 0.3, 0.15, 0.1, 0.04, 0.02, 0.01]], jnp.float32)))
    p = np.asarray(jax.nn.softmax(weight.dequantize(jnp.float32)[0]), np.float64)
    tokens = np.asarray(sample_hidden(jnp.ones((200_000, 1)), weight, jax.random.key(2)))
    assert chi_squared(np.bincount(tokens, minlength=7), 200_000 * p) < 5


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    hidden, weight = operands(5, 19, 83)
    arrays, words, rates = Operands(hidden, weight), words_of(5), rates_of_rows("", (5,), 83, 1.0, None, None, None)
    blocks: Any = {"form": Form(), "block_v": 16, "block_d": 8}
    traced = best_of_parts.trace(arrays, words, rates.scale, None, **blocks, parts=3, block_b=4)
    best = best_of_parts(arrays, words, rates.scale, None, **blocks, parts=3, block_b=4)
    assert_best_agree(tk.interpret(traced)(arrays, words, rates.scale, None), best)
    inputs: Any = arrays, words, rates, None, np.int32([-1, 7, -1, 0, -1])
    completed = completed_tokens.trace(*inputs, **blocks)
    np.testing.assert_array_equal(tk.interpret(completed)(*inputs), completed_tokens(*inputs, **blocks))
    held = candidates_of_parts.trace(arrays, None, form=Form(), parts=2, block_b=2, block_d=8)
    for ours, theirs in zip(
        tk.interpret(held)(arrays, None), candidates_of_parts(arrays, None, form=Form(), parts=2), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v5e", "tpu:v6e"])
def test_parts_on_other_targets(target: str) -> None:
    """The program for a target, interpreted: the tokens of `sample`."""
    hidden, weight = operands(5, 19, 300, "bfloat16")
    inputs: Any = (Operands(jnp.asarray(hidden), jnp.asarray(weight)), words_of(5), np.full(5, SCALE), None)
    traced = best_of_parts.trace(*inputs, form=Form(), parts=2, block_b=16, block_v=128, block_d=16)
    tokens = merged(*traced.lower(target).interpret(*inputs), inputs[2])
    np.testing.assert_array_equal(tokens, sample(logits_of(hidden, weight), KEY))
    held = candidates_of_parts.trace(inputs[0], None, form=Form(), parts=2, block_b=16, block_d=16)
    expected = tk.interpret(held)(inputs[0], None)
    for ours, theirs in zip(held.lower(target).interpret(inputs[0], None), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.one_backend
def test_leading_dims_vmap_export_and_no_rows() -> None:
    hidden, weight = operands(6, 8, 33)
    keys, stacked = jax.random.split(jax.random.key(5), (2, 3)), hidden.reshape(2, 3, 8)
    whole = sample_hidden(stacked, weight, keys)
    assert whole.shape == (2, 3)
    np.testing.assert_array_equal(whole, jax.vmap(lambda h, k: sample_hidden(h, weight, k))(stacked, keys))
    assert sample_hidden(stacked[:, :0], weight, KEY).shape == (2, 0)
    exported = jax.export.export(jax.jit(sample_hidden))(stacked, weight, keys)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(stacked, weight, keys), whole)


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_weights_are_exported(dtype: str) -> None:
    """The program takes values and scales, and is put together again by its caller."""
    hidden, weight = operands(6, 32, 40)
    quantized = QuantizedArray(jnp.asarray(weight * 4).astype(dtype), jnp.full((1, 40), 0.25, jnp.float32))

    def draw(hidden: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        return sample_hidden(hidden, QuantizedArray(values, scales), KEY, top_k=5)

    arrays = hidden, quantized.values, quantized.scales
    exported = jax.export.deserialize(jax.export.export(jax.jit(draw))(*arrays).serialize())
    np.testing.assert_array_equal(exported.call(*arrays), sample(logits_of(hidden, weight), KEY, top_k=5))


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_divide_the_rows(kind: AxisType) -> None:
    hidden, weight = operands(8, 8, 50)
    keys, mesh = jax.random.split(jax.random.key(0), 8), jax.make_mesh((4,), ("rows",), axis_types=(kind,))
    rows, of_rows = (jax.device_put(a, NamedSharding(mesh, PartitionSpec("rows"))) for a in (hidden, keys))
    whole = jax.device_put(weight, NamedSharding(mesh, PartitionSpec()))
    run = jax.jit(sample_hidden)
    with jax.set_mesh(mesh):
        compiled = run.lower(rows, whole, of_rows).compile()
        found = compiled(rows, whole, of_rows)
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    np.testing.assert_array_equal(found, run(hidden, weight, keys))


@pytest.mark.one_backend
def test_the_logits_are_never_in_memory() -> None:
    """All temporary arrays of the compiled program together take less than a fourth of the bytes of the logits."""
    rows, words = 256, 1 << 17
    hidden, weight = jax.ShapeDtypeStruct((rows, 16), jnp.float32), jax.ShapeDtypeStruct((16, words), jnp.float32)
    for rate in ({}, {"top_k": 20}):
        compiled = jax.jit(partial(sample_hidden, **rate)).lower(hidden, weight, KEY).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < rows * words


H, W = jnp.ones((2, 3)), jnp.ones((3, 5))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("keywords", "summary"),
    [
        ({"weight": W.T}, "the arrays of sample_hidden do not fit"),
        ({"transpose_weight": True}, "the arrays of sample_hidden do not fit"),
        ({"weight": W.astype(jnp.bfloat16)}, "the arrays of sample_hidden do not fit"),
        ({"weight": jnp.ones((3, 0))}, "the arrays of sample_hidden do not fit"),
        ({"hidden": jnp.ones((2, 3), int)}, "the arrays of sample_hidden do not fit"),
        ({"weight": QuantizedArray(W.T.astype("int8"), jnp.ones((1, 1)))}, "the arrays of sample_hidden do not fit"),
        ({"weight": QuantizedArray(W.astype("int8"), jnp.ones((2, 1)))}, "the scales of weight of sample_hidden"),
        ({"weight": QuantizedArray.quantize(W, zero_point=True)}, "sample_hidden cannot take this weight"),
        ({"bias": jnp.ones(4)}, "the arrays of sample_hidden do not fit"),
        ({"softcap": 0.0}, "sample_hidden cannot take this softcap"),
        ({"key": jnp.ones(2)}, "sample_hidden cannot take this key"),
        ({"top_k": -1}, "sample_hidden cannot take this top_k"),
        ({"presence_penalty": 1.0}, "sample_hidden cannot apply these penalties"),
    ],
)
def test_wrong_calls(keywords: dict[str, Any], summary: str) -> None:
    call: Any = {"hidden": H, "weight": W, "key": KEY} | keywords
    with pytest.raises(ArgumentError, match=summary) as error:
        sample_hidden(**call)  # here
    assert error.value.fix and error.value.got and "# here" in error.value.loc.snippet()
