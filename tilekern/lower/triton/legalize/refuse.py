"""Refuse ops that no Triton program for a GPU can do, with the user's line, the reason, and a way out.

Atomic updates: PTX ISA, "atom": 32 and 64 bits for integers; f16, bf16 (from sm_90 on), f32 and f64 for additions.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.core import Func, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic
from tilekern.ir.types import BF16, DTYPES, F16, F32, F64, DType, dtype_name
from tilekern.lower.triton.chip import Chip

LARGEST_TILE = 1 << 20
"""The largest number of elements of a tile: Triton's `TRITON_MAX_TENSOR_NUMEL`."""

LARGEST_GRID = 2**31 - 1
"""The largest number of programs along a grid's first axis; CUDA C++ Programming Guide, "Technical Specifications"."""

_PORTABLE = 'use target="cpu:xla", the portable backend, which runs on GPUs too'


_WITH_FLOAT8 = {"NVIDIA": "sm_89 or newer", "AMD": "gfx950, for the E4M3 of gfx942 is float8_e4m3fnuz"}

# Functions that the maker's library of mathematical functions lacks: Triton's `language.extra.hip.libdevice`.
_LACKING = {"NVIDIA": frozenset[str](), "AMD": frozenset({"cbrt"})}


def refuse(func: Func, chip: Chip) -> Func:
    """Refuse dtypes and atomic updates that the GPU lacks, and grids that are too large.

    Raises:
      TargetError: at the first such op, or at the Func for its grid.
    """
    for op in func.walk():
        with source.at(op.loc):
            for value in (*op.operands, *op.results):
                _check_dtype(value, chip)
            if isinstance(op, Elementwise) and op.function in _LACKING[chip.vendor.name]:
                raise TargetError(
                    f"{chip.name} has no {op.function}",
                    expected="a function of its library of mathematical functions",
                    got=op.function,
                    fix=f"compute it by others, such as exp2 and log2, or {_PORTABLE}",
                )
            if isinstance(op, Atomic):
                _check_atomic(op, chip)
    programs = prod(func.grid)
    if programs > LARGEST_GRID:
        with source.at(func.loc):
            raise TargetError(
                f"the grid of {func.name} is too large for a GPU",
                expected=f"at most {LARGEST_GRID} programs",
                got=f"{programs} programs, {' × '.join(map(str, func.grid))}",
                fix="take larger blocks",
            )
    return func


def refuse_large_tiles(func: Func) -> Func:
    """Refuse tiles with more elements than Triton allows.

    Raises:
      TargetError: for the first such tile of a legal Func.
    """
    for op in func.walk():
        for value in op.results:
            if value.tile.size > LARGEST_TILE:
                with source.at(op.loc):
                    raise TargetError(
                        "a tile is too large for Triton",
                        expected=f"at most {LARGEST_TILE} elements, sizes counted up to the next powers of two",
                        got=f"{value.tile} in {op.name}",
                        fix="take smaller blocks; integer dots other than int8, which multiply all pairs at once, "
                        "need small ones",
                    )
    return func


def _check_dtype(value: Value, chip: Chip) -> None:
    dtype = value.type.dtype
    if dtype == DTYPES["f8e4m3fn"] and not chip.float8:
        raise TargetError(
            f"{chip.name} has no {dtype_name(dtype)}",
            expected=f"{_WITH_FLOAT8[chip.vendor.name]}; f8e5m2, bf16 and wider floats are there",
            got=str(value.type),
            fix=f"convert the array before the call (.astype), or {_PORTABLE}",
        )


def _check_atomic(op: Atomic, chip: Chip) -> None:
    if op.ref.ref.role == "sum":
        return  # each program adds to a partial sum of its own
    dtype = op.ref.ref.dtype
    available = list(_atomic_dtypes(op, chip))
    if dtype not in available:
        raise TargetError(
            f"{chip.name} has no atomic {op.kind} of {dtype_name(dtype)}",
            expected=f"one of {', '.join(map(dtype_name, available))}",
            got=f"{op.ref.name}: {op.ref.type}",
            fix=f"make the output of one of these dtypes and convert it afterwards, or {_PORTABLE}",
        )


def _atomic_dtypes(op: Atomic, chip: Chip) -> Iterator[DType]:
    yield from map(np.dtype, (np.int32, np.uint32, np.int64, np.uint64))
    if op.kind in ("add", "max", "min"):
        yield from (F32, F64)
    if op.kind == "add":
        yield F16
        if chip.bf16_atomics:
            yield BF16
