"""A body is traced once for a call and a target: for the one that the call will most likely be lowered for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import IndexingError

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

X = numbers(12)


def recorded() -> tuple[tk.Kernel, list[int]]:
    """A kernel that doubles, with other blocks on each CPU target; and the block of each trace of its body."""
    blocks: list[int] = []

    @like_first
    def double(x, out, *, block: tk.Block = 4):
        blocks.append(block)
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 2

    double.schedule("cpu:llvm")(lambda x: {"block": 6})
    return double, blocks


def in_an_op(kernel: tk.Kernel) -> tk.CustomOp:
    @tk.op(out_type=lambda x: x)
    def twice(x):
        return kernel(kernel(x))

    return twice


USES: dict[str, tuple[Callable[[tk.Kernel], Any], list[int]]] = {
    "call": (lambda f: f(X), [6]),
    "lower": (lambda f: jax.jit(f).lower(X), [6]),
    "vmap": (lambda f: jax.vmap(f)(jnp.stack([X, X])), [6]),
    "gradient": (lambda f: jax.grad(lambda x: f(x).sum())(X), [6]),
    "named target": (lambda f: f(X, target="cpu:xla"), [4]),
    "trace": (lambda f: f.trace(X), [4]),
    "trace, then call": (lambda f: (f.trace(X), f(X)), [4, 6]),
    "call, then trace": (lambda f: (f(X), f.trace(X)), [6, 4]),
    "export": (lambda f: jax.export.export(jax.jit(f))(X), [6, 4]),
    "op": (lambda f: in_an_op(f)(X), [6]),
    "trace of an op": (lambda f: in_an_op(f).trace(X), [4]),
}


@pytest.mark.parametrize("use", USES)
def test_a_body_is_traced_once_for_a_target(use: str) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    kernel, blocks = recorded()
    run, expected = USES[use]
    run(kernel)
    assert blocks == expected
    run(kernel)
    assert blocks == expected


def test_a_call_for_another_device_than_the_default_is_traced_for_it() -> None:
    kernel, blocks = recorded()
    lowered = jax.jit(kernel).trace(jnp.asarray(X)).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
    assert blocks[1:] == [4]


def test_an_error_in_the_body_comes_with_the_call() -> None:
    @like_first
    def wrong(x, out):
        out[...] = x[2.5]  # <-

    with refused(IndexingError, "index 0 of x is of the wrong kind"):
        jax.eval_shape(wrong, X)


def test_results_do_not_depend_on_the_first_trace() -> None:
    first, _ = recorded()
    second, _ = recorded()
    second.trace(X)
    np.testing.assert_array_equal(first(X), second(X))
