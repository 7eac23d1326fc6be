import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilekern.errors import ArgumentError
from tilekern.kernels.rope import normed_reference, rms_norm_rope
from tilekern.kernels.rope.normed import rms_norm_rope_backward_kernel, rms_norm_rope_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths


def check(x: Any, *others: Any, blocks: dict[str, int], **keywords: Any) -> None:
    with jax.enable_x64(x.dtype == np.float64):
        out = rms_norm_rope(x, *others, **keywords, **blocks)
        low = normed_reference(x, *others, **keywords, dtype=x.dtype)
    oracle = in_float64(lambda *arrays: normed_reference(*arrays, **keywords), x, *others)
    assert_close(out, oracle, low, length=x.shape[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@settings(max_examples=4)
@given(data=st.data(), length=lengths(8), heads=lengths(4), half=lengths(8))
def test_floats(dtype: str, data: st.DataObject, length: int, heads: int, half: int) -> None:
    x = data.draw(arrays(jnp.dtype(dtype), (2, length, heads, 2 * half)))
    weight = data.draw(arrays(jnp.dtype(dtype), (2 * half,)))
    places = np.arange(length, dtype=np.int32) * 3
    blocks = data.draw(st.sampled_from([{}, {"block_t": 3, "block_n": 2}]))
    check(x, weight, places, blocks=blocks, eps=0.1, offset=data.draw(st.sampled_from([0.0, 1.0])))


@pytest.mark.parametrize("shape", [(3, 2, 6), (2, 0, 2, 4), (2, 2, 3, 2, 4)])
def test_any_rank(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check(x, np.ones(shape[-1], np.float32), blocks={}, theta=50.0)


def test_without_weight_and_with_frequencies() -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 6)).astype(np.float32)
    frequencies = np.array([1.0, 0.1, 0.3], np.float32)
    found = rms_norm_rope(x, frequencies=frequencies)
    np.testing.assert_array_equal(found, rms_norm_rope(x, np.ones(6, np.float32), frequencies=frequencies))
    oracle = in_float64(lambda x, f: normed_reference(x, frequencies=f), x, frequencies)
    assert_close(found, oracle, normed_reference(x, frequencies=frequencies), length=6)


@pytest.mark.one_backend
def test_the_gradient_along_frequencies() -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 6)).astype(np.float32)
    frequencies = np.array([1.0, 0.1, 0.3], np.float32)

    def slope(function: Any) -> Any:
        return lambda x, f: jax.grad(lambda f: (function(x, frequencies=f) ** 3).sum())(f)

    low = slope(normed_reference)(x, frequencies)
    oracle = in_float64(slope(normed_reference), x, frequencies)
    assert_close(slope(rms_norm_rope)(x, frequencies), oracle, low, length=60, factor=3)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2, 7, 3, 10), (3, 33, 5, 8)])
def test_gradients_of_ragged_tiles(shape: tuple[int, ...], eps: float) -> None:
    """Without eps the lanes behind the end divide by 0."""
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(s).astype(np.float32) for s in (shape, shape[-1:]))

    def slopes(function: Any) -> Any:
        return jax.jit(jax.grad(lambda x, w: (function(x, w, eps=eps) ** 3).sum(), (0, 1)))

    oracles, lows = in_float64(slopes(normed_reference), x, weight), slopes(normed_reference)(x, weight)
    for found, oracle, low in zip(slopes(rms_norm_rope)(x, weight), oracles, lows, strict=True):
        assert_close(found, oracle, low, length=x.size // shape[-1], factor=3)


@pytest.mark.one_backend
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v5e"])
def test_compiles_without_spills(target: str, backward: bool) -> None:
    pytest.importorskip("triton" if target.startswith("cuda") else "libtpu", reason=f"compiles for {target}")
    x = jax.ShapeDtypeStruct((1, 4096, 32, 128), jnp.bfloat16)
    given = x, jax.ShapeDtypeStruct((128,), jnp.bfloat16), None, jax.ShapeDtypeStruct((64,), jnp.float32)
    settings: dict[str, Any] = {"eps": 1e-6, "offset": 0.0, "target": target}
    if backward:
        traced = rms_norm_rope_backward_kernel.trace(*given, x, needs=(True, True), **settings)
    else:
        traced = rms_norm_rope_forward.trace(*given, **settings)
    compiled = traced.lower(target).compile()
    assert target.startswith("tpu") or compiled.resources.spills == 0


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "weight", "got"),
    [
        (jnp.zeros((2, 3, 5)), None, "x = float32[2, 3, 5]"),
        (jnp.zeros((2, 3, 4)), jnp.zeros(3), "weight = float32[3]"),
        (jnp.zeros((2, 3, 4)), jnp.zeros(4, jnp.int32), "weight = int32[4]"),
    ],
)
def test_arrays_that_do_not_fit(x: Any, weight: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match="arrays of rms_norm_rope do not fit") as caught:
        rms_norm_rope(x, weight)  # here
    assert re.search(re.escape(got), str(caught.value))
    assert "# here" in caught.value.loc.snippet()
