"""Bounds that depend on arrays, as tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tilekern.ir.interpret import interpret
from tilekern.lower.mosaic.plan.scalar_prefetch import prefetch_scalars
from tilekern.lower.mosaic.plan.scalars import Scalars


@tk.kernel(out_type=lambda x, ends: jax.ShapeDtypeStruct((4, x.shape[1]), x.dtype))
def sums(x: tk.Ref, ends: tk.Ref, out: tk.Ref) -> None:
    """out[i] = the sum of the rows before the largest of ends[:, i]."""
    i = tk.parallel(4)
    stop = ends[:, i].max()
    out[i] = tk.fold(
        tk.serial(x.shape[0], 8, stop=stop),
        lambda k, acc: acc + jnp.where(k.indices[:, None] < stop, x[k], 0).sum(axis=0),
        jnp.zeros(x.shape[1]),
    )


X = np.random.default_rng(0).standard_normal((37, 130)).astype(np.float32)
ENDS = np.asarray([[0, 3, 40, -2], [0, 16, 7, -1]], np.int32)


def test_a_bound_is_computed_for_each_program() -> None:
    traced = sums.trace(X, ENDS)
    found = prefetch_scalars(traced.ir, 1 << 18)
    (program,) = found.programs
    np.testing.assert_array_equal(interpret(program, X, ENDS)[0], ENDS.max(axis=0))
    assert found.func.inputs[-1].ref.shape == (4,)
    scalars = Scalars(found.func, 1 << 18)
    assert found.func.inputs[-1] in scalars.tables
    bounds = [op.stop for op in found.func.walk() if op.name == "fold"]
    assert bounds and all(scalars.key(b) is not None for b in bounds)
    expected = np.stack([X[: max(0, n)].sum(axis=0) for n in ENDS.max(axis=0)])
    np.testing.assert_allclose(interpret(found.func, X, ENDS, ENDS.max(axis=0))[0], expected, rtol=1e-5, atol=1e-5)


def test_a_table_that_scalar_memory_does_not_hold_is_not_made() -> None:
    assert not prefetch_scalars(sums.trace(X, ENDS).ir, 60).programs


def test_loops_with_such_bounds_run_in_every_form() -> None:
    traced = sums.trace(X, ENDS)
    expected = interpret(traced.ir, X, ENDS)[0]
    forms: set[str] = set()
    for lowering in every_plan(traced.ir):
        forms.add(kind_of_plan(lowering.planned))
        np.testing.assert_allclose(lowering.interpret(X, ENDS)[0], expected, rtol=1e-6, atol=1e-6)
    assert forms == {"resident", "grid_loop", "pipelined"}


def test_a_bound_that_is_cast_from_a_float_is_computed_as_it_is() -> None:
    @tk.kernel(out_type=lambda x, ends: jax.ShapeDtypeStruct((4, x.shape[1]), x.dtype))
    def cut(x: tk.Ref, ends: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(4)
        rows = tk.serial(x.shape[0], 8, stop=ends[:, i].max().astype(jnp.int32))
        out[i] = tk.fold(rows, lambda k, acc: acc + x[k].sum(axis=0), jnp.zeros(x.shape[1]))

    ends = ENDS.astype(np.float32)
    traced = cut.trace(X, ends)
    (program,) = prefetch_scalars(traced.ir, 1 << 18).programs
    np.testing.assert_array_equal(interpret(program, X, ends)[0], ENDS.max(axis=0))
