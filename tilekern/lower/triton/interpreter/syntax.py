"""Python's control flow on tiles, as Triton's compiler understands it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter

_ASSIGNED, _CONJUNCTION, _DISJUNCTION, _NEGATION = "_tile_assigned", "_tile_and", "_tile_or", "_tile_not"


class Rewriter(ast.NodeTransformer):
    """Rewrite what Python does not let a class overload; replaces Triton's `ASTTransformer`.

    `name = value` → `name = _tile_assigned(value)`: a number becomes a tensor, like in the compiler.
    `a and b` → `_tile_and(lambda: a, lambda: b)`, `or` and `not` likewise: Python asks a tile for its truth, and
    Triton's interpreter (3.6.0, 3.9.0) answers True for all but scalars. So `argmax` of equal values went wrong unless
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
    """`lambda: value`, for operands that may not be reached."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, value)


def parse(text: str, filename: str) -> Any:
    """The code of a module whose functions are kernels."""
    tree = ast.parse(text, filename)
    rewriter = Rewriter()
    tree.body = [rewriter.visit(node) if isinstance(node, ast.FunctionDef) else node for node in tree.body]
    return compile(ast.fix_missing_locations(tree), filename, "exec")


def _install(triton: TritonInterpreter) -> None:
    """Triton's own device functions (`tl.argmax`, `tl.sort`) go through the rewriter, too."""
    module = triton.module
    module.FunctionRewriter.ast_transformer = Rewriter()
    # A rewritten function sees the names of this module. Triton's own `static_range` counts by its `range`.
    vars(module).update({name: value for name, value in names(triton).items() if name != "range"})
    # Triton wraps an error anew at each call, and its message with it.
    module.InterpretedFunction.__call__ = _call_device_function


def _call_device_function(self: Any, *arguments: Any, **keywords: Any) -> Any:
    return self.rewrite()(*arguments, **keywords)


def _count_in_int32(triton: TritonInterpreter) -> None:
    """A loop's variable is a tensor: int32, or int64 where a bound is; it wraps around like on the device.

    Triton's interpreter (3.6.0, 3.9.0) gives Python integers, which have no `.to(tl.int64)` and never overflow.
    """
    for language in (triton.language, triton.language.core):
        language.range = names(triton)["range"]


def _as_index(self: Any) -> int:
    return int(self.handle.data.reshape(()))


def _index(triton: TritonInterpreter) -> None:
    """A scalar is an array of one element, which `int()` refuses since NumPy 2.5 (3.6.0)."""
    triton.language.tensor.__index__ = _as_index


CORRECTIONS: tuple[Correction, ...] = (_install, _count_in_int32, _index)


def names(triton: TritonInterpreter) -> dict[str, Callable[..., Any]]:
    """What rewritten code calls, and Python's `range` for tensors."""
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
    """Join operands like Triton's compiler: only what is known at compile time ends the chain early."""
    value = joined = None
    for operand in operands:
        value = operand()
        if isinstance(value, tensor):
            joined = value if joined is None else getattr(joined, method)(value)
        elif bool(value) is stop:
            return value
    return value if joined is None else joined


def _count(triton: TritonInterpreter, first: Any, second: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """`range` or `tl.range`, of tensors."""
    language = triton.language
    bounds: list[Any] = [0, first, step] if second is None else [first, second, step]
    wide = any(isinstance(b, language.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    dtype = language.int64 if wide else language.int32
    plain = [b.value if isinstance(b, language.constexpr) else b for b in bounds]
    for number in range(*plain):
        yield triton.tensor(np.asarray(number, triton.module._get_np_dtype(dtype)), dtype)
