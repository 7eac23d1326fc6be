"""Kernels of the form "a computed tile, moved, combined with itself": a table of producers, movements and combinations.

All numbers are such that every op is exact, or correctly rounded: results are those of the interpreter in every bit.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk

Tile = jax.Array

SHAPES = ((4, 32), (8, 8), (2, 16), (1, 32), (8, 1), (3, 6))
DTYPES = ("float32", "float64", "bfloat16", "int32")

# The dtype that a tile is cast to, which has elements of another size.
OTHER = {"float32": "float64", "float64": "int32", "bfloat16": "float32", "int32": "float64"}


def _costly(t: Tile) -> Tile:
    """A function that is dearer than to load its result."""
    return jnp.sqrt(jnp.abs(t)) if jnp.issubdtype(t.dtype, jnp.floating) else t // 3


PRODUCERS: dict[str, Callable[[Tile], Tile]] = {
    "loaded": lambda t: t,
    "square": lambda t: t * t,
    "function": _costly,
    "two functions": lambda t: _costly(t) - _costly(t + 9),
    "row times its sum": lambda t: _costly(t) * t.sum(1, keepdims=True),
    "scan": lambda t: jnp.cumsum(t, 1),
    "product": lambda t: tk.dot(t, jnp.broadcast_to(t[:1].T, (t.shape[1], t.shape[1]))).astype(t.dtype),
    "sorted": lambda t: jnp.take_along_axis(t * t, jnp.argsort(t, 1), 1),
}


def _half(n: int) -> int:
    return max(n // 2, 1)


MOVEMENTS: dict[str, Callable[[Tile], Tile]] = {
    "itself": lambda v: v,
    "first column": lambda v: v[:, :1],
    "first row": lambda v: v[:1],
    "first row as a vector": lambda v: v[0],
    "first element": lambda v: v[:1, :1],
    "last column": lambda v: v[:, -1:],
    "inner row": lambda v: v[_half(v.shape[0]) - 1 : _half(v.shape[0])],
    "left half": lambda v: v[:, : _half(v.shape[1])],
    "upper half": lambda v: v[: _half(v.shape[0])],
    "right half": lambda v: v[:, v.shape[1] - _half(v.shape[1]) :],
    "odd columns": lambda v: v[:, ::2],
    "all but the first column": lambda v: v[:, min(1, v.shape[1] - 1) :],
    "transposed": lambda v: v.T.reshape(v.shape),
    "reversed columns": lambda v: v[:, ::-1],
    "reversed rows": lambda v: v[::-1],
    "transposed and reversed": lambda v: v[::-1].T.reshape(v.shape),
    "reshaped": lambda v: v.reshape(v.shape[1], v.shape[0]).T,
    "flat and reversed": lambda v: v.reshape(-1)[::-1].reshape(v.shape),
    "left half repeated": lambda v: jnp.repeat(v[:, : _half(v.shape[1])], 2, 1)[:, : v.shape[1]],
    "upper half repeated": lambda v: jnp.repeat(v[: _half(v.shape[0])], 2, 0)[: v.shape[0]],
    "left half twice": lambda v: jnp.tile(v[:, : _half(v.shape[1])], (1, 2))[:, : v.shape[1]],
    "taken rows": lambda v: jnp.take(v, jnp.arange(v.shape[0]) // 2, 0),
    "taken columns": lambda v: jnp.take(v, (jnp.arange(v.shape[1]) * 5 + 1) % v.shape[1], 1),
    "sorted": lambda v: jnp.take_along_axis(v, jnp.argsort(v, 1), 1),
    "rolled columns": lambda v: jnp.roll(v, 1, 1),
    "rolled rows": lambda v: jnp.roll(v, 1, 0),
    "halves exchanged": lambda v: jnp.concatenate([v[:, _half(v.shape[1]) :], v[:, : _half(v.shape[1])]], 1),
    "padded": lambda v: jnp.pad(v[:, 1:], ((0, 0), (0, 1))),
    "row maxima": lambda v: v.max(1, keepdims=True),
    "column maxima": lambda v: v.max(0, keepdims=True),
}


def _difference(v: Tile, m: Tile) -> Tile:
    return m - v


COMBINATIONS: dict[str, Callable[[Tile, Tile], Tile]] = {
    "difference": _difference,
    "choice": lambda v, m: jnp.where(v > m, v, m + 1),
    "cast before": lambda v, m: (m.astype(OTHER[v.dtype.name]) - v.astype(OTHER[v.dtype.name])).astype(v.dtype),
    "function of the moved tile": lambda v, m: _costly(m + 4) - v,
    "with a sum": lambda v, m: m - v + v.max(1, keepdims=True),
}

# Each producer with three shapes and dtypes, each shape with four producers.
KERNELS = [
    (producer, SHAPES[n % len(SHAPES)], DTYPES[n % len(DTYPES)])
    for at, producer in enumerate(PRODUCERS)
    for n in range(at, at + 3)
]


def _result(tile: Tile, movement: str, combination: str) -> Tile:
    """A moved tile combined with the tile, or with as many of its first elements as there are."""
    moved = MOVEMENTS[movement](tile)
    rows, columns = np.broadcast_shapes(moved.shape, (1, 1))
    broadcasts = all(n in (1, size) for n, size in zip((rows, columns), tile.shape, strict=True))
    return COMBINATIONS[combination](tile if broadcasts else tile[:rows, :columns], moved)


def kernel(producer: str, combination: str) -> tk.Kernel:
    """A kernel whose program n makes movement n, in a branch of its own, of the same array."""

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((len(MOVEMENTS), *x.shape), x.dtype))
    def moved(x: tk.Ref, out: tk.Ref) -> None:
        n = tk.parallel(len(MOVEMENTS), 1)
        out[n] = jnp.zeros((1, *x.shape), x.dtype)
        for number, movement in enumerate(MOVEMENTS):

            @tk.when(n.index == number)
            def _(number: int = number, movement: str = movement) -> None:
                result = _result(PRODUCERS[producer](x[...]), movement, combination)
                out[number, : result.shape[0], : result.shape[1]] = result.astype(x.dtype)

    return moved


def operand(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Small integers of both signs, no two neighbours equal."""
    rng = np.random.default_rng(0)
    return rng.permutation(np.arange(np.prod(shape)) - shape[1] // 2).reshape(shape).astype(jnp.dtype(dtype))
