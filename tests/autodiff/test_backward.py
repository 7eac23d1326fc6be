"""The arrays that add up to cotangents: how they are written, and in which dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def summed(x, out):
    i = tk.parallel(x.shape[0])
    out[i] = x[:].sum()


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((x.shape[0] - 1,), x.dtype))
def neighbours(x, out):
    i = tk.parallel(x.shape[0] - 1, 4)
    out[i] = x[i] + x[i + 1]


def arrays(kernel: Any, length: int, dtype: Any) -> list[tuple[str, Any]]:
    """The role and the dtype of each array of the backward pass."""
    stages = kernel.trace(jnp.ones(length, dtype)).gradient().backward
    return [(p.ref.role, p.ref.dtype) for stage in stages for p in stage.ir.outputs]


def test_loops_are_swapped_only_where_addends_take_more_bytes_than_all_inputs() -> None:
    """Each of n programs adds n numbers; the inputs, x and the cotangents, have n numbers each."""
    assert arrays(summed, 2, jnp.float32) == [("sum", jnp.float32)]
    assert arrays(summed, 3, jnp.float32) == [("out", jnp.float32)]


def test_a_cotangent_of_one_array_has_the_dtype_of_its_input() -> None:
    assert arrays(summed, 4, jnp.bfloat16) == [("out", jnp.bfloat16)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_several_arrays_only_the_sum_is_rounded(dtype: Any) -> None:
    assert arrays(neighbours, 9, dtype) == [("zeros", jnp.float32)] * 2
