"""Dots of matrices, sorts of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.legalize.meaning import assert_keeps, counting, one, shapes
from tests.lower.triton.legalize.promises import assert_standard, ops_of
from tilekern.ir.compute import PRECISIONS, Dot, Precision
from tilekern.ir.core import Func
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.types import DTYPES, F32, I32, kind_of
from tilekern.lower.triton.legalize.standard_forms import standard_forms

POWERS = st.sampled_from([1, 2, 4, 16, 32])
# The dtypes of which Triton has dots.
MULTIPLIED = [n for n, d in DTYPES.items() if kind_of(d) == "float" or n == "i8"]


def standard(func: Func) -> Func:
    result = standard_forms(func)
    assert_standard(result)
    return result


@pytest.mark.parametrize("name", MULTIPLIED)
@given(data=st.data())
def test_dots(name: str, data: st.DataObject) -> None:
    """Vectors, matrices, several contracted dims, batches, in any order."""
    labels = data.draw(st.sampled_from(["k", "mk", "kn", "mkn", "mkjn", "mlkn", "bmkn", "bkn", "bamkn", "mn", "bk"]))
    sizes = {label: data.draw(POWERS if label in "kj" else st.sampled_from([1, 2, 4])) for label in labels}
    orders = [data.draw(st.permutations([s for s in labels if s not in other])) for other in ("n", "ml")]
    x, y = (counting([sizes[s] for s in order], F32) % 5 - 2 for order in orders)
    contract, batch = (
        tuple(tuple(order.index(s) for s in group if s in sizes) for order in orders) for group in ("kj", "ba")
    )
    assert_keeps(standard, *one(Dot, x.astype(DTYPES[name]), y.astype(DTYPES[name]), contract=contract, batch=batch))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_precision_stays(precision: Precision) -> None:
    x = counting((4, 8), F32)
    func, arrays = one(Dot, x, x, contract=((1,), (1,)), precision=precision)
    (dot,) = ops_of(assert_keeps(standard, func, arrays), Dot)
    assert dot.precision == precision


@pytest.mark.parametrize(("name", "least"), [("f32", 16), ("bf16", 16), ("i8", 32), ("f8e5m2", 32), ("f64", 16)])
def test_short_contractions_get_as_many_zeros_as_they_need(name: str, least: int) -> None:
    for depth in (1, 2, least // 2, least, 2 * least):
        x = (counting((16, depth), F32) % 5).astype(DTYPES[name])
        (dot,) = ops_of(assert_keeps(standard, *one(Dot, x, x.T.copy(), contract=((1,), (0,)))), Dot)
        assert dot.operands[0].tile.shape[1] == max(depth, least)


def test_a_standard_dot_stays() -> None:
    for shape in ((16, 32), (2, 16, 32)):
        x = counting(shape, F32)
        at = len(shape) - 2
        batch = (tuple(range(at)),) * 2
        func, _ = one(Dot, x, np.swapaxes(x, -1, -2).copy(), contract=((at + 1,), (at,)), batch=batch)
        assert standard(func) is func


@given(data=st.data())
def test_sorts(data: st.DataObject) -> None:
    shape = data.draw(shapes(1, sizes=st.sampled_from([1, 2, 4, 8])))
    dim, keys = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = [rng.integers(0, 3, shape).astype(I32) for _ in range(keys)]
    assert_keeps(standard, *one(Sort, *arrays, counting(shape, I32), dim=dim, num_keys=keys, pick=keys))
    assert_keeps(standard, *one(TopK, arrays[0], dim=dim, k=data.draw(st.integers(0, shape[dim]))))


def test_a_sort_of_rows_stays() -> None:
    func, _ = one(Sort, counting((2, 4), I32), counting((2, 4), I32), dim=1, pick=1)
    assert standard(func) is func
