"""Random kernels of large tiles, as users write them, for tests of what they take of vector memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import tilekern as tk

Moves = Callable[["_Body"], None]
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Program:
    """A kernel with the arrays that it takes, and the names of its moves."""

    kernel: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    moves: tuple[str, ...]

    def lowered(self, chip: str = "tpu:v5e") -> Any:
        """Lowered for a chip."""
        return self.kernel.trace(*self.types).lower(chip)


@dataclass
class _Body:
    """A kernel's body that is being written: the tiles that there are."""

    draw: random.Random
    tiles: list[jax.Array]
    weights: Any  # an array [width, width]
    rows: Any  # an array of rows for loops

    @property
    def last(self) -> jax.Array:
        return self.tiles[-1]

    def other(self) -> jax.Array:
        """A tile of the shape of the last one, if possible another one."""
        fit = [t for t in self.tiles if t.shape == self.last.shape]
        return self.draw.choice(fit)

    def push(self, tile: jax.Array) -> None:
        self.tiles.append(tile)


def _chain(body: _Body) -> None:
    x = body.last
    for _ in range(body.draw.randint(1, 4)):
        x = body.draw.choice([jnp.exp, jnp.tanh, lambda x: x * 2 + 1, jnp.abs, lambda x: jnp.maximum(x, 0)])(x)
    body.push(x)


def _pair(body: _Body) -> None:
    x, y = body.last, body.other()
    body.push(body.draw.choice([jnp.add, jnp.multiply, jnp.maximum, lambda x, y: jnp.where(x > y, x, y * 2)])(x, y))


def _reduce(body: _Body) -> None:
    x, axis = body.last, body.draw.randint(0, 1)
    reduce = body.draw.choice([jnp.max, jnp.sum, jnp.min])
    y = reduce(x, axis=axis, keepdims=True)
    body.push(body.draw.choice([lambda: x - y, lambda: y * body.other(), lambda: jnp.exp(x - y) * x])())


def _softmax(body: _Body) -> None:
    body.push(jax.nn.softmax(body.last.astype(F32), axis=body.draw.randint(0, 1)).astype(body.last.dtype))


def _norm(body: _Body) -> None:
    x = body.last.astype(F32)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    body.push(((x - mean) * lax.rsqrt(var + 1e-5)).astype(body.last.dtype))


def _argmax(body: _Body) -> None:
    x, axis = body.last, body.draw.randint(0, 1)
    place = jnp.argmax(x, axis=axis, keepdims=True)
    body.push(jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) == place, x, 0))


def _dot(body: _Body) -> None:
    x = body.last
    if x.shape[1] == body.weights.shape[0]:
        body.push(tk.dot(x, body.weights[...].astype(x.dtype)).astype(x.dtype))


def _gram(body: _Body) -> None:
    x = body.last
    if x.shape[0] <= 1024:
        logits = tk.dot(x, body.other().T)
        body.push(logits.astype(x.dtype))


def _attend(body: _Body) -> None:
    x = body.last
    if x.shape[0] <= 1024:
        p = jax.nn.softmax(tk.dot(x, body.other().T).astype(F32), axis=-1)
        body.push(tk.dot(p.astype(x.dtype), x).astype(x.dtype))


def _transpose(body: _Body) -> None:
    body.push(body.last.T)


def _concatenate(body: _Body) -> None:
    axis = body.draw.randint(0, 1)
    x = body.last
    n = x.shape[axis] // 2
    first, second = lax.split(x, (n, x.shape[axis] - n), axis)
    if body.draw.randint(0, 1):
        first = first * 2
    body.push(jnp.concatenate([second, first], axis=axis))


def _butterfly(body: _Body) -> None:
    axis = body.draw.randint(0, 1)
    x = body.last
    n = x.shape[axis] // 2
    if 2 * n != x.shape[axis]:
        return
    first, second = lax.split(x, (n, n), axis)
    body.push(jnp.concatenate([first + second, first - second], axis=axis))


