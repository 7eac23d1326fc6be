"""Fitted and chosen numbers of the TPU backend, each with its unit, source and date.

*Fitted* numbers come from kernels that libtpu 0.0.51 compiled, with the bytes of VMEM that it reported. *Chosen*
numbers were not measured. No TPU was measured. Limits of the hardware, which a vendor states, are in `chip.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

# --- memory that a plan may take ---

VMEM_BUDGET = Fraction(7, 8)
"""Share of the VMEM limit that a plan may take; the rest is for errors of the estimate. Chosen, 2026-11-20."""

VMEM_LIMIT_FACTOR = Fraction(3, 2)
"""VMEM that the compiler may give a kernel, in units of the plan's estimate. Chosen, 2026-11-20."""

VMEM_LIMIT_SLACK = 4 << 20
"""Bytes of VMEM that the compiler may give a kernel in addition to `VMEM_LIMIT_FACTOR`. Chosen, 2026-11-20."""

TABLE_BYTES = 512 << 10
"""Bytes of scalar memory for prefetched arrays, after padding: half of 1 MiB. Chosen, 2026-11-20.

The compiler takes 4 KiB at least, and more if it spills scalars.
"""

TABLE_SHARE = Fraction(1, 4)
"""Share of `TABLE_BYTES` that one table of computed scalars may take. Chosen, 2026-11-20."""

RESIDENT_GAIN = 2
"""Factor by which fetching the blocks of an input must move more bytes than fetching all of it once.

Only then all of the input is in VMEM: it is fetched before the first program, while no program computes. Chosen,
2026-11-22.
"""

EXPOSED_BYTES = 16 << 20
"""Bytes of VMEM from which on the loop of a single program is an axis of the grid: it computes while tiles are fetched.

20 µs at the bandwidth of v5e, where a step of the grid takes less than 1 µs. Chosen, 2026-11-25.
"""

# --- time to plan and to compile ---

MAX_ENUMERATED_STEPS = 1 << 20
"""Steps of a grid that are enumerated to see which blocks they write. Chosen, 2026-11-20."""

MAX_TABLE_STEPS = 1 << 15
"""Steps of a step table: three words or more of scalar memory each. Chosen, 2026-11-20."""

MAX_PERMUTED_AXES = 6
"""Axes of a grid whose orders are all tried: 720. Chosen, 2026-11-22."""

MAX_PROOF_DEPTH = 8
"""Nested minima, maxima and products that a proof of x <= y goes through. Chosen, 2026-11-20."""

MAX_PREFETCH_TILE = 1 << 16
"""Elements of an intermediate tile in the program of a table. Chosen, 2026-11-20."""

MAX_ESTIMATED_OPS = 2000
"""Ops of a block whose values in VMEM are estimated; values of a longer block are not counted. Chosen, 2026-11-20."""

OPS_PER_ROW = 16
"""Operations of Mosaic for each row that an access by rows reads or writes, at least. Counted, 2026-11-22."""

MAX_GATHERED_ROWS = 128
"""Rows that a load by index vectors reads one by one, in `OPS_PER_ROW` operations each. Chosen, 2026-11-26."""

MAX_TAKEN_BYTES = 1 << 20
"""Bytes of a block of which more rows are taken in registers. Chosen, 2026-11-26.

Taking 128 lanes of such a block takes 768 operations: `OPS_PER_ROW` for each lane would be 2,048.
"""

# --- unrolled loops ---

MAX_UNROLLED = 4
"""Iterations of a loop that are unrolled at once, if they divide the trip count, or are all. By static cycles of
attention (bench/tpu_static), 2026-11-21."""

DEFAULT_UNROLLED = 2
"""Iterations of a loop that are unrolled at once for any other trip count. Same source as `MAX_UNROLLED`."""

# --- values that do not stay in registers ---

REGISTER_TILE_BYTES = 208 << 10
"""Bytes of the largest tile that stays in registers. Fitted, 2026-11-21."""

REGISTER_VALUES = 124 << 10
"""Bytes of values that stay in registers in a kernel without dots. Fitted, 2026-11-22: 92 to 170 KiB."""

REGISTER_COLUMNS = 16 * 128
"""Columns of eight rows that stay in registers; longer rows are loaded in parts. Fitted, 2026-11-21."""

RELOADED_BYTES = 288 << 10
"""Bytes of a loaded float32 tile that wait behind a barrier; the rest is loaded again.

Fitted, 2026-11-22: 0 to 460 KiB.
"""

AWAITED_FUNCTIONS = 2
"""Functions such as exp, one after the other, for whose result the result of a dot waits. Fitted, 2026-11-29.

By the final bundles of the Jensen-Shannon divergence (distillation), which takes log(1 + exp(x)) of a dot's results.
"""

LONG_ROW_SHARE = Fraction(3, 4)
"""Share of a loaded tile with long rows that waits; the rest is loaded again. Fitted, 2026-11-22: 0.05 to 1."""

TRIANGLE_SHARE = Fraction(2, 3)
"""Share of a triangularly masked tile that waits. Fitted, 2026-11-22: 0.58 to 0.84."""

CONCATENATED_SHARE = Fraction(2, 3)
"""Share of a concatenation of rows that waits, if its parts come from one tile. Fitted, 2026-11-22."""

RESHAPED_SHARE = Fraction(1, 2)
"""Share of a tile that waits when a reshape changes its number of lanes. Fitted, 2026-11-22: 0 to 0.9."""

NARROW_RESHAPED_SHARE = Fraction(3, 4)
"""`RESHAPED_SHARE` for elements of less than 32 bits. Fitted, 2026-11-22."""

PADDED_RESHAPE = 4
"""Bytes of a reshaped tile in VMEM for each byte of its elements, from which on it waits as a whole. Fitted,
2026-11-22."""

# --- operands of dots ---

PASS_COLUMNS: Mapping[str, int] = MappingProxyType({"tpu:7x": 512})
"""Columns of a right operand that are multiplied in one pass, by target; otherwise the columns of a matrix unit.

Fitted, 2026-11-21.
"""

PACKED_PARTS = frozenset({"tpu:7x"})
"""Targets on which the narrow parts of a float32 right operand are packed bfloat16; elsewhere a part is the float32
operand with its low bits masked. Read in the compiler's final bundles, 2026-11-29: `vpack.c.f32.bf16` and
`vmatpush1.bf16`, elsewhere `vand.u32` and `vmatpush1`."""

MANY_PASSES = 4
"""Passes in depth through a matrix unit from which on a dot copies its left operand, and a loop keeps it. Fitted,
2026-11-21."""

BANKED_TILES = 8
"""Tiles of VMEM in a row of a block: the left operand of a dot is copied on chips with matrix units of 256, if a row
takes a multiple of so many. Fitted, 2026-11-22."""
