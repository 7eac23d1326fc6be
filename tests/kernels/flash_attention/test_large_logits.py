"""Logits of all magnitudes, and results and gradients that stay as good as those of the naive computation."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close

QUERIES, KEYS, HEADS, WIDTH = 21, 37, 2, 16
SHAPES = (1, QUERIES, HEADS, WIDTH), (1, KEYS, 1, WIDTH), (1, KEYS, 1, WIDTH), (1, QUERIES, HEADS, WIDTH)
ATTEND = partial(flash_attention, return_logsumexp=True)
LARGEST = 2 * WIDTH * 8 * 8 / 4  # of integers from -8 to 8, by the scale


def gated(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s * 1.25


def sloped(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s - 0.125 * abs(i - j)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "gated": {"score_mod": gated},
    "sinks": {"sinks": np.array([0.5, 3.0], np.float32)},
    "negative": {"scale": -0.25},
    "zero": {"scale": 0.0},
    "sloped": {"score_mod": sloped, "causal": True},
}


def data(seed: int, exponent: int) -> list[Any]:
    """Query, key, value and cotangent; products of query and key are exact in any order, and of size 2**exponent."""
    random = np.random.default_rng(seed)
    q, k = (random.integers(-8, 9, shape).astype(np.float32) for shape in SHAPES[:2])
    v, cotangent = (random.standard_normal(shape).astype(np.float32) for shape in SHAPES[2:])
    power = exponent - int(np.log2(LARGEST))
    return [q * np.float32(2.0 ** (power // 2)), k * np.float32(2.0 ** (power - power // 2)), v, cotangent]


@lru_cache
def gradients(function: Callable[..., Any], feature: str, backend: str) -> Callable[..., Any]:
    """Results, and the gradients of a weighted sum of them; `shift` is added to the weights of the logsumexp."""

    def loss(q: Any, k: Any, v: Any, cotangent: Any, shift: Any) -> Any:
        out, logsumexp = function(q, k, v, **FEATURES[feature])
        return jnp.sum(out * cotangent) + jnp.sum(logsumexp * (jnp.cos(cotangent[..., 0]) + shift)), (out, logsumexp)

    return jax.jit(
        jax.value_and_grad(loss, (0, 1, 2), has_aux=True), compiler_options={"xla_backend_optimization_level": 1}
    )


def rounding_of_delta(out: jax.Array, cotangent: np.ndarray) -> np.ndarray:
    """float32[B, T, N]: half a unit in the last place of δ = Σ out cotangent, by the size of its terms.

    FlashAttention's gradients of scores are P (dP - δ), with δ from the rounded `out` (arXiv:2205.14135, B.4). Where a
    row attends to one key, dP and δ cancel, and their roundings are left. JAX's naive gradient takes δ as a sum of P
    dP, whose rounding cancels, too. A weight of the logsumexp enters as -δ does, so a shift of it by the rounding is an
    error that the algorithm may have.
    """
    return np.abs(np.asarray(out) * cotangent).sum(axis=3) * np.finfo(np.float32).eps / 2


@pytest.mark.parametrize(
    "feature",
    ["plain", "causal", "gated", "sinks", *(pytest.param(f, marks=pytest.mark.slow) for f in list(FEATURES)[4:])],
)
def test_of_all_magnitudes(feature: str, backend: str) -> None:
    """By the rule, for logits up to 10**30."""

    @settings(max_examples=max(4, settings().max_examples // (10 if backend in ("xla", "llvm") else 12)))
    @given(seed=st.integers(0, 2**16), exponent=st.integers(0, 100))
    @example(0, 100)
    @example(1, 34)
    @example(2, 24)
    @example(37, 11)
    @example(128, 11)
    def check(seed: int, exponent: int) -> None:
        arrays = data(seed, exponent)
        none = np.zeros((1, QUERIES, HEADS), np.float32)
        found = jax.tree.leaves(gradients(ATTEND, feature, backend)(*arrays, none))[1:]
        shift = rounding_of_delta(found[0], arrays[3])
        low = jax.tree.leaves(gradients(reference, feature, backend)(*arrays, shift))[1:]
        with jax.enable_x64(True):
            wide = [x.astype(np.float64) for x in arrays]
            oracle = jax.tree.leaves(gradients(reference, feature, "float64")(*wide, none))[1:]
        for name, *three in zip(("out", "logsumexp", "dq", "dk", "dv"), found, oracle, low, strict=True):
            try:
                assert_close(*three, length=QUERIES * HEADS + KEYS, factor=3.0)
            except AssertionError as error:
                error.add_note(f"{name} of {feature}, logits up to 2**{exponent}")
                raise

    check()


@pytest.mark.parametrize("shape", [(64, 80, 16), (40, 50, 128), (300, 300, 64)], ids=str)
def test_weights_sum_to_one(shape: tuple[int, int, int], backend: str) -> None:
    """Weights that the backward pass recomputes, of any arrays: gradients of values add up to the cotangents."""
    if backend in ("triton", "mosaic"):
        pytest.skip("needs products that do not depend on the shape of tiles, as those of NumPy do")
    queries, keys, width = shape
    random = np.random.default_rng(0)
    q, k, v, ct = (random.standard_normal((1, n, 2, width), np.float32) for n in (queries, keys, keys, queries))
    pull = jax.jit(lambda q, k, v: jax.vjp(lambda v: flash_attention(q, k, v), v)[1](ct)[0])
    total = ct.astype(np.float64).sum(axis=1)
    for exponent in (0, 4, 6, 8, 11, 20, 30):
        root = np.float32(10 ** (exponent / 2))
        found = np.asarray(pull(q * root, k * root, v)).sum(axis=1)
        assert_close(found, total, ct.sum(axis=1), length=queries + keys + width)


@pytest.mark.parametrize("large", [1e30, 3e38])
def test_a_large_bias(large: float, backend: str) -> None:
    """A bias of more than 3.4e38 / log2(e) does not overflow."""
    q, k, v, _ = data(0, 4)
    bias = np.zeros((1, 1, 1, KEYS), np.float32)
    bias[..., 5], bias[..., 6] = large, -large
    out, logsumexp = ATTEND(q, k, v, bias)
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, 5:6], out.shape))
    np.testing.assert_array_equal(logsumexp, np.float32(large))
    dv = jax.grad(lambda v: flash_attention(q, k, v, bias).sum())(v)
    np.testing.assert_array_equal(dv[:, 5], QUERIES * HEADS)
    assert np.count_nonzero(dv) == WIDTH


# --- softcaps ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_backend
@pytest.mark.parametrize("softcap", [float("inf"), float("nan"), 1e308, 1e31, 1e-40, 0.0, -1.0, True, "50"], ids=str)
def test_softcaps_that_no_float32_computes(softcap: Any) -> None:
    q, k, v, _ = data(0, 4)
    with pytest.raises(ArgumentError, match="softcap") as caught:
        flash_attention(q, k, v, softcap=softcap)  # this line
    assert caught.value.loc.file == __file__ and "# this line" in caught.value.loc.snippet()
    assert f"softcap = {softcap!r}" in caught.value.got and "leave it out" in caught.value.fix


@pytest.mark.parametrize("softcap", [1e30, 1e6])
def test_a_large_softcap_is_none(softcap: float) -> None:
    """To rounding: logits of size 8 are that far from a bound."""
    q, k, v, ct = data(0, 3)
    of = [
        jax.tree.leaves(jax.vjp(partial(flash_attention, softcap=cap), q, k, v)[1](jnp.asarray(ct)))
        for cap in (softcap, None)
    ]
    for found, expected in zip(*of, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
