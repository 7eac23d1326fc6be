"""The warpgroups that compute: each runs one program of the grid, on tiles that the loading warp brings.

Products are asynchronous. One is waited for where its result is first used; what stands between runs beside it. In a
loop whose last product depends on another one, the last product is computed an iteration later, as in `delay_dots`:

    wait for the keys of the first tile; s = q kᵀ; p = f(s)
    for the other tiles:
        start s = q kᵀ                 of this tile
        start acc = acc r + p v        of the tile before
        wait for s; p, r = f(s)        beside the second product
        wait for acc
    acc = acc r + p v

Programs of a group take turns to start their products, so that one multiplies while the other computes f (the
ping-pong of Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Broadcast, Transpose
from tilekern.lower.triton.emit.emit_triton import Scope
from tilekern.lower.triton.emit.names import assigned
from tilekern.lower.triton.emit.source_text import Expr, dtype_text, shape_text
from tilekern.lower.triton.gluon import layouts
from tilekern.lower.triton.gluon.layouts import Layouts
from tilekern.lower.triton.gluon.plan import Channel
from tilekern.lower.triton.gluon.roles import Role, own_box
from tilekern.lower.triton.gluon.rotation import Rotation, loaded
from tilekern.passes.delay_dots import leading_ops, with_numbers
from tilekern.source import Loc


@dataclass
class _Flight:
    """A product that has been started.

    Attributes:
      dot: the product.
      value: its result.
      frees: barriers to arrive at when it is done.
      again: a barrier that it waited for, to be asked once more before the wait for its result; "" for none.
    """

    dot: Dot
    value: Value
    frees: list[str]
    again: str = ""


class Computer(Role):
    """Emits the function of those warpgroups."""

    def __init__(self, *args: object, layouts: Layouts) -> None:
        super().__init__(*args)  # pyright: ignore[reportArgumentType] -- those of `Role`
        self._layouts = layouts
        self._flights: list[_Flight] = []
        self._waited: set[Channel] = set()
        self._late = False
        self._every = list(self._func.walk())

    def _begin(self) -> None:
        for columns in self._layouts.columns:
            self.writer.line(layouts.definition(columns))

    def _end(self) -> None:
        if self._buffers.stored:
            self.writer.line("tma.store_wait(0)")

    def _ops(self, block: Block) -> None:
        if block is self._func.body:
            self._set_program("number")
        super()._ops(block)

    def _op(self, op: Op, variables: tuple[str, ...]) -> None:
        channels = self._plan.channels
        if op in channels or (isinstance(op, Transpose) and loaded(op.result, self._every) in channels):
            return
        if isinstance(op, Dot):
            if op not in self._fused.values():
                self._multiply(op, op.result, None)
            return
        if op in self._fused:
            dot = self._fused[op]
            self._multiply(dot, op.result, next(v for v in op.operands if v is not dot.result))
            return
        if isinstance(op, Store):
            self._settle([op.value])
            self._store(op)
            return
        if not isinstance(op, Fold):
            self._settle(op.uses())
        super()._op(op, variables)

    # --- layouts ---

    def _operands(self, op: Op) -> list[Expr]:
        """The operands of an op, in the layout of its result."""
        if isinstance(op, Broadcast):
            return [self._converted(op.operands[0], self._layouts.expanded(op))]
        if isinstance(op, Reduce):
            return super()._operands(op)
        target = self._layouts.of(op.result) if op.results else None
        return [self._converted(v, target if v.tile.shape == op.result.tile.shape else None) for v in op.operands]

    def _converted(self, value: Value, target: str | None) -> Expr:
        x, own = self._env[value], self._layouts.of(value)
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

    def _name(self, op: Op, text: Expr, variables: tuple[str, ...]) -> None:
        layout = self._layouts.of(op.result) if isinstance(op, Load) else None
        if layout is not None and text.shape == op.result.tile.shape:
            text = Expr(f"tl.set_auto_layout({text.text}, {layout})", text.shape)
        super()._name(op, text, variables)

    def _start(self, init: Value, carry: Value) -> str:
        """An initial value in the layout of its carry."""
        layout, own = self._layouts.of(carry), self._layouts.of(init)
        if layout is None or not init.tile.shape:
            return self._whole(init)
        if self._env[init].shape and own != layout:
            return f"tl.{'set_auto' if own is None else 'convert'}_layout({self._whole(init)}, {layout})"
        return self._whole(init, layout)

    def _whole(self, value: Value, layout: str | None = None) -> str:
        x, layout, tile = self._env[value], layout or self._layouts.of(value), value.tile
        if layout is None or not tile.shape:
            return super()._whole(value)
        if not x.shape:
            return f"tl.full({shape_text(tile.shape)}, {x.text}, {dtype_text(tile.dtype)}, {layout})"
        return super()._whole(value)

    # --- products ---

    def _multiply(self, dot: Dot, value: Value, acc: Value | None) -> None:
        """Start a product."""
        pending = {flight.value for flight in self._flights}
        columns = dot.result.tile.shape[1]
        loads = [loaded(v, self._every) for v in dot.operands]
        channels = [self._plan.channels[op] for op in loads if op is not None and op in self._plan.channels]
        left, right = (self._side(dot, n, columns) for n in (0, 1))
        if acc is not None and acc in pending and self._flights[-1].value is not acc:
            self._settle([acc])
        again = ""
        for channel in dict.fromkeys(channels):
            again = self._filled(channel, dot.loc) or again
        if acc is None:
            layout = layouts.matrix_layout(columns)
            zeros = f"tl.zeros({shape_text(dot.result.tile.shape)}, tl.float32, {layout})"
            text = f"warpgroup_mma({left}, {right}, {zeros}, use_acc=False, is_async=True)"
        else:
            text = f"warpgroup_mma({left}, {right}, {self._whole(acc)}, is_async=True)"
        chained = [f for f in self._flights if f.value is acc]
        self._name(dot, Expr(text, value.tile.shape), ())
        self._env[value] = self._env[dot.result]
        frees = [self._freed(c) for c in dict.fromkeys(channels) if self._is_last_reader(c, dot)]
        frees = [*(free for f in chained for free in f.frees), *frees]
        self._flights = [f for f in self._flights if f not in chained]
        self._flights.append(_Flight(dot, value, frees, again))

    def _side(self, dot: Dot, number: int, columns: int) -> str:
        """An operand: a place in shared memory, or registers in the layout of left operands."""
        value = dot.operands[number]
        load = loaded(value, self._every)
        if load is None or load not in self._plan.channels:
            self._settle([value])
            x = self._whole(value)
            return x if value in self._held else self._as_left(x, columns)
        block = self._plan.copies[load].descriptor.block
        text = own_box(self._tile(load), block, load.result.tile.shape)
        while value is not load.result:
            op = next(o for o in self._every if value in o.results)
            assert isinstance(op, Transpose)
            text = f"{text}.permute({shape_text(op.permutation)})"
            value = op.operands[0]
        return text

    def _as_left(self, text: str, columns: int) -> str:
        return f"tl.convert_layout({text}, tl.DotOperandLayout(0, {layouts.matrix_layout(columns)}, 2))"

    def _filled(self, channel: Channel, loc: Loc) -> str:
        """Wait for a channel's tiles, once for each place; the statement."""
        _, phase = self._places[channel.fold]
        text = f"mbarrier.wait({self._buffers.filled[channel]}.index({self._at(channel)}), {phase})"
        if channel not in self._waited:
            self._waited.add(channel)
            self.writer.line(text, loc)
        return text

    def _freed(self, channel: Channel) -> str:
        return f"{self._buffers.freed[channel]}.index({self._at(channel)})"

    def _is_last_reader(self, channel: Channel, dot: Dot) -> bool:
        """True for the last product of an iteration that reads a channel of that loop."""
        if channel.fold is None:
            return False
        delayed = self._plan.delayed.get(channel.fold)
        order = [op for op in channel.fold.body.ops if op in channel.readers]
        if delayed is not None:
            order.sort(key=lambda op: op in delayed.late)
        return order[-1] is dot

    def _settle(self, values: object) -> None:
        """Wait for those products that are among `values`, and for all that were started before them."""
        wanted = set(values)  # pyright: ignore[reportArgumentType, reportUnknownVariableType] -- an iterable of values
        count = max((n for n, flight in enumerate(self._flights, 1) if flight.value in wanted), default=0)
        if count:
            self._wait(count)

    def _wait(self, count: int) -> None:
        """Wait for the first products in flight."""
        done, self._flights = self._flights[:count], self._flights[count:]
        names = [self._env[flight.value].text for flight in done]
        if not self._flights and done[-1].again and done[-1].dot in self._beside:
            # ptxas would move the wait up to the start of the product; it moves none across a barrier.
            self.writer.line(done[-1].again)
        deps = f"{', '.join(names)}{',' if len(names) == 1 else ''}"
        self.writer.line(
            f"{', '.join(names)} = warpgroup_mma_wait({len(self._flights)}, deps=({deps}))", done[-1].dot.loc
        )
        self._arrive([barrier for flight in done for barrier in flight.frees])

    def _arrive(self, barriers: Sequence[str], only_if: str = "") -> None:
        pred = f", pred={only_if}" if only_if else ""
        for barrier in dict.fromkeys(barriers):
            self.writer.line(f"mbarrier.arrive({barrier}, count=1{pred})")

    # --- loops ---

    @property
    def _beside(self) -> set[Op]:
        """Products that run beside other ops."""
        return {op for delayed in self._plan.delayed.values() for op in delayed.late if isinstance(op, Dot)}

    @property
    def _held(self) -> set[Value]:
        """Left operands that a loop carries in their layout."""
        dots = [op for op in self._beside if isinstance(op, Dot)]
        return {dot.operands[0] for dot in dots if loaded(dot.operands[0], self._every) is None}

    def _fold(self, op: Fold, variables: tuple[str, ...]) -> None:
        around = op in self._func.body.ops
        outer = [c for c in self._plan.unique if around and c.fold is None and not c.readers.isdisjoint(op.walk())]
        for channel in outer:
            self._filled(channel, op.loc)
        self._settle([f.value for f in self._flights])
        names = self._carry(op.body.args[1:], op.inits, variables, op.loc)
        own = [channel for channel in self._plan.unique if channel.fold is op]
        first, last = self._bounds(op)
        least, most = self._all_bounds(op) if own else (first, last)
        if least != first:
            self._skip(op, own, least, first)
        if op in self._plan.delayed:
            self._delayed_loop(op, self._plan.delayed[op], names, first, last)
        else:
            self._plain_loop(op, names, first, last, own)
        if last != most:
            self._skip(op, own, last, most)
        for channel in outer:
            if channel not in self._plan.staging.values():
                self._arrive([self._freed(channel)])

    def _skip(self, op: Fold, own: Sequence[Channel], first: str, last: str) -> None:
        """Free tiles that only other programs of the group need."""
        with self._loop(op, first, last):
            self._advance(op, self._plan.stages)
            self._take_turn(op)
            self._give_turn(op)
            for channel in own:
                self._waited.discard(channel)
                self._filled(channel, op.loc)
                self._arrive([self._freed(channel)])
            self.writer.line(f"{self._steps[op]} += 1")

    def _plain_loop(self, op: Fold, names: list[str], first: str, last: str, own: Sequence[Channel]) -> None:
        body = op.body
        carries = body.args[1:]
        self._bind_values(carries, names)
        flowing = self._flowing(op)
        with self._loop(op, first, last):
            if own:
                self._advance(op, self._plan.stages)
            self._waited.difference_update(own)
            self._block(body)
            if flowing is not None:
                self._leave_one(op, first)
            else:
                self._settle(body.results)
            self._assign(names, body.results, op.loc)
            if own:
                self.writer.line(f"{self._steps[op]} += 1")
        self._flights.clear()
        self._bind_values(op.results, names)
        if flowing is not None:
            name = names[body.results.index(flowing)]
            self.writer.line(f"{name} = warpgroup_mma_wait(0, deps=({name},))", op.loc)
            self._arrive(self._before(op), f"{first} < {last}")

    def _flowing(self, op: Fold) -> Value | None:
        """The sum of a loop's only product, if nothing but the product of the next iteration needs it."""
        dots = [inner for inner in op.body.ops if isinstance(inner, Dot)]
        if len(dots) != 1 or op.reverse or self._plan.stages < 2:
            return None
        total = next((add for add, dot in self._fused.items() if dot is dots[0]), None)
        if total is None or op.body.results.count(total.result) != 1:
            return None
        carry = op.body.args[1 + op.body.results.index(total.result)]
        users = [inner for inner in op.body.ops if carry in inner.uses() or total.result in inner.uses()]
        return total.result if users == [total] and carry not in op.body.results else None

    def _leave_one(self, op: Fold, first: str) -> None:
        """Wait for the product of the iteration before, and free its tiles; that of this one stays in flight."""
        (flight,) = self._flights
        name = self._env[flight.value].text
        self.writer.line(f"{name} = warpgroup_mma_wait(1, deps=({name},))", flight.dot.loc)
        index = self._env[op.body.args[0]].text
        self._arrive(self._before(op), f"{index} > {first}")

    def _before(self, op: Fold) -> list[str]:
        """The barriers at which programs arrive that have read the tiles of the step before."""
        places = self._places[op]
        step = f"({self._steps[op]} + {self._plan.stages - 1})"
        self._places[op] = f"{step} % {self._plan.stages}", ""
        found = [self._freed(c) for c in self._plan.unique if c.fold is op]
        self._places[op] = places
        return found

    # --- delayed products ---

    def _delayed_loop(self, op: Fold, parts: Rotation, names: list[str], first: str, last: str) -> None:
        """The loop whose last product is computed an iteration later; it runs at least once."""
        body, index = op.body, op.body.args[0]
        carries = body.args[1:]
        held, leading = list(parts.held), leading_ops(parts.early)
        totals = [body.results[n] for n in parts.numbers]
        kept = [n for n in range(len(names)) if n not in parts.numbers]
        self._bind_values(carries, names)
        self._advance(op, self._plan.stages)
        self._env[index] = self._scalar(index.name, first)
        self._waited.difference_update(c for c in self._plan.unique if c.fold is op)
        self._take_turn(op)
        dots = [inner for inner in parts.early if isinstance(inner, Dot)]
        self._part(op, parts.early, dots[-1])
        kept_at = [self.names.fresh(v.name or "held") for v in held]
        self._keep(op, kept, names, held, kept_at)
        self.writer.line(f"{self._steps[op]} += 1")
        with self._loop(op, f"{first} + 1", last):
            self._bind_values(carries, names)
            self._advance(op, self._plan.stages)
            self._waited.difference_update(c for c in self._plan.unique if c.fold is op)
            self._take_turn(op)
            self._part(op, parts.early[:leading])
            self._late_part(op, parts, kept_at, self._env[index].text)
            if len(dots) == 1:
                self._give_turn(op)
            self._part(op, parts.early[leading:], dots[-1])
            self._settle(totals)
            self._keep(op, kept, names, held, kept_at, *((names[n], body.results[n]) for n in parts.numbers))
            self.writer.line(f"{self._steps[op]} += 1")
        self._bind_values(carries, names)
        self._waited.difference_update(c for c in self._plan.unique if c.fold is op)
        self._late_part(op, parts, kept_at, last)
        self._settle(totals)
        self._bind_values(op.results, names)
        self._env.update((op.results[n], self._env[body.results[n]]) for n in parts.numbers)

    def _part(self, op: Fold, ops: Sequence[Op], last_dot: Op | None = None) -> None:
        """Emit ops of a body; behind the last product of an iteration it is the other program's turn."""
        for inner in ops:
            self._op(inner, assigned(inner.loc) if inner.results and self._is_last(op, inner) else ())
            if inner is last_dot:
                self._give_turn(op)

    def _is_last(self, op: Fold, inner: Op) -> bool:
        """True for the last op of the user's line."""
        alike = [o for o in op.body.ops if (o.loc.file, o.loc.line) == (inner.loc.file, inner.loc.line)]
        return alike[-1] is inner

    def _scalar(self, hint: str, text: str) -> Expr:
        """A scalar that the GPU computes, in a variable; a literal would be a number of Python."""
        name = self.names.fresh(hint)
        self.writer.line(f"{name} = tl.to_tensor({text})")
        return Expr(name, ())

    def _late_part(self, op: Fold, parts: Rotation, kept_at: Sequence[str], after: str) -> None:
        """Emit the late ops of the tile before tile `after`."""
        places, current = self._places[op], self._env.get(op.body.args[0])
        before = self.names.fresh("slot_before"), self.names.fresh("phase_before")
        self.writer.line(f"{before[0]} = ({self._steps[op]} - 1) % {self._plan.stages}")
        self.writer.line(f"{before[1]} = ({self._steps[op]} - 1) // {self._plan.stages} % 2")
        self._places[op] = before
        waited = set(self._waited)
        # An early product has waited for the tiles of a channel that both read.
        self._waited |= {c for c in self._plan.unique if c.fold is op and not c.readers.isdisjoint(parts.early)}
        saved = {v: self._env[v] for v in parts.held if v in self._env}
        for value, name in zip(parts.held, kept_at, strict=True):
            self._env[value] = Expr(name, value.tile.shape)
        self._env[op.body.args[0]] = self._scalar(f"{op.body.args[0].name}_before", f"{after} - 1")
        self._scopes.append(Scope())
        for inner in with_numbers(op.body, parts.late):
            self._op(inner, ())
        self._scopes.pop()
        self._env.update(saved)
        if current is not None:
            self._env[op.body.args[0]] = current
        self._places[op], self._waited = places, waited

    def _keep(
        self,
        op: Fold,
        kept: Sequence[int],
        names: Sequence[str],
        held: Sequence[Value],
        kept_at: Sequence[str],
        *more: tuple[str, Value],
    ) -> None:
        """Assign the carries of a loop, and what its late product needs."""
        pairs = [(names[n], self._whole(op.body.results[n])) for n in kept]
        pairs += [(name, self._whole(value)) for name, value in more]
        for name, value in zip(kept_at, held, strict=True):
            pairs.append((name, self._kept_text(value)))
        pairs = [(name, text) for name, text in pairs if name != text]
        self.writer.line(f"{', '.join(n for n, _ in pairs)} = {', '.join(t for _, t in pairs)}", op.loc)

    def _kept_text(self, value: Value) -> str:
        dot = next((d for d in self._beside if isinstance(d, Dot) and d.operands[0] is value), None)
        text = self._whole(value)
        return text if dot is None else self._as_left(text, dot.result.tile.shape[1])

    def _take_turn(self, op: Fold) -> None:
        """Wait for the turn to multiply, which comes when the other program has started its products."""
        if self._buffers.turn and op in self._plan.delayed:
            parity = f"({self._steps[op]} + 1 + number) % 2"
            self.writer.line(f"mbarrier.wait({self._buffers.turn}.index(number), {parity})")

    def _give_turn(self, op: Fold) -> None:
        if self._buffers.turn and op in self._plan.delayed:
            self.writer.line(f"mbarrier.arrive({self._buffers.turn}.index(1 - number), count=1)")

    # --- stores ---

    def _store(self, op: Store) -> None:
        copy = self._plan.copies.get(op)
        if copy is None:
            self._store_by_pointers(op)
            return
        channel = self._plan.staging[op]
        if channel is None:
            self.writer.line("tma.store_wait(0)", op.loc)
            place = f"{self._buffers.stored[op]}.index({'number' if self._group.count > 1 else '0'})"
        else:
            place = self._tile(channel.loads[0])
        box = own_box(place, copy.descriptor.block, op.value.tile.shape)
        self.writer.line(f"{box}.store({self._whole(op.value)})", op.loc)
        self.writer.line("fence_async_shared()")
        coordinates = self._memory.coordinates(self, op, copy)
        self.writer.line(f"store_tile({self._memory.descriptor(op)}, [{coordinates}], {place})")
        if channel is not None:
            self.writer.line("tma.store_wait(0)")
            self._arrive([self._freed(channel)])

    def _store_by_pointers(self, op: Store) -> None:
        pointer, mask = self._memory.address(self, op)
        layout = self._layouts.of(op.value)
        if layout is not None:
            pointer = f"tl.set_auto_layout({pointer}, {layout})"
            mask = f"tl.set_auto_layout({mask}, {layout})" if mask else ""
        masked = f", mask={mask}" if mask else ""
        self.writer.line(f"tl.store({pointer}, {self._whole(op.value)}{masked})", op.loc)
