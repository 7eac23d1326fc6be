"""Warnings of programs of which NVIDIA's assembler spills nearly all values, before it does."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from bench.texts import function_of, gradient, kernels_of
from tests.lower.library import CASES, DIFFERENTIABLE, NAMES
from tilekern.errors import LargeProgramWarning
from tilekern.ir.compute import Precision
from tilekern.lower.target import TARGETS
from tilekern.lower.triton import build

TAPS, FEW_TAPS = 24, 8


@tk.kernel(out_type=lambda w, x: x)
def unrolled(w: tk.Ref, x: tk.Ref, out: tk.Ref) -> None:
    """A sum over taps, by Python's `for`."""
    i, d = tk.parallel(x.shape[0], 64), tk.parallel(x.shape[1], 128)
    total = jnp.zeros((64, 128), jnp.float32)
    for k in range(w.shape[0]):
        shifted = x[tk.ds(i.start - k, 64), d]
        total = total + w[k, d] * shifted
    out[i, d] = total


@tk.kernel(out_type=lambda w, x: x)
def looped(w: tk.Ref, x: tk.Ref, out: tk.Ref) -> None:
    """The same in a loop."""
    i, d = tk.parallel(x.shape[0], 64), tk.parallel(x.shape[1], 128)

    def step(k: Any, total: Any) -> Any:
        return total + w[k, d] * x[tk.ds(i.start - k, 64), d]

    out[i, d] = tk.fold(tk.serial(w.shape[0]), step, jnp.zeros((64, 128), jnp.float32))


@tk.kernel(out_type=lambda x, y: jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32))
def product(x: tk.Ref, y: tk.Ref, out: tk.Ref, *, precision: Precision = "ieee") -> None:
    """All that is contracted at once."""
    i, j = tk.parallel(x.shape[0], 128), tk.parallel(y.shape[1], 128)
    left = x[i, :]
    out[i, j] = tk.dot(left, y[:, j], precision=precision)


def sums(taps: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of `unrolled` and `looped`."""
    return jax.ShapeDtypeStruct((taps, 128), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)


def factors(depth: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of `product`."""
    return jax.ShapeDtypeStruct((128, depth), dtype), jax.ShapeDtypeStruct((depth, 128), dtype)


class _Emitter(build.Emitter):
    """One that must not be asked."""

    def run(self) -> None:
        raise InterruptedError


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("traced", "line", "message"),
    [
        (unrolled.trace(*sums(TAPS)), "shifted = ", r"unrolled needs about 792 registers .* tiles that it loads"),
        (product.trace(*factors(128, jnp.float32)), "out[i, j] = ", "product needs about 2048 registers .* product"),
    ],
)
def test_the_warning_comes_before_code_is_made(
    traced: Any, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Emitter", _Emitter)
    with pytest.warns(LargeProgramWarning, match=message) as caught, pytest.raises(InterruptedError):
        traced.lower("cuda:sm_90")
    (found,) = caught
    with open(found.filename) as file:
        assert file.read().splitlines()[found.lineno - 1].strip().startswith(line)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("traced", "target"),
    [
        (unrolled.trace(*sums(FEW_TAPS)), "cuda:sm_90"),
        (unrolled.trace(*sums(TAPS)), "rocm:gfx942"),
        (unrolled.trace(*sums(TAPS), num_warps=32), "cuda:sm_90"),
        (looped.trace(*sums(TAPS)), "cuda:sm_90"),
        (product.trace(*factors(32, jnp.float32)), "cuda:sm_90"),
        (product.trace(*factors(128, jnp.float32), precision="tf32"), "cuda:sm_90"),
        (product.trace(*factors(128, jnp.bfloat16)), "cuda:sm_90"),
        (product.trace(*factors(1024, jnp.bfloat16)), "cuda:sm_80"),
    ],
)
def test_few_registers_are_no_reason(traced: Any, target: str) -> None:
    """Those of few tiles, of many threads, of one iteration, of matrix units; and no chip but NVIDIA's was measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeProgramWarning)
        traced.lower(target)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("name", NAMES)
def test_the_library_is_not_warned_of(name: str, target: str) -> None:
    """With the blocks of its schedules; nor are its gradients."""
    case = CASES[name][0]
    arrays = jax.eval_shape(partial(case.arrays, dtype="float32"), jax.random.key(0))
    call = function_of(name, case)
    runs = (call, partial(gradient, call)) if name in DIFFERENTIABLE else (call,)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeProgramWarning)
        for run in runs:
            for kernel in kernels_of(run, arrays, TARGETS[target]):
                kernel.lowered(TARGETS[target])
