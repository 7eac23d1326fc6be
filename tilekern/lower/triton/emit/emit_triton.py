"""Legal block IR as Triton source.

One statement of the user's becomes one statement where possible: a value that is used once, by an op of the same line,
is inlined into that op's expression. The same Func always gives the same text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilekern.ir.analysis import ranges
from tilekern.ir.analysis.ranges import INT32
from tilekern.ir.compute import Constant, Dot, Reduce
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value, cdiv, definitions
from tilekern.ir.debug import Assert, Print
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic, Load, Store
from tilekern.ir.shape import Broadcast, Iota, Reshape
from tilekern.ir.types import INDEX
from tilekern.lower.triton.calibration import MAX_INLINED
from tilekern.lower.triton.emit import expressions
from tilekern.lower.triton.emit.debug import DebugStatements
from tilekern.lower.triton.emit.expressions import whole
from tilekern.lower.triton.emit.loop_bounds import LoopBounds
from tilekern.lower.triton.emit.memory import Memory
from tilekern.lower.triton.emit.names import Names, assigned
from tilekern.lower.triton.emit.program_order import decode_program_id
from tilekern.lower.triton.emit.source_text import Expr, Writer
from tilekern.source import UNKNOWN, Loc

# Names of values that have none in the user's source.
_DEFAULT_NAMES: dict[type[Op], str] = {Dot: "product", Reduce: "reduced", Take: "taken", Reshape: "reshaped"}


@dataclass
class Scope:
    """State of a block while it is emitted.

    Attributes:
      bound: variables by their expression, so that an address is computed once.
      carried: results of the block's loops; the next loop may continue in their variables.
    """

    bound: dict[str, str] = field(default_factory=dict[str, str])
    carried: set[Value] = field(default_factory=set[Value])


class Emitter:
    """Emits the body of one Func.

    Args:
      func: a legal Func.
      memory: buffers of the Func.
      names: names in use, the parameters' names among them.

    Attributes:
      func: the Func.
      memory: its buffers.
      writer: the lines of the body.
      debug: statements of `tk.debug_print` and `tk.device_assert`.
      ranges: the interval of each int32 value that has one.
      env: the expression of each value whose op is emitted.
      fused: for each addition of a product to an accumulator, the product.
    """

    def __init__(self, func: Func, memory: Memory, names: Names) -> None:
        self.func, self.memory = func, memory
        self.names = names
        self.writer = Writer()
        self.debug = DebugStatements(self.writer)
        self.ranges = ranges.analyze(func)
        self.env: dict[Value, Expr] = {}
        self._uses = _uses(func)
        self._last_users = _last_users(func)
        self.fused = _fused_dots(func, self._uses, self._last_users)
        self._scopes: list[Scope] = []
        self._bounds_of = LoopBounds(definitions(func).get, self.ranges)
        self._targets: dict[Value, tuple[str, tuple[Value, ...]]] = {}

    # --- the protocol `Host` of memory.py ---

    def expr(self, value: Value) -> Expr:
        """The expression of a value."""
        return self.env[value]

    def bind(self, hint: str, text: str) -> str:
        """The variable of an expression; a new line assigns it unless an enclosing block has it."""
        for scope in reversed(self._scopes):
            if text in scope.bound:
                return scope.bound[text]
        name = self.names.fresh(hint)
        self.writer.line(f"{name} = {text}")
        self._scopes[-1].bound[text] = name
        return name

    # --- blocks ---

    def run(self) -> None:
        """Emit the body."""
        with self.scope():
            self.decode(self.func.axes)
            self.memory.begin(self)
            self.emit_block(self.func.body)
        self.writer.prune()

    @contextmanager
    def scope(self) -> Generator[None]:
        """A scope for the lines of a block: variables bound in it are not used behind it."""
        self._scopes.append(Scope())
        yield
        self._scopes.pop()

    def decode(
        self, axes: Sequence[Axis], program: str = "tl.program_id(0)", order: Sequence[int] | None = None
    ) -> None:
        """Assign the index along each axis of a grid, from the number of the program; the last in order is fastest."""
        arg_axes = list(zip(self.func.body.args, axes, strict=True))
        pairs = arg_axes if order is None else [arg_axes[n] for n in order]
        hints = tuple(self.names.fresh(arg.name) if axis.tiles > 1 else "" for arg, axis in pairs)
        for name, (arg, axis) in zip(hints, pairs, strict=True):
            self.env[arg] = Expr(name, ()) if axis.tiles > 1 else self._zero()
        for line in decode_program_id(tuple(axis for _, axis in pairs), hints, self.names.fresh, program):
            self.writer.line(line)

    def _zero(self) -> Expr:
        return expressions.number(0, INDEX)

    def scoped_block(self, block: Block) -> list[Expr]:
        """Emit an inner block in a scope of its own, and return the values that it yields."""
        with self.scope():
            self.emit_block(block)
        return [self.env[v] for v in block.results]

    def emit_block(self, block: Block) -> None:
        """Emit the ops of a block in the current scope."""
        last = _last_of_line(block)
        for op in block.ops:
            self.emit(op, last.get(op, ()))

    def emit(self, op: Op, variables: tuple[str, ...]) -> None:
        """Emit an op; `variables` are the names that the user's statement assigns, () for none."""
        self.memory.order(self, op)
        match op:
            case Constant():
                self.env[op.result] = expressions.constant(op)
            case Load():
                self.define(op, self.memory.load(self, op), variables or (f"{op.ref.name}_tile",))
            case Store() | Atomic():
                self.memory.write(self, op)
            case Print() | Assert():
                self.debug.write(op, [self.whole(v) for v in op.operands])
            case Fold():
                self._fold(op, assigned(op.loc))
            case While():
                self._while(op, assigned(op.loc))
            case Switch():
                self._switch(op, variables)
            case Dot() if op in self.fused.values():
                pass  # emitted with the addition
            case _:
                self._pure(op, variables)

    def _pure(self, op: Op, variables: tuple[str, ...]) -> None:
        dot = self.fused.get(op)
        if dot is None:
            text = expressions.pure(op, self._operands(op))
        else:
            acc = next(v for v in op.operands if v is not dot.result)
            texts = [self.whole(v) for v in dot.operands]
            text = Expr(expressions.dot(dot, texts, self.whole(acc)), op.result.tile.shape)
        if self._inlined(op, text):
            self.env[op.result] = text
        else:
            self.define(op, text, variables)

    def _operands(self, op: Op) -> list[Expr]:
        """The expressions of the operands of a pure op."""
        return [self.env[v] for v in op.operands]

    def whole(self, value: Value) -> str:
        """The text of a value, broadcast to the full shape of its tile."""
        return whole(self.env[value], value.tile)

    def _start(self, init: Value, carry: Value) -> str:
        """The text of a carry's initial value."""
        del carry
        return self.whole(init)

    def _inlined(self, op: Op, text: Expr) -> bool:
        """True if an expression is inlined: it is short and cheap, and used once, by an op of the same line."""
        if isinstance(op, (Broadcast, Iota)) and len(text.text) <= MAX_INLINED:
            return isinstance(op, Broadcast) or self._uses[op.result] == 1
        if op in self.fused or not isinstance(op, expressions.CHEAP) or len(text.text) > MAX_INLINED:
            return False
        user = self._last_users.get(op.result)
        return self._uses[op.result] == 1 and user is not None and _same_line(user.loc, op.loc)

    def define(self, op: Op, text: Expr, variables: tuple[str, ...]) -> None:
        """Assign the expression of an op's result to a variable."""
        hint = variables[0] if len(variables) == 1 else op.hint or _DEFAULT_NAMES.get(type(op), "x")
        target, siblings = self._targets.get(op.result, ("", ()))
        read = any(re.search(rf"\b{target}\b", self.env[v].text) for v in siblings) if target else False
        name = self.names.fresh(hint) if read or not target else target
        self.writer.line(f"{name} = {text.text}", op.loc)
        self.env[op.result] = Expr(name, text.shape)

    # --- control ---

    def carry(self, values: Sequence[Value], inits: Sequence[Value], variables: tuple[str, ...], loc: Loc) -> list[str]:
        """The variables of carries, set to their initial values."""
        hints = variables if len(variables) == len(values) else [v.name or "carry" for v in values]
        names: list[str] = []
        for w, init, value in zip(hints, inits, values, strict=True):
            if init in self._scopes[-1].carried and self._uses[init] == 1:
                names.append(self.env[init].text)  # continue in the variable of an earlier loop
                continue
            names.append(self.names.fresh(w))
            self.writer.line(f"{names[-1]} = {self._start(init, value)}", loc)
        return names

    def bind_values(self, values: Sequence[Value], names: Sequence[str]) -> None:
        """Let values be in the variables `names`."""
        for value, name in zip(values, names, strict=True):
            self.env[value] = Expr(name, value.tile.shape)

    def _assign_carry_early(self, body: Block, names: Sequence[str]) -> None:
        """Let the last op of a loop's body assign its carry at once, unless another carry still reads the old value."""
        last = body.ops[-1] if body.ops else None
        carries = body.args[len(body.args) - len(names) :]
        for carry, name, result in zip(carries, names, body.results, strict=True):
            once = self._uses[result] == 1 and carry not in body.results
            if last is not None and last.results == (result,) and once:
                self._targets[result] = name, tuple(v for v in body.results if v is not result)

    def assign(self, names: Sequence[str], values: Sequence[Value], loc: Loc) -> None:
        """Assign the next values of all variables in one statement."""
        texts = [self.whole(v) for v in values]
        pairs = [(n, t) for n, t in zip(names, texts, strict=True) if n != t]
        if pairs:
            self.writer.line(f"{', '.join(n for n, _ in pairs)} = {', '.join(t for _, t in pairs)}", loc)

    def _fold(self, op: Fold, variables: tuple[str, ...]) -> None:
        index, *carries = op.body.args
        names = self.carry(carries, op.inits, variables, op.loc)
        self.bind_values(carries, names)
        first, last = self.bounds(op)
        name = self.names.fresh(index.name)
        step = self.names.fresh("step") if op.reverse else name
        self.writer.line(f"for {step} in range({first}, {last}):", op.loc)
        with self.writer.indented():
            if op.reverse:
                self.writer.line(
                    f"{name} = {last} - 1 - {step}" if first == "0" else f"{name} = {first} + {last} - 1 - {step}"
                )
            self.env[index] = Expr(name, ())
            self._assign_carry_early(op.body, names)
            self.scoped_block(op.body)
            self.assign(names, op.body.results, op.loc)
        self.bind_values(op.results, names)
        self._scopes[-1].carried.update(op.results)

    def bounds(self, op: Fold) -> tuple[str, str]:
        """The first tile and the tile behind the last one; the fold's bounds are elements, clamped to the extent."""
        first, last = self._tiles(op, op.start, up=False), self._tiles(op, op.stop, up=True)
        return self.named("first", first), self.named("last", last)

    def _tiles(self, op: Fold, value: Value, up: bool) -> str:
        """A bound in tiles: the number of whole tiles before it, or (`up`) of tiles that begin before it."""
        x, block, extent = self.env[value], op.axis.block, op.axis.extent
        if x.number is not None:
            number = int(x.number)
            return str(op.axis.end_tile(number) if up else op.axis.first_tile(number))
        interval = self.ranges.get(value, INT32)
        text = self._bounds_of.tiles(value, block, up, lambda v: self.env[v].operand)
        if text is not None:
            most = cdiv(extent, block) if up else extent // block
            text = text if interval.low >= 0 else f"tl.maximum({text}, 0)"
            return text if interval.high <= extent else f"tl.minimum({text}, {most})"
        text = x.operand if interval.low >= 0 else f"tl.maximum({x.operand}, 0)"
        text = text if interval.high <= extent else f"tl.minimum({text}, {extent})"
        return f"tl.cdiv({text}, {block})" if up else f"{text} // {block}"

    def named(self, hint: str, text: str) -> str:
        """The text itself if it is a number or a variable, else the variable of the expression."""
        return text if text.isdigit() or text.isidentifier() else self.bind(hint, text)

    def _while(self, op: While, variables: tuple[str, ...]) -> None:
        names = self.carry(op.body.args, op.operands, variables, op.loc)
        self.bind_values(op.condition.args, names)
        self.bind_values(op.body.args, names)
        go = self.names.fresh("go")
        self._condition(op, go)
        self.writer.line(f"while {go}:", op.loc)
        with self.writer.indented():
            self._assign_carry_early(op.body, names)
            self.scoped_block(op.body)
            self.assign(names, op.body.results, op.loc)
            self._condition(op, go)
        self.bind_values(op.results, names)

    def _condition(self, op: While, go: str) -> None:
        (condition,) = self.scoped_block(op.condition)
        self.writer.line(f"{go} = {whole(condition, op.condition.results[0].tile)}", op.loc)

    def _switch(self, op: Switch, variables: tuple[str, ...]) -> None:
        if len(op.regions) == 1:
            self.emit_block(op.regions[0])
            self.env.update((r, self.env[v]) for r, v in zip(op.results, op.regions[0].results, strict=True))
            return
        hints = variables if len(variables) == len(op.results) else ["chosen"] * len(op.results)
        names = [self.names.fresh(w) for w in hints]
        index = self.env[op.operands[0]].operand
        for number, region in enumerate(op.regions):
            test = f"if {index} <= 0:" if number == 0 else f"elif {index} == {number}:"
            self.writer.line("else:" if number == len(op.regions) - 1 else test, op.loc if number == 0 else UNKNOWN)
            with self.writer.indented():
                self.scoped_block(region)
                self.assign(names, region.results, op.loc)
        self.bind_values(op.results, names)


