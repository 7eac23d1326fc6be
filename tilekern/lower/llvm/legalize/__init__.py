"""Block IR → block IR of the ops that the emitter has; the interpreter runs the result as well.

functions     of bools by `and`, `or`, ...; of floats narrower than float32 in float32, rounded once
casts         from or to 8-bit floats by their bits; to narrow floats only from float32
reductions    along one dim, of at least 32 bits or bool
arg-reduces, sorts, top-k: of integer keys; a top-k has keys of 32 bits
dots          of [B, M, K] and [B, K, N] or [B, N, K] (no B where there is no batch), of the dtypes of `dots.KINDS`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Literal

import ml_dtypes
import numpy as np

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.compute import Convert, Dot, Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota, Transpose
from tilekern.ir.types import BF16, BOOL, F16, F32, F64, I32, DType, is_float8, kind_of
from tilekern.ir.verify import verify
from tilekern.lower.llvm.gemm import gemv
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.expand_bits import expand_bits
from tilekern.lower.rewrite.expand_order import expand_sort, expand_top_k, picks_places
from tilekern.lower.rewrite.logical import expand_logical
from tilekern.lower.rewrite.make import Make
from tilekern.lower.rewrite.narrow_floats import decoded, encoded, rounded
from tilekern.lower.rewrite.rounding import to_float32
from tilekern.lower.rewrite.sort_key import sort_key
from tilekern.lower.rewrite.without_empty import without_empty
from tilekern.lower.sizes import refuse_large
from tilekern.passes import pipeline
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce
from tilekern.passes.hoist_invariants import hoist_invariants
from tilekern.passes.split_loops import split_loops

I16, U8 = np.dtype(np.int16), np.dtype(np.uint8)


def legalize(func: Func, machine: Machine) -> Func:
    """The Func in the form above.

    Args:
      func: went through the pipeline of passes.
      machine: what it shall run on.

    Raises:
      TargetError: the Func does something that the backend does not have.
    """
    refuse_large(func, "the backend for CPUs")
    func = pipeline.run(split_loops(func))
    func = Rewriter(partial(_rule, machine)).run(without_empty(func))
    func = Rewriter(_only_casts).run(func)  # those that the rewrites above have made
    for improve in (canonicalize, cse, hoist_invariants, cse, dce):
        func = improve(func)
    verify(func)
    return func


def _rule(machine: Machine, op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    match op:
        case Print() | Assert():
            with source.at(op.loc):
                raise TargetError(
                    f"cpu:llvm has no {op.name}",
                    expected="a kernel that neither prints nor asserts",
                    got=op.name,
                    fix='call with target="cpu:xla" while you look for the fault',
                )
        case Convert():
            found = _convert(make, op.operands[0], op.dtype)
        case Iota() if op.dtype != I32:
            found = _cast(make, make.lanes(op.shape, op.dim), op.dtype)
        case Elementwise():
            found = _elementwise(make, op)
        case Reduce():
            found = _reduce(make, op)
        case Scan() if _is_narrow(op.result.tile.dtype):
            found = _cast(make, make.again(op, _cast(make, op.operands[0], F32)), op.result.tile.dtype)
        case ArgReduce():
            found = make.add(ArgReduce, _key(make, op), extreme=op.extreme, dim=op.dim)
        case Sort() | TopK() if not op.result.tile.size:
            found = make.number(0, op.result.tile)
        case Sort():
            found = None if _is_expanded(op, rewriter) else expand_sort(make, op, rewriter)
        case TopK() if op.operands[0].tile.dtype.itemsize == 8:
            found = expand_top_k(make, op)
        case TopK():
            found = make.add(TopK, sort_key(make, op.operands[0]), dim=op.dim, k=op.k)
        case Dot():
            found = _dot(make, op, machine, rewriter)
        case _:
            return None
    return None if found is None else [found]


def _only_casts(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    found = _convert(Make(rewriter, op), op.operands[0], op.dtype) if isinstance(op, Convert) else None
    return None if found is None else [found]


def _is_narrow(dtype: DType) -> bool:
    return kind_of(dtype) == "float" and dtype.itemsize < 4


# --- casts ---------------------------------------------------------------------------------------------------------


def _cast(make: Make, x: Value, dtype: DType) -> Value:
    """A cast in legal form."""
    if x.tile.dtype == dtype:
        return x
    return _convert(make, x, dtype) or make.convert(x, dtype)


def _convert(make: Make, x: Value, dtype: DType) -> Value | None:
    """What stands for a cast, None if it is legal."""
    source = x.tile.dtype
    if source == dtype:
        return x
    if is_float8(source):
        return _cast(make, decoded(make, make.convert(make.bitcast(x, U8), I32), source), dtype)
    if is_float8(dtype):
        single = rounded(make, to_float32(make, x), dtype)
        return make.bitcast(make.convert(encoded(make, single, dtype), U8), dtype)
    if dtype in (BF16, F16) and source != F32:
        return make.convert(to_float32(make, x), dtype)
    if source in (BF16, F16) and dtype != F32:
        return _cast(make, make.convert(x, F32), dtype)
    return None


# --- elementwise ---------------------------------------------------------------------------------------------------


def _elementwise(make: Make, op: Elementwise) -> Value | None:
    dtype, result = op.operands[0].tile.dtype, op.result.tile.dtype
    if dtype == BOOL:
        return expand_logical(make, op, lambda x: make.convert(x, I32))
    if op.function == "nextafter" or (op.function == "sign" and kind_of(dtype) != "float"):
        return expand_bits(make, op)
    if not _is_narrow(dtype):
        return None
    wide = make.of(op.function, *(_cast(make, x, F32) for x in op.operands))
    return wide if result == BOOL else _cast(make, wide, result)


# --- along a dim ---------------------------------------------------------------------------------------------------


def _reduce(make: Make, op: Reduce) -> Value | None:
    """One dim after the other; narrow floats in float32, bools by `and` and `or`."""
    (x,) = op.operands
    dtype = x.tile.dtype
    monoid = {"max": "or", "min": "and"}.get(op.monoid, op.monoid) if dtype == BOOL else op.monoid
    if len(op.dims) == 1 and monoid == op.monoid and not _is_narrow(dtype):
        return None
    total = _cast(make, x, F32) if _is_narrow(dtype) else x
    for dim in sorted(op.dims, reverse=True):
        total = make.reduce(total, monoid, dim)
    return _cast(make, total, dtype)


def _key(make: Make, op: ArgReduce) -> Value:
    """Integers whose order is that of the elements, but that NaN comes first."""
    (x,) = op.operands
    key = sort_key(make, x)
    if op.extreme == "max" or kind_of(x.tile.dtype) != "float":
        return key
    least = int(ml_dtypes.iinfo(key.tile.dtype).min)
    wide = _cast(make, x, F32) if _is_narrow(x.tile.dtype) else x
    return make.select(make.of("ne", wide, wide), least, key)


def _is_expanded(op: Sort, rewriter: Rewriter) -> bool:
    """Whether a sort of integer keys finds positions."""
    keys = all(kind_of(x.tile.dtype) in ("signed", "unsigned") for x in op.operands)
    return keys and op.pick == op.num_keys == len(op.operands) - 1 and picks_places(op, rewriter)


# --- dots ----------------------------------------------------------------------------------------------------------


def unit(dtype: DType, precision: str, machine: Machine, rows: int) -> DType:
    """The dtype in which operands are multiplied; pairs of neighbours have to be copied, which few rows do not pay."""
    if kind_of(dtype) != "float":
        fits = dtype.itemsize <= 2 and dtype != np.dtype(np.uint16)
        return I16 if rows > gemv.ROWS and machine.has_pairs and fits else I32
    if dtype == F64:
        return F64
    halved = dtype == BF16 or (dtype == F32 and precision == "bf16")
    return BF16 if rows > gemv.ROWS and halved and machine.has_bfloat16 else F32


def _dot(make: Make, op: Dot, machine: Machine, rewriter: Rewriter) -> Value | None:
    rows, columns = (prod(op.operands[side].tile.shape[d] for d in op.free(side)) for side in (0, 1))
    if columns == 1 and rows > 1:
        return _turned(make, op, machine, rewriter)
    dtype = unit(op.operands[0].tile.dtype, op.precision, machine, rows)
    moved = any(isinstance(rewriter.definition(x), Transpose) for x in op.operands)
    if is_canonical(op) and op.operands[0].tile.dtype == dtype and not moved:
        return None
    (left, over_left), (right, over_right) = (_side(make, op, side, dtype, rewriter) for side in (0, 1))
    batch = ((0,), (0,)) if op.batch[0] else ((), ())
    found = make.add(Dot, left, right, contract=((over_left,), (over_right,)), batch=batch)
    return make.reshape(found, op.result.tile.shape)


def _turned(make: Make, op: Dot, machine: Machine, rewriter: Rewriter) -> Value:
    """A product with one column as one with one row; their elements lie alike."""
    (left, right), (over_left, over_right), (batch_left, batch_right) = op.operands, op.contract, op.batch
    other = Dot(
        operands=(right, left),
        contract=(over_right, over_left),
        batch=(batch_right, batch_left),
        precision=op.precision,
        loc=op.loc,
    )
    (found,) = rewriter.visit(other)
    return make.reshape(found, op.result.tile.shape)


def is_canonical(op: Dot) -> bool:
    """Whether a dot is of matrices, or of stacks of matrices."""
    stacked = op.batch == ((0,), (0,))
    ranks = {len(x.tile.shape) for x in op.operands}
    return ranks == {2 + stacked} and (stacked or op.batch == ((), ())) and len(op.contract[0]) == 1


def _side(make: Make, op: Dot, side: Literal[0, 1], dtype: DType, rewriter: Rewriter) -> tuple[Value, int]:
    """One operand as [B, free, contracted] or [B, contracted, free], whichever it is already; the contracted dim."""
    x = op.operands[side]
    groups = [op.batch[side], op.free(side), op.contract[side]]
    while isinstance(moved := rewriter.definition(x), Transpose):
        x = moved.operands[0]
        groups = [tuple(moved.permutation[d] for d in group) for group in groups]
    batches, free, contract = groups
    lengths = [prod(x.tile.shape[d] for d in group) for group in groups]
    first = 1 if batches else 0
    inner_first = bool(free) and (*batches, *contract, *free) == tuple(range(len(x.tile.shape)))
    order, sizes = (*batches, *free, *contract), lengths[1:]
    if inner_first:
        order, sizes = (*batches, *contract, *free), lengths[:0:-1]
    matrix = make.reshape(make.transpose(x, order), (*lengths[:first], *sizes))
    return _cast(make, matrix, dtype), first + (not inner_first)
