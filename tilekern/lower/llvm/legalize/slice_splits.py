"""Slices of split dims, as slices of the whole dims, which need no tile in memory.

    reshape(x[A B], [A, B])[a:, n]  →  reshape(x[a B + n :: B])        one place of the inner part is sliced

A tile of keys and values that are interleaved by head is one such tile: the heads are split into (head, key or value),
and one half is sliced. The slice reads elements at a constant distance; the reshape would copy the tile.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Reshape, Slice


def slice_splits(func: Func) -> Func:
    """Apply the rewrite above."""
    return Rewriter(_rule).run(func)


def _rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
    if not isinstance(op, Slice) or not isinstance(split := rewriter.definition(op.operands[0]), Reshape):
        return None
    (x,) = split.operands
    dim = _split_dim(x.tile.shape, split.shape)
    if dim is None or op.stop[dim + 1] - op.start[dim + 1] != 1:
        return None
    inner, make = split.shape[dim + 1], Make(rewriter, op)
    before, after = slice(None, dim), slice(dim + 2, None)
    count = op.result.tile.shape[dim]
    first = op.start[dim] * inner + op.start[dim + 1]
    stride = op.stride[dim] * inner
    of_whole = make.add(
        Slice,
        x,
        start=(*op.start[before], first, *op.start[after]),
        stop=(*op.stop[before], first + (count - 1) * stride + 1, *op.stop[after]),
        stride=(*op.stride[before], stride, *op.stride[after]),
    )
    return [make.reshape(of_whole, op.result.tile.shape)]


def _split_dim(whole: tuple[int, ...], split: tuple[int, ...]) -> int | None:
    """The dim that a reshape splits into two, if it changes nothing else."""
    if len(split) != len(whole) + 1:
        return None
    dims = (d for d in range(len(whole)) if (*whole[:d], split[d], split[d + 1], *whole[d + 1 :]) == split)
    return next((d for d in dims if split[d] * split[d + 1] == whole[d]), None)
