"""Derivatives of kernels without rules: those of the same function in plain JAX, under every transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.autodiff.kernels import CASES, Case
from tilekern.ir.interpret import interpret

TARGETS = ("cpu:llvm", "cpu:xla")


cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def on_a_target(case: Case, target: str) -> Any:
    """A case for a target; in each sample, each case has one target."""
    mark = pytest.mark.sweep(len(TARGETS), among=f"both modes of {case.name}")
    return pytest.param(case, target, marks=mark, id=f"{case.name}-{target}")


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def functions(case: Case, target: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel and its reference, of the arrays that are differentiated."""
    return lambda *x: case.kernel(*x, *case.rest, target=target), lambda *x: case.reference(*x, *case.rest)


def same(found: Any, expected: Any) -> None:
    """Equal but for the rounding of some hundred sums in float64."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10 * max(1.0, float(jnp.abs(y).max(initial=0))))


def drawn(tree: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), x.dtype), tree)


@pytest.mark.parametrize(("case", "target"), [on_a_target(case, target) for case in CASES for target in TARGETS])
def test_both_modes(case: Case, target: str) -> None:
    ours, theirs = functions(case, target)
    arrays = case.arrays()
    found, pull = jax.vjp(ours, *arrays)
    cotangent, tangents = drawn(jax.eval_shape(theirs, *arrays), 1), case.arrays(2)

    @jax.jit  # one program in the place of one for each op
    def expected(*x: Any) -> Any:
        out, pull = jax.vjp(theirs, *x)
        return out, pull(cotangent), jax.jvp(theirs, x, tangents)[1]

    same((found, pull(cotangent), jax.jvp(ours, arrays, tangents)[1]), expected(*arrays))


def weighed(f: Callable[..., Any], cotangent: Any) -> Callable[..., Any]:
    def total(*x: Any) -> Any:
        return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(f(*x)), jax.tree.leaves(cotangent), strict=True))

    return total


type Second = Callable[[Callable[..., Any], tuple[Any, ...], Any, Any], Any]
"""A second derivative of a function at arrays, along tangents, of its product with a cotangent."""


def reverse_over_reverse(f: Callable[..., Any], arrays: Any, tangents: Any, cotangent: Any) -> Any:
    gradient = jax.grad(weighed(f, cotangent), tuple(range(len(arrays))))
    return jax.vjp(gradient, *arrays)[1](tangents)


def forward_over_reverse(f: Callable[..., Any], arrays: Any, tangents: Any, cotangent: Any) -> Any:
    return jax.jvp(jax.grad(weighed(f, cotangent), tuple(range(len(arrays)))), arrays, tangents)[1]


def reverse_over_forward(f: Callable[..., Any], arrays: Any, tangents: Any, cotangent: Any) -> Any:
    slope = weighed(lambda *x: jax.jvp(f, x, tangents)[1], cotangent)
    return jax.grad(slope, tuple(range(len(arrays))))(*arrays)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", [reverse_over_reverse, forward_over_reverse, reverse_over_forward])
@cases
def test_second_order(case: Case, way: Second) -> None:
    ours, theirs = functions(case, "cpu:llvm")
    arrays, tangents = case.arrays(), case.arrays(2)
    cotangent = drawn(jax.eval_shape(theirs, *arrays), 1)
    expected = jax.jit(lambda *x: way(theirs, x, tangents, cotangent))(*arrays)
    same(way(ours, arrays, tangents, cotangent), expected)


def test_the_kernels_of_backward_passes() -> None:
    """Each way to add up cotangents is taken by some case, so that the tests above test it."""
    stages = {
        "norm": ["norm_backward"],
        "product": ["product_backward_w_ct", "product_backward_x_ct"],
        "attention": ["attention_tangent_states", "attention_backward"],
        "last of loop": ["last_of_loop_tangent_times", "last_of_loop_tangent_states", "last_of_loop_backward"],
    }
    found = {c.name: c.kernel.trace(*c.arrays(), *c.rest).gradient().backward for c in CASES if c.name in stages}
    assert {name: [traced.ir.name for traced in found[name]] for name in stages} == stages
    assert [p.ref.role for p in found["norm"][0].ir.outputs] == ["out", "sum"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("whole", "role"), [(True, "out"), (False, "zeros")])
def test_states_of_tiles_that_may_not_run_begin_as_zeros(whole: bool, role: str) -> None:
    """An output that is stored once would have elements that no program stores."""

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def waves(x, out):
        i = tk.parallel(x.shape[0], 4)
        loop = tk.serial(x.shape[0], 4, stop=x.shape[0] if whole else i.stop)
        out[i] = tk.fold(loop, lambda k, acc: jnp.sin(acc + x[k]), tk.zeros(i, x.dtype))

    x = np.linspace(-1, 1, 12, dtype=np.float32)
    (states,) = (t for t in waves.trace(x).gradient().backward if t.ir.name.endswith("_states"))
    assert {p.ref.role for p in states.ir.outputs} == {role}
    inputs = [np.zeros(p.ref.shape, p.ref.dtype) for p in states.ir.inputs]
    assert all(np.isfinite(found).all() for found in interpret(states.ir, *inputs))
