"""Pure ops of legal block IR as Triton expressions.

A tile that is constant along a dim keeps size 1 there, because Triton broadcasts the operands of arithmetic. `whole`
broadcasts it to the full shape for ops that need that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Monoid, Reduce, Select
from tilekern.ir.core import Op
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.ordering import ArgReduce, Cumulative, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Iota, Reshape, Transpose
from tilekern.ir.types import BOOL, F32, F64, I32, DType, TileType, is_float8, kind_of
from tilekern.lower.triton.emit.sorts import sorting
from tilekern.lower.triton.emit.source_text import Expr, dtype_text, is_tight, literal, shape_text

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shift_left": "<<",
    "shift_right_logical": ">>", "shift_right_arithmetic": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip

# Functions of one float in `triton.language`.
_TRITON = ("exp", "exp2", "log", "log2", "sin", "cos", "rsqrt", "floor", "ceil", "erf", "abs")

LIBDEVICE = {
    "pow": "pow", "atan2": "atan2", "rem": "fmod", "round_even": "rint", "round_away": "round", "expm1": "expm1",
    "log1p": "log1p", "cbrt": "cbrt", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh",
    "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erfc": "erfc",
    "erf_inv": "erfinv", "lgamma": "lgamma",
}  # fmt: skip
"""Functions of float32 and float64 in libdevice, CUDA's library of mathematical functions; by their names there."""

_COMBINE: dict[Monoid | Cumulative, str] = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "logsumexp": "log_add_exp",
}


def constant(op: Constant) -> Expr:
    """The literal of a constant whose elements are all equal."""
    return Expr(literal(op.array), (), op.array)


def typed(x: Expr, dtype: DType) -> str:
    """The text of an expression that has `dtype` by itself; a bare literal would be an int32 or a float32."""
    return _full((), x, dtype) if x.number is not None else x.text


def whole(x: Expr, tile: TileType) -> str:
    """The text of an expression, broadcast to the full shape of its tile."""
    if x.number is not None:
        return _full(tile.shape, x, tile.dtype)
    return x.text if x.shape == tile.shape else f"tl.broadcast_to({x.text}, {shape_text(tile.shape)})"


def complete(x: Expr, tile: TileType) -> Expr:
    """The expression, broadcast to the full shape of its tile."""
    full = x.shape == tile.shape and x.number is None
    return x if full else Expr(whole(x, tile), tile.shape)


def _full(shape: tuple[int, ...], x: Expr, dtype: DType) -> str:
    """A tile of one number. Triton has no literals of 8-bit floats, so an 8-bit float is cast from its bits."""
    if x.number is not None and is_float8(dtype):
        bits = int(x.number.view(np.uint8))
        return f"tl.full({shape_text(shape)}, {bits}, tl.uint8).to({dtype_text(dtype)}, bitcast=True)"
    return f"tl.full({shape_text(shape)}, {x.text}, {dtype_text(dtype)})"


def pure(op: Op, operands: Sequence[Expr]) -> Expr:
    """The expression of an op of one result."""
    match op:
        case Elementwise():
            return _elementwise(op, operands)
        case Select():
            which, on_true, on_false = operands
            dtype = op.result.tile.dtype
            # A literal takes the dtype of the other operand, so one of the two must have a dtype of its own.
            left = typed(on_true, dtype) if on_false.number is not None or _is_inexact(on_true) else on_true.text
            right = typed(on_false, dtype) if _is_inexact(on_false) else on_false.text
            return Expr(f"tl.where({which.text}, {left}, {right})", _joint(operands))
        case Convert():
            return Expr(f"{_base(op, operands[0])}.to({dtype_text(op.dtype)})", operands[0].shape)
        case Bitcast():
            return Expr(f"{_base(op, operands[0])}.to({dtype_text(op.dtype)}, bitcast=True)", operands[0].shape)
        case Broadcast():
            return _broadcast(op, operands[0])
        case Iota():
            return _iota(op)
        case _:
            return _of_whole_tiles(op, [whole(x, v.tile) for x, v in zip(operands, op.operands, strict=True)])


def _base(op: Op, x: Expr) -> str:
    return typed(x, op.operands[0].tile.dtype) if x.number is not None else x.operand


def _joint(operands: Sequence[Expr]) -> tuple[int, ...]:
    """The shape of the operands after broadcasting."""
    shapes = [x.shape for x in operands if x.shape]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True)) if shapes else ()


