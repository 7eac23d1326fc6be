import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.matmul import symmetric_matmul, symmetric_reference
from tilekern.kernels.matmul.symmetric import symmetric_matmul_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

BLOCKS = ({}, {"block_m": 5, "block_k": 7}, {"block_m": 16, "block_k": 16})


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def symmetric(x: Any) -> Any:
    return (x + x.swapaxes(-1, -2)).astype(x.dtype)


def check(*inputs: Any, scales: dict[str, float], **blocks: int) -> None:
    dtype = inputs[0].dtype
    with jax.enable_x64(dtype == np.float64):
        out = symmetric_matmul(*inputs, **scales, **blocks)
        low = symmetric_reference(*inputs, **scales, dtype=dtype)
    np.testing.assert_array_equal(out, np.asarray(out).swapaxes(-1, -2))
    oracle = in_float64(symmetric_reference, *inputs, **scales)
    assert_close(out, oracle, low, length=max(inputs[0].shape[-1], 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@settings(max_examples=5)
@given(data=st.data(), m=lengths(16), k=lengths(16), blocks=st.sampled_from(BLOCKS), added=st.booleans())
def test_floats(dtype: str, data: st.DataObject, m: int, k: int, blocks: dict[str, int], added: bool) -> None:
    x = data.draw(arrays(jnp.dtype(dtype), (m, k)))
    more = (symmetric(normal(m, m)).astype(dtype),) if added else ()
    check(x, *more, scales={"scale": 0.5, "scale_added": -2.0}, **blocks)


@pytest.mark.parametrize("shape", [(3, 20, 9), (2, 2, 7, 12), (0, 4, 3), (2, 0, 3), (2, 3, 0)])
def test_leading_dims_and_empty_ones(shape: tuple[int, ...]) -> None:
    check(normal(*shape), symmetric(normal(*shape[:-1], shape[-2])), scales={}, **BLOCKS[1])


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5])
def test_any_number_of_tiles(tiles: int) -> None:
    """One row of tiles less than an even number is left empty."""
    check(normal(8 * tiles - 3, 11), scales={}, block_m=8, block_k=4)


@pytest.mark.one_backend
@pytest.mark.parametrize("computed", ["half", "all"])
def test_the_interpreter_agrees(computed: str) -> None:
    """It finds elements that two programs write, and those that none writes."""
    x = normal(37, 12)
    blocks = {"block_m": 8, "block_k": 8, "computed": computed}
    traced = symmetric_matmul_forward.trace(x, None, scale=1.0, scale_added=1.0, **blocks)
    np.testing.assert_allclose(tk.interpret(traced)(x, None), x @ x.T, rtol=1e-5, atol=1e-5)


@pytest.mark.one_backend
def test_half_of_the_products_are_computed() -> None:
    def flops(computed: str) -> float:
        blocks = {"block_m": 64, "block_k": 64, "computed": computed}
        traced = symmetric_matmul_forward.trace(normal(1024, 512), None, scale=1.0, scale_added=1.0, **blocks)
        return traced.cost().flops

    assert flops("half") < 0.56 * flops("all")


@pytest.mark.one_backend
def test_large_results_on_tpus() -> None:
    """The whole of a small result is in vector memory; of a large one all tiles are computed."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    for rows in (2048, 8192):
        x = jax.ShapeDtypeStruct((rows, rows), jnp.bfloat16)
        lowered = symmetric_matmul_forward.trace(x, None, scale=1.0, scale_added=1.0).lower("tpu:v5e")
        assert lowered.compile().resources.vmem_bytes < 128 << 20


def derivatives(function: Callable[..., Any], x: Any, added: Any) -> Any:
    """Cotangents, and the tangent along cosines; a cotangent that is not symmetric."""
    out, pull = jax.vjp(function, x, added)
    cotangent = jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return *pull(cotangent), jax.jvp(function, (x, added), (jnp.cos(x), jnp.cos(added)))[1]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_derivatives(dtype: Any) -> None:
    inputs = normal(9, 14, dtype=dtype), symmetric(normal(9, 9)).astype(dtype)
    scales = {"scale": 0.5, "scale_added": 3.0}
    found = jax.jit(partial(derivatives, partial(symmetric_matmul, **scales)))(*inputs)
    oracle = in_float64(partial(derivatives, partial(symmetric_reference, **scales)), *inputs)
    low = derivatives(partial(symmetric_reference, **scales, dtype=dtype), *inputs)
    for f, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(f, exact, naive, length=32, factor=3)


@pytest.mark.one_backend
def test_second_order() -> None:
    x, added = normal(5, 7), symmetric(normal(5, 5))

    def second(function: Callable[..., Any]) -> Any:
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x, added))))
        return jax.grad(lambda x: jnp.vdot(gradient(x), jnp.cos(x)))(x)

    np.testing.assert_allclose(second(symmetric_matmul), second(symmetric_reference), rtol=1e-3, atol=1e-4)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        ((jnp.ones(3),), "x = float32[3]"),
        ((jnp.ones((3, 2)), jnp.ones((2, 2))), "added = float32[2, 2]"),
        ((jnp.ones((3, 2)), jnp.ones((3, 3), jnp.bfloat16)), "added = bfloat16[3, 3]"),
        ((jnp.ones((3, 2), jnp.int32),), "x = int32[3, 2]"),
    ],
)
def test_arrays_that_do_not_fit(inputs: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        symmetric_matmul(*inputs)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_scales_are_numbers() -> None:
    wrong: Any = jnp.ones(())
    with pytest.raises(ArgumentError, match="the scale of symmetric_matmul"):
        symmetric_matmul(jnp.ones((3, 2)), scale=wrong)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("case", [(4096, 4096, "bfloat16"), (777, 1001, "bfloat16"), (1000, 3000, "float32")], ids=str)
def test_programs_for_gpus_do_not_spill(case: tuple[int, int, str], target: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    rows, inner, dtype = case
    x, added = (jax.ShapeDtypeStruct((rows, n), dtype) for n in (inner, rows))
    traced = symmetric_matmul_forward.trace(x, added, scale=1.0, scale_added=1.0)
    resources = traced.lower(target).compile().resources
    assert resources.spills == 0 and not resources.serialized
