"""The causal_conv1d kernel, its backward kernel, and their blocks.

With taps w_0 … w_{K-1}, w_{K-1} for the token itself, z_t = bias + Σ_j w_{K-1-j} x_{t-j} and out = act(z). With
g_t = cotangent_t act'(z_t) the cotangents are

    dx_t = Σ_j w_{K-1-j} g_{t+j},   dw_{K-1-j} = Σ_t g_t x_{t-j},   dbias = Σ_t g_t.

Tokens before x are the state. A tap that reaches another packed sequence is 0. The backward kernel
computes z of the K - 1 tokens behind its tile once more, so that no g is written to memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.causal_conv1d.reference import definition
from tilekern.kernels.derivatives import against, cast_like, derive
from tilekern.kernels.rows import like_first


class _Taps:
    """Loads of tokens and their neighbours, for one sequence and a tile of channels.

    Methods return [size, C] or [size] for `size` tokens from position `start` on.
    """

    def __init__(self, x: tk.Ref, state: tk.Ref | None, segment_ids: tk.Ref | None, taps: int, b: Any, c: tk.Tile):
        self._x, self._state, self._ids, self._taps = x, state, segment_ids, taps
        self._b, self._c, self._wide = b, c, tk.accumulator(x.dtype)

    def tokens(self, start: Any, size: int) -> jax.Array:
        """The tokens: of the state for negative positions, 0 beyond both ends."""
        tokens = self._x[self._b, tk.ds(start, size), self._c].astype(self._wide)
        if self._state is None or self._taps == 1:
            return tokens
        return tokens + self._state[self._b, tk.ds(start + (self._taps - 1), size), self._c].astype(self._wide)

    def same_run(self, start: Any, size: int, back: int) -> jax.Array | None:
        """bool[size]: True for a token whose run has the token `back` before it; None if all are True.

        Tokens before x belong to the first run.
        """
        if self._ids is None or not back:
            return None
        ids = self._ids
        rows = [ids.load((self._b, tk.ds(start - n, size)), fill=ids[self._b, 0]) for n in range(back + 1)]
        same = rows[0] == rows[1]
        for later, earlier in pairwise(rows[1:]):
            same &= later == earlier
        return same

    def tap(self, start: Any, size: int, back: int) -> jax.Array:
        """The tokens `back` positions before, 0 where a token is of another run."""
        return where(self.same_run(start, size, back), self.tokens(start - back, size))


def where(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """x, with 0 in the rows where mask[rows] is False."""
    return x if mask is None else jnp.where(mask[:, None], x, 0)


@tk.kernel(out_type=like_first)
def causal_conv1d_forward(
    x: tk.Ref,
    weight: tk.Ref,
    bias: tk.Ref | None,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    out: tk.Ref,
    *,
    activation: str | None = None,
    block_t: tk.Block = 64,
    block_c: tk.Block = 128,
) -> None:
    """x[B, T, C], weight[K, C], bias[C], initial_state[B, K - 1, C], segment_ids[B, T] -> out[B, T, C].

    Computed in float32 (float64 for float64).
    """
    b = tk.parallel(x.shape[0])
    t = tk.parallel(x.shape[1], block_t)
    c = tk.parallel(x.shape[2], block_c)
    count = weight.shape[0]
    taps = _Taps(x, initial_state, segment_ids, count, b, c)
    total = tk.zeros((t, c), tk.accumulator(x.dtype)) if bias is None else _row(bias[c], x)
    for back in range(count):
        total = total + _row(weight[count - 1 - back, c], x) * taps.tap(t.start, block_t, back)
    out[b, t, c] = (jax.nn.silu(total) if activation == "silu" else total).astype(out.dtype)


def _row(values: jax.Array, x: tk.Ref) -> jax.Array:
    return values.astype(tk.accumulator(x.dtype))[None, :]


def _backward_types(
    x: Any, weight: Any, bias: Any, state: Any, ids: Any, cotangent: Any, *, needs: tuple[bool, ...], activation: Any
) -> tuple[Any, ...]:
    wide = tk.accumulator(x.dtype)
    sums = (tk.Sum(jax.ShapeDtypeStruct(shape, wide)) for shape in (weight.shape, x.shape[2:]))
    return like_first(x) if needs[0] else None, *(s if n else None for s, n in zip(sums, needs[1:], strict=True))


@tk.kernel(out_type=_backward_types)
def causal_conv1d_backward_kernel(
    x: tk.Ref,
    weight: tk.Ref,
    bias: tk.Ref | None,
    initial_state: tk.Ref | None,
    segment_ids: tk.Ref | None,
    cotangent: tk.Ref,
    dx: tk.Ref | None,
    dweight: tk.Ref | None,
    dbias: tk.Ref | None,
    *,
    needs: tuple[bool, bool, bool],
    activation: str | None = None,
    block_t: tk.Block = 64,
    block_c: tk.Block = 128,
    shifted: tk.Choice[Literal["sliced", "computed"]] = "sliced",
) -> None:
    """Like the forward kernel, with cotangent[B, T, C] -> dx[B, T, C], dweight[K, C], dbias[C]; None if not in `needs`.

    dx needs g of K tiles, each a token later. With `shifted="sliced"` the K tiles are slices of one tile of
    block_t + K - 1 tokens; else each is computed by itself, because slices of tiles in registers are expensive on GPUs.
    """
    b = tk.parallel(x.shape[0])
    t = tk.parallel(x.shape[1], block_t)
    c = tk.parallel(x.shape[2], block_c)
    count, wide = weight.shape[0], tk.accumulator(x.dtype)
    taps = _Taps(x, initial_state, segment_ids, count, b, c)
    rows = [_row(weight[k, c], x) for k in range(count)]

    def moved(start: Any, size: int) -> jax.Array:
        """g of some tokens; 0 beyond the end."""
        g = cotangent[b, tk.ds(start, size), c].astype(wide)
        if activation is None:
            return g
        z = sum((rows[count - 1 - back] * taps.tap(start, size, back) for back in range(count)), _start(bias, c, x))
        share = jax.nn.sigmoid(z)
        return g * share * (1 + z * (1 - share))

    if shifted == "sliced":
        joint = moved(t.start, block_t + count - 1)
        ahead = [joint[n : n + block_t] for n in range(count)]
    else:
        ahead = [moved(t.start + n, block_t) for n in range(count)]
    here = ahead[0]
    if dx is not None:
        total = rows[count - 1] * here
        for n in range(1, count):
            total = total + rows[count - 1 - n] * where(taps.same_run(t.start + n, block_t, n), ahead[n])
        dx[b, t, c] = total.astype(dx.dtype)
    if dbias is not None:
        dbias.at[c].add(here.sum(axis=0))
    if dweight is not None:
        for back in range(count):
            dweight.at[count - 1 - back, c].add((here * taps.tap(t.start, block_t, back)).sum(axis=0))


def _start(bias: tk.Ref | None, c: tk.Tile, x: tk.Ref) -> Any:
    return jnp.zeros((), tk.accumulator(x.dtype)) if bias is None else _row(bias[c], x)


def _backward(
    x: Any, weight: Any, bias: Any, state: Any, ids: Any, cotangent: Any, *, needs: tuple[bool, ...], activation: Any
) -> tuple[Any, ...]:
    """By the kernel; the state's cotangent by the definition of the first K - 1 tokens, which alone see the state."""
    arrays = x, weight, bias, state, ids
    cotangents: Any = [None, None, None]
    if any(needs[:3]):
        cotangents = causal_conv1d_backward_kernel(*arrays, cotangent, needs=needs[:3], activation=activation)
    few = weight.shape[0] - 1
    of_state = None
    if needs[3]:
        first = x[:, :few], weight, bias, state, None if ids is None else ids[:, :few]

        def of_first(*arrays: Any) -> jax.Array:
            return definition(*arrays, activation=activation)

        of_state = against(of_first, first, cotangent[:, :few], (False, False, False, True, False))[3]
    return (*cast_like(cotangents, arrays[:3]), of_state, None)