# --- elementwise ---------------------------------------------------------------------------------------------------


def _elementwise(op: Elementwise, operands: Sequence[Expr]) -> Expr:
    dtype = op.operands[0].tile.dtype
    shape, function = _joint(operands), op.function
    if function in _OPERATORS:
        return Expr(_binary(_OPERATORS[function], operands, dtype), shape, tight=False)
    if function == "div" or (function == "rem" and kind_of(dtype) != "float"):
        symbol = "%" if function == "rem" else "/" if kind_of(dtype) == "float" else "//"
        return Expr(_binary(symbol, operands, dtype), shape, tight=False)
    texts = [typed(x, dtype) for x in operands]
    if function in ("max", "min"):
        # A literal is an int32 or a float32 by itself. Python would fold two literals.
        if dtype in (F32, I32) and any(x.number is None for x in operands):
            texts = [x.text for x in operands]
        return Expr(_extreme(function, texts, dtype), shape)
    if function in ("neg", "not", "logistic"):
        return Expr(_unary(function, operands[0], dtype), shape, tight=False)
    if function == "sign":
        x = texts[0]
        return Expr(f"tl.where({operands[0].operand} > 0, 1.0, tl.where({operands[0].operand} < 0, -1.0, {x}))", shape)
    if function == "sqrt":
        # sqrt_rn rounds float32 to nearest, at no measurable cost for a tile; float64 always does.
        return Expr(f"tl.sqrt_rn({texts[0]})" if dtype == F32 else f"tl.sqrt({texts[0]})", shape)
    if function in _TRITON:
        return Expr(f"tl.{function}({texts[0]})", shape)
    return Expr(f"libdevice.{LIBDEVICE[function]}({', '.join(texts)})", shape)


def _binary(symbol: str, operands: Sequence[Expr], dtype: DType) -> str:
    left, right = operands
    # Python would fold two literals.
    two_literals = left.number is not None and right.number is not None
    first = typed(left, dtype) if two_literals or _is_inexact(left) else left.operand
    second = typed(right, dtype) if _is_inexact(right) else right.operand
    return f"{first} {symbol} {second}"


def _is_inexact(x: Expr) -> bool:
    """True if a literal would lose digits: Triton converts float64 literals through float32."""
    return x.number is not None and x.number.dtype == F64 and float(np.float32(x.number)) != float(x.number)


def _extreme(function: str, texts: Sequence[str], dtype: DType) -> str:
    if kind_of(dtype) == "float":
        return f"{function}imum({', '.join(texts)})"
    return f"tl.{function}imum({', '.join(texts)})"


def _unary(function: str, x: Expr, dtype: DType) -> str:
    if function == "not":
        return f"~{_base_of(x, dtype)}"
    if function == "logistic":
        return f"1.0 / (1.0 + tl.exp({_minus(x, dtype)}))"
    return _minus(x, dtype)


def _minus(x: Expr, dtype: DType) -> str:
    """The negative of x. Triton's own minus is 0 - x, which turns 0 into 0, not -0."""
    if kind_of(dtype) == "float":
        return f"{_base_of(x, dtype)} * -1.0"
    return f"0 - {_base_of(x, dtype)}"


def _base_of(x: Expr, dtype: DType) -> str:
    return typed(x, dtype) if x.number is not None else x.operand


# --- shapes --------------------------------------------------------------------------------------------------------


def _broadcast(op: Broadcast, x: Expr) -> Expr:
    if not x.shape:
        return x
    rank = len(op.shape)
    if rank == len(x.shape):
        return x
    sizes = dict(zip(op.dims, x.shape, strict=True))
    index = ", ".join(":" if d in sizes else "None" for d in range(rank))
    return Expr(f"{x.operand}[{index}]", tuple(sizes.get(d, 1) for d in range(rank)))


def _iota(op: Iota) -> Expr:
    rank, size = len(op.shape), op.shape[op.dim]
    text = f"tl.arange(0, {size})"
    if rank > 1:
        text += f"[{', '.join(':' if d == op.dim else 'None' for d in range(rank))}]"
    return Expr(text, tuple(size if d == op.dim else 1 for d in range(rank)))


