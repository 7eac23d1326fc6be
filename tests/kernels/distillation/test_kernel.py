"""Divergences against float64, and what cannot be one."""

from __future__ import annotations

import re
from dataclasses import replace
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
from tilekern.kernels.distillation import distillation, reference
from tilekern.kernels.distillation.cases import CASES, Case
from tilekern.kernels.distillation.kernel import distillation_forward, distillation_parts
from tilekern.kernels.distillation.options import Options
from tilekern.lower.target import resolve
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = (
    {},
    {"block_t": 4, "block_v": 16, "block_d": 8, "block_e": 4},
    {"block_t": 5, "block_v": 7, "block_d": 3, "block_e": 16},
)
OPTIONS = (
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl", "softcap": 3.0},
    {"divergence": "jensen_shannon"},
    {"divergence": "forward_kl", "temperature": 1.5, "softcap": 30.0, "teacher_softcap": 3.0},
    {"divergence": "jensen_shannon", "teacher_share": 0.1, "temperature": 0.7, "teacher_softcap": 5.0},
)
naive = jax.jit(reference, static_argnames=("divergence", "teacher_share", "softcap", "teacher_softcap", "dtype"))


def check(inputs: tuple[Any, ...], options: dict[str, Any], **blocks: int) -> None:
    """By the rule; a logit is a sum of D or E terms, the divergence one of V.

    Divergences near 0 are sums of differences of logarithms, which are not near 0: 1 is added to all.
    """
    dtype = inputs[0].dtype
    with jax.enable_x64(dtype == np.float64):
        found = distillation(*inputs, **options, **blocks)
        low = naive(*inputs, **options, dtype=dtype)
    oracle = in_float64(partial(reference, **options), *inputs)
    assert_close(1 + np.asarray(found), 1 + oracle, 1 + np.asarray(low), length=sum(inputs[1].shape))


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=5)
@given(data=st.data(), tokens=lengths(4), widths=st.tuples(*[st.sampled_from([1, 8, 19])] * 2), vocabulary=lengths(16))
def test_floats(dtype: str, data: st.DataObject, tokens: int, widths: tuple[int, int], vocabulary: int) -> None:
    """Of a teacher that is a product, or logits."""
    (width, of_teacher), vocabulary = widths, max(vocabulary, 1)
    taught = data.draw(st.sampled_from([((tokens, vocabulary),), ((tokens, of_teacher), (of_teacher, vocabulary))]))
    shapes = (tokens, width), (width, vocabulary), *taught
    inputs = tuple(data.draw(arrays(jnp.dtype(dtype), shape)) for shape in shapes)
    check(inputs, data.draw(st.sampled_from(OPTIONS)), **data.draw(st.sampled_from(BLOCKS)))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["divergence"])
def test_words_that_the_teacher_excludes(options: dict[str, Any]) -> None:
    """Words with p = 0 add nothing to a mean over p, and infinity to one over q; with p = q = 0 nothing to both."""
    student = np.array([[0, 1, 2, 3, -np.inf], [4, 3, 2, 1, 0]], np.float32)
    teacher = np.array([[2, -1, 0, 1, -np.inf], [1, -np.inf, 2, 5, -np.inf]], np.float32)
    options = {**options, "softcap": None, "teacher_softcap": None}
    hidden = np.eye(2, dtype=np.float32)
    if options["divergence"] == "reverse_kl":
        found = distillation(hidden, np.maximum(student, -9), teacher[1:].repeat(2, 0), **options, block_v=2)
        assert (found == np.inf).all()
        return
    # Infinite logits of the student come from the hidden dim of a token alone.
    for row in range(2):
        one = np.ones((1, 1), np.float32), student[row : row + 1], teacher[row : row + 1]
        found = distillation(*one, **options, block_v=2)
        kept = student[row] > -np.inf
        wanted = reference(one[0], one[1][:, kept], one[2][:, kept], **options)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert np.isfinite(found).all()


