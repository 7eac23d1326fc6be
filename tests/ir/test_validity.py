"""Valid lanes of results, op by op: those that come from inside of arrays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from tilekern.ir import control, debug, memory  # noqa: F401 -- all ops are defined
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.core import Array, Builder, Op, Value
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import F32, I32, TileType
from tilekern.ir.validity import Validity, sources

RANDOM = np.random.default_rng(0)


class Evaluator(Builder):
    """Computes every op when it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[Value, Array] = {}

    def value(self, array: Array) -> Value:
        found = Value(TileType(array.shape, array.dtype))
        self.arrays[found] = array
        return found

    def one(self, op: Op) -> Value:
        result = super().one(op)
        self.arrays[result] = np.asarray(op.evaluate(*(self.arrays[v] for v in op.operands)))
        return result


def numbers(*shape: int, dtype: Any = np.int32) -> Array:
    return RANDOM.permutation(int(np.prod(shape))).reshape(shape).astype(dtype)


def bools(*shape: int) -> Array:
    return RANDOM.random(shape) < 0.5


def moved(op: Op, arrays: list[Array], valid: list[Array]) -> Array:
    """Elements of bools, moved as the op moves elements; operands that are not moved say where."""
    count = len(sources(op))
    return op.evaluate(*valid[:count], *arrays[count:])


def every(op: Op, arrays: list[Array], valid: list[Array]) -> Array:
    return np.logical_and.reduce(valid)


def decided(op: Any, arrays: list[Array], valid: list[Array]) -> Array:
    """Lanes of the result that no number in the invalid lanes would change."""
    results = []
    for guesses in product([False, True], repeat=2):
        known = [np.where(ok, x, guess) for x, ok, guess in zip(arrays, valid, guesses, strict=True)]
        results.append(op.evaluate(*known))
    return np.logical_and.reduce(results) | ~np.logical_or.reduce(results)


def ordered(op: Any, arrays: list[Array], valid: list[Array]) -> Array:
    order = np.lexsort(arrays[: op.num_keys][::-1], axis=op.dim)
    together = np.logical_and.reduce([valid[n] for n in {*range(op.num_keys), op.pick}])
    return np.take_along_axis(together, order, op.dim)


def product_of(op: Any, arrays: list[Array], valid: list[Array]) -> Array:
    sides = [
        v.any(axis=tuple(c), keepdims=True) & np.ones(v.shape, bool) for v, c in zip(valid, op.contract, strict=True)
    ]
    return op.evaluate(*(s.astype(np.float32) for s in sides)) > 0


