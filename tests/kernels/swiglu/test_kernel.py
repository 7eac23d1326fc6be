import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.swiglu import reference, swiglu
from tilekern.kernels.swiglu.cases import CASES, Case
from tilekern.kernels.swiglu.kernel import swiglu_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_rows": 4, "block_columns": 8}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})


naive = jax.jit(reference, static_argnames=("activation", "dtype"))


def check(gate: Any, up: Any, **blocks: int) -> None:
    with jax.enable_x64(gate.dtype == np.float64):
        out, low = swiglu(gate, up, **blocks), naive(gate, up, dtype=gate.dtype)
    assert_close(out, in_float64(reference, gate, up), low)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=settings().max_examples // 8)  # each compiles three programs
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    gate, up = (data.draw(arrays(jnp.dtype(dtype), (rows, columns))) for _ in range(2))
    check(gate, up, **blocks)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "sigmoid"])
@settings(max_examples=5)
@given(data=st.data(), dtype=st.sampled_from(["float32", "bfloat16"]), columns=lengths(16))
def test_other_activations(activation: str, data: st.DataObject, dtype: str, columns: int) -> None:
    gate, up = (data.draw(arrays(jnp.dtype(dtype), (3, columns))) for _ in range(2))
    out, low = swiglu(gate, up, activation=activation), naive(gate, up, activation=activation, dtype=gate.dtype)
    assert_close(out, in_float64(partial(reference, activation=activation), gate, up), low)


@pytest.mark.one_backend
def test_an_unknown_activation() -> None:
    with pytest.raises(ArgumentError, match="activation = 'tanh'") as caught:
        swiglu(jnp.zeros(3), jnp.zeros(3), activation="tanh")  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(data=st.data())
def test_nan_and_infinities_spread_as_in_the_oracle(dtype: str, data: st.DataObject) -> None:
    specials = [np.inf, -np.inf, np.nan, 0.0]
    gate, up = (data.draw(arrays(jnp.dtype(dtype), (3, 7), specials)) for _ in range(2))
    check(gate, up, block_rows=2, block_columns=4)


def test_large_gates_do_not_overflow() -> None:
    check(np.linspace(-1e4, 1e4, 40, dtype=np.float32).reshape(4, 10), np.ones((4, 10), np.float32))


@pytest.mark.parametrize("shape", [(37,), (2, 3, 5), (2, 0, 5), (3, 0)])
def test_any_rank(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    gate, up = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    check(gate, up, block_rows=2, block_columns=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    gate, up = case.arrays(jax.random.key(0), dtype)
    assert gate.shape == up.shape == (case.rows, case.columns)
    check(gate, up, block_rows=16, block_columns=32)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    gate, up = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(swiglu, gate, up) == gate


@pytest.mark.one_backend
@settings(max_examples=5)
@given(data=st.data(), shape=st.sampled_from([(5, 19), (4, 16), (1, 3)]))
def test_the_interpreter_agrees(data: st.DataObject, shape: tuple[int, int]) -> None:
    gate, up = (data.draw(arrays(np.float32, shape)) for _ in range(2))
    traced = swiglu_forward.trace(gate, up, block_rows=4, block_columns=8)
    assert_close(tk.interpret(traced)(gate, up), in_float64(reference, gate, up), reference(gate, up))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("gate", "up", "got"),
    [
        (jnp.zeros((2, 3)), jnp.zeros(3), "gate = float32[2, 3], up = float32[3]"),
        (jnp.zeros(3), jnp.zeros(3, jnp.bfloat16), "gate = float32[3], up = bfloat16[3]"),
        (jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32), "gate = int32[3]"),
        (jnp.zeros(()), jnp.zeros(()), "gate = float32[]"),
    ],
)
def test_arrays_that_do_not_fit(gate: Any, up: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        swiglu(gate, up)  # here
    assert "# here" in caught.value.loc.snippet()
