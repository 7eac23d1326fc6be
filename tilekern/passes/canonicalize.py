"""Bring a Func to its simplest form: each rewrite replaces an op by fewer or simpler ops.

Needs: a verified Func. Gives: no op of the left-hand sides below is left where the rule saw it.

    f(constants)                          → a constant, if it is a splat or has at most 4096 elements
    constant of equal elements            → splat constant
    x + 0, x - 0, x * 1, x / 1            → x            (of floats: x + -0.0 and x - 0.0, exact for x = ±0 too)
    x and ones, x or 0, x xor 0           → x
    x and 0, x or ones                    → 0, ones      (`ones`: all bits set, true)
    x or not x, x or not (x and y)        → true         (of bools)
    not (not x)                           → x
    select(true, x, y), select(p, x, x)   → x
    select(false, x, y)                   → y
    convert x to its own dtype            → x
    convert (convert x to a wider float) to x's own dtype → x
    broadcast, reshape, transpose, slice, pad that changes nothing → its operand
    slice of elements of one operand of a concatenation → slice of this operand
    broadcast (broadcast x), reshape (reshape x), transpose (transpose x) → one op on x
    switch of constant index              → the region of this index
    fold over no tile (constant bounds)   → its initial carries
    fold or while carry that never changes → its initial value, inside and behind the loop
    load, store at computed positions     → the arithmetic becomes part of the access: `canonicalize_access`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np

from tilekern.ir.analysis.ranges import Interval, analyze, fold_index, update
from tilekern.ir.carries import carries, with_carries
from tilekern.ir.compute import Constant, Convert, Select, splat
from tilekern.ir.constants import constant, fold_constants, integer_of, splat_of
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import MemoryOp
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Concatenate, Pad, Reshape, Slice, Transpose
from tilekern.ir.types import BOOL, DType, kind_of
from tilekern.passes.canonicalize_access import Absorber

_Result = Sequence[Value] | None


def canonicalize(func: Func) -> Func:
    """Apply the rewrites above, once from top to bottom."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> _Result:
        update(ranges, op)
        if isinstance(op, MemoryOp):
            return absorber.rule(op, rewriter)
        results = fold_constants(op, rewriter)
        if results is None and type(op) in _RULES:
            results = _RULES[type(op)](op, rewriter)
        return results

    rewriter = Rewriter(rule)
    absorber = Absorber(func.body.args, rewriter.definition, ranges)
    return rewriter.run(func)


# --- values --------------------------------------------------------------------------------------------------------


def _uniform(op: Constant, rewriter: Rewriter) -> _Result:
    """Constant of equal elements → splat constant."""
    splat = constant(op.array, op)
    return [rewriter.one(splat)] if splat.array.shape != op.array.shape else None


# function: (the right operand that leaves the left operand as it is, True if it may also stand left). -1 is all bits.
_NEUTRAL: dict[str, tuple[float, bool]] = {
    "add": (-0.0, True),
    "sub": (0.0, False),
    "mul": (1, True),
    "div": (1, False),
    "and": (-1, True),
    "or": (0, True),
    "xor": (0, True),
}
_ABSORBING: dict[str, float] = {"and": 0, "or": -1}


def _elementwise(op: Elementwise, rewriter: Rewriter) -> _Result:
    """`x + 0` → x and its kin; `x and 0` → 0; `x or not x` → true; `not (not x)` → x."""
    if op.function == "not":
        inner = rewriter.definition(op.operands[0])
        return inner.operands if isinstance(inner, Elementwise) and inner.function == "not" else None
    if op.function not in _NEUTRAL:
        return None
    neutral, commutes = _NEUTRAL[op.function]
    x, y = op.operands
    for a, b in ((x, y), (y, x)) if commutes else ((x, y),):
        if _is_splat(b, neutral, rewriter):
            return [a]
        if op.function in _ABSORBING and _is_splat(b, _ABSORBING[op.function], rewriter):
            return [b]
        if op.function == "or" and x.tile.dtype == BOOL and _excludes(a, b, rewriter):
            return [rewriter.one(splat(True, x.tile, hint=op.hint, loc=op.loc))]
    return None


def _excludes(x: Value, negation: Value, rewriter: Rewriter) -> bool:
    """True if `negation` is `not y`, and y never holds without x."""
    negated = rewriter.definition(negation)
    if not (isinstance(negated, Elementwise) and negated.function == "not"):
        return False
    pending = list(negated.operands)
    while pending:
        y = pending.pop()
        if y is x:
            return True
        op = rewriter.definition(y)
        if isinstance(op, Elementwise) and op.function == "and":
            pending += op.operands
    return False


def _is_splat(value: Value, number: float, rewriter: Rewriter) -> bool:
    """True if every lane has the bits of `number`: +0.0 is not -0.0."""
    array = splat_of(value, rewriter)
    return array is not None and array.tobytes() == np.asarray(number).astype(array.dtype).tobytes()


def _select(op: Select, rewriter: Rewriter) -> _Result:
    """`select(true, x, y)` → x; `select(false, x, y)` → y; `select(p, x, x)` → x."""
    predicate, on_true, on_false = op.operands
    holds = splat_of(predicate, rewriter)
    if on_true is on_false or (holds is not None and holds):
        return [on_true]
    return [on_false] if holds is not None else None


