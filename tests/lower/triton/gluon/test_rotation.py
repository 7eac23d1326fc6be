"""Loops whose last products are computed an iteration later."""

from __future__ import annotations

from tests.lower.triton.gluon.samples import SM_90, attention, backwards, gradient, like, product
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.types import BF16
from tilekern.lower.triton.gluon.rotation import Rotation, loaded, rotations
from tilekern.lower.triton.legalize import legalize


def found(func: Func) -> list[Rotation]:
    (fold,) = (op for op in legalize(func, SM_90, delay=False).walk() if isinstance(op, Fold))
    return rotations(fold)


def products(ops: tuple[object, ...]) -> int:
    return sum(isinstance(op, Dot) for op in ops)


def test_the_product_with_values_waits_and_its_operand_is_cast_before() -> None:
    (only,) = found(attention(256))
    assert only.numbers == (2,) and products(only.late) == products(only.early) == 1
    assert any(isinstance(op, Convert) and op.dtype == BF16 for op in only.early)
    assert sorted(v.tile.dtype.name for v in only.held) == ["bfloat16", "float32"]


def test_the_gradient_by_queries_keeps_the_tile_of_keys() -> None:
    (only,) = found(gradient("query", 256))
    assert products(only.late) == 1 and products(only.early) == 2
    assert all(loaded(v, [*only.early, *only.late]) is None for v in only.held)


def test_the_gradients_by_keys_and_values_wait_together_or_one_of_them() -> None:
    assert [len(rotation.numbers) for rotation in found(gradient("key", 256))] == [2, 1, 1]


def test_a_lone_product_and_a_loop_from_its_end_stay() -> None:
    assert not found(product(128, 128, 64))
    assert not found(backwards.trace(like(128, 128), like(128, 64)).ir)
