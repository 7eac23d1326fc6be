"""Random kernels as people write them: a few lines of Python, whose tiles are moved and combined with themselves.

Extents, blocks and constants are written as users write them, by `x.shape[0]`, `i.indices`, `jnp.arange(4)` and so on.
So the text is a program to hand on, and a kernel that can be traced for arrays of other sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from tilekern.ir.core import Array, cdiv
from tilekern.testing.programs.values import Choose

_LARGEST = 512  # elements of a tile
_BOUND = 32.0  # of the magnitude of values, behind which they are squashed

IMPORTS = "import jax\nimport jax.numpy as jnp\nimport numpy as np\n\nimport tilekern as tk\n"


@dataclass(frozen=True)
class Tile:
    """A value of a body.

    Attributes:
      name: of the variable.
      shape: of the tile.
      kind: "f" for floats, "i" for int32, "b" for bool.
      bound: of the magnitude of floats.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    bound: float = 2.0


@dataclass(frozen=True)
class Axis:
    """An axis of the grid over a dim of arrays; with `block` 0 its value is a scalar index."""

    name: str
    dim: str
    block: int


@dataclass(frozen=True, eq=False)
class Sketch:
    """A kernel of a few lines, and arrays for it.

    Attributes:
      source: the kernel, named `drawn`.
      dims: for each array the names of its dims.
      sizes: of the dims.
      seed: of the numbers.
      dtype: of floats.
      integers: the numbers of the arrays of int32.
    """

    source: str
    dims: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]
    seed: int
    dtype: str
    integers: frozenset[int] = frozenset()

    @cached_property
    def kernel(self) -> Any:
        """The kernel."""
        scope: dict[str, Any] = {}
        exec(compile(self.source, f"<sketch {self.seed}>", "exec"), scope)
        return scope["drawn"]

    @cached_property
    def arrays(self) -> list[Array]:
        """Floats are multiples of 1/4 up to 2; integers are positions along the first dim, and some beside it."""
        scope: dict[str, Any] = {"np": np}
        exec("\n".join(self.numbers), scope)
        return scope["arrays"]

    @property
    def numbers(self) -> list[str]:
        """The lines of a program that make the arrays."""
        lines = [f"random, arrays = np.random.default_rng({self.seed}), []"]
        for number, dims in enumerate(self.dims):
            shape = tuple(self.sizes[d] for d in dims)
            if number in self.integers:
                text = f"random.integers(-1, {shape[0] + 1}, {shape}).astype(np.int32)"
            else:
                text = f"(random.integers(-8, 9, {shape}) / 4).astype(np.{self.dtype})"
            lines.append(f"arrays.append({text})")
        return lines


