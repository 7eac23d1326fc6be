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
from tests.lower.library import family_of
from tilekern.errors import ArgumentError
from tilekern.ir.control import Fold
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.cases import CASES, Case
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward, cross_entropy_parts
from tilekern.kernels.cross_entropy.reference import reference_with_logsumexp as reference
from tilekern.lang.tiles import describe
from tilekern.lower.target import resolve
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = (
    {},
    {"block_t": 4, "block_v": 16, "block_d": 8},
    {"block_t": 5, "block_v": 7, "block_d": 3},
    {"block_t": 1, "block_v": 1, "block_d": 16},
)
PLAIN = {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0}
OPTIONS = (
    PLAIN,
    {**PLAIN, "label_smoothing": 0.1},
    {**PLAIN, "softcap": 3.0},
    {**PLAIN, "z_loss": 1e-2},
    {"label_smoothing": 1.0, "softcap": 30.0, "z_loss": 1e-4, "temperature": 0.7},
)
naive = jax.jit(reference, static_argnames=("softcap", "dtype", "vocabulary"))


def check(hidden: Any, weight: Any, labels: Any, options: dict[str, Any], **blocks: int) -> None:
    """The loss and the logsumexp by the rule; a logit is a sum of D terms, the logsumexp one of V.

    The loss of a vocabulary of one word is 0, the difference of two equal numbers, so it is compared beside 1.
    """
    with jax.enable_x64(hidden.dtype == np.float64):
        found = cross_entropy(hidden, weight, labels, **options, **blocks, return_logsumexp=True)
        low = naive(hidden, weight, labels, **options, dtype=hidden.dtype)
    oracle = in_float64(reference, hidden, weight, labels, **options)
    beside = int(weight.shape[1] == 1)
    for out, wide, narrow in zip(found, oracle, low, strict=True):
        assert_close(beside + np.asarray(out), beside + wide, beside + np.asarray(narrow), length=sum(weight.shape))


def draw(data: st.DataObject, dtype: str, tokens: int, width: int, vocabulary: int, **keywords: Any) -> tuple[Any, ...]:
    """hidden, weight, and labels, some of which are no word."""
    shapes = (tokens, width), (width, vocabulary)
    hidden, weight = (data.draw(arrays(jnp.dtype(dtype), shape, **keywords)) for shape in shapes)
    words = st.integers(0, max(vocabulary - 1, 0)) | st.sampled_from([-100, -1, vocabulary])
    labels = data.draw(st.lists(words, min_size=tokens, max_size=tokens))
    return hidden, weight, np.array(labels, np.int32)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), tokens=lengths(4), width=st.sampled_from([0, 1, 8, 19]), vocabulary=lengths(16))
def test_floats(dtype: str, data: st.DataObject, tokens: int, width: int, vocabulary: int) -> None:
    inputs = draw(data, dtype, tokens, width, max(vocabulary, 1))
    check(*inputs, data.draw(st.sampled_from(OPTIONS)), **data.draw(st.sampled_from(BLOCKS)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS[1:3])
@settings(max_examples=10)
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(
    options: dict[str, Any], blocks: dict[str, int], data: st.DataObject
) -> None:
    inputs = draw(data, "float32", 5, 3, 33, specials=[np.inf, -np.inf, np.nan, 0.0])
    check(*inputs, options, **blocks)


def test_large_logits_do_not_overflow() -> None:
    hidden = np.array([[1e3], [-1e3], [0.0]], np.float32)
    weight = np.linspace(-100, 100, 50, dtype=np.float32).reshape(1, 50)
    check(hidden, weight, np.array([0, 49, 7]), PLAIN, block_t=2, block_v=16)


def test_the_loss_is_that_of_log_softmax() -> None:
    hidden, weight, labels = CASES[0].small().arrays(jax.random.key(0), "float32")
    log_probabilities = jax.nn.log_softmax(jnp.matmul(hidden, weight, precision="highest"))
    theirs = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]
    oracle, _ = in_float64(reference, hidden, weight, labels)
    assert_close(theirs, oracle, naive(hidden, weight, labels)[0], length=sum(weight.shape))
    assert_close(cross_entropy(hidden, weight, labels), oracle, naive(hidden, weight, labels)[0])


def test_labels_that_are_no_word() -> None:
    hidden, weight = jnp.zeros((5, 2)), jnp.zeros((2, 8))
    loss = cross_entropy(hidden, weight, jnp.array([0, 8, -1, -100, 7]))
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True, False, False])
    assert loss[3] == 0
    ignored = cross_entropy(hidden, weight, jnp.array([0, 8, -1, -100, 7]), ignore_index=0)
    np.testing.assert_array_equal(np.isnan(ignored), [False, True, True, True, False])
    assert ignored[0] == 0


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_labels_of_any_integer_dtype(dtype: str) -> None:
    with jax.enable_x64(True):
        top = jnp.iinfo(dtype).max
        loss = cross_entropy(jnp.zeros((2, 2)), jnp.zeros((2, 9)), jnp.array([3, top], dtype))
    np.testing.assert_array_equal(np.isnan(loss), [False, True])


