"""Small Pallas kernels that ask the TPU's compiler one question each."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")

Function = Callable[..., Any]
TILE = jax.ShapeDtypeStruct((8, 128), jnp.float32)
_HBM = pl.BlockSpec(memory_space=pl.ANY)


def double(x: jax.Array) -> jax.Array:
    """2 * x, in blocks of 8 rows."""

    def body(x: Any, out: Any) -> None:
        out[...] = x[...] * pltpu.get_tpu_info().num_sublanes / 4

    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    grid = (x.shape[0] // 8,)
    return pl.pallas_call(body, grid=grid, in_specs=[rows], out_specs=rows, out_shape=jax.typeof(x))(x)


def scratch(shape: tuple[int, ...], dtype: Any, limit: int | None = None) -> Function:
    """A kernel that writes a buffer of vector memory to an array, and has no other buffer."""

    def body(x: Any, out: Any, buffer: Any) -> None:
        buffer[...] = jnp.zeros(shape, dtype)
        pltpu.sync_copy(buffer, out)

    return pl.pallas_call(
        body,
        in_specs=[_HBM],
        out_specs=_HBM,
        scratch_shapes=[pltpu.VMEM(shape, dtype)],
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
    )


def large(nbytes: int, limit: int | None = None) -> Function:
    """A kernel with one buffer of vector memory of so many bytes, of which it touches the ends."""
    rows = nbytes // 512

    def body(x: Any, out: Any, buffer: Any) -> None:
        for start in (0, rows - 8):
            buffer[pl.ds(start, 8), :] = jnp.zeros((8, 128))
        pltpu.sync_copy(buffer.at[pl.ds(0, 8)], out)

    return pl.pallas_call(
        body,
        in_specs=[_HBM],
        out_specs=_HBM,
        scratch_shapes=[pltpu.VMEM((rows, 128), jnp.float32)],
        out_shape=TILE,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
    )


def fetched(shape: tuple[int, ...], moves: bool = True) -> Function:
    """A kernel of 4 steps that Pallas fetches blocks of this shape for: one for each step, or the same for all."""
    block = pl.BlockSpec((None, *shape), lambda i: (i if moves else 0, *(0 for _ in shape)))
    return pl.pallas_call(lambda x, out: None, grid=(4,), in_specs=[block], out_specs=_HBM, out_shape=TILE)


def looked_up(shape: tuple[int, ...]) -> Function:
    """A kernel of a table in scalar memory and an array."""

    def body(table: Any, x: Any, out: Any) -> None:
        out[...] = x[...] + table[(0,) * len(shape)].astype(jnp.float32)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[pl.BlockSpec()],
            out_specs=pl.BlockSpec(),
        ),
        out_shape=TILE,
    )
