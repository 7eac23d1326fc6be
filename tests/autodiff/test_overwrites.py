"""The times of stores are written for those kernels alone whose stores may meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.autodiff.kernels import CASES, Case
from tests.ir.analysis.random_sums import touched
from tests.ir.funcs import Lanes, Source, func, ref
from tests.lang.checks import like_first, refused
from tests.lower.library import CASES as LIBRARY
from tests.lower.library import NAMES, family_of
from tilekern.autodiff.overwrites import Overwrites
from tilekern.errors import NotDifferentiableError
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Axis, Block, Func, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Access, Atomic, Dim, Position, Store, Term, WriteOp
from tilekern.ir.types import I32


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_stores_that_may_meet(case: Case) -> None:
    func = case.kernel.trace(*case.arrays(dtype=np.float32), *case.rest).ir
    assert bool(Overwrites(func).times) == (case.name in ("overwritten", "last of loop"))


@pytest.mark.parametrize("name", NAMES)
def test_the_library_stores_each_element_once(name: str) -> None:
    assert not Overwrites(family_of(name, LIBRARY[name][0].small(), "float32").func()).times


def test_branches_exclude_each_other() -> None:
    @like_first
    def either(x, out):
        i = tk.parallel(x.shape[0], 4)

        def write(factor: int) -> None:
            out[i] = factor * x[i]

        lax.cond(i.index == 0, lambda: write(1), lambda: write(2))

    assert not Overwrites(either.trace(np.ones(8, np.float32)).ir).times


def test_more_stores_than_can_be_counted() -> None:
    @like_first
    def counted(x, out):
        def again(n: Any) -> None:
            tk.foreach(tk.serial(2**20), lambda m: write())

        def write() -> None:
            out[...] = 2 * x[...]

        tk.foreach(tk.serial(2**20), again)  # <-

    traced = counted.trace(np.ones(8, np.float32))
    with refused(
        NotDifferentiableError, "counted stores more often", expected="stores", got="stores to out,", fix="once"
    ):
        traced.gradient()


_GRID = Axis("i", 3)
_SHAPE = (8, 6)


class _Drawn:
    """The body of one random Func: stores and atomic additions to `out`, in folds and switches."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.out = ref("out", _SHAPE, random.choice(("out", "zeros")), I32)

    def func(self) -> Func:
        return func("f", (self.out,), (_GRID,), partial(self._block, depth=2))

    def _block(self, b: Source, *indices: Value, depth: int) -> None:
        for _ in range(self._random.choice((1, 2, 2))):
            kind = self._random.choice(("write", "write", "fold", "switch")) if depth else "write"
            getattr(self, f"_{kind}")(b, *indices, depth=depth)

    def _write(self, b: Source, *indices: Value, depth: int) -> None:
        access = Access(tuple(self._dim(len(indices)) for _ in _SHAPE))
        arity = 1 + max((t.operand for dim in access.dims for t in dim.position.terms), default=-1)
        operands = (self.out, b.const(1, access.shape), *indices[:arity])
        if self.out.ref.role == "zeros" and self._random.random() < 0.3:
            b.add(Atomic(operands=operands, access=access, kind="add", loc=b.loc()))
        else:
            b.add(Store(operands=operands, access=access, loc=b.loc()))

    def _dim(self, operands: int) -> Dim:
        choose, kind = self._random.choice, self._random.choice(("block", "index"))
        used = choose(([], [operands - 1], [operands - 1], self._random.sample(range(operands), min(2, operands))))
        strides, divisors, moduli = (-1, 1, 2, 2, 2, 4), (*[1] * 7, 2), (*[0] * 7, 2)
        terms = tuple(Term(n, choose(strides), choose(divisors), choose(moduli)) for n in used)
        return Dim(kind, Position(terms, choose((-1, 0, 0, 2, 3, 4))), choose((1, 2)) if kind == "block" else 1)

    def _fold(self, b: Source, *indices: Value, depth: int) -> None:
        axis = Axis("k", self._random.choice((1, 2, 3)))

        def step(k: Value) -> tuple[Value, ...]:
            self._block(b, *indices, k, depth=depth - 1)
            return ()

        b.fold(axis, b.const(0), b.const(axis.extent), (), step, self._random.random() < 0.3)

    def _switch(self, b: Source, *indices: Value, depth: int) -> None:
        def branch() -> tuple[Value, ...]:
            self._block(b, *indices, depth=depth - 1)
            return ()

        which = self._random.choice(indices)
        b.add(Switch(operands=(which,), regions=tuple(b.block((), branch) for _ in range(2)), loc=b.loc()))


