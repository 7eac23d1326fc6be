"""Arrays that a kernel sees in other shapes than their own, on TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import kernel, like_first, refused
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tilekern.errors import TargetError
from tilekern.ir.interpret import interpret
from tilekern.lower.mosaic.legalize.reshape_arrays import reshape_arrays
from tilekern.passes import pipeline

X = np.arange(6 * 20, dtype=np.float32).reshape(6, 20)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((4, 30), x.dtype))
def in_several_shapes(x, out):
    i = tk.parallel(12, 4)
    out.reshape(12, 10)[i] = x.reshape(12, 10)[i] + x.reshape(40, 3)[i, :1] + x[0, :10]


def test_an_input_for_each_shape_in_which_it_is_seen() -> None:
    func = pipeline.run(in_several_shapes.trace(X).ir)
    seen = reshape_arrays(func)
    assert [p.ref.shape for p in seen.func.params] == [(12, 10), (40, 3), (6, 20), (12, 10)]
    assert seen.origins == (0, 0, 0)
    (found,) = interpret(seen.func, *seen.inputs([X]))
    np.testing.assert_array_equal(found.reshape(4, 30), interpret(func, X)[0])
    notes = ("  x[6, 20] as [12, 10]", "  x[6, 20] as [40, 3]", "  out[4, 30] as [12, 10]")
    assert seen.notes == ("reshaped by XLA", *notes)
    assert in_several_shapes.trace(X).lower("tpu:v5e").plan.endswith("\n".join(seen.notes))


def test_a_func_that_sees_its_arrays_as_they_are_stays() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        out.T[:, i] = x.T[:, i]

    func = pipeline.run(f.trace(X).ir)
    assert reshape_arrays(func).func.params == func.params and reshape_arrays(func).notes == ()


def test_an_output_in_two_shapes() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        out[i] = x[i]
        out.reshape(12, 10)[tk.ds(2 * i.start, 4)] = x.reshape(12, 10)[tk.ds(2 * i.start, 4)] + 1  # <-

    with refused(
        TargetError,
        "the kernel sees out in several shapes, and writes to it",
        expected="one shape",
        got="seen as [6, 20] and [12, 10]",
        fix="reshape the stored tile",
    ):
        f.trace(X).lower("tpu:v5e").plan  # noqa: B018 -- planning refuses


def test_points_that_int32_may_not_hold() -> None:
    @kernel(((6,), np.float32))
    def f(x, c, out):
        i = tk.parallel(6, 2)
        out[i] = x[tk.points(i, c[i] * 3 + 7)]  # <-

    with refused(
        TargetError, "an index of x may not fit int32", expected="[0, 20)", got="factors [3]", fix="clip the index"
    ):
        f.trace(X, np.zeros(6, np.int32)).lower("tpu:v5e").plan  # noqa: B018 -- planning refuses


@tk.kernel(out_type=lambda x, labels: jax.ShapeDtypeStruct(labels.shape, jnp.float32))
def picked(x, labels, out):
    i = tk.parallel(x.shape[0], 16)
    out[i] = x[tk.points(i, labels[i])].astype(jnp.float32)


@tk.kernel(out_type=lambda rows, columns: tk.Zeros(jax.ShapeDtypeStruct((64, 256), jnp.int32)))
def counted(rows, columns, out):
    i = tk.parallel(rows.shape[0], 16)
    out.at[tk.points(rows[i], columns[i])].add(1)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((8, x.shape[0], 128), x.dtype))
def heads_first(x, out):
    n, i = tk.parallel(8), tk.parallel(x.shape[0], 64)
    out[n, i] = x.reshape(-1, 8, 128).transpose(1, 0, 2)[n, i]


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype))
def to_form(x, out):
    i, j = tk.parallel(x.shape[0], 128), tk.parallel(x.shape[1], 128)
    out[j, i] = x.T[j, i]


BF16 = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
INTEGERS = jax.ShapeDtypeStruct((256,), jnp.int32)


@needs_libtpu
@pytest.mark.parametrize(
    ("function", "arrays"),
    [(picked, (BF16, INTEGERS)), (counted, (INTEGERS, INTEGERS)), (heads_first, (BF16,)), (to_form, (BF16,))],
)
def test_libtpu_compiles_points_and_moved_views(function: tk.Kernel, arrays: Any) -> None:
    assert function.trace(*arrays).lower("tpu:v5e").compile().resources.vmem_bytes > 0


def test_a_pick_of_a_row_by_tiles_takes_no_row_by_row() -> None:
    """The tile's rows are a block; only the other dim is whole."""
    plan = picked.trace(BF16, INTEGERS).lower("tpu:v5e").plan
    (line,) = [line for line in plan.splitlines() if " x[" in line]
    assert "a tile of 16" in line and "row by row" not in line
