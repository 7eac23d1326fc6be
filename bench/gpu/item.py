"""What a plan is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tilekern.kernel.op import OpFamily
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target

Record = dict[str, Any]
"""What is kept of an item: JSON. `ok` is False where tilekern is wrong, and missing where nothing was judged."""


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
      out: where results go.
      seed: of all inputs.
      seconds: after so many nothing new is begun.
      only: a regular expression; items whose name it does not occur in are left out.
      tune: the kernel whose variants are tried, "" for the whole benchmark.
    """

    out: Path
    seed: int
    seconds: float
    only: str = ""
    tune: str = ""


class Item:
    """One thing to do, with nothing in common with the others, so that it may fail or crash alone.

    Attributes:
      name: tells it from all others of a plan.
      seconds: about how long it takes; it is not begun with less time left.
    """

    name: str
    seconds: float = 5.0

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        """The programs of tilekern that will run, to be compiled in advance."""
        raise NotImplementedError

    def prepare(self, seed: int) -> Any:
        """What `run` needs and takes long on a CPU; done in another process."""
        del seed

    def run(self, seed: int, prepared: Any) -> Record:
        """Do it, on the GPU."""
        raise NotImplementedError


def lowerings_of(function: Callable[..., Any], avals: Sequence[Any], target: Target) -> Iterator[Lowering]:
    """The kernels that a function calls on arguments of the given types, lowered for a target."""
    for equation in _calls(jax.make_jaxpr(function)(*avals).jaxpr):
        family = equation.params["family"]
        if isinstance(family, OpFamily):  # calls kernels in turn
            yield from lowerings_of(family.function(target), [v.aval for v in equation.invars], target)
        else:
            yield family.lowered(target)


def _calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if "family" in equation.params:
            yield equation
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _calls(inner)
