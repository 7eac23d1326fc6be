"""Costs in the custom calls of TPUs, and what libtpu makes of them."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import like_first
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.compile.ahead_of_time import compile_ahead
from tilekern.lower.target import resolve

X = jnp.ones((256, 512))


@like_first
def scaled(x: Any, out: Any) -> None:
    i = tk.parallel(x.shape[0], 32)
    out[i] = x[i] * jnp.tanh(x[i])


def test_the_custom_call_says_what_the_kernel_costs() -> None:
    text = jax.jit(scaled).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    (estimate,) = re.findall(r"cost_estimate[^{]*\{([^}]*)\}", text)
    found = {name: int(number) for name, number in re.findall(r"\\22(\w+)\\22: *(\d+)", estimate)}
    assert scaled.trace(X).cost() == tk.Cost(X.size, X.size, 2 * X.nbytes)
    assert {name: found[name] for name in asdict(tk.Cost(0, 0, 0))} == asdict(scaled.trace(X).cost())


def test_libtpu_counts_the_kernels_of_a_program() -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")

    def program(x: Any) -> Any:
        return scaled(scaled(x)) - 1

    chip = CHIPS[resolve("tpu:v5e").name]
    found = compile_ahead(program, [jax.ShapeDtypeStruct(X.shape, X.dtype)], chip).cost_analysis()
    assert found["flops"] == 3 * X.size
    assert found["transcendentals"] == 2 * X.size
    assert found["bytes accessed"] == 3 * 2 * X.nbytes
