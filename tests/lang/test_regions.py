"""`tk.region`: names of the operations that are traced in a context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import before_passes, check, kernel, like_first, numbers, refused
from tests.lower.library import kernels_of
from tilekern.errors import ArgumentError
from tilekern.ir.core import Func
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.lower.target import resolve

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(8, 4)


def regions(func: Func) -> dict[str, str]:
    """The region of each elementwise function of a Func, which has it once."""
    ops = [op for op in func.walk() if isinstance(op, Elementwise)]
    assert len({op.function for op in ops}) == len(ops)
    return {op.function: op.loc.region for op in ops}


def helper(x: Any) -> Any:
    with tk.region("inner"):
        return jnp.tanh(x)


@like_first
def scores(x: Any, out: Any, *, block: tk.Block = 4) -> None:
    """The exponential of a tangent in nested regions, and a sine in none."""
    i = tk.parallel(x.shape[0], block)
    with tk.region("outer"):
        y = jnp.exp(helper(x[i]))
    out[i] = jnp.sin(y)


def test_operations_have_the_path_of_their_regions() -> None:
    func = before_passes(scores, X)
    assert regions(func) == {"tanh": "outer/inner", "exp": "outer", "sin": ""}
    loads = {op.name: op.loc.region for op in func.walk() if op.name in ("load", "store")}
    assert loads == {"load": "outer", "store": ""}


def test_results_are_those_without_regions() -> None:
    @like_first
    def plain(x: Any, out: Any, *, block: tk.Block = 4) -> None:
        i = tk.parallel(x.shape[0], block)
        out[i] = jnp.sin(jnp.exp(jnp.tanh(x[i])))

    assert str(scores.trace(X)) == str(plain.trace(X)).replace("@plain", "@scores")
    np.testing.assert_array_equal(scores(X), plain(X))


def in_fold(x: Any) -> Any:
    def step(k: Any, total: Any) -> Any:
        with tk.region("step"):
            return total + jnp.tanh(x[:, k]).sum(1)

    return tk.fold(tk.serial(x.shape[1], 2), step, jnp.zeros(x.shape[0]))


def in_while(x: Any) -> Any:
    def step(n: Any) -> Any:
        with tk.region("step"):
            return (n[0] + 1, jnp.tanh(n[1]))

    return lax.while_loop(lambda n: n[0] < 3, step, (0, x[:, 0]))[1]


def in_scan(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        with tk.region("step"):
            return jnp.tanh(carry), None

    return lax.scan(step, x[:, 0], None, length=3)[0]


def in_branch(x: Any) -> Any:
    def branch(v: Any) -> Any:
        with tk.region("step"):
            return jnp.tanh(v)

    v = x[:, 0]
    return lax.cond(v[0] > 0, branch, lambda v: v, v)


def in_jit(x: Any) -> Any:
    @jax.jit
    def function(v: Any) -> Any:
        with tk.region("step"):
            return jnp.tanh(v)

    return function(x[:, 0])


def in_vmap(x: Any) -> Any:
    def row(v: Any) -> Any:
        with tk.region("step"):
            return jnp.tanh(v)

    return jax.vmap(row)(x[:, 0])


def in_checkpoint(x: Any) -> Any:
    @jax.checkpoint
    def function(v: Any) -> Any:
        with tk.region("step"):
            return jnp.tanh(v)

    return function(x[:, 0])


@pytest.mark.parametrize("body", [in_fold, in_while, in_scan, in_branch, in_jit, in_vmap, in_checkpoint])
def test_regions_reach_into_nested_functions(body: Any) -> None:
    @kernel(((8,), np.float32))
    def f(x: Any, out: Any) -> None:
        with tk.region("all"):
            out[...] = body(x)

    func = before_passes(f, X)
    assert {op.loc.region for op in func.walk() if getattr(op, "function", "") == "tanh"} == {"all/step"}
    assert {op.loc.region for op in func.walk() if op.name == "store"} == {"all"}


def test_functions_of_jax_are_in_the_region_of_their_call() -> None:
    """Softmax is a function of JAX with a derivative of its own, logsumexp one that JAX traces once for all calls."""

    @kernel(None, ((8,), np.float32))
    def f(x: Any, out: Any, total: Any) -> None:
        with tk.region("first"):
            y = jax.nn.softmax(x[...], axis=1)
        with tk.region("second"):
            out[...] = jax.nn.softmax(y, axis=1)
        total[...] = jax.nn.logsumexp(y, axis=1)

    ops = [op for op in before_passes(f, X).walk() if getattr(op, "function", "") == "exp"]
    assert [op.loc.region for op in ops] == ["first", "second", ""]


def test_derivatives_in_a_body_are_in_the_region_of_their_function() -> None:
    @like_first
    def f(x: Any, out: Any) -> None:
        def function(v: Any) -> Any:
            with tk.region("forward"):
                return jnp.tanh(v).sum()

        out[...] = jax.grad(function)(x[...])

    ops = [op for op in before_passes(f, X).walk() if isinstance(op, Elementwise)]
    assert {"tanh", "mul"} <= {op.function for op in ops} and {op.loc.region for op in ops} == {"forward"}


def test_scopes_of_jax_are_no_regions() -> None:
    """Neither around the call, where many calls share one trace, nor in the body, where JAX has scopes of its own."""

    @like_first
    def f(x: Any, out: Any) -> None:
        with jax.named_scope("scope"):
            out[...] = jnp.einsum("ij,ij->ij", jnp.tanh(x[...]), x[...])

    with jax.named_scope("caller"):
        func = before_passes(f, X)
    assert {op.loc.region for op in func.walk()} == {""}


def test_gradients_are_in_the_regions_of_the_operations_that_they_come_from() -> None:
    target, jaxpr = resolve("cpu:xla"), jax.make_jaxpr(jax.grad(lambda x: scores(x).sum()))(X)
    texts = [to_text(kernel.version(target).func, locations=True) for kernel in kernels_of(jaxpr, target)]
    assert any('region "outer/inner"' in text and "region outer" in text for text in texts)


def test_an_effect_in_a_region_is_no_lost_effect() -> None:
    @like_first
    def f(x: Any, out: Any) -> None:
        with tk.region("checks"):
            tk.device_assert(x[...] > 0)
            tk.debug_print("{}", x[0, 0])
        with tk.region("stores"):
            out[...] = x[...]

    check(f, X, oracle=X)


def test_the_text_of_the_ir_holds_regions_and_reads_back() -> None:
    func = before_passes(scores, X)
    text = to_text(func, locations=True)
    assert 'in helper region "outer/inner"' in text and "in scores region outer" in text
    assert to_text(parse(text), locations=True) == text
    assert "region" not in to_text(func)


def test_a_saved_kernel_keeps_its_regions(tmp_path: Path) -> None:
    """In version 2 of the format. A kernel without regions is a file that older versions read."""
    path = tmp_path / "scores.tile"
    scores.trace(X).save(path)
    assert path.read_text().startswith("tilekern kernel, version 2, ") and 'region "outer/inner"' in path.read_text()
    np.testing.assert_array_equal(tk.load(path)(X), scores(X))


@pytest.mark.parametrize(
    ("name", "got"), [("", "name = ''"), (None, "name = None"), (3, "name = 3"), (b"x", "name = ")]
)
def test_a_name_that_is_no_text(name: Any, got: str) -> None:
    @like_first
    def f(x: Any, out: Any) -> None:
        with tk.region(name):  # <-
            out[...] = x[...]

    with refused(ArgumentError, "the name of a region is no text", expected="a str", got=got, fix="with tk.region("):
        f.trace(X)
