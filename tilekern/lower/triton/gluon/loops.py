"""Loops of the warpgroups that compute, with products that run beside other ops.

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

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Op, Value
from tilekern.lower.triton.emit.emit_triton import Emitter
from tilekern.lower.triton.emit.names import assigned
from tilekern.lower.triton.emit.source_text import Expr
from tilekern.lower.triton.gluon.channels import Channel
from tilekern.lower.triton.gluon.loads_first import loads_first
from tilekern.lower.triton.gluon.plan import Plan
from tilekern.lower.triton.gluon.products import Products
from tilekern.lower.triton.gluon.rings import Buffers, Rings
from tilekern.lower.triton.gluon.rotation import Rotation
from tilekern.lower.triton.gluon.rounds import Rounds
from tilekern.passes.delay_dots import always_runs, leading_ops, with_numbers


class Loops:
    """Emits the loops of a warpgroup.

    Args:
      emitter: emits the ops of the warpgroup.
      plan: the plan of the kernel.
      buffers: its shared memory.
      rings: the places of the warpgroup in the rings.
      rounds: the bounds of all programs of a group.
      products: the products of the warpgroup.
    """

    def __init__(
        self, emitter: Emitter, plan: Plan, buffers: Buffers, rings: Rings, rounds: Rounds, products: Products
    ) -> None:
        self._emitter, self._plan, self._buffers, self._rings = emitter, plan, buffers, rings
        self._rounds, self._products = rounds, products

    def fold(self, op: Fold, variables: tuple[str, ...]) -> None:
        """Emit a loop; `variables` are the names that the user's statement assigns, () for none."""
        around = op in self._emitter.func.body.ops
        outer = [c for c in self._plan.unique if around and c.fold is None and not c.readers.isdisjoint(op.walk())]
        self._products.flights.settle(self._products.flights.values)
        self._products.trim(outer)
        for channel in outer:
            self._products.wait_filled(channel, op.loc)
        names = self._emitter.carry(op.body.args[1:], op.inits, variables, op.loc)
        own = [channel for channel in self._plan.unique if channel.fold is op]
        first, last = self._emitter.bounds(op)
        least, most = self._rounds.all_bounds(op) if own else (first, last)
        runs = always_runs(op, self._emitter.ranges.get(op.start), self._emitter.ranges.get(op.stop))
        if not runs and (least, most) != (first, last):
            # A program without a tile skips all tiles of the other programs.
            first = self._emitter.named("first_own", f"tl.minimum({first}, {most})")
            last = self._emitter.named("last_own", f"tl.maximum({last}, {first})")
        skipped_before, skipped_after = [(least, first), (last, most)][:: -1 if op.reverse else 1]
        self._skip(op, own, *skipped_before)
        if op not in self._plan.delayed:
            self._plain_loop(op, names, first, last, own)
        elif runs:
            self._delayed_loop(op, self._plan.delayed[op], names, first, last)
        else:
            self._emitter.writer.line(f"if {first} < {last}:", op.loc)
            with self._emitter.writer.indented(), self._emitter.scope():
                self._delayed_loop(op, self._plan.delayed[op], names, first, last)
                self._emitter.assign(names, op.results, op.loc)
            self._emitter.bind_values(op.results, names)
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
        with self._rounds.loop(op, first, last):
            self._rings.enter_step(op)
            self._products.waited.difference_update(own)
            self._products.trim([channel for channel in own if channel not in late])
            self._take_turn(op)
            self._give_turn(op)
            self._products.trim(late)
            for channel in own:
                self._products.wait_filled(channel, op.loc)
                self._rings.arrive(self._rings.freed(channel))
            self._rings.leave_step(op)

    def _plain_loop(self, op: Fold, names: list[str], first: str, last: str, own: Sequence[Channel]) -> None:
        body = op.body
        carries = body.args[1:]
        self._emitter.bind_values(carries, names)
        flowing = self._flowing(op)
        with self._rounds.loop(op, first, last):
            if own:
                self._rings.enter_step(op)
            self._products.waited.difference_update(own)
            self._products.trim(own)
            self._emitter.scoped_block(replace(body, ops=loads_first(body.ops)) if own else body)
            if flowing is not None:
                self._leave_one(op, first)
            else:
                self._products.flights.settle(body.results)
            self._emitter.assign(names, body.results, op.loc)
            if own:
                self._rings.leave_step(op)
        self._products.flights.clear()
        self._emitter.bind_values(op.results, names)
        if flowing is not None:
            name = names[body.results.index(flowing)]
            self._emitter.writer.line(f"{name} = warpgroup_mma_wait(0, deps=({name},))", op.loc)
            self._rings.arrive(self._rings.freed_before(op), f"{first} < {last}")

    def _flowing(self, op: Fold) -> Value | None:
        """The sum of a loop's only product, if nothing but the product of the next iteration needs it."""
        dots = [inner for inner in op.body.ops if isinstance(inner, Dot)]
        trims = any(channel.fold is op and load in self._plan.trimmed for load, channel in self._plan.channels.items())
        if len(dots) != 1 or op.reverse or self._plan.stages < 2 or trims:
            return None
        total = next((add for add, dot in self._emitter.fused.items() if dot is dots[0]), None)
        if total is None or op.body.results.count(total.result) != 1:
            return None
        carry = op.body.args[1 + op.body.results.index(total.result)]
        users = [inner for inner in op.body.ops if carry in inner.uses() or total.result in inner.uses()]
        return total.result if users == [total] and carry not in op.body.results else None

    def _leave_one(self, op: Fold, first: str) -> None:
        """Wait for the product of the iteration before, and free its tiles; this iteration's stays in flight."""
        flight = self._products.flights.only()
        name = self._emitter.env[flight.value].text
        self._emitter.writer.line(f"{name} = warpgroup_mma_wait(1, deps=({name},))", flight.dot.loc)
        index = self._emitter.env[op.body.args[0]].text
        self._rings.arrive(self._rings.freed_before(op), f"{index} > {first}")

    # --- delayed products ---

    def _delayed_loop(self, op: Fold, parts: Rotation, names: list[str], first: str, last: str) -> None:
        """The loop whose last product is computed an iteration later; it runs at least once."""
        body, index = op.body, op.body.args[0]
        carries = body.args[1:]
        held, leading = list(parts.held), leading_ops(parts.early)
        totals = [body.results[n] for n in parts.numbers]
        early_carries = [n for n in range(len(names)) if n not in parts.numbers]
        self._emitter.bind_values(carries, names)
        self._rings.enter_step(op)
        self._emitter.env[index] = self._scalar(index.name, first)
        own = [c for c in self._plan.unique if c.fold is op]
        early = [c for c in own if not c.readers.isdisjoint(parts.early)]
        self._products.waited.difference_update(own)
        self._products.trim(early)
        self._take_turn(op)
        dots = [inner for inner in parts.early if isinstance(inner, Dot)]
        self._part(op, parts.early, dots[-1])
        self._products.flights.settle(body.results)
        kept_at = [self._emitter.names.fresh(v.name or "held") for v in held]
        self._keep(op, early_carries, names, held, kept_at)
        self._rings.leave_step(op)
        with self._rounds.loop(op, f"{first} + 1", last):
            self._emitter.bind_values(carries, names)
            self._rings.enter_step(op)
            self._products.waited.difference_update(own)
            self._trim_late(op, self._emitter.env[index].text)
            self._products.trim(early)
            self._take_turn(op)
            self._part(op, parts.early[:leading])
            self._late_part(op, parts, kept_at, self._emitter.env[index].text)
            if len(dots) == 1:
                self._give_turn(op)
            self._part(op, parts.early[leading:], dots[-1])
            self._products.flights.settle(body.results)
            self._keep(op, early_carries, names, held, kept_at, *((names[n], body.results[n]) for n in parts.numbers))
            self._rings.leave_step(op)
        self._emitter.bind_values(carries, names)
        self._products.waited.difference_update(own)
        self._trim_late(op, last)
        self._late_part(op, parts, kept_at, last)
        self._products.flights.settle(totals)
        self._emitter.bind_values(op.results, names)
        self._emitter.env.update((op.results[n], self._emitter.env[body.results[n]]) for n in parts.numbers)

    def _part(self, op: Fold, ops: Sequence[Op], last_dot: Op | None = None) -> None:
        """Emit ops of a body; behind the last product of an iteration it is the other program's turn."""
        for inner in ops:
            self._emitter.emit(inner, assigned(inner.loc) if inner.results and self._is_last(op, inner) else ())
            if inner is last_dot:
                self._give_turn(op)

    def _is_last(self, op: Fold, inner: Op) -> bool:
        """True for the last op of the user's line."""
        alike = [o for o in op.body.ops if (o.loc.file, o.loc.line) == (inner.loc.file, inner.loc.line)]
        return alike[-1] is inner

    def _scalar(self, hint: str, text: str) -> Expr:
        """A scalar that the GPU computes, in a variable; a literal would be a number of Python."""
        name = self._emitter.names.fresh(hint)
        self._emitter.writer.line(f"{name} = tl.to_tensor({text})")
        return Expr(name, ())

    def _late_part(self, op: Fold, parts: Rotation, kept_at: Sequence[str], after: str) -> None:
        """Emit the late ops of the tile before tile `after`."""
        waited = set(self._products.waited)
        # An early product has waited for the tiles of a channel that both read.
        self._products.waited |= {
            c for c in self._plan.unique if c.fold is op and not c.readers.isdisjoint(parts.early)
        }
        with self._tile_before(op, after, {v for inner in parts.late for v in inner.results}):
            for value, name in zip(parts.held, kept_at, strict=True):
                self._emitter.env[value] = Expr(name, value.tile.shape)
            for inner in with_numbers(op.body, parts.late):
                self._emitter.emit(inner, ())
        self._products.waited = waited

    def _late_channels(self, op: Fold) -> list[Channel]:
        """The channels of a loop that late products alone read."""
        parts = self._plan.delayed.get(op)
        return [c for c in self._plan.unique if parts and c.fold is op and c.readers.isdisjoint(parts.early)]

    def _trim_late(self, op: Fold, after: str) -> None:
        """Trim the tiles of the tile before tile `after` that late products alone read."""
        late = self._late_channels(op)
        if any(load in self._plan.trimmed for channel in late for load in channel.loads):
            with self._tile_before(op, after):
                self._products.trim(late)

    @contextmanager
    def _tile_before(self, op: Fold, after: str, lasting: Collection[Value] = ()) -> Generator[None]:
        """Emit lines for the tile before tile `after` of a loop; behind them only values of `lasting` stay."""
        index, saved = op.body.args[0], dict(self._emitter.env)
        with self._rings.step_before(op):
            self._emitter.env[index] = self._scalar(f"{index.name}_before", f"{after} - 1")
            with self._emitter.scope():
                yield
            self._emitter.env.update((value, x) for value, x in saved.items() if value not in lasting)

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
        pairs = [(names[n], self._emitter.whole(op.body.results[n])) for n in early_carries]
        pairs += [(name, self._emitter.whole(value)) for name, value in more]
        for name, value in zip(kept_at, held, strict=True):
            pairs.append((name, self._kept_text(value)))
        pairs = [(name, text) for name, text in pairs if name != text]
        self._emitter.writer.line(f"{', '.join(n for n, _ in pairs)} = {', '.join(t for _, t in pairs)}", op.loc)

    def _kept_text(self, value: Value) -> str:
        dot = next((d for d in self._products.beside if isinstance(d, Dot) and d.operands[0] is value), None)
        text = self._emitter.whole(value)
        return text if dot is None else self._products.as_left(text, dot.result.tile.shape[1])

    def _take_turn(self, op: Fold) -> None:
        """Wait for the turn to multiply, which comes when the other program has started its products."""
        if self._buffers.turn and op in self._plan.delayed:
            parity = f"({self._rings.steps[op]} + 1 + number) % 2"
            self._emitter.writer.line(f"mbarrier.wait({self._buffers.turn}.index(number), {parity})")

    def _give_turn(self, op: Fold) -> None:
        if self._buffers.turn and op in self._plan.delayed:
            self._emitter.writer.line(f"mbarrier.arrive({self._buffers.turn}.index(1 - number), count=1)")
