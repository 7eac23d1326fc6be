"""Lines of parts in turns: taken apart, put together, and both without tiles of a few lanes."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lower.mosaic.cells import DTYPE_NAMES
from tests.lower.mosaic.legalize.legality import assert_stays
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tests.lower.triton.legalize.meaning import counting, several
from tilekern.ir.core import Func, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.shape import Concatenate, Pad, Reshape, Slice
from tilekern.ir.types import DTYPES, F32
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.legalize import legalize

FRONT = st.sampled_from([(), (1,), (3,), (2, 3)])
TURNS = st.sampled_from([2, 3, 4, 5, 32])
GROUPS = st.sampled_from([2, 3, 31, 64, 65, 130])


def part(b: Any, x: Value, turns: int, p: int) -> Value:
    """x[..., p::turns] by way of a tile with a last dim of `turns`."""
    *front, size = x.tile.shape
    groups = b.op(Reshape, x, shape=(*front, size // turns, turns))
    start, stop = (0,) * len(front), tuple(front)
    ones = (1,) * (len(front) + 2)
    cut = b.op(Slice, groups, start=(*start, 0, p), stop=(*stop, size // turns, p + 1), stride=ones)
    return b.op(Reshape, cut, shape=(*front, size // turns))


def stacked(b: Any, parts: list[Value]) -> Value:
    *front, size = parts[0].tile.shape
    lanes = [b.op(Reshape, x, shape=(*front, size, 1)) for x in parts]
    return b.op(Reshape, b.op(Concatenate, *lanes, dim=len(front) + 1), shape=(*front, size * len(parts)))


def assert_by_gathers(func: Func, turns: int) -> None:
    ops = list(legalize(func, "v5e").walk())
    assert any(isinstance(op, Take) for op in ops)
    shapes = [v.tile.shape for op in ops for v in op.results if v.tile.size > prod(v.tile.shape[:-1])]
    assert all(shape[-1] != turns for shape in shapes if len(shape) > 1), shapes


@given(front=FRONT, turns=TURNS, groups=GROUPS, data=st.data())
def test_taken_apart(front: tuple[int, ...], turns: int, groups: int, data: st.DataObject) -> None:
    p = data.draw(st.integers(0, turns - 1))
    func, arrays = several(lambda b, x: [part(b, x, turns, p)], counting((*front, groups * turns), F32))
    assert_stays(func, arrays)


@given(front=FRONT, turns=TURNS, groups=GROUPS)
def test_put_together(front: tuple[int, ...], turns: int, groups: int) -> None:
    parts = [counting((*front, groups), F32) + 1000 * n for n in range(turns)]
    assert_stays(*several(lambda b, *xs: [stacked(b, list(xs))], *parts))


@given(front=FRONT, stride=TURNS, size=st.sampled_from([2, 7, 64, 129, 300]), data=st.data())
def test_strides_and_pads(front: tuple[int, ...], stride: int, size: int, data: st.DataObject) -> None:
    """Of the last dim, and of those before it at the same time."""
    start = data.draw(st.integers(0, size - 1))
    ones, zeros = (1,) * len(front), (0,) * len(front)
    before = tuple(data.draw(st.sampled_from([0, 1])) for _ in front)

    def moved(b: Any, x: Value, fill: Value) -> list[Value]:
        cut = b.op(Slice, x, start=(*zeros, start), stop=(*front, size), stride=(*(1 + n for n in before), stride))
        spread = b.op(Pad, x, fill, low=(*ones, -1), high=(*zeros, 3), interior=(*before, stride - 1))
        return [cut, spread]

    fill = np.float32(-1).reshape(())
    assert_stays(*several(moved, counting((*front, size), F32), fill))


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_dtype(name: str) -> None:
    x, y = counting((3, 10), DTYPES[name]), counting((3, 10), DTYPES[name])[:, ::-1].copy()
    assert_stays(*several(lambda b, u, v: [part(b, u, 2, 1), stacked(b, [u, v])], x, y))


@pytest.mark.parametrize("turns", [2, 3, 4])
def test_no_tile_of_a_few_lanes_is_left(turns: int) -> None:
    parts = [counting((8, 24), F32) for _ in range(turns)]
    assert_by_gathers(several(lambda b, x: [part(b, x, turns, 1)], parts[0])[0], turns)
    assert_by_gathers(several(lambda b, *xs: [stacked(b, list(xs))], *parts)[0], turns)


@pytest.mark.parametrize(("turns", "groups"), [(2, 1024), (3, 1024), (100, 64)])
def test_gathers_grow_with_the_line(turns: int, groups: int) -> None:
    """No register is made of more than the two that its elements are in, whatever the number of parts."""
    parts = [counting((8, groups), F32)] * turns
    (func, _) = several(lambda b, *xs: [stacked(b, list(xs))], *parts)
    takes = sum(isinstance(op, Take) for op in legalize(func, "v5e").walk())
    assert takes <= 2 * (groups * turns // (128 // turns * turns) + 1)


def test_parts_that_are_no_lines() -> None:
    """A last dim of one element, parts of several lanes, groups that go over the end of a line: left as they are."""
    x = counting((4, 6), F32)

    def moved(b: Any, x: Value) -> list[Value]:
        wide = b.op(Concatenate, x, x, dim=1)
        over = b.op(Reshape, x, shape=(6, 4))
        return [
            b.op(Reshape, wide, shape=(8, 6)),
            b.op(Slice, over, start=(0, 2), stop=(6, 3), stride=(1, 1)),
            b.op(Slice, x, start=(0, 5), stop=(4, 6), stride=(1, 2)),
        ]

    assert_stays(*several(moved, x))


@tk.kernel(out_type=lambda x, **_: x)
def turned(x: tk.Ref, out: tk.Ref, *, turns: int, block: tk.Block = 16) -> None:
    """The elements of each group of `turns` moved on by one."""
    i = tk.parallel(x.shape[0], block)
    groups = x[i].reshape(i.size, x.shape[1] // turns, turns)
    parts = [jax.lax.index_in_dim(groups, n, axis=2, keepdims=False) for n in range(turns)]
    out[i] = jnp.stack([*parts[1:], parts[0]], axis=2).reshape(i.size, x.shape[1])


@pytest.mark.sweep(4)
@needs_libtpu
@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("chip", CHIPS)
def test_it_compiles(turns: int, chip: str) -> None:
    traced = turned.trace(jax.ShapeDtypeStruct((64, 384), jnp.float32), turns=turns)
    assert traced.lower(chip).compile().resources.vmem_bytes > 0
