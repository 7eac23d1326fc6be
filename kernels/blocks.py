"""Block sizes that the schedules of several kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import tilekern as tk

LOADING = 16
"""Cost of loading a row or a column of a tile, relative to one multiply-add per element of the tile.

Loads are then a fifth of the time for tiles of 128 × 256, and half of it for 64 × 64."""


def even(extent: int, limit: int) -> int:
    """A block of at most `limit` that cuts `extent` into tiles of nearly equal size.

    Where it divides the extent, there is no ragged tile to compute or to compile.
    """
    return max(1, tk.cdiv(extent, max(1, tk.cdiv(extent, limit))))


def divisor(extent: int, limit: int) -> int:
    """The largest divisor of `extent` that is at most `limit`; 1 for an extent of 0."""
    return max((n for n in range(1, min(extent, limit) + 1) if extent % n == 0), default=1)


def power_of_two(extent: int, limit: int, least: int = 1) -> int:
    """The smallest power of two from `least` to `limit` that holds `extent`: sizes of GPUs' tiles are powers of two."""
    return max(least, min(limit, 1 << max(extent - 1, 0).bit_length()))


def tiled(extent: int, limit: int, unit: int) -> int:
    """A block for a dim of a TPU's array: all of it up to `limit`, else a multiple of `unit` that cuts it evenly.

    A TPU's vector memory has tiles of 8 rows (`unit` 8) by 128 lanes (128); other blocks make XLA rearrange the array.
    """
    if extent <= limit:
        return max(1, extent)
    return tk.cdiv(tk.cdiv(extent, tk.cdiv(extent, limit)), unit) * unit


def copies_well(row: int, itemsize: int) -> bool:
    """True if rows of so many elements start at multiples of 16 bytes, the unit of copies of a thread or the TMA."""
    return row * itemsize % 16 == 0


def depth(inner: int, itemsize: int) -> int:
    """Contracted elements of a tile: 128 bytes of a row, the most that a GPU copies without bank conflicts.

    The number is a power of two, at least 16, and no larger than it takes to hold `inner` elements.
    """
    return power_of_two(inner, 128 // itemsize, 16)


def takes_registers(device: tk.Device) -> bool:
    """True if products take their operands from registers, and not from shared memory."""
    return device.matrix_unit in ("mma", "mfma")


def soonest_parts(programs: int, tiles: int, cores: int) -> int:
    """The number of parts of a loop over `tiles` tiles, a program each, with which all programs end soonest.

    A program takes as long as its tiles, and one more for its start and its end.
    """

    def time(parts: int) -> int:
        return tk.cdiv(programs * parts, cores) * (tk.cdiv(tiles, parts) + 1)

    most = min(tiles, tk.cdiv(4 * cores, max(1, programs)))
    return min(range(1, most + 1), key=time, default=1)


def stages(nbytes: int, most: int, device: tk.Device) -> int:
    """The stages, at most `most`, whose loads of `nbytes` each fit the shared memory of a program, beside 1 KiB.

    Where products take operands from registers, one stage is in registers and needs no shared memory.
    """
    if device.matrix_unit == "mfma":
        # On gfx942 one stage is in registers. On gfx950, which copies to shared memory beside other instructions, all
        # stages are in shared memory, with up to 1/16 between their rows.
        fit = device.fast_memory // max(1, nbytes + nbytes // 16)
        return max(1, min(most, fit + (device.target == "rocm:gfx942")))
    fit = (device.fast_memory - 1024) // max(1, nbytes)
    return max(1, min(most, fit + takes_registers(device)))


def soonest(rows: int, columns: int, tiles: Sequence[tuple[int, int]], cores: int) -> tuple[int, int]:
    """The tile among `tiles` with which the programs of a matrix [rows, columns] take the least time on `cores` cores.

    Large tiles load less for each product; small tiles keep more multiprocessors busy.
    """

    def time(tile: tuple[int, int]) -> int:
        m, n = tile
        waves = tk.cdiv(tk.cdiv(rows, m) * tk.cdiv(columns, n), cores)
        return waves * (m * n + LOADING * (m + n))

    return min(tiles, key=time)
