"""Random kernels that address memory by index vectors computed from tails, and what they mean lane by lane.

A lane of the model is a pair: its number, and whether it comes from inside of an array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.types import DType
from tilekern.testing.programs.facts import Fact
from tilekern.testing.programs.values import Choose

Lane = tuple[int, bool]
Lanes = list[Lane]
Model = Callable[[Any, Any, Any, Any], Lanes]
PLACES = 9  # elements that an index vector may address


@dataclass(frozen=True)
class Tile:
    """A tile of the model."""

    start: int
    size: int
    extent: int

    def read(self, array: Array, shift: int = 0, mask: Callable[[int], bool] = lambda place: True) -> Lanes:
        """The lanes of a load of the tile."""
        places = [self.start + shift + n for n in range(self.size)]
        inside = [0 <= p < len(array) and mask(p - shift) for p in places]
        return [(int(array[p]), True) if ok else (0, False) for p, ok in zip(places, inside, strict=True)]

    @property
    def valid(self) -> list[bool]:
        """The lanes inside of the extent."""
        return [self.start + n < self.extent for n in range(self.size)]


@dataclass(frozen=True)
class Step:
    """A step of a chain: in the kernel, and in the model. Both get the refs, the tile and the vector so far."""

    kernel: Callable[[Any, Any, Any, Any], Any]
    model: Model


def each(function: Callable[[int], int]) -> Model:
    """A function of each lane."""
    return lambda x, y, i, v: [(function(a), ok) for a, ok in v]


def joined(function: Callable[[int, int], int], other: Model) -> Model:
    """A model that applies `function` to each lane and the same lane of another model's vector."""

    def model(x: Any, y: Any, i: Tile, v: Lanes) -> Lanes:
        return [(function(a, b), p and q) for (a, p), (b, q) in zip(v, other(x, y, i, v), strict=True)]

    return model


def not_of_three(place: int) -> bool:
    """A mask."""
    return place % 3 != 0


def running(x: Any, y: Any, i: Tile, v: Lanes) -> Lanes:
    """Running sums."""
    return [(sum(a for a, _ in v[: n + 1]), ok) for n, (_, ok) in enumerate(v)]


def looked_up(x: Any, y: Array, i: Any, v: Lanes) -> Lanes:
    """The elements of `y` at the vector."""
    return [(int(y[a]), True) if ok and 0 <= a < len(y) else (0, False) for a, ok in v]


def replaced(keep: Callable[[int, bool], bool], other: Callable[[int], int]) -> Model:
    """Lanes that are kept, if the tile's own test says so, and numbers that the user chose for the others."""

    def model(x: Any, y: Any, i: Tile, v: Lanes) -> Lanes:
        pairs = zip(v, i.valid, strict=True)
        return [(a, ok) if keep(a, inside) else (other(a), ok or not inside) for (a, ok), inside in pairs]

    return model


def summed(x: Array, y: Any, i: Tile, v: Lanes) -> Lanes:
    """The vector, and lane by lane all tiles of x."""
    for start in range(0, len(x), i.size):
        tile = Tile(start, i.size, len(x)).read(x)
        v = [(a + b, p and q) for (a, p), (b, q) in zip(v, tile, strict=True)]
    return v


def folded(x: Any, y: Any, i: Any, v: Any) -> Any:
    """The vector plus all tiles of `x`."""
    return tk.fold(tk.serial(x.shape[0], i.size), lambda k, c: c + x[k], v)


def searched(x: Any, y: Any, i: Any, v: Any) -> Any:
    """Two turns of a loop that reads `y` at the vector."""

    def body(state: tuple[Any, Any]) -> tuple[Any, Any]:
        n, w = state
        return n + 1, jnp.where(w > 3, w - y[w], w)

    return jax.lax.while_loop(lambda state: state[0] < 2, body, (jnp.int32(0), v))[1]


def searched_model(x: Any, y: Array, i: Tile, v: Lanes) -> Lanes:
    """The same, lane by lane."""
    for _ in range(2):
        found = looked_up(x, y, i, v)
        v = [(a - b if a > 3 else a, p and (q or a <= 3)) for (a, p), (b, q) in zip(v, found, strict=True)]
    return v


def branched(x: Any, y: Any, i: Any, v: Any) -> Any:
    """One of two vectors, by the number of the tile."""
    even, odd = (lambda: v + 1), (lambda: i.indices % PLACES)
    cond: Callable[..., Any] = jax.lax.cond  # pyright: ignore[reportUnknownVariableType] -- of JAX
    return cond(i.index % 2 == 0, even, odd)


def branched_model(x: Any, y: Any, i: Tile, v: Lanes) -> Lanes:
    """The same, lane by lane."""
    even = i.start // i.size % 2 == 0
    return [(a + 1, ok) if even else ((i.start + n) % PLACES, True) for n, (a, ok) in enumerate(v)]


def widest(x: Any, y: Any, i: Tile, v: Lanes) -> Lanes:
    """The greatest of each row of sums of two lanes; one of a row is enough."""
    some = any(ok for _, ok in v)
    return [(max(a + b for b, _ in v), ok and some) for a, ok in v]


