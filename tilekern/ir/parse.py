"""Read the text form of a Func, which `tilekern.ir.text` describes. Line comments start with `#`."""

from __future__ import annotations

import json
import linecache
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from tilekern import source
from tilekern.errors import ParseError, VerifyError
from tilekern.ir import compute, control, debug, derivatives, dynamic, elementwise, memory, ordering, shape
from tilekern.ir.compute import Constant
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Block, Func, Op, Value, index_value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.marks import without_unproved
from tilekern.ir.memory import Access, Dim, MemoryOp, Position, Term
from tilekern.ir.text import unique
from tilekern.ir.tokens import FILE, Token, tokens
from tilekern.ir.types import BOOL, DTYPES, INDEX, RefType, Role, TileType, Type, kind_of
from tilekern.ir.verify import verify
from tilekern.source import UNKNOWN, Loc

OPS: dict[str, type[Op]] = {
    c.name: c
    for module in (compute, control, debug, derivatives, dynamic, elementwise, memory, ordering, shape)
    for c in vars(module).values()
    if isinstance(c, type) and issubclass(c, Op) and c.name
}
"""Every class of op by its name."""

# Blocks or lists inside each other, digits of a number, and elements of a tile: more are an error of the text.
_DEEPEST, _DIGITS, _LARGEST = 64, 100, 2**62
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan, **DTYPES}


