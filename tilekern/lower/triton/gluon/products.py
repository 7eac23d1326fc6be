"""Products of warpgroups, and the tiles that they read: started, waited for, and their places freed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.core import Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.shape import Transpose
from tilekern.lower.triton.emit.emit_triton import Emitter
from tilekern.lower.triton.emit.source_text import Expr, dtype_text, shape_text
from tilekern.lower.triton.gluon import layouts
from tilekern.lower.triton.gluon.channels import Channel, is_own
from tilekern.lower.triton.gluon.flights import Flights
from tilekern.lower.triton.gluon.plan import Plan
from tilekern.lower.triton.gluon.rings import Buffers, Rings, own_box
from tilekern.lower.triton.gluon.rotation import loaded
from tilekern.source import Loc


class Products:
    """Emits the products of a warpgroup.

    Args:
      emitter: emits the ops of the warpgroup.
      plan: the plan of the kernel.
      buffers: its shared memory.
      rings: the places of the warpgroup in the rings.

    Attributes:
      flights: products that have been started and not waited for.
      waited: the channels whose present tiles have been waited for.
    """

    def __init__(self, emitter: Emitter, plan: Plan, buffers: Buffers, rings: Rings) -> None:
        self._emitter, self._plan, self._buffers, self._rings = emitter, plan, buffers, rings
        self._group = plan.group
        self.flights = Flights(
            emitter.writer, rings, lambda value: emitter.env[value].text, lambda dot: dot in self.beside
        )
        self.waited: set[Channel] = set()
        self._every = list(emitter.func.walk())
        self._trims: dict[Channel, str] = {}

    def begin(self) -> None:
        """Emit the counters of trimmed tiles."""
        for channel in self._buffers.trimmed:
            self._trims[channel] = self._emitter.names.fresh("trims")
            self._emitter.writer.line(f"{self._trims[channel]} = 0")

    def multiply(self, dot: Dot, value: Value, acc: Value | None) -> None:
        """Start a product."""
        pending = self.flights.values
        columns = dot.result.tile.shape[1]
        loads = [loaded(v, self._every) for v in dot.operands]
        channels = [self._plan.channels[op] for op in loads if op is not None and op in self._plan.channels]
        left, right = (self._side(dot, n, columns) for n in (0, 1))
        if acc is not None and acc in pending and pending[-1] is not acc:
            self.flights.settle([acc])
        again = ""
        if outer := [c for c in channels if c.fold is None]:
            self.trim(outer)
        for channel in dict.fromkeys(channels):
            again = self.wait_filled(channel, dot.loc) or again
        left, right = (self._cast(dot, n, x) if self._is_cast(dot, n) else x for n, x in enumerate((left, right)))
        if acc is None:
            layout = layouts.matrix_layout(columns)
            zeros = f"tl.zeros({shape_text(dot.result.tile.shape)}, tl.float32, {layout})"
            text = f"warpgroup_mma({left}, {right}, {zeros}, use_acc=False, is_async=True)"
        else:
            text = f"warpgroup_mma({left}, {right}, {self._emitter.whole(acc)}, is_async=True)"
        self._emitter.define(dot, Expr(text, value.tile.shape), ())
        self._emitter.env[value] = self._emitter.env[dot.result]
        read = [c for c in dict.fromkeys(channels) if self._is_last_reader(c, dot)]
        self.flights.add(dot, value, acc, [barrier for c in read for barrier in self._rings.freed(c)], again)

    def _side(self, dot: Dot, number: int, columns: int) -> str:
        """An operand: a place in shared memory, or registers in the layout of left operands."""
        value = dot.operands[number]
        load = loaded(value, self._every)
        if load is None or load not in self._plan.channels:
            self.flights.settle([value])
            x = self._emitter.whole(value)
            return x if value in self._held else self.as_left(x, columns)
        block = self._plan.copies[load].descriptor.block
        text = own_box(self._rings.tile(load), block, load.result.tile.shape)
        while value is not load.result:
            op = next(o for o in self._every if value in o.results)
            text += f".permute({shape_text(op.permutation)})" if isinstance(op, Transpose) else ""
            value = op.operands[0]
        return text

    def _is_cast(self, dot: Dot, number: int) -> bool:
        """True if an operand is cast on its way from the ring to the product."""
        value = dot.operands[number]
        load = loaded(value, self._every)
        return load in self._plan.channels and load is not None and load.result.tile.dtype != value.tile.dtype

    def _cast(self, dot: Dot, number: int, text: str) -> str:
        """A cast operand: registers on the left; on the right a second place, for there `wgmma` reads no registers."""
        value = dot.operands[number]
        casts, load = list[str](), loaded(value, self._every)
        while load is not None and value is not load.result:
            op = next(o for o in self._every if value in o.results)
            casts += [dtype_text(op.dtype)] if isinstance(op, Convert) else []
            value = op.operands[0]
        cast = "".join(f".to({dtype})" for dtype in reversed(casts))
        if load is None or number == 0:
            layout = f"tl.DotOperandLayout(0, {layouts.matrix_layout(dot.result.tile.shape[1])}, 2)"
            return self._emitter.bind("left", f"{text}.load({layout}){cast}")
        tile, permuted = text.partition(".permute(")[::2]
        places, fold = self._plan.widened[load].places, self._plan.channels[load].fold
        assert fold is not None
        step = f" + {self._rings.steps[fold]} % {places}" if places > 1 else ""
        first = "number" if places == 1 else f"number * {places}"
        place = self._emitter.named(
            "wide", f"{self._buffers.widened[load]}.index({first if self._group.count > 1 else '0'}{step})"
        )
        layout = layouts.row_layout(load.result.tile.shape[1])
        self._emitter.writer.line(f"{place}.store({tile}.load({layout}){cast})", load.loc)
        self._emitter.writer.line("fence_async_shared()")
        return f"{place}.permute({permuted}" if permuted else place

    def as_left(self, text: str, columns: int) -> str:
        """The text of a tile in the layout of left operands of products with so many columns."""
        return f"tl.convert_layout({text}, tl.DotOperandLayout(0, {layouts.matrix_layout(columns)}, 2))"

    def wait_filled(self, channel: Channel, loc: Loc) -> str:
        """Wait for a channel's tiles, once for each place; the statement."""
        rings = self._rings
        text = f"mbarrier.wait({self._buffers.filled[channel]}.index({rings.at(channel)}), {rings.phase(channel)})"
        if channel not in self.waited:
            self.waited.add(channel)
            self._emitter.writer.line(text, loc)
        return text

    def trim(self, channels: Sequence[Channel]) -> None:
        """Wait for tiles whose masks keep the first rows, and set the other rows to 0, once for each place."""
        for channel in channels:
            masked = [op for op in channel.loads if op in self._plan.trimmed]
            if masked and channel not in self.waited:
                self.flights.settle(self.flights.values)
                self.wait_filled(channel, masked[0].loc)
                for load in masked:
                    self._trim_tile(load, channel)

    def _trim_tile(self, load: Load, channel: Channel) -> None:
        rows, columns = load.result.tile.shape
        limit = self._kept_rows(load, channel)
        tile = own_box(self._rings.tile(load), self._plan.copies[load].descriptor.block, (rows, columns))
        trim = (
            f"keep_rows({tile}, {limit}, {rows}, {layouts.rows_at_once(rows, columns)}, {layouts.row_layout(columns)})"
        )
        line = self._emitter.writer.line
        line(f"if {limit} < {rows}:", load.loc)
        with self._emitter.writer.indented():
            if is_own(load, self._group.varying) or self._group.count == 1:
                line(trim)
                line("fence_async_shared()")
                return
            line("if number == 0:")
            with self._emitter.writer.indented():
                line(trim)
                line("fence_async_shared()")
            barrier, count = f"{self._buffers.trimmed[channel]}.index(0)", self._trims[channel]
            self._rings.arrive([barrier])
            line(f"mbarrier.wait({barrier}, {count} % 2)")
            line(f"{count} += 1")

    def _kept_rows(self, load: Load, channel: Channel) -> str:
        """The number of rows that a mask keeps, in a variable; it may be negative, or more than the tile has."""
        bounds = self._plan.trimmed[load]
        values = [v for bound in bounds for v in (bound.limit, *bound.starts)]
        for op in backward_slice(channel.fold.body.ops if channel.fold else (), values):
            self._emitter.emit(op, ())
        env = self._emitter.env
        texts = [
            " - ".join([f"tl.maximum({env[b.limit].text}, 0)", *(env[v].operand for v in b.starts)]) for b in bounds
        ]
        return self._emitter.named("kept", reduce(lambda x, y: f"tl.minimum({x}, {y})", texts))

    def _is_last_reader(self, channel: Channel, dot: Dot) -> bool:
        """True for the last product of an iteration that reads a channel of that loop."""
        if channel.fold is None:
            return False
        delayed = self._plan.delayed.get(channel.fold)
        order = [op for op in channel.fold.body.ops if op in channel.readers]
        if delayed is not None:
            order.sort(key=lambda op: op in delayed.late)
        return order[-1] is dot

    @cached_property
    def beside(self) -> set[Op]:
        """Products that run beside other ops."""
        return {op for delayed in self._plan.delayed.values() for op in delayed.late if isinstance(op, Dot)}

    @cached_property
    def _held(self) -> set[Value]:
        """Left operands that a loop carries in their layout."""
        dots = [op for op in self.beside if isinstance(op, Dot)]
        return {dot.operands[0] for dot in dots if loaded(dot.operands[0], self._every) is None}
