"""Refuse what no TPU can do, with the user's line, the reason, and a way out."""

from __future__ import annotations

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.core import Func, Value
from tilekern.lower.positions import FAR
from tilekern.lower.sizes import LONGEST_INT32, refuse_large

_PORTABLE = 'use target="cpu:xla", the portable backend'


def refuse(func: Func, chip_name: str) -> Func:
    """Refuse arrays and grids that int32 does not count, and dtypes of 64 bits.

    Raises:
      TargetError: the Func has such an array, grid or dtype; it names the first one.
    """
    refuse_large(func, "a TPU", longest=FAR, programs=LONGEST_INT32)
    for op in func.walk():
        with source.at(op.loc):
            for value in (*op.operands, *op.results):
                _check(value, chip_name)
    return func


def _check(value: Value, chip_name: str) -> None:
    dtype = value.type.dtype
    if dtype.itemsize > 4:
        raise TargetError(
            "TPUs have no numbers of 64 bits",
            expected="dtypes of at most 32 bits",
            got=f"{value.type} for tpu:{chip_name}",
            fix=f"convert it to 32 bits (.astype), or {_PORTABLE}",
        )
