"""Gluon's functions of tiles, as far as our programs call them; layouts, which Gluon's compiler checks, are ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tilekern.ir.elementwise import TABLE
from tilekern.ir.types import BF16, BOOL, F16, F32
from tilekern.ir.types import DTYPES as IR_DTYPES
from tilekern.lower.triton.emit.expressions import LIBDEVICE
from tilekern.lower.triton.gluon.simulator.arrays import Pointer
from tilekern.lower.triton.gluon.simulator.tiles import Tile, elements, integer

DTYPES: dict[str, Any] = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "float64")},
    **{f"uint{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    "float32": F32,
    "float16": F16,
    "bfloat16": BF16,
    "float8e4nv": IR_DTYPES["f8e4m3fn"],
    "float8e5": IR_DTYPES["f8e5m2"],
    "int1": BOOL,
}
"""Dtypes by their names in Gluon."""


def _row(name: str) -> Callable[..., Tile]:
    """A row of the elementwise table as a function of tiles."""

    def function(*operands: Any) -> Tile:
        arrays = (x.data if isinstance(x, Tile) else np.asarray(x, F32) for x in operands)
        return Tile(TABLE[name].meaning(*arrays))

    return function


LIBRARY: dict[str, Callable[..., Tile]] = {device: _row(name) for name, device in LIBDEVICE.items()}
"""The functions of libdevice, by their names there."""


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tile:
    """A tile of one number."""
    del layout
    return Tile(np.full(shape, elements(value), dtype))


def zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, dtype, layout)


def arange(start: int, stop: int, layout: Any = None) -> Tile:
    """Consecutive numbers."""
    del layout
    return Tile(np.arange(start, stop, dtype=np.int32))


def to_tensor(x: Any) -> Tile:
    """A scalar of the GPU."""
    return x if isinstance(x, Tile) else Tile(np.int32(x))


def cdiv(x: Any, n: Any) -> Any:
    """A quotient, rounded up."""
    return (x + (n - 1)) // n


def where(condition: Any, x: Any, y: Any) -> Tile:
    """A choice for each element."""
    dtype = next((v.data.dtype for v in (x, y) if isinstance(v, Tile)), np.dtype(np.float32))
    return Tile(np.where(elements(condition), np.asarray(elements(x), dtype), np.asarray(elements(y), dtype)))


def maximum(x: Any, y: Any, propagate_nan: Any = None) -> Any:
    """The greater of x and y; NaN if x or y is NaN."""
    del propagate_nan
    return _of_two(np.maximum, x, y)


def minimum(x: Any, y: Any, propagate_nan: Any = None) -> Any:
    """The lesser of x and y; NaN if x or y is NaN."""
    del propagate_nan
    return _of_two(np.minimum, x, y)


def _of_two(function: Callable[..., Any], x: Any, y: Any) -> Any:
    if isinstance(x, Tile) or isinstance(y, Tile):
        return Tile(function(elements(x), elements(y)))
    return type(x)(function(x, y))


def sqrt(x: Any) -> Tile:
    """The square root."""
    return Tile(np.sqrt(x.data))


def add_up(x: Tile, axis: int) -> Tile:
    """The sum along a dim."""
    return Tile(np.sum(x.data, axis, dtype=x.data.dtype))


def largest(x: Tile, axis: int) -> Tile:
    """The maximum along a dim."""
    return Tile(np.max(x.data, axis))


def least(x: Tile, axis: int) -> Tile:
    """The minimum along a dim."""
    return Tile(np.min(x.data, axis))


def reduce(x: Tile, axis: int, combine: Callable[[Any, Any], Any]) -> Tile:
    """A reduction by a function of two, in the order of a tree."""
    lines: list[Any] = [Tile(line) for line in np.moveaxis(x.data, axis, 0)]
    while len(lines) > 1:
        lines = [combine(*pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    return lines[0]


def in_layout(x: Any, layout: int | None) -> Any:
    """The same elements in another layout; pointers also note the dim along which thread blocks divide them."""
    return Pointer(x.array, x.offsets, layout) if isinstance(x, Pointer) else x


# A layout stands for the dim along which the thread blocks of a cluster divide a tile; None if each has all of it.


def layout_of_blocks(
    elements: Sequence[int], lanes: Sequence[int], warps: Sequence[int], order: Sequence[int], bases: Any = ()
) -> int | None:
    """The layout of a tile that no product decides; `bases` has one step of an index for a cluster of two."""
    del elements, lanes, warps, order
    return _divided(bases)


def layout_of_products(
    version: Sequence[int], warps: Sequence[int], shape: Sequence[int], bases: Any = ()
) -> int | None:
    """The layout of the result of a product."""
    del version, warps, shape
    return _divided(bases)


def _divided(bases: Sequence[Sequence[int]]) -> int | None:
    return next((list(basis).index(1) for basis in bases if 1 in basis), None)


def layout_of_shared(*parts: Any) -> None:
    """The layout of barriers, whose number says as much, or of places of one thread block."""
    del parts


def layout_of_slices(dim: int, parent: int | None) -> int | None:
    """The layout of a tile without one dim."""
    if parent is None or parent == dim:
        return None
    return parent - (parent > dim)


def layout_of_operands(number: int, parent: int | None, width: int) -> int | None:
    """`parent`: the left operand (`number` 0) of a product has the layout of the product, which has the same rows."""
    del width
    assert number == 0
    return parent


def itself(x: Any) -> Any:
    """A constant, or a function that Gluon would compile."""
    return x


def scalars(*bounds: Any) -> Iterator[Tile]:
    """`range`, of scalars of the GPU."""
    return (Tile(np.int32(n)) for n in range(*(integer(x) for x in bounds)))


FUNCTIONS: dict[str, Any] = {
    **{
        name: _row(name)
        for name in ("exp", "exp2", "log", "log2", "sin", "cos", "rsqrt", "floor", "ceil", "erf", "abs")
    },
    "BlockedLayout": layout_of_blocks,
    "NVMMADistributedLayout": layout_of_products,
    "SliceLayout": layout_of_slices,
    "DotOperandLayout": layout_of_operands,
    "NVMMASharedLayout": layout_of_shared,
    "constexpr": itself,
    "static_range": range,
    "convert_layout": in_layout,
    "set_auto_layout": in_layout,
    "full": full,
    "zeros": zeros,
    "arange": arange,
    "to_tensor": to_tensor,
    "cdiv": cdiv,
    "where": where,
    "maximum": maximum,
    "minimum": minimum,
    "sqrt": sqrt,
    "sqrt_rn": sqrt,
    "sum": add_up,
    "max": largest,
    "min": least,
    "reduce": reduce,
    **DTYPES,
}
"""The functions and names of Gluon that need no thread block."""
