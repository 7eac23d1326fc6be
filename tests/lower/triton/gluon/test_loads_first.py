"""The order of a loop's ops: loads of vectors come before products."""

from __future__ import annotations

from tests.lower.triton.gluon.samples import SM_90, gradient, program
from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Op
from tilekern.ir.memory import Load
from tilekern.lower.triton.gluon.loads_first import loads_first
from tilekern.lower.triton.legalize import legalize


def body(of: str) -> tuple[Op, ...]:
    (fold,) = (op for op in legalize(gradient(of, 256, causal=True), SM_90, delay=False).walk() if isinstance(op, Fold))
    return fold.body.ops


def first_dot(ops: tuple[Op, ...]) -> int:
    return next(n for n, op in enumerate(ops) if isinstance(op, Dot))


def test_vectors_come_before_products_and_nothing_before_what_it_needs() -> None:
    before = body("key")
    ops = loads_first(before)
    assert set(ops) == set(before) and len(ops) == len(before)
    vectors = [n for n, op in enumerate(before) if isinstance(op, Load) and len(op.result.tile.shape) == 1]
    assert max(vectors) > first_dot(before)
    assert max(ops.index(before[n]) for n in vectors) < first_dot(ops)
    for n, op in enumerate(ops):
        assert set(backward_slice(ops, op.uses())) <= set(ops[:n])


def test_the_causal_gradient_of_keys_waits_for_no_load_between_its_products() -> None:
    text = program(gradient("key", 256, causal=True)).text
    loop = text[text.rindex("for i") :]
    assert max(loop.index(f"{name}_ptr") for name in ("delta", "residuals_largest")) < loop.index("warpgroup_mma(")
