"""Dots of any dims as products of matrices, in every order of the contracted dim."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import assert_same
from tests.lower.triton.legalize.meaning import one
from tilekern.ir.compute import Dot
from tilekern.ir.core import Op, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import F32
from tilekern.ir.verify import verify
from tilekern.lower.rewrite.matrices import as_matrix, dims_of, is_of_matrices, product


def as_product(last: tuple[bool, bool], drop_one: bool, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if not isinstance(op, Dot):
        return None
    make = Make(rewriter, op)
    sides = [as_matrix(make, op.operands[n], dims_of(op, n), last[n], drop_one) for n in (0, 1)]
    dot = product(op, *sides, last)
    assert is_of_matrices(dot)
    return [make.reshape(rewriter.one(dot), op.result.tile.shape)]


@pytest.mark.parametrize("drop_one", [False, True])
@given(data=st.data())
def test_every_dot_is_a_product_of_matrices(drop_one: bool, data: st.DataObject) -> None:
    labels = data.draw(st.sampled_from(["k", "mk", "kn", "mkn", "mkjn", "bmkn", "bkn", "abmkn", "mn"]))
    sizes = {label: data.draw(st.sampled_from([1, 2, 3])) for label in labels}
    orders = [data.draw(st.permutations([s for s in sizes if s not in other])) for other in "nm"]
    shapes = [tuple(sizes[s] for s in order) for order in orders]
    x, y = (np.arange(np.prod(shape, dtype=int)).astype(F32).reshape(shape) for shape in shapes)
    contract, batch = (
        tuple(tuple(order.index(s) for s in group if s in sizes) for order in orders) for group in ("kj", "ab")
    )
    func, arrays = one(Dot, x, y, contract=contract, batch=batch)
    last = data.draw(st.tuples(st.booleans(), st.booleans()))
    found = Rewriter(partial(as_product, last, drop_one)).run(func)
    verify(found)
    assert_same(interpret(found, *arrays)[0], interpret(func, *arrays)[0])
    (dot,) = (op for op in found.walk() if isinstance(op, Dot))
    stacked = bool(batch[0]) and not (drop_one and np.prod([sizes[s] for s in sizes if s in "ab"]) == 1)
    assert len(dot.operands[0].tile.shape) == 2 + stacked
