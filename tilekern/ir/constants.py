"""Constants: find the constants that define values, make constants, and fold ops of constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.core import Array, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Reshape, Reverse, Slice, Transpose

_LARGEST = 4096  # elements; a longer literal costs more, in the text and in the compiled program, than computing it


def constant_of(value: Value, rewriter: Rewriter) -> Constant | None:
    """The constant that defines a value; None if another op defines it."""
    op = rewriter.definition(value)
    return op if isinstance(op, Constant) else None


def splat_of(value: Value, rewriter: Rewriter) -> Array | None:
    """The element of the splat constant that defines a value, an array of shape (); None if no splat defines it."""
    op = constant_of(value, rewriter)
    return op.array if op is not None and op.array.shape == () else None


def integer_of(value: Value, rewriter: Rewriter) -> int | None:
    """The int in every lane of an integer `value` that a splat constant defines; None if no splat defines `value`.

    `value` must have an integer dtype: a float would be cut to an int.
    """
    array = splat_of(value, rewriter)
    return None if array is None else int(array)


def constant(array: Array, op: Op) -> Constant:
    """The constant that stands for the result of `op`: a splat if `array` is one element or repeats one bit by bit."""
    tile = op.result.tile
    array = np.asarray(array, tile.dtype)
    if array.shape and array.tobytes() == array.ravel()[:1].tobytes() * array.size:
        array = array.ravel()[0] if array.size else np.zeros((), tile.dtype)
    return Constant(array=np.asarray(array, tile.dtype), shape=tile.shape, hint=op.hint, loc=op.loc)


def fold_constants(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    """`f(constants)` → its constant result, if the result is a splat or small (see `canonicalize`)."""
    if not op.pure or not op.operands or op.regions:
        return None
    constants = [constant_of(v, rewriter) for v in op.operands]
    sources = [c for c in constants if c is not None]
    if len(sources) < len(constants):
        return None
    splats = all(c.array.shape == () for c in sources)
    if splats and isinstance(op, (Elementwise, Select, Convert)):
        return [rewriter.one(constant(op.evaluate(*(c.array for c in sources)), op))]
    if splats and isinstance(op, (Broadcast, Reshape, Transpose, Slice, Reverse)):
        return [rewriter.one(constant(sources[0].array, op))]
    if max(v.tile.size for v in (*op.operands, op.result)) > _LARGEST:
        return None
    return [rewriter.one(constant(op.evaluate(*(c.evaluate() for c in sources)), op))]
