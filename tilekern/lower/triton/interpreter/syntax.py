"""Corrections of Python's control flow on tiles, which follows Triton's compiler."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter

_ASSIGNED, _CONJUNCTION, _DISJUNCTION, _NEGATION = "_tile_assigned", "_tile_and", "_tile_or", "_tile_not"


class Rewriter(ast.NodeTransformer):
    """Rewrite syntax that a class cannot overload in Python; replaces Triton's `ASTTransformer`.

    `name = value` → `name = _tile_assigned(value)`: a number becomes a tensor, as in the compiler.
    `a and b` → `_tile_and(lambda: a, lambda: b)`; `or` and `not` likewise. Python asks a tile for its truth value, and
    Triton's interpreter (3.6.0, 3.9.0) returns True for all but scalars. So `argmax` of equal values was wrong unless
    computed element by element, and `a < b < c` (3.6.0) meant `b < c`.
    """

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """`name = value` → `name = _tile_assigned(value)`."""
        self.generic_visit(node)
        node.value = _call(_ASSIGNED, node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """`a and b` → `_tile_and(lambda: a, lambda: b)`; `or` likewise."""
        self.generic_visit(node)
        name = _CONJUNCTION if isinstance(node.op, ast.And) else _DISJUNCTION
        return ast.copy_location(_call(name, *map(_later, node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """`not a` → `_tile_not(a)`."""
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(_call(_NEGATION, node.operand), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """`a < b < c` → `_tile_and(lambda: a < b, lambda: b < c)`."""
        self.generic_visit(node)
        operands = [node.left, *node.comparators]
        pairs = zip(operands, node.ops, node.comparators, strict=False)
        links = [ast.Compare(left, [op], [right]) for left, op, right in pairs]
        if len(links) == 1:
            return node
        return ast.copy_location(_call(_CONJUNCTION, *map(_later, links)), node)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _later(value: ast.expr) -> ast.expr:
    """`lambda: value`, for operands that may not be evaluated."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, value)


def parse(text: str, filename: str) -> Any:
    """Compile the text of a module whose functions are kernels, with all functions rewritten."""
    tree = ast.parse(text, filename)
    rewriter = Rewriter()
    tree.body = [rewriter.visit(node) if isinstance(node, ast.FunctionDef) else node for node in tree.body]
    return compile(ast.fix_missing_locations(tree), filename, "exec")


def _install(triton: TritonInterpreter) -> None:
    """Triton's own device functions (`tl.argmax`, `tl.sort`) are rewritten, too."""
    module = triton.module
    module.FunctionRewriter.ast_transformer = Rewriter()
    # Rewritten functions look up names in Triton's module, whose own `static_range` needs Python's `range`.
    vars(module).update({name: value for name, value in names(triton).items() if name != "range"})
    # Triton's own method wraps an error again at each call, and its message with it.
    module.InterpretedFunction.__call__ = _call_device_function


def _call_device_function(self: Any, *arguments: Any, **keywords: Any) -> Any:
    return self.rewrite()(*arguments, **keywords)


def _count_in_int32(triton: TritonInterpreter) -> None:
    """A loop's variable is a tensor, int32 or (like its bounds) int64, and wraps around as on a GPU.

    Triton's interpreter (3.6.0, 3.9.0) uses Python integers, which have no `.to(tl.int64)` and never overflow.
    """
    for language in (triton.language, triton.language.core):
        language.range = names(triton)["range"]


def _as_index(self: Any) -> int:
    return int(self.handle.data.reshape(()))


def _index(triton: TritonInterpreter) -> None:
    """Scalars can be indices. 3.6.0 calls `int()` on arrays of one element, which NumPy 2.5 refuses."""
    triton.language.tensor.__index__ = _as_index


CORRECTIONS: tuple[Correction, ...] = (_install, _count_in_int32, _index)


def names(triton: TritonInterpreter) -> dict[str, Callable[..., Any]]:
    """The functions that rewritten code calls, and `range` for tensors, by name."""
    tensor: Any = triton.language.tensor

    def assigned(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(assigned, cast("tuple[Any, ...]", value)))
        return triton.module.interpreter_semantic.to_tensor(value, False)

    def conjunction(*operands: Callable[[], Any]) -> Any:
        return _chain(operands, False, "logical_and", tensor)

    def disjunction(*operands: Callable[[], Any]) -> Any:
        return _chain(operands, True, "logical_or", tensor)

    def negation(value: Any) -> Any:
        return value.__not__() if isinstance(value, tensor) else not value

    return {
        _ASSIGNED: assigned,
        _CONJUNCTION: conjunction,
        _DISJUNCTION: disjunction,
        _NEGATION: negation,
        "range": partial(_count, triton),
    }


def _chain(operands: tuple[Callable[[], Any], ...], stop: bool, method: str, tensor: Any) -> Any:
    """Join operands like Triton's compiler: only a Python value ends the chain early."""
    value = joined = None
    for operand in operands:
        value = operand()
        if isinstance(value, tensor):
            joined = value if joined is None else getattr(joined, method)(value)
        elif bool(value) is stop:
            return value
    return value if joined is None else joined


def _count(triton: TritonInterpreter, first: Any, second: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """`range` or `tl.range` whose numbers are tensors."""
    language = triton.language
    bounds: list[Any] = [0, first, step] if second is None else [first, second, step]
    wide = any(isinstance(b, language.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    dtype = language.int64 if wide else language.int32
    plain = [b.value if isinstance(b, language.constexpr) else b for b in bounds]
    for number in range(*plain):
        yield triton.tensor(np.asarray(number, triton.module._get_np_dtype(dtype)), dtype)