DIVERGENCES = pytest.mark.parametrize("options", [o for o in OPTIONS if o["divergence"] != "jensen_shannon"], ids=str)
WHOLE = {"teacher_share": 0.5, "temperature": 1.0, "softcap": None, "teacher_softcap": None}


def in_parts(parts: int, options: dict[str, Any]) -> Any:
    return partial(distillation_forward, options=Options(**WHOLE | options), parts=parts, block_t=2, block_v=4)


@DIVERGENCES
@settings(max_examples=5)
@given(data=st.data(), parts=st.sampled_from([2, 3, 7, 20]), vocabulary=st.sampled_from([1, 8, 33]))
def test_parts_of_the_vocabulary_merge(
    options: dict[str, Any], data: st.DataObject, parts: int, vocabulary: int
) -> None:
    """Also where some parts have no words."""
    shapes = (5, 6), (6, vocabulary), (5, 3), (3, vocabulary)
    inputs = [data.draw(arrays(jnp.dtype("float32"), shape)) for shape in shapes]
    found, whole = (in_parts(n, options)(*inputs) for n in (parts, 1))
    oracle, low = in_float64(partial(reference, **options), *inputs), naive(*inputs, **options)
    assert_close(1 + np.asarray(found[0]), 1 + oracle, 1 + np.asarray(low), length=6 + vocabulary)
    for one, other in zip(found[1:], whole[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@DIVERGENCES
@settings(max_examples=20)
@given(data=st.data())
def test_nan_and_infinities_spread_from_their_part(options: dict[str, Any], data: st.DataObject) -> None:
    """As if all words were in one part: words that one side excludes, all words of a part, and NaN."""
    logits = st.sampled_from([0.0, 1.0, -2.0, -np.inf, np.nan])
    one = np.ones((1, 1), np.float32)
    student, teacher = (np.array([data.draw(st.lists(logits, min_size=9, max_size=9))], np.float32) for _ in range(2))
    options = {**options, "softcap": None, "teacher_softcap": None}
    found, whole = (in_parts(parts, options)(one, student, teacher, None) for parts in (3, 1))
    for part, wanted in zip(found, whole, strict=True):
        np.testing.assert_allclose(part, wanted, rtol=1e-5, atol=1e-6)


@DIVERGENCES
def test_a_part_that_one_side_excludes_decides_the_divergence(options: dict[str, Any]) -> None:
    """It is infinite if that side is the one in the logarithm alone, and is finite otherwise."""
    excludes, has = (np.array([[0, 1, 2, 3, -2, 1, 0, 1, last]], np.float32) for last in (-np.inf, 1))
    one = np.ones((1, 1), np.float32)
    options = {**options, "softcap": None, "teacher_softcap": None}
    of_student, of_teacher = ((excludes, has), (has, excludes))
    if options["divergence"] == "reverse_kl":
        of_student, of_teacher = of_teacher, of_student
    for sides, infinite in ((of_student, True), (of_teacher, False)):
        (loss,), *_ = in_parts(3, options)(one, *sides, None)
        assert loss == np.inf if infinite else np.isfinite(loss)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]], ids=lambda case: case.name)
def test_programs_of_parts_fill_a_gpu(case: Case, target: str) -> None:
    """Nearly all cores work at any time. Where a second pass needs the sums of all words, there is one part."""
    cores = tk.device(target).cores
    func = family_of("distillation", case, "bfloat16", target).func(resolve(target))
    parts, of_tokens = (axis.tiles for axis in func.axes)
    tiles = next(op.axis.tiles for op in func.body.ops if isinstance(op, Fold))
    assert tk.cdiv(parts * of_tokens, cores) * tk.cdiv(tiles, parts) <= 1.35 * of_tokens * tiles / cores + 2
    mixed = replace(case, divergence="jensen_shannon")
    assert len(family_of("distillation", mixed, "bfloat16", target).func(resolve(target)).axes) == 1


