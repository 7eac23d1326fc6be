"""Derivatives of any order and in any mode, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.kernels.programs import arrays_of, calls
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.derivatives import Options, cross_entropy_backward
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward
from tilekern.kernels.cross_entropy.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close, in_float64

# Small programs, whose time is that of XLA's compiler.
QUICK = {"xla_backend_optimization_level": 0}
TOKENS, WIDTH, VOCABULARY = 21, 19, 50
LABELS = np.array([7, 49, -100, 0, 50, -1, *range(30, 45)])
PLAIN = Options(ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0)
EVERY = Options(ignore_index=7, label_smoothing=0.1, softcap=3.0, z_loss=1e-2, temperature=1.5)
PART = Options(ignore_index=7, label_smoothing=0.1, softcap=3.0, z_loss=0.0, temperature=1.5, vocabulary=90)
OPTIONS = {
    "plain": PLAIN,
    "smooth": Options(-100, 0.1, None, 0.0),
    "softcap": Options(-100, 0.0, 3.0, 0.0),
    "z_loss": Options(-100, 0.0, None, 1e-2),
    "every": EVERY,
    "part": PART,
}


def arrays(dtype: Any, *, leading: int = 0) -> list[Any]:
    """hidden, weight, and cotangents of loss and logsumexp, all but weight with one more dim in front if asked."""
    random = np.random.default_rng(0)
    stack = (leading,) if leading else ()
    wide = jnp.promote_types(dtype, jnp.float32)
    hidden, *cotangents = (random.standard_normal((*stack, *s)) for s in ((TOKENS, WIDTH), (TOKENS,), (TOKENS,)))
    weight = random.standard_normal((WIDTH, VOCABULARY)) / 2
    return [jnp.asarray(x, dtype) for x in (hidden, weight)] + [jnp.asarray(x, wide) for x in cotangents]


def ours(options: Options, hidden: Any, weight: Any, **keywords: Any) -> Any:
    """The loss and the logsumexp as functions of the arrays alone."""
    found = vars(options) | keywords
    return cross_entropy_forward(hidden, weight, jnp.asarray(LABELS, jnp.int32), **found)


def theirs(options: Options, hidden: Any, weight: Any, **keywords: Any) -> Any:
    """The definition. A label that is no word makes a loss NaN, and its gradient 0."""
    return reference(hidden, weight, LABELS, **vars(options), **keywords)


def pulled(function: Callable[..., Any], hidden: Any, weight: Any, *cotangents: Any) -> Any:
    """The cotangents of hidden and weight."""
    return jax.vjp(function, hidden, weight)[1](cotangents)


def pushed(function: Callable[..., Any], hidden: Any, weight: Any, *cotangents: Any) -> Any:
    """The tangents of loss and logsumexp, along the cosines of the arrays."""
    return jax.jvp(function, (hidden, weight), (jnp.cos(hidden), jnp.cos(weight)))[1]


def both_modes(function: Callable[..., Any], *inputs: Any) -> Any:
    return *pulled(function, *inputs), *pushed(function, *inputs)


@cache
def expected(options: Options, dtype: str, derivative: Callable[..., Any]) -> tuple[Any, Any]:
    """The oracle, and the naive computation."""
    naive = jax.jit(partial(derivative, partial(theirs, options, dtype=jnp.dtype(dtype))), compiler_options=QUICK)
    inputs = arrays(dtype)
    return in_float64(partial(derivative, partial(theirs, options)), *inputs), jax.tree.map(np.asarray, naive(*inputs))


def agree(found: Any, options: Options, dtype: str, derivative: Callable[..., Any]) -> None:
    for f, oracle, low in zip(found, *expected(options, dtype, derivative), strict=True):
        assert_close(f, oracle, low, length=WIDTH + VOCABULARY, factor=3)


def check(options: Options, dtype: str, derivative: Callable[..., Any]) -> None:
    found = jax.jit(partial(derivative, partial(ours, options)), compiler_options=QUICK)(*arrays(dtype))
    agree(found, options, dtype, derivative)


# --- both modes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_both_modes(name: str, backend: str) -> None:
    """In bfloat16 where programs are interpreted, most of them in reverse mode, and in float32."""
    interpreted = backend in ("triton", "mosaic")
    mode = pulled if interpreted and name != "every" else both_modes
    check(OPTIONS[name], "bfloat16" if interpreted else "float32", mode)


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_narrow_dtypes(dtype: str) -> None:
    check(EVERY, dtype, both_modes)


@pytest.mark.one_backend
def test_some_words_at_a_time() -> None:
    """Four steps, two of which have two words in common; one word in two steps; all words in one step."""
    hidden, weight, *cotangents = arrays("float32")
    labels = jnp.asarray(LABELS, jnp.int32)

    def backward(words: int, hidden: Any, weight: Any, *cotangents: Any) -> Any:
        _, logsumexp = cross_entropy_forward(hidden, weight, labels, **vars(EVERY))
        return cross_entropy_backward(
            hidden, weight, labels, logsumexp, cotangents, needs=(True, True), options=EVERY, words=words
        )

    for words in (16, 49, 50):
        agree(jax.jit(partial(backward, words))(hidden, weight, *cotangents), EVERY, "float32", pulled)


def test_tokens_in_several_dims_and_none() -> None:
    hidden, weight, cotangent, _ = arrays("float32")

    def loss(shape: tuple[int, ...], hidden: Any, weight: Any) -> Any:
        return cross_entropy(hidden.reshape(*shape, WIDTH), weight, LABELS.reshape(shape))

    def gradient(shape: tuple[int, ...]) -> Any:
        found = jax.vjp(partial(loss, shape), hidden, weight)[1](cotangent.reshape(shape))
        return [np.asarray(x) for x in found]

    for found, wanted in zip(gradient((3, 7)), gradient((TOKENS,)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    none = jax.grad(lambda h, w: cross_entropy(h, w, jnp.zeros(0, int)).sum(), (0, 1))(hidden[:0], weight)
    assert none[0].shape == (0, WIDTH) and not none[1].any()
    _, moved = jax.jvp(lambda h: cross_entropy(h, weight, jnp.zeros(0, int)), (hidden[:0],), (hidden[:0],))
    assert moved.shape == (0,)


@pytest.mark.one_backend
def test_tokens_that_do_not_count_have_no_gradient() -> None:
    """Of the loss; their logsumexp has one."""
    hidden, weight, *_ = arrays("float32")
    of_loss, of_logsumexp = (
        jax.grad(lambda h, n=n: jnp.nansum(ours(PLAIN, h, weight)[n]))(hidden).any(axis=1) for n in (0, 1)
    )
    np.testing.assert_array_equal(of_loss, (LABELS >= 0) & (LABELS < VOCABULARY))
    assert of_logsumexp.all()


# --- second order ----------------------------------------------------------------------------------------------------


def second_order(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Second derivatives of a number along the cosines of the arrays, in all four orders of modes."""
    moved = tuple(jnp.cos(x) for x in inputs)

    def loss(*inputs: Any) -> jax.Array:
        loss, logsumexp = function(*inputs)
        return jnp.sum(jnp.sin(jnp.where(jnp.isnan(loss), 0, loss))) + jnp.sum(jnp.cos(logsumexp))

    def along(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: jax.jvp(function, inputs, moved)[1]

    gradient = jax.grad(loss, (0, 1))
    weighted = jax.grad(lambda *a: sum(jnp.vdot(g, m) for g, m in zip(gradient(*a), moved, strict=True)), (0, 1))
    return [
        along(gradient)(*inputs),
        weighted(*inputs),
        jax.grad(along(loss), (0, 1))(*inputs),
        along(along(loss))(*inputs),
    ]


@pytest.mark.one_backend
@pytest.mark.parametrize("options", [PLAIN, EVERY, PART], ids=["plain", "every", "part"])
def test_second_order(options: Options) -> None:
    with jax.enable_x64(True):
        inputs = arrays(jnp.float64)[:2]
        results = (
            jax.jit(partial(second_order, partial(f, options)), compiler_options=QUICK)(*inputs) for f in (ours, theirs)
        )
        for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


# --- under transformations -------------------------------------------------------------------------------------------


@pytest.mark.one_backend
def test_vmap_agrees_with_a_loop() -> None:
    """Over hidden and the cotangents; the weight that all share gets the sum."""
    hidden, weight, *cotangents = arrays("float32", leading=3)

    def gradient(hidden: Any, weight: Any, *cotangents: Any) -> Any:
        return pulled(partial(ours, EVERY), hidden, weight, *cotangents)

    mapped = jax.jit(jax.vmap(gradient, (0, None, 0, 0)), compiler_options=QUICK)(hidden, weight, *cotangents)
    one = jax.jit(gradient, compiler_options=QUICK)
    each = [one(hidden[n], weight, *(c[n] for c in cotangents)) for n in range(3)]
    tolerance = 1e3 * np.finfo(np.float32).eps
    for found, wanted in zip(mapped, zip(*each, strict=True), strict=True):
        np.testing.assert_allclose(found, jnp.stack(wanted), rtol=tolerance, atol=tolerance)

    def summed(weight: Any) -> Any:
        mapped = jax.vmap(partial(ours, EVERY), (0, None))
        return jax.vjp(lambda w: mapped(hidden, w), weight)[1](tuple(cotangents))[0]

    found = jax.jit(summed, compiler_options=QUICK)(weight)
    np.testing.assert_allclose(found, sum(e[1] for e in each), rtol=tolerance, atol=tolerance)


@pytest.mark.one_backend
def test_scans_and_checkpoints_agree_with_a_loop() -> None:
    hidden, weight, *_ = arrays("float32")

    def body(x: Any, w: Any) -> Any:
        loss, logsumexp = ours(EVERY, x, w)
        return jnp.sin(x + jnp.where(jnp.isnan(loss), 0, loss)[:, None] + logsumexp[:, None]), None

    def looped(loop: bool, x: Any, weights: Any) -> jax.Array:
        if loop:
            return jnp.sum(lax.scan(jax.checkpoint(body), x, weights)[0])
        for w in weights:
            x, _ = body(x, w)
        return jnp.sum(x)

    weights = jnp.stack([weight, weight[::-1]])
    plain, scanned = (
        jax.jit(jax.grad(partial(looped, loop), (0, 1)), compiler_options=QUICK)(hidden, weights)
        for loop in (False, True)
    )
    tolerance = 1e3 * np.finfo(np.float32).eps
    for found, wanted in zip(scanned, plain, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.one_backend
@pytest.mark.parametrize(("names", "forwards"), [((), 2), (("cross_entropy_loss", "cross_entropy_logsumexp"), 1)])
def test_checkpoints_may_save_the_results(names: tuple[str, ...], forwards: int) -> None:
    hidden, weight, *_ = arrays("float32")
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def layer(hidden: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(ours(PLAIN, jnp.sin(hidden), weight)[0]))

    saving = jax.grad(jax.checkpoint(layer, policy=policy))
    assert calls(jax.make_jaxpr(saving)(hidden).jaxpr, "cross_entropy_forward") == forwards


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.one_backend
@pytest.mark.parametrize("order", [1, 2, 3])
def test_no_derivative_has_the_logits(order: int) -> None:
    """At no order does an array of the program have a twelfth of their elements."""
    tokens, width, vocabulary = 1021, 4, 65521

    def function(hidden: Any, weight: Any, labels: Any) -> jax.Array:
        loss, logsumexp = cross_entropy(hidden, weight, labels, softcap=5.0, z_loss=1e-4, return_logsumexp=True)
        return jnp.sum(loss) + jnp.sum(logsumexp)

    derivative: Any = function
    for _ in range(order):
        derivative = partial(lambda f, h, *others: jnp.vdot(jax.grad(f)(h, *others), h), derivative)
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, width), (width, vocabulary))]
    program = jax.make_jaxpr(derivative)(*types, jax.ShapeDtypeStruct((tokens,), jnp.int32)).jaxpr
    largest = max(x.size for x in arrays_of(program))
    assert 64 * vocabulary <= largest < tokens * vocabulary // 12 if order > 1 else largest <= width * vocabulary


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm"])
def test_memory_is_bounded(target: str) -> None:
    """By XLA's account, gradients included: less than a twentieth of the logits, in both dtypes."""
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    tokens, width, vocabulary = 8192, 64, 65536

    def gradient(hidden: Any, weight: Any, labels: Any) -> Any:
        return jax.grad(lambda *x: cross_entropy(*x, labels, target=target).sum(), (0, 1))(hidden, weight)

    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, width), (width, vocabulary))]
    lowered = jax.jit(gradient).lower(*types, jax.ShapeDtypeStruct((tokens,), jnp.int32))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * tokens * vocabulary / 20


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [((True, False), ["cross_entropy_backward_hidden"]), ((False, True), ["matmul"])],
)
def test_only_what_is_wanted_is_computed(wanted: tuple[bool, bool], kernels: list[str]) -> None:
    hidden, weight, *cotangents = arrays("bfloat16")
    traced = cross_entropy_backward.trace(
        hidden, weight, jnp.asarray(LABELS, jnp.int32), cotangents[0], tuple(cotangents), needs=wanted, options=PLAIN
    )
    assert [kernel.ir.name for kernel in traced.kernels] == ["cross_entropy_backward_logits", *kernels]


@pytest.mark.one_backend
def test_reverse_mode_has_no_wide_copy_of_the_weight() -> None:
    hidden, weight, *cotangents = arrays("bfloat16")
    traced = cross_entropy_backward.trace(
        hidden, weight, jnp.asarray(LABELS, jnp.int32), cotangents[0], tuple(cotangents), needs=(True, True),
        options=PLAIN, words=16,
    )  # fmt: skip
    made = list(arrays_of(traced.jaxpr))
    assert made and all(x.dtype == jnp.bfloat16 for x in made if x.size >= WIDTH * 16 and x.shape != hidden.shape)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm"])
def test_gradients_are_the_same_bits_each_time(target: str) -> None:
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    inputs = arrays("float32")
    run = jax.jit(partial(pulled, partial(ours, EVERY, target=target)))
    first = run(*inputs)
    for _ in range(5):
        for a, b in zip(first, run(*inputs), strict=True):
            np.testing.assert_array_equal(a, b)
