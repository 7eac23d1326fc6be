"""Import rules for `lax.bitcast_convert_type` and `lax.reduce_precision`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from tilekern._jax import JaxprEqn
from tilekern.errors import UnsupportedError
from tilekern.ir.compute import Bitcast
from tilekern.ir.core import Value
from tilekern.ir.shape import Concatenate, Reshape, Slice
from tilekern.ir.types import BF16, DTYPES, F16, F32, F64, FOUR_BITS, DType, TileType
from tilekern.lang import four_bits
from tilekern.lang.emitter import Emitter, Rule, aval


def _bitcast(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    """Bitcast. Between widths, the narrow numbers in a wide number lie along the last dim, the low bits first."""
    x, dtype = operands[0], aval(eqn).dtype
    if any(np.dtype(cast(Any, var.aval).dtype) in FOUR_BITS for var in (*eqn.invars, *eqn.outvars)):
        return four_bits.bitcast(emit, eqn, x)
    if x.tile.dtype == dtype:
        return x
    width = x.tile.dtype.itemsize
    if width == dtype.itemsize:
        return emit.op(Bitcast, x, dtype=dtype)
    bits = _as(emit, x, np.dtype(f"u{width}"))
    changed = _split(emit, bits, dtype.itemsize) if width > dtype.itemsize else _joined(emit, bits, dtype.itemsize)
    return _as(emit, changed, dtype)


def _as(emit: Emitter, x: Value, dtype: DType) -> Value:
    return x if x.tile.dtype == dtype else emit.op(Bitcast, x, dtype=dtype)


def _split(emit: Emitter, bits: Value, width: int) -> Value:
    """Split each unsigned integer into integers of `width` bytes, along a new last dim."""
    shape, dtype = bits.tile.shape, np.dtype(f"u{width}")
    parts = (_shifted(emit, "shift_right_logical", bits, 8 * at) for at in range(0, bits.tile.dtype.itemsize, width))
    narrow = [emit.op(Reshape, emit.convert(part, dtype), shape=(*shape, 1)) for part in parts]
    return emit.op(Concatenate, *narrow, dim=len(shape))


def _joined(emit: Emitter, bits: Value, width: int) -> Value:
    """Join the unsigned integers along the last dim into one integer of `width` bytes."""
    *outer, count = bits.tile.shape
    tile, step = TileType(tuple(outer), np.dtype(f"u{width}")), 8 * bits.tile.dtype.itemsize
    whole: Value | None = None
    for n in range(count):
        start, stop = (*[0] * len(outer), n), (*outer, n + 1)
        part = emit.op(Slice, bits, start=start, stop=stop, stride=(1,) * len(stop))
        wide = emit.convert(emit.op(Reshape, part, shape=tile.shape), tile.dtype)
        placed = _shifted(emit, "shift_left", wide, n * step)
        whole = placed if whole is None else emit.elementwise("or", whole, placed)
    assert whole is not None, "JAX joins as many numbers as the wide dtype has parts"
    return whole


def _shifted(emit: Emitter, function: str, bits: Value, amount: int) -> Value:
    return emit.elementwise(function, bits, emit.splat(amount, bits.tile)) if amount else bits


# Dtypes by the exponent and mantissa bits of a format of lax.reduce_precision.
_FORMATS = {(11, 52): F64, (8, 23): F32, (8, 7): BF16, (5, 10): F16, (5, 2): DTYPES["f8e5m2"]}


def _reduce_precision(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    x, bits = operands[0], (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    if bits not in _FORMATS:
        raise UnsupportedError(
            "lax.reduce_precision to a format that is no dtype is not part of the language",
            expected=f"(exponent_bits, mantissa_bits) in {', '.join(map(str, _FORMATS))}",
            got=f"(exponent_bits, mantissa_bits) = {bits}",
            fix="cast with .astype, there and back",
        )
    return emit.convert(emit.convert(x, _FORMATS[bits]), x.tile.dtype)


BITS: dict[str, Rule] = {"bitcast_convert_type": _bitcast, "reduce_precision": _reduce_precision}
