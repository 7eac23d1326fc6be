"""The warp that loads: it fills the rings, tile after tile, as far as places are free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Func, Op
from tilekern.ir.memory import Load
from tilekern.lower.triton.emit.emit_triton import Emitter
from tilekern.lower.triton.emit.memory import Memory
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.source_text import Expr
from tilekern.lower.triton.gluon import layouts
from tilekern.lower.triton.gluon.channels import Channel, is_own, visible
from tilekern.lower.triton.gluon.plan import Plan
from tilekern.lower.triton.gluon.rings import Buffers, Rings
from tilekern.lower.triton.gluon.rounds import Rounds


class Loader(Emitter):
    """Emits the function of the warp that loads: the loops of the program, with copies and scalars alone.

    Args:
      func: a legal Func.
      memory: its arguments.
      names: names in use.
      plan: its plan.
      buffers: its shared memory.
    """

    def __init__(self, func: Func, memory: Memory, names: Names, plan: Plan, buffers: Buffers) -> None:
        super().__init__(func, memory, names)
        self._plan, self._buffers = plan, buffers
        self._group = plan.group
        self._rings = Rings(plan, buffers, self.names, self.writer)
        self._rounds = Rounds(self, plan, self._rings)

    def run(self) -> None:
        """Emit the body."""
        with self.scope(), self._rounds.groups():
            self.emit_block(self.func.body)
        self.writer.prune()

    def _operands(self, op: Op) -> list[Expr]:
        operands = super()._operands(op)
        return layouts.with_vector_layout(operands, 1, self._plan.cluster) if isinstance(op, Reduce) else operands

    def emit_block(self, block: Block) -> None:
        """Emit the copies, loops and scalars of a block."""
        channels = self._plan.channels
        for op in block.ops:
            if isinstance(op, Fold):
                if any(inner in channels for inner in op.walk()):
                    self._load_loop(op)
            elif isinstance(op, Load) and op in channels:
                channel = channels[op]
                if op is channel.loads[-1]:
                    self._fill(channel)
            elif op in self._scalars and self._group.varying.isdisjoint(op.results):
                self.emit(op, ())

    @cached_property
    def _scalars(self) -> frozenset[Op]:
        """The ops that places and bounds need; the masks of loads are not the business of this role."""
        needed: set[Op] = set()
        for load, channel in self._plan.channels.items():
            ops = visible(self.func, channel.fold)
            around = [
                op for op in ops if isinstance(op, Fold) and channel.fold is not None and channel.fold in op.walk()
            ]
            bounds = [bound for op in around for bound in op.operands[:2]]
            needed.update(backward_slice(ops, [*load.positions, *bounds]))
        return frozenset(needed)

    def _load_loop(self, op: Fold) -> None:
        first, last = self._rounds.all_bounds(op)
        with self._rounds.loop(op, first, last):
            if op in self._rings.steps:
                self._rings.enter_step(op)
            self.emit_block(op.body)
            if op in self._rings.steps:
                self._rings.leave_step(op)

    def _fill(self, channel: Channel) -> None:
        """Wait until the place is free, and start its copies."""
        own = [op for op in channel.loads if is_own(op, self._group.varying)]
        programs = [f"{n}" for n in range(self._group.count)] if own else ["0"]
        nbytes = self._plan.copied_bytes
        if channel.shared:
            self._expect(channel, "0", sum(nbytes(op) * (len(programs) if op in own else 1) for op in channel.loads))
            self._copies(channel, [(op, which) for op in channel.loads for which in (programs if op in own else ["0"])])
            return
        for which in programs:
            self._expect(channel, which, sum(map(nbytes, channel.loads)))
            self._copies(channel, [(op, which) for op in channel.loads])

    def _expect(self, channel: Channel, which: str, nbytes: int) -> None:
        at, loc = self._rings.at(channel, which), channel.loads[-1].loc
        self._wait_for(self._buffers.freed[channel], channel, which)
        self.writer.line(f"mbarrier.expect({self._buffers.filled[channel]}.index({at}), {nbytes})", loc)

    def _wait_for(self, barriers: str, channel: Channel, which: str) -> None:
        """Wait until a place is free."""
        phase = self._rings.phase(channel)
        # A barrier that nobody has arrived at is in the phase behind an odd phase: the first round waits for nothing.
        at = self._rings.at(channel, which)
        self.writer.line(f"mbarrier.wait({barriers}.index({at}), {phase} ^ 1)", channel.loads[-1].loc)

    def _copies(self, channel: Channel, pairs: Sequence[tuple[Load, str]]) -> None:
        """Start copies to one place: first copies to this thread block alone, then copies to all of a cluster."""
        to_all = [pair for pair in pairs if self._plan.is_whole(pair[0])]
        for op, which in (pair for pair in pairs if pair not in to_all):
            self._copy(op, channel, which)
        if to_all:
            self._wait_for(self._buffers.released[channel], channel, to_all[0][1])
        for op, which in to_all:
            self._copy(op, channel, which)

    def _copy(self, op: Load, channel: Channel, which: str) -> None:
        ops = visible(self.func, channel.fold)
        with self._rounds.program(which, backward_slice(ops, op.positions)):
            place = self.memory.coordinates(self, op, self._plan.copies[op])
            filled = f"{self._buffers.filled[channel]}.index({self._rings.at(channel, which)})"
            to_all = ", multicast=True" if self._plan.is_whole(op) else ""
            self.writer.line(
                f"load_tile({self.memory.descriptor(op)}, [{place}], {filled}, {self._rings.tile(op, which)}{to_all})",
                op.loc,
            )
