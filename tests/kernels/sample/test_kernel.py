"""Tokens against the definition in float64, and against an exact one that sorts integers; frequencies of many draws."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.sample import reference, sample
from tilekern.kernels.sample.cases import CASES, Case
from tilekern.kernels.sample.checks import rates_of_rows
from tilekern.kernels.sample.fixed_point import gumbel, power
from tilekern.kernels.sample.kernel import Sums, drawable_logits, sampled_tokens
from tilekern.testing import in_float64

KEY = np.uint32([3, 4])
DTYPES = ["float32", "bfloat16", "float16", "float64"]
RATES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
)


def logits(rows: int, words: int, dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    """Random logits, among them equal ones, and ones of -inf."""
    random = np.random.default_rng(seed)
    x = np.round(random.standard_normal((rows, words)) * 32) / 16
    x[random.random((rows, words)) < 0.1] = -np.inf
    return x.astype(jnp.dtype(dtype))


def exact(x: np.ndarray, words: np.ndarray, rate: dict[str, Any]) -> int:
    """The token of a row float32[V] by the integers of `fixed_point`, sorted, and added up as integers of Python."""
    temperature = np.float32(rate.get("temperature", 1.0))
    best = x.max()
    if temperature == 0:
        return int(x.argmax())
    scale = np.float32(2**20 * np.log2(np.e)) / temperature
    with np.errstate(invalid="ignore"):
        distance = np.where(x == best, 0, (x - best) * scale)
    exponents = np.maximum(distance, -(2.0**30)).astype(np.int32)
    alive = [v for v in range(x.size) if x[v] > -np.inf or best == -np.inf]
    if rate.get("min_p"):
        alive = [v for v in alive if exponents[v] >= np.log2(np.float32(rate["min_p"])) * 2**20]
    ranked = sorted(alive, key=lambda v: -x[v])
    if rate.get("top_k"):
        least = x[ranked[min(rate["top_k"], len(ranked)) - 1]]
        ranked = [v for v in ranked if x[v] >= least]
    if rate.get("top_p", 1.0) < 1:
        weights = {v: int(w) for v, w in zip(ranked, np.asarray(power(exponents[ranked])), strict=True)}
        goal = max(1, sum(weights.values()) * round(rate["top_p"] * 2**16) >> 16)
        ranked = [v for v in ranked if sum(w for u, w in weights.items() if x[u] > x[v]) < goal]
    noise = np.asarray(gumbel(tk.random_bits(words, np.arange(x.size, dtype=np.uint32)))).astype(np.int64)
    scores = exponents + noise
    return max(sorted(ranked), key=lambda v: scores[v])


def words_of(rows: int) -> np.ndarray:
    """The words of each row's key."""
    keys = jax.random.split(jax.random.wrap_key_data(KEY), rows)
    return np.asarray(jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", RATES, ids=str)
def test_floats(dtype: str, rate: dict[str, Any]) -> None:
    """The token of the exact definition, with every block."""
    x = logits(4, 83, dtype)
    with jax.enable_x64(dtype == "float64"):
        found = [np.asarray(sample(x, KEY, **rate, block_v=block)).tolist() for block in (128, 32, 7)]
    expected = [exact(row, words, rate) for row, words in zip(x.astype(np.float32), words_of(4), strict=True)]
    assert found == [expected] * 3


@pytest.mark.parametrize(
    "rate",
    [
        {"top_k": 3}, {"top_k": 3, "top_p": 0.7, "min_p": 0.02}, {"top_k": 9},
        {"top_p": 0.5}, {"top_p": 0.99}, {"top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)  # fmt: skip
def test_rows_whose_largest_logits_share_a_lane(rate: dict[str, Any]) -> None:
    """The candidates hold two tokens of a lane, four for `top_p`; more of them make it read the whole row."""
    x = np.tile(np.linspace(-1, 0, 64, dtype=np.float32), (6, 1))
    x[0, 5::8] = np.arange(8)  # all of one lane of 8
    x[1, [5, 13, 21]] = 2, 2, 2  # as many as top_k
    x[2, 20:28] = 1, 1, 1, 2, 3, 1, 1, 1  # equal ones at the edge, in lanes of their own
    x[3, [3, 11, 19, 27]] = 1, 2, 3, 3  # the last one lies below the three largest
    x[4] = 0  # all equal
    x[5, 3:] = -np.inf
    for seed in range(4):
        words = jax.random.split(jax.random.key(seed), 6)
        found = [sample(x, words, **rate, block_v=block).tolist() for block in (8, 64)]
        bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(words))
        assert found == [[exact(row, bits[n], rate) for n, row in enumerate(x)]] * 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_cases(case: Case, dtype: str) -> None:
    """No two scores are so close here, and no token so close to an edge, that integers and float64 would differ."""
    small = case.small()
    arrays = small.arrays(jax.random.key(0), dtype)
    expected = in_float64(partial(reference, **small.keywords), *arrays)
    np.testing.assert_array_equal(sample(*arrays, **small.keywords), expected)


@pytest.mark.one_backend
def test_sums_of_weights_are_integers_of_48_bits() -> None:
    """Sums, shares, and which of two is larger, against integers of Python."""
    random, bits = np.random.default_rng(0), 16
    for _ in range(20):
        weights = random.integers(0, 2**32, (2, 50), dtype=np.uint32)
        weights[1, :25] = weights[0, :25]
        part = int(random.integers(0, 2**16))
        exact = [sum(map(int, row)) for row in weights]
        exact.append(max(1, exact[0] * part >> bits))
        zero = Sums(jnp.uint32(0), jnp.uint32(0))
        sums = [zero.plus(jnp.asarray(row)) for row in weights]
        sums.append(sums[0].share(jnp.uint32(part)))
        # Neighbours differ in the lower half alone.
        for step in (1, 2**16):
            exact.append(exact[0] + step)
            sums.append(Sums(jnp.uint32(exact[-1] >> bits), jnp.uint32(exact[-1] & 0xFFFF)))
        assert [(int(s.upper) << bits) + int(s.lower) for s in sums] == exact
        for a, x in zip(sums, exact, strict=True):
            assert [bool(a.reaches(b)) for b in sums] == [x >= y for y in exact]


def test_rates_of_rows() -> None:
    """A row is sampled as if it were alone, with its own key."""
    x, rates = logits(len(RATES), 61), [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | r for r in RATES]
    keys = jax.random.split(jax.random.key(1), len(RATES))
    columns: Any = {name: np.array([rate[name] for rate in rates]) for name in rates[0]}
    found = sample(
        x, keys, **{name: v.astype(np.int32 if v.dtype == int else np.float32) for name, v in columns.items()}
    )
    alone = [int(sample(x[n], keys[n], **rate)) for n, rate in enumerate(RATES)]
    assert found.tolist() == alone


def test_penalties() -> None:
    """The tokens of the definition; counts change which token is the most likely one."""
    x, random = logits(6, 40), np.random.default_rng(2)
    counts = random.integers(-1, 4, x.shape)
    penalties: Any = {
        "repetition_penalty": np.linspace(0.8, 1.6, 6).astype(np.float32),
        "presence_penalty": 0.3,
        "frequency_penalty": np.linspace(-0.7, 0.7, 6).astype(np.float32),
    }
    for temperature in (0.0, 0.8):
        for name in (*penalties, None):
            chosen = penalties if name is None else {name: penalties[name]}
            keywords = {"counts": counts, "temperature": temperature, **chosen}
            expected = in_float64(partial(reference, **keywords), x, KEY)
            np.testing.assert_array_equal(sample(x, KEY, **keywords, block_v=16), expected)
    plain = np.asarray(sample(x, KEY, temperature=0.0))
    assert (plain != sample(x, KEY, temperature=0.0, counts=counts, **penalties)).any()


def test_infinities_and_nan() -> None:
    inf, nan = np.inf, np.nan
    x = np.float32([[-inf, 1, nan, 0], [-inf, -inf, -inf, -inf], [0, inf, 1, inf], [nan, nan, nan, 2]])
    for n in range(8):
        found = sample(x, jax.random.key(n), top_p=0.99).tolist()
        assert found[0] in (1, 3) and found[2] in (1, 3) and found[3] == 3
    assert sample(x, KEY, temperature=0.0).tolist() == [1, 0, 1, 3]


@pytest.mark.parametrize("rate", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-30}])
def test_rates_that_leave_the_most_likely_token(rate: dict[str, Any]) -> None:
    x = np.random.default_rng(0).permuted(np.tile(np.arange(50, dtype=np.float32) / 16, (9, 1)), axis=1)
    np.testing.assert_array_equal(sample(x, KEY, **rate), x.argmax(axis=1))


def test_neutral_rates_change_nothing() -> None:
    x = logits(5, 70)
    plain = sample(x, KEY).tolist()
    assert sample(x, KEY, top_k=0, top_p=1.0, min_p=0.0).tolist() == plain
    assert sample(x, KEY, top_k=10**6).tolist() == plain
    counts = np.ones(x.shape, np.int32)
    ones = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert sample(x, KEY, counts=counts, **ones).tolist() == plain


def test_leading_dims_vmap_and_no_rows() -> None:
    x = logits(6, 33).reshape(2, 3, 33)
    keys = jax.random.split(jax.random.key(5), (2, 3))
    whole = sample(x, keys, top_k=3)
    assert whole.shape == (2, 3)
    np.testing.assert_array_equal(whole, jax.vmap(partial(sample, top_k=3))(x, keys))
    assert sample(x[0, 0], keys[0, 0]).shape == () and sample(x[:, :0], KEY).shape == (2, 0)


@pytest.mark.one_backend
@pytest.mark.sweep(3)
@pytest.mark.parametrize("rate", [{}, {"top_p": 0.8}, {"temperature": 2.0}], ids=str)
def test_frequencies_of_a_million_draws(rate: dict[str, Any]) -> None:
    """χ² of 10^6 draws, of all tokens and of those that `top_p` keeps; and of tokens of two draws in a row."""
    p = np.array([0.38, 0.3, 0.15, 0.1, 0.04, 0.02, 0.00999, 0.00001])
    x = jnp.broadcast_to(jnp.log(jnp.array(p, jnp.float32)), (10**6, 8))
    expected = np.where(p >= 0.15, p, 0) if "top_p" in rate else p ** (1 / rate.get("temperature", 1.0))
    expected = expected / expected.sum()
    draws = np.asarray(sample(x, jax.random.key(7), **rate))
    counts, live = np.bincount(draws, minlength=8), expected > 0
    assert (counts[~live] == 0).all()
    assert chi_squared(counts[live], 1e6 * expected[live]) < 5
    pairs = np.bincount(draws[::2] * 8 + draws[1::2], minlength=64)
    both = (5e5 * expected[:, None] * expected).ravel()
    assert chi_squared(pairs[both > 5], both[both > 5]) < 5


def assert_best_agree(ours: Any, theirs: Any) -> None:
    """Two results of `best_of_parts`: equal tokens, and scores whose float32 are at most neighbours.

    A score is a product and a sum, which XLA may round once and the interpreter rounds twice.
    """
    np.testing.assert_array_equal(ours[1], theirs[1])
    for scores, expected in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        np.testing.assert_allclose(np.asarray(scores, np.int64), np.asarray(expected, np.int64), rtol=0, atol=1)


def chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    """χ² as a number of standard deviations from its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    x = logits(3, 50)
    arrays = jnp.asarray(x), words_of(3)
    rates = rates_of_rows("sample", (3,), 50, 0.7, 9, 0.8, 0.01)
    traced = sampled_tokens.trace(*arrays, rates, None, block_v=16)
    np.testing.assert_array_equal(tk.interpret(traced)(*arrays, rates, None), sampled_tokens(*arrays, rates, None))
    kept = drawable_logits.trace(arrays[0], rates, None, block_v=16)
    np.testing.assert_array_equal(tk.interpret(kept)(arrays[0], rates, None), drawable_logits(arrays[0], rates, None))


@pytest.mark.one_backend
def test_a_call_is_exported() -> None:
    x = logits(3, 50)
    exported = jax.export.export(jax.jit(partial(sample, top_p=0.9)))(x, KEY)
    found = jax.export.deserialize(exported.serialize()).call(x, KEY)
    np.testing.assert_array_equal(found, sample(x, KEY, top_p=0.9))


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_divide_the_rows(kind: AxisType) -> None:
    """Without a collective, and with the tokens of one device."""
    x, keys = logits(8, 50), jax.random.split(jax.random.key(0), 8)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,))
    place = NamedSharding(mesh, PartitionSpec("rows"))
    rows, of_rows = jax.device_put(x, place), jax.device_put(keys, place)
    run = jax.jit(partial(sample, top_k=4))
    with jax.set_mesh(mesh):
        compiled = run.lower(rows, of_rows).compile()
        found = compiled(rows, of_rows)
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    np.testing.assert_array_equal(found, run(x, keys))


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    made = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    found = jax.eval_shape(partial(sample, **case.keywords), *made)
    assert (found.shape, found.dtype) == ((case.rows,), jnp.int32)


# --- wrong calls -----------------------------------------------------------------------------------------------------

X = jnp.ones((2, 5))
COUNTS = jnp.ones((2, 5), int)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("keywords", "summary"),
    [
        ({"logits": jnp.ones((2, 5), int)}, "the arrays of sample do not fit"),
        ({"logits": jnp.ones((2, 0))}, "the arrays of sample do not fit"),
        ({"logits": jax.ShapeDtypeStruct((2, 2**19 + 1), jnp.float32)}, "the arrays of sample do not fit"),
        ({"key": jnp.ones(2)}, "sample cannot take this key"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, "sample cannot take this key"),
        ({"temperature": -1}, "sample cannot take this temperature"),
        ({"temperature": jnp.ones(3)}, "sample cannot take this temperature"),
        ({"top_k": -1}, "sample cannot take this top_k"),
        ({"top_k": 2.5}, "sample cannot take this top_k"),
        ({"top_k": jnp.ones(2)}, "sample cannot take this top_k"),
        ({"top_p": 1.5}, "sample cannot take this top_p"),
        ({"top_p": True}, "sample cannot take this top_p"),
        ({"min_p": -0.5}, "sample cannot take this min_p"),
        ({"counts": COUNTS}, "sample cannot apply these penalties"),
        ({"counts": COUNTS[:1], "presence_penalty": 1.0}, "sample cannot apply these penalties"),
        ({"presence_penalty": 1.0}, "sample cannot apply these penalties"),
        ({"counts": COUNTS, "repetition_penalty": 0.0}, "sample cannot take this repetition_penalty"),
        ({"counts": COUNTS, "frequency_penalty": "1"}, "sample cannot take this frequency_penalty"),
    ],
)
def test_wrong_calls(keywords: dict[str, Any], summary: str) -> None:
    call: Any = {"logits": X, "key": KEY} | keywords
    with pytest.raises(ArgumentError, match=summary) as error:
        sample(**call)  # here
    assert error.value.fix and error.value.got and "# here" in error.value.loc.snippet()
