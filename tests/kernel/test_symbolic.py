"""Sizes that are symbols, as `jax.export` has them: a batch of any size under `jax.vmap`, and a refusal elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import ArgumentError, ConcreteValueError
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.matmul import matmul
from tilekern.kernels.ragged_dot import ragged_dot
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.rope import rope
from tilekern.kernels.softmax import softmax
from tilekern.kernels.swiglu import swiglu
from tilekern.nn import dot_product_attention

SCOPE = jax.export.SymbolicScope()


@like_first
def scan(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = tk.fold(tk.serial(3), lambda n, acc: acc * 2 - n, x[i])


@tk.kernel(out_type=lambda x, y: tk.Zeros(x), donate=("y",))
def donating(x, y, out):
    i = tk.parallel(x.shape[0], 4)
    y[i] = y[i] + x[i]
    out[i] = x[i] * 2


@tk.op(out_type=lambda x: x)
def op(x):
    return scan(x) + scan(x * 2)


def matmul_by_ones(x: jax.Array) -> jax.Array:
    return matmul(x[None], jnp.ones((7, 3)))


def symbol(*shape: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A type in whose shape the strings, such as "b", are symbols."""
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(", ".join(map(str, shape)), scope=SCOPE), dtype)


def exported(function: Callable[..., Any], *types: Any) -> Callable[..., Any]:
    again = jax.export.deserialize(jax.export.export(jax.jit(function))(*types).serialize())
    return jax.jit(again.call)


# --- a batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [scan, op, matmul_by_ones])
def test_an_exported_batch_may_be_of_any_size(call: Any) -> None:
    batched = jax.vmap(call)
    run = exported(batched, symbol("b", 7))
    for size in (1, 5):
        x = numbers(size, 7)
        np.testing.assert_array_equal(run(x), batched(x))


@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 1)])
def test_each_operand_has_its_batch_or_none(axes: tuple[int | None, int | None]) -> None:
    batched = jax.vmap(donating, in_axes=axes)
    types = [symbol(*{None: (6,), 0: ("b", 6), 1: (6, "b")}[axis]) for axis in axes]
    x, y = (numbers(*(size if size == 6 else 3 for size in t.shape)) for t in types)
    for found, expected in zip(exported(batched, *types)(x, y), batched(x, y), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_batches_of_batches() -> None:
    x = numbers(2, 3, 4, 5)
    expected = scan(x.reshape(-1)).reshape(x.shape)
    for types in (("b", 3, 4, 5), (2, "b", 4, 5), (2, 3, "b", 5), ("a", 3, "b", 5)):
        run = exported(jax.vmap(jax.vmap(jax.vmap(scan))), symbol(*types))
        np.testing.assert_array_equal(run(x), expected)


def test_derivatives_of_a_batch_of_any_size() -> None:
    def loss(q: jax.Array) -> jax.Array:
        return (jax.vmap(lambda q: flash_attention(q, q, q, causal=True))(q) ** 2).sum()

    q = jnp.asarray(numbers(3, 9, 2, 4) / 64)
    for function in (loss, jax.grad(loss)):
        run = exported(function, symbol("b", 9, 2, 4))
        np.testing.assert_allclose(run(q), function(q), rtol=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_other_sizes_are_refused_at_the_call() -> None:
    with refused(
        ArgumentError,
        "scan needs arrays of known sizes",
        expected="vmap",
        got="x = float32[b, 7]",
        fix="jax.vmap",
    ):
        jax.eval_shape(scan, symbol("b", 7))  # <-


@pytest.mark.parametrize(
    "refuse",
    [
        lambda x: jax.eval_shape(op, x),
        lambda x: exported(scan, x),
        lambda x: exported(op, x),
        lambda x: scan.trace(x),
        lambda x: exported(jax.grad(lambda x: op(x).sum()), x),
    ],
)
def test_a_call_is_refused_in_every_program(refuse: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentError, match="needs arrays of known sizes"):
        refuse(symbol("b", 7))


def library() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    n = jax.ShapeDtypeStruct
    f = jnp.float32
    heads = symbol("b", 8, 2, 4)
    length = symbol(2, "t", 2, 4)
    rows = symbol("b", 8)
    ints = symbol("b", dtype=jnp.int32)
    w = n((8,), f)
    return {
        "attention": (flash_attention, (heads, heads, heads)),
        "attention by length": (flash_attention, (length, length, length)),
        "nn": (dot_product_attention, (heads, heads, heads)),
        "nn by length": (dot_product_attention, (length, length, length)),
        "softmax": (softmax, (rows,)),
        "softmax of columns": (softmax, (symbol(8, "n"),)),
        "rms_norm": (rms_norm, (rows, w)),
        "layer_norm": (layer_norm, (rows, w, w)),
        "swiglu": (swiglu, (rows, rows)),
        "matmul": (matmul, (rows, n((8, 4), f))),
        "ragged_dot": (ragged_dot, (rows, n((3, 8, 4), f), n((3,), jnp.int32))),
        "rope": (rope, (length, symbol(2, "t", dtype=jnp.int32))),
        "cross_entropy": (cross_entropy, (rows, n((8, 16), f), ints)),
    }


@pytest.mark.parametrize("name", library())
def test_library_functions_refuse_alike(name: str) -> None:
    function, types = library()[name]
    with pytest.raises(ArgumentError, match="needs arrays of known sizes") as raised:
        jax.eval_shape(lambda *arrays: function(*arrays), *types)
    assert raised.value.loc.file == __file__
    assert "jax.vmap" in raised.value.fix


def test_an_array_of_unknown_size_that_a_body_closes_over_is_refused() -> None:
    def closing(y: Any) -> Any:
        @like_first
        def kernel(x, out):
            out[...] = x[...] + y.sum()  # <-

        return kernel(jnp.ones(8))

    with refused(ConcreteValueError, "closes over an array whose size is not known", got="float32[b]", fix="jax.vmap"):
        jax.eval_shape(closing, symbol("b"))


def test_sliced_it_is_refused_too() -> None:
    def closing(y: Any) -> Any:
        @like_first
        def kernel(x, out):
            out[...] = x[...] + y[:8].sum()

        return kernel(jnp.ones(8))

    with pytest.raises(ConcreteValueError, match="closes over an array whose size is not known") as raised:
        jax.eval_shape(closing, symbol("b"))
    assert raised.value.loc.file == __file__


def test_a_result_of_unknown_size_is_refused() -> None:
    def filling(y: Any) -> Any:
        @tk.kernel(out_type=lambda x: y)
        def kernel(x, out):
            out[...] = x[0]

        return kernel(jnp.ones(8))

    with pytest.raises(ArgumentError, match="kernel needs arrays of known sizes") as raised:
        jax.eval_shape(filling, symbol("b"))
    assert raised.value.got == "result 0 = float32[b]"


def test_a_score_mod_with_an_array_of_unknown_size_is_refused() -> None:
    def attention(a: Any) -> Any:
        q = jnp.ones((1, 8, 2, 4))
        mod = jax.tree_util.Partial(lambda a, s, b, n, i, j: s + a[i], a)
        return flash_attention(q, q, q, score_mod=mod)

    with pytest.raises(ArgumentError, match="flash_attention needs arrays of known sizes"):
        jax.eval_shape(attention, symbol("t"))
