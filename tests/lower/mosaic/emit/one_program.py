"""Legal Funcs of one program and no loops as one `pallas_call`: what tests the functions of ops alone.

Scalars are loaded from scalar memory; vectors are rows, [1, n].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from tilekern.ir.compute import Constant, Reduce
from tilekern.ir.control import Switch
from tilekern.ir.core import Array, Block, Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Broadcast, Iota, Reshape
from tilekern.ir.types import DType, RefType, kind_of
from tilekern.lower.mosaic.emit.ops import function_of

SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


def run(func: Func, *arrays: Array, interpret: bool = True) -> tuple[Any, ...]:
    """The outputs of a legal Func that loads and stores whole arrays."""
    constants = [op for op in func.walk() if isinstance(op, Constant) and op.array.size > 1]
    given = [*arrays, *(op.array for op in constants)]
    inputs = [*(p.ref for p in func.inputs), *(RefType(op.shape, op.array.dtype, "in") for op in constants)]
    outputs = [p.ref for p in func.outputs]

    def body(*refs: Any) -> None:
        count = len(func.inputs)
        memory = dict(zip((*func.inputs, *constants), refs[: len(inputs)], strict=True))
        memory |= dict(zip(func.outputs, refs[len(inputs) :], strict=True))
        values: dict[Value, Any] = {}
        assert count <= len(refs)
        for op in func.body.ops:
            _run(op, memory, values)

    operands = [jnp.asarray(x).astype(_scalar(x.dtype) if not ref.shape else x.dtype).reshape(_held(ref))
                for x, ref in zip(given, inputs, strict=True)]  # fmt: skip
    results = pl.pallas_call(
        body,
        in_specs=[SMEM if not ref.shape else pl.BlockSpec() for ref in inputs],
        out_shape=[jax.ShapeDtypeStruct(_held(ref), ref.dtype) for ref in outputs],
        interpret=interpret,
    )(*operands)
    return tuple(x[:1, :1].reshape(ref.shape) if not ref.shape else x.reshape(ref.shape)
                 for x, ref in zip(results, outputs, strict=True))  # fmt: skip


def _scalar(dtype: DType) -> Any:
    """Scalar memory has 32 bits."""
    return {"float": np.float32, "unsigned": np.uint32}.get(kind_of(dtype), np.int32)


def _held(ref: RefType) -> tuple[int, ...]:
    """The shape of an array in memory."""
    return (1, 1) if not ref.shape else (1, *ref.shape) if len(ref.shape) == 1 else ref.shape


def _run(op: Op, memory: dict[Any, Any], values: dict[Value, Any]) -> None:
    if isinstance(op, Store):
        ref, value = memory[op.ref], values[op.value]
        ref[...] = jnp.full(ref.shape, value, ref.dtype) if not op.value.tile.shape else value
        return
    if isinstance(op, Switch):
        branches = [partial(_branch, region, memory, values) for region in op.regions]
        values.update(zip(op.results, jax.lax.switch(values[op.operands[0]], branches), strict=True))
        return
    values[op.result] = _value(op, memory, *(values[v] for v in op.operands if v in values))


def _branch(region: Block, memory: dict[Any, Any], values: dict[Value, Any]) -> tuple[Any, ...]:
    inner = dict(values)
    for op in region.ops:
        _run(op, memory, inner)
    return tuple(inner[v] for v in region.results)


def _value(op: Op, memory: dict[Any, Any], *operands: Any) -> Any:
    if op in memory:
        return memory[op][...]
    if isinstance(op, Load):
        ref, tile = memory[op.ref], op.result.tile
        if tile.shape:
            return ref[...]
        number = ref[0, 0]
        return number != 0 if tile.dtype == np.bool_ else number.astype(tile.dtype)
    return _rule(op)(*operands)


def _rule(op: Op) -> Callable[..., Any]:
    """The function of an op, whose vectors are rows."""
    before = op.operands[0].tile.shape if op.operands else ()
    match op:
        case Broadcast(shape=(_,)):
            return partial(jnp.full, (1, *op.shape))
        case Broadcast() if len(before) == 1:
            return partial(_repeated, op)
        case Reshape() if len(before) == 1:
            return (lambda x: x) if op.shape != (*before, 1) else _turned
        case Reshape(shape=(_,)):
            return (lambda x: x) if before[0] == 1 else _turned
        case Reduce() if len(op.result.tile.shape) == 1:
            function = function_of(op)
            column = op.dims == (1,)
            return lambda x: _turned(function(x, keepdims=True)) if column else function(x, keepdims=True)
        case Iota(shape=(n,)):
            return lambda: jax.lax.broadcasted_iota(op.dtype, (1, n), 1)
        case Constant(shape=(n,)):
            return lambda: jnp.full((1, n), op.array.reshape(-1)[0], op.array.dtype)
        case _:
            return function_of(op)


def _repeated(op: Broadcast, row: Any) -> Any:
    (dim,) = op.dims
    rank = len(op.shape)
    if dim == rank - 1:
        return jnp.broadcast_to(row.reshape((1,) * (rank - 1) + row.shape[1:]), op.shape)
    column = _turned(row)
    shape = [1] * rank
    shape[dim] = op.shape[dim]
    shape[-1] = 1
    return jnp.broadcast_to(column.reshape(shape), op.shape)


def _turned(x: Any) -> Any:
    return x.T