def _writes(block: Block, numbers: dict[Value, int]) -> Iterator[tuple[WriteOp, tuple[int, ...]]]:
    """The elements that one program writes, each with its write, in the order in which the program runs."""
    for op in block.ops:
        if isinstance(op, WriteOp):
            for at in touched(op, numbers, _SHAPE):
                yield op, at
        elif isinstance(op, Fold):
            for tile in range(op.axis.tiles):
                yield from _writes(op.body, {**numbers, op.body.args[0]: tile})
        elif isinstance(op, Switch):
            yield from _writes(op.regions[min(max(numbers[op.operands[0]], 0), 1)], numbers)


def _is_overwritten(f: Func) -> bool:
    """True if a program stores an element, and writes it before or after that."""
    for i in range(_GRID.tiles):
        counts, stored = Counter[tuple[int, ...]](), set[tuple[int, ...]]()
        for op, at in _writes(f.body, {f.body.args[0]: i}):
            counts[at] += 1
            stored.update([at] if isinstance(op, Store) else [])
        if any(counts[at] > 1 for at in stored):
            return True
    return False


def test_elements_that_a_program_stores_again_are_seen() -> None:
    tally = Counter[tuple[bool, bool]]()
    for seed in range(400):
        f = _Drawn(Random(seed)).func()
        overwritten, has_times = _is_overwritten(f), bool(Overwrites(f).times)
        assert has_times or not overwritten, f"seed {seed}\n{f}"
        tally[overwritten, has_times] += 1
    assert min(tally[True, True], tally[False, False]) > 60, tally


class _Times:
    """The times of the stores of one program, by a clock that also counts the branches that do not run."""

    def __init__(self, f: Func, program: int) -> None:
        self.last: dict[tuple[int, ...], int] = {}
        self._clock = 0
        self._run(f.body, {f.body.args[0]: program}, True)

    def _run(self, block: Block, numbers: dict[Value, int], runs: bool) -> None:
        for op in block.ops:
            if isinstance(op, WriteOp):
                if runs and isinstance(op, Store):
                    self.last.update(dict.fromkeys(touched(op, numbers, _SHAPE), self._clock))
                self._clock += 1
            elif isinstance(op, Fold):
                tiles = range(op.axis.tiles)
                for tile in reversed(tiles) if op.reverse else tiles:
                    self._run(op.body, {**numbers, op.body.args[0]: tile}, runs)
            elif isinstance(op, Switch):
                taken = min(max(numbers[op.operands[0]], 0), 1)
                for n, region in enumerate(op.regions):
                    self._run(region, numbers, runs and n == taken)


def test_the_time_of_an_element_is_that_of_its_last_store() -> None:
    seen = 0
    for seed in range(400):
        drawn = _Drawn(Random(seed))
        drawn.out = ref("out", _SHAPE, "zeros", I32)  # elements that nothing stores stay 0
        f = drawn.func()
        programs = [_Times(f, i).last for i in range(_GRID.tiles)]
        elements = [at for last in programs for at in last]
        overwrites = Overwrites(f)
        if overwrites.times and len(elements) == len(set(elements)):  # no two programs store one element
            (times,) = interpret(overwrites.writer(set(), f.inputs))
            found = {at: times[at] for at in elements}
            assert found == {at: time for last in programs for at, time in last.items()}, f"seed {seed}\n{f}"
            seen += 1
    assert seen > 20


def test_parts_that_numbers_select_are_apart() -> None:
    @like_first
    def halves(x, out):
        out[:4] = x[4:]
        out[4:] = x[:4]

    assert not Overwrites(halves.trace(np.ones(8, np.float32)).ir).times


def _stores_in_a_loop(count: int, tiles: int) -> Func:
    out = ref("out", (4,), "out", I32)

    def body(b: Source, _: Value) -> None:
        def step(k: Value) -> tuple[Value, ...]:
            for _ in range(count):
                b.store(out, b.const(1, (4,)), Lanes("block", (), 4))
            return ()

        b.fold(Axis("k", tiles), b.const(0), b.const(tiles), (), step)

    return func("counted", (out,), (_GRID,), body)


def test_times_are_counted_up_to_the_largest_int32() -> None:
    assert Overwrites(_stores_in_a_loop(1, 2**31 - 1)).times
    with pytest.raises(NotDifferentiableError, match="at most 2147483647 stores"):
        Overwrites(_stores_in_a_loop(2, 2**30))
