"""Items of a plan, and the options of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target

Record = dict[str, Any]
"""The JSON record of an item. `ok` is False if tilekern is wrong, and missing if nothing was checked."""


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
      out: folder of the results.
      seed: seed of all inputs.
      seconds: time after which no item is started.
      only: regular expression; items whose name does not match are left out.
      tune: kernel whose variants are timed, "" for the whole benchmark.
      launch: target of the pretended GPU on which items are launched only, "" for a real GPU.
    """

    out: Path
    seed: int
    seconds: float
    only: str = ""
    tune: str = ""
    launch: str = ""


class Item:
    """One item of a plan. It shares nothing with the others, so that it may fail or crash alone.

    Attributes:
      name: unique name in the plan.
      seconds: estimate of its time; it is not started with less time left.
    """

    name: str
    seconds: float = 5.0

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        """The programs of tilekern that the item runs, which are compiled in advance."""
        raise NotImplementedError

    def prepare(self, seed: int) -> Any:
        """Compute the slow inputs of `run` on a CPU, in another process."""
        del seed

    def run(self, seed: int, prepared: Any) -> Record:
        """Run the item on the GPU."""
        raise NotImplementedError

    def launch(self, seed: int) -> None:
        """Launch tilekern's programs as `run` does; results are not looked at, because no kernel may have run."""
        raise NotImplementedError


def lowerings_of(function: Callable[..., Any], avals: Sequence[Any], target: Target) -> Iterator[Lowering]:
    """The lowered kernels that a function calls on arguments of types `avals`, without repetitions.

    A kernel is lowered for the target that its call names, else for `target`.
    """
    seen: set[Any] = set()
    for equation in _calls(jax.make_jaxpr(function)(*avals).jaxpr):
        family = equation.params["callee"]
        operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        for kernel, its_target in family.kernels(family.asked or target, operands):
            if (kernel, its_target) not in seen:
                seen.add((kernel, its_target))
                yield kernel.served(its_target)[1]


def _calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if "callee" in equation.params:
            yield equation
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _calls(inner)