@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (2, 0, 3)])
def test_any_leading_dims(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    hidden, weight = (random.standard_normal(s).astype(np.float32) for s in ((*shape, 6), (6, 20)))
    check(hidden, weight, random.integers(0, 20, shape), PLAIN, block_t=2, block_v=8, block_d=4)


def test_no_words() -> None:
    loss, logsumexp = cross_entropy(jnp.ones((2, 3)), jnp.ones((3, 0)), jnp.array([0, -100]), return_logsumexp=True)
    assert np.isnan(loss[0]) and loss[1] == 0 and (logsumexp == -jnp.inf).all()


def _in_parts(parts: int, **options: Any) -> Any:
    return partial(cross_entropy_forward, ignore_index=-100, parts=parts, block_t=2, block_v=4, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5)
@given(data=st.data(), parts=st.sampled_from([2, 3, 7, 20]), vocabulary=st.sampled_from([1, 8, 33]))
def test_parts_of_the_vocabulary_merge(
    options: dict[str, Any], data: st.DataObject, parts: int, vocabulary: int
) -> None:
    """Also where some parts have no words, with labels of any part, ignored ones and those of no word.

    A loss is a difference of logarithms that are not near 0. Of one word it is 0, so 1 is added to all.
    """
    inputs = draw(data, "float32", 5, 6, vocabulary)
    found = _in_parts(parts, **options)(*inputs)
    oracle, low = in_float64(reference, *inputs, **options), naive(*inputs, **options)
    for out, wide, narrow in zip(found, oracle, low, strict=True):
        assert_close(1 + np.asarray(out), 1 + wide, 1 + np.asarray(narrow), length=6 + vocabulary)


@settings(max_examples=10)
@given(data=st.data())
def test_nan_and_infinities_spread_from_their_part(data: st.DataObject) -> None:
    inputs = draw(data, "float32", 5, 3, 33, specials=[np.inf, -np.inf, np.nan, 0.0])
    found, oracle = _in_parts(4, **PLAIN)(*inputs), in_float64(reference, *inputs)
    for out, wide, narrow in zip(found, oracle, naive(*inputs), strict=True):
        assert_close(out, wide, narrow, length=36)


def test_parts_of_a_part_of_the_vocabulary() -> None:
    """With `vocabulary` the merged loss is the share of these words."""
    inputs = Case("", 5, 6, 19).arrays(jax.random.key(0), "float32")
    options = {**PLAIN, "label_smoothing": 0.1, "vocabulary": 100}
    for out, whole in zip(_in_parts(3, **options)(*inputs), _in_parts(1, **options)(*inputs), strict=True):
        assert_close(out, np.float64(whole), whole, length=25)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "rocm:gfx942"])
@pytest.mark.parametrize("vocabulary", [7, 50257, 128256])
def test_programs_of_few_tokens_fill_a_gpu(target: str, vocabulary: int) -> None:
    """In tiles of words one after the other: never later than undivided, and with many words nearly all cores work."""
    for tokens in (1, 128, 1000, 4096, 20000):
        func = family_of("cross_entropy", Case("", tokens, 4096, vocabulary), "bfloat16", target).func(resolve(target))
        *parts, of_tokens = (axis.tiles for axis in func.axes)
        (tiles,) = (op.axis.tiles for op in func.body.ops if isinstance(op, Fold))
        cores, taken = tk.device(target).cores, parts[0] if parts else 1

        def steps(parts: int, of_tokens: int = of_tokens, tiles: int = tiles, cores: int = cores) -> int:
            return tk.cdiv(of_tokens * parts, cores) * tk.cdiv(tiles, parts)

        assert 1 <= taken <= tiles
        assert steps(taken) <= steps(1)
        if vocabulary > 7:
            assert steps(taken) <= 1.35 * of_tokens * tiles / cores + 2


