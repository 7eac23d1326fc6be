"""Kernels and types for tests of estimates."""

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk


@tk.kernel(out_type=lambda x, n: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
def row_sums(x: Any, n: Any, out: Any, *, block: tk.Block = 8) -> None:
    """For each block of rows the sums of the first n[row] columns."""
    i = tk.parallel(x.shape[0], block)
    columns = tk.serial(x.shape[1], 128, stop=n[i.start])
    out[i] = tk.fold(columns, lambda j, acc: acc + jnp.sum(x[i, j], axis=1), tk.zeros((i,), x.dtype))


@tk.kernel(out_type=lambda x, n: jax.ShapeDtypeStruct(x.shape, x.dtype))
def counted(x: Any, n: Any, out: Any) -> None:
    """x doubled until a count, which starts at n[0], is 0."""
    halved = jax.lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * 2), (n[0], x[...]))
    out[...] = halved[1]


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def product(x: Any, w: Any, out: Any, *, rows: tk.Block = 64, columns: tk.Block = 64, inner: tk.Block = 64) -> None:
    """The matrix product, with the same blocks for all sizes and targets."""
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(w.shape[1], columns)

    def step(k: Any, acc: Any) -> Any:
        return acc + tk.dot(x[i, k], w[k, j])

    out[i, j] = tk.fold(tk.serial(x.shape[1], inner), step, tk.zeros((i, j), jnp.float32)).astype(out.dtype)


for platform in ("cpu", "cuda", "tpu"):
    product.schedule(platform)(lambda x, w: {"rows": 64, "columns": 64, "inner": 64})


def types(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    """Types of arrays: a vector has int32."""
    return [jax.ShapeDtypeStruct(s, dtype if len(s) > 1 or s == (8,) else jnp.int32) for s in shapes]
