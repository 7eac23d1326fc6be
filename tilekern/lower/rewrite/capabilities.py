"""The record of the dtypes that a target computes with; `legalize_dtypes` and `cast` are driven by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

from tilekern.ir.records import record
from tilekern.ir.types import BOOL, F32, I32, DType, kind_of


@record
class Capabilities:
    """The dtypes of a target, by class of op.

    Every target has the functions of float32, int32 and uint32, and of float64 and 64-bit integers unless it refuses
    these dtypes; of bools `and`, `or`, `xor` and `not`. Every target casts 8-bit floats to float32.

    Attributes:
      casts: True for two dtypes if the target has the cast from the first to the second with the meaning of the
        language: rounded once; to integers saturated, and NaN becomes 0.
      float8_casts: True if it casts finite float32 numbers to 8-bit floats; otherwise their bits are computed.
      integer_bytes: the size of the narrowest integers with which it computes.
      functions: for each float dtype narrower than float32, its functions; other functions are computed in float32.
      reduction_bytes: the size of the narrowest integers that it reduces and scans.
      reduces_bools: True if it reduces bools by `and`, `or` and `xor`; otherwise bools are reduced as int32.
      ordered_bools: True if bools as int32 are reduced by `max` and `min` rather than by `or` and `and`.
      reduces_dims: True if it reduces several dims at once.
      selects_float8: True if it selects between 8-bit floats; otherwise their bits are selected.
    """

    casts: Callable[[DType, DType], bool]
    float8_casts: bool = False
    integer_bytes: int = 1
    functions: Mapping[DType, frozenset[str]] = field(default_factory=dict[DType, frozenset[str]])
    reduction_bytes: int = 4
    reduces_bools: bool = False
    ordered_bools: bool = False
    reduces_dims: bool = False
    selects_float8: bool = True

    def computed_in(self, function: str, dtype: DType) -> DType:
        """The dtype in which a function of numbers is computed."""
        if kind_of(dtype) == "float":
            has = dtype.itemsize >= 4 or function in self.functions.get(dtype, ())
            return dtype if has else F32
        return dtype if dtype.itemsize >= self.integer_bytes else I32

    def reduced_in(self, dtype: DType) -> DType:
        """The dtype in which a tile is reduced or scanned."""
        if dtype == BOOL:
            return BOOL if self.reduces_bools else I32
        if kind_of(dtype) == "float":
            return dtype if dtype.itemsize >= 4 else F32
        return dtype if dtype.itemsize >= self.reduction_bytes else I32
