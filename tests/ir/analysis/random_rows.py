"""Random kernels over the rows of arrays, as people write them.

Some may be divided anywhere, some between tiles, some not at all. Each draws a few steps on tiles [block, width]. Steps
on one row keep rows independent. Steps on columns combine the rows of a tile. Others know the place of a row in its
tile, or the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tests.lang.checks import before_passes
from tilekern.ir.core import Func

type Tile = Any

ON_ROWS: tuple[Callable[[Tile], Tile], ...] = (
    jnp.exp,
    jnp.cos,
    jnp.negative,
    jnp.square,
    jax.nn.relu,
    lambda t: t - t.sum(axis=1, keepdims=True),
    lambda t: t * t.max(axis=1, keepdims=True),
    lambda t: jnp.cumsum(t, axis=1),
    lambda t: jnp.sort(t, axis=1),
    lambda t: t[:, ::-1],
    lambda t: t - t[:, :1],
    lambda t: jnp.take_along_axis(t, jnp.argsort(t, axis=1), axis=1),
    lambda t: jnp.concatenate([t[:, 1:], t[:, :1]], axis=1),
    lambda t: t.T.reshape(t.shape[1], 1, t.shape[0])[:, 0].T,
    lambda t: jnp.where(t > 0, t, 2),
    lambda t: t + jnp.arange(t.shape[1], dtype=t.dtype),
)
ON_COLUMNS: tuple[Callable[[Tile], Tile], ...] = (
    lambda t: t - t.mean(axis=0),
    lambda t: t * t.max(axis=0),
    lambda t: jnp.cumsum(t, axis=0),
    lambda t: jnp.sort(t, axis=0),
    lambda t: t[::-1],
    lambda t: t - t[:1],
    lambda t: jnp.roll(t, 1, axis=0),
    lambda t: tk.dot(tk.dot(t, t.T), t),
    lambda t: t.reshape(-1)[::-1].reshape(t.shape),
    lambda t: t * (t[:, None] * t[None]).sum(axis=(0, 1)),
)
ON_PLACES: tuple[Callable[[Tile], Tile], ...] = (
    lambda t: t + jnp.arange(t.shape[0], dtype=t.dtype)[:, None],
    lambda t: t * np.where(np.arange(t.shape[0]) % 2, -1, 1).astype(np.float32)[:, None],
    lambda t: jnp.where(jnp.arange(t.shape[0])[:, None] < 2, t, 1),
    lambda t: t + jnp.eye(*t.shape, dtype=t.dtype),
)
OUTPUTS = ("rows", "rows", "sum of rows", "sum of all", "count", "sum over a loop")


def random_rows(random: Random) -> tuple[Func, list[np.ndarray], str]:
    """A kernel, as it was traced, with its arrays, and what its output is."""
    rows, width, block = random.choice((4, 6, 10, 12, 20)), random.choice((1, 3, 4)), random.choice((1, 3, 4, 4, 8, 8))
    kind, steps = random.choice(OUTPUTS), random.choice((1, 1, 2, 3, 5))
    choices = [random.random() for _ in range(4 * steps)]

    def computed(i: Any, x: Any, y: Any, w: Any, ids: Any) -> Tile:
        draw = Random(str(choices))
        pool = [x[i, :], y[i, :]]
        for _ in range(steps):
            pool.append(_step(draw, i, pool, x, w, ids))
        return pool[-1]

    def body(x, y, w, ids, out):
        if kind == "sum over a loop":
            zeros = jnp.zeros(width, np.float32)
            loop = tk.serial(x.shape[0], block)
            out[:] = tk.fold(loop, lambda k, total: total + computed(k, x, y, w, ids).sum(axis=0), zeros)
            return
        i = tk.parallel(x.shape[0], block)
        tile = computed(i, x, y, w, ids)
        match kind:
            case "rows":
                out[i, :] = tile
            case "sum of rows":
                out.at[:].add(tile.sum(axis=0))
            case "sum of all":
                out.at[()].add(tile.sum())
            case _:
                out.at[()].add(jnp.float32(1))

    shape = {"rows": (rows, width), "sum of rows": (width,), "sum over a loop": (width,)}.get(kind, ())
    out = jax.ShapeDtypeStruct(shape, np.float32)
    result = out if kind in ("rows", "sum over a loop") else tk.Sum(out)
    kernel = tk.kernel(out_type=lambda *_: result)(body)
    draw = np.random.default_rng(random.randrange(2**32))
    arrays = [
        *(draw.integers(-2, 3, (rows, width)).astype(np.float32) / 2 for _ in range(2)),
        draw.integers(-2, 3, width).astype(np.float32),
        draw.integers(0, 2 * rows, rows).astype(np.int32),
    ]
    return before_passes(kernel, *arrays), arrays, kind


def _step(draw: Random, i: Any, pool: list[Tile], x: Any, w: Any, ids: Any) -> Tile:
    """One more tile, of the tiles of the pool."""
    a, b = pool[-1], draw.choice(pool)
    match draw.randrange(12):
        case 0 | 1 | 2:
            return draw.choice((jnp.exp, jnp.cos, *ON_ROWS))(a)
        case 3:
            return draw.choice(ON_COLUMNS)(a)
        case 4:
            return draw.choice(ON_PLACES)(a)
        case 5 | 6:
            return draw.choice((jnp.add, jnp.multiply, jnp.maximum, jnp.subtract))(a, b)
        case 7:
            return a * w[:]
        case 8:
            return jnp.where(i.valid[:, None], a, draw.choice((0, 0, 1)))
        case 9:
            return jnp.where(ids[i][:, None] < x.shape[0], a, b)
        case 10:
            return a / draw.choice((x.shape[0], 2.0))
        case _:
            rows = draw.choice((x.shape[0], 2 * x.shape[0] - 3))
            loop = tk.serial(rows, 3, stop=x.shape[0])
            return a + tk.fold(loop, lambda k, t: t + k.valid.sum(), jnp.zeros((), np.int32)).astype(a.dtype)
