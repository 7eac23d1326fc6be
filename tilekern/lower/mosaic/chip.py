"""Google's TPUs: memories, matrix units and rates of each model, and the layout of arrays in vector memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from tilekern.ir.core import round_up
from tilekern.ir.records import record
from tilekern.ir.types import DType
from tilekern.lower.mosaic.calibration import TABLE_BYTES, VMEM_BUDGET

LANES = 128
"""Elements of a row of a vector register."""

SUBLANES = 8
"""Rows of a vector register, each of 32 bits times `LANES`."""


@record
class Chip:
    """One model of TPU. All numbers are of one TensorCore, of which a device of JAX has `cores`.

    Sources: the pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x" of the Cloud TPU documentation, and `TpuInfo` of JAX,
    for the sizes of memories, matrix units and peak rates; libtpu 0.0.50 and 0.0.51 for the memory that the compiler
    grants: kernels asked for ever more memory (tests/lower/mosaic/test_chip.py repeats the test).

    Attributes:
      name: the target, such as "tpu:v5e".
      device_kind: the chip's name in JAX.
      topology: a slice of such chips, as libtpu names it.
      cores: TensorCores of one device of JAX; two share the steps along parallel axes of a grid.
      vmem_bytes: bytes of vector memory.
      vmem_default: bytes of vector memory that a kernel may take without `vmem_limit_bytes`.
      matrix_size: rows and columns of a matrix unit.
      matrix_units: the number of matrix units.
      bf16_vectors: True if the vector units compute in bfloat16; otherwise they convert to float32 and back.
      hbm_bandwidth: bytes per second from and to HBM.
      bf16_flops: floating-point operations per second of the matrix units on bfloat16; a multiply-add counts as two.
    """

    name: str
    device_kind: str
    topology: str
    cores: int
    vmem_bytes: int
    vmem_default: int
    matrix_size: int
    matrix_units: int
    bf16_vectors: bool
    hbm_bandwidth: float
    bf16_flops: float

    @property
    def vmem_limit(self) -> int:
        """The most bytes that `vmem_limit_bytes` can grant a kernel: the compiler keeps 64 KiB on all but v5e."""
        return self.vmem_bytes - (64 << 10)

    @property
    def vmem_budget(self) -> int:
        """Bytes of vector memory that a plan may take by its own estimate."""
        return int(self.vmem_limit * VMEM_BUDGET)

    @property
    def table_bytes(self) -> int:
        """Bytes of scalar memory for the prefetched arrays of a kernel, after padding."""
        return TABLE_BYTES


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("tpu:v5e", "TPU v5 lite", "v5e:2x2", 1, 128 << 20, 16 << 20, 128, 4, False, 819e9, 197e12),
        Chip("tpu:v5p", "TPU v5", "v5p:2x2x1", 2, 64 << 20, 16 << 20, 128, 4, False, 2765e9 / 2, 459e12 / 2),
        Chip("tpu:v6e", "TPU v6 lite", "v6e:2x2", 1, 128 << 20, 32 << 20, 256, 2, True, 1638e9, 918e12),
        Chip("tpu:7x", "TPU7x", "tpu7x:2x2x1", 1, 64 << 20, 32 << 20, 256, 2, True, 7380e9 / 2, 2307e12 / 2),
    )
}
"""By the name of the target."""

PORTABLE = replace(CHIPS["tpu:v5e"], vmem_bytes=min(chip.vmem_bytes for chip in CHIPS.values()))
"""A v5e with the smallest vector memory of all chips: a kernel that is lowered for it compiles for every chip."""


def tile_rows(rows: int, dtype: DType) -> int:
    """The rows of a tile of vector memory, for a matrix with this number of rows.

    It is the least power of two that holds the rows, at most `SUBLANES`, and at least the rows that share the 32 bits
    of a sublane: two of bfloat16, four of int8. So a matrix of few rows takes less than whole registers.
    """
    fewest = 4 // _stored_bytes(dtype)
    power = fewest
    while power < min(rows, SUBLANES):
        power *= 2
    return power


def padded_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    """The bytes that a buffer takes in vector memory, or in scalar memory, on every chip.

    The last dim is padded to `LANES`, the dim before to tiles of `tile_rows`. A vector is padded to whole sublanes: 128
    elements of 32 bits, 256 of 16, 512 of 8. A bool takes 32 bits; a scalar takes a sublane.
    """
    size = _stored_bytes(dtype)
    if len(shape) < 2:
        return round_up(prod(shape) * size, 4 * LANES)
    rows = round_up(shape[-2], tile_rows(shape[-2], dtype))
    return prod(shape[:-2]) * rows * round_up(shape[-1], LANES) * size


def _stored_bytes(dtype: DType) -> int:
    assert dtype.itemsize <= 4, f"no TPU has {dtype}"
    return 4 if dtype == np.bool_ else dtype.itemsize
