"""Verifies a plan: each tile that a step reads is in scratch memory, whole and in its place.

The steps are followed in program order, as the emitter follows them, with a model of what each byte holds. Rules:

1. **Domains.** A loop nest computes, reduces and stores tiles of the shape of its iteration space. An element map reads
   inside of the tile's shape.
2. **Program order.** A tile that a step reads is in its buffer: an earlier step wrote it, and no step has overwritten a
   byte of it since. A reshape that is no copy is the same bytes. A copy copies all tiles of its source.
3. **In place.** A step writes no byte that it still has to read. A loop nest may overwrite a tile if each iteration
   writes exactly the bytes that it read: the two addresses are the same function of the loop counters.
4. **Loops.** An iteration begins with what memory held before the loop, except the bytes that the loop writes, and with
   the carries. It ends with the next carries in the carries' buffers. Branches leave their results there, too.
5. **Effects.** Every op with an effect is in one step, and accesses of an array are in the order of the ops.
6. **Scratch memory.** A buffer has the bytes of its tile, inside of the program's scratch memory. Temporary memory has
   the bytes of the operands that an op copies. An operand that a dot does not pack has an address.

The verifier uses steps and offsets of the plan, and `operand_coords`, the meaning of virtual ops. It shares no code
with the fusion of loops and the allocation of buffers: neither fused expressions nor live ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from tilekern import source
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.records import record
from tilekern.ir.shape import Reshape
from tilekern.ir.types import TileType, strides_of
from tilekern.lower.llvm.element_index import ZERO, Coords, Index, is_virtual, operand_coords, register
from tilekern.lower.llvm.plan.plan_text import line_of, step_words
from tilekern.lower.llvm.plan.scratch_contents import ScratchContents, Span, overlap, span_of
from tilekern.lower.llvm.plan.step_rules import check_effects, check_temporary, fault, require
from tilekern.lower.llvm.plan.steps import AnyStep, Buffer, BufferCopies, LoopNest, Plan, Step


def verify_plan(func: Func, plan: Plan) -> None:
    """Raise unless a plan of a legal Func obeys the rules above.

    Raises:
      PlanError: a step breaks a rule; the error names the step, the tile and its bytes.
    """
    _Verifier(func, plan).block(func.body, ())


@record
class _Read:
    """A tile in memory that a step reads.

    Attributes:
      tile: the tile.
      buffer: its buffer.
      address: the byte of an element, by the loop counters of the step.
    """

    tile: Value
    buffer: Buffer
    address: Index


@record
class _Write:
    """A tile that a step computes into memory.

    Attributes:
      tile: the tile; None for temporary memory.
      buffer: the buffer.
      address: the byte of an element, by the loop counters of a loop nest; None if a step writes in another order.
    """

    tile: Value | None
    buffer: Buffer
    address: Index | None = None


class _Verifier:
    """Follows the steps. `_buffers` has the tiles in memory, as the emitter knows them at the present step."""

    def __init__(self, func: Func, plan: Plan) -> None:
        self._plan, self._definition = plan, definitions(func)
        self._buffers: dict[Value, Buffer] = {}
        self._memory = ScratchContents()

    # --- blocks ---

    def block(self, block: Block, yields: Sequence[Buffer | None]) -> None:
        """Verify the steps of a block, and that its results are in the buffers that they belong in."""
        outer = dict(self._buffers)
        self._buffers.update(self._plan.live_in[block])
        check_effects(block, self._plan.steps[block])
        for step in self._plan.steps[block]:
            with source.at(line_of(step, self._definition)):
                self._step(step)
            self._buffers.update(step.produces)
        for value, buffer in zip(block.results, yields, strict=False):
            if buffer is not None:
                self._expect(value, buffer, "the end of a block yields")
        self._buffers = outer

    def _step(self, step: AnyStep) -> None:
        match step:
            case BufferCopies():
                self._copies(step)
            case LoopNest():
                self._nest(step)
            case Step() if step.op.regions:
                self._control(step)
            case Step():
                self._plain(step)

    def _expect(self, tile: Value, buffer: Buffer, reader: str) -> None:
        """Rule 2: a tile is in a buffer."""
        span = span_of(buffer)
        require(
            self._memory.holds(span, tile),
            f"{reader} a tile that is not in memory",
            f"{tile.type} in bytes {span[0]} to {span[1]} of scratch memory",
            self._memory.reason(tile),
        )

    # --- steps ---

    def _copies(self, step: BufferCopies) -> None:
        for begin, end in step.moves:
            origin, target = span_of(begin), span_of(end)
            require(begin.nbytes == end.nbytes, "a copy changes the size", f"{begin.nbytes} bytes", f"{end.nbytes}")
            if origin != target:
                require(not overlap(origin, target), "a copy overlaps its source", "bytes apart", f"{origin}, {target}")
                tiles = self._memory.tiles(origin)
                self._check_buffer(end)
                self._memory.write(target, tiles, "a copy")

    def _nest(self, nest: LoopNest) -> None:
        here, targets = _counters(nest.space), dict(nest.produces)
        writes = [_Write(m.value, m.buffer, _address(m.value, m.buffer, here)) for m in nest.maps]
        computed = [m.value for m in nest.maps]
        for op in nest.reduces:
            computed.append(op.operands[0])
            require(op.dims == (len(nest.space) - 1,), "a loop nest reduces a dim", "the last one", f"dims {op.dims}")
            if op.result.tile.shape:
                buffer = self._target(op.result, targets)
                writes.append(_Write(op.result, buffer, _address(op.result, buffer, here[:-1])))
        computed += (v for op in nest.stores for v in (op.value, op.mask) if v is not None)
        for value in computed:
            expected = f"loops over {list(value.tile.shape)} for {value.type}"
            require(value.tile.shape == nest.space, "loops compute a part of a tile", expected, step_words(nest))
        reads = self._reads(nest.space, [(value, here) for value in computed])
        # A store computes its positions after the tiles of the iteration are written.
        late = [v for op in nest.stores for v in op.positions if v.tile.shape]
        positions = [read for v in late for read in self._reads(v.tile.shape, [(v, _counters(v.tile.shape))])]
        for write in writes:
            for read in reads:
                self._check_in_place(nest, read, write, read.address == write.address)
            for read in positions:
                self._check_in_place(nest, read, write, in_place=False)
        self._write(nest, writes)

    def _plain(self, step: Step) -> None:
        targets, op = dict(step.produces), step.op
        tiles = [v for v in op.operands if isinstance(v.type, TileType) and v.tile.shape]
        reads = [read for v in tiles for read in self._reads(v.tile.shape, [(v, _counters(v.tile.shape))])]
        writes = [_Write(r, self._target(r, targets)) for r in op.results if r.tile.shape]
        if step.accumulates:
            writes = [self._sum_of(step, writes[0])]
        if step.temporary is not None:
            writes.append(_Write(None, step.temporary))
        for write in writes:
            for read in reads:
                self._check_in_place(step, read, write, in_place=False)
        check_temporary(step, self._definition, self._buffers)
        self._write(step, writes)

    def _sum_of(self, step: Step, product: _Write) -> _Write:
        """The sum that a dot adds its products to in place; the other addend is in the buffer before."""
        for value, buffer in step.produces:
            op = self._definition.get(value)
            if isinstance(op, Elementwise) and op.function == "add" and product.tile in op.operands:
                require(buffer is product.buffer, "a dot adds to another buffer", "that of its result", "another one")
                (addend,) = (v for v in op.operands if v is not product.tile)
                self._expect(addend, buffer, f"{step_words(step)} adds to")
                return _Write(value, buffer)
        raise fault("a dot adds to nothing", "the sum among the tiles that the step produces", step_words(step))

    def _target(self, value: Value, targets: dict[Value, Buffer]) -> Buffer:
        require(value in targets, "a result has no buffer", f"a buffer for {value.type}", "none")
        return targets[value]

    # --- reads and writes ---

    def _reads(self, space: tuple[int, ...], values: Iterable[tuple[Value, Coords]]) -> list[_Read]:
        """The tiles in memory that elements of some values come from, by rules 1 and 2."""
        most = {f"d{d}": n - 1 for d, n in enumerate(space)}
        reads, seen, pending = list[_Read](), set[tuple[Value, Coords]](), list(values)

        def start(value: Value, limit: int) -> Index:
            most[name := f"start {id(value)} {limit}"] = limit
            return register(name)

        while pending:
            value, coords = pending.pop()
            if (value, coords) in seen or not value.tile.shape:
                continue
            seen.add((value, coords))
            buffer = self._buffers.get(value)
            if buffer is None:
                op = self._definition.get(value)
                computable = op is not None and is_virtual(op)
                require(computable, "a step reads a tile that no step computes", f"{value.type} in memory", "no buffer")
                assert op is not None
                pending += operand_coords(op, coords, start)
                continue
            if 0 not in space:
                _check_inside(value, coords, most)
            self._expect(value, buffer, "a step reads")
            reads.append(_Read(value, buffer, _address(value, buffer, coords)))
        return reads

    def _check_in_place(self, step: AnyStep, read: _Read, write: _Write, in_place: bool) -> None:
        """Rule 3."""
        if overlap(span_of(read.buffer), span_of(write.buffer)):
            same_size = write.tile is not None and write.tile.tile.dtype.itemsize == read.tile.tile.dtype.itemsize
            require(
                in_place and same_size,
                f"{step_words(step)} overwrites a tile that it still reads",
                f"{read.tile.type} read at {_text(read.address)}, and the same bytes written",
                f"{_type(write.tile)} written at {'any byte' if write.address is None else _text(write.address)}",
            )

    def _write(self, step: AnyStep, writes: list[_Write]) -> None:
        """Change memory as a step does: the tiles that it computes, with reshapes that are no copies."""
        for a, b in combinations(writes, 2):
            shared = overlap(span_of(a.buffer), span_of(b.buffer)) and a.tile is not b.tile
            require(not shared, f"{step_words(step)} writes two tiles to one place", _type(a.tile), _type(b.tile))
        views = self._views(step, writes)
        for write in writes:
            self._check_buffer(write.buffer)
            if write.tile is not None:
                self._check_size(write.tile, write.buffer)
            tiles = [] if write.tile is None else [write.tile, *(v for v, b in views if b is write.buffer)]
            self._memory.write(span_of(write.buffer), tiles, step_words(step))

    def _views(self, step: AnyStep, writes: list[_Write]) -> list[tuple[Value, Buffer]]:
        """The tiles that a step produces without computing them, each a reshape of a tile that it computes."""
        computed = {(write.tile, write.buffer) for write in writes}
        unread = step.op.results if isinstance(step, Step) and step.accumulates else ()
        views = [(v, b) for v, b in step.produces if (v, b) not in computed and v not in unread]
        for value, buffer in views:
            self._check_view(value, buffer, {v for v, b in computed if b is buffer and v is not None})
        return views

    def _check_view(self, value: Value, buffer: Buffer, origins: set[Value]) -> None:
        self._check_size(value, buffer)
        origin = value
        while origin not in origins:
            op = self._definition.get(origin)
            require(isinstance(op, Reshape), "a buffer holds a tile that no step writes", str(value.type), "no writer")
            assert op is not None
            (origin,) = op.operands

    def _check_size(self, tile: Value, buffer: Buffer) -> None:
        expected = f"{tile.tile.nbytes} bytes for {tile.type}"
        require(tile.tile.nbytes == buffer.nbytes, "a buffer has another size", expected, f"{buffer.nbytes} bytes")

    def _check_buffer(self, buffer: Buffer) -> None:
        begin, end = span_of(buffer)
        inside = begin >= 0 and end <= self._plan.scratch
        require(inside, "a buffer is outside", f"bytes 0 to {self._plan.scratch}", f"bytes {begin} to {end}")

    # --- control ---

    def _control(self, step: Step) -> None:
        """Rule 4."""
        op, buffers = step.op, self._plan.carry_buffers[step.op]
        carries = [(r, b) for r, b in zip(op.results, buffers, strict=True) if b is not None]
        inits = op.inits if isinstance(op, Fold) else op.operands if isinstance(op, While) else ()
        for init, buffer in zip(inits, buffers, strict=False):
            if buffer is not None:
                self._expect(init, buffer, f"{op.name} begins with")
        written = [span_of(b) for region in op.regions for b in self._written(region)]
        if not isinstance(op, Switch):
            self._forget(written, op)  # an iteration begins with what the one before left
        before = self._memory.copy()
        for region in op.regions:
            if isinstance(op, Switch):
                self._memory = before.copy()
            self._region(op, region, buffers)
        self._memory = before
        if isinstance(op, Switch):
            self._forget(written, op)
        for result, buffer in carries:
            self._check_buffer(buffer)
            self._check_size(result, buffer)
            self._memory.add(span_of(buffer), [result])
        self._add_views(step.produces, carries)

    def _forget(self, written: Iterable[Span], op: Op) -> None:
        for span in written:
            self._memory.forget(span, f"{op.name}, whose steps write there")

    def _region(self, op: Op, region: Block, buffers: Sequence[Buffer | None]) -> None:
        """Verify a region, which begins with the carries in their buffers."""
        args = region.args[len(region.args) - len(buffers) :] if region.args else ()
        carries = [(a, b) for a, b in zip(args, buffers, strict=False) if b is not None]
        for arg, buffer in carries:
            self._check_size(arg, buffer)
            self._memory.add(span_of(buffer), [arg])
        self._add_views(self._plan.live_in[region], carries)
        is_condition = isinstance(op, While) and region is op.condition
        self.block(region, () if is_condition else buffers)
        for arg, buffer in carries if is_condition else ():
            self._expect(arg, buffer, "the condition leaves")

    def _add_views(self, tiles: Iterable[tuple[Value, Buffer]], carries: list[tuple[Value, Buffer]]) -> None:
        """Note reshapes of carries that are no copies."""
        for value, buffer in tiles:
            self._check_view(value, buffer, {v for v, b in carries if b is buffer})
            self._memory.add(span_of(buffer), [value])

    def _written(self, block: Block) -> Iterator[Buffer]:
        """All buffers that the steps of a block and of its regions write."""
        for step in self._plan.steps[block]:
            yield from (buffer for _, buffer in step.produces)
            match step:
                case BufferCopies():
                    yield from (end for begin, end in step.moves if span_of(begin) != span_of(end))
                case LoopNest():
                    yield from (m.buffer for m in step.maps)
                case Step():
                    yield from () if step.temporary is None else (step.temporary,)
                    for region in step.op.regions:
                        yield from self._written(region)


# --- domains and addresses -------------------------------------------------------------------------------------------


def _counters(space: tuple[int, ...]) -> Coords:
    """The element of each iteration; a loop of one iteration has no counter."""
    return tuple(ZERO if n == 1 else register(f"d{d}") for d, n in enumerate(space))


def _address(tile: Value, buffer: Buffer, coords: Coords) -> Index:
    """The byte of an element in scratch memory. Equal functions of the counters are equal."""
    total = Index()
    for index, stride in zip(coords, strides_of(tile.tile.shape), strict=True):
        total = total.plus(index.times(stride * tile.tile.dtype.itemsize))
    return Index(tuple(sorted(total.terms)), total.const + buffer.root.offset)


def _check_inside(tile: Value, coords: Coords, most: dict[str, int]) -> None:
    """Rule 1: an element map stays inside of a tile; counters run from 0 to `most`."""
    for index, length in zip(coords, tile.tile.shape, strict=True):
        ends = [(0, stride * most[name]) for name, stride in index.terms]
        low, high = index.const + sum(map(min, ends)), index.const + sum(map(max, ends))
        require(low >= 0 and high < length, "a step reads outside", f"{tile.type}", f"elements {low} to {high}")


def _text(address: Index) -> str:
    terms = [f"{stride}*{name}" for name, stride in address.terms]
    return "byte " + " + ".join([*terms, str(address.const)])


def _type(tile: Value | None) -> str:
    return "temporary memory" if tile is None else str(tile.type)
