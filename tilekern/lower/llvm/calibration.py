"""Numbers of the CPU backend that were measured or chosen, with their units, reasons and dates.

The measurements ran on two cores of x86-64 servers with AVX-512; nothing was measured on ARM. Limits of an instruction
set or of an interface are no such numbers: they stand next to the code that obeys them.
"""

from __future__ import annotations

# --- loop nests ------------------------------------------------------------------------------------------------------

CHEAP_COST = 2
"""Cost of a tile that several steps recompute rather than keep in memory, in simple instructions for each element.

A store and a load cost about as much. Chosen on 2026-11-21.
"""

FUNCTION_COST = 12
"""Cost of a mathematical function or a division, in simple instructions for each element. Chosen on 2026-11-21."""

GATHER_COST = 4
"""Cost of an element that is gathered, or read across the rows of a tile, in simple instructions.

Chosen on 2026-11-21.
"""

ACCUMULATORS = 4
"""Accumulators of a long reduction or of a column of a matrix-vector product.

Each addition waits for the previous one in its accumulator. An addition takes 4 cycles, and at most 2 start in a cycle;
more accumulators would take registers from what computes the elements. Chosen on 2026-11-21.
"""

NEIGHBOURS = 4
"""Vectors side by side that a scan, or a reduction of rows, takes from each row.

Rows lie far apart in memory: with one vector each, every load is of another page. Their chains of operations run side
by side, too. With 4, rg_lru in chunks of 64 rows takes 0.6 of the time with 1; with 8, 0.6 to 0.9. Measured on
2026-11-25.
"""

MIN_STREAMED_VECTORS = 4
"""Vectors of a row of an array from which on rows are reduced one after the other, with `ACCUMULATORS` each.

Four rows at once share the shuffles that reduce lanes, but the CPU then reads pieces of four rows with gaps between
them, which its prefetcher follows less well. Four at once, sums of 65536 rows of 128 took 3.6 ms, one after
the other 1.5; library kernels 0.72 to 1.04 of the time, rows in the first-level cache up to 1.12. A Zen 4, 2026-11-28.
"""

LOOKUP_OPS = 3
"""Ops for each lane from which on a function of 4 bits is looked up in a register.

To look up takes two instructions for a vector of float32: to widen the bytes, and the lookup. Chosen on 2026-11-28.
"""

# --- matrix products -------------------------------------------------------------------------------------------------

MAX_GEMV_ROWS = 4
"""Rows of the left operand up to which a product packs nothing.

Packing reads and writes each element of the right operand once, and the product then reads it once for each row.
Chosen on 2026-11-21.
"""

MAX_UNPACKED_ROWS = 16
"""Rows of the left operand up to which the right one is read in place, if its rows are contiguous.

Chosen on 2026-11-21.
"""

PANEL_BYTES = 32 << 10
"""Bytes of the part of a packed panel that all rows of the left operand pass by.

It stays in the first-level cache, of 32 to 48 KiB on x86-64 servers. Chosen on 2026-11-21.
"""

TILE_PANEL_BYTES = 16 << 10
"""The same of panels that tiles multiply: half of the cache is for rows that stream by, tile after tile.

Products of 2048³ took 4 to 10 % longer with 8, 24 and 32 KiB. Measured on 2026-11-25.
"""

CONFLICTING_ROW_BYTES = 2048
"""Rows of a tile that are a multiple of this apart are packed, if `MIN_PACKED_PANELS` panels read them.

A first-level cache of 48 KiB has 64 sets of 12 lines; so far apart, 32 rows meet in one set or in two. Chosen on
2026-11-25.
"""

FAR_WORD_BYTES = 2048
"""Words along k of a left operand that are so far apart are packed, if `MIN_PACKED_PANELS` panels read them.

A transposed operand has each in a page of its own, of which a core knows the addresses of 96. A product of 2048³ in
float32 took 11 % longer without. Measured on 2026-11-25.
"""

MIN_PACKED_PANELS = 4
"""Panels for which operands that lie badly are packed. Chosen on 2026-11-25."""

MAX_MICROKERNEL_ROWS = 8
"""Rows of a microkernel with a narrow panel: less than `WIDE_PANEL_VECTORS` registers. Chosen on 2026-11-21."""

WIDE_PANEL_VECTORS = 4
"""Registers of a row of a wide panel, at least. A wide panel has at most `MAX_WIDE_MICROKERNEL_ROWS`."""

MAX_WIDE_MICROKERNEL_ROWS = 6
"""Rows of a microkernel with a wide panel: 24 of 32 registers hold sums. Chosen on 2026-11-21.

Prototypes with such microkernels ran at 98 to 100 % of a core's peak on packed operands (design record 0020).
"""