causal_conv1d_tangent, causal_conv1d_backward = derive(causal_conv1d_forward, definition, _backward)


def _cpu(x: Any, *unused: Any) -> dict[str, int]:
    """Tiles that stay in a core's cache."""
    block_c = even(x.shape[2], 1024)
    return {"block_t": even(x.shape[1], max(1, (1 << 16) // block_c)), "block_c": block_c}


def _llvm(x: Any, *unused: Any) -> dict[str, int]:
    """Tiles of 256 elements, eight tokens × 32 channels if x has so many tokens: loaded weights serve all tokens."""
    block_t = max(1, min(x.shape[1], 8))
    return {"block_t": block_t, "block_c": 32 * (8 // block_t)}


def _cuda(x: Any, *unused: Any) -> dict[str, int]:
    """Rows of 16 bytes for each thread, and few enough tokens that tiles stay in registers."""
    return {"block_t": power_of_two(x.shape[1], 32), "block_c": power_of_two(x.shape[2], 128), "num_warps": 4}


def _cuda_backward(x: Any, *unused: Any) -> Mapping[str, int | str]:
    return _cuda(x) | {"block_t": power_of_two(x.shape[1], 16), "shifted": "computed"}


def _tpu(x: Any, *unused: Any) -> dict[str, int]:
    block_c = tiled(x.shape[2], 512, 128)
    return {"block_t": tiled(x.shape[1], 256, 8), "block_c": block_c}


for _kernel, _blocks in ((causal_conv1d_forward, _cuda), (causal_conv1d_backward_kernel, _cuda_backward)):
    _kernel.schedule("cpu")(_cpu)
    _kernel.schedule("cpu:llvm")(_llvm)
    _kernel.schedule("cuda")(_blocks)
    _kernel.schedule("tpu")(_tpu)
