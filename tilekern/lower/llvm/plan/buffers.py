"""Allocation of a plan's buffers in the scratch memory of a thread.

A buffer is live from the first step that writes it to the last step that reads it. If it is written before a loop and
used in it, it is live until the loop's end. Buffers whose live ranges do not overlap may share memory.

Buffers are coalesced first, where that saves a copy:

- The next value of a carry is computed in the carry's buffer, if no later step of the iteration reads the old value.
- An initial value of a loop is the carry's buffer, if no later step reads it.
- A tile is computed in the buffer of a tile that the loop nest reads for the last time, lane by lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tilekern.ir.core import Block, Func, Value, round_up
from tilekern.ir.types import TileType
from tilekern.lower.llvm.plan.steps import AnyStep, Buffer, BufferCopies, Expressions, LoopNest, Plan, Step

_ALIGNMENT = 64


@dataclass
class _Use:
    """A step that reads or writes a buffer; if `lanewise`, a lane reads only the element that it computes."""

    number: int
    loops: tuple[Step, ...]
    lanewise: bool = False


@dataclass
class _Uses:
    """All uses of a buffer."""

    writes: list[_Use] = field(default_factory=list[_Use])
    reads: list[_Use] = field(default_factory=list[_Use])


def assign_offsets(func: Func, plan: Plan) -> None:
    """Set the offset of every buffer of a plan, and the plan's `scratch`."""
    _OffsetAssigner(func, plan).run()


