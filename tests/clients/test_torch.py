"""PyTorch: kernels on its tensors without copies, its derivatives, and its compiler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
import tilekern.torch
from tests.lang.checks import refused
from tests.lower.llvm.tasks import process
from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.rms_norm import rms_norm
from tilekern.torch.wrapping import array_of, operators, tensors_of

torch: Any = pytest.importorskip("torch", reason="needs torch")


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def square(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * x[i]


@tk.kernel(out_type=lambda x: (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape, jnp.int32)))
def halves(x, half, sign):
    i = tk.parallel(x.shape[0], 4)
    half[i] = x[i] / 2
    sign[i] = jnp.sign(x[i]).astype(jnp.int32)


def tensor(*shape: int, seed: int = 0, **options: Any) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def test_a_kernel_takes_and_gives_tensors() -> None:
    x = tensor(10, 7)
    y = tilekern.torch.wrap(square)(x, block=8)
    assert isinstance(y, torch.Tensor) and torch.equal(y, x * x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool"])
def test_dtypes(dtype: str) -> None:
    x = torch.tensor([0, 1, 3]).to(getattr(torch, dtype))
    y = tilekern.torch.wrap(lambda x: x | x if x.dtype == bool else x + x)(x)
    assert y.dtype == x.dtype and torch.equal(y, x | x if dtype == "bool" else x + x)


def test_nothing_is_copied() -> None:
    x, result = torch.zeros(1024), jnp.arange(3.0)
    assert array_of(x).unsafe_buffer_pointer() == x.data_ptr()
    (y,) = tensors_of([result], [x])
    assert y.data_ptr() == result.unsafe_buffer_pointer()


def test_results_share_no_memory_with_arguments_or_each_other() -> None:
    x = tensor(5)
    first, second = tilekern.torch.wrap(lambda x: (x, x))(x)
    first += 1
    assert torch.equal(second, x) and len({t.data_ptr() for t in (x, first, second)}) == 3


@pytest.mark.parametrize(
    "view", [lambda x: x.T, lambda x: x[:, 1:], lambda x: x[1], lambda x: x[:0], lambda x: x[0, 3]]
)
def test_any_view_of_a_tensor(view: Any) -> None:
    x = view(tensor(6, 9))
    assert torch.equal(tilekern.torch.wrap(lambda x: 2 * x)(x), 2 * x)


def test_gradients_are_those_of_the_kernel() -> None:
    x, weight = tensor(10, 64, requires_grad=True), tensor(64, seed=1, requires_grad=True)
    y = tilekern.torch.wrap(rms_norm)(x, weight)
    y.backward(torch.ones_like(y))
    dx, dw = jax.grad(lambda x, w: rms_norm(x, w).sum(), (0, 1))(x.detach().numpy(), weight.detach().numpy())
    np.testing.assert_array_equal(x.grad, dx)
    np.testing.assert_array_equal(weight.grad, dw)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    torch.testing.assert_close(y, expected)


def test_attention_trains_as_that_of_torch() -> None:
    q, k, v = (tensor(1, 33, 2, 16, seed=n, requires_grad=True) for n in range(3))
    tilekern.torch.wrap(flash_attention)(q, k, v, causal=True).square().sum().backward()
    gradients = [t.grad.clone() for t in (q, k, v)]
    for t in (q, k, v):
        t.grad = None
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    out.square().sum().backward()
    for ours, t in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(ours, t.grad)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight = tensor(10, 64), tensor(64, seed=1, requires_grad=True)
    y = tilekern.torch.wrap(rms_norm)(x, weight)
    y.sum().backward()
    assert x.grad is None and weight.grad is not None
    with torch.no_grad():
        assert not tilekern.torch.wrap(rms_norm)(x, weight).requires_grad


def test_integers_beside_floats() -> None:
    x = tensor(9, requires_grad=True)
    half, sign = tilekern.torch.wrap(halves)(x)
    assert sign.dtype == torch.int32 and torch.equal(sign, torch.sign(x).int())
    half.sum().backward()
    assert torch.equal(x.grad, torch.full((9,), 0.5))


def test_none_stays_none() -> None:
    first, none = tilekern.torch.wrap(lambda x: (x + 1, None))(tensor(3))
    assert none is None and first.shape == (3,)


def test_gradients_by_finite_differences() -> None:
    with jax.enable_x64(True):
        x = tensor(6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(tilekern.torch.wrap(square), (x,))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_compiler_takes_calls_whole(backend: str) -> None:
    norm, attention = tilekern.torch.wrap(rms_norm), tilekern.torch.wrap(flash_attention)

    def layer(x: Any, weight: Any) -> Any:
        heads = norm(x, weight).unflatten(-1, (2, 16))
        return attention(heads, heads, heads, causal=True).flatten(-2).relu()

    x, weight = tensor(1, 20, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, weight), layer(x, weight))
    expected = torch.autograd.grad(layer(x, weight).square().sum(), (x, weight))
    actual = torch.autograd.grad(compiled(x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(actual, expected)
    other = tensor(1, 12, 32)
    torch.testing.assert_close(compiled(other, weight), layer(other, weight))


def test_operators_keep_the_rules_of_torch() -> None:
    x, own, checks = tensor(8), operators(), ("test_schema", "test_faketensor")
    torch.library.opcheck(own.call, ([x], own.number(square, (0,), (), (False,))), test_utils=checks)
    x.requires_grad = True
    torch.library.opcheck(own.call_saving, ([x], own.number(square, (0,), (), (True,))), test_utils=checks)


def test_torch_is_imported_by_the_first_wrap() -> None:
    process(
        "import sys, tilekern, tilekern.torch; assert 'torch' not in sys.modules\n"
        "tilekern.torch.wrap(abs); assert 'torch' in sys.modules"
    )


def test_derivatives_of_higher_order_are_those_of_jax() -> None:
    def cubed(x: Any, y: Any) -> Any:
        return square(x) * x * y

    x, y = tensor(5, requires_grad=True), tensor(5, seed=1, requires_grad=True)
    (first,) = torch.autograd.grad(tilekern.torch.wrap(cubed)(x, y=y).sum(), x, create_graph=True)
    second = torch.autograd.grad(first.sum(), (x, y), create_graph=True)
    (third,) = torch.autograd.grad(second[0].sum(), y)
    for computed, expected in ((first, 3 * x**2 * y), (second[0], 6 * x * y), (second[1], 3 * x**2), (third, 6 * x)):
        torch.testing.assert_close(computed, expected)


def test_second_derivatives_by_finite_differences() -> None:
    with jax.enable_x64(True):
        x, weight = (tensor(3, n, seed=n, dtype=torch.float64, requires_grad=True) for n in (5, 5))
        normed = tilekern.torch.wrap(lambda x, weight: rms_norm(x, weight[0]))
        assert torch.autograd.gradgradcheck(normed, (x, weight))


def test_second_derivatives_beside_results_of_integers_and_none() -> None:
    x = tensor(4, requires_grad=True)
    half, sign, none = tilekern.torch.wrap(lambda x: (*halves(square(x)), None))(x)
    (first,) = torch.autograd.grad((half**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert none is None and sign.dtype == torch.int32
    torch.testing.assert_close(second, 3 * x.detach() ** 2)


def test_a_dtype_that_jax_would_narrow() -> None:
    call = tilekern.torch.wrap(square)
    with refused(ArgumentError, "JAX would narrow a tensor of 64 bits", got="dtype=torch.int64"):
        call(torch.arange(3))  # <-


def test_a_container_of_tensors() -> None:
    call = tilekern.torch.wrap(lambda xs: xs[0] + 1)
    with refused(ArgumentError, "is a container of tensors", got="0=tuple"):
        call((torch.ones(3),))  # <-


def test_a_list_is_not_static() -> None:
    call = tilekern.torch.wrap(lambda x, axes: x.sum(tuple(axes)))
    with refused(ArgumentError, "is neither a tensor nor static", got="1=list"):
        call(torch.ones(3), [0])  # <-


def test_a_result_that_is_no_array() -> None:
    call = tilekern.torch.wrap(lambda x: {"y": x})
    with refused(ArgumentError, "returns what is no tensor", got="['dict']"):
        call(torch.ones(3))  # <-
