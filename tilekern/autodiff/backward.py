"""The backward pass of a Func: the Funcs to run, one after the other, for the cotangents of its linear inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilekern.autodiff.saved import SavedState, save
from tilekern.autodiff.transpose import transpose
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import MemoryOp
from tilekern.passes import pipeline


@dataclass(frozen=True)
class Stage:
    """A Func of a backward pass.

    Attributes:
      func: its inputs are arrays of the pass: what the pass is given, and results of stages before.
      results: the arrays of the pass that its outputs are.
    """

    func: Func
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Backward:
    """A backward pass.

    Attributes:
      known: the inputs that the Func is not linear in, given.
      cotangents: of the outputs, given.
      stages: in their order.
      results: for each linear input, its cotangent.
    """

    known: tuple[Value, ...]
    cotangents: tuple[Value, ...]
    stages: tuple[Stage, ...]
    results: tuple[Value, ...]


def backward(func: Func, linear: Sequence[bool]) -> Backward:
    """The backward pass of a Func that is linear in some inputs; see `transpose`."""
    transposed = transpose(func, linear)
    improved = pipeline.run(transposed.func)
    read = {op.ref for op in improved.walk() if isinstance(op, MemoryOp)}
    needed = [s for s in transposed.states if s.param in read]
    dropped = {s.param for s in transposed.states} - read
    improved = replace(improved, params=tuple(p for p in improved.params if p not in dropped))
    stages = [Stage(improved, improved.outputs)]
    if needed:
        stages.insert(0, _saver(func, transposed.active, needed, transposed.known))
    return Backward(transposed.known, transposed.cotangents, tuple(stages), improved.outputs)


def _saver(func: Func, active: set[Value], states: list[SavedState], known: Sequence[Value]) -> Stage:
    saver = pipeline.run(save(func, active, states, known))
    return Stage(saver, tuple(s.param for s in states))
