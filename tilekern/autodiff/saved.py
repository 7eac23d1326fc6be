"""The states of folds that a backward pass loads: the carries at each tile, saved by a Func of their own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from tilekern.autodiff.replay import Replay
from tilekern.ir.analysis.sites import runs_whole
from tilekern.ir.carries import Carry, carries
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Func, Op, Value, definitions
from tilekern.ir.memory import Access, Dim, Load, Position, Store, Term
from tilekern.ir.records import record
from tilekern.ir.types import RefType, Role


@record
class SavedState:
    """One carry of a fold, at the start of each tile.

    Attributes:
      fold: the fold, of the Func that is transposed.
      carry: the carry of the fold.
      param: the array of the states, [*tiles of the grid, *tiles of the folds around, tiles of the fold, *carry].
    """

    fold: Fold
    carry: Carry
    param: Value

    @property
    def count(self) -> int:
        """The number of saved carries."""
        return prod(self.param.ref.shape) // max(1, self.carry.result.tile.size)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return prod(self.param.ref.shape) * self.param.ref.dtype.itemsize


class Places:
    """The place of a program and of its folds in the array of a state."""

    def __init__(self, func: Func) -> None:
        self._tiles = [axis.tiles for axis in func.axes]
        self._indices = list(func.body.args)

    @contextmanager
    def inside(self, fold: Fold, index: Value) -> Generator[None]:
        """A context for ops in the body of a fold, at the tile `index`."""
        self._tiles.append(fold.axis.tiles)
        self._indices.append(index)
        try:
            yield
        finally:
            self._tiles.pop()
            self._indices.pop()

    @property
    def indices(self) -> tuple[Value, ...]:
        """The operands of an access to a state."""
        return tuple(self._indices)

    def shape(self, state: Value) -> tuple[int, ...]:
        """The shape of the array of a state."""
        return (*self._tiles, *state.tile.shape)

    def access(self, state: Value) -> Access:
        """The access to a state."""
        places = (Dim("index", Position((Term(n, 1),)), in_bounds=True) for n in range(len(self._tiles)))
        return Access((*places, *(Dim("block", Position(), size, in_bounds=True) for size in state.tile.shape)))


class SavedStates:
    """The states that a transposed Func may load; `backward` saves only states that are loaded after all passes."""

    def __init__(self, func: Func) -> None:
        self.states: tuple[SavedState, ...] = ()
        self._places = Places(func)

    @contextmanager
    def inside(self, fold: Fold, index: Value) -> Generator[None]:
        """A context for ops in the reverse of a fold, at the tile `index`."""
        with self._places.inside(fold, index):
            yield

    def load(self, fold: Fold, carry: Carry) -> Load:
        """The load of a carry at the start of the present tile."""
        value = carry.args[0]
        name = f"{value.name or 'carry'}_saved{len(self.states)}"
        param = Value(RefType(self._places.shape(value), value.tile.dtype, "in"), name)
        self.states = (*self.states, SavedState(fold, carry, param))
        return Load(operands=(param, *self._places.indices), access=self._places.access(value), loc=fold.loc)


def save(func: Func, active: set[Value], states: Sequence[SavedState], inputs: Sequence[Value]) -> Func:
    """The Func that saves states.

    Args:
      func: the Func that is transposed.
      active: its values that depend on linear inputs: no state does.
      states: the states to save, the outputs of the new Func.
      inputs: the inputs of `func` in which it is not linear, the inputs of the new Func.
    """
    outputs = {(s.fold, s.carry.result): Value(replace(s.param.ref, role=_role(func, s)), s.param.name) for s in states}
    saver = _Saver(func, active, outputs)

    def body(*_: Value) -> tuple[Value, ...]:
        saver.replay(func.body)
        return ()

    block = saver.block(func.body.args, body)
    return Func(f"{func.name}_states", (*inputs, *outputs.values()), func.axes, block, func.loc)


def _role(func: Func, state: SavedState) -> Role:
    """The role of the array: "out" if each tile of the fold and of the folds around it always runs, else "zeros"."""
    defined = definitions(func)
    around = _around(func.body, state.fold)
    assert around is not None
    whole = all(isinstance(op, Fold) and runs_whole(op, defined) for op in (*around, state.fold))
    return "out" if whole else "zeros"


def _around(block: Block, fold: Op) -> list[Op] | None:
    """The ops around a fold, the outermost first; None if the block does not contain the fold."""
    for op in block.ops:
        if op is fold:
            return []
        for region in op.regions:
            inner_path = _around(region, fold)
            if inner_path is not None:
                return [op, *inner_path]
    return None


class _Saver(Replay):
    """Stores the carries of folds at the start of each tile."""

    def __init__(self, func: Func, active: set[Value], outputs: dict[tuple[Fold, Value], Value]) -> None:
        super().__init__(active)
        self._outputs, self._places = outputs, Places(func)

    def replay_region(self, op: Op, region: Block) -> None:
        if not isinstance(op, Fold):
            super().replay_region(op, region)
            return
        with self._places.inside(op, self.copy_of(region.args[0])):
            for carry in carries(op):
                ref = self._outputs.get((op, carry.result))
                if ref is not None:
                    state = self.copy_of(carry.args[0])
                    operands = (ref, state, *self._places.indices)
                    self.add(Store(operands=operands, access=self._places.access(state), loc=op.loc))
            super().replay_region(op, region)
