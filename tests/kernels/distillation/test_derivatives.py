"""Derivatives along the student, of any order and in any mode, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cross_entropy.test_derivatives import QUICK
from tests.kernels.programs import arrays_of, calls
from tilekern.kernels.distillation import distillation, reference
from tilekern.kernels.distillation.derivatives import distillation_backward
from tilekern.kernels.distillation.kernel import distillation_forward
from tilekern.kernels.distillation.options import Options
from tilekern.testing import assert_close, in_float64

TOKENS, WIDTH, OF_TEACHER, VOCABULARY = 21, 19, 12, 50
OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"divergence": "reverse_kl", "temperature": 1.5},
    "mixed": {
        "divergence": "jensen_shannon",
        "teacher_share": 0.3,
        "temperature": 0.7,
        "softcap": 3.0,
        "teacher_softcap": 4.0,
    },
}


def arrays(dtype: Any) -> list[Any]:
    """hidden, weight, both of the teacher, and a cotangent."""
    random = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (WIDTH, VOCABULARY), (TOKENS, OF_TEACHER), (OF_TEACHER, VOCABULARY)
    wide = jnp.promote_types(dtype, jnp.float32)
    return [jnp.asarray(random.standard_normal(s) / 2, dtype) for s in shapes] + [
        jnp.asarray(random.standard_normal(TOKENS), wide)
    ]


def both_modes(loss: Callable[..., Any], hidden: Any, weight: Any, *others: Any) -> Any:
    """Cotangents of hidden and weight, and the tangent along their cosines."""
    *teacher, _ = others
    function = lambda h, w: loss(h, w, *teacher)  # noqa: E731
    tangents = jnp.cos(hidden), jnp.cos(weight)
    return *pulled(loss, hidden, weight, *others), jax.jvp(function, (hidden, weight), tangents)[1]


def pulled(loss: Callable[..., Any], hidden: Any, weight: Any, *others: Any) -> Any:
    *teacher, cotangent = others
    return jax.vjp(lambda h, w: loss(h, w, *teacher), hidden, weight)[1](cotangent)


def agree(found: Any, options: dict[str, Any], mode: Callable[..., Any], inputs: list[Any]) -> None:
    oracle = in_float64(partial(mode, partial(reference, **options)), *inputs)
    low = jax.jit(partial(mode, partial(reference, **options, dtype=inputs[0].dtype)), compiler_options=QUICK)(*inputs)
    for f, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(f, exact, naive, length=WIDTH + VOCABULARY, factor=3)


@pytest.mark.parametrize("name", OPTIONS)
def test_both_modes(name: str, backend: str) -> None:
    interpreted = backend in ("triton", "mosaic")
    inputs, mode = arrays("bfloat16" if interpreted else "float32"), pulled if interpreted else both_modes
    run = jax.jit(partial(mode, partial(distillation, **OPTIONS[name])), compiler_options=QUICK)
    agree(run(*inputs), OPTIONS[name], mode, inputs)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_teacher_of_logits(name: str) -> None:
    hidden, weight, teacher, of_teacher, cotangent = arrays("float32")
    inputs = [hidden, weight, teacher @ of_teacher, cotangent]
    run = jax.jit(partial(pulled, partial(distillation, **OPTIONS[name])), compiler_options=QUICK)
    agree(run(*inputs), OPTIONS[name], pulled, inputs)


@pytest.mark.parametrize("words", [16, 49])
def test_some_words_at_a_time(words: int) -> None:
    *inputs, cotangent = arrays("float32")
    mixed = Options(**OPTIONS["mixed"])

    def backward(hidden: Any, weight: Any, *others: Any) -> Any:
        _, *numbers = distillation_forward(hidden, weight, *others[:2], options=mixed)
        rest = (*others[:2], *numbers)
        return distillation_backward(hidden, weight, rest, others[2], needs=(True, True), options=mixed, words=words)

    agree(jax.jit(backward)(*inputs, cotangent), OPTIONS["mixed"], pulled, [*inputs, cotangent])


@pytest.mark.one_backend
def test_the_teacher_is_a_constant() -> None:
    *inputs, _ = arrays("float32")
    found = jax.grad(lambda *a: distillation(*a).sum(), (2, 3))(*inputs)
    assert not any(x.any() for x in found)


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ["forward", "mixed"])
def test_second_order(name: str) -> None:
    with jax.enable_x64(True):
        hidden, weight, *teacher, _ = arrays(jnp.float64)

        def second(loss: Callable[..., Any], hidden: Any, weight: Any) -> Any:
            number = lambda *a: jnp.sum(jnp.sin(loss(*a, *teacher, **OPTIONS[name])))  # noqa: E731
            gradient, moved = jax.grad(number, (0, 1)), (jnp.cos(hidden), jnp.cos(weight))
            along = lambda *a: jax.jvp(number, a, moved)[1]  # noqa: E731
            return jax.jvp(gradient, (hidden, weight), moved)[1], jax.grad(along, (0, 1))(hidden, weight)

        results = (
            jax.jit(partial(second, f), compiler_options=QUICK)(hidden, weight) for f in (distillation, reference)
        )
        for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.one_backend
def test_vmap_agrees_with_a_loop() -> None:
    hidden, weight, *teacher, cotangent = arrays("float32")
    many = jnp.stack([hidden, 2 * hidden, -hidden])
    run = jax.jit(partial(pulled, partial(distillation, **OPTIONS["mixed"])), compiler_options=QUICK)
    mapped = jax.vmap(run, (0, None, None, None, None))(many, weight, *teacher, cotangent)
    for n in range(3):
        for found, wanted in zip(mapped, run(many[n], weight, *teacher, cotangent), strict=True):
            np.testing.assert_allclose(found[n], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.one_backend
def test_checkpoints_may_save_the_results() -> None:
    hidden, weight, *teacher, _ = arrays("float32")

    def forwards(*names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(lambda h: jnp.sum(jnp.sin(distillation(h, weight, *teacher))), policy=policy)
        return calls(jax.make_jaxpr(jax.grad(layer))(hidden).jaxpr, "distillation_forward")

    assert forwards() == 2 and forwards("distillation_loss", "distillation_residuals") == 1


@pytest.mark.one_backend
@pytest.mark.parametrize("order", [1, 2])
def test_no_derivative_has_the_logits(order: int) -> None:
    tokens, width, vocabulary = 1021, 4, 65521
    derivative: Any = lambda *a: jnp.sum(distillation(*a, divergence="jensen_shannon"))  # noqa: E731
    for _ in range(order):
        derivative = partial(lambda f, h, *others: jnp.vdot(jax.grad(f)(h, *others), h), derivative)
    shapes = ((tokens, width), (width, vocabulary)) * 2
    program = jax.make_jaxpr(derivative)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr
    assert max(x.size for x in arrays_of(program)) < tokens * vocabulary // 6
