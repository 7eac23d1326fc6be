"""The warpgroups that compute: each runs one program of the grid, on tiles that the loading warp brings.

Products are asynchronous. A product is waited for where its result is first used; ops between run beside it. In a
loop whose last product depends on another product, the last product is computed an iteration later, as in `delay_dots`:

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

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tilekern.ir.compute import Convert, Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.memory import Store
from tilekern.ir.shape import Transpose
from tilekern.lower.triton.emit.emit_triton import Scope
from tilekern.lower.triton.emit.names import assigned
from tilekern.lower.triton.emit.source_text import Expr
from tilekern.lower.triton.gluon import layouts
from tilekern.lower.triton.gluon.channels import Channel
from tilekern.lower.triton.gluon.loads_first import loads_first
from tilekern.lower.triton.gluon.products import Products
from tilekern.lower.triton.gluon.rings import own_box
from tilekern.lower.triton.gluon.rotation import Rotation, loaded
from tilekern.passes.delay_dots import always_runs, leading_ops, with_numbers


class Computer(Products):
    """Emits the function of the warpgroups that compute."""

    def _begin(self) -> None:
        for columns in self._layouts.columns:
            self.writer.line(layouts.definition(columns, self._plan.cluster))
        for channel in self._buffers.trimmed:
            self._trims[channel] = self.names.fresh("trims")
            self.writer.line(f"{self._trims[channel]} = 0")

    def _end(self) -> None:
        if self._buffers.stored:
            self.writer.line("tma.store_wait(0)")

    def _ops(self, block: Block) -> None:
        if block is self._func.body:
            self._set_program("number")
        super()._ops(block)

    def _op(self, op: Op, variables: tuple[str, ...]) -> None:
        channels = self._plan.channels
        if op in channels or (isinstance(op, (Transpose, Convert)) and loaded(op.result, self._every) in channels):
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
            self._flights.settle([op.value])
            self._store(op)
            return
        if not isinstance(op, Fold):
            self._flights.settle(op.uses())
        super()._op(op, variables)

    # --- loops ---

    def _fold(self, op: Fold, variables: tuple[str, ...]) -> None:
        around = op in self._func.body.ops
        outer = [c for c in self._plan.unique if around and c.fold is None and not c.readers.isdisjoint(op.walk())]
        self._flights.settle(self._flights.values)
        self._trim(outer)
        for channel in outer:
            self._filled(channel, op.loc)
        names = self._carry(op.body.args[1:], op.inits, variables, op.loc)
        own = [channel for channel in self._plan.unique if channel.fold is op]
        first, last = self._bounds(op)
        least, most = self._all_bounds(op) if own else (first, last)
        runs = always_runs(op, self.ranges.get(op.start), self.ranges.get(op.stop))
        if not runs and (least, most) != (first, last):
            # A program without a tile skips all tiles of the other programs.
            first = self._named("first_own", f"tl.minimum({first}, {most})")
            last = self._named("last_own", f"tl.maximum({last}, {first})")
        skipped_before, skipped_after = [(least, first), (last, most)][:: -1 if op.reverse else 1]
        self._skip(op, own, *skipped_before)
        if op not in self._plan.delayed:
            self._plain_loop(op, names, first, last, own)
        elif runs:
            self._delayed_loop(op, self._plan.delayed[op], names, first, last)
        else:
            self.writer.line(f"if {first} < {last}:", op.loc)
            with self.writer.indented():
                self._scopes.append(Scope())
                self._delayed_loop(op, self._plan.delayed[op], names, first, last)
                self._assign(names, op.results, op.loc)
                self._scopes.pop()
            self._bind_values(op.results, names)
        self._skip(op, own, *skipped_after)
        for channel in outer:
            if channel not in self._plan.staging.values():
                self._rings.arrive(self._rings.freed(channel))

    def _skip(self, op: Fold, own: Sequence[Channel], first: str, last: str) -> None:
        """Free tiles that only other programs of the group need.

        Programs meet to trim tiles and to take turns, all in one order: early tiles, the turn, late tiles.
        """
        if first == last:
            return
        late = self._late_channels(op)
        with self._loop(op, first, last):
            self._rings.enter_step(op)
            self._waited.difference_update(own)
            self._trim([channel for channel in own if channel not in late])
            self._take_turn(op)
            self._give_turn(op)
            self._trim(late)
            for channel in own:
                self._filled(channel, op.loc)
                self._rings.arrive(self._rings.freed(channel))
            self._rings.leave_step(op)

    def _plain_loop(self, op: Fold, names: list[str], first: str, last: str, own: Sequence[Channel]) -> None:
        body = op.body
        carries = body.args[1:]
        self._bind_values(carries, names)
        flowing = self._flowing(op)
        with self._loop(op, first, last):
            if own:
                self._rings.enter_step(op)
            self._waited.difference_update(own)
            self._trim(own)
            self._block(replace(body, ops=loads_first(body.ops)) if own else body)
            if flowing is not None:
                self._leave_one(op, first)
            else:
                self._flights.settle(body.results)
            self._assign(names, body.results, op.loc)
            if own:
                self._rings.leave_step(op)
        self._flights.clear()
        self._bind_values(op.results, names)
        if flowing is not None:
            name = names[body.results.index(flowing)]
            self.writer.line(f"{name} = warpgroup_mma_wait(0, deps=({name},))", op.loc)
            self._rings.arrive(self._rings.freed_before(op), f"{first} < {last}")

    def _flowing(self, op: Fold) -> Value | None:
        """The sum of a loop's only product, if nothing but the product of the next iteration needs it."""
        dots = [inner for inner in op.body.ops if isinstance(inner, Dot)]
        trims = any(channel.fold is op and load in self._plan.trimmed for load, channel in self._plan.channels.items())
        if len(dots) != 1 or op.reverse or self._plan.stages < 2 or trims:
            return None
        total = next((add for add, dot in self._fused.items() if dot is dots[0]), None)
        if total is None or op.body.results.count(total.result) != 1:
            return None
        carry = op.body.args[1 + op.body.results.index(total.result)]
        users = [inner for inner in op.body.ops if carry in inner.uses() or total.result in inner.uses()]
        return total.result if users == [total] and carry not in op.body.results else None

    def _leave_one(self, op: Fold, first: str) -> None:
        """Wait for the product of the iteration before, and free its tiles; this iteration's stays in flight."""
        flight = self._flights.only()
        name = self._env[flight.value].text
        self.writer.line(f"{name} = warpgroup_mma_wait(1, deps=({name},))", flight.dot.loc)
        index = self._env[op.body.args[0]].text
        self._rings.arrive(self._rings.freed_before(op), f"{index} > {first}")

    # --- delayed products ---

    def _delayed_loop(self, op: Fold, parts: Rotation, names: list[str], first: str, last: str) -> None:
        """The loop whose last product is computed an iteration later; it runs at least once."""
        body, index = op.body, op.body.args[0]
        carries = body.args[1:]
        held, leading = list(parts.held), leading_ops(parts.early)
        totals = [body.results[n] for n in parts.numbers]
        early_carries = [n for n in range(len(names)) if n not in parts.numbers]
        self._bind_values(carries, names)
        self._rings.enter_step(op)
        self._env[index] = self._scalar(index.name, first)
        own = [c for c in self._plan.unique if c.fold is op]
        early = [c for c in own if not c.readers.isdisjoint(parts.early)]
        self._waited.difference_update(own)
        self._trim(early)
        self._take_turn(op)
        dots = [inner for inner in parts.early if isinstance(inner, Dot)]
        self._part(op, parts.early, dots[-1])
        self._flights.settle(body.results)
        kept_at = [self.names.fresh(v.name or "held") for v in held]
        self._keep(op, early_carries, names, held, kept_at)
        self._rings.leave_step(op)
        with self._loop(op, f"{first} + 1", last):
            self._bind_values(carries, names)
            self._rings.enter_step(op)
            self._waited.difference_update(own)
            self._trim_late(op, self._env[index].text)
            self._trim(early)
            self._take_turn(op)
            self._part(op, parts.early[:leading])
            self._late_part(op, parts, kept_at, self._env[index].text)
            if len(dots) == 1:
                self._give_turn(op)
            self._part(op, parts.early[leading:], dots[-1])
            self._flights.settle(body.results)
            self._keep(op, early_carries, names, held, kept_at, *((names[n], body.results[n]) for n in parts.numbers))
            self._rings.leave_step(op)
        self._bind_values(carries, names)
        self._waited.difference_update(own)
        self._trim_late(op, last)
        self._late_part(op, parts, kept_at, last)
        self._flights.settle(totals)
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
        waited = set(self._waited)
        # An early product has waited for the tiles of a channel that both read.
        self._waited |= {c for c in self._plan.unique if c.fold is op and not c.readers.isdisjoint(parts.early)}
        with self._tile_before(op, after, {v for inner in parts.late for v in inner.results}):
            for value, name in zip(parts.held, kept_at, strict=True):
                self._env[value] = Expr(name, value.tile.shape)
            for inner in with_numbers(op.body, parts.late):
                self._op(inner, ())
        self._waited = waited

    def _late_channels(self, op: Fold) -> list[Channel]:
        """The channels of a loop that late products alone read."""
        parts = self._plan.delayed.get(op)
        return [c for c in self._plan.unique if parts and c.fold is op and c.readers.isdisjoint(parts.early)]

    def _trim_late(self, op: Fold, after: str) -> None:
        """Trim the tiles of the tile before tile `after` that late products alone read."""
        late = self._late_channels(op)
        if any(load in self._plan.trimmed for channel in late for load in channel.loads):
            with self._tile_before(op, after):
                self._trim(late)

    @contextmanager
    def _tile_before(self, op: Fold, after: str, lasting: Collection[Value] = ()) -> Generator[None]:
        """Emit lines for the tile before tile `after` of a loop; behind them only values of `lasting` stay."""
        index, saved = op.body.args[0], dict(self._env)
        with self._rings.step_before(op):
            self._env[index] = self._scalar(f"{index.name}_before", f"{after} - 1")
            self._scopes.append(Scope())
            yield
            self._scopes.pop()
            self._env.update((value, x) for value, x in saved.items() if value not in lasting)

    def _keep(
        self,
        op: Fold,
        early_carries: Sequence[int],
        names: Sequence[str],
        held: Sequence[Value],
        kept_at: Sequence[str],
        *more: tuple[str, Value],
    ) -> None:
        """Assign the carries of a loop, and the values that its late products need."""
        pairs = [(names[n], self._whole(op.body.results[n])) for n in early_carries]
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
            parity = f"({self._rings.steps[op]} + 1 + number) % 2"
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
            place = self._rings.tile(channel.loads[0])
        box = own_box(place, copy.descriptor.block, op.value.tile.shape)
        self.writer.line(f"{box}.store({self._whole(op.value)})", op.loc)
        self.writer.line("fence_async_shared()")
        coordinates = self._memory.coordinates(self, op, copy)
        self.writer.line(f"store_tile({self._memory.descriptor(op)}, [{coordinates}], {place})")
        if channel is not None:
            self.writer.line("tma.store_wait(0)")
            self._rings.arrive(self._rings.freed(channel))

    def _store_by_pointers(self, op: Store) -> None:
        pointer, mask = self._memory.address(self, op)
        layout = self._layouts.of(op.value)
        if layout is not None:
            pointer = f"tl.set_auto_layout({pointer}, {layout})"
            mask = f"tl.set_auto_layout({mask}, {layout})" if mask else ""
        masked = f", mask={mask}" if mask else ""
        is_numbers = op.value in self._layouts.numbers
        value = self._converted(op.value, layout).text if is_numbers else self._whole(op.value)
        self.writer.line(f"tl.store({pointer}, {value}{masked})", op.loc)
