"""The warpgroups that compute: each runs one program of the grid, on tiles that the loading warp brings."""

from __future__ import annotations

from tilekern.ir.compute import Convert, Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Broadcast, Transpose
from tilekern.lower.triton.emit.emit_triton import Emitter
from tilekern.lower.triton.emit.memory import Memory
from tilekern.lower.triton.emit.names import Names, assigned
from tilekern.lower.triton.emit.source_text import Expr, dtype_text, shape_text
from tilekern.lower.triton.gluon import layouts
from tilekern.lower.triton.gluon.groups import WARPS
from tilekern.lower.triton.gluon.layouts import Layouts, vector_layout
from tilekern.lower.triton.gluon.loops import Loops
from tilekern.lower.triton.gluon.plan import Plan
from tilekern.lower.triton.gluon.products import Products
from tilekern.lower.triton.gluon.rings import Buffers, Rings, own_box
from tilekern.lower.triton.gluon.rotation import loaded
from tilekern.lower.triton.gluon.rounds import Rounds


class Computer(Emitter):
    """Emits the function of the warpgroups that compute: an emitter that knows the layouts of tiles in registers.

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
        self._layouts = Layouts(func, vector_layout(WARPS, plan.cluster))
        self._rings = Rings(plan, buffers, self.names, self.writer)
        self._rounds = Rounds(self, plan, self._rings)
        self._products = Products(self, plan, buffers, self._rings)
        self._loops = Loops(self, plan, buffers, self._rings, self._rounds, self._products)
        self._every = list(func.walk())

    def run(self) -> None:
        """Emit the body."""
        with self.scope():
            for columns in self._layouts.columns:
                self.writer.line(layouts.definition(columns, self._plan.cluster))
            self._products.begin()
            with self._rounds.groups():
                self._rounds.set_program("number")
                self.emit_block(self.func.body)
            if self._buffers.stored:
                self.writer.line("tma.store_wait(0)")
        self.writer.prune()

    # --- ops ---

    def emit(self, op: Op, variables: tuple[str, ...]) -> None:
        """Emit an op; tiles that the loading warp brings have no lines here."""
        channels = self._plan.channels
        if op in channels or (isinstance(op, (Transpose, Convert)) and loaded(op.result, self._every) in channels):
            return
        if isinstance(op, Fold):
            self._loops.fold(op, assigned(op.loc))
        elif isinstance(op, Store):
            self._products.flights.settle([op.value])
            self._store(op)
        elif op in self.fused:
            dot = self.fused[op]
            self._products.multiply(dot, op.result, next(v for v in op.operands if v is not dot.result))
        elif isinstance(op, Dot):
            if op not in self.fused.values():
                self._products.multiply(op, op.result, None)
        else:
            self._products.flights.settle(op.uses())
            super().emit(op, variables)

    # --- layouts of tiles in registers ---

    def _operands(self, op: Op) -> list[Expr]:
        """The operands of an op, in the layout of its result."""
        if isinstance(op, Broadcast):
            return [self._converted(op.operands[0], self._layouts.expanded(op))]
        if isinstance(op, Reduce):
            operands = super()._operands(op)
            if self._layouts.of(op.operands[0]) is not None:
                return operands
            return layouts.with_vector_layout(operands, WARPS, self._plan.cluster)
        target = self._layouts.of(op.result) if op.results else None
        return [self._converted(v, target if v.tile.shape == op.result.tile.shape else None) for v in op.operands]

    def _converted(self, value: Value, target: str | None) -> Expr:
        x, own = self.env[value], self._layouts.of(value)
        if target is not None and value in self._layouts.numbers:
            return Expr(f"tl.arange(0, {value.tile.shape[0]}, {target})", x.shape)
        if target is None or own is None or own == target or x.shape != value.tile.shape or x.number is not None:
            return x
        return Expr(f"tl.convert_layout({x.text}, {target})", x.shape)

    def bind(self, hint: str, text: str) -> str:
        """A variable of its own for each vector of lanes: one variable has one layout."""
        if "tl.arange(" in text:
            name = self.names.fresh(hint)
            self.writer.line(f"{name} = {text}")
            return name
        return super().bind(hint, text)

    def _inlined(self, op: Op, text: Expr) -> bool:
        return (bool(op.results) and op.result in self._layouts.numbers) or super()._inlined(op, text)

    def define(self, op: Op, text: Expr, variables: tuple[str, ...]) -> None:
        """Assign the expression of an op's result to a variable; a loaded tile gets its layout."""
        layout = self._layouts.of(op.result) if isinstance(op, Load) else None
        if layout is not None and text.shape == op.result.tile.shape:
            text = Expr(f"tl.set_auto_layout({text.text}, {layout})", text.shape)
        super().define(op, text, variables)

    def _start(self, init: Value, carry: Value) -> str:
        """An initial value in the layout of its carry."""
        layout, own = self._layouts.of(carry), self._layouts.of(init)
        if layout is None or not init.tile.shape:
            return self.whole(init)
        if self.env[init].shape and own != layout:
            return f"tl.{'set_auto' if own is None else 'convert'}_layout({self.whole(init)}, {layout})"
        return self.whole(init, layout)

    def whole(self, value: Value, layout: str | None = None) -> str:
        """The text of a value in the full shape of its tile, in `layout`, or the value's own layout."""
        x, layout, tile = self.env[value], layout or self._layouts.of(value), value.tile
        if layout is None or not tile.shape:
            return super().whole(value)
        if not x.shape:
            return f"tl.full({shape_text(tile.shape)}, {x.text}, {dtype_text(tile.dtype)}, {layout})"
        return super().whole(value)

    # --- stores ---

    def _store(self, op: Store) -> None:
        copy = self._plan.copies.get(op)
        if copy is None:
            self._store_by_pointers(op)
            return
        channel = self._plan.staging[op]
        if channel is None:
            self.writer.line("tma.store_wait(0)", op.loc)
            place = f"{self._buffers.stored[op]}.index({'number' if self._plan.group.count > 1 else '0'})"
        else:
            place = self._rings.tile(channel.loads[0])
        box = own_box(place, copy.descriptor.block, op.value.tile.shape)
        self.writer.line(f"{box}.store({self.whole(op.value)})", op.loc)
        self.writer.line("fence_async_shared()")
        coordinates = self.memory.coordinates(self, op, copy)
        self.writer.line(f"store_tile({self.memory.descriptor(op)}, [{coordinates}], {place})")
        if channel is not None:
            self.writer.line("tma.store_wait(0)")
            self._rings.arrive(self._rings.freed(channel))

    def _store_by_pointers(self, op: Store) -> None:
        pointer, mask = self.memory.address(self, op)
        layout = self._layouts.of(op.value)
        if layout is not None:
            pointer = f"tl.set_auto_layout({pointer}, {layout})"
            mask = f"tl.set_auto_layout({mask}, {layout})" if mask else ""
        masked = f", mask={mask}" if mask else ""
        is_numbers = op.value in self._layouts.numbers
        value = self._converted(op.value, layout).text if is_numbers else self.whole(op.value)
        self.writer.line(f"tl.store({pointer}, {value}{masked})", op.loc)
