"""Tiles of 4-bit numbers. Memory holds two numbers in a byte; values are held in a wider dtype with the same numbers.

The block IR has no 4-bit dtypes. Arithmetic in 4 bits is refused: JAX does not promote these dtypes either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import numpy as np

from tilekern._jax import JaxprEqn
from tilekern.errors import IndexingError, UnsupportedError
from tilekern.ir.compute import Bitcast, Select
from tilekern.ir.core import Value
from tilekern.ir.memory import Access, Dim, Load, Position, Store
from tilekern.ir.shape import Concatenate, Pad, Reshape, Slice
from tilekern.ir.types import DTYPES, F32, FOUR_BITS, I32, DType, TileType, kind_of
from tilekern.lang.emitter import Emitter

I8, U8 = DTYPES["i8"], DTYPES["u8"]

# Primitives with the same result in the wider dtype: they move, select, compare or cast elements.
_ALLOWED = frozenset(
    (
        *(
            "convert_element_type",
            "broadcast_in_dim",
            "reshape",
            "squeeze",
            "expand_dims",
            "transpose",
            "slice",
            "split",
        ),
        *(
            "stack",
            "unstack",
            "tile",
            "concatenate",
            "pad",
            "rev",
            "select_n",
            "copy",
            "copy_p",
            "stop_gradient",
            "name",
        ),
        *("dynamic_slice", "dynamic_update_slice", "gather", "eq", "ne", "lt", "le", "gt", "ge", "max", "min", "clamp"),
        *("reduce_max", "reduce_min", "argmax", "argmin", "sort", "top_k", "reshard", "empty2"),
        "bitcast_convert_type",
    )
)

# Table of E2M1's magnitudes (0, 0.5, 1, 1.5, 2, 3, 4, 6), doubled, 4 bits each; the code is the index.
_DOUBLED = 0xC8643210


def check_allowed(eqn: JaxprEqn) -> None:
    """Refuse an equation that does arithmetic in 4 bits.

    Raises:
      UnsupportedError: at the line of the equation.
    """
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    narrow = [np.dtype(a.dtype) for a in avals if getattr(a, "dtype", None) in FOUR_BITS]
    if narrow and eqn.primitive.name not in _ALLOWED:
        raise UnsupportedError(
            f"`{eqn.primitive.name}` does not compute in {narrow[0]}",
            expected="loads, stores, casts, comparisons, selects and moves of 4-bit numbers",
            got=f"{eqn.primitive.name}({', '.join(str(v.aval) for v in eqn.invars)})",
            fix=f"cast the operands with .astype(jnp.{FOUR_BITS[narrow[0]]}), and cast the result back",
        )


# --- casts ----------------------------------------------------------------------------------------------------------


def narrowed(emit: Emitter, x: Value, dtype: DType) -> Value:
    """Numbers of 4 bits, in the wider dtype: integers wrap around, floats saturate, NaN becomes 0."""
    if kind_of(dtype) == "float":
        return _rounded(emit, x)
    wide = FOUR_BITS[dtype]
    whole = emit.convert(x, wide)
    if kind_of(x.tile.dtype) == "float":
        low, high = (emit.splat(n, whole.tile) for n in ((-8, 7) if wide == I8 else (0, 15)))
        return emit.elementwise("min", emit.elementwise("max", whole, low), high)
    return _low(emit, whole)


def _rounded(emit: Emitter, x: Value) -> Value:
    """x rounded to nearest even in E2M1, as float32: multiples of 0.5 below 2, of 1 below 4, of 2 up to 6."""
    wide = x if x.tile.dtype == DTYPES["f64"] else emit.convert(x, F32)

    def number(value: float) -> Value:
        return emit.splat(value, wide.tile)

    def multiple(step: float) -> Value:
        scaled = emit.elementwise("mul", size, number(1 / step))
        return emit.elementwise("mul", emit.elementwise("round_even", scaled), number(step))

    # min keeps NaN. Every comparison below is then false, and the result is 0.
    size = emit.elementwise("min", emit.elementwise("abs", wide), number(6.0))
    coarse = emit.op(Select, emit.elementwise("lt", size, number(4.0)), multiple(1.0), multiple(2.0))
    rounded = emit.op(Select, emit.elementwise("lt", size, number(2.0)), multiple(0.5), coarse)
    rounded = emit.op(Select, emit.elementwise("eq", wide, wide), rounded, number(0.0))
    return emit.convert(_with_sign(emit, rounded, _is_negative(emit, wide)), F32)


def _is_negative(emit: Emitter, x: Value) -> Value:
    """True if the sign bit of a float is set."""
    bits = emit.op(Bitcast, x, dtype=np.dtype(f"i{x.tile.dtype.itemsize}"))
    return emit.elementwise("lt", bits, emit.splat(0, bits.tile))


def _with_sign(emit: Emitter, size: Value, negative: Value) -> Value:
    return emit.op(Select, negative, emit.elementwise("neg", size), size)


def _low(emit: Emitter, x: Value) -> Value:
    """The low 4 bits of each byte, sign-extended if the bytes are signed: 0x3F -> 15 in uint8, -1 in int8."""
    four = emit.splat(4, x.tile)
    right = "shift_right_arithmetic" if x.tile.dtype == I8 else "shift_right_logical"
    return emit.elementwise(right, emit.elementwise("shift_left", x, four), four)


def _high(emit: Emitter, x: Value) -> Value:
    """The high 4 bits of each byte, sign-extended if the bytes are signed: 0xF3 -> 15 in uint8, -1 in int8."""
    right = "shift_right_arithmetic" if x.tile.dtype == I8 else "shift_right_logical"
    return emit.elementwise(right, x, emit.splat(4, x.tile))


# --- bitcasts --------------------------------------------------------------------------------------------------------


def bitcast(emit: Emitter, eqn: JaxprEqn, x: Value) -> Value:
    """Bitcast between bytes [..., n] and 4-bit numbers [..., n, 2], the low half of a byte first.

    Raises:
      UnsupportedError: the other dtype has another width.
    """
    before, after = (np.dtype(var.aval.dtype) for var in cast(Any, (eqn.invars[0], eqn.outvars[0])))
    if after in FOUR_BITS and before in (I8, U8):
        bits = x if before == U8 else emit.op(Bitcast, x, dtype=U8)
        codes = _codes(emit, bits, after)
        # Numbers are decoded before they stand side by side: a program that takes one half decodes no other.
        return _side_by_side(emit, [_decoded(emit, half) for half in codes] if kind_of(after) == "float" else codes)
    if before in FOUR_BITS and after in (I8, U8):
        *outer, _ = x.tile.shape
        packed = emit.op(Reshape, _packed(emit, x, before), shape=tuple(outer))
        return packed if after == U8 else emit.op(Bitcast, packed, dtype=after)
    raise UnsupportedError(
        f"a bitcast from {before} to {after} is not part of the language",
        expected="a bitcast between int8 or uint8 and two numbers of 4 bits",
        got=f"lax.bitcast_convert_type({before}{list(x.tile.shape)}, {after})",
        fix="cast with .astype, or go through uint8",
    )


# --- memory ---------------------------------------------------------------------------------------------------------


def load(emit: Emitter, eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """The numbers of an access, in the wider dtype; loads the bytes that hold them."""
    access: Access = eqn.params["access"]
    dtype, last = np.dtype(eqn.params["dtype"]), access.dims[-1]
    if eqn.params["filled"]:
        raise _refused(operands[0], dtype, "a load with `fill`", "leave fill out, cast, and choose with jnp.where")
    byte_access, first = _of_bytes(access, operands[0], dtype)
    packed = emit.one(Load(operands=tuple(operands[: 1 + access.arity]), access=byte_access, loc=emit.loc))
    numbers = _part(emit, _unpacked(emit, packed, dtype), first, first + last.size)
    numbers = emit.op(Reshape, numbers, shape=access.shape)
    if not eqn.params["masked"]:
        return numbers
    return emit.op(Select, operands[1 + access.arity], numbers, emit.splat(0, numbers.tile))


def store(emit: Emitter, eqn: JaxprEqn, operands: Sequence[Value], dtype: DType) -> None:
    """Store a tile of numbers as bytes of two numbers each."""
    access: Access = eqn.params["access"]
    ref, value, *positions = operands
    if eqn.params["masked"]:
        raise _refused(ref, dtype, "a store with `mask`", "choose with jnp.where, and store all lanes")
    byte_access, first = _of_bytes(access, ref, dtype)
    last, size = access.dims[-1], (byte_access.extents or ref.ref.shape)[-1]
    # An odd number of lanes may end in the middle of the last byte, whose other half is padding.
    ends = not last.position.terms and byte_access.dims[-1].position.const + byte_access.dims[-1].size >= size
    if first or last.kind == "index" or (last.size % 2 and not ends):
        raise _refused(ref, dtype, f"a store of {last.size} at {_shown(last.position)}", "store pairs: an even block")
    packed = _packed(emit, value, dtype)
    emit.add(Store(operands=(ref, packed, *positions), access=byte_access, loc=emit.loc))


def _of_bytes(access: Access, ref: Value, dtype: DType) -> tuple[Access, int]:
    """Turn an access to 4-bit numbers into (access to bytes, half of the first byte that holds lane 0: 0 or 1)."""
    last, extents = access.dims[-1], access.extents
    terms, fix = last.position.terms, "take blocks of an even size, tk.ds(2 * start, size), or index the loaded tile"
    byte_extents = None if extents is None else (*extents[:-1], extents[-1] // 2)
    if extents is not None and (extents[-1] % 2 or prod(extents) != 2 * prod(ref.ref.shape)):
        raise _refused(ref, dtype, f"a view of shape {list(extents)}", "reshape the array outside of the kernel")
    if last.kind in ("gather", "along"):
        raise _refused(ref, dtype, f"an index vector along the last dim of {ref.name}", fix)
    if any(t.stride % 2 for t in terms):
        raise _refused(ref, dtype, f"position {_shown(last.position)} along the last dim of {ref.name}", fix)
    byte, half = divmod(last.position.const, 2)
    position = Position(tuple(replace(t, stride=t.stride // 2) for t in terms), byte)
    halved = Dim("block", position, (half + last.size + 1) // 2)
    return Access((*access.dims[:-1], halved), byte_extents), half


def _shown(position: Position) -> str:
    terms = [f"{t.stride} * i{t.operand}" for t in position.terms]
    return " + ".join([*terms, str(position.const)] if position.const or not terms else terms)


def _refused(ref: Value, dtype: DType, got: str, fix: str) -> IndexingError:
    return IndexingError(
        f"two numbers of {ref.name} share a byte, which is read or written whole",
        expected=f"along the last dim of {dtype} arrays lanes from an even position on, without mask or fill",
        got=got,
        fix=fix,
    )


def _part(emit: Emitter, x: Value, first: int, last: int) -> Value:
    """x[..., first:last]."""
    *outer, size = x.tile.shape
    if (first, last) == (0, size):
        return x
    start, stop = (*(0 for _ in outer), first), (*outer, last)
    return emit.op(Slice, x, start=start, stop=stop, stride=(1,) * len(start))


def _unpacked(emit: Emitter, packed: Value, dtype: DType) -> Value:
    """The numbers [..., 2 n] in bytes [..., n], in the wider dtype of `FOUR_BITS`."""
    *outer, size = packed.tile.shape
    codes = _side_by_side(emit, _codes(emit, packed, dtype))
    codes = emit.op(Reshape, codes, shape=(*outer, 2 * size))
    return _decoded(emit, codes) if kind_of(dtype) == "float" else codes


def _codes(emit: Emitter, packed: Value, dtype: DType) -> list[Value]:
    """The low halves of bytes, and the high halves, of the same shape; with a sign if the numbers have one."""
    signed = emit.op(Bitcast, packed, dtype=I8) if FOUR_BITS[dtype] == I8 else packed
    return [half(emit, signed) for half in (_low, _high)]


def _side_by_side(emit: Emitter, halves: Sequence[Value]) -> Value:
    """Two tiles [...] as one tile [..., 2]."""
    shape = halves[0].tile.shape
    return emit.op(Concatenate, *(emit.op(Reshape, x, shape=(*shape, 1)) for x in halves), dim=len(shape))


def _decoded(emit: Emitter, codes: Value) -> Value:
    """The float32 numbers of E2M1 codes: 3 -> 1.5, 11 -> -1.5, 7 -> 6.0."""
    wide = emit.convert(codes, I32)

    def number(value: int) -> Value:
        return emit.splat(np.uint32(value).view(np.int32), wide.tile)

    shift = emit.elementwise("shift_left", emit.elementwise("and", wide, number(7)), number(2))
    doubled = emit.elementwise("and", emit.elementwise("shift_right_logical", number(_DOUBLED), shift), number(15))
    size = emit.convert(doubled, F32)
    size = emit.elementwise("mul", size, emit.splat(0.5, size.tile))
    return _with_sign(emit, size, emit.elementwise("gt", wide, number(7)))


def _packed(emit: Emitter, x: Value, dtype: DType) -> Value:
    """uint8[..., ceil(n / 2)] of numbers [..., n]: pairs, the first number in the low half; 0 is added to an odd n."""
    codes = _encoded(emit, x) if kind_of(dtype) == "float" else x
    codes = codes if codes.tile.dtype == U8 else emit.op(Bitcast, codes, dtype=U8)
    *outer, size = codes.tile.shape
    if size % 2:
        zeros, last = (0,) * (len(outer) + 1), (*(0 for _ in outer), 1)
        codes = emit.op(Pad, codes, emit.splat(0, TileType((), U8)), low=zeros, high=last, interior=zeros)
        size += 1
    stride = (*(1 for _ in outer), 2)
    low, high = (
        emit.op(Slice, codes, start=(*(0 for _ in outer), n), stop=(*outer, size), stride=stride) for n in (0, 1)
    )
    upper = emit.elementwise("shift_left", high, emit.splat(4, high.tile))
    return emit.elementwise("or", emit.elementwise("and", low, emit.splat(15, low.tile)), upper)


def _encoded(emit: Emitter, x: Value) -> Value:
    """The uint8 codes of E2M1 numbers: 1.5 -> 3, -1.5 -> 11, 6.0 -> 7.

    The doubled magnitudes of all numbers are the integers 0, 1, 2, 3, 4, 6, 8 and 12.
    """
    size = emit.elementwise("abs", x)
    doubled = emit.convert(emit.elementwise("mul", size, emit.splat(2.0, size.tile)), I32)
    code = emit.elementwise("min", doubled, emit.splat(4, doubled.tile))
    for least in (6, 8, 12):
        beyond = emit.elementwise("ge", doubled, emit.splat(least, doubled.tile))
        code = emit.elementwise("add", code, emit.convert(beyond, I32))
    sign = emit.convert(_is_negative(emit, x), I32)
    code = emit.elementwise("or", code, emit.elementwise("shift_left", sign, emit.splat(3, sign.tile)))
    return emit.convert(code, U8)
