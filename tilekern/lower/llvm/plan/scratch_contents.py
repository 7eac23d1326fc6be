"""The tiles that the bytes of scratch memory hold, at one point of a program: the model by which plans are verified."""

from __future__ import annotations

from collections.abc import Iterable

from tilekern.ir.core import Value
from tilekern.lower.llvm.plan.steps import Buffer

type Span = tuple[int, int]
"""The first byte of a buffer in scratch memory, and the one behind its last."""


def span_of(buffer: Buffer) -> Span:
    """The bytes that code for a buffer reads and writes."""
    return buffer.root.offset, buffer.root.offset + buffer.nbytes


def overlap(a: Span, b: Span) -> bool:
    """True if two spans have a byte in common."""
    return max(a[0], b[0]) < min(a[1], b[1])


class ScratchContents:
    """The tiles that each span holds: several if they are equal, such as a tile and its reshape."""

    def __init__(self) -> None:
        self._tiles: dict[Span, frozenset[Value]] = {}
        self._lost: dict[Value, str] = {}

    def copy(self) -> ScratchContents:
        """A copy of the contents, which changes independently."""
        copy = ScratchContents()
        copy._tiles, copy._lost = dict(self._tiles), dict(self._lost)
        return copy

    def holds(self, span: Span, tile: Value) -> bool:
        """True if every element of a tile is in its place in a span."""
        return span[0] == span[1] or tile in self._tiles.get(span, ())

    def tiles(self, span: Span) -> frozenset[Value]:
        """The tiles that are whole in a span."""
        return self._tiles.get(span, frozenset())

    def write(self, span: Span, tiles: Iterable[Value], writer: str) -> None:
        """Overwrite all bytes of a span with equal tiles."""
        self.forget(span, writer)
        self.add(span, tiles)

    def add(self, span: Span, tiles: Iterable[Value]) -> None:
        """Note that a span holds `tiles` besides the tiles noted before."""
        if span[0] < span[1]:
            self._tiles[span] = self.tiles(span) | frozenset(tiles)

    def forget(self, span: Span, writer: str) -> None:
        """Note that a writer may have changed any byte of a span."""
        for stale in [stale for stale in self._tiles if overlap(stale, span)]:
            self._lost.update(dict.fromkeys(self._tiles.pop(stale), writer))

    def reason(self, tile: Value) -> str:
        """Says why a tile is not in memory."""
        writer = self._lost.get(tile)
        return "no earlier step writes it" if writer is None else f"overwritten by {writer}"