class _OffsetAssigner:
    def __init__(self, func: Func, plan: Plan) -> None:
        self._func, self._plan = func, plan
        self._expressions = Expressions(func)
        self._uses: dict[Buffer, _Uses] = {}
        self._count = 0

    def run(self) -> None:
        for step, loops in self._walk(self._func.body, ()):
            self._record(step, loops)
        for buffer, uses in self._uses.items():
            self._set_live_range(buffer, uses)
        for step in self._all_steps(self._func.body):
            if isinstance(step, BufferCopies):
                self._coalesce_copies(step)  # of nested loops: their carries then have one buffer
        self._coalesce_carries()
        for step in self._all_steps(self._func.body):
            if isinstance(step, BufferCopies):
                self._coalesce_copies(step)
            elif isinstance(step, LoopNest):
                self._coalesce_lanes(step)
        self._allocate()

    # --- uses ---

    def _walk(self, block: Block, loops: tuple[Step, ...]) -> Iterator[tuple[AnyStep, tuple[Step, ...]]]:
        """All steps in program order, each with the loops around it. Numbers the steps."""
        with self._expressions.inside(self._plan.live_in[block]):
            for step in self._plan.steps[block]:
                step.number = self._next()
                yield step, loops
                if isinstance(step, Step) and step.op.regions:
                    for region in step.op.regions:
                        yield from self._walk(region, (*loops, step))
                    step.end = self._next()
                self._expressions.buffers.update(step.produces)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _all_steps(self, block: Block) -> Iterator[AnyStep]:
        for step in self._plan.steps[block]:
            yield step
            if isinstance(step, Step):
                for region in step.op.regions:
                    yield from self._all_steps(region)

    def _record(self, step: AnyStep, loops: tuple[Step, ...]) -> None:
        use = _Use(step.number, loops)
        if isinstance(step, BufferCopies):
            for source, target in step.moves:
                self._uses_of(source).reads.append(_Use(step.number, loops, lanewise=True))
                self._uses_of(target).writes.append(use)
            return
        if isinstance(step, LoopNest):
            for m in step.maps:
                self._uses_of(m.buffer).writes.append(use)
            self._read(step.space, step.sources, use)
            for position in (v for op in step.stores for v in op.positions):
                self._read(position.tile.shape, [position], use, lanewise=False)
        elif step.op.regions:
            return  # the steps of its regions read and write
        else:
            for x in step.op.operands:
                if isinstance(x.type, TileType):
                    self._read(x.tile.shape, [x], use, lanewise=False)
            if step.temporary is not None:
                self._uses_of(step.temporary).writes.append(use)
        for _, buffer in step.produces:
            self._uses_of(buffer).writes.append(use)

    def _read(self, space: tuple[int, ...], values: list[Value], use: _Use, lanewise: bool = True) -> None:
        for leaf, here in self._expressions.of(space, values).leaves.items():
            if leaf in self._expressions.buffers:
                read = _Use(use.number, use.loops, lanewise and here)
                self._uses_of(self._expressions.buffers[leaf]).reads.append(read)

    def _uses_of(self, buffer: Buffer) -> _Uses:
        return self._uses.setdefault(buffer, _Uses())

    def _set_live_range(self, buffer: Buffer, uses: _Uses) -> None:
        all_uses = [*uses.writes, *uses.reads]
        buffer.first_use = min(use.number for use in all_uses)
        buffer.last_use = buffer.first_use
        for use in all_uses:
            around = (loop.end for loop in use.loops if loop.number > buffer.first_use)
            buffer.last_use = max(buffer.last_use, next(around, use.number))

    # --- coalescing ---

    def _coalesce_carries(self) -> None:
        """Compute the next values of carries in the buffers of the carries."""
        for op, carry_buffers in self._plan.carry_buffers.items():
            if not any(buffer is not None for buffer in carry_buffers) or op.name == "switch":
                continue
            for region in op.regions:
                for step in self._plan.steps[region]:
                    if isinstance(step, BufferCopies):
                        for source, target in step.moves:
                            if target in carry_buffers and self._can_overwrite(source.root, target.root, region):
                                self._coalesce(source.root, target.root)

    def _can_overwrite(self, source: Buffer, target: Buffer, region: Block) -> bool:
        """True if `source` is written in the region only after the last read of `target` in it.

        If an inner loop writes `source`, no inner loop may read `target`: a later iteration would read the new value.
        """
        if source is target or source.nbytes != target.nbytes:
            return False
        steps = self._plan.steps[region]
        numbers = {step.number for step in steps}
        ends = [step.end if isinstance(step, Step) and step.op.regions else step.number for step in steps]
        writes = [use for buffer, uses in self._uses.items() if buffer.root is source for use in uses.writes]
        reads = [use for buffer, uses in self._uses.items() if buffer.root is target for use in uses.reads]
        reads = [use for use in reads if min(numbers) <= use.number <= max(ends)]
        if not all(min(numbers) <= use.number <= max(ends) for use in writes):
            return False
        if not {use.number for use in writes} <= numbers and not {use.number for use in reads} <= numbers:
            return False
        return all(use.number < source.first_use or (use.number == source.first_use and use.lanewise) for use in reads)

    def _coalesce_copies(self, step: BufferCopies) -> None:
        """Coalesce the two buffers of a copy if the source is read for the last time."""
        for source, target in step.moves:
            a, b = source.root, target.root
            if a is not b and a.nbytes == b.nbytes and a.last_use == step.number == b.first_use:
                self._coalesce(b, a)

    def _coalesce_lanes(self, step: LoopNest) -> None:
        """Compute tiles in buffers that the loop nest reads for the last time."""
        for m in step.maps:
            target = m.buffer.root
            if target.first_use != step.number or target.last_use == step.number:  # another tile, or no later reader
                continue
            for source in list(self._uses):
                root = source.root
                if root is target or root.nbytes != target.nbytes or root.last_use != step.number:
                    continue
                reads = [u for s, uses in self._uses.items() if s.root is root for u in uses.reads]
                now = [u for u in reads if u.number == step.number]
                if root.first_use < step.number and now and all(u.lanewise for u in now):
                    self._coalesce(target, root)
                    break

    def _coalesce(self, buffer: Buffer, into: Buffer) -> None:
        """Make `buffer` a part of the buffer `into`."""
        buffer.merged_into = into
        into.first_use, into.last_use = min(buffer.first_use, into.first_use), max(buffer.last_use, into.last_use)

    # --- offsets ---

    def _allocate(self) -> None:
        """First fit, in order of decreasing size."""
        roots = dict.fromkeys(buffer.root for buffer in self._uses)
        placed: list[Buffer] = []
        for buffer in sorted(roots, key=lambda s: -s.nbytes):
            size = round_up(max(buffer.nbytes, 1), _ALIGNMENT)
            taken = sorted(
                (p.offset, p.offset + round_up(max(p.nbytes, 1), _ALIGNMENT))
                for p in placed
                if p.first_use <= buffer.last_use and buffer.first_use <= p.last_use
            )
            buffer.offset = 0
            for begin, end in taken:
                if buffer.offset + size <= begin:
                    break
                buffer.offset = max(buffer.offset, end)
            placed.append(buffer)
            self._plan.scratch = max(self._plan.scratch, buffer.offset + size)