@dataclass
class Draft:
    """A kernel that is being drawn."""

    upto: Choose
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    arrays: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    integers: set[int] = field(default_factory=set[int])
    axes: list[Axis] = field(default_factory=list[Axis])
    lines: list[str] = field(default_factory=list[str])
    tiles: list[Tile] = field(default_factory=list[Tile])
    outputs: list[str] = field(default_factory=list[str])

    def pick[T](self, items: Sequence[T]) -> T:
        """One of some items; the first one is the simplest."""
        return items[self.upto(len(items) - 1)] if len(items) > 1 else items[0]

    def chance(self, n: int) -> bool:
        """True once in n + 1 times."""
        return self.upto(n) == n

    def let(self, text: str, shape: tuple[int, ...], kind: str, bound: float = 2.0) -> Tile:
        """A line that names a value; values that may grow large are squashed."""
        if kind == "f" and bound > _BOUND:
            text, bound = f"jnp.tanh(({text}) / {_BOUND:.0f})", 1.0
        tile = Tile(f"v{len(self.tiles)}", shape, kind, bound)
        self.lines.append(f"{tile.name} = {text}")
        self.tiles.append(tile)
        return tile

    def any(self, kind: str = "f", rank: int = 0) -> Tile:
        """Some value of a kind, rather one of the last ones, with so many dims at least."""
        candidates = [t for t in self.tiles if t.kind == kind and len(t.shape) >= rank]
        return self.pick(candidates[::-1][:6]) if candidates else self._made(kind)

    def _made(self, kind: str) -> Tile:
        if kind == "b":
            x = self.any()
            return self.let(f"{x.name} > 0", x.shape, "b")
        x = self.any("f")
        return self.let(f"(8 * {x.name}).astype(jnp.int32)", x.shape, "i")

    # --- the begin of a kernel ---

    def begin(self) -> None:
        """The arrays, the grid, and a load of the first array."""
        self.sizes = {
            "m": self.pick([16, 12, 20, 8, 48, 24, 40, 10]),
            "n": self.pick([8, 4, 12, 6, 16, 5, 3]),
            "k": self.pick([8, 16, 12, 4]),
        }
        self.arrays = [self.pick([("m", "n"), ("m",), ("m", "n"), ("n", "m"), ("m", "k", "n")])]
        for _ in range(self.upto(2)):
            self.arrays.append(self.pick([("m",), ("m", "n"), ("n",), ("m", "k"), ("k", "n"), ("k",)]))
        if self.upto(1):
            self.integers.add(len(self.arrays))
            self.arrays.append(("m",))
        self.axes = [Axis("i", "m", self.pick([4, 8, 2, 16, 3, 5, 0]))]
        if "n" in self.arrays[0] and self.upto(1):
            self.axes.append(Axis("j", "n", self.pick([4, 8, 2, 3, 0])))
        for axis in self.axes:
            block = f", {axis.block}" if axis.block else ""
            self.lines.append(f"{axis.name} = tk.parallel({self.extent(axis.dim)}{block})")
        self.load(0)

    def extent(self, dim: str) -> str:
        """The text of an extent."""
        number = next(n for n, dims in enumerate(self.arrays) if dim in dims)
        return f"x{number}.shape[{self.arrays[number].index(dim)}]"

    def load(self, number: int | None = None) -> Tile:
        """A tile of an array: the program's own, a neighbour, all along a dim, or at positions of another array."""
        number = self.upto(len(self.arrays) - 1) if number is None else number
        entries: list[str] = []
        shape: list[int] = []
        for dim in self.arrays[number]:
            axis = next((a for a in self.axes if a.dim == dim), None)
            if axis is None or self.chance(9):
                fits = prod(shape) * self.sizes[dim] <= _LARGEST
                entries.append(":" if fits else "0")
                shape += [self.sizes[dim]] * fits
                continue
            vectors = [t for t in self.tiles if t.kind == "i" and len(t.shape) == 1]
            if vectors and self.chance(5) and "v" not in "".join(entries):
                vector = self.pick(vectors[::-1])
                entries.append(vector.name)
                shape.append(vector.shape[0])
                continue
            entries.append(axis.name + (self.pick([" + 1", " - 1"]) if self.chance(9) else ""))
            shape += [axis.block] if axis.block else []
        kind = "i" if number in self.integers else "f"
        return self.let(f"x{number}[{', '.join(entries)}]", tuple(shape), kind)

    # --- moves ---

    def fact(self) -> Tile:
        """What a body may read beside arrays."""
        axis = self.pick(self.axes)
        dim = self.pick([axis.dim, *self.sizes])
        extent = self.extent(dim) if any(dim in dims for dims in self.arrays) else self.extent(axis.dim)
        sizes = [n for t in self.tiles for n in t.shape] or [4]
        size = self.pick(sizes[::-1])
        ways = [(f"jnp.arange({size})", (size,)), (f"jnp.int32({extent})", ()), (f"{axis.name}.index", ())]
        if axis.block:
            ways += [(f"{axis.name}.indices", (axis.block,)), (f"jnp.int32({axis.name}.size)", ())]
            if self.chance(3):
                return self.let(f"{axis.name}.valid", (axis.block,), "b")
        else:
            ways[2] = (f"jnp.int32({axis.name})", ())
        if self.chance(4):
            numbers = [self.upto(4) - 2 for _ in range(min(size, 16))]
            return self.let(f"jnp.array({numbers!r}, jnp.int32)", (len(numbers),), "i")
        text, shape = self.pick(ways)
        return self.let(text, shape, "i")

    def unary(self) -> Tile:
        """A function of each element; for most of the functions f(0) is not 0."""
        x = self.any()
        small = x.bound <= 4
        ways = [
            (f"jnp.exp({x.name})", float(np.exp(x.bound))) if small else (f"jnp.exp(-jnp.abs({x.name}))", 1.0),
            (f"jnp.cos({x.name})", 1.0),
            (f"jnp.sin({x.name})", 1.0),
            (f"({x.name} - 1) ** 2", (x.bound + 1) ** 2),
            (f"jnp.tanh({x.name})", 1.0),
            (f"1 / (1 + {x.name} * {x.name})", 1.0),
            (f"{x.name} * {self.pick([2, 3, -1])} + 1", 3 * x.bound + 1),
        ]
        text, bound = self.pick(ways)
        return self.let(text, x.shape, "f", bound)

    def moved(self, x: Tile) -> tuple[str, tuple[int, ...]]:
        """The text of a tile whose elements are moved, and its shape."""
        rank = len(x.shape)
        if not rank:
            return x.name, ()
        last = x.shape[-1]
        half = max(1, last // 2)
        first = ", ".join([":"] * (rank - 1))
        front = f"{first}, " if first else ""
        ways = [
            (f"{x.name}[{front}:1]", (*x.shape[:-1], 1)),
            (f"{x.name}[..., ::-1]", x.shape),
            (f"{x.name}[:1]", (1, *x.shape[1:])),
            (f"{x.name}[::-1]", x.shape),
            (f"jnp.roll({x.name}, 1, {rank - 1})", x.shape),
            (f"jnp.repeat({x.name}[..., :{half}], 2, {rank - 1})", (*x.shape[:-1], 2 * half)),
            (f"{x.name}[{front}{last - 1}:]", (*x.shape[:-1], 1)),
            (f"{x.name}.T", x.shape[::-1]),
            (f"({x.name}.sum({rank - 1}, keepdims=True) / {last})", (*x.shape[:-1], 1)),
            (f"{x.name}.max({self.upto(rank - 1)}, keepdims=True)", None),
            (f"(jnp.cumsum({x.name}, {rank - 1}) / {last})", x.shape),
            (f"jnp.sort({x.name}, {rank - 1})", x.shape),
            (f"jnp.take_along_axis({x.name}, jnp.argsort({x.name} * {x.name}, {rank - 1}), {rank - 1})", x.shape),
            (f"{x.name}.reshape({x.shape[::-1]})", x.shape[::-1]),
        ]
        text, shape = self.pick(ways)
        if shape is None:
            dim = int(text.split("max(")[1].split(",")[0])
            shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        return text, shape

    def combined(self) -> Tile:
        """A tile with itself, moved; or with another one."""
        x = self.any()
        text, shape = self.moved(x) if self.upto(2) else (x.name, x.shape)
        y = x if self.upto(1) else self.any()
        return self.binary(y, Tile(text, shape, "f", x.bound))

    def binary(self, x: Tile, y: Tile) -> Tile:
        """A sum, a difference, a product, a maximum; of tiles that broadcast."""
        shape, text = self.fitted(x.shape, y)
        function = self.pick(["-", "+", "*", "max"])
        bound = x.bound * y.bound if function == "*" else x.bound + y.bound
        written = f"jnp.maximum({x.name}, {text})" if function == "max" else f"{x.name} {function} {text}"
        return self.let(written, shape, "f", bound)

    def fitted(self, shape: tuple[int, ...], y: Tile) -> tuple[tuple[int, ...], str]:
        """The shape of two tiles together, and the text of the second one, cut down until it fits."""
        text, have = y.name, y.shape
        for _ in range(4):
            try:
                joint = np.broadcast_shapes(shape, have)
            except ValueError:
                joint = None
            if joint is not None and prod(joint) <= _LARGEST and len(joint) <= 3:
                return tuple(joint), text
            if len(have) == 1 and len(shape) == 2 and have[0] == shape[0]:
                return shape, f"{text}[:, None]"
            if not have:
                break
            text, have = f"{text}[0]", have[1:]
        return shape, text

    def chosen(self) -> Tile:
        """A choice by a comparison of data, or of a fact, with a number, a size or a fact."""
        x, y = self.any(), self.any()
        if self.upto(1):
            a = self.load(max(self.integers)) if self.integers and self.upto(1) else self.any("i")
            b = self.fact() if self.upto(2) else self.any("i")
            b = b if b.kind == "i" else a
            where, which = self.fitted(a.shape, b)
            test = self.let(f"{a.name} {self.pick(['<', '>=', '==', '>'])} {which}", where, "b")
        else:
            test = self.any("b")
        shape, mask = self.fitted(x.shape, test)
        shape, other = self.fitted(shape, y)
        return self.let(f"jnp.where({mask}, {x.name}, {other})", shape, "f", max(x.bound, y.bound))

    def mixed(self) -> Tile:
        """A tile with a fact, as a number."""
        x, fact = self.any(), self.fact()
        if fact.kind == "b":
            return self.binary(x, Tile(f"{fact.name}.astype({x.name}.dtype)", fact.shape, "f", 1.0))
        return self.binary(x, Tile(f"({fact.name}.astype({x.name}.dtype) / 8)", fact.shape, "f", 8.0))

    def product(self) -> Tile:
        """A product of two tiles, or of one with itself."""
        x = self.any("f", 2)
        if len(x.shape) != 2:
            return self.combined()
        fitting = [t for t in self.tiles if t.kind == "f" and len(t.shape) == 2 and t.shape[0] == x.shape[1]]
        if fitting and self.upto(1):
            y = self.pick(fitting[::-1])
            bound = x.bound * y.bound * x.shape[1]
            return self.let(f"tk.dot({x.name}, {y.name})", (x.shape[0], y.shape[1]), "f", bound)
        return self.let(f"tk.dot({x.name}, {x.name}.T)", (x.shape[0],) * 2, "f", x.bound**2 * x.shape[1])

    def fold(self) -> Tile:
        """A sum over the tiles of a dim, or up to a number that data or a size says."""
        numbers = [n for n, dims in enumerate(self.arrays) if n not in self.integers and len(dims) <= 2]
        free = [(n, d) for n in numbers for d in self.arrays[n] if all(a.dim != d for a in self.axes)]
        if not free:
            return self.combined()
        number, dim = self.pick(free)
        block = self.pick([4, 2, 8, 3])
        entries, shape = list[str](), list[int]()
        for d in self.arrays[number]:
            axis = next((a for a in self.axes if a.dim == d), None)
            entries.append("k" if d == dim else axis.name if axis else ":")
            shape += [block] if d == dim else ([axis.block] if axis.block else []) if axis else [self.sizes[d]]
        other = self.any("f")
        load = f"x{number}[{', '.join(entries)}]"
        terms = [(f"{load}.sum()", 1), (f"jnp.exp(-jnp.abs({load})).sum()", 1), (f"({load} * k.index).sum()", 8)]
        terms += [(f"jnp.where(k.indices < {self.extent(self.axes[0].dim)}, 1, 2).sum()", 1)]
        text, factor = self.pick(terms)
        stop = self.pick(["", "", f", stop={self.extent(self.axes[0].dim)}"])
        length = cdiv(self.sizes[dim], block) * prod(shape)
        name = f"s{len(self.tiles)}"
        self.lines.append(
            f"{name} = tk.fold(tk.serial({self.extent(dim)}, {block}{stop}), "
            f"lambda k, acc: acc + ({text} / {length}).astype(acc.dtype), {other.name})"
        )
        return self.let(name, other.shape, "f", other.bound + 2 * factor)

    MOVES = (
        "combined",
        "unary",
        "mixed",
        "chosen",
        "combined",
        "unary",
        "load",
        "product",
        "chosen",
        "fold",
        "combined",
    )

    # --- the end of a kernel ---

    def store(self) -> None:
        """Store a value, to a place for each program; or add it to a sum of all programs."""
        out = f"o{len(self.outputs)}"
        if self.chance(2):
            self.lines.append(f"{out}.at[()].add({self.any().name}.sum())")
            self.outputs.append("tk.Sum(jax.ShapeDtypeStruct((), x0.dtype))")
            return
        blocks = tuple(a.block for a in self.axes if a.block)
        fitting = [t for t in self.tiles if t.kind == "f" and t.shape[: len(blocks)] == blocks]
        value = self.pick(fitting[::-1]) if fitting and self.upto(5) else self.repeated(self.any(), blocks)
        others = value.shape[len(blocks) :]
        entries = [*(a.name for a in self.axes), *[":"] * len(others)]
        shape = [*(self.extent(a.dim) for a in self.axes), *map(str, others)]
        text = value.name
        if len(blocks) == len(self.axes) == 2 and not others and self.chance(3):
            entries, shape, text = entries[::-1], shape[::-1], f"{text}.T"
        self.lines.append(f"{out}[{', '.join(entries)}] = {text}.astype({out}.dtype)")
        self.outputs.append(f"jax.ShapeDtypeStruct(({', '.join(shape)},), x0.dtype)")

    def repeated(self, value: Tile, shape: tuple[int, ...]) -> Tile:
        """A tile of a shape: sums of the value, repeated."""
        text, have = value.name, value.shape
        while len(have) > len(shape):
            text, have = f"{text}.sum(0)", have[1:]
        for number, (n, target) in enumerate(zip(have[::-1], shape[::-1], strict=False), 1):
            text += "" if n in (1, target) else f".sum({-number}, keepdims=True)"
        return self.let(f"jnp.broadcast_to({text}, {shape})", shape, "f", value.bound * prod(value.shape))


def sketch(choose: Choose) -> Sketch:
    """A random kernel as source text, with the names and sizes of its arrays' dims, their dtype, and a seed.

    `choose(n)` returns an int from 0 to n. Choices of 0 give the simplest kernel.
    """
    draft = Draft(choose)
    dtype, seed = draft.pick(["float32", "float64"]), choose(63)
    draft.begin()
    # Most bodies are short: in a long one some op combines lanes, so that nothing is divided.
    for _ in range(draft.pick([2, 1, 3, 4, 1, 2, 6, 9])):
        getattr(draft, draft.pick(draft.MOVES))()
    for _ in range(1 + choose(1)):
        draft.store()
    inputs = ", ".join(f"x{n}" for n in range(len(draft.arrays)))
    outputs = ", ".join(f"o{n}" for n in range(len(draft.outputs)))
    head = f"@tk.kernel(out_type=lambda {inputs}: ({', '.join(draft.outputs)},))"
    body = "".join(f"    {line}\n" for line in draft.lines)
    source = f"{IMPORTS}\n\n{head}\ndef drawn({inputs}, {outputs}):\n{body}"
    return Sketch(source, tuple(draft.arrays), draft.sizes, seed, dtype, frozenset(draft.integers))
