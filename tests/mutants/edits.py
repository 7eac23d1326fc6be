"""Faults that are drawn from syntax trees: every small change of an expression or a statement that may be wrong.

`edits` lists those of one file. A kind of edit is one row of what programmers get wrong: an operator, a bound, a dtype,
an identity, a flag, a mask, a dropped statement, a negated condition, swapped operands. An edit replaces one stretch of
the text, by as many lines, so that all other code keeps its line numbers.

Text for people is left alone: docstrings, messages, annotations, functions that describe or show.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

KINDS = ("operator", "bound", "dtype", "identity", "flag", "mask", "drop", "negate", "swap")


@dataclass(frozen=True)
class Edit:
    """One fault.

    Attributes:
      file: the path from the root of the tree.
      scope: the function or class in which it stands, with dots; "" at the level of the module.
      kind: one of `KINDS`.
      before: the text that it replaces.
      after: the faulty text.
      start: the number of bytes before it in the file.
      line: the number of its first line.
      digest: of the statement, the place in it, and the faulty text; other statements may change.
    """

    file: str
    scope: str
    kind: str
    before: str
    after: str
    start: int
    line: int
    digest: str

    @property
    def name(self) -> str:
        """The same for as long as the statement and the scope's name stay the same."""
        return f"{self.file}:{self.scope or '<module>'}:{self.kind}:{self.digest}"

    @property
    def lines(self) -> range:
        """The numbers of the lines that it replaces."""
        return range(self.line, self.line + self.before.count("\n") + 1)

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        data, before = text.encode(), self.before.encode()
        stop = self.start + len(before)
        assert data[self.start : stop] == before, f"{self.name}: the file has changed"
        return (data[: self.start] + self.after.encode() + data[stop:]).decode()


def edits(file: str, text: str) -> list[Edit]:
    """All faults of a file; of a few, the text does not parse."""
    finder = _Finder(file, text)
    finder.visit(ast.parse(text))
    return finder.edits


_BINARY: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_COMPARED: dict[type[ast.cmpop], tuple[str, str, str]] = {
    ast.Lt: ("bound", "<", "<="),
    ast.LtE: ("bound", "<=", "<"),
    ast.Gt: ("bound", ">", ">="),
    ast.GtE: ("bound", ">=", ">"),
    ast.Eq: ("negate", "==", "!="),
    ast.NotEq: ("negate", "!=", "=="),
    ast.Is: ("negate", "is", "is not"),
    ast.IsNot: ("negate", r"is\s+not", "is"),
    ast.In: ("negate", "in", "not in"),
    ast.NotIn: ("negate", r"not\s+in", "in"),
}


def _both_ways(*pairs: tuple[str, str]) -> dict[str, str]:
    return dict(pairs) | {y: x for x, y in pairs}


_FUNCTIONS = _both_ways(("min", "max"), ("any", "all"), ("minimum", "maximum"), ("argmin", "argmax"))
# Operators of the block IR, which the compiler names by strings: `make.of("lt", x, y)`.
_OF_THE_IR = {
    **_both_ways(("add", "sub"), ("min", "max"), ("lt", "le"), ("gt", "ge"), ("eq", "ne"), ("and", "or")),
    "mul": "add",
    "div": "mul",
    "rem": "div",
    "xor": "or",
    "shl": "shr",
}
_DTYPES = {
    "float64": "float32", "float32": "bfloat16", "bfloat16": "float16", "float16": "bfloat16",
    "int64": "int32", "int32": "int64", "int16": "int32", "int8": "uint8",
    "uint64": "uint32", "uint32": "int32", "uint16": "int16", "uint8": "int8",
    "F64": "F32", "F32": "F64", "F16": "F32", "BF16": "F16", "I64": "I32", "I32": "I64", "BOOL": "I32",
}  # fmt: skip

_MASKS = re.compile(r"(^|[_.])(mask|where|fill)$")
# Functions, and files, of text for people.
_TEXT = re.compile(
    r"^(__repr__|__str__|_?(describe|explain|show|text|summary|message|help|usage)(_.*)?|.*_(text|message))$"
)
# Arguments of text for people, of what nothing but time depends on, and of assertions.
_UNSEEN = {
    "expected",
    "got",
    "fix",
    "summary",
    "message",
    "reason",
    "doc",
    "maxsize",
    "stacklevel",
    "timeout",
    "strict",
}