def parse(text: str) -> Func:
    """The Func that `text` describes. A `!` that the text does not prove is dropped: the access is checked.

    Raises:
      ParseError: the text is not the text form of a Func, an op's type rule fails, or the Func breaks another rule of
        the verifier; the message names the line of the text.
    """
    return without_unproved(_Parser(text).func())


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(tokens(text))
        self._next = 0
        self._values: dict[str, Value] = {}  # in the order of their definition
        self._taken: set[str] = set()  # all names so far
        self._depth = 0

    # --- tokens ---

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _error(self, summary: str, token: Token) -> ParseError:
        linecache.cache[FILE] = (len(self._text), None, [f"{line}\n" for line in self._text.split("\n")], FILE)
        with source.at(token.loc):
            return ParseError(f"line {token.loc.line}: {summary}")

    def _take(self, kind: str) -> str:
        """The text of the next token, which must be of this kind."""
        token = self._token
        if token.kind != kind:
            raise self._error(f"expected a {kind}, got {token.text}", token)
        self._next += 1
        return token.text

    def _accept(self, text: str) -> bool:
        """Take the next token if its text is `text`; True if it is."""
        matches = self._token.text == text and self._token.kind in ("word", "mark")
        self._next += matches
        return matches

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._error(f"expected {text}, got {self._token.text}", self._token)

    def _list[T](self, item: Callable[[], T], close: str = "") -> tuple[T, ...]:
        """One or more items between commas. With `close` none or more, and takes the closing token, too."""
        if close and self._accept(close):
            return ()
        items = [item()]
        while self._accept(","):
            items.append(item())
        if close:
            self._expect(close)
        return tuple(items)

    def _integer(self) -> int:
        token = self._token
        sign = -1 if self._accept("-") else 1
        text = self._take("number")
        if not text.isdigit():
            raise self._error(f"expected an integer, got {text}", token)
        return sign * self._whole(text, token)

    def _whole(self, digits: str, token: Token) -> int:
        if len(digits) > _DIGITS:
            raise self._error(f"expected a number of at most {_DIGITS} digits, got one of {len(digits)}", token)
        return int(digits)

    def _nested[T](self, read: Callable[[], T], token: Token) -> T:
        """The result of `read`, for a block or list one level deeper."""
        if self._depth == _DEEPEST:
            raise self._error(f"expected at most {_DEEPEST} blocks or lists inside each other", token)
        self._depth += 1
        result = read()
        self._depth -= 1
        return result

    def _string(self) -> str:
        token = self._token
        try:
            return json.loads(self._take("string"))
        except ValueError as error:
            raise self._error(f"not a string: {error}", token) from error

    def _name(self) -> str:
        return self._string() if self._token.kind == "string" else self._take("word")

    # --- values and types ---

    def _new(self) -> Token:
        """The name of a value to be defined."""
        token = self._token
        self._take("value")
        return token

    def _hint(self, token: Token) -> str:
        """The hint from which the printer made `%name` or `%name.n`: without the number that makes a name unique."""
        name = token.text[1:].partition(".")[0]
        if name.isdigit():
            return ""
        base = name.rpartition("_")[0]
        hint = base if base and name == unique(base, self._taken) else name
        self._taken.add(name)
        return hint

    def _bind(self, token: Token, value: Value) -> Value:
        if token.text in self._values:
            raise self._error(f"{token.text} is defined twice", token)
        self._values[token.text] = value
        return value

    def _use(self) -> Value:
        token = self._token
        name = self._take("value")
        if name not in self._values:
            raise self._error(f"{name} is not defined here", token)
        return self._values[name]

    def _tile_type(self) -> TileType:
        token = self._token
        name = self._take("word")
        if name not in DTYPES:
            raise self._error(f"no dtype is named {name}", token)
        self._expect("[")
        shape = self._list(self._integer, "]")
        if min(shape, default=0) < 0 or math.prod(max(n, 1) for n in shape) > _LARGEST:
            raise self._error(f"expected dims of at least 0, and fewer than 2**62 elements, got {shape}", token)
        return TileType(shape, DTYPES[name])

    def _type(self) -> Type:
        if not self._accept("ref"):
            return self._tile_type()
        self._expect("<")
        tile = self._tile_type()
        self._expect(",")
        for role in get_args(Role):
            if self._accept(role):
                self._expect(">")
                return RefType(tile.shape, tile.dtype, role)
        raise self._error(f"expected one of {get_args(Role)}, got {self._token.text}", self._token)

    def _typed(self) -> Value:
        token = self._new()
        self._expect(":")
        return self._bind(token, Value(self._type(), self._hint(token)))

    def _axis(self) -> tuple[Token, Axis]:
        token = self._new()
        self._expect("in")
        name = self._name()
        self._expect("[")
        extent = self._integer()
        self._expect("by")
        block, descending = self._integer(), self._accept("descending")
        if extent < 0 or block < 1:
            raise self._error(
                f"expected an axis of at least 0 elements in blocks of at least 1, got {extent} by {block}", token
            )
        axis = Axis(name, extent, block, descending, self._integer() if self._accept("group") else 0)
        self._expect("]")
        return token, axis

    def _literal(self) -> Any:
        token = self._token
        if token.kind == "string":
            return self._string()
        if token.kind == "bytes":
            return bytes.fromhex(self._take("bytes")[2:])
        if self._accept("["):
            return self._nested(lambda: self._list(self._literal, "]"), token)
        if self._accept("-"):
            value = self._nested(self._literal, token)
            if type(value) not in (int, float):
                raise self._error("expected a number behind -", token)
            return -value
        if token.kind == "word" and token.text in _WORDS:
            return _WORDS[self._take("word")]
        number = self._take("number")
        return self._whole(number, token) if number.isdigit() else float(number)

    def _loc(self) -> Loc:
        if not self._accept("@"):
            return UNKNOWN
        file = self._string()
        self._expect(":")
        line = self._integer()
        self._expect(":")
        column = self._integer()
        self._expect("-")
        end_column = self._integer()
        function = self._name() if self._accept("in") else ""
        return Loc(file, line, column, end_column, function, self._name() if self._accept("region") else "")

    # --- structure ---

    def func(self) -> Func:
        begin = self._token
        self._expect("func")
        self._expect("@")
        name = self._name()
        self._expect("(")
        params = self._list(self._typed, ")")
        self._expect("{")
        grid = self._list(self._axis) if self._accept("grid") else ()
        body = self._block(tuple(self._bind(token, index_value(self._hint(token))) for token, _ in grid))
        func = Func(name, params, tuple(axis for _, axis in grid), body, self._loc())
        if self._token.kind != "end":
            raise self._error(f"expected the end of the text, got {self._token.text}", self._token)
        try:
            verify(func)
        except VerifyError as error:
            raise self._error(error.summary, begin) from error
        return func

    def _block(self, args: tuple[Value, ...]) -> Block:
        """The block of the ops up to the closing brace, with the values that it yields."""
        ops: list[Op] = []
        results: tuple[Value, ...] = ()
        while not self._accept("}"):
            if self._accept("yield"):
                results = self._list(self._use)
                self._expect("}")
                break
            ops.append(self._op())
        return Block(args, tuple(ops), results)

    def _region(self, args: Callable[[], tuple[Value, ...]]) -> Block:
        """A nested block; the values that it defines are not visible behind it."""
        outer = len(self._values)
        bound = args()
        token = self._token
        self._expect("{")
        block = self._nested(lambda: self._block(bound), token)
        while len(self._values) > outer:
            self._values.popitem()
        return block

    def _op(self) -> Op:
        names: tuple[Token, ...] = ()
        if self._token.kind == "value":
            names = self._list(self._new)
            self._expect("=")
        token = self._token
        word = self._take("word")
        kind = Elementwise if word in TABLE else OPS.get(word)
        if kind is None:
            raise self._error(f"no op is named {word}", token)
        op_fields: dict[str, Any] = {"hint": self._hint(names[0]) if names else ""}
        args = self._head(kind, word, op_fields)
        if self._accept("{"):
            self._attributes(kind, op_fields)
        regions: list[Block] = []
        while self._accept("do"):
            regions.append(self._region(args))
        op_fields["regions"] = tuple(regions)
        types = self._list(self._tile_type) if self._accept(":") else ()
        op = self._make(kind, op_fields, types, token)
        if len(names) != len(types):
            raise self._error(f"{len(names)} names for {len(types)} results", token)
        for name, value in zip(names, op.results, strict=True):
            self._bind(name, value)
        return op

    def _attributes(self, kind: type[Op], op_fields: dict[str, Any]) -> None:
        """Read the attributes in braces into the fields of the op."""
        base = {f.name for f in fields(Op)}
        field_types = {f.name: str(f.type) for f in fields(kind) if f.name not in base}
        while not self._accept("}"):
            token = self._token
            name = self._take("word")
            if name not in field_types or name in op_fields:
                raise self._error(f"{kind.name} has no attribute {name}, or has it already", token)
            self._expect("=")
            token = self._token
            op_fields[name] = self._literal()
            if not _fits(op_fields[name], field_types[name]):
                raise self._error(f"expected {name} of type {field_types[name]}, got {op_fields[name]!r}", token)
            if self._token.text != "}":
                self._expect(",")

    def _make(self, kind: type[Op], op_fields: dict[str, Any], types: tuple[TileType, ...], token: Token) -> Op:
        """The op; a missing `shape` or `dtype` is taken from the type of its result."""
        if len(types) == 1:
            field_names = {f.name for f in fields(kind)}
            implied = {"shape": types[0].shape, "dtype": types[0].dtype}
            op_fields = {**{name: value for name, value in implied.items() if name in field_names}, **op_fields}
            if kind is Constant:
                op_fields["array"] = self._array(op_fields["array"], types[0], token)
        try:
            op = kind(**op_fields, loc=self._loc())
        except ParseError:
            raise
        except Exception as error:  # an attribute of the wrong type may break the op's type rule in any way
            raise self._error((str(error) or type(error).__name__).splitlines()[0], token) from error
        if tuple(v.type for v in op.results) != types:
            raise self._error(f"{kind.name} gives {', '.join(str(v.type) for v in op.results) or 'no result'}", token)
        return op

    def _array(self, literal: Any, tile: TileType, token: Token) -> Array:
        try:
            if isinstance(literal, bytes):
                if tile.dtype == BOOL and max(literal, default=0) > 1:
                    raise ValueError("a bool is the byte 0 or 1")
                is_splat = len(literal) == tile.dtype.itemsize
                return np.frombuffer(literal, tile.dtype).reshape(() if is_splat else tile.shape)
            kind = {"float": float, "bool": bool}.get(kind_of(tile.dtype), int)
            if type(literal) is kind:
                return np.array(literal, tile.dtype)
            if all(type(x) is kind or (type(x) is bytes and kind is float) for x in literal):
                elements = [np.frombuffer(x, tile.dtype).reshape(())[()] if type(x) is bytes else x for x in literal]
                return np.array(elements, tile.dtype).reshape(tile.shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._error(f"these are no elements of {tile}: {error}", token) from error
        raise self._error(f"these are no elements of {tile}", token)

    def _arguments(self) -> tuple[Value, ...]:
        return self._list(self._typed, ")") if self._accept("(") else ()

    # --- ops with a syntax of their own ---

    def _head(self, kind: type[Op], word: str, op_fields: dict[str, Any]) -> Callable[[], tuple[Value, ...]]:
        """Read the text before the attributes into the fields of the op; returns the reader of a region's arguments."""
        if kind is Fold:
            return self._fold(op_fields)
        if kind is Constant:
            op_fields["array"] = self._literal()
        elif issubclass(kind, MemoryOp):
            self._memory(kind, op_fields)
        else:
            if kind is Elementwise:
                op_fields["function"] = word
            self._expect("(")
            op_fields["operands"] = self._list(self._use, ")")
        return self._arguments

    def _memory(self, kind: type[MemoryOp], op_fields: dict[str, Any]) -> None:
        values: tuple[Value, ...] = ()
        if kind.leading > 1:
            values = self._list(self._use)
            self._expect("to")
        ref = self._use()
        extents = None
        if self._accept("as"):
            self._expect("[")
            extents = self._list(self._integer, "]")
        self._expect("[")
        positions: dict[Value, int] = {}
        op_fields["access"] = Access(self._list(lambda: self._dim(positions), "]"), extents)
        operands = [ref, *values, *positions]
        for flag, word in (("masked", "mask"), ("filled", "fill")):
            if self._accept(word):
                op_fields[flag] = True
                operands.append(self._use())
        op_fields["operands"] = tuple(operands)

    def _dim(self, positions: dict[Value, int]) -> Dim:
        for kind in ("gather", "along"):
            if self._accept(kind):
                self._expect("(")
                position = self._position(positions)
                self._expect(",")
                size = self._integer()
                self._expect(")")
                return Dim(kind, position, size, self._accept("!"))
        position = self._position(positions)
        if self._accept("+:"):
            return Dim("block", position, self._integer(), self._accept("!"))
        return Dim("index", position, in_bounds=self._accept("!"))

    def _position(self, positions: dict[Value, int]) -> Position:
        """A sum of products; its values are added to `positions` and referred to by number."""
        terms: list[Term] = []
        const = 0
        sign = -1 if self._accept("-") else 1
        while sign:
            single = self._token.kind != "number"
            factor = sign * (1 if single else self._integer())
            if single or self._accept("*"):
                terms.append(self._term(factor, positions))
            else:
                const += factor
            sign = 1 if self._accept("+") else -1 if self._accept("-") else 0
        return Position(tuple(terms), const)

    def _term(self, stride: int, positions: dict[Value, int]) -> Term:
        """A term of a value, or of a digit of a value in parentheses."""
        digit = self._accept("(")
        value = self._use()
        number = positions.setdefault(value, len(positions))
        div = self._integer() if digit and self._accept("//") else 1
        mod = self._integer() if digit and self._accept("%") else 0
        if digit:
            self._expect(")")
        return Term(number, stride, div, mod)

    def _fold(self, op_fields: dict[str, Any]) -> Callable[[], tuple[Value, ...]]:
        index, op_fields["axis"] = self._axis()
        self._expect("from")
        start = self._use()
        self._expect("to")
        stop = self._use()
        op_fields["reverse"] = self._accept("reverse")
        carries = self._list(self._carry) if self._accept("with") else ()
        op_fields["operands"] = (start, stop, *(init for _, init in carries))

        def args() -> tuple[Value, ...]:
            types = ((index, INDEX), *((token, init.type) for token, init in carries))
            return tuple(self._bind(token, Value(t, self._hint(token))) for token, t in types)

        return args

    def _carry(self) -> tuple[Token, Value]:
        token = self._new()
        self._expect("=")
        return token, self._use()


def _fits(value: Any, kind: str) -> bool:
    """True if a literal is of the type of a field; a field of a type without a case here holds a string."""
    match kind:
        case "int" | "bool":
            return type(value).__name__ == kind
        case "DType":
            return isinstance(value, np.dtype)
        case "tuple[int, ...]":
            return isinstance(value, tuple) and all(type(n) is int for n in cast("tuple[Any, ...]", value))
        case "tuple[tuple[int, ...], tuple[int, ...]]":
            return isinstance(value, tuple) and all(_fits(n, "tuple[int, ...]") for n in cast("tuple[Any, ...]", value))
        case _:
            return isinstance(value, str)