def _convert(op: Convert, rewriter: Rewriter) -> _Result:
    """Convert x to its own dtype → x, also after a convert to a float dtype that holds all numbers of x's."""
    (x,) = op.operands
    if x.tile.dtype == op.dtype:
        return [x]
    inner = rewriter.definition(x)
    if not isinstance(inner, Convert) or inner.operands[0].tile.dtype != op.dtype:
        return None
    return inner.operands if _holds(inner.dtype, op.dtype) else None


def _holds(wide: DType, narrow: DType) -> bool:
    """True if the float dtype `wide` has all numbers of the float dtype `narrow`."""
    if kind_of(wide) != "float" or kind_of(narrow) != "float":
        return False
    w, n = cast(Any, ml_dtypes.finfo(wide)), cast(Any, ml_dtypes.finfo(narrow))
    return w.nmant >= n.nmant and w.maxexp >= n.maxexp and w.minexp <= n.minexp


# --- shapes --------------------------------------------------------------------------------------------------------


def _broadcast(op: Broadcast, rewriter: Rewriter) -> _Result:
    """Broadcast to the same shape → x; broadcast of broadcast → broadcast."""
    (x,) = op.operands
    if x.tile.shape == op.shape:
        return [x]
    inner = rewriter.definition(x)
    if not isinstance(inner, Broadcast):
        return None
    dims = tuple(op.dims[d] for d in inner.dims)
    return rewriter.visit(Broadcast(operands=inner.operands, shape=op.shape, dims=dims, hint=op.hint, loc=op.loc))


def _reshape(op: Reshape, rewriter: Rewriter) -> _Result:
    """Reshape to the same shape → x; reshape of reshape → reshape."""
    (x,) = op.operands
    if x.tile.shape == op.shape:
        return [x]
    inner = rewriter.definition(x)
    return rewriter.visit(op.copy(inner.operands)) if isinstance(inner, Reshape) else None


def _transpose(op: Transpose, rewriter: Rewriter) -> _Result:
    """Transpose to the same order → x; transpose of transpose → transpose."""
    (x,) = op.operands
    if op.permutation == tuple(range(len(op.permutation))):
        return [x]
    inner = rewriter.definition(x)
    if not isinstance(inner, Transpose):
        return None
    permutation = tuple(inner.permutation[d] for d in op.permutation)
    return rewriter.visit(Transpose(operands=inner.operands, permutation=permutation, hint=op.hint, loc=op.loc))


def _slice(op: Slice, rewriter: Rewriter) -> _Result:
    """Slice of all elements → x; slice of elements of one operand of a concatenation → slice of this operand."""
    # Bounds lie inside the operand, so only the slice of all elements has its shape.
    if op.result.tile == op.operands[0].tile:
        return op.operands
    inner = rewriter.definition(op.operands[0])
    if not isinstance(inner, Concatenate) or not op.result.tile.shape[inner.dim]:
        return None
    d, begin = inner.dim, 0
    for part in inner.operands:
        end = begin + part.tile.shape[d]
        if begin <= op.start[d] and op.stop[d] <= end:
            start, stop = ((*b[:d], b[d] - begin, *b[d + 1 :]) for b in (op.start, op.stop))
            return rewriter.visit(replace(op, operands=(part,), start=start, stop=stop))
        begin = end
    return None


def _pad(op: Pad, rewriter: Rewriter) -> _Result:
    """Pad by nothing → x."""
    return None if any((*op.low, *op.high, *op.interior)) else op.operands[:1]


# --- control -------------------------------------------------------------------------------------------------------


def _switch(op: Switch, rewriter: Rewriter) -> _Result:
    """Switch of constant index → the region of this index."""
    index = integer_of(op.operands[0], rewriter)
    if index is None:
        return None
    return rewriter.inline(op.regions[max(0, min(index, len(op.regions) - 1))])


def _fold(op: Fold, rewriter: Rewriter) -> _Result:
    """Fold over no tile → its initial carries; any other fold as in `_loop`."""
    start, stop = (integer_of(v, rewriter) for v in (op.start, op.stop))
    bounds = (None if b is None else Interval(b, b) for b in (start, stop))
    return op.inits if fold_index(op, *bounds).empty else _loop(op, rewriter)


def _loop(op: Fold | While, rewriter: Rewriter) -> _Result:
    """A carry that never changes → its initial value, inside and behind the loop."""
    constant_carries = [c for c in carries(op) if c.yielded in (*c.args, c.init)]
    if not constant_carries:
        return None
    for carry in constant_carries:
        for arg in carry.args:
            rewriter.replace(arg, carry.init)
    changing = [c for c in carries(op) if c.yielded not in (*c.args, c.init)]
    changing_results = iter(rewriter.visit(with_carries(op, changing)))
    return [c.init if c.yielded in (*c.args, c.init) else next(changing_results) for c in carries(op)]


_RULES: dict[type[Op], Callable[[Any, Rewriter], _Result]] = {
    Constant: _uniform,
    Elementwise: _elementwise,
    Select: _select,
    Convert: _convert,
    Broadcast: _broadcast,
    Reshape: _reshape,
    Transpose: _transpose,
    Slice: _slice,
    Pad: _pad,
    Switch: _switch,
    Fold: _fold,
    While: _loop,
}
