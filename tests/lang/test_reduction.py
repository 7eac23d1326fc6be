"""`lax.reduce` with any combiner, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tilekern as tk
from tests.lang.checks import both, refused
from tilekern.errors import UnsupportedError
from tilekern.ir.compute import Reduce

INT_MAX = np.iinfo(np.int32).max
TARGETS = {"cpu:xla": "jax", "cpu:llvm": "llvmlite", "cuda:sm_90": "triton", "tpu:v5e": "libtpu"}


def affine(left: Any, right: Any) -> Any:
    """Compose two integer maps x -> a x + b, the left one first. Composition does not commute."""
    (a, b), (c, d) = left, right
    return a * c, b * c + d


def first_greatest(left: Any, right: Any) -> Any:
    """Maximum of two (number, index) pairs; of equal numbers, the one with the smaller index."""
    wins = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))
    return tuple(jnp.where(wins, a, b) for a, b in zip(left, right, strict=True))


def composed(x: np.ndarray, dims: tuple[int, ...]) -> list[np.ndarray]:
    """Oracle: compose the maps one after the other, in row-major order, modulo 2^32 as in the tiles."""
    kept = [d for d in range(x.ndim) if d not in dims]
    lines = x.transpose(*kept, *sorted(dims)).reshape(*(x.shape[d] for d in kept), prod(x.shape[d] for d in dims))
    result = np.ones(lines.shape[:-1], np.int32), np.zeros(lines.shape[:-1], np.int32)
    with np.errstate(over="ignore"):
        for n in range(lines.shape[-1]):
            result = affine(result, (lines[..., n], lines[..., n] + np.int32(1)))
    return [np.asarray(r) for r in result]


def whole(function: Callable[[Any], Any], x: np.ndarray) -> tk.Kernel:
    """Kernel of one program that stores the results of a function of the whole array."""
    types = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in jax.eval_shape(function, x))

    @tk.kernel(out_type=lambda x: (types,))
    def f(x, outputs):
        for output, result in zip(outputs, function(x[...]), strict=True):
            output[...] = result

    return f


def compose(dims: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: lax.reduce((x, x + 1), (np.int32(1), np.int32(0)), affine, dims)


@settings(max_examples=8)
@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=1, max_size=3),
    st.sets(st.integers(0, 2)),
    st.integers(0, 99),
)
def test_any_monoid_in_the_order_of_the_elements(shape: list[int], dims: set[int], seed: int) -> None:
    along = tuple(d for d in sorted(dims) if d < len(shape))
    x = np.random.default_rng(seed).integers(-(2**31), 2**31, shape).astype(np.int32)
    for found, expected in zip(both(whole(compose(along), x), x), composed(x, along), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_every_backend(target: str) -> None:
    pytest.importorskip(TARGETS[target], reason=f"needs {TARGETS[target]}")
    x = np.random.default_rng(0).integers(-3, 4, (3, 8, 13)).astype(np.int32)

    def function(x: Any) -> Any:
        places = lax.broadcasted_iota(jnp.int32, x.shape, 2)
        found = lax.reduce((x.astype(jnp.float32), places), (-jnp.inf, np.int32(INT_MAX)), first_greatest, (2,))
        return *found, *compose((1,))(x)

    found = whole(function, x).trace(x).lower(target).interpret(x)[0]
    for got, expected in zip(found, (x.max(2).astype(np.float32), x.argmax(2), *composed(x, (1,))), strict=True):
        np.testing.assert_array_equal(got, expected)


COMBINERS = {
    "add": (lax.add, 10, lambda x: x.sum(1) + 10),
    "a lambda": (lambda a, b: b + a, 10, lambda x: x.sum(1) + 10),
    "max": (lax.max, 3, lambda x: np.maximum(x.max(1), 3)),
    "and": (lax.bitwise_and, 13, lambda x: np.bitwise_and.reduce(x, 1) & 13),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", COMBINERS)
def test_a_combiner_of_one_op_is_a_reduction_with_the_initial_value_combined_once(name: str) -> None:
    combiner, init, oracle = COMBINERS[name]
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    made = whole(lambda x: [lax.reduce(x, np.int32(init), combiner, (1,))], x)
    np.testing.assert_array_equal(both(made, x)[0], oracle(x))
    assert sum(isinstance(op, Reduce) for op in made.trace(x).ir.body.ops) == 1


@pytest.mark.parametrize(
    "combiner",
    [lambda a, b: a + a, lambda a, b: a + 1, lambda a, b: a - b, lambda a, b: b],
    ids=["a+a", "a+1", "-", "b"],
)
def test_what_only_looks_like_a_reduction_is_none(combiner: Any) -> None:
    x = np.arange(8, dtype=np.int32).reshape(2, 4)
    made = whole(lambda x: [lax.reduce(x, np.int32(0), combiner, (1,))], x)
    assert not any(isinstance(op, Reduce) for op in made.trace(x).ir.body.ops)
    both(made, x)


def test_a_combiner_of_branches_and_casts() -> None:
    def combiner(a: Any, b: Any) -> Any:
        return lax.cond(a > b, lambda: a.astype(jnp.int16), lambda: b.astype(jnp.int16)).astype(jnp.int32)

    x = np.array([[1, 9, 3], [-4, -2, -3]], np.int32)
    made = whole(lambda x: [lax.reduce(x, np.int32(0), combiner, (1,))], x)
    np.testing.assert_array_equal(both(made, x)[0], [9, 0])


def test_what_a_combiner_may_not_do_is_refused_where_it_is_called() -> None:
    def refuses(x: Any) -> Any:
        return [lax.reduce(x, np.float32(0), lambda a, b: lax.igamma(a, b), (0,))]  # <-

    with refused(UnsupportedError, "`igamma` is not part of the language", got="igamma(", fix="outside"):
        whole(refuses, np.ones(4, np.float32)).trace(np.ones(4, np.float32))