PREFETCHED_LINES = 8
"""Cache lines that are prefetched by one iteration of a loop without branches. Chosen on 2026-11-22."""

# --- sorts -----------------------------------------------------------------------------------------------------------

MIN_TOP_K_VECTORS = 4
"""Vectors of 32-bit keys that a top-k keeps sorted at least, and as many candidates. Chosen on 2026-11-22.

Candidates of a long line are merged when there is no room for more. Few candidates would be merged too often.
"""

# --- tasks -----------------------------------------------------------------------------------------------------------

MAX_TASKS = 4096
"""Tasks of a call; of more programs, several are one task. Claiming a task then costs little beside running it.

Chosen on 2026-11-21.
"""

CLAIMS_PER_THREAD = 8
"""Guided scheduling: each claim takes 1 / (8 × threads) of the remaining tasks.

Neighbouring tasks touch neighbouring memory, so claims should be large; small ones at the end balance the load. Chosen
on 2026-11-21.
"""

SPINS_BEFORE_YIELD = 2000
"""Looks of a waiting thread at the counter of finished tasks before it yields the core: some microseconds.

Chosen on 2026-11-21.
"""

MAX_STACK_SCRATCH = 16 << 10
"""Bytes of scratch memory up to which a thread takes it from its stack. Chosen on 2026-11-21.

The stacks of all threads have room for it; more comes from the heap.
"""

MAX_SCRATCH = 1 << 30
"""Bytes of scratch memory that a thread may have. Chosen on 2026-11-21."""

# --- updates of arrays (design records 0022 and 0040) ----------------------------------------------------------------
# Results depend on these numbers, so no number may depend on the machine.

MAX_PARTIAL_SUMS = 16
"""Copies of an array that floats are added to, hence tasks that add to it. Chosen on 2026-11-21."""

MAX_PARTIAL_SUM_BYTES = 64 << 20
"""Bytes of all partial sums of a kernel. Chosen on 2026-11-21."""

MIN_WORK_PER_PARTIAL_SUM = 32
"""Elements that programs compute for each element of a partial sum, at least.

With 16 partial sums of a large array, clearing them and adding them up took longer than all additions: sums of segments
were at 0.15 to 0.5 of XLA's speed, measured on 2026-11-22.
"""

MIN_SLICE_COLUMNS = 32
"""Columns of a task's slice of an array that rows are added to: whole cache lines. Chosen on 2026-11-22."""

PREFETCHED_ROWS = 8
"""Rows by which the addends of a slice are prefetched.

Parts of rows lie far apart: the processor's own prefetcher loads what lies between them, which other slices add. On a
Zen 3 sums of segments of 65536 rows of 128 took 2.9 times the processor's time of XLA's, and 1.9 times with this; of
16384 rows of 512 3.0 and 2.1 times. 32 rows are no better. Measured on 2026-11-25.
"""

MAX_PRIVATE_TASKS = 32
"""Tasks of a kernel that updates private copies: each task fills its copy and merges it. Chosen on 2026-11-22."""

MAX_PRIVATE_BYTES = 1 << 20
"""Bytes of a thread's private copies, which stay in its second-level cache. Chosen on 2026-11-22."""

MIN_PRIVATE_UPDATES = 8
"""Updates of an element, on average, from which on private copies pay.

An atomic instruction takes 5 ns on a cache line that no other core has, and much more on one that another core has;
histograms were at 0.1 to 0.3 of XLA's speed. Measured on 2026-11-22.
"""

MIN_PRIVATE_LANES = 16
"""Elements that a program updates, from which on private copies pay. Chosen on 2026-11-22.

Programs that update fewer do other work, for which `MAX_PRIVATE_TASKS` are too few.
"""

# --- the compiler ----------------------------------------------------------------------------------------------------

OPTIMIZATION_LEVEL = 2
"""LLVM's level, of 0 to 3. Level 3 takes a fifth longer for code that is as fast. Measured on 2026-11-21."""

CPUS_WITH_SLOW_BFLOAT16 = ("sapphirerapids", "emeraldrapids")
"""CPUs, by LLVM's names, that multiply pairs of bfloat16 slower than float32.

Products of bfloat16 start every other cycle, multiply-adds of float32 twice a cycle: 85 and 172 GFLOP/s on a core of an
Emerald Rapids; a Sapphire Rapids has the same cores. A virtual machine may report another model, but cores with AMX are
of this kind: 108 and 183 GFLOP/s on one that LLVM takes for a Rocket Lake. Measured on 2026-11-22. Where the system
gives them, tiles multiply instead (design record 0073).
"""