@pytest.mark.one_backend
def test_few_tokens_on_a_cpu_are_divided_too() -> None:
    for tokens, parts in ((1, [8]), (32, [8]), (33, [])):
        func = family_of("cross_entropy", Case("", tokens, 8, 32000), "float32", "cpu:xla").func()
        assert [axis.extent for axis in func.axes] == [*parts, tokens]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    inputs = case.arrays(jax.random.key(0), dtype)
    assert [x.shape for x in inputs[:2]] == [(case.tokens, case.width), (case.width, case.vocabulary)]
    check(*inputs, case.keywords, block_t=16, block_v=32, block_d=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    inputs = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    loss = jax.eval_shape(partial(cross_entropy, **case.keywords), *inputs)
    assert (loss.shape, loss.dtype) == ((case.tokens,), jnp.float32)


def test_a_whole_vocabulary() -> None:
    case = Case("llama3_8b", 8, 16, 128256)
    check(*case.arrays(jax.random.key(0), "float32"), PLAIN)


@pytest.mark.one_backend
def test_the_logits_are_never_in_memory() -> None:
    tokens, width, vocabulary = 4096, 64, 32000
    inputs = jax.eval_shape(partial(Case("", tokens, width, vocabulary).arrays, dtype=jnp.float32), jax.random.key(0))
    compiled = jax.jit(cross_entropy).lower(*inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * tokens * vocabulary / 20


@pytest.mark.one_backend
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_interpreter_agrees(options: dict[str, Any]) -> None:
    inputs = Case("", 5, 6, 19).arrays(jax.random.key(0), "float32")
    traced = cross_entropy_parts.trace(*inputs, **options, ignore_index=-100, block_t=2, block_v=8, block_d=4)
    oracle, low = in_float64(reference, *inputs, **options), naive(*inputs, **options)
    for out, wide, narrow in zip(tk.interpret(traced)(*inputs), oracle, low, strict=True):
        assert_close(out, wide, narrow, length=25)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "got"),
    [
        ((2, 3), (4, 5), jnp.zeros(2, jnp.int32), "hidden = float32[2, 3], weight = float32[4, 5]"),
        ((2, 3), (3, 5), jnp.zeros((2, 5)), "labels = float32[2, 5]"),
        ((2, 3), (3, 5), jnp.zeros(3, jnp.int32), "labels = int32[3]"),
        ((2, 3), (3,), jnp.zeros(2, jnp.int32), "weight = float32[3]"),
        ((), (3, 5), jnp.zeros((), jnp.int32), "hidden = float32[]"),
    ],
)
def test_arrays_that_do_not_fit(hidden: tuple[int, ...], weight: tuple[int, ...], labels: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        cross_entropy(jnp.zeros(hidden), jnp.zeros(weight), labels)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@pytest.mark.parametrize("options", [{"label_smoothing": 1.5}, {"label_smoothing": -0.1}, {"softcap": 0.0}], ids=str)
def test_options_out_of_range(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ArgumentError, match=re.escape(f"{name} = {value}")) as caught:
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros(2, jnp.int32), **options)  # here
    assert "# here" in caught.value.loc.snippet()


WIDE = [0, 3, 2**31 - 1, 2**31, 2**32 - 100, 2**32 + 3, 2**40]


@pytest.mark.one_backend
@given(
    labels=st.lists(st.sampled_from(WIDE), min_size=3, max_size=3),
    x64=st.booleans(),
    ignored=st.sampled_from([3, -100]),
)
def test_wide_labels_do_not_wrap(labels: list[int], x64: bool, ignored: int) -> None:
    """A label outside of the vocabulary is NaN, whatever its low 32 bits are, with 64-bit types on or off."""
    with jax.enable_x64(x64):
        loss = cross_entropy(
            np.zeros((3, 2), np.float32), np.zeros((2, 9), np.float32), np.array(labels), ignore_index=ignored
        )
    expected = [0 if label == ignored else np.log(9) if label < 9 else np.nan for label in labels]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ignore_index", 2**40),
        ("ignore_index", 2**31 - 1),
        ("ignore_index", -(2**31)),
        ("ignore_index", None),
        ("ignore_index", 1.0),
        ("ignore_index", True),
        ("softcap", float("inf")),
        ("softcap", 1e308),
        ("softcap", 1e-320),
        ("softcap", float("nan")),
        ("softcap", "30"),
        ("label_smoothing", None),
        ("label_smoothing", float("nan")),
        ("z_loss", float("inf")),
        ("z_loss", None),
        ("temperature", 0),
        ("temperature", None),
        ("softcap", 10**400),
        ("label_smoothing", 10**400),
        ("label_smoothing", "a"),
        ("z_loss", -(10**4000)),
    ],
)
def test_options_that_no_loss_has(name: str, value: Any) -> None:
    hidden, weight, labels = jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros(2, jnp.int32)
    options: dict[str, Any] = {name: value}
    with pytest.raises(ArgumentError, match=re.escape(f"{name} = {describe(value)}")) as caught:
        cross_entropy(hidden, weight, labels, **options)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_the_smallest_and_the_largest_softcap(softcap: float) -> None:
    hidden = np.array([[1.0], [-3.0], [1e-3]], np.float32)
    weight = np.linspace(-4, 4, 9, dtype=np.float32).reshape(1, 9)
    check(hidden, weight, np.array([0, 8, 4]), {**PLAIN, "softcap": softcap})
