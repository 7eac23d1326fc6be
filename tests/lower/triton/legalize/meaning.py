"""Funcs of one op; whether a rewrite keeps what they mean; and what a GPU leaves open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from tests.ir.funcs import Lanes, Source, assert_same, func, ref
from tilekern.ir.compute import Convert
from tilekern.ir.core import Array, Axis, Func, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import TABLE
from tilekern.ir.interpret import interpret
from tilekern.ir.types import BOOL, F32, F64, DType, kind_of
from tilekern.ir.verify import verify
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.legalize.dtypes import TRITON
from tilekern.lower.triton.legalize.expand import expand
from tilekern.passes import pipeline

SM_80, SM_90 = CHIPS["cuda:sm_80"], CHIPS["cuda:sm_90"]
SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12])
PROGRAMS = 2

# --- Funcs of one op ------------------------------------------------------------------------------------------------


def one(kind: type[Op], *arrays: Array, **attributes: Any) -> tuple[Func, list[Array]]:
    """A Func that applies an op to tiles, and its inputs; see `several`."""
    return several(lambda b, *tiles: [b.op(kind, *tiles, **attributes)], *arrays)


def several(body: Callable[..., Sequence[Value]], *arrays: Array) -> tuple[Func, list[Array]]:
    """A Func of two programs that stores what `body(source, *tiles)` returns; and its inputs.

    Each tile lies in a larger array of junk, and next to what the other program stores: what a rewrite wrongly reads or
    writes beyond a tile is seen. Both programs compute the same.
    """
    inputs = [ref(f"x{n}", _among_junk(x).shape, "in", x.dtype) for n, x in enumerate(arrays)]
    outputs: list[Value] = []

    def program(b: Source, p: Value) -> None:
        tiles = [b.load(r, *(Lanes("block", (), n) for n in x.shape)) for r, x in zip(inputs, arrays, strict=True)]
        for value in body(b, *tiles):
            rows, *rest = value.tile.shape or (1,)
            out = ref(f"out{len(outputs)}", (PROGRAMS * rows, *rest), "out", value.tile.dtype)
            outputs.append(out)
            kind = "block" if value.tile.shape else "index"
            b.store(out, value, Lanes(kind, ((p, rows),), rows), *(Lanes("block", (), n) for n in rest))

    made = func("f", (), (Axis("p", PROGRAMS),), program)
    made = replace(made, params=(*inputs, *outputs))
    verify(made)
    return made, [_among_junk(x) for x in arrays]


def _among_junk(x: Array) -> Array:
    """The array with numbers behind it, along every dim, that no result depends on."""
    junk = True if x.dtype == BOOL else np.nan if kind_of(x.dtype) == "float" else np.iinfo(x.dtype).max - 1
    around = np.full([2 * n + 1 for n in x.shape], junk).astype(x.dtype)
    around[tuple(map(slice, x.shape))] = x
    return around


@st.composite
def shapes(draw: Any, least: int = 0, most: int = 3, sizes: st.SearchStrategy[int] = SIZES) -> tuple[int, ...]:
    """Shapes of small tiles, few of whose sizes are powers of two."""
    return tuple(draw(st.lists(sizes, min_size=least, max_size=most)))


def counting(shape: Sequence[int], dtype: DType) -> Array:
    """Different numbers, as far as the dtype has them."""
    size = int(np.prod(shape, dtype=np.int64))
    return (np.arange(size) % 3 == 0 if dtype == BOOL else np.arange(1, size + 1) % 120).astype(dtype).reshape(shape)


# --- what stays -----------------------------------------------------------------------------------------------------


def assert_keeps(improve: Callable[[Func], Func], original: Func, arrays: Sequence[Array]) -> Func:
    """Assert that a rewrite keeps the meaning, but for signs of zero; the rewritten Func."""
    improved = improve(original)
    verify(improved)
    with hardware():
        found = interpret(improved, *arrays)
    _assert_same(found, interpret(original, *arrays))
    return improved


def expanded_for(func: Func, chip: Any) -> Func:
    """The Func after the passes that know dtypes and ops, but no sizes."""
    return pipeline.run(func, (expand_bits, partial(expand, chip=chip), partial(legalize_dtypes, has=TRITON)))


def assert_stays(original: Func, arrays: Sequence[Array], chip: Any = SM_90) -> Func:
    """Assert that `legalize` keeps the meaning, but for signs of zero; the legal Func."""
    legal = legalize(original, chip)
    with hardware():
        found = interpret(legal, *arrays)
    _assert_same(found, interpret(original, *arrays))
    return legal


def _assert_same(found: Sequence[Array], expected: Sequence[Array]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted, zeros=False)


# --- what a GPU leaves open -----------------------------------------------------------------------------------------


@contextmanager
def hardware() -> Iterator[None]:
    """In here, what Triton or a GPU leave open, or mean otherwise, fails: legal Funcs have none of it."""
    shifts = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
    rows = {name: replace(TABLE[name], meaning=_strict_shift(TABLE[name].meaning)) for name in shifts}
    with (
        patch.dict(TABLE, rows),
        patch.object(Convert, "evaluate", _strict_convert(Convert.evaluate)),
        patch.object(Take, "evaluate", _strict_take(Take.evaluate)),
    ):
        yield


def _strict_shift(meaning: Callable[..., Any]) -> Callable[..., Any]:
    def shift(x: Array, amount: Array) -> Any:
        assert ((amount >= 0) & (amount < 8 * x.dtype.itemsize)).all(), "a shift by more bits than there are"
        return meaning(x, amount)

    return shift


def _strict_convert(evaluate: Callable[..., Array]) -> Callable[..., Array]:
    def convert(self: Convert, x: Array) -> Array:
        result = evaluate(self, x)
        if kind_of(x.dtype) == "float" and kind_of(self.dtype) in ("signed", "unsigned"):
            whole = np.trunc(x.astype(F64))
            limits = np.iinfo(self.dtype)
            inside = (whole >= float(limits.min)) & (whole <= limits.max)
            assert inside.all(), f"a cast of {x[~inside].flat[0]} to {self.dtype}"
        if kind_of(self.dtype) == "float" and self.dtype.itemsize == 1:
            kept = np.isfinite(result.astype(F32)) | (x != x)
            assert kept.all(), f"a cast of {x[~kept].flat[0]} to {self.dtype}"
        return result

    return convert


def _strict_take(evaluate: Callable[..., Array]) -> Callable[..., Array]:
    def take(self: Take, x: Array, indices: Array) -> Array:
        assert ((indices >= 0) & (indices < x.shape[self.dim])).all(), "an index outside of the tile"
        return evaluate(self, x, indices)

    return take
