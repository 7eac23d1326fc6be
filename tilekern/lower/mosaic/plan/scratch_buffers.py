"""Scratch buffers of a kernel: the carries of its loops, and values that several steps of the grid use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Value
from tilekern.ir.records import record
from tilekern.ir.types import DType
from tilekern.lower.mosaic.plan.continued_carries import continued_carries
from tilekern.lower.mosaic.plan.unroll import trip_count
from tilekern.lower.mosaic.plan.vector_forms import VectorForms, is_vector, shape_in
from tilekern.lower.mosaic.stored_dtypes import stored_dtype, wide_dtype


@record
class Scratch:
    """A buffer that lives as long as the kernel: a tile in VMEM, a scalar in scalar memory."""

    shape: tuple[int, ...]
    dtype: DType


def allocate_scratch(
    func: Func, stepped: Sequence[Fold], saved: Sequence[Value], forms: VectorForms, ranges: Mapping[Value, Interval]
) -> tuple[dict[Value, int], tuple[Scratch, ...]]:
    """The buffer of each carry and saved value, by its number, and all buffers.

    A fold that alone continues the carry of another fold shares the carry's buffer. Scalar carries need no buffer,
    except in `stepped` loops. Loops inside of the kernel with one iteration at most are emitted without a loop, and
    their carries need no buffer either.

    Args:
      func: the Func.
      stepped: the loops whose iterations are steps of the grid or of a pipeline.
      saved: the values that are computed once and used in several steps.
      forms: the forms of vectors.
      ranges: the known intervals of integers.
    """
    numbers: dict[Value, int] = {}
    buffers: list[Scratch] = []
    continued = continued_carries(func)

    def add(value: Value) -> int:
        buffers.append(_buffer_of(value, forms))
        return len(buffers) - 1

    for op in func.walk():
        if isinstance(op, Fold) and (op in stepped or trip_count(op, ranges) not in (0, 1)):
            for init, result in zip(op.inits, op.results, strict=True):
                if result.tile.size and (result.tile.shape or op in stepped):
                    numbers[result] = numbers[init] if init in continued and init in numbers else add(result)
    for value in saved:
        numbers[value] = add(value)
    return numbers, tuple(buffers)


def _buffer_of(value: Value, forms: VectorForms) -> Scratch:
    tile = value.tile
    if not tile.shape:
        return Scratch((), wide_dtype(tile.dtype))
    shape = shape_in(forms.carried(value), *tile.shape) if is_vector(value) else tile.shape
    return Scratch(shape, stored_dtype(tile.dtype))
