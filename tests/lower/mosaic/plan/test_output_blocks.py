"""The output blocks that steps of the grid write, against a loop over all steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.core import Func, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.plan.output_blocks import OutputBlocks
from tilekern.lower.mosaic.plan.plan_kernel import plan_kernel as plan
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.windows import Window, window_of

LENGTH = 12


@dataclass(frozen=True)
class Grid:
    """A program that stores to o[p, q] with p and q linear in the grid's indices, an axis of the grid for each."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    consts: tuple[int, int]
    role: str

    def func(self) -> Func:
        axes = ", ".join(f"%{name} in {name}[{n} by 1]" for name, n in zip("ijk", self.sizes, strict=False))
        places = [self._place(s, c) for s, c in zip(self.strides, self.consts, strict=True)]
        body = f'%0 = constant 1 : i32[]\n atomic %0 to %o[{", ".join(places)}] {{kind="add"}}'
        return parse(f"func @f(%o: ref<i32[{LENGTH}, {LENGTH}], {self.role}>) {{ grid {axes}\n {body} }}")

    @staticmethod
    def _place(strides: tuple[int, ...], const: int) -> str:
        terms = [f"{s}*%{name}" for name, s in zip("ijk", strides, strict=False) if s]
        return " + ".join([*terms, str(const)] if const or not terms else terms)

    def blocks(self) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
        """The place in the grid of each step, and the block that it writes; blocks are clamped into the array."""
        found: list[tuple[tuple[int, ...], tuple[int, int]]] = []
        for place in product(*(range(self.sizes[n]) for n in self.order)):
            index = dict(zip(self.order, place, strict=True))
            p, q = (
                # A known place does not cut the dim: all of it is one block.
                min(max(sum(s * index[n] for n, s in enumerate(strides)) + c, 0), LENGTH - 1) if any(strides) else 0
                for strides, c in zip(self.strides, self.consts, strict=True)
            )
            found.append((place, (p, q)))
        return found


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    rank = draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    order = tuple(draw(st.permutations(range(rank))))
    p, q = (tuple(draw(st.sampled_from([0, 0, 1, 1, 2, 3])) for _ in range(rank)) for _ in range(2))
    consts = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 20]))
    return Grid(sizes, order, (p, q), consts, draw(st.sampled_from(["zeros", "inout"])))


def visits_of(func: Func, order: tuple[int, ...]) -> tuple[OutputBlocks, Value, Window]:
    scalars = Scalars(func, 1 << 16)
    (param,) = func.outputs
    (op,) = (op for op in func.walk() if isinstance(op, MemoryOp))
    window = window_of(op, scalars)
    return OutputBlocks(func, None, order, scalars, {param: window}), param, window


@given(grid=grids())
def test_blocks_are_written_in_a_row(grid: Grid) -> None:
    visits, param, window = visits_of(grid.func(), grid.order)
    steps = grid.blocks()
    numbers = [block for _, block in steps]
    runs = 1 + sum(a != b for a, b in pairwise(numbers))
    is_consecutive = runs == len(set(numbers))
    changes = visits.moving_axes(window)
    assert changes == tuple(any(s[n] for s in grid.strides) for n in grid.order)
    # What is there at first is written where the axes that do not change the block are at their first place.
    starts = [block for place, block in steps if not any(i for i, c in zip(place, changes, strict=True) if not c)]
    assert visits.is_consecutive(param) == (is_consecutive and len(starts) == len(set(numbers)))
    if visits.is_consecutive(param):
        first = {block: n for n, block in reversed(list(enumerate(numbers)))}
        begin = [n for n, (p, _) in enumerate(steps) if not any(i for i, c in zip(p, changes, strict=True) if not c)]
        assert begin == sorted(first.values())


@given(grid=grids())
def test_every_block_is_written(grid: Grid) -> None:
    visits, param, _ = visits_of(grid.func(), grid.order)
    count = LENGTH ** sum(any(s) for s in grid.strides)
    assert visits.covers_array(param) == (len({block for _, block in grid.blocks()}) == count)


@given(grid=grids())
def test_cores_share_out_what_writes_apart(grid: Grid) -> None:
    visits, _, _ = visits_of(grid.func(), grid.order)
    for n, free in enumerate(visits.independent_axes()):
        writers: dict[tuple[int, int], set[int]] = {}
        for place, block in grid.blocks():
            writers.setdefault(block, set()).add(place[n])
        assert free == all(len(places) == 1 for places in writers.values())


def test_a_place_that_is_not_known_before_may_be_any() -> None:
    func = parse("""
        func @f(%x: ref<i32[8], in>, %o: ref<i32[12], out>) {
          grid %i in i[4 by 1], %j in j[2 by 1]
          %0 = load %x[%i!] : i32[]
          store %i to %o[%0]
        }
    """)
    scalars = Scalars(func, 1 << 16)
    (param,) = func.outputs
    window = next(window_of(op, scalars) for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param)
    visits = OutputBlocks(func, None, (0, 1), scalars, {param: window})
    assert (
        not visits.is_consecutive(param)
        and not visits.covers_array(param)
        and visits.independent_axes() == (False, False)
    )
    # So all of the output is one block, which is written back once.
    found = plan(func, CHIPS["tpu:v5e"])
    assert found.outputs[param].block == (12, 1, 1) and found.semantics == ("arbitrary", "arbitrary")


SCATTERED = """
    func @f(%o: ref<f32[64, 384], ROLE>) {
      grid %i in i[2 by 1], %j in j[2 by 1]
      %0 = constant 1.0 : f32[32, 128]
      OP %0 to %o[32*%i +: 32!, 128*%j +: 128!]
    }
"""


@pytest.mark.parametrize("role", ["out", "zeros"])
def test_an_axis_that_no_output_depends_on_is_inside(role: str) -> None:
    """Steps that write one block would not be in a row otherwise."""
    text = SCATTERED.replace("%j in j[2 by 1]", "%j in j[2 by 1], %k in k[3 by 1]").replace("128*%j", "128*%k")
    func = parse(text.replace("ROLE", role).replace("OP", "store"))
    found = plan(func, CHIPS["tpu:v5e"])
    assert found.order == (0, 2, 1) and found.grid == (2, 3, 2)
    assert found.semantics == ("parallel", "parallel", "arbitrary")