def _reshape(body: _Body) -> None:
    rows, columns = body.last.shape
    if rows % 2 == 0 and body.draw.randint(0, 1):
        body.push(body.last.reshape(rows // 2, columns * 2))
    elif columns % 256 == 0:
        body.push(body.last.reshape(rows * 2, columns // 2))


def _heads(body: _Body) -> None:
    rows, columns = body.last.shape
    if columns % 128 == 0 and columns > 128:
        x = body.last.reshape(rows, columns // 128, 128)
        body.push((x / (1 + jnp.sum(jnp.abs(x), axis=body.draw.choice([1, 2]), keepdims=True))).reshape(rows, columns))


def _scan(body: _Body) -> None:
    scan = body.draw.choice([jnp.cumsum, lambda x, axis: lax.cummax(x, axis=axis)])
    body.push(scan(body.last, axis=body.draw.randint(0, 1)))


def _roll(body: _Body) -> None:
    axis = body.draw.randint(0, 1)
    body.push(jnp.roll(body.last, body.draw.choice([1, 8, 128, 3]), axis=axis) - body.last)


def _mask(body: _Body) -> None:
    x = body.last
    keep = lax.broadcasted_iota(jnp.int32, x.shape, 0) >= lax.broadcasted_iota(jnp.int32, x.shape, 1)
    body.push(jnp.where(keep, x, 0))


def _loop(body: _Body) -> None:
    """A loop with carries over the rows of an array."""
    if body.last.shape[1] != body.rows.shape[1]:
        return
    block = body.draw.choice([128, 256, 512])
    kind = body.draw.choice(["attend", "sum", "state"])
    x, axis, small = body.last, tk.serial(body.rows.shape[0], block), body.last.shape[0] <= 1024

    def attend(k: Any, carry: Any) -> Any:
        acc, top, total = carry
        y = body.rows[k].astype(x.dtype)
        s = tk.dot(x, y.T).astype(F32)
        new = jnp.maximum(top, s.max(-1))
        p, scale = jnp.exp(s - new[:, None]), jnp.exp(top - new)
        return acc * scale[:, None] + tk.dot(p.astype(x.dtype), y), new, total * scale + p.sum(-1)

    def summed(k: Any, acc: Any) -> Any:
        logits = tk.dot(x, body.rows[k].astype(x.dtype).T)
        return acc + tk.dot(logits.astype(x.dtype), body.rows[k].astype(x.dtype))

    def state(k: Any, s: Any) -> Any:
        return jnp.tanh(s * 0.5 + jnp.max(body.rows[k].astype(F32), axis=0)[None, :])

    if kind == "attend" and small:
        start = (jnp.zeros(x.shape, F32), jnp.full(x.shape[:1], -jnp.inf, F32), jnp.zeros(x.shape[:1], F32))
        acc, _, total = tk.fold(axis, attend, start)
        body.push((acc / total[:, None]).astype(x.dtype))
    elif kind == "sum" and small:
        body.push(tk.fold(axis, summed, jnp.zeros(x.shape, F32)).astype(x.dtype))
    else:
        body.push(tk.fold(axis, state, x.astype(F32)).astype(x.dtype))


def _steps(body: _Body) -> None:
    """A loop of JAX's whose state is a tile."""
    count = body.draw.choice([2, 3, 10])

    def step(i: Any, s: Any) -> Any:
        return (s + jnp.sum(s, axis=1, keepdims=True) * 1e-3).astype(s.dtype)

    body.push(lax.fori_loop(0, count, step, body.last))


def _sort(body: _Body) -> None:
    body.push(jnp.sort(body.last, axis=body.draw.randint(0, 1)))


def _argsort(body: _Body) -> None:
    body.push(jnp.argsort(body.last, axis=body.draw.randint(0, 1)).astype(body.last.dtype))


MOVES: dict[str, tuple[int, Moves]] = {
    "chain": (4, _chain),
    "pair": (5, _pair),
    "reduce": (5, _reduce),
    "softmax": (3, _softmax),
    "norm": (3, _norm),
    "argmax": (1, _argmax),
    "dot": (4, _dot),
    "gram": (2, _gram),
    "attend": (2, _attend),
    "transpose": (3, _transpose),
    "concatenate": (3, _concatenate),
    "butterfly": (3, _butterfly),
    "reshape": (1, _reshape),
    "heads": (1, _heads),
    "scan": (2, _scan),
    "roll": (2, _roll),
    "mask": (2, _mask),
    "loop": (3, _loop),
    "steps": (2, _steps),
    "sort": (1, _sort),
    "argsort": (1, _argsort),
}


_OF_FLOATS = ("softmax", "norm", "dot", "gram", "attend", "chain", "loop", "steps", "heads")
_LARGEST = {"sort": 1 << 16, "argsort": 1 << 16, "scan": 1 << 18}  # elements: others take the compiler long
_ROWS = (8, 64, 128, 200, 256, 512, 512, 1024, 2048)
_COLUMNS = (128, 128, 256, 384, 512, 512, 640, 1024, 2048, 4096)


def _shape(draw: random.Random) -> tuple[int, int]:
    rows, columns = draw.choice(_ROWS), draw.choice(_COLUMNS)
    while rows * columns > 1 << 19:
        rows = max(8, rows // 2) // 8 * 8
        columns = columns if rows > 8 else columns // 2
    if draw.randint(0, 7) == 0:
        columns -= draw.choice([28, 64, 1])
    return rows, columns


def _fitted(tile: jax.Array, rows: int, columns: int) -> jax.Array:
    """A tile brought to a shape, by reductions."""
    while tile.shape != (rows, columns):
        axis = 1 if tile.shape[1] != columns else 0
        shape = (tile.shape[0] if axis else rows, columns)
        tile = jnp.broadcast_to(jnp.sum(tile, axis=axis, keepdims=True), shape)
    return tile


def program(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    dtype = draw.choice([F32, F32, F32, BF16, BF16, jnp.dtype(jnp.int32) if draw.randint(0, 2) == 0 else F32])
    rows, columns = _shape(draw)
    grid = draw.choice([1, 1, 4])
    fit = [n for n in MOVES if dtype != jnp.int32 or n not in _OF_FLOATS]
    fit = [n for n in fit if rows * columns <= _LARGEST.get(n, 1 << 30)]
    moves = tuple(draw.choices(fit, [MOVES[n][0] for n in fit], k=draw.randint(1, 5)))
    inner = draw.randint(0, 1 << 30)
    width = draw.choice([columns, 128, 256, 512]) if columns <= 1024 else 256
    joined = draw.randint(1, 2) == 2

    def body(x: Any, y: Any, w: Any, r: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], rows)
        state = _Body(random.Random(inner), [y[i], x[i]], w, r)
        for name in moves:
            MOVES[name][1](state)
        tile = state.last
        if joined and len(state.tiles) > 3 and state.tiles[-2].shape == tile.shape:
            tile = tile + state.tiles[-2].astype(tile.dtype)
        out[i] = _fitted(tile, rows, columns).astype(out.dtype)

    kernel = tk.kernel(out_type=lambda x, y, w, r: jax.ShapeDtypeStruct(x.shape, x.dtype))(body)
    shape = (rows * grid, columns)
    types = [shape, shape, (columns, width), (1024, columns)]
    return Program(kernel, tuple(jax.ShapeDtypeStruct(s, dtype) for s in types), moves)
