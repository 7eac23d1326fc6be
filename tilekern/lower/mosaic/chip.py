"""What Google's TPUs can do, and how their vector memory holds arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilekern.ir.core import round_up
from tilekern.ir.types import DType

LANES = 128
"""Elements of a row of a vector register."""

SUBLANES = 8
"""Rows of a vector register, each of 32 bits times `LANES`."""


@dataclass(frozen=True)
class Chip:
    """One model of TPU. All numbers are of one TensorCore, of which a device of JAX has `cores`.

    Sources: of the sizes of memories, matrix units and peak rates, the pages "TPU v5e", "TPU v5p", "TPU v6e" and
    "TPU7x" of the Cloud TPU documentation, and `TpuInfo` of JAX; of what the compiler grants, libtpu 0.0.50 and 0.0.51,
    asked for ever more (tests/lower/mosaic/test_chip.py repeats it).

    Attributes:
      name: of the target, "tpu:v5e".
      device_kind: JAX's name of it.
      topology: a slice of such chips, in libtpu's words.
      cores: TensorCores of one device of JAX; over two of them, steps along parallel axes of a grid are split.
      vmem_bytes: vector memory.
      vmem_default: bytes of it that a kernel may take without asking for more by `vmem_limit_bytes`.
      matrix_size: rows and columns of a matrix unit.
      matrix_units: how many there are.
      bf16_vectors: whether vector arithmetic has bfloat16; without, it is float32's with conversions.
      hbm_bandwidth: bytes per second from and to HBM.
      bf16_flops: floating-point operations per second of the matrix units on bfloat16, a multiply-add counted as two.
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
        """Bytes that a kernel may take by our own count; the rest is for what that misses."""
        return self.vmem_limit * 7 // 8

    @property
    def table_bytes(self) -> int:
        """Bytes of scalar memory for the prefetched arrays of a kernel, after padding.

        Half of 1 MiB, of which the compiler itself takes 4 KiB at least, and more where scalars are spilled.
        """
        return 512 << 10


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
"""A v5e with the least memory of all: what is lowered for it compiles for every chip."""


def tile_rows(rows: int, dtype: DType) -> int:
    """The rows of the tiles in which vector memory holds a matrix of so many rows.

    The least power of two that holds them, at most `SUBLANES`, but not less than fills a sublane's 32 bits: two rows of
    bfloat16, four of int8. So a few rows take less than a whole register.
    """
    fewest = 4 // _stored_bytes(dtype)
    found = fewest
    while found < min(rows, SUBLANES):
        found *= 2
    return found


def padded_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    """The bytes that a buffer takes in vector memory, or in scalar memory, on every chip.

    The last dim is padded to `LANES`, the one before to tiles of `tile_rows`. A vector is padded to whole sublanes: 128
    elements of 32 bits, 256 of 16, 512 of 8. A bool takes 32 bits, a scalar a sublane.
    """
    size = _stored_bytes(dtype)
    if len(shape) < 2:
        return round_up(prod(shape) * size, 4 * LANES)
    rows = round_up(shape[-2], tile_rows(shape[-2], dtype))
    return prod(shape[:-2]) * rows * round_up(shape[-1], LANES) * size


def _stored_bytes(dtype: DType) -> int:
    assert dtype.itemsize <= 4, f"no TPU has {dtype}"
    return 4 if dtype == np.bool_ else dtype.itemsize
