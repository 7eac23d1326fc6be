"""Sorts and the greatest elements: networks of words, candidates of long lines, and merging runs of long keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.ir.funcs import edges
from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.machines import ALL, here
from tests.lower.llvm.running import Canaries, run
from tilekern.ir.core import Array
from tilekern.ir.interpret import interpret
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.shape import Iota
from tilekern.ir.types import DTYPES, I32, DType, kind_of
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.testing.support import Sketch

pytest.importorskip("llvmlite", reason="needs llvmlite")


def arrays(dtype: DType, shape: tuple[int, ...], dim: int) -> Iterator[Array]:
    """Many equal elements, edges of the dtype among them; rising and falling lines, in which all or none is better."""
    rng = np.random.default_rng(sum(shape))
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1, 2] if kind_of(dtype) == "float" else [0, 1]
    yield rng.choice(np.concatenate([np.array(special).astype(dtype), edges(dtype, 8)]), shape)
    rising = np.arange(shape[dim]) - shape[dim] // 2
    lines = np.moveaxis(np.broadcast_to(rising, (*shape[:dim], *shape[dim + 1 :], shape[dim])), -1, dim)
    with np.errstate(all="ignore"):
        yield lines.astype(dtype)
        yield (-lines).astype(dtype)


def check(op: type[Sort | TopK], dtype: DType, shape: tuple[int, ...], dim: int, machines: Any, **fields: Any) -> None:
    """An op, as the machines' code computes it, gives the positions that its definition gives."""

    def make(b: Sketch) -> list[Any]:
        others = [b.op(Iota, shape=shape, dim=dim, dtype=I32)] if op is Sort else []
        return [b.op(op, b.tile(dtype, shape), *others, dim=dim, **fields)]

    func = func_of(make)
    for machine in machines:
        lowering = LlvmLowering(func, machine)
        for x in arrays(dtype, shape, dim):
            canaries = Canaries()
            (found,), (expected,) = run(lowering, [x], canaries), interpret(func, x)
            np.testing.assert_array_equal(found, expected, str(machine))
            assert canaries.untouched()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str) -> None:
    check(TopK, DTYPES[name], (2, 333), 1, [None], k=3)
    check(Sort, DTYPES[name], (2, 61), 1, [None], pick=1)


@pytest.mark.parametrize(
    ("shape", "dim", "k"),
    [
        ((1,), 0, 1),
        ((3, 5), 1, 5),
        ((3, 20), 1, 2),
        ((300,), 0, 1),
        ((2, 500), 1, 129),
        ((2, 1031), 1, 65),
        ((519, 3), 0, 7),
        ((2, 2000, 2), 1, 40),
    ],
)
def test_the_greatest_of_long_and_short_lines(shape: tuple[int, ...], dim: int, k: int) -> None:
    check(TopK, DTYPES["f32"], shape, dim, [None, *here()], k=k)


@pytest.mark.parametrize(
    ("shape", "dim"), [((1,), 0), ((2, 7), 1), ((17, 2), 0), ((2, 33), 1), ((2, 256), 1), ((1, 999), 1)]
)
def test_sorts_of_long_and_short_lines(shape: tuple[int, ...], dim: int) -> None:
    check(Sort, DTYPES["i32"], shape, dim, [None, *here()], pick=1)


@pytest.mark.parametrize("machine", ALL, ids=lambda m: m.cpu)
def test_code_for_every_machine_is_made(machine: Machine) -> None:
    for width in (7, 1031):
        func = func_of(lambda b, width=width: [b.op(TopK, b.tile(I32, (2, width)), dim=1, k=5)])
        lowering = LlvmLowering(func, machine)
        assert toolchain._Codegen(lowering.text, machine).object()
