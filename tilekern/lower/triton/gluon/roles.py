"""The base of both roles of a warp-specialised program: the loop over groups of programs, and bounds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op
from tilekern.lower.triton.emit.emit_triton import Emitter, Scope
from tilekern.lower.triton.emit.memory import Memory
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.source_text import Expr
from tilekern.lower.triton.gluon.channels import visible
from tilekern.lower.triton.gluon.layouts import vector_layout
from tilekern.lower.triton.gluon.plan import Plan
from tilekern.lower.triton.gluon.rings import Buffers, Rings

WIDTH = "BLOCKS"
"""The name of the number of thread blocks, a constant of the text: divisions by it are by a known number."""


class Role(Emitter):
    """Emits the body of one role.

    Attributes:
      warps: its warps.

    Args:
      func: a legal Func.
      memory: its arguments.
      names: names in use.
      plan: its plan.
      buffers: its shared memory.
    """

    warps: ClassVar[int]

    def __init__(self, func: Func, memory: Memory, names: Names, plan: Plan, buffers: Buffers) -> None:
        super().__init__(func, memory, names)
        self._plan, self._buffers = plan, buffers
        self._group = plan.group
        self._rings = Rings(plan, buffers, self.names, self.writer)
        self._round = ""
        self._member = Expr("0", ())  # the index along the axis of groups

    def _operands(self, op: Op) -> list[Expr]:
        """The operands of an op; Gluon cannot infer the layout of a vector that is reduced to a scalar."""
        operands = super()._operands(op)
        if not isinstance(op, Reduce) or len(operands[0].shape) != 1:
            return operands
        layout = vector_layout(self.warps, self._plan.cluster)
        return [Expr(f"tl.set_auto_layout({operands[0].text}, {layout})", operands[0].shape)]

    # --- the loop over groups ---

    def run(self) -> None:
        """Emit the body."""
        self._scopes.append(Scope())
        self._begin()
        self._rings.begin()
        with self._rounds():
            self._ops(self._func.body)
        self._end()
        self._scopes.pop()
        self.writer.prune()

    def _begin(self) -> None:
        """Emit the lines before the loop over groups."""

    def _end(self) -> None:
        """Emit the lines after the loop over groups."""

    @contextmanager
    def _rounds(self) -> Generator[None]:
        """The loop over the groups of a thread block.

        Blocks take groups in turn. With an order from the longest to the shortest the direction alternates, so that
        no block gets the longer group of every round.
        """
        line, fresh = self.writer.line, self.names.fresh
        place, self._round, number = fresh("place"), fresh("round"), fresh("group")
        total, width = self._group.blocks, WIDTH
        line(f"{place} = tl.program_id(0)")
        if any(axis.descending for axis in self._group.axes):
            back = f"({width} - 1 - {place} * 2)"
            last = f"({place} + {total} // {width} % 2 * {back})"
            at = f"{self._round} * {width} + {place} + {self._round} % 2 * {back}"
        else:
            last, at = place, f"{self._round} * {width} + {place}"
        line(f"for {self._round} in range(tl.cdiv({total} - {last}, {width})):")
        with self.writer.indented():
            self._scopes.append(Scope())
            line(f"{number} = {at}")
            self._decode(self._group.axes, number, self._group.order)
            if self._group.axis >= 0:
                self._member = self._env[self._func.body.args[self._group.axis]]
            self._rings.begin_round(self._round)
            yield
            self._scopes.pop()

    # --- the programs of a group ---

    def _set_program(self, which: str) -> None:
        """Bind the index along the axis of groups to one program's; `which` is the program's number in its group."""
        if self._group.axis < 0 or self._group.count == 1:
            return
        argument, axis = self._func.body.args[self._group.axis], self._func.axes[self._group.axis]
        text = f"{self._member.operand} * {self._group.count} + {which}" if self._member.number is None else which
        if axis.tiles % self._group.count:
            # The last group repeats its last program, which stores the same bits to the same place.
            text = f"tl.minimum({text}, {axis.tiles - 1})"
        self._env[argument] = Expr(self.bind(argument.name, text), ())

    @contextmanager
    def _program(self, which: str, needed: Sequence[Op] = ()) -> Generator[None]:
        """Emit lines for one program of a group; scalars of `needed` that differ between programs are computed."""
        saved = dict(self._env)
        self._scopes.append(Scope())
        self._set_program(which)
        for op in needed:
            if not self._group.varying.isdisjoint(op.results):
                self._op(op, ())
        yield
        self._scopes.pop()
        self._env.clear()
        self._env.update(saved)

    def _all_bounds(self, op: Fold) -> tuple[str, str]:
        """The first tile of a loop and the tile behind the last, of all programs of a group together."""
        if self._group.varying.isdisjoint((op.start, op.stop)):
            return self._bounds(op)
        needed = backward_slice(visible(self._func, op), (op.start, op.stop))
        bounds: list[tuple[str, str]] = []
        for number in range(self._group.count):
            with self._program(str(number), needed):
                bounds.append(self._bounds(op))
        firsts, lasts = (list(dict.fromkeys(texts)) for texts in zip(*bounds, strict=True))
        return self._extreme("minimum", firsts, "first_of_all"), self._extreme("maximum", lasts, "last_of_all")

    def _extreme(self, function: str, texts: Sequence[str], hint: str) -> str:
        text = texts[0]
        for operand in texts[1:]:
            text = f"tl.{function}({text}, {operand})"
        return self._named(hint, text)

    @contextmanager
    def _loop(self, op: Fold, first: str, last: str) -> Generator[None]:
        """The lines of a loop over tiles."""
        index = self.names.fresh(op.body.args[0].name)
        step = self.names.fresh("tick") if op.reverse else index
        self.writer.line(f"for {step} in range({first}, {last}):", op.loc)
        with self.writer.indented():
            self._scopes.append(Scope())
            if op.reverse:
                self.writer.line(f"{index} = {first} + {last} - 1 - {step}")
            self._env[op.body.args[0]] = Expr(index, ())
            yield
            self._scopes.pop()
