"""The text form of a Func: deterministic, complete, and read back by `tilekern.ir.parse`.

    func @rowsum(%x: ref<f32[100, 64], in>, %out: ref<f32[100], out>) {
      grid %i in i[100 by 32]
      %start = constant 0 : i32[]
      %stop = constant 64 : i32[]
      %0 = constant 0.0 : f32[32]
      %sum = fold %k in k[64 by 16] from %start to %stop with %c = %0 do {
        %a = load %x[32*%i +: 32, 16*%k +: 16!] : f32[32, 16]
        %1 = reduce(%a) {monoid="sum", dims=[1]} : f32[32]
        %2 = add(%c, %1) : f32[32]
        yield %2
      } : f32[32]
      store %sum to %out[32*%i +: 32]
    }

`i[100 by 32]` is the axis `i` of extent 100 in blocks of 32; the value before it is the tile index. A dim of an access
is `position +: size` (a block), `position` (an index), `gather(position, size)` or `along(position, size)`; `!`
marks the dim as proved in bounds. `as [shape]` behind an array is the shape in which the access sees it. A position is
a sum such as `16*%i + 4*(%n // 6 % 2) + 3`: strides times digits. `0x` begins bytes: of an array with many elements, or
of a NaN with other bits than `np.nan`. Of several results of one op the n-th is `%name.n`.
Attributes that have their default are left out, as are a `shape` and a `dtype` that the type of the result shows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields
from typing import Any, cast

import numpy as np

from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Block, Func, Op, Value
from tilekern.ir.derivatives import Custom
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Dim, MemoryOp, Position, Term
from tilekern.ir.quote import quoted
from tilekern.ir.types import DType, dtype_name, kind_of
from tilekern.source import UNKNOWN, Loc

# Constants of more elements than this are written as the bytes of the array.
_LISTED = 16

_BASE = {f.name for f in fields(Op)}

# The attributes that the syntax of an op shows; all others stand in braces.
_SHOWN: dict[type[Op], set[str]] = {
    Elementwise: {"function"},
    Constant: {"array"},
    MemoryOp: {"access", "masked", "filled"},
    Fold: {"axis", "reverse"},
    Custom: {"rule"},
}


def to_text(func: Func, locations: bool = False) -> str:
    """The text of `func`; with `locations`, each op is followed by the user's line and region."""
    return _Printer(locations).func(func)


Func.to_text = to_text


def unique(name: str, taken: Collection[str]) -> str:
    """The name, with a number behind it if it is taken: `x`, else `x_1`, else `x_2`, ..."""
    numbered = (f"{name}_{count}" for count in itertools.count(1))
    return next(n for n in itertools.chain([name], numbered) if n not in taken)