class _Finder(ast.NodeVisitor):
    """Finds the faults of a file."""

    def __init__(self, file: str, text: str) -> None:
        self.edits: list[Edit] = []
        self._file, self._data = file, text.encode()
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._words = set(re.findall(r"\w+", text))
        self._scope: list[str] = []
        self._statement: ast.AST | None = None
        self._seen = Counter[str]()

    # Text and places.

    def _span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._data[start:stop].decode()

    def _add(self, kind: str, start: int, stop: int, after: str) -> None:
        before = self._data[start:stop].decode()
        missing = before.count("\n") - after.count("\n")
        after += "\n" * missing if kind == "drop" else ""
        statement = self._statement
        assert statement is not None
        inside = f"{self._text(statement)} {start - self._span(statement)[0]} {after}"
        key = f"{'.'.join(self._scope)} {inside}"
        self._seen[key] += 1
        digest = hashlib.sha256(f"{inside} {self._seen[key]}".encode()).hexdigest()[:8]
        line = self._data[:start].count(b"\n") + 1
        self.edits.append(Edit(self._file, ".".join(self._scope), kind, before, after, start, line, digest))

    def _replace(self, kind: str, node: ast.AST, after: str) -> None:
        self._add(kind, *self._span(node), after)

    def _token(self, kind: str, left: ast.AST, right: ast.AST, token: str, after: str) -> None:
        """Replace the operator between two operands; a comment between them is not searched."""
        start, stop = self._span(left)[1], self._span(right)[0]
        found = re.search(rf"(?<![#\w]){token}(?!\w)", self._data[start:stop].decode())
        if found and "#" not in self._data[start:stop].decode():
            self._add(kind, start + found.start(), start + found.end(), after)

    def _exchange(self, left: ast.AST, right: ast.AST) -> None:
        (start, middle), (begin, stop) = self._span(left), self._span(right)
        x, between, y = (self._data[i:j].decode() for i, j in ((start, middle), (middle, begin), (begin, stop)))
        if x != y and "\n" not in x + y:
            self._add("swap", start, stop, f"{y}{between}{x}")

    # What is not for people.

    def visit(self, node: ast.AST) -> None:
        """Visit a node, its statement noted."""
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
            self._dropped(node)
        super().visit(node)
        self._statement = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._body(node)

    def _body(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Visit the statements: decorators and defaults have none of their own that could name a fault."""
        if not _TEXT.match(node.name):
            self._scope.append(node.name)
            for statement in node.body:
                self.visit(statement)
            self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not self._text(node.annotation).endswith("TypeAlias"):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._text(node.targets[0]).startswith("__"):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if self._text(node.test) == "TYPE_CHECKING":
            return
        self._negated(node.test)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._text(node.func).rpartition(".")[2]
        if name.endswith(("Error", "Warning")) or name in ("cast", "TypeVar", "warn", "isinstance", "issubclass"):
            return
        self._called(node, name)
        for argument in (node.func, *node.args, *(k.value for k in node.keywords if k.arg not in _UNSEEN)):
            self.visit(argument)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Errors are for people."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion that fails is a bug of the compiler: none may fail, so none shows in a test."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Mostly messages."""

    def visit_Import(self, node: ast.Import) -> None:
        """Imports are names."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Imports are names."""

    def visit_TypeAlias(self, node: ast.TypeAlias) -> None:
        """Types are not run."""

    # Faults.

    def _dropped(self, node: ast.stmt) -> None:
        """Statements without which the code still has all of its names."""
        if not self._scope:
            return
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                drops = any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(value))
            case ast.Assign(targets=[ast.Subscript()]) | ast.AugAssign():
                drops = True
            case ast.Expr(value=ast.Call(func=called)):
                drops = "super" not in self._text(called)
            case ast.If(body=[ast.Return() | ast.Raise() | ast.Continue() | ast.Break()], orelse=[]):
                drops = True
            case _:
                drops = False
        if drops:
            self._replace("drop", node, "pass")

    def _negated(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and _COMPARED[type(test.ops[0])][0] == "negate"):
            self._replace("negate", test, f"(not ({self._text(test)}))")

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negated(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace("drop", test, "True")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        of_text = any(isinstance(n, ast.JoinedStr) or _is_text(n) for n in (node.left, node.right))
        if type(node.op) in _BINARY and not of_text and not isinstance(node.left, (ast.Tuple, ast.List)):
            token, after = _BINARY[type(node.op)]
            self._token("operator", node.left, node.right, re.escape(token), after)
            if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv)):
                self._exchange(node.left, node.right)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            kind, token, after = _COMPARED[type(op)]
            self._token(kind, left, right, token, after)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        token, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self._token("operator", left, right, token, after)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if self._text(node.operand).endswith(".inf"):
            self._replace("identity", node, self._text(node.operand))
            return
        if not isinstance(node.operand, ast.Constant) and not isinstance(node.op, ast.UAdd):
            self._replace("operator", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self._replace("flag", node, str(not value))
            case int(value):
                self._replace("bound", node, str(value + 1))
                if value:
                    self._replace("bound", node, str(value - 1))
            case float(value) if value in (0.0, 1.0):
                self._replace("identity", node, str(1.0 - value))
            case str(value) if value in _DTYPES and value.islower():
                self._replace("dtype", node, f'"{_DTYPES[value]}"')
            case _:
                pass

    def visit_Name(self, node: ast.Name) -> None:
        if _DTYPES.get(node.id) in self._words:
            self._replace("dtype", node, _DTYPES[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "inf":
            self._replace("identity", node, f"-{self._text(node)}")
        elif node.attr in _DTYPES and node.attr.islower():
            # Without 64 bits, `jnp.int64` is int32.
            other = "uint32" if node.attr == "int32" and self._text(node.value) == "jnp" else _DTYPES[node.attr]
            self._replace("dtype", node, f"{self._text(node.value)}.{other}")
        self.generic_visit(node)

    def _called(self, node: ast.Call, name: str) -> None:
        if name in _FUNCTIONS:
            stop = self._span(node.func)[1]
            self._add("operator", stop - len(name), stop, _FUNCTIONS[name])
        first = node.args[0] if node.args else None
        if name == "of" and isinstance(first, ast.Constant) and first.value in _OF_THE_IR:
            self._replace("operator", first, f'"{_OF_THE_IR[first.value]}"')
        for keyword in node.keywords:
            if keyword.arg and _MASKS.search(keyword.arg) and not isinstance(keyword.value, ast.Constant):
                self._replace("mask", keyword.value, "None")
        for argument in node.args:
            if isinstance(argument, (ast.Name, ast.Attribute)) and _MASKS.search(self._text(argument)):
                self._replace("mask", argument, "None")
        if name not in ("min", "max", "minimum", "maximum", "zip", "getattr", "hasattr", "any", "all"):
            self._swapped(node.args)

    def _swapped(self, arguments: Sequence[ast.expr]) -> None:
        """The first two neighbours that are no constants."""
        plain = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp)
        for left, right in pairwise(arguments):
            if isinstance(left, plain) and isinstance(right, plain):
                self._exchange(left, right)
                return


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
