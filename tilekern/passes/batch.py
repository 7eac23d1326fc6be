"""`jax.vmap` as a rewrite of the IR: the batch becomes a parallel axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilekern import source
from tilekern.errors import NotBatchableError
from tilekern.ir.core import Axis, Block, Func, Op, Value, index_value
from tilekern.ir.memory import Access, Dim, MemoryOp, Position, Term
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import RefType


def batch(func: Func, size: int, dims: Sequence[int | None]) -> Func:
    """`size` runs of `func` in one grid.

        func @f(%x: ref<f32[4], in>, %o: ref<f32[4], out>) { grid %i in i[4 by 2]   load %x[2*%i +: 2] ... }
      →
        func @f(%x: ref<f32[9, 4], in>, %o: ref<f32[9, 4], out>) {
          grid %batch in batch[9], %i in i[4 by 2]   load %x[%batch!, 2*%i +: 2] ... }

    Args:
      func: any Func.
      size: the number of runs, the extent of the new axis, which is the outermost.
      dims: for each input of `func`, the dim of the new input that counts the runs, None if all runs share the input;
        not None for an in-out input, and 0 for an input that an access sees in another shape. Outputs: always dim 0.
    """
    index = index_value("batch")
    input_dims = dict(zip(func.inputs, dims, strict=True))
    place = {p: input_dims.get(p, 0) for p in func.params}
    params = {p: _stacked(p, size, place[p]) for p in func.params}

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if not isinstance(op, MemoryOp):
            return None
        dim = place[op.ref]
        operands = (params[op.ref], *op.operands[1:])
        if dim is None:
            return rewriter.add(op.copy(operands))
        end = op.leading + op.access.arity
        entry = Dim("index", Position((Term(op.access.arity, 1),)), in_bounds=True)
        extents = op.access.extents
        if extents is not None and dim:
            raise _not_in_front(op, dim)
        access = Access(
            (*op.access.dims[:dim], entry, *op.access.dims[dim:]), None if extents is None else (size, *extents)
        )
        return rewriter.add(replace(op, operands=(*operands[:end], index, *operands[end:]), access=access))

    body = Rewriter(rule).run(func).body
    return replace(
        func,
        params=tuple(params.values()),
        axes=(Axis("batch", size), *func.axes),
        body=Block((index, *body.args), body.ops, body.results),
    )


def _not_in_front(op: MemoryOp, dim: int) -> NotBatchableError:
    with source.at(op.loc):
        return NotBatchableError(
            f"{op.ref.name} is reshaped in the kernel, but stacked along dim {dim}",
            expected="runs that are stacked along dim 0",
            got=f"in_axes={dim} for {op.ref.name}, which is seen as {list(op.extents)}",
            fix="use in_axes=0, or move the dim to the front before",
        )


def places(func: Func, dims: Sequence[int | None]) -> tuple[int | None, ...]:
    """The dims that `batch` takes, for inputs whose dims `dims` count the runs: 0 where it takes no other dim."""
    accesses = (op for op in func.walk() if isinstance(op, MemoryOp))
    reshaped = {op.ref for op in accesses if op.access.extents is not None}
    # Every run writes to an in-out operand of its own.
    return tuple(
        0 if param.ref.role == "inout" or (dim and param in reshaped) else dim
        for param, dim in zip(func.inputs, dims, strict=True)
    )


def _stacked(param: Value, size: int, dim: int | None) -> Value:
    if dim is None:
        return param
    shape = param.ref.shape
    return Value(RefType((*shape[:dim], size, *shape[dim:]), param.ref.dtype, param.ref.role), param.name)
