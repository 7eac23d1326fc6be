"""Layouts in HBM: no element is lost, blocks hold the right elements, and are aligned to tiles of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.core import Array, Value
from tilekern.ir.types import BF16, F32, DType, RefType
from tilekern.lower.mosaic.plan.hbm_layout import Layout, check_blocks, is_squeezed, layout_of
from tilekern.lower.mosaic.plan.windows import Window, WindowDim, tiles

SIZES = (1, 3, 5, 8, 16, 40, 128, 256)


@st.composite
def layouts(draw: Any) -> Layout:
    """Of arrays of up to four dims, seen in all ways."""
    shape: list[int] = []
    window_dims: list[WindowDim] = []
    for n in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["at", "tiled", "static", "aligned", "rows"]))
        size = draw(st.sampled_from(SIZES)) if kind in ("tiled", "aligned") else 0
        length = draw(st.sampled_from([1, 2, 3, 7, 128, max(1, size), max(1, 2 * size), max(1, 2 * size - 1)]))
        shape.append(length)
        window_dims.append(WindowDim(kind, 1 if kind == "at" else size, n))
    dtype = draw(st.sampled_from([F32, BF16]))
    param = Value(RefType(tuple(shape), dtype, "in"), "x")
    return layout_of(Window(param, tuple(window_dims)), whole=draw(st.booleans()))


def numbered(found: Layout) -> Array:
    shape = found.window.param.ref.shape
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


@given(found=layouts())
def test_nothing_is_lost(found: Layout) -> None:
    array = numbered(found)
    view = np.asarray(found.rearrange(array))
    assert view.shape == found.shape
    np.testing.assert_array_equal(found.restore(view), array)
    # What XLA adds is zeros.
    assert np.count_nonzero(view) == array.size


@given(found=layouts())
def test_blocks_are_aligned(found: Layout) -> None:
    check_blocks(found)
    assert len(found.buffer) >= 2


@given(found=layouts(), data=st.data())
def test_a_block_shows_what_the_window_shows(found: Layout, data: st.DataObject) -> None:
    """The elements of a random block are those of the slice of the array, in the order of its dims."""
    window_dims, shape = found.window.dims, found.window.param.ref.shape
    places = [_place(window_dim, length, data) for window_dim, length in zip(window_dims, shape, strict=True)]
    view, array = np.asarray(found.rearrange(numbered(found))), numbered(found)
    for n, dim in reversed(list(enumerate(found.dims))):
        view = _cut(view, n, dim.block, _index(found, n, places), squeeze=is_squeezed(dim, window_dims))
    wanted = array
    for d, (window_dim, length) in reversed(list(enumerate(zip(window_dims, shape, strict=True)))):
        low, size = (
            (places[d] * window_dim.size, window_dim.size) if window_dim.kind in ("at", "tiled") else (0, length)
        )
        wanted = _cut(wanted, d, size, low, squeeze=window_dim.kind == "at")
    kept = [n for n, dim in enumerate(found.dims) if not is_squeezed(dim, window_dims)]
    order = np.argsort([found.dims[n].dim for n in kept], kind="stable")
    shown = np.transpose(view, order)
    # A dim that is split, or longer than the array, has further elements.
    np.testing.assert_array_equal(shown[shown > 0], wanted[wanted > 0])


def _place(window_dim: WindowDim, length: int, data: st.DataObject) -> int:
    if window_dim.kind == "at":
        return data.draw(st.integers(0, length - 1))
    return data.draw(st.integers(0, tiles(length, window_dim.size) - 1)) if window_dim.kind == "tiled" else 0


def _index(found: Layout, n: int, places: list[int]) -> int:
    """The first element of a block along a dim of the rearranged array."""
    dim, window_dims = found.dims[n], found.window.dims
    if dim.use == "fold":
        return places[dim.dim - 1] * dim.block
    known = dim.dim >= 0 and (
        is_squeezed(dim, window_dims) or (dim.use == "lane" and window_dims[dim.dim].kind == "tiled")
    )
    if not known or any(v.use == "tile" and v.dim == dim.dim for v in found.dims if v is not dim):
        return 0
    return places[dim.dim] * (1 if is_squeezed(dim, window_dims) else dim.block)


def _cut(array: Array, dim: int, size: int, low: int, squeeze: bool) -> Array:
    part = np.take(array, range(low, min(low + size, array.shape[dim])), dim)
    return part[(slice(None),) * dim + (0,)] if squeeze else part


@pytest.mark.parametrize(
    ("shape", "window_dims", "dtype", "view"),
    [
        # Rows of bfloat16 are two to a sublane: 8 of them are no whole tile of memory.
        ((64, 128), (WindowDim("tiled", 8, 0), WindowDim("static")), F32, (64, 128)),
        ((64, 128), (WindowDim("tiled", 8, 0), WindowDim("static")), BF16, (8, 8, 128)),
        ((64, 128), (WindowDim("tiled", 16, 0), WindowDim("static")), BF16, (64, 128)),
        ((64, 128), (WindowDim("static"), WindowDim("at", 1, 0)), F32, (128, 1, 64)),
        (
            (4, 64, 8, 128),
            (WindowDim("at", 1, 0), WindowDim("tiled", 16, 1), WindowDim("at", 1, 2), WindowDim("static")),
            F32,
            (4, 64, 1024),
        ),
        ((), (), F32, (1, 1)),
    ],
)
def test_what_becomes_of_an_array(
    shape: tuple[int, ...], window_dims: tuple[WindowDim, ...], dtype: DType, view: Any
) -> None:
    assert layout_of(Window(Value(RefType(shape, dtype, "in"), "x"), window_dims)).shape == view
