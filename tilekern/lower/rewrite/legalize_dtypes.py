"""Compute in the dtypes that a target has (`Capabilities`), and round once to the dtypes that the program names.

Needs: a verified Func whose ops on bits are expanded (`expand_bits`). Gives: a Func with the same outputs, in which

    casts           are casts of the target: see `casts`
    functions       of narrow floats and integers are computed in float32 and int32, unless the target has them;
                    bools have `and`, `or`, `xor` and `not`, for comparisons by order they become int32
    reductions      and scans are in float32 or int32 where the target has no narrower reductions; arg-reductions, too
    selects         between 8-bit floats are between their bits, where the target needs it
    iota            is of int32

Float32 has more than twice the digits of narrower floats, so a sum, a product, a quotient or a root that is computed in
float32 and rounded again has the bits of the exact result rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tilekern.ir.compute import Convert, Monoid, Reduce, Select, on_bools
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, Scan
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota
from tilekern.ir.types import BOOL, I32, is_float8
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.lower.rewrite.casts import cast
from tilekern.lower.rewrite.logical import expand_logical

_ORDER: dict[Monoid, Monoid] = {"or": "max", "and": "min"}


def legalize_dtypes(func: Func, has: Capabilities) -> Func:
    """Apply the rewrites above."""
    return Rewriter(partial(_rule, has)).run(func)


def _rule(has: Capabilities, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Convert() if not _has_cast(op, has):
            replacement = cast(make, op.operands[0], op.dtype, has)
        case Iota() if op.dtype != I32:
            replacement = cast(make, make.add(Iota, shape=op.shape, dtype=I32, dim=op.dim), op.dtype, has)
        case Elementwise():
            replacement = _elementwise(make, op, has)
        case Reduce():
            replacement = _reduce(make, op, has)
        case Scan() | ArgReduce():
            replacement = _along(make, op, has)
        case Select() if is_float8(op.result.tile.dtype) and not has.selects_float8:
            replacement = make.select(*op.operands)
        case _:
            replacement = None
    return None if replacement is None else [replacement]


def _has_cast(op: Convert, has: Capabilities) -> bool:
    source = op.operands[0].tile.dtype
    return source != op.dtype and has.casts(source, op.dtype)


def _elementwise(make: Make, op: Elementwise, has: Capabilities) -> Value | None:
    dtype = op.operands[0].tile.dtype
    if dtype == BOOL:
        return expand_logical(make, op, lambda x: cast(make, x, I32, has))
    wide = has.computed_in(op.function, dtype)
    if wide == dtype:
        return None
    wide_result = make.of(op.function, *(cast(make, x, wide, has) for x in op.operands))
    return cast(make, wide_result, op.result.tile.dtype, has)


def _reduce(make: Make, op: Reduce, has: Capabilities) -> Value | None:
    """A reduction in the dtype and by the monoid of the target, dim after dim; None if the target has it."""
    (x,) = op.operands
    dtype = x.tile.dtype
    wide, monoid = has.reduced_in(dtype), op.monoid
    if dtype == BOOL:
        monoid = _ORDER.get(monoid, monoid) if has.ordered_bools else on_bools(monoid)
    if (wide, monoid) == (dtype, op.monoid) and (len(op.dims) == 1 or has.reduces_dims):
        return None
    total = cast(make, x, wide, has)
    if has.reduces_dims:
        total = make.add(Reduce, total, monoid=monoid, dims=op.dims)
    else:
        for dim in sorted(op.dims, reverse=True):
            total = make.reduce(total, monoid, dim)
    return cast(make, total, dtype, has)


def _along(make: Make, op: Scan | ArgReduce, has: Capabilities) -> Value | None:
    (x,) = op.operands
    wide = has.reduced_in(x.tile.dtype)
    if wide == x.tile.dtype:
        return None
    return cast(make, make.again(op, cast(make, x, wide, has)), op.result.tile.dtype, has)
