"""Sizes that are symbols, as `jax.export` has them: independent elements, batches, and a refusal elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.kernel.symbols import close, exported, symbol
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import ArgumentError, ConcreteValueError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul


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


@tk.op(out_type=lambda x: x)
def op_of_sums(x):
    return sums(x) + x


def matmul_by_ones(x: jax.Array) -> jax.Array:
    return matmul(x[None], jnp.ones((7, 3)))


# --- dims of independent elements -------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def product(x, w, out, *, block: tk.Block = 32):
    i, j = tk.parallel(x.shape[0], block), tk.parallel(w.shape[1], block)
    out[i, j] = jnp.tanh(x[i, :] @ w[:, j])


@tk.kernel(out_type=lambda x: (x, jax.ShapeDtypeStruct(x.shape[1:], x.dtype)))
def columns(x, halves, norms):
    j = tk.parallel(x.shape[1], 8)
    tile = x[:, j]
    halves[:, j] = tile / 2
    norms[j] = jnp.sqrt((tile * tile).sum(axis=0))


@tk.kernel(out_type=lambda tree, y: jax.ShapeDtypeStruct((2 * y.shape[0], 3), y.dtype))
def doubled(tree, y, out):
    i = tk.parallel(y.shape[0])
    out[2 * i, :] = tree["x"][i] * y[i, :]
    out[2 * i + 1, :] = tree["c"][i] + y[i, :]


@like_first
def sums(x, out, *, block: tk.Block = 8):
    i = tk.parallel(x.shape[1], block)
    out[:, i] = x[:, i] - x[:, i].sum(axis=0)


@like_first
def outer(x, y, out):
    i, j = tk.parallel(x.shape[0], 4), tk.parallel(x.shape[1], 32)
    out[i, j] = x[i, j] * y[j] + VECTOR[None, :1]


VECTOR = np.arange(3, dtype=np.float32)
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[Any, ...], ...]]] = {
    "rows and a matrix": (product, (("b", 8), (8, 40))),
    "columns of a matrix": (product, ((5, 8), (8, "b"))),
    "rows and columns": (product, (("b", 8), (8, "t"))),
    "one symbol twice": (product, (("b", 8), (8, "b"))),
    "a symbol that is a product": (lambda x, w: product(x.reshape(-1, 8), w), (("b", "t", 8), (8, 4))),
    "two results": (columns, ((6, "b"),)),
    "pytrees, and twice the size": (lambda x, c, y: doubled({"x": x, "c": c}, y), (("b",), ("b",), ("b", 3))),
    "a donated array": (donating, (("b",), ("b",))),
    "a block that the call gives": (lambda x: scan(x, block=3), (("b",),)),
    "all dims": (outer, (("b", "t"), ("t",))),
    "beside known dims": (outer, (("b", 40), (40,))),
    "an op": (op, (("b",),)),
    "a result over it in jnp": (lambda x, w: product(x, w).sum(axis=0), (("b", 8), (8, 4))),
}
SIZES = [{"b": 1, "t": 7}, {"b": 5, "t": 1}, {"b": 16, "t": 40}, {"b": 33, "t": 9}, {"b": 300, "t": 2}]


def cases_of(shapes: Sequence[tuple[Any, ...]], sizes: Sequence[dict[str, int]] = SIZES) -> Iterator[list[np.ndarray]]:
    """Arrays for each choice of sizes of the symbols, with positive numbers."""
    for values in sizes:
        yield [abs(numbers(*(eval(s, values) if isinstance(s, str) else s for s in shape))) + 1 for shape in shapes]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CALLS)
def test_dims_of_independent_elements_may_be_symbols(name: str) -> None:
    function, shapes = CALLS[name]
    run = exported(function, *(symbol(*shape) for shape in shapes))
    for arrays in cases_of(shapes):
        for result, expected in zip(*(jax.tree.leaves(f(*arrays)) for f in (run, function)), strict=True):
            close(result, expected, arrays)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["rows and a matrix", "columns of a matrix", "all dims", "an op"])
def test_gradients_of_exported_functions(name: str) -> None:
    """JAX differentiates before it exports, or the exported program has a gradient of its own."""
    function, shapes = CALLS[name]
    types, every = [symbol(*shape) for shape in shapes], tuple(range(len(shapes)))

    def gradient(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *arrays: (call(*arrays) ** 2).sum(), every)

    exported_gradient, with_gradient = exported(gradient(function), *types), exported(function, *types, vjp_order=1)
    runs = [jax.jit(f) for f in (gradient(function), exported_gradient, gradient(with_gradient))]
    for arrays in cases_of(shapes, [{"b": 2, "t": 1}, {"b": 300, "t": 2}]):
        expected, *gradients = (run(*arrays) for run in runs)
        for results in gradients:
            for result, of_static in zip(results, expected, strict=True):
                close(result, of_static, arrays)


def test_gradients_of_shared_arrays_are_finite() -> None:
    """In a row of zeros the derivative is infinite: no such row may fill the last chunk."""

    @tk.kernel(out_type=lambda x, w: x)
    def normed(x, w, out):
        i = tk.parallel(x.shape[0], 8)
        out[i, :] = x[i, :] / jnp.sqrt((x[i, :] ** 2).sum(axis=1, keepdims=True)) * w[:][None]

    run = exported(normed, symbol("b", 4), symbol(4), vjp_order=1)
    x, w = abs(numbers(19, 4)) + 1, numbers(4)
    found, expected = (jax.grad(lambda w, f=f: f(x, w).sum())(w) for f in (run, normed))
    close(found, expected, [x, w])


def test_one_program_serves_all_platforms() -> None:
    types = symbol("b", 8), symbol(8, 40)
    program = jax.export.export(jax.jit(product), platforms=("cpu", "cuda", "tpu"), disabled_checks=tk.export.checks())(
        *types
    )
    x, w = numbers(19, 8) / 64, numbers(8, 40) / 64
    close(jax.jit(program.call)(x, w), product(x, w), [x, w])


def of_size(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] / x.shape[0]


def branching(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] * (2 if x.shape[0] > 16 else 3)


def indexed(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] * i.index


def of_tiles(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] - x[i, :].sum(axis=0)


def of_places(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] + jnp.arange(4)[:, None]


def whole(x, out):
    j = tk.parallel(x.shape[1], 4)
    out[:, j] = x[:, j] - x[:, j].sum(axis=0)


def reversed_rows(x, out):
    i = tk.parallel(x.shape[0])
    out[i, :] = x[x.shape[0] - 1 - i, :]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (of_size, "the body depends on its size"),
        (branching, "the body depends on its size"),
        (indexed, "along i: the body computes with its index"),
        (of_tiles, "the elements of a tile are combined"),
        (of_places, "the elements of a tile are combined"),
        (whole, "x is read or written as a whole by each program"),
        (reversed_rows, "x is read or written at other places than those of a tile"),
    ],
)
def test_a_dim_of_elements_that_depend_on_each_other_is_refused(body: Any, reason: str) -> None:
    kernel = like_first(body)
    with refused(
        ArgumentError,
        f"{body.__name__} needs arrays of known sizes",
        expected="independent of each other",
        got=f"x = float32[b, 4], whose dim 0 is the symbol b: {reason}",
        fix="jax.vmap",
    ):
        jax.eval_shape(kernel, symbol("b", 4))  # <-


@tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((), x.dtype)))
def total(x, out):
    i = tk.parallel(x.shape[0], 4)
    out.at[...].add(x[i].sum())


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def folded(x, w, out):
    i = tk.parallel(x.shape[0], 4)
    k = tk.serial(x.shape[1], 8)
    out[i, :] = tk.fold(k, lambda k, acc: acc + x[i, k] @ w[k, :], jnp.zeros((i.size, w.shape[1])))


@pytest.mark.parametrize(
    ("function", "types", "got"),
    [
        (total, (symbol("b"),), "x = float32[b], whose dim 0 is the symbol b: results are sums over it"),
        (
            folded,
            (symbol(3, "k"), symbol("k", 4)),
            "dim 1 is the symbol k: results are sums over it",
        ),
        (outer, (symbol("b", "t"), symbol(768)), "the symbol t: it is cut together with a dim of size 768"),
        (outer, (symbol("b", "t"), symbol("b")), "the symbol t: it is cut together with a dim of size b"),
    ],
)
def test_the_dim_and_the_reason_are_named(function: Any, types: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match="needs arrays of known sizes") as raised:
        jax.eval_shape(function, *types)
    assert got in raised.value.got


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


@pytest.mark.parametrize(
    "refuse",
    [
        lambda x: jax.eval_shape(sums, x),
        lambda x: jax.eval_shape(op_of_sums, x),
        lambda x: exported(sums, x),
        lambda x: exported(op_of_sums, x),
        lambda x: scan.trace(x),
        lambda x: exported(jax.grad(lambda x: op_of_sums(x).sum()), x),
    ],
)
def test_a_call_is_refused_in_every_program(refuse: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentError, match="needs arrays of known sizes"):
        refuse(symbol("b", 7))


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