def test_large_logits_do_not_overflow() -> None:
    hidden = np.array([[1e3], [-1e3], [0.0]], np.float32)
    weight = np.linspace(-100, 100, 50, dtype=np.float32).reshape(1, 50)
    for options in OPTIONS[:3]:
        check((hidden, weight, -hidden, weight / 7), options, block_t=2, block_v=16)


@pytest.mark.one_backend
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["divergence"])
def test_divergences_of_a_distribution_from_itself_are_zero(options: dict[str, Any]) -> None:
    hidden, weight, *_ = CASES[0].small().arrays(jax.random.key(0), "float32")
    options = {**options, "teacher_softcap": options.get("softcap")}
    np.testing.assert_allclose(distillation(hidden, weight, hidden, weight, **options), 0, atol=1e-6)


@pytest.mark.one_backend
def test_soft_labels() -> None:
    """The forward divergence and the entropy of the labels are their cross entropy."""
    hidden, weight, *_ = Case("", 6, 8, 1, 20).arrays(jax.random.key(0), "float32")
    labels = jax.random.dirichlet(jax.random.key(1), jnp.ones(20), (6,)).at[0].set(jnp.eye(20)[3])
    entropy = -jax.scipy.special.xlogy(labels, labels).sum(axis=1)
    wanted = -(labels * jax.nn.log_softmax(hidden @ weight)).sum(axis=1)
    np.testing.assert_allclose(distillation(hidden, weight, jnp.log(labels)) + entropy, wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    inputs = case.arrays(jax.random.key(0), dtype)
    check(inputs, case.keywords, block_t=16, block_v=32, block_d=32, block_e=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    inputs = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    loss = jax.eval_shape(partial(distillation, **case.keywords), *inputs)
    assert (loss.shape, loss.dtype) == ((case.tokens,), jnp.float32)


@pytest.mark.one_backend
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["divergence"])
def test_the_interpreter_agrees(options: dict[str, Any]) -> None:
    inputs = Case("", 5, 6, 9, 19).arrays(jax.random.key(0), "float32")
    whole = {"teacher_share": 0.5, "temperature": 1.0, "softcap": None, "teacher_softcap": None} | options
    traced = distillation_parts.trace(*inputs, options=Options(**whole), **BLOCKS[1])
    found, oracle = tk.interpret(traced)(*inputs)[0], in_float64(partial(reference, **options), *inputs)
    assert_close(found, oracle, naive(*inputs, **options), length=25)


@pytest.mark.one_backend
@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (2, 0, 3)])
def test_any_leading_dims(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    shapes = (*shape, 6), (6, 20), (*shape, 4), (4, 20)
    check(tuple(random.standard_normal(s).astype(np.float32) for s in shapes), {}, block_t=2, block_v=8)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("shapes", "got"),
    [
        (((2, 3), (4, 5), (2, 5)), "hidden = float32[2, 3], weight = float32[4, 5]"),
        (((2, 3), (3, 5), (2, 4)), "teacher = float32[2, 4]"),
        (((2, 3), (3, 5), (1, 5)), "teacher = float32[1, 5]"),
        (((2, 3), (3, 5), (2, 4), (4, 6)), "teacher_weight = float32[4, 6]"),
        (((2, 3), (3, 5), (2, 4), (3, 5)), "teacher_weight = float32[3, 5]"),
        (((), (3, 5), ()), "hidden = float32[]"),
    ],
)
def test_arrays_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        distillation(*map(jnp.zeros, shapes))  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("divergence", "kl"),
        ("divergence", None),
        ("teacher_share", 0),
        ("teacher_share", 1.0),
        ("teacher_share", float("nan")),
        ("temperature", 0.0),
        ("temperature", "1"),
        ("softcap", 0.0),
        ("teacher_softcap", float("inf")),
    ],
)
def test_options_out_of_range(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ArgumentError, match=f"distillation cannot take this {name}") as caught:
        distillation(jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros((2, 5)), **options)  # here
    assert "# here" in caught.value.loc.snippet()
