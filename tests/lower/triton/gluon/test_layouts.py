"""Layouts of tiles in registers: those of products, slices of them, and Gluon's own choice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.triton.gluon.samples import SM_90, attention, expected, inputs, like, product, program
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.shape import Broadcast, Iota
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.gluon.layouts import Layouts, definition, matrix_layout, vector_layout
from tilekern.lower.triton.gluon.simulator.run import simulate
from tilekern.lower.triton.legalize import legalize

PLAIN = vector_layout(4)


def legal(func: Func) -> Func:
    return legalize(func, SM_90, delay=False)


def test_products_decide_the_layouts_of_tiles_of_their_shape() -> None:
    func = legal(product(128, 128, 64))
    layouts = Layouts(func, PLAIN)
    assert layouts.columns == [64]
    (fold,) = (op for op in func.body.ops if isinstance(op, Fold))
    assert layouts.of(fold.results[0]) == "mma_64"
    assert all(layouts.of(op.operands[0]) == "mma_64" for op in func.walk() if isinstance(op, Dot))


def test_reductions_and_what_is_carried_with_them_are_slices() -> None:
    func = legal(attention(256, width=128, causal=True, block_k=64))
    layouts = Layouts(func, PLAIN)
    assert layouts.columns == [64, 128]
    (fold,) = (op for op in func.body.ops if isinstance(op, Fold))
    rows = "gl.SliceLayout(1, mma_64)"
    assert all(layouts.of(op.result) == rows for op in func.walk() if isinstance(op, Reduce))
    assert [layouts.of(v) for v in fold.results] == [rows, rows, "mma_128"]
    # A factor of rows comes from logits, and scales a sum of another width.
    wide = [op for op in fold.body.ops if isinstance(op, Broadcast) and op.shape == (64, 128)]
    assert {layouts.expanded(op) for op in wide} == {"gl.SliceLayout(1, mma_128)"}


def test_consecutive_numbers_have_no_layout_of_their_own() -> None:
    func = legal(attention(256, causal=True))
    layouts = Layouts(func, PLAIN)
    numbers = [op.result for op in func.walk() if isinstance(op, Iota)]
    assert numbers and set(numbers) == layouts.numbers
    assert all(layouts.of(v) is None for v in numbers)


def test_a_definition_names_what_users_of_the_layout_name() -> None:
    assert definition(128).startswith(f"{matrix_layout(128)}: gl.constexpr = ") and "[16, 128, 16]" in definition(128)


def vectors(x: Any, w: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of the results of `product_and_vectors`."""
    rows = x.shape[0]
    return like(rows, w.shape[1]), like(rows, dtype=jnp.float32), *(like(rows, dtype=jnp.int32),) * 2


@tk.kernel(out_type=vectors)
def product_and_vectors(x, w, out, constants, numbers, squares):
    i, j = tk.parallel(x.shape[0], 64), tk.parallel(w.shape[1], 64)
    acc = tk.fold(tk.serial(x.shape[1], 64), lambda k, acc: tk.dot(x[i, k], w[k, j], acc), tk.zeros((i, j)))
    out[i, j] = acc.astype(out.dtype)
    constants[i] = tk.full(i, -1.0, jnp.float32)
    numbers[i] = i.indices
    squares[i] = i.indices * i.indices + 1


def test_vectors_that_nothing_decides_are_stored_in_a_plain_layout() -> None:
    func = product_and_vectors.trace(like(100, 64), like(64, 64)).ir
    made, arrays = program(func), inputs(func)
    product, *others = simulate(made, arrays)
    np.testing.assert_array_equal(np.stack(others), np.stack(expected(func)[1:]))
    assert not np.isnan(product.astype(np.float32)).any()
    pytest.importorskip("triton", reason="needs triton")
    compile_program(made, SM_90)