class _Printer:
    def __init__(self, locations: bool) -> None:
        self._locations = locations
        self._names: dict[Value, str] = {}
        self._taken: set[str] = set()
        self._unnamed = 0

    # --- names ---

    def _fresh(self, hint: str) -> str:
        """A name that no value has yet: the hint, with a number if it is taken; a number alone if there is no hint."""
        base = re.sub(r"\W", "_", hint, flags=re.ASCII)
        if not base:
            self._unnamed += 1
            return str(self._unnamed - 1)
        name = unique(f"_{base}" if base[0].isdigit() else base, self._taken)
        self._taken.add(name)
        return name

    def _define(self, values: tuple[Value, ...]) -> str:
        """Name the results of one op."""
        if len(values) == 1:
            return self._use(values[0])
        name = self._fresh(values[0].name)
        self._names.update((value, f"%{name}.{n}") for n, value in enumerate(values))
        return self._uses(values)

    def _use(self, value: Value) -> str:
        if value not in self._names:
            self._names[value] = f"%{self._fresh(value.name)}"
        return self._names[value]

    def _uses(self, values: Iterable[Value]) -> str:
        return ", ".join(map(self._use, values))

    def _typed(self, values: Iterable[Value]) -> str:
        return ", ".join(f"{self._use(v)}: {v.type}" for v in values)

    # --- structure ---

    def func(self, func: Func) -> str:
        head = f"func @{_word(func.name)}({self._typed(func.params)}) "
        axes = (f"{self._use(arg)} in {_axis(a)}" for arg, a in zip(func.body.args, func.axes, strict=True))
        grid = f"  grid {', '.join(axes)}\n" if func.axes else ""
        return f"{head}{self._block(func.body, '', grid)}{self._loc(func.loc)}\n"

    def _block(self, block: Block, indent: str, first: str = "") -> str:
        inner = f"{indent}  "
        lines = [f"{inner}{self._op(op, inner)}\n" for op in block.ops]
        if block.results:
            lines.append(f"{inner}yield {self._uses(block.results)}\n")
        return f"{{\n{first}{''.join(lines)}{indent}}}"

    def _op(self, op: Op, indent: str) -> str:
        text = f"{self._define(op.results)} = " if op.results else ""
        text += self._head(op)
        attributes = ", ".join(f"{name}={_literal(value)}" for name, value in _attributes(op))
        text += f" {{{attributes}}}" if attributes else ""
        for region in _regions(op):
            args = f" ({self._typed(region.args)})" if region.args and not isinstance(op, Fold) else ""
            text += f" do{args} {self._block(region, indent)}"
        text += f" : {', '.join(str(v.type) for v in op.results)}" if op.results else ""
        return text + self._loc(op.loc)

    def _loc(self, loc: Loc) -> str:
        if not self._locations or loc == UNKNOWN:
            return ""
        function = f" in {_word(loc.function)}" if loc.function else ""
        region = f" region {_word(loc.region)}" if loc.region else ""
        return f" @ {quoted(loc.file)}:{loc.line}:{loc.column}-{loc.end_column}{function}{region}"

    # --- ops with a syntax of their own ---

    def _head(self, op: Op) -> str:
        match op:
            case Elementwise():
                return f"{op.function}({self._uses(op.operands)})"
            case Constant():
                return f"constant {_array(op.array)}"
            case MemoryOp():
                return self._memory(op)
            case Fold():
                return self._fold(op)
            case _:
                return f"{op.name}({self._uses(op.operands)})"

    def _memory(self, op: MemoryOp) -> str:
        values = op.operands[1 : op.leading]
        text = f"{op.name} {self._uses(values)} to " if values else f"{op.name} "
        seen = "" if op.access.extents is None else f" as {list(op.access.extents)}"
        text += f"{self._use(op.ref)}{seen}[{', '.join(self._dim(op, d) for d in op.access.dims)}]"
        if op.mask is not None:
            text += f" mask {self._use(op.mask)}"
        return text + (f" fill {self._use(op.operands[-1])}" if op.trailing else "")

    def _dim(self, op: MemoryOp, dim: Dim) -> str:
        text = self._position(op, dim.position)
        if dim.kind == "block":
            text += f" +: {dim.size}"
        elif dim.kind != "index":
            text = f"{dim.kind}({text}, {dim.size})"
        return text + "!" * dim.in_bounds

    def _position(self, op: MemoryOp, position: Position) -> str:
        positions = op.positions
        parts = [(t.stride, self._digit(positions[t.operand], t)) for t in position.terms]
        if position.const or not parts:
            parts.append((position.const, ""))
        text = ""
        for factor, name in parts:
            sign = ("-" if factor < 0 else "+") if not text else (" - " if factor < 0 else " + ")
            product = f"{abs(factor)}*{name}" if name and abs(factor) != 1 else name or str(abs(factor))
            text += sign + product
        return text.removeprefix("+")

    def _digit(self, value: Value, term: Term) -> str:
        name = self._use(value)
        digit = f" // {term.div}" * (term.div > 1) + f" % {term.mod}" * (term.mod > 0)
        return f"({name}{digit})" if digit else name

    def _fold(self, op: Fold) -> str:
        index, *carries = op.body.args
        text = f"fold {self._use(index)} in {_axis(op.axis)} from {self._use(op.start)} to {self._use(op.stop)}"
        text += " reverse" * op.reverse
        pairs = ", ".join(f"{self._use(c)} = {self._use(i)}" for c, i in zip(carries, op.inits, strict=True))
        return text + (f" with {pairs}" if pairs else "")


def _regions(op: Op) -> tuple[Block, ...]:
    return (op.rule,) if isinstance(op, Custom) and op.rule is not None else op.regions


def _attributes(op: Op) -> Iterable[tuple[str, Any]]:
    """The attributes that stand in braces, in the order of the fields."""
    shown = {name for kind, names in _SHOWN.items() if isinstance(op, kind) for name in names}
    for f in fields(op):
        if f.name in _BASE or f.name in shown:
            continue
        value = getattr(op, f.name)
        is_implied = len(op.results) == 1 and f.name in ("shape", "dtype") and value == getattr(op.result.tile, f.name)
        if not is_implied and (f.default is MISSING or value != f.default):
            yield f.name, value


def _literal(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return quoted(value)
        case np.dtype():
            return dtype_name(cast(DType, value))
        case tuple():
            return f"[{', '.join(map(_literal, cast(tuple[Any, ...], value)))}]"
        case _:
            raise AssertionError(f"an attribute of type {type(value)} has no text form")


def _array(array: Array) -> str:
    """A splat as its element, a small array as the list of its elements in row-major order, a large one as bytes."""
    if array.size > _LISTED:
        return f"0x{array.tobytes().hex()}"
    elements = [_element(x) for x in array.ravel()]
    return f"[{', '.join(elements)}]" if array.shape else elements[0]


def _element(element: Any) -> str:
    """A number; its bytes if it is a NaN of other bits than `np.nan`."""
    number = {"float": float, "bool": bool}.get(kind_of(element.dtype), int)
    if element != element and element.tobytes() != np.array(np.nan, element.dtype).tobytes():
        return f"0x{element.tobytes().hex()}"
    return "nan" if element != element else _literal(number(element))


def _axis(axis: Axis) -> str:
    order = " descending" * axis.descending + (f" group {axis.group}" if axis.group else "")
    return f"{_word(axis.name)}[{axis.extent} by {axis.block}{order}]"


def _word(name: str) -> str:
    """A name: bare if it is an identifier, else in quotes."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, flags=re.ASCII) else quoted(name)