def _same_line(a: Loc, b: Loc) -> bool:
    return (a.file, a.line) == (b.file, b.line)


def _last_of_line(block: Block) -> dict[Op, tuple[str, ...]]:
    """The last op of each of the user's lines, with the variables that the statement there assigns."""
    last: dict[tuple[str, int], Op] = {}
    for op in block.ops:
        if op.results and op.loc is not UNKNOWN and not isinstance(op, Constant):
            last[op.loc.file, op.loc.line] = op
    return {op: assigned(op.loc) for op in last.values()}


def _uses(func: Func) -> Counter[Value]:
    """Number of uses of each value, by ops and as the result of a block."""
    return Counter(v for op in func.body.ops for v in op.uses())


def _last_users(func: Func) -> dict[Value, Op]:
    """The last user of each value, if it stands in the block that defines the value."""
    users: dict[Value, Op] = {}

    def visit(block: Block) -> None:
        defined = {v for op in block.ops for v in op.results}
        for op in block.ops:
            users.update((v, op) for v in op.operands if v in defined)
            for region in op.regions:
                visit(region)

    visit(func.body)
    return users


def _fused_dots(func: Func, uses: Counter[Value], last_users: dict[Value, Op]) -> dict[Op, Dot]:
    """Maps each addition of a dot without other uses to the dot, whose accumulator becomes the second summand."""
    fused: dict[Op, Dot] = {}
    for op in func.walk():
        if not isinstance(op, Dot) or uses[op.result] != 1:
            continue
        user = last_users.get(op.result)
        if isinstance(user, Elementwise) and user.function == "add" and user not in fused:
            fused[user] = op
    return fused
