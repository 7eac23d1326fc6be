"""Axes of loops: `serial`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tilekern.errors import ArgumentError, TraceError, checked
from tilekern.ir.core import Axis, cdiv
from tilekern.ir.records import record
from tilekern.lang.tiles import LONGEST, Scalar, as_index, describe, make_axis


@record
class SerialAxis:
    """Loop axis for `fold` and `foreach`, made by `serial`."""

    extent: int
    block: int | None
    start: Scalar
    stop: Scalar
    reverse: bool
    whole_tiles: bool

    def __iter__(self) -> Any:
        raise TraceError(
            "the axis of a loop cannot be iterated over by Python",
            expected="a loop of the language: tk.fold with carries, or tk.foreach without",
            got="a Python loop over tk.serial(...)",
            fix="write the loop's body as a function: tk.fold(tk.serial(n, block), body, init), "
            "or tk.foreach(tk.serial(n, block), body)",
        )

    def edges(self) -> tuple[Scalar | None, Scalar | None]:
        """Start and stop of the range if they may lie inside of a tile; None for a bound that surely does not."""
        start, stop, extent, block = self.start, self.stop, self.extent, self.block or 1
        if self.whole_tiles or block == 1:
            return None, None
        low = jnp.maximum(start, 0) if not isinstance(start, int) else None if self._starts_a_tile(block) else start
        if isinstance(stop, int):
            return low, None if stop >= extent or stop % block == 0 else stop
        # Past the extent, the bounds of arrays decide which lanes are read, as in a loop without a stop.
        return low, stop if extent % block == 0 else jnp.where(stop < extent, stop, cdiv(extent, block) * block)

    def _starts_a_tile(self, block: int) -> bool:
        return isinstance(self.start, int) and (self.start <= 0 or self.start % block == 0)

    def bounds(self) -> tuple[Scalar, Scalar]:
        """Start and stop of the range for `ir.control.Fold`. An empty range gets the stop 0.

        A `Fold` runs the tiles from start // block to cdiv(stop, block). Without the stop 0, an
        empty range inside of a tile would run that tile.
        """
        start, stop, extent, block = self.start, self.stop, self.extent, self.block or 1
        if isinstance(stop, int):
            stop = min(stop, extent)
        if isinstance(start, int) and (start >= extent or (isinstance(stop, int) and start >= stop)):
            return 0, 0
        ends_a_tile = isinstance(stop, int) and stop % block == 0
        if block == 1 or self._starts_a_tile(block) or ends_a_tile:
            return start, stop
        if isinstance(start, int) and isinstance(stop, int):
            return start, stop
        runs: Any = start < stop
        if not isinstance(start, int) and not isinstance(stop, int):
            runs = runs & (start < extent)
        return start, jnp.where(runs, stop, 0)


@checked
def serial(
    extent: int,
    block: int | None = None,
    *,
    start: Any = 0,
    stop: Any = None,
    reverse: bool = False,
    whole_tiles: bool = False,
) -> Any:
    """Loop axis of `extent` elements, walked in tiles of `block` elements, or element by element without a block.

    `start` and `stop` are positions in elements: ints or traced scalars, clamped to [0, extent]. The loop runs the
    tiles that overlap [start, stop), and none if start >= stop. Lanes outside of the range read fill values, store
    nothing, and are not `valid`. With `whole_tiles=True` they are ordinary lanes, for kernels with masks of their own.
    `reverse` walks the same tiles from the last to the first.
    """
    axis = make_axis("", extent, block)
    _check_length(axis)
    last = axis.extent if stop is None else as_index(stop, "stop")
    for name, flag in (("reverse", reverse), ("whole_tiles", whole_tiles)):
        if not isinstance(flag, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
            raise ArgumentError(
                f"{name} must be a bool",
                expected="True or False",
                got=f"{name} = {describe(flag)}",
                fix="use bool(...)",
            )
    first = as_index(start, "start")
    first, last = (min(max(b, 0), axis.extent) if isinstance(b, int) else b for b in (first, last))
    return SerialAxis(axis.extent, block, first, last, reverse, whole_tiles)


def _check_length(axis: Axis) -> None:
    """Refuse an axis whose bounds overflow int32. Backends add block - 1 to a bound, to round it up to whole tiles."""
    if axis.extent + axis.block - 1 > LONGEST:
        raise ArgumentError(
            "the axis of a loop is longer than its bounds can count: they are int32",
            expected=f"at most {LONGEST - axis.block + 1} elements in such tiles",
            got=f"an axis of {axis.extent} elements in tiles of {axis.block}",
            fix="loop over two axes, tk.fold((tk.serial(n), tk.serial(m, block)), ...), and reshape the array likewise",
        )