def _of_whole_tiles(op: Op, texts: Sequence[str]) -> Expr:
    shape = op.result.tile.shape
    match op:
        case Reshape():
            return Expr(_reshape(op, texts[0]), shape)
        case Transpose():
            swap = op.permutation == (1, 0)
            text = f"tl.trans({texts[0]})" if swap else f"tl.permute({texts[0]}, {shape_text(op.permutation)})"
            return Expr(text, shape)
        case Dot():
            return Expr(dot(op, texts), shape)
        case Reduce():
            return Expr(_reduce(op, texts[0]), shape)
        case Scan():
            reverse = ", reverse=True" if op.reverse else ""
            return Expr(f"tl.associative_scan({texts[0]}, {op.dim}, {_COMBINE[op.monoid]}{reverse})", shape)
        case LinearScan():
            reverse = ", reverse=True" if op.reverse else ""
            return Expr(f"tl.associative_scan(({', '.join(texts)}), {op.dim}, linear_step{reverse})[1]", shape)
        case ArgReduce():
            return Expr(_arg_reduce(op, texts[0]), shape)
        case Take():
            return Expr(_take(op, texts), shape)
        case Sort() | TopK():
            return Expr(sorting(op, texts), shape)
        case _:
            raise NotImplementedError(f"the Triton backend has no rule for {op.name}")


def _reshape(op: Reshape, text: str) -> str:
    rank = len(op.operands[0].tile.shape)
    if rank == 0:
        return f"tl.broadcast_to({text}, {shape_text(op.shape)})"
    if op.shape:
        return f"tl.reshape({text}, {shape_text(op.shape)})"
    flat = text if rank == 1 else f"tl.reshape({text}, (1,))"
    return f"tl.reduce({flat}, 0, first)"


def dot(op: Dot, texts: Sequence[str], acc: str = "") -> str:
    """The product of two tiles, added to the accumulator `acc` unless that is "".

    The options override Triton's defaults, which break our contracts: float32 would be rounded to TF32, and 8-bit
    floats would accumulate with fewer bits on sm_90.
    """
    dtype = op.operands[0].tile.dtype
    options = [acc] if acc else []
    if dtype == F32:
        options.append(f'input_precision="{op.precision}"')
    elif dtype == F64:
        options.append("out_dtype=tl.float64")
    elif kind_of(dtype) != "float":
        options.append("out_dtype=tl.int32")
    elif dtype.itemsize == 1:
        options.append("max_num_imprecise_acc=0")
    return f"tl.dot({', '.join([*texts, *options])})"


def _reduce(op: Reduce, text: str) -> str:
    (dim,) = op.dims
    dtype = op.operands[0].tile.dtype
    if op.monoid == "sum":
        return f"tl.sum({text}, {dim})"
    if op.monoid in ("max", "min") and kind_of(dtype) != "float":
        return f"tl.{op.monoid}({text}, {dim})"
    return f"tl.reduce({text}, {dim}, {_COMBINE[op.monoid]})"


def _arg_reduce(op: ArgReduce, text: str) -> str:
    shape = op.operands[0].tile.shape
    lanes = _iota(Iota(shape=shape, dtype=I32, dim=op.dim))
    index = whole(lanes, TileType(shape, I32))
    return f"tl.reduce(({text}, {index}), {op.dim}, arg_{op.extreme}imum)[1]"


def _take(op: Take, texts: Sequence[str]) -> str:
    """A gather along a dim. Narrow elements are gathered as int32, because shuffles lack their dtypes."""
    dtype = op.result.tile.dtype
    tile, index = texts
    tile = tile if is_tight(tile) else f"({tile})"
    if dtype == BOOL:
        return f"(tl.gather({tile}.to(tl.int32), {index}, {op.dim}) != 0)"
    if dtype.itemsize < 4:
        bits = dtype_text(np.dtype(f"i{dtype.itemsize}"))
        taken = f"tl.gather({tile}.to({bits}, bitcast=True).to(tl.int32), {index}, {op.dim}).to({bits})"
        return f"{taken}.to({dtype_text(dtype)}, bitcast=True)"
    return f"tl.gather({tile}, {index}, {op.dim})"


CHEAP = (Elementwise, Select, Convert, Bitcast, Transpose)
"""Ops whose expressions may be inlined into others."""


def number(value: int, tile: TileType) -> Expr:
    """The expression of a known number."""
    return constant(Constant(array=np.asarray(value, tile.dtype), shape=tile.shape))
