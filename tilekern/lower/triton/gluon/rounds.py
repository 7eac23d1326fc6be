"""The programs of a warp-specialised kernel: the loop over groups of programs, and the bounds of their loops."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.control import Fold
from tilekern.ir.core import Op
from tilekern.lower.triton.emit.emit_triton import Emitter
from tilekern.lower.triton.emit.source_text import Expr
from tilekern.lower.triton.gluon.channels import visible
from tilekern.lower.triton.gluon.plan import Plan
from tilekern.lower.triton.gluon.rings import Rings

WIDTH = "BLOCKS"
"""The name of the number of thread blocks, a constant of the text: divisions by it are by a known number."""


class Rounds:
    """Emits the loop over groups of programs, and what depends on the number of a program in its group.

    Args:
      emitter: emits the ops of one role.
      plan: the plan of the kernel.
      rings: the places of that role in the rings.
    """

    def __init__(self, emitter: Emitter, plan: Plan, rings: Rings) -> None:
        self._emitter, self._plan, self._rings = emitter, plan, rings
        self._group = plan.group
        self._member = Expr("0", ())  # the index along the axis of groups

    @contextmanager
    def groups(self) -> Generator[None]:
        """The loop over the groups of a thread block.

        Blocks take groups in turn. With an order from the longest to the shortest the direction alternates, so that
        no block gets the longer group of every round.
        """
        self._rings.begin()
        line, fresh = self._emitter.writer.line, self._emitter.names.fresh
        place, turn, number = fresh("place"), fresh("round"), fresh("group")
        total, width = self._group.blocks, WIDTH
        line(f"{place} = tl.program_id(0)")
        if any(axis.descending for axis in self._group.axes):
            back = f"({width} - 1 - {place} * 2)"
            last = f"({place} + {total} // {width} % 2 * {back})"
            at = f"{turn} * {width} + {place} + {turn} % 2 * {back}"
        else:
            last, at = place, f"{turn} * {width} + {place}"
        line(f"for {turn} in range(tl.cdiv({total} - {last}, {width})):")
        with self._emitter.writer.indented(), self._emitter.scope():
            line(f"{number} = {at}")
            self._emitter.decode(self._group.axes, number, self._group.order)
            if self._group.axis >= 0:
                self._member = self._emitter.env[self._emitter.func.body.args[self._group.axis]]
            self._rings.begin_round(turn)
            yield

    # --- the programs of a group ---

    def set_program(self, which: str) -> None:
        """Bind the index along the axis of groups to one program's; `which` is the program's number in its group."""
        if self._group.axis < 0 or self._group.count == 1:
            return
        argument, axis = self._emitter.func.body.args[self._group.axis], self._emitter.func.axes[self._group.axis]
        text = f"{self._member.operand} * {self._group.count} + {which}" if self._member.number is None else which
        if axis.tiles % self._group.count:
            # The last group repeats its last program, which stores the same bits to the same place.
            text = f"tl.minimum({text}, {axis.tiles - 1})"
        self._emitter.env[argument] = Expr(self._emitter.bind(argument.name, text), ())

    @contextmanager
    def program(self, which: str, needed: Sequence[Op] = ()) -> Generator[None]:
        """Emit lines for one program of a group; scalars of `needed` that differ between programs are computed."""
        saved = dict(self._emitter.env)
        with self._emitter.scope():
            self.set_program(which)
            for op in needed:
                if not self._group.varying.isdisjoint(op.results):
                    self._emitter.emit(op, ())
            yield
        self._emitter.env.clear()
        self._emitter.env.update(saved)

    def all_bounds(self, op: Fold) -> tuple[str, str]:
        """The first tile of a loop and the tile behind the last, of all programs of a group together."""
        if self._group.varying.isdisjoint((op.start, op.stop)):
            return self._emitter.bounds(op)
        needed = backward_slice(visible(self._emitter.func, op), (op.start, op.stop))
        bounds: list[tuple[str, str]] = []
        for number in range(self._group.count):
            with self.program(str(number), needed):
                bounds.append(self._emitter.bounds(op))
        firsts, lasts = (list(dict.fromkeys(texts)) for texts in zip(*bounds, strict=True))
        return self._extreme("minimum", firsts, "first_of_all"), self._extreme("maximum", lasts, "last_of_all")

    def _extreme(self, function: str, texts: Sequence[str], hint: str) -> str:
        text = texts[0]
        for operand in texts[1:]:
            text = f"tl.{function}({text}, {operand})"
        return self._emitter.named(hint, text)

    @contextmanager
    def loop(self, op: Fold, first: str, last: str) -> Generator[None]:
        """The lines of a loop over tiles."""
        index = self._emitter.names.fresh(op.body.args[0].name)
        step = self._emitter.names.fresh("tick") if op.reverse else index
        self._emitter.writer.line(f"for {step} in range({first}, {last}):", op.loc)
        with self._emitter.writer.indented(), self._emitter.scope():
            if op.reverse:
                self._emitter.writer.line(f"{index} = {first} + {last} - 1 - {step}")
            self._emitter.env[op.body.args[0]] = Expr(index, ())
            yield
