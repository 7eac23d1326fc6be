"""Bring dots, sorts and top-k on padded tiles to the one form that Triton has for them.

Needs: a padded Func (`pad_tiles`). Gives: a Func with the same outputs, in which

    dot(x, y) {contract, batch}     → reshape(dot(x', y'))        x'[B, M, K], y'[B, K, N], or without B if that is 1
    dot of a short contraction      → with zeros up to the least number of products that tensor cores add up
    sort x, top_k x along dim       → of [rows, lanes]
    take more than there is         → from the flat tile: of a tile of fewer lines than a warp has threads, Triton 3.6
                                      does not compile a gather of more of them ("isWarpLocal" fails; 3.9 does)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.rewrite import Rewriter
from tilekern.lower.rewrite.make import Make


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
    """The shortest contraction that `tl.dot` takes on all versions of Triton we support: 256 bits, at least 16."""
    return max(16, 32 // op.operands[0].tile.dtype.itemsize)


def _is_standard(op: Dot) -> bool:
    batch = len(op.batch[0])
    ranks = {len(x.tile.shape) for x in op.operands}
    places = (batch + 1,), (batch,)
    front = tuple(range(batch))
    depth = op.operands[0].tile.shape[-1] if op.operands[0].tile.shape else 0
    fits = batch <= 1 and ranks == {batch + 2} and op.contract == places and op.batch == (front, front)
    return fits and depth >= least_depth(op)


def _dot(make: Make, op: Dot) -> Value:
    x, y = op.operands
    size = prod(x.tile.shape[d] for d in op.batch[0])
    depth = prod(x.tile.shape[d] for d in op.contract[0])
    rows = prod(x.tile.shape[d] for d in op.free(0))
    columns = prod(y.tile.shape[d] for d in op.free(1))
    front = (size,) if size > 1 else ()
    left = make.transpose(x, (*op.batch[0], *op.free(0), *op.contract[0]))
    right = make.transpose(y, (*op.batch[1], *op.contract[1], *op.free(1)))
    left = _deepened(make, op, make.reshape(left, (*front, rows, depth)), len(front) + 1)
    right = _deepened(make, op, make.reshape(right, (*front, depth, columns)), len(front))
    at = len(front)
    batch = tuple(range(at))
    product = make.add(Dot, left, right, contract=((at + 1,), (at,)), batch=(batch, batch), precision=op.precision)
    return make.reshape(product, op.result.tile.shape)


def _deepened(make: Make, op: Dot, x: Value, dim: int) -> Value:
    """Zeros behind the elements along `dim`, up to the least depth."""
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
    found = make.again(replace(op, operands=flat, dim=1), *flat)
    back = tuple(order.index(d) for d in range(len(shape)))
    return make.transpose(make.reshape(found, (*front, found.tile.shape[1])), back)
