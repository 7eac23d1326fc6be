"""Loops that run as often as the values of arrays say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.estimate.kernels import counted, row_sums, types
from tilekern.errors import ArgumentError, EstimateError
from tilekern.estimate.data_loops import check_given, data_loops, given_values
from tilekern.ir.core import Func


def func(kernel: Any, *shapes: Any) -> Func:
    return kernel.trace(*types(*shapes)).ir


def names(ir: Func) -> list[list[str]]:
    return [[p.name for p in params] for params in data_loops(ir).values()]


def test_a_bound_that_is_loaded_depends_on_its_array() -> None:
    assert names(func(row_sums, (64, 512), (64,))) == [["n"]]


def test_a_while_depends_on_what_its_condition_reads() -> None:
    assert names(func(counted, (8,), (1,))) == [["n"]]


def test_bounds_of_indices_depend_on_no_array() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
    def triangle(x: Any, out: Any, *, block: tk.Block = 16) -> None:
        i = tk.parallel(x.shape[0], block)
        columns = tk.serial(x.shape[1], 16, stop=i.start + block)
        out[i] = tk.fold(columns, lambda j, acc: acc + jnp.sum(x[i, j], axis=1), tk.zeros((i,), x.dtype))

    assert names(func(triangle, (64, 64))) == []


def test_a_bound_that_an_outer_loop_carries_depends_on_what_it_loads() -> None:
    @tk.kernel(out_type=lambda x, n: jax.ShapeDtypeStruct((), x.dtype))
    def nested(x: Any, n: Any, out: Any) -> None:
        def outer(i: Any, carry: Any) -> Any:
            stop, total = carry
            inner = tk.fold(tk.serial(x.shape[0], stop=stop), lambda j, acc: acc + x[j], jnp.float32(0))
            return stop + n[i], total + inner

        out[...] = tk.fold(tk.serial(n.shape[0]), outer, (jnp.int32(0), jnp.float32(0)))[1]

    assert names(func(nested, (8,), (4,))) == [["n"]]


def test_values_that_are_missing_are_named_at_the_line_of_the_loop() -> None:
    ir = func(row_sums, (64, 512), (64,))
    with pytest.raises(EstimateError, match="the values of n decide how often a loop of row_sums runs") as caught:
        check_given(ir, {})
    assert "estimate(n=...)" in str(caught.value) and "tk.fold(columns" in str(caught.value)
    check_given(ir, given_values(ir, {}, {"n": 3}))


def test_a_number_stands_for_all_elements() -> None:
    ir = func(row_sums, (64, 512), (64,))
    (values,) = given_values(ir, {}, {"n": 3}).values()
    assert values.dtype == np.int32 and values.tolist() == [3] * 64


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ({"m": 3}, "row_sums has no input of this name"),
        ({"n": np.zeros(3, np.int32)}, "the values of n do not fit it"),
        ({"n": 2.5}, "the values of n do not fit it"),
        ({"n": "three"}, "the values of n do not fit it"),
    ],
)
def test_values_that_do_not_fit_are_refused(extents: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        given_values(func(row_sums, (64, 512), (64,)), {}, extents)
