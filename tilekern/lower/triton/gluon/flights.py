"""Products in flight: a warpgroup starts a product, goes on, and waits for it where its result is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value
from tilekern.lower.triton.emit.source_text import Writer
from tilekern.lower.triton.gluon.rings import Rings


@dataclass
class Flight:
    """A product that has been started.

    Attributes:
      dot: the product.
      value: its result.
      frees: barriers to arrive at when it is done.
      again: a barrier that it waited for, to be asked once more before the wait for its result; "" for none.
    """

    dot: Dot
    value: Value
    frees: list[str]
    again: str = ""


class Flights:
    """The products of a warpgroup that have been started and not waited for, in their order.

    Args:
      writer: the lines of the program.
      rings: its places in the rings.
      text_of: the expression of a value.
      runs_beside: True for a product that runs beside other ops.
    """

    def __init__(
        self, writer: Writer, rings: Rings, text_of: Callable[[Value], str], runs_beside: Callable[[Dot], bool]
    ) -> None:
        self._writer, self._rings, self._text_of, self._runs_beside = writer, rings, text_of, runs_beside
        self._flights: list[Flight] = []

    def add(self, dot: Dot, value: Value, acc: Value | None, frees: list[str], again: str) -> None:
        """Add a product that was started. A product in flight with the result `acc` becomes a part of it."""
        chained = [f for f in self._flights if f.value is acc]
        frees = [*(barrier for f in chained for barrier in f.frees), *frees]
        self._flights = [f for f in self._flights if f not in chained]
        self._flights.append(Flight(dot, value, frees, again))

    @property
    def values(self) -> list[Value]:
        """The results, in the order in which the products were started."""
        return [flight.value for flight in self._flights]

    def only(self) -> Flight:
        """The single product in flight."""
        (flight,) = self._flights
        return flight

    def clear(self) -> None:
        """Forget all products, for which other lines wait."""
        self._flights.clear()

    def settle(self, values: Iterable[Value]) -> None:
        """Wait for the products whose results are among `values`, and for all products that were started before."""
        results = set(values)
        count = max((n for n, flight in enumerate(self._flights, 1) if flight.value in results), default=0)
        if count:
            self._wait(count)

    def _wait(self, count: int) -> None:
        """Wait for the first products in flight."""
        done, self._flights = self._flights[:count], self._flights[count:]
        names = [self._text_of(flight.value) for flight in done]
        if not self._flights and done[-1].again and self._runs_beside(done[-1].dot):
            # ptxas would move the wait up to the start of the product; it moves none across a barrier.
            self._writer.line(done[-1].again)
        deps = f"{', '.join(names)}{',' if len(names) == 1 else ''}"
        self._writer.line(
            f"{', '.join(names)} = warpgroup_mma_wait({len(self._flights)}, deps=({deps}))", done[-1].dot.loc
        )
        self._rings.arrive([barrier for flight in done for barrier in flight.frees])
