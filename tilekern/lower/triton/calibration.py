"""Numbers of the Triton backend that were chosen, with their units, reasons and dates.

No measurement on a GPU stands behind them; `python -m bench.gpu --tune` measures variants of warps and stages. Limits
that NVIDIA documents are no such numbers: they stand in `chip`, or next to the code that obeys them.
"""

from __future__ import annotations

ELEMENTS_PER_THREAD = 16
"""Elements of the largest tile for each thread, in a program without dots.

Sixteen float32 take 16 of a thread's 255 registers, which leaves room for several such tiles. Chosen on 2026-11-20.
"""

MAX_DEFAULT_WARPS = 8
"""Warps of a program, unless a schedule or a call asks for more: two warpgroups. Chosen on 2026-11-20."""

DOT_WARPS = 4
"""Warps of a program whose dots are small: one warpgroup, the unit of sm_90's `wgmma`. Chosen on 2026-11-20."""

LARGE_DOT_WARPS = 8
"""Warps of a program with a large dot: each of two warpgroups has 64 of 128 rows. Chosen on 2026-11-20.

An accumulator of 128 × 128 float32 takes 64 registers of each of 256 threads; with 128 threads it would take 128.
"""

LARGE_DOT = 128 * 128
"""Elements of the result from which on a dot is large. Chosen on 2026-11-20, together with `LARGE_DOT_WARPS`."""

DEFAULT_STAGES = 2
"""Iterations of a loop whose loads are in flight at once, unless a schedule or a call gives another number.

Two are double buffering: shared memory grows with the stages, so more of them may not fit. Chosen on 2026-11-20.
"""

OTHER_REGISTERS = 50
"""Registers of a thread beside the carries of its loop and the largest product there, for `delay_dots`.

By what ptxas 12.8 and 12.9 make of attention for sm_90: with 64 registers each for the values, the exponentials and the
logits a thread takes 241 to 246 of its 255, and none spills. Compiled on 2026-11-23.
"""

DELAYED_SUM_REGISTERS = 64
"""Registers of a thread for the sum to which a delayed product is added, at most.

With 96, attention of heads of 192 takes up to 255 registers and spills 8 bytes with windows; with 128, heads of 256
spill 28 to 76 bytes. Compiled on 2026-11-23.
"""

MAX_RING_STAGES = 4
"""Tiles of a loop that a warp-specialised program has in flight at most, for each product. Chosen on 2026-11-25."""

OTHER_REGISTERS_OF_ROLES = 40
"""Registers of a thread of a warp-specialised program beside sums, products and held operands.

With 40, attention of heads of 256, and the key gradient of heads of 128, take 216 and 232 of 240, and none spills.
Compiled on 2026-11-25.
"""

UNBALANCED = 0.05
"""Excess of the busiest thread block from which on programs run in another order than the grid's.

Chosen on 2026-11-25.
"""

MIN_TMA_BYTES = 1024
"""Bytes of the smallest tile that the Tensor Memory Accelerator copies; a pointer loads smaller ones.

Chosen on 2026-11-20.
"""

MAX_INLINED = 72
"""Characters of the longest expression that is put into another one. By eye, for lines that a person can read."""

SPILLED_LOADS = 2
"""Registers of a thread for the tiles that one block loads from which on ptxas spills, in units of all it has.

For a sum of products of tiles with 32 registers each, ptxas 12.8 for sm_90 spills nothing of 8 (264 registers), 5,508
bytes of 16 (528), 12,168 of 32 and 27,120 of 64; it takes 0.4 s for 16 and 20 s for 64. The library's programs have at
most 181. Compiled on 2026-11-26.
"""

SPILLED_OPERANDS = 5
"""The same for the operands of a product of float32.

With 128 × 128 results of 256 threads ptxas 12.8 for sm_90 spills nothing of a depth of 32 (512 registers), 2,544 bytes
of 64 (1,024) and 43,616 of 128 (2,048); with 64 × 64 of 128 threads nothing (362), 652 bytes (724) and 19,340 (1,448).
The library's programs have at most 1,024. Compiled on 2026-11-26.
"""
