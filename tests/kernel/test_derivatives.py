"""Derivatives: `defjvp`, `deftranspose` and `linear=` of kernels and ops, under every transformation of JAX.

The numbers are small and whole, so that derivatives are exact, whatever the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import numbers, refused
from tilekern.errors import ArgumentError, NotDifferentiableError
from tilekern.kernel.definition import inherited_target

X = numbers(10)


def like(x: Any, *rest: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- a kernel with derivatives of every order ------------------------------------------------------------------------


@tk.kernel(out_type=like)
def cube(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] ** 3


@tk.kernel(out_type=like, linear=("dx",))
def cube_tangent(x, dx, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = 3 * x[i] ** 2 * dx[i]


@cube.defjvp
def cube_jvp(primals, tangents):
    return cube(*primals), cube_tangent(*primals, *tangents)


@cube_tangent.defjvp
def cube_tangent_jvp(primals, tangents):
    (x, dx), (along, of_linear) = primals, tangents
    assert of_linear is None  # what the kernel is linear in is no business of the rule
    return cube_tangent(x, dx), 6 * x * along * dx


@cube_tangent.deftranspose
def cube_tangent_transpose(cotangent, x, dx):
    assert isinstance(dx, jax.ShapeDtypeStruct) and dx.shape == x.shape
    return {"dx": cube_tangent(x, cotangent)}


@tk.op(out_type=like)
def cube_op(x, *, block: tk.Block = 4):
    return cube(x[::-1], block=block)[::-1]


@tk.op(out_type=like, linear=("dx",))
def cube_op_tangent(x, dx):
    return cube_tangent(x, dx)


@cube_op.defjvp
def cube_op_jvp(primals, tangents):
    return cube_op(*primals), cube_op_tangent(*primals, *tangents)


cube_op_tangent.defjvp(cube_tangent_jvp)
cube_op_tangent.deftranspose(cube_tangent_transpose)

Function = Callable[[Any], Any]


def total(f: Function) -> Function:
    return lambda x: f(x).sum()


def directional(f: Function) -> Function:
    """The derivative along x itself, by forward mode."""
    return lambda x: jax.jvp(f, (x,), (x,))


def third(f: Function) -> Function:
    return jax.grad(total(jax.grad(total(jax.grad(total(f))))))


def in_scan(f: Function) -> Function:
    return lambda x: jax.lax.scan(lambda carry, _: (f(carry) / 4, carry), x, length=2)


def stacked(f: Function, dim: int) -> Function:
    return lambda x: jax.vmap(f, in_axes=dim, out_axes=1)(jnp.stack([x, 2 * x, -x], dim))


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: jax.grad(total(f)),
    "jvp": directional,
    "jvp of jvp": lambda f: directional(directional(f)),
    "hessian": lambda f: jax.hessian(total(f)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "jacfwd of jacrev": lambda f: jax.jacfwd(jax.jacrev(f)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "third": third,
    "jit of third": lambda f: jax.jit(third(f)),
    "grad of jit": lambda f: jax.grad(total(jax.jit(f))),
    "grad of checkpoint": lambda f: jax.jit(jax.grad(total(jax.checkpoint(f)))),
    "grad of scan": lambda f: jax.grad(lambda x: in_scan(f)(x)[0].sum()),
    "jvp of scan": lambda f: directional(in_scan(f)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(total(f)), 1, 1)(jnp.stack([x, 2 * x], 1)),
    "vmap of hessian": lambda f: lambda x: jax.vmap(jax.hessian(total(f)))(jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f: jax.grad(total(stacked(f, 0))),
    "grad of vmap along 1": lambda f: jax.grad(total(stacked(f, 1))),
    "hessian of vmap along 1": lambda f: jax.hessian(total(stacked(f, 1))),
    "grad of vmap of vmap": lambda f: jax.grad(lambda x: jax.vmap(stacked(f, 1))(jnp.stack([x, -x])).sum()),
    "jvp of vmap": lambda f: directional(stacked(f, 1)),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("function", [cube, cube_op], ids=["kernel", "op"])
def test_every_transformation(function: Any, name: str) -> None:
    transform, x = TRANSFORMATIONS[name], jnp.asarray(X[:4])
    same(transform(partial(function, block=3))(x), transform(lambda x: x**3)(x))


@pytest.mark.smoke
def test_forward_reverse_and_both() -> None:
    for name in ("jvp", "grad", "hessian", "grad of vmap along 1"):
        test_every_transformation(cube, name)


# --- kernels that are linear in several inputs, of which calls share some ---------------------------------------------


@tk.kernel(out_type=lambda a, b, w: like(w), linear=("a", "b"))
def mix(a, b, w, out, *, block: tk.Block = 4):
    """A linear input may be None: zeros."""
    i = tk.parallel(w.shape[0], block)
    out[i] = (0 if a is None else a[i]) + (0 if b is None else w[i] * b[i])


@mix.defjvp
def mix_jvp(primals, tangents):
    (a, b, w), (da, db, dw) = primals, tangents
    assert da is None and db is None
    return mix(a, b, w), dw * b


@mix.deftranspose
def mix_transpose(cotangent, a, b, w):
    found = {"a": cotangent, "b": mix(None, cotangent, w)}
    return {name: found[name] for name, x in (("a", a), ("b", b)) if isinstance(x, jax.ShapeDtypeStruct)}


def plain_mix(a: Any, b: Any, w: Any) -> Any:
    return a + w * b


ABW = X, X[::-1].copy(), X * X


@pytest.mark.parametrize("wanted", [0, 1, 2, (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_derivatives_in_some_of_the_inputs(wanted: Any) -> None:
    def quadratic(function: Any) -> Any:
        return lambda *args: (function(*args) ** 2).sum()

    same(jax.grad(quadratic(mix), wanted)(*ABW), jax.grad(quadratic(plain_mix), wanted)(*ABW))
    same(*(jax.hessian(quadratic(f), wanted)(*(x[:3] for x in ABW)) for f in (mix, plain_mix)))


@pytest.mark.parametrize("axes", [(None, 1, None), (0, None, 1), (1, 0, 0), (None, None, 0), (None, 0, None)], ids=str)
def test_operands_that_calls_under_vmap_share(axes: tuple[int | None, ...]) -> None:
    """Their cotangents are summed; others are stacked where the operand is."""
    args = [x if d is None else np.stack([x, 2 * x, -x], d) for x, d in zip(ABW, axes, strict=True)]

    def loss(function: Any) -> Any:
        return lambda *args: (jax.vmap(function, in_axes=axes, out_axes=1)(*args) ** 2).sum()

    same(*(jax.jit(jax.grad(loss(f), (0, 1, 2)))(*args) for f in (mix, plain_mix)))
    along = [x + 1 for x in args]
    same(*(jax.jvp(jax.grad(loss(f), 1), args, along) for f in (mix, plain_mix)))


def test_the_transpose_of_a_linear_function() -> None:
    _, b, w = ABW
    (found,) = jax.linear_transpose(lambda b: mix(None, b, w), b)(X)
    same(found, w * X)
    (found,) = jax.linear_transpose(jax.vmap(lambda b: mix(None, b, w), 1), np.stack([b, b], 1))(np.stack([X, -X]))
    same(found, np.stack([w * X, -w * X], 1))


# --- what rules are given ---------------------------------------------------------------------------------------------


def kernel_of_much(seen: list[Any]) -> Any:
    """Integers, pytrees, several results; the rule notes what it is given. A new one: JAX remembers what rules did."""

    @tk.kernel(out_type=lambda x, n, weights: (like(x), like(n), like(x)))
    def mixed(x, n, weights, out, count, spare, *, power: int = 1, name: str = "", block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * n[i] + weights["a"][i] * weights["b"][0][i] ** power
        count[i] = n[i] + 1
        spare[i] = x[i]

    @mixed.defjvp
    def jvp(primals, tangents, *, power, block=None):
        seen.append((jax.tree.map(lambda t: t is None, tangents, is_leaf=lambda t: t is None), power, block))
        (x, n, weights), (dx, dn, dweights) = primals, tangents
        assert dn is None
        tangent = jnp.zeros_like(x) if dx is None else dx * n
        if dweights["a"] is not None:
            tangent += dweights["a"] * weights["b"][0] ** power
        if dweights["b"][0] is not None:
            tangent += weights["a"] * power * weights["b"][0] ** (power - 1) * dweights["b"][0]
        return mixed(*primals, power=power), (tangent, None, None)

    return mixed


N = np.arange(10, dtype=np.int32)
WEIGHTS = {"a": X + 1, "b": (X + 2,)}


def plain_mixed(x: Any, n: Any, weights: Any, power: int = 1) -> Any:
    out = x * n + weights["a"] * weights["b"][0] ** power
    return out, n + 1, jax.lax.stop_gradient(x)  # the rule leaves out the tangent of the third result


def test_pytrees_integers_and_several_results() -> None:
    mixed = kernel_of_much([])

    def loss(function: Any) -> Any:
        def run(x: Any, weights: Any) -> Any:
            out, count, spare = function(x, N, weights, power=2)
            return (out * count * spare).sum()

        return run

    for wanted in (0, 1, (0, 1)):
        same(*(jax.jit(jax.grad(loss(f), wanted))(X, WEIGHTS) for f in (mixed, plain_mixed)))
    args, along = (X, WEIGHTS), (X, WEIGHTS)
    same(*(jax.jvp(loss(f), args, along) for f in (mixed, plain_mixed)))
    batch = np.stack([X, -X]), WEIGHTS
    same(*(jax.vmap(jax.grad(loss(f), (0, 1)), in_axes=(0, None))(*batch) for f in (mixed, plain_mixed)))

    def summed(function: Any) -> Any:
        return lambda *batch: jax.vmap(loss(function), in_axes=(0, None))(*batch).sum()

    same(*(jax.grad(summed(f), (0, 1))(*batch) for f in (mixed, plain_mixed)))


def test_the_cotangent_of_an_integer_is_float0() -> None:
    mixed = kernel_of_much([])
    _, pull = jax.vjp(lambda x, n: mixed(x, n, WEIGHTS)[0], X, N)
    dx, dn = pull(X)
    same(dx, X * N)
    assert dn.dtype == jax.dtypes.float0


def test_a_tangent_that_is_zero_is_none() -> None:
    seen: list[Any] = []
    mixed = kernel_of_much(seen)
    jax.jvp(lambda x: mixed(x, N, WEIGHTS), (X,), (X,))
    jax.jvp(lambda b: mixed(X, N, {"a": X, "b": b}), ((X,),), ((X,),))
    (first, *_), (second, *_) = seen
    assert first == (False, True, {"a": True, "b": (True,)})
    assert second == (True, True, {"a": True, "b": (False,)})


def test_a_tangent_that_a_rule_leaves_out_is_zero() -> None:
    @tk.kernel(out_type=like)
    def copy(x, out):
        i = tk.parallel(x.shape[0])
        out[i] = x[i]

    copy.defjvp(lambda primals, tangents: (copy(*primals), None))
    same(jax.grad(lambda x: copy(x).sum())(X), np.zeros_like(X))
    same(jax.jvp(copy, (X,), (X,)), (X, np.zeros_like(X)))


def test_rules_get_the_static_arguments_and_blocks_of_the_call() -> None:
    seen: list[Any] = []
    mixed = kernel_of_much(seen)
    for keywords in ({}, {"power": 3}, {"block": 2}, {"power": 2, "block": 5, "name": "not asked for"}):
        jax.jvp(lambda x, keywords=keywords: mixed(x, N, WEIGHTS, **keywords), (X,), (X,))
    assert [given[1:] for given in seen] == [(1, None), (3, None), (1, 2), (2, 5)]

    @tk.kernel(out_type=like, linear=("x",))
    def double(x, out, *, power: int = 1, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = 2 * x[i]

    every: list[Any] = []

    @double.deftranspose
    def transpose(cotangent, x, **keywords):
        every.append(keywords)
        return {"x": double(cotangent, **keywords)}

    same(jax.grad(lambda x: double(x, power=3, block=2).sum())(X), np.full_like(X, 2))
    assert every == [{"power": 3, "block": 2}]


def test_the_cotangent_of_a_result_that_is_not_used_is_none() -> None:
    seen: list[Any] = []

    @tk.kernel(out_type=lambda x: (like(x), like(x)), linear=("x",))
    def pair(x, first, second):
        i = tk.parallel(x.shape[0])
        first[i] = 2 * x[i]
        second[i] = 3 * x[i]

    @pair.deftranspose
    def transpose(cotangents, x):
        seen.append([c is None for c in cotangents])
        return {"x": sum(n * c for n, c in zip((2, 3), cotangents, strict=True) if c is not None)}

    same(jax.grad(lambda x: pair(x)[1].sum())(X), np.full_like(X, 3))
    same(jax.grad(lambda x: pair(x)[0].sum() + pair(x)[1].sum())(X), np.full_like(X, 5))
    same(jax.jit(jax.grad(lambda x: sum(pair(x)).sum()))(X), np.full_like(X, 5))
    assert [True, False] in seen and [False, True] in seen and [False, False] in seen


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["plain", "jit", "vmap"])
def test_calls_inside_of_rules_inherit_the_target(wrap: Any) -> None:
    asked: list[Any] = []

    @tk.kernel(out_type=like)
    def square(x, out):
        i = tk.parallel(x.shape[0])
        out[i] = x[i] ** 2

    @tk.kernel(out_type=lambda x, dx: like(x), linear=("dx",))
    def square_tangent(x, dx, out):
        i = tk.parallel(x.shape[0])
        out[i] = 2 * x[i] * dx[i]

    @square.defjvp
    def jvp(primals, tangents):
        asked.append(inherited_target())
        return square(*primals), square_tangent(*primals, *tangents)

    @square_tangent.deftranspose
    def transpose(cotangent, x, dx):
        asked.append(inherited_target())
        return {"dx": square_tangent(x, cotangent)}

    for target in ("cpu:xla", None):
        asked.clear()
        found = jax.grad(lambda x, target=target: wrap(partial(square, target=target))(x).sum())(X[:, None])
        same(found, 2 * X[:, None])
        assert asked == [target, target]


# --- errors -----------------------------------------------------------------------------------------------------------


def with_jvp(rule: Callable[..., Any]) -> Any:
    @tk.kernel(out_type=lambda x: (like(x), like(x)))
    def pair(x, first, second):
        i = tk.parallel(x.shape[0])
        first[i] = x[i]
        second[i] = x[i]

    pair.defjvp(rule)
    return pair


@pytest.mark.parametrize(
    ("rule", "expected", "got"),
    [
        (
            lambda p, t: ((p[0], p[0]), (t[0][:3], None)),
            "the tangents that the rule of defjvp returned as",
            "float32[3]",
        ),
        (lambda p, t: ((p[0], p[0]), (t[0], t[0].astype(jnp.bfloat16))), "float32[10], or None", "bfloat16[10]"),
        (lambda p, t: ((p[0], p[0]), t[0]), "the tangents", "float32[10]"),
        (lambda p, t: ((p[0], p[0]), (t[0],)), "the tangents", "float32[10]"),
        (lambda p, t: ((p[0], p[0][:2]), None), "the results that the rule of defjvp returned as", "float32[2]"),
        (lambda p, t: ((p[0],), None), "the results", "float32[10]"),
    ],
    ids=["shape", "dtype", "structure", "too few", "a result", "too few results"],
)
def test_a_jvp_of_the_wrong_type(rule: Any, expected: str, got: str) -> None:
    pair = with_jvp(rule)
    with refused(ArgumentError, "a derivative of pair has the wrong type", expected=expected, got=got, fix="shapes"):
        jax.jvp(pair, (X,), (X,))  # <-


def with_transpose(rule: Callable[..., Any]) -> Any:
    @tk.kernel(out_type=lambda x, y: like(x), linear=("x",))
    def times(x, y, out):
        i = tk.parallel(x.shape[0])
        out[i] = x[i] * y[i]

    times.deftranspose(rule)
    return times


@pytest.mark.parametrize(
    ("rule", "summary", "expected", "got"),
    [
        (
            lambda c, x, y: {"x": c[:2]},
            "of times has the wrong type",
            "the cotangent of x as float32[10]",
            "float32[2]",
        ),
        (lambda c, x, y: {"x": (c, c)}, "of times has the wrong type", "the cotangent of x", "float32[10]"),
        (lambda c, x, y: {"y": c}, "times.deftranspose returned something else", "names among x to", "the names y"),
        (lambda c, x, y: c, "times.deftranspose returned something else", "a dict from names", "float32[10]"),
        (lambda c, x, y: None, "times.deftranspose returned something else", "a dict from names", "None"),
    ],
    ids=["shape", "structure", "name", "no dict", "nothing"],
)
def test_a_transpose_of_the_wrong_type(rule: Any, summary: str, expected: str, got: str) -> None:
    times = with_transpose(rule)
    with refused(ArgumentError, summary, expected=expected, got=got, fix=""):
        jax.grad(lambda x: times(x, X).sum())(X)  # <-


def test_a_rule_that_returns_no_pair() -> None:
    pair = with_jvp(lambda p, t: p[0])
    with refused(
        ArgumentError, "the rule of pair.defjvp", expected="(results, tangents)", got="float32[10]", fix="ret"
    ):
        jax.jvp(pair, (X,), (X,))  # <-


def test_a_linear_kernel_without_a_transpose() -> None:
    @tk.kernel(out_type=like, linear=("x",))
    def bare(x, out):
        i = tk.parallel(x.shape[0])
        out[i] = 2 * x[i]

    same(jax.jvp(bare, (X,), (-X,)), (2 * X, -2 * X))
    same(jax.grad(lambda x: bare(x).sum())(X), jnp.full(10, 2.0))


def test_transposing_in_an_operand_that_is_not_linear() -> None:
    a, b, w = ABW
    with refused(NotDifferentiableError, "mix has no transpose", expected="mix.deftranspose", got="mix", fix="rule"):
        jax.linear_transpose(lambda w: mix(a, b, w), w)(X)  # <-


def test_a_kernel_that_closes_over_what_is_differentiated() -> None:
    def loss(y: Any) -> Any:
        @tk.kernel(out_type=like)
        def shifted(x, out):
            i = tk.parallel(x.shape[0])
            out[i] = x[i] + y

        shifted.defjvp(lambda primals, tangents: (shifted(*primals), tangents[0]))
        return shifted(X).sum()  # <-

    assert loss(jnp.float32(2)) == X.sum() + 20
    with pytest.raises(NotDifferentiableError, match="the kernel shifted has no derivative") as caught:
        jax.grad(loss)(jnp.float32(2))
    assert caught.value.got == "shifted under differentiation, which closes over what is differentiated"


@pytest.mark.parametrize("declare", [tk.kernel, tk.op], ids=["kernel", "op"])
def test_linear_names_inputs(declare: Any) -> None:
    def function(x, out):
        return x

    with pytest.raises(ArgumentError, match="is linear in something that is no parameter") as caught:
        declare(out_type=like, linear=("y",))(function)
    assert (caught.value.expected, caught.value.got) == ("names among x, out", "linear = ('y',)")
