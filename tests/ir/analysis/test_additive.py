"""Ops that keep sums: by their NumPy meaning they are linear in the operands that are sums."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import numpy as np

from tilekern.errors import VerifyError
from tilekern.ir.analysis.additive import is_linear
from tilekern.ir.compute import Select
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import MemoryOp
from tilekern.ir.types import BOOL, F64, kind_of
from tilekern.testing.support import SAMPLES, Sketch


def _ops() -> dict[str, Op]:
    """One pure op of each row of the table of ops, from float64 to float64."""
    ops: dict[str, Op] = {}
    for name, sample in SAMPLES.items():
        sketch = Sketch()
        try:
            block = sketch.block((), lambda: (sample(sketch, F64),))  # noqa: B023
        except VerifyError:  # the op takes no floats
            continue
        op = next(op for op in block.ops if block.results[0] in op.results)
        is_compute = op.pure and not op.regions and not isinstance(op, MemoryOp)
        if is_compute and [r.tile.dtype for r in op.results] == [F64]:
            ops[name] = op
    return ops


def _drawn(random: np.random.Generator, value: Value) -> np.ndarray:
    tile = value.tile
    if tile.dtype == BOOL:
        return random.random(tile.shape) < 0.5
    is_float = kind_of(tile.dtype) == "float"
    return (random.uniform(-4, 4, tile.shape) if is_float else random.integers(0, 2, tile.shape)).astype(tile.dtype)


def _keeps_sums(op: Op, active: Collection[Value], random: np.random.Generator) -> bool:
    """f(2 x + y) = 2 f(x) + f(y) in the active operands, where the other operands stay the same, and f(0) = 0."""
    x, drawn = ([_drawn(random, v) for v in op.operands] for _ in range(2))
    y, zero, total = (
        [changed(a, b) if v in active else a for v, a, b in zip(op.operands, x, drawn, strict=True)]
        for changed in (lambda a, b: b, lambda a, b: 0 * a, lambda a, b: 2 * a + b)
    )
    with np.errstate(all="ignore"):
        of_x, of_y, of_zero, of_total = (op.evaluate(*arrays).astype(float) for arrays in (x, y, zero, total))
    return np.allclose(of_total, 2 * of_x + of_y) and not of_zero.any()


def test_ops_that_are_linear_keep_sums() -> None:
    """A claim holds by the meaning of the op. Elementwise ops lack none, but for the tiny steps of `nextafter`."""
    random, linear = np.random.default_rng(0), set[str]()
    for name, op in _ops().items():
        floats = [v for v in op.operands if kind_of(v.tile.dtype) == "float"]
        for active in (c for n in range(1, len(floats) + 1) for c in combinations(floats, n)):
            says, keeps = is_linear(op, active), _keeps_sums(op, active, random)
            assert keeps or not says, f"{name} of {[op.operands.index(v) for v in active]}"
            if isinstance(op, (Elementwise, Select)) and name != "nextafter":
                assert says or not keeps, name
            linear.update([name] if says else [])
    assert linear >= {"add", "sub", "mul", "div", "neg", "select", "dot", "reduce sum", "concatenate", "transpose"}
