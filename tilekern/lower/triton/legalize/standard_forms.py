"""Bring dots, sorts, top-k and gathers on padded tiles to the forms that Triton has.

Needs: a padded Func (`pad_tiles`). Gives: a Func with the same outputs, in which

    dot(x, y) {contract, batch}     → reshape(dot(x', y'))        x'[B, M, K], y'[B, K, N], without B if that is 1
    dot of a short contraction      → padded with zeros to the shortest contraction of tensor cores
    sort x, top_k x along dim       → sort, top_k of [rows, lanes]
    take of more lanes than x has   → take from the flat tile: if x has fewer lanes there than a warp has threads,
                                      Triton 3.6 does not compile the gather ("isWarpLocal" fails; 3.9 does)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.make import Make
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.lower.rewrite.matrices import as_matrix, dims_of, is_of_matrices, product


def standard_forms(func: Func) -> Func:
    """Apply the rewrites above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    make = Make(rewriter, op)
    if isinstance(op, Dot) and not _is_standard(op):
        return [_dot(make, op)]
    if isinstance(op, Take):
        x, indices = op.operands
        return [_taken(make, x, indices, op.dim)]
    if isinstance(op, Sort | TopK) and (len(op.result.tile.shape), op.dim) != (2, 1):
        return [_of_rows(make, op)]
    return None


def least_depth(op: Dot) -> int:
    """The shortest contraction of `tl.dot` in all supported versions of Triton: 256 bits, at least 16 elements."""
    return max(16, 32 // op.operands[0].tile.dtype.itemsize)


def _is_standard(op: Dot) -> bool:
    batch = len(op.batch[0])
    in_order = is_of_matrices(op) and op.contract == ((batch + 1,), (batch,))
    return in_order and op.operands[0].tile.shape[-1] >= least_depth(op)


def _dot(make: Make, op: Dot) -> Value:
    left = as_matrix(make, op.operands[0], dims_of(op, 0), contracted_last=True, drop_one=True)
    right = as_matrix(make, op.operands[1], dims_of(op, 1), contracted_last=False, drop_one=True)
    front = len(left.tile.shape) - 2
    left, right = _deepened(make, op, left, front + 1), _deepened(make, op, right, front)
    dot = product(op, left, right)
    return make.reshape(make.again(dot, *dot.operands), op.result.tile.shape)


def _deepened(make: Make, op: Dot, x: Value, dim: int) -> Value:
    """The operand, padded with zeros along `dim` to the least depth."""
    shape, least = x.tile.shape, least_depth(op)
    if shape[dim] >= least:
        return x
    longer = (*shape[:dim], least, *shape[dim + 1 :])
    lane = make.lanes((least,), 0)
    place = make.along(make.of("min", lane, shape[dim] - 1), longer, dim)
    inside = make.along(make.of("lt", lane, shape[dim]), longer, dim)
    more = _taken(make, x, place, dim)
    return make.select(inside, more, make.constant(np.zeros((), x.tile.dtype), more.tile))


def _taken(make: Make, x: Value, indices: Value, dim: int) -> Value:
    shape, source = indices.tile.shape, x.tile.shape
    if len(source) == 1 or source[dim] >= min(shape[dim], 32):
        return make.take(x, indices, dim)
    place = make.number(0, indices.tile)
    for d in range(len(shape)):
        coordinate = indices if d == dim else make.lanes(shape, d)
        place = make.of("add", place, make.of("mul", coordinate, prod(source[d + 1 :])))
    flat = make.take(make.reshape(x, (prod(source),)), make.reshape(place, (prod(shape),)), 0)
    return make.reshape(flat, shape)


def _of_rows(make: Make, op: Sort | TopK) -> Value:
    shape = op.operands[0].tile.shape
    order = (*(d for d in range(len(shape)) if d != op.dim), op.dim)
    lines = [make.transpose(x, order) for x in op.operands]
    front = lines[0].tile.shape[:-1]
    flat = tuple(make.reshape(x, (prod(front), shape[op.dim])) for x in lines)
    result = make.again(replace(op, operands=flat, dim=1), *flat)
    back = tuple(order.index(d) for d in range(len(shape)))
    return make.transpose(make.reshape(result, (*front, result.tile.shape[1])), back)
