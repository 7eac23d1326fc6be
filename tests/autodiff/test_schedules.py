"""Blocks and launch options of derived kernels: those of the kernel, or the author's choice for derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, refused
from tilekern.errors import ArgumentError
from tilekern.kernel.derived_rules import BackwardPass, tangent_of
from tilekern.lower.target import resolve

X = jnp.arange(1.0, 21)


def cubes() -> Any:
    @like_first
    def cube(x, out, *, block: tk.Block = 8):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] ** 3

    return cube


def blocks(kernel: Any, target: str) -> list[int]:
    """Of the kernel, of its tangent and of its backward pass."""
    traced = kernel.trace(X, target=target)
    gradient = traced.gradient()
    return [t.ir.axes[0].block for t in (traced, gradient.tangent, *gradient.backward)]


def test_derivatives_have_the_blocks_of_the_kernel() -> None:
    cube = cubes()
    cube.schedule("cuda")(lambda x: {"block": 16, "num_stages": 4, "num_warps": 8})
    assert blocks(cube, "cpu") == [8, 8, 8]
    assert blocks(cube, "cuda:sm_90") == [16, 16, 16]


def test_an_author_chooses_the_blocks_of_derivatives() -> None:
    cube = cubes()
    cube.gradient_schedule("cuda")(lambda x: {"block": 4})
    cube.gradient_schedule("cuda:sm_90")(lambda x: {"block": 2})
    assert blocks(cube, "cpu") == [8, 8, 8]
    assert blocks(cube, "cuda:sm_80") == [8, 4, 4]
    assert blocks(cube, "cuda:sm_90") == [8, 2, 2]


@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_run_with_the_chosen_blocks(mapped: bool, capfd: pytest.CaptureFixture[str]) -> None:
    @like_first
    def square(x, out, *, block: tk.Block = 8):
        i = tk.parallel(x.shape[0], block)
        tk.debug_print("tile of {}", block + 0 * i.index)
        out[i] = x[i] ** 2

    square.gradient_schedule("cpu")(lambda x: {"block": 5})
    call = jax.vmap(square) if mapped else square
    x = X[None] if mapped else X
    tangent = jax.jvp(call, (x,), (x,))[1]
    np.testing.assert_array_equal(tangent, 2 * x * x)
    np.testing.assert_array_equal(jax.grad(lambda x: call(x).sum())(x), 2 * x)
    jax.effects_barrier()
    said = capfd.readouterr().out.split("\n")
    assert said.count("tile of 8") == 2 * 3  # the forward kernel, twice


def launches(kernel: Any) -> list[Any]:
    """Of the kernel, of its tangent and of its backward pass, on an H100."""
    target = resolve("cuda:sm_90")
    family = kernel.trace(X, target=target.name)._kernel
    tangent = tangent_of(family, (True,))
    stages = BackwardPass(tangent, (False, True)).stages(target)
    return [dict(f.launch(target)) for f in (family, tangent, *stages)]


def test_launch_options_are_those_of_the_derivative() -> None:
    """Stages and warps that suit the kernel do not fit its derivatives, which have more tiles."""
    cube, tuned = cubes(), cubes()
    for kernel in (cube, tuned):
        kernel.schedule("cuda")(lambda x: {"num_stages": 4, "num_warps": 8})
    tuned.gradient_schedule("cuda")(lambda x: {"num_stages": 1})
    assert launches(cube) == [{"num_stages": 4, "num_warps": 8}, {}, {}]
    assert launches(tuned) == [{"num_stages": 4, "num_warps": 8}, *[{"num_stages": 1}] * 2]


def test_a_block_that_the_kernel_does_not_have() -> None:
    cube = cubes()
    cube.gradient_schedule("cpu")(lambda x: {"rows": 2})
    with refused(ArgumentError, "a block that cube does not have", got="rows = 2"):
        cube.trace(X).gradient()  # <-