STEPS = (
    Step(lambda x, y, i, v: v, each(lambda a: a)),
    Step(lambda x, y, i, v: 2 * v + 1, each(lambda a: 2 * a + 1)),
    Step(lambda x, y, i, v: 0 * v + 1, each(lambda a: 1)),
    Step(lambda x, y, i, v: (v - 1) // 2, each(lambda a: (a - 1) // 2)),
    Step(lambda x, y, i, v: jnp.clip(v, 0, PLACES - 1), each(lambda a: min(max(a, 0), PLACES - 1))),
    Step(lambda x, y, i, v: (v.astype(jnp.float32) * 1.5).astype(v.dtype), each(lambda a: int(1.5 * a))),
    Step(lambda x, y, i, v: jnp.where(v > 2, 0, v), each(lambda a: 0 if a > 2 else a)),
    Step(lambda x, y, i, v: jnp.where(i.valid, v, 2), replaced(lambda a, inside: inside, lambda a: 2)),
    Step(
        lambda x, y, i, v: jnp.where((v > 2) & i.valid, v, 1),
        replaced(lambda a, inside: a > 2 and inside, lambda a: 1),
    ),
    Step(
        lambda x, y, i, v: jnp.where(~i.valid | (v < 3), 4, v),
        replaced(lambda a, inside: inside and a >= 3, lambda a: 4),
    ),
    Step(lambda x, y, i, v: v + y[i + 1], joined(lambda a, b: a + b, lambda x, y, i, v: i.read(y, 1))),
    Step(lambda x, y, i, v: v - y[i - 2], joined(lambda a, b: a - b, lambda x, y, i, v: i.read(y, -2))),
    Step(
        lambda x, y, i, v: v + x.load(i, mask=i.indices % 3 != 0),
        joined(lambda a, b: a + b, lambda x, y, i, v: i.read(x, 0, not_of_three)),
    ),
    Step(
        lambda x, y, i, v: x.load(i, fill=3),
        lambda x, y, i, v: [(a if ok else 3, True) for a, ok in i.read(x)],
    ),
    Step(lambda x, y, i, v: v[::-1], lambda x, y, i, v: v[::-1]),
    Step(
        lambda x, y, i, v: jnp.concatenate([v[1:], jnp.array([5], v.dtype)]),
        lambda x, y, i, v: [*v[1:], (5, True)],
    ),
    Step(lambda x, y, i, v: jnp.cumsum(v), running),
    Step(lambda x, y, i, v: jnp.sort(v), lambda x, y, i, v: sorted(v, key=lambda lane: lane[0])),
    Step(lambda x, y, i, v: (v[:, None] + v[None, :]).max(axis=1), widest),
    Step(lambda x, y, i, v: y[v], looked_up),
    Step(folded, summed),
    Step(searched, searched_model),
    Step(branched, branched_model),
)


@dataclass(frozen=True)
class Chain:
    """A kernel for two arrays, and a model of its results."""

    kernel: tk.Kernel
    arrays: tuple[Array, ...]
    expected: tuple[Array, ...]

    @property
    def func(self) -> Func:
        """The block IR."""
        return self.kernel.trace(*self.arrays).ir


def chain(choose: Choose) -> Chain:
    """A load, some steps, and an access of each kind by the vector that they make."""
    block, extent, other = 2 + choose(4), 1 + choose(12), 1 + choose(12)
    random = np.random.default_rng(choose(99))
    x, y = (random.integers(-1, PLACES, n).astype(np.int32) for n in (extent, other))
    steps = [STEPS[choose(len(STEPS) - 1)] for _ in range(choose(3))]
    tiles = -(-extent // block)
    dtype = (np.int32, np.int16)[choose(1)]

    def out_type(*_: Any) -> Any:
        shape = jax.ShapeDtypeStruct
        return (
            shape((extent,), np.int32),
            tk.Zeros(shape((PLACES * block, tiles), np.int32)),
            tk.Zeros(shape((PLACES,), np.int32)),
            tk.Sum(shape((PLACES, 2), np.int32)),
        )

    @tk.kernel(out_type=out_type)
    def chained(x: Any, y: Any, read: Any, stored: Any, counted: Any, added: Any) -> None:
        i = tk.parallel(x.shape[0], block)
        v = x[i]
        for step in steps:
            v = step.kernel(x, y, i, v)
        v = v.astype(dtype)
        read[i] = y.load(v, fill=-7)
        stored[v * block + jnp.arange(block), i.index] = i.indices + 1
        counted.at[v].add(1)
        added.at[v].add(jnp.stack([i.indices, i.indices + 1], axis=1))

    return Chain(chained, (x, y), _expected(x, y, block, [s.model for s in steps]))


def _expected(x: Array, y: Array, block: int, steps: list[Model]) -> tuple[Array, ...]:
    tiles = -(-len(x) // block)
    read, stored = np.zeros(len(x), np.int32), np.zeros((PLACES * block, tiles), np.int32)
    counted, added = np.zeros(PLACES, np.int32), np.zeros((PLACES, 2), np.int32)
    for t in range(tiles):
        i = Tile(t * block, block, len(x))
        v = i.read(x)
        for step in steps:
            v = step(x, y, i, v)
        for n, (a, ok) in enumerate(v):
            place = i.start + n
            if place < len(x):
                read[place] = y[a] if ok and 0 <= a < len(y) else -7
            if ok and 0 <= a < PLACES:
                stored[a * block + n, t] = place + 1
                counted[a] += 1
                added[a] += (place, place + 1)
    return read, stored, counted, added


class Chains:
    """Makes Funcs as `Generator` does, which are those of chains."""

    def __init__(self, choose: Choose, features: Sequence[str] = (), dtypes: Sequence[DType] = ()) -> None:
        """Chains have features and dtypes of their own."""
        self._choose, self.seed = choose, choose(1000)
        self.facts: defaultdict[Value, Fact] = defaultdict(lambda: Fact(0.0))

    def func(self) -> Func:
        """A chain's Func."""
        return chain(self._choose).func