I8, B8 = (numbers(8),) * 2, (bools(8), bools(8))
M = numbers(3, 4)
WINDOW = np.int32(1)
Oracle = Callable[[Any, list[Array], list[Array]], Array]
# An op without operands, their arrays, and the valid lanes of the result by those of the operands.
RULES: dict[str, tuple[type[Op], dict[str, Any], tuple[Array, ...], Oracle]] = {
    "add": (Elementwise, {"function": "add"}, I8, every),
    "compare": (Elementwise, {"function": "lt"}, I8, every),
    "and of integers": (Elementwise, {"function": "and"}, I8, every),
    "and": (Elementwise, {"function": "and"}, B8, decided),
    "or": (Elementwise, {"function": "or"}, B8, decided),
    "xor": (Elementwise, {"function": "xor"}, B8, every),
    "convert": (Convert, {"dtype": F32}, I8[:1], every),
    "bitcast": (Bitcast, {"dtype": F32}, I8[:1], every),
    "select": (Select, {}, (bools(8), *I8), lambda op, x, v: v[0] & np.where(x[0], v[1], v[2])),
    "broadcast": (Broadcast, {"shape": (2, 3, 4), "dims": (1, 2)}, (numbers(3, 1),), moved),
    "reshape": (Reshape, {"shape": (2, 6)}, (M,), moved),
    "transpose": (Transpose, {"permutation": (1, 0)}, (M,), moved),
    "slice": (Slice, {"start": (1, 0), "stop": (3, 4), "stride": (1, 2)}, (M,), moved),
    "reverse": (Reverse, {"dims": (1,)}, (M,), moved),
    "concatenate": (Concatenate, {"dim": 1}, (M, numbers(3, 2)), moved),
    "pad": (Pad, {"low": (1, -1), "high": (0, 2), "interior": (0, 1)}, (M, np.int32(5)), moved),
    "dynamic_slice": (DynamicSlice, {"sizes": (2, 2)}, (M, WINDOW, WINDOW), moved),
    "dynamic_update_slice": (DynamicUpdateSlice, {}, (M, numbers(2, 2), WINDOW, WINDOW), moved),
    "take": (
        Take,
        {"dim": 1},
        (M, numbers(2, 3)),
        lambda op, x, v: op.evaluate(v[0], x[1]) & v[1][None],
    ),
    "take along": (
        Take,
        {"dim": 1, "along": True},
        (M, numbers(3, 2)),
        lambda op, x, v: op.evaluate(v[0], x[1]) & v[1],
    ),
    "reduce": (Reduce, {"monoid": "sum", "dims": (1,)}, (M,), lambda op, x, v: v[0].any(axis=1)),
    "reduce of no dim": (Reduce, {"monoid": "sum", "dims": ()}, (M,), every),
    "stop_gradient": (Stop, {}, (M.astype(np.float32),), every),
    "custom_derivative": (Custom, {}, (M.astype(np.float32), M), lambda op, x, v: v[0]),
    "arg_reduce": (ArgReduce, {"extreme": "max", "dim": 0}, (M,), lambda op, x, v: v[0].any(axis=0)),
    "scan": (Scan, {"monoid": "sum", "dim": 1}, (M,), every),
    "linear_scan": (LinearScan, {"dim": 1}, (M.astype(np.float32), M.astype(np.float32)), every),
    "sort": (Sort, {"dim": 1}, (M,), ordered),
    "sort of another": (Sort, {"dim": 0, "num_keys": 2, "pick": 2}, (M % 2, M, M, M), ordered),
    "top_k": (TopK, {"dim": 1, "k": 2}, (M,), lambda op, x, v: np.take_along_axis(v[0], op.evaluate(x[0]), 1)),
    "dot": (
        Dot,
        {"contract": ((0,), (2,)), "batch": ((2,), (1,))},
        (numbers(3, 2, 4, dtype=np.float32), numbers(5, 4, 3, dtype=np.float32)),
        product_of,
    ),
}


def valid_lanes(op: Op, evaluator: Evaluator, valid: list[Array | None]) -> Array:
    """Valid lanes by the rules; None stands for all lanes."""
    known = [None if v is None else evaluator.value(v) for v in valid]
    found = Validity(evaluator, op).of_result(known)
    return np.ones(op.result.tile.shape, bool) if found is None else evaluator.arrays[found]


@pytest.mark.parametrize("name", RULES)
def test_valid_lanes_follow(name: str) -> None:
    kind, attributes, arrays, oracle = RULES[name]
    evaluator = Evaluator()
    op = kind(operands=tuple(map(evaluator.value, map(np.asarray, arrays))), **attributes)
    evaluator.one(op)
    for known in product([False, True], repeat=len(sources(op))):
        rest = [None] * (len(arrays) - len(known))
        valid = [bools(*np.shape(x)) if some else None for x, some in zip(arrays, known, strict=False)] + rest
        whole = [np.ones(np.shape(x), bool) if v is None else v for x, v in zip(arrays, valid, strict=True)]
        expected = oracle(op, list(arrays), whole)
        np.testing.assert_array_equal(valid_lanes(op, evaluator, valid), expected, str(known))


def test_there_is_a_rule_for_every_op() -> None:
    known = {kind for kind, *_ in RULES.values()} | {Constant, Iota}
    ours = {op for op in Op.__subclasses__() if op.__module__.startswith("tilekern.")}  # tests define ops, too
    assert {op for op in ours if op.pure} == known


@pytest.mark.parametrize(
    "op",
    [
        Reduce(operands=(Value(TileType((0, 3), I32)),), monoid="sum", dims=(0,)),
        Dot(operands=(Value(TileType((2, 0), F32)), Value(TileType((0, 3), F32))), contract=((1,), (0,))),
    ],
    ids=lambda op: op.name,
)
def test_a_combination_of_nothing_comes_from_nowhere(op: Op) -> None:
    assert sources(op) == ()
