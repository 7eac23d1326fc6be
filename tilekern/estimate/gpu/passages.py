"""Passages of loops: a warp that enters a loop with the register values of an earlier passage takes the same way.

The way through a loop depends on the registers that the loop reads before it writes them. An outer loop mostly enters
an inner loop with equal values in each iteration, and so do the programs of a grid. Such a loop is walked once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tilekern.estimate.gpu.scalar import Bytes, Registers, Value

ROOM = 1 << 20
"""Sizes of all passages together that are remembered: memory has an end where nothing repeats itself."""


class Layer(Registers):
    """The registers that are written within a loop, above the registers at its entry.

    Attributes:
      below: the registers at the entry, which stay as they are until the loop is left.
      reads: the values at the entry of the registers that are read before they are written.
    """

    def __init__(self, below: Registers) -> None:
        super().__init__()
        self.below = below
        self.reads: Registers = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a register; 0 if it was never written, whatever the default."""
        del default
        if key in self:
            return self[key]
        if key not in self.reads:
            self.reads[key] = self.below.get(key, 0)
        return self.reads[key]

    def merge(self) -> Registers:
        """Write to the registers below, and return them."""
        self.below.update(self)
        return self.below


def _peek(registers: Registers, key: str) -> Value | Bytes:
    """The value of a register, without a note that it is read."""
    while isinstance(registers, Layer) and key not in registers:
        if key in registers.reads:
            return registers.reads[key]
        registers = registers.below
    return registers.get(key, 0)


class Passages[Passage]:
    """Passages of loops, by the loop and by the values that decide the passage."""

    def __init__(self) -> None:
        self._room = ROOM
        # By loop, by the registers that passages read, by their values.
        self._by_values: defaultdict[int, dict[tuple[str, ...], dict[tuple[Any, ...], Passage]]] = defaultdict(dict)

    def get(self, loop: int, registers: Registers) -> Passage | None:
        """The passage that registers at a loop's entry lead to; None if none is remembered."""
        for names, passages in self._by_values[loop].items():
            if passage := passages.get(tuple(_peek(registers, name) for name in names)):
                for name in names:
                    registers.get(name)  # the passage of an outer loop depends on it, too
                return passage
        return None

    def add(self, loop: int, layer: Layer, passage: Passage, size: int) -> None:
        """Remember a passage, which wrote a layer of registers; `size` counts the other things that it holds."""
        self._room -= size + len(layer) + len(layer.reads)
        if self._room > 0:
            names = tuple(sorted(layer.reads))
            by_values = self._by_values[loop].setdefault(names, {})
            by_values[tuple(layer.reads[name] for name in names)] = passage
