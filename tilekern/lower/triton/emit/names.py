"""Names of variables in generated source: the user's own where they are known."""

from __future__ import annotations

import ast
import keyword
import linecache
import re
from functools import lru_cache

from tilekern import source
from tilekern.lower.triton.emit.prelude import reserved
from tilekern.source import Loc

_TAKEN = frozenset({"tl", "triton", "libdevice", "float", "range", "int", "bool", "print", "min", "max", "abs", "len"})


class Names:
    """Hands out unique names."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._numbers: dict[str, int] = {}

    def copy(self) -> Names:
        """A copy with the same names in use, which hands out names independently."""
        copy = Names()
        copy._used = set(self._used)
        return copy

    def fresh(self, hint: str) -> str:
        """A name like `hint`, with a number behind it if `hint` is taken."""
        base = re.sub(r"[\W_]+", "_", hint, flags=re.ASCII).strip("_") or "x"
        base = f"x{base}" if base[0].isdigit() else base
        # Names are never given back: the search for a free one goes on where the last one for this base ended.
        number = self._numbers.get(base, 1)
        name = base if number == 1 else f"{base}_{number}"
        while name in self._used or name in _TAKEN or keyword.iskeyword(name) or reserved(name):
            number += 1
            name = f"{base}_{number}"
        self._used.add(name)
        self._numbers[base] = number
        return name


def assigned(loc: Loc) -> tuple[str, ...]:
    """The variables that the user's statement at `loc` assigns: `("m", "d")` for `m, d = f(x)`, () for none."""
    statements = _statements(loc.file) if source.is_loaded(loc.file) else ()
    around = [s for s in statements if s[0] <= loc.line <= s[1]]
    return min(around, key=lambda s: s[1] - s[0])[2] if around else ()


@lru_cache(maxsize=64)
def _statements(file: str) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """The first line, last line and assigned variables of every simple statement of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
    return tuple(
        (node.lineno, node.end_lineno or node.lineno, _targets(node))
        for node in ast.walk(tree)
        if isinstance(node, simple)
    )


def _targets(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.AugAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.Assign(targets=[ast.Tuple(elts=elements)]) if all(isinstance(e, ast.Name) for e in elements):
            return tuple(e.id for e in elements if isinstance(e, ast.Name))
        case _:
            return ()
