"""Random kernels of products of matrices in loops, as warp-specialised programs take them.

Sums are exact, so that all orders of their terms give the same bits. Functions that round come behind the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import Any

import jax

from tilekern.ir.core import Func, Value, cdiv
from tilekern.ir.types import DTYPES, F32, I32, DType
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact, union
from tilekern.testing.programs.kernels import IMPORTS
from tilekern.testing.programs.values import Choose, numbers

# The extents of last dims are multiples of 8: the Tensor Memory Accelerator (TMA) copies units of 16 bytes.
_ROWS, _COLUMNS = (72, 64, 130, 200, 128, 7, 333), (72, 64, 136, 200, 128, 8, 264)
# The magnitude of results behind the loop: larger numbers could not be followed once they are rounded.
_BOUND = 16.0

_ORDER = "i.indices[:, None] >= {}.indices[None, :]"
# Functions of the first of two products, small whole numbers: the left side of the second product.
_WEIGHTS = (
    ("jnp.floor(jnp.clip(s / 64, -4, 4))", Fact(4)),
    ("jnp.where(s > 0, 1.0, 0.0)", Fact(1)),
    (f"jnp.where({_ORDER.format('k')}, jnp.sign(s), 0)", Fact(1)),
    ("jnp.clip(jnp.round(s / 32), 0, 8)", Fact(8)),
)


def _added(x: Fact) -> Fact | None:
    return facts.arithmetic("add", (x, numbers(F32)), F32)


# Functions of the result of a loop, with the facts of theirs; None where a function does not go.
_STEPS: Sequence[tuple[str, Callable[[Fact], Fact | None]]] = (
    ("r + bias[j]", _added),
    ("r + {residual}.astype(r.dtype)", _added),
    ("jnp.maximum(r, 0)", lambda x: x),
    (f"jnp.where({_ORDER.format('j')}, r, -1)", lambda x: union(x, Fact(1))),
    ("jnp.where(r > bias[j], r, bias[j])", lambda x: None if x.error else union(x, numbers(F32))),
    ("r - r.max(axis=1, keepdims=True)", lambda x: facts.arithmetic("sub", (x, x), F32)),
    ("jnp.tanh(r / 4)", lambda x: facts.smooth((facts.SMOOTH["tanh"],), (x,), F32)),
)
# Names of the left sides of products, and of the right sides that are no keys.
_SIDES, _RIGHT = ("q", "y", "x", "w", "u"), ("w", "u")
# The tiles that a loop visits.
_RANGES = ("stop=(i.index + 1) * i.size", "", "start=i.index * i.size", "stop=limit", "start=limit")


class Products:
    """Makes Funcs as `Generator` does: of one product in a loop, of two beside each other, or of two in a row."""

    def __init__(self, choose: Choose, features: Sequence[str] = (), dtypes: Sequence[DType] = ()) -> None:
        """They have features and dtypes of their own, and no infinities: most sums of many numbers would be NaN."""
        del features, dtypes
        self._upto, self.seed = choose, 2 * choose(500)
        self.facts: dict[Value, Fact] = {}
        self._dtype = self._pick([DTYPES["bf16"], DTYPES["f16"]])
        self._number = numbers(self._dtype)
        self._rows, self._inner, self._columns = self._pick(_ROWS), self._pick(_COLUMNS), self._pick(_COLUMNS)
        self._batch = (2,) * self._upto(1)
        self._arrays = {"count": jax.ShapeDtypeStruct((1,), I32), "bias": jax.ShapeDtypeStruct((self._columns,), F32)}

    def _pick[T](self, items: Sequence[T]) -> T:
        return items[self._upto(len(items) - 1)]

    def func(self) -> Func:
        """The Func of a kernel."""
        lines = self._grid()
        results = self._loop(lines)
        outputs = [self._stored(n, fact, lines) for n, fact in enumerate(results)]
        inputs, names = ", ".join(self._arrays), ", ".join(f"o{n}" for n in range(len(outputs)))
        types = ", ".join(
            f"jax.ShapeDtypeStruct({(*self._batch, self._rows, self._columns)}, jnp.{dtype.name})"
            for dtype, _ in outputs
        )
        head = f"@tk.kernel(out_type=lambda {inputs}: ({types},))\ndef drawn({inputs}, {names}):\n"
        scope: dict[str, Any] = {}
        exec(compile(IMPORTS + head + "".join(f"    {line}\n" for line in lines), "<products>", "exec"), scope)
        func: Func = scope["drawn"].trace(*self._arrays.values()).ir
        self.facts = {param: fact for param, (_, fact) in zip(func.outputs, outputs, strict=True)}
        return func

    def _grid(self) -> list[str]:
        """The lines that declare the axes."""
        block_i, block_j = self._pick([(64, 64), (64, 128), (128, 64), (64, 32)])  # of as many sums as registers hold
        rows = f"i = tk.parallel({self._rows}, {block_i}{self._pick(['', ', order="descending"'])})"
        columns = f"j = tk.parallel({self._columns}, {block_j})"
        self._block = self._pick([64, 32, 128])
        tiles, reverse = self._pick(_RANGES), bool(self._upto(1))
        serial = f"axis = tk.serial({self._inner}, {self._block}, {reverse=}, whole_tiles=True, {tiles})"
        axes = [*["b = tk.parallel(2)"][: len(self._batch)], rows, columns]
        return [*(axes if self._upto(1) else axes[::-1]), "limit = jnp.clip(count[0], -1, 15) * 13", serial]

    # --- operands ---

    def _matrix(self, name: str, rows: str, columns: str, sizes: tuple[int, int]) -> str:
        """The text of a tile of a new array, which may be transposed; or only its first rows."""
        transposed = name in _SIDES and sizes[0] % 8 == 0 and bool(self._upto(1))
        masked = name in _RIGHT and not transposed and not self._upto(1)
        shape = sizes[::-1] if transposed else sizes
        self._arrays[name] = jax.ShapeDtypeStruct((*self._batch, *shape), self._dtype)
        place = ", ".join([*["b"][: len(self._batch)], *((columns, rows) if transposed else (rows, columns))])
        if masked:
            return f"{name}.load(({place}), mask=({rows}.indices < limit)[:, None])"
        return f"{name}[{place}]" + (".T" if transposed else "")

    def _right(self, name: str) -> str:
        return self._matrix(name, "k", "j", (self._inner, self._columns))

    # --- the loop ---

    def _loop(self, lines: list[str]) -> list[Fact]:
        """Add the loop, whose results are named r0 and r1; returns their facts."""
        zeros = "tk.zeros((i, j))"
        if not self._upto(1):
            fact, text = self._two_in_a_row()
            lines += [*text, f"r0 = tk.fold(axis, step, {zeros})"]
            return [fact]
        left = self._matrix("x", "i", "k", (self._rows, self._inner))
        rights = [self._right(name) for name in ("w", "u")[: 1 + (not self._upto(2))]]
        sums = ", ".join(f"tk.dot({left}, {right}, sums[{n}])" for n, right in enumerate(rights))
        names = ", ".join(f"r{n}" for n in range(len(rights)))
        lines.append(f"{names}, = tk.fold(axis, lambda k, sums: ({sums},), ({zeros},) * {len(rights)})")
        return [self._sum(self._number)] * len(rights)

    def _two_in_a_row(self) -> tuple[Fact, list[str]]:
        """The fact of the sum, and the body of a loop of two products, `step`."""
        depth = self._pick([64, 16, 128])
        query = self._matrix("q", "i", ":", (self._rows, depth))
        key = self._matrix("y", ":", "k", (depth, self._inner))
        weights, weights_fact = self._pick(_WEIGHTS)
        fact = self._sum(weights_fact)
        lines = [f"query = {query}", "def step(k, total):", f"    s = tk.dot(query, {key})", f"    p = {weights}"]
        if self._upto(1):
            lines.append("    total = total * jnp.where(p.max(axis=1) > 1, 0.5, 1)[:, None]")
            fact = replace(fact, grain=fact.grain - cdiv(self._inner, self._block))
        return fact, [*lines, f"    return tk.dot(p.astype(query.dtype), {self._right('w')}, total)"]

    def _sum(self, left: Fact) -> Fact:
        """The fact of a product along the loop, whose right side is an array."""
        fact = facts.dot(left, self._number, self._inner, self._dtype, "ieee")
        assert fact is not None
        assert not fact.error
        return fact

    # --- behind the loop ---

    def _stored(self, number: int, fact: Fact, lines: list[str]) -> tuple[DType, Fact]:
        """Add functions of a result, and its store; the dtype and the fact of the output."""
        digits = max(0, ceil(log2(fact.bound / _BOUND)))
        fact = replace(fact, bound=fact.bound / 2**digits, grain=fact.grain - digits)
        lines.append(f"r = r{number} * 2.0**-{digits}")
        for _ in range(self._upto(3)):
            text, change = self._pick(_STEPS)
            changed = change(fact)
            if changed is not None:
                residual = self._matrix(f"z{len(self._arrays)}", "i", "j", (self._rows, self._columns))
                lines.append(f"r = {text.format(residual=residual)}")
                fact = changed
        narrow = facts.convert(fact, F32, self._dtype)
        dtype, fact = (F32, fact) if narrow is None or self._upto(1) else (self._dtype, narrow)
        lines.append(f"o{number}[{'b, ' * len(self._batch)}i, j] = r.astype(jnp.{dtype.name})")
        return dtype, fact
