"""Sizes that are symbols, as `jax.export` has them: batches of any size, and a refusal elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern import nn
from tilekern.errors import ArgumentError, ConcreteValueError
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.matmul import matmul
from tilekern.kernels.ragged_dot import ragged_dot
from tilekern.kernels.rms_norm import add_rms_norm, rms_norm
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


def library() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]]:
    """Functions, types, and what is said of the first symbol that is no batch."""
    n = jax.ShapeDtypeStruct
    f = jnp.float32
    length = symbol(2, "t", 2, 4)
    rows = symbol("b", 8)
    return {
        "attention": (flash_attention, (length, length, length), "dim 1 is the symbol t"),
        "nn": (dot_product_attention, (length, length, length), "dim 1 is the symbol t"),
        "softmax of columns": (softmax, (symbol(8, "n"),), "dim 1 is the symbol n"),
        "softmax of a batch": (partial(softmax, axis=0), (rows,), "dim 0 is the symbol b"),
        "softmax of rows": (partial(softmax, axis=-2), (symbol(4, "b", 8),), "dim 1 is the symbol b"),
        "norm": (rms_norm, (symbol("b", "c"), symbol("c")), "dim 1 is the symbol c"),
        "matmul": (matmul, (rows, n((8, 4), f)), "float32[b, 8]"),
        "ragged_dot": (ragged_dot, (rows, n((3, 8, 4), f), n((3,), jnp.int32)), "float32[b, 8]"),
        "rope": (rope, (length, symbol(2, "t", dtype=jnp.int32)), "dim 1 is the symbol t"),
        "cross_entropy": (cross_entropy, (n((3, 8), f), symbol(8, "v"), n((3,), jnp.int32)), "float32[8, v]"),
    }


@pytest.mark.parametrize("name", library())
def test_library_functions_name_the_dim_that_they_refuse(name: str) -> None:
    function, types, got = library()[name]
    with pytest.raises(ArgumentError, match="needs arrays of known sizes") as raised:
        jax.eval_shape(lambda *arrays: function(*arrays), *types)
    assert raised.value.loc.file == __file__
    assert "jax.vmap" in raised.value.fix and got in raised.value.got


PLACES: dict[str, Any] = {
    "mask_mod": lambda b, n, i, j: i >= j * b,
    "score_mod": lambda s, b, n, i, j: s + b,
    "dropout_rate": 0.5,
}


@pytest.mark.parametrize("name", PLACES)
def test_attention_of_an_unknown_batch_cannot_depend_on_the_place_in_it(name: str) -> None:
    """Under `jax.vmap` b would be 0 for all elements."""
    heads, keywords = symbol("b", 8, 2, 4), {name: PLACES[name]}
    with pytest.raises(ArgumentError, match="needs arrays of known sizes") as raised:
        jax.eval_shape(lambda q: flash_attention(q, q, q, dropout_key=jax.random.key(0), **keywords), heads)
    assert f"{name}, which depends on the place" in raised.value.expected


# --- batches of library functions -------------------------------------------------------------------------------------

ONES, MASK = np.full((8, 16), 1 / 8, np.float32), (np.arange(81) % 5 > 1).reshape(1, 1, 9, 9)
SAME = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0), "dropout_broadcast": True}
BATCHES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "rms_norm": (lambda x: rms_norm(x, ONES[0, :8]), (("b", "t", 8),), ((3, 4, 8),)),
    "add_rms_norm": (add_rms_norm, ((2, "b", 8),) * 2, ((2, 3, 8),) * 2),
    "layer_norm": (layer_norm, (("b", 8),), ((3, 8),)),
    "softmax": (partial(softmax, axis=-2), (("b", 4, 8),), ((3, 4, 8),)),
    "nn.log_softmax": (lambda x: nn.log_softmax(x, where=x > -1), (("b", "t", 8),), ((3, 4, 8),)),
    "nn.layer_norm": (lambda x: nn.layer_norm(x, ONES[0, :8]), (("b", 4, 8),), ((3, 4, 8),)),
    "swiglu": (swiglu, (("b", 4, 8),) * 2, ((3, 4, 8),) * 2),
    "rope": (lambda x: rope(x, jnp.arange(5)), (("b", 5, 2, 8),), ((3, 5, 2, 8),)),
    "cross_entropy": (
        lambda h, x: cross_entropy(h, ONES, x.astype(jnp.int32)[..., 0]),
        (("b", 4, 8), ("b", 4, 1)),
        ((3, 4, 8), (3, 4, 1)),
    ),
    "attention": (
        lambda q, k: flash_attention(q, k, k, None, MASK, causal=True, **SAME),
        (("b", 9, 4, 8), ("b", 9, 2, 8)),
        ((3, 9, 4, 8), (3, 9, 2, 8)),
    ),
    "attention of lengths": (
        lambda q, x: flash_attention(
            q, q, q, kv_lengths=(x[:, 0] * 9).astype(jnp.int32), segment_ids=((x > 0) * 1, (x > 0) * 1)
        ),
        (("b", 9, 4, 8), ("b", 9)),
        ((3, 9, 4, 8), (3, 9)),
    ),
    "nn": (
        lambda q, m: dot_product_attention(q, q, q, mask=m > 0, is_causal=True),
        (("b", 9, 4, 8), ("b", 1, 9, 9)),
        ((3, 9, 4, 8), (3, 1, 9, 9)),
    ),
    "attention_fn": (lambda q: nn.attention_fn(q, q, q, mask=MASK), (("b", 9, 4, 8),), ((3, 9, 4, 8),)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_unknown_size(name: str) -> None:
    function, types, shapes = BATCHES[name]
    random = np.random.default_rng(0)
    arrays = [np.abs(random.standard_normal(s)).astype(np.float32) for s in shapes]
    run = exported(function, *(symbol(*t) for t in types))
    for found, expected in zip(*(jax.tree.leaves(f(*arrays)) for f in (run, function)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


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
