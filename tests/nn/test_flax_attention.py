"""`attention_fn` without Flax: dtypes, leading dims, masks and biases, precision. tests/clients has the layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.nn import attention_fn
from tilekern.nn.promotion import algorithm_of
from tilekern.testing import assert_close, in_float64

RANDOM = np.random.default_rng(0)
T, S, N, H = 6, 7, 4, 8


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


def inputs(*batch: int, dtype: Any = np.float32) -> list[Any]:
    shapes = (T, N, H), (S, 2, H), (S, 2, H + 4)
    return [normal(*batch, *shape).astype(dtype) for shape in shapes]


def check(found: Any, *arrays: Any, **keywords: Any) -> None:
    """The result is that of the definition."""
    oracle = in_float64(lambda *a: reference(*a, **keywords)[0], *arrays)
    assert_close(found, oracle, reference(*map(jnp.asarray, arrays), **keywords)[0], length=S * H)


@pytest.mark.parametrize("batch", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("kind", [bool, np.float32, np.int8], ids=lambda k: np.dtype(k).name)
def test_masks_of_any_dtype_and_leading_dims(batch: tuple[int, ...], kind: Any) -> None:
    q, k, v = inputs(*batch)
    for lead in {(), (1,) * len(batch), batch, (batch[:1] + (1,) * (len(batch) - 1))}:
        mask = RANDOM.random((*lead, 1, T, S)) < 0.6
        whole = np.broadcast_to(mask, (*batch, 1, T, S))
        check(attention_fn(q, k, v, mask=mask.astype(kind) * 3), q, k, v, mask=whole)


@pytest.mark.parametrize("shape", [(S,), (T, S), (N, T, S), (3, 1, 1, 1, S), (1, 2, N, T, 1), (3, 2, N, T, S)], ids=str)
def test_biases(shape: tuple[int, ...]) -> None:
    q, k, v = inputs(3, 2)
    bias = normal(*shape)
    check(attention_fn(q, k, v, bias), q, k, v, np.broadcast_to(bias, (3, 2, N, T, S)))
    numbers = np.round(3 * bias).astype(np.int32)
    check(attention_fn(q, k, v, numbers), q, k, v, np.broadcast_to(numbers, (3, 2, N, T, S)).astype(np.float32))


def test_a_causal_mask() -> None:
    q, k, v = inputs(2)
    check(attention_fn(q, k, v, is_causal=True), q, k, v, causal=True)


def test_dtypes() -> None:
    """The promoted dtype, the one that is asked for, or what the function of a layer makes of the arrays."""
    q, k, v = inputs(2)
    narrow = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    assert attention_fn(narrow[0], k, narrow[2]).dtype == jnp.float32
    found = attention_fn(q, k, v, dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, attention_fn(*narrow))
    integers = [np.round(2 * x).astype(np.int32) for x in (q, k, v)]
    np.testing.assert_array_equal(attention_fn(*integers), attention_fn(*(x.astype(np.float32) for x in integers)))

    def promote(arrays: Any, *, dtype: Any) -> Any:
        assert dtype == jnp.float16
        return [jnp.asarray(x, jnp.bfloat16) for x in arrays]

    found = attention_fn(q, k, v, dtype=jnp.float16, promote_dtype=promote)
    np.testing.assert_array_equal(found, attention_fn(*narrow))


PRESETS = jax.lax.DotAlgorithmPreset


def test_precisions_in_the_words_of_flash_attention() -> None:
    for exact in (None, "high", "float32", jax.lax.Precision.DEFAULT, PRESETS.F32_F32_F32, ("high", "highest")):
        assert algorithm_of("attention_fn", exact) is None
    assert algorithm_of("attention_fn", PRESETS.TF32_TF32_F32) == "tf32"
    assert algorithm_of("attention_fn", ("BF16_BF16_F32_X3", PRESETS.BF16_BF16_F32_X3)) == "bf16x3"
    q, k, v = inputs(2)
    np.testing.assert_array_equal(attention_fn(q, k, v, precision="highest"), attention_fn(q, k, v))
    coarse = attention_fn(q, k, v, precision=PRESETS.BF16_BF16_F32)
    np.testing.assert_allclose(coarse, attention_fn(q, k, v), atol=0.1)


Q, K, V = inputs(2)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": PRESETS.F16_F16_F16}, "F16_F16_F16"),
    "bias": ({"bias": normal(3, S)}, "bias = float32[3, 7]"),
    "mask": ({"mask": normal(1, 2, N, T, S)}, "mask = float32[1, 2, 4, 6, 7]"),
    "module": ({"module": object()}, "module = <object"),
    "qk_attn_weights_einsum": ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum"),
    "attn_weights_value_einsum": ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum"),
    "einsum_dot_general": ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_by_its_name(name: str) -> None:
    options, got = WRONG[name]
    with refused(ArgumentError, f"attention_fn cannot take this {name}", expected="", got=got, fix=""):
        attention_fn(Q, K, V, **options)  # <-


def test_pairs_of_unlike_precisions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="this precision"):
        attention_fn(Q, K, V, precision=("high", "BF16_BF16_F32"))
