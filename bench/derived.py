"""Derivatives that are derived from the block IR, compared with derivatives that are written by hand.

`measure` times them on CPUs. `python -m bench.derived [CHIP]` estimates the gradients' time on a TPU, see `tpu_static`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.estimate.tpu.estimate import estimate
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul
from tilekern.kernels.rms_norm import rms_norm

Shape = tuple[int, ...]

# --- kernels as users write them --------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype))
def derived_norm(x: Any, w: Any, out: Any, *, block: tk.Block = 8) -> None:
    """RMS norm of the rows of x[R, C], times w[C]."""
    i = tk.parallel(x.shape[0], block)
    s = x[i].astype(jnp.float32)
    s = s * jax.lax.rsqrt((s * s).mean(axis=1) + 1e-6)[:, None] * w[:].astype(jnp.float32)
    out[i] = s.astype(out.dtype)


@derived_norm.schedule("tpu")
def _norm_tpu(x: Any, w: Any) -> dict[str, int]:
    return {"block": 128}


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def derived_matmul(x: Any, w: Any, out: Any, *, block: tk.Block = 256, depth: tk.Block = 256) -> None:
    """x[M, K] @ w[K, N]."""
    i, j = tk.grid((x.shape[0], block), (w.shape[1], block))

    def step(k: tk.Tile, total: jax.Array) -> jax.Array:
        return tk.dot(x[i, k], w[k, j], total)

    out[i, j] = tk.fold(tk.serial(x.shape[1], depth), step, tk.zeros((i, j), jnp.float32)).astype(out.dtype)


@derived_matmul.schedule("tpu")
def _matmul_tpu(x: Any, w: Any) -> dict[str, int]:
    return {"block": 512, "depth": 512}


@tk.kernel(out_type=lambda q, k, v: jax.ShapeDtypeStruct(q.shape, q.dtype))
def derived_attention(q: Any, k: Any, v: Any, out: Any, *, queries: tk.Block = 128, keys: tk.Block = 128) -> None:
    """Causal attention of q, k and v[H, T, D], by an online softmax."""
    h, i = tk.grid(q.shape[0], (q.shape[1], queries))
    scale = q.shape[2] ** -0.5

    def step(j: tk.Tile, carry: Any) -> Any:
        largest, sums, total = carry
        s = tk.dot(q[h, i], k[h, j].T) * scale
        s = jnp.where(j.valid[None] & (i.indices[:, None] >= j.indices[None]), s, -1e30)
        grown = jax.lax.stop_gradient(jnp.maximum(largest, s.max(axis=1)))
        p, shrink = jnp.exp(s - grown[:, None]), jnp.exp(largest - grown)
        return grown, sums * shrink + p.sum(axis=1), total * shrink[:, None] + tk.dot(p.astype(v.dtype), v[h, j])

    start = tk.full(i, -1e30, jnp.float32), tk.zeros(i, jnp.float32), tk.zeros((i, v.shape[2]), jnp.float32)
    _, sums, total = tk.fold(tk.serial(k.shape[1], keys, stop=(i.index + 1) * queries), step, start)
    out[h, i] = (total / sums[:, None]).astype(out.dtype)


@derived_attention.schedule("tpu")
def _attention_tpu(q: Any, k: Any, v: Any) -> dict[str, int]:
    return {"queries": 512, "keys": 512}


# --- their peers ------------------------------------------------------------------------------------------------------


def stated_attention(q: jax.Array, k: jax.Array, v: jax.Array, target: str | None = None) -> jax.Array:
    """The library's kernel on [H, T, D]."""
    batched = (x.swapaxes(0, 1)[None] for x in (q, k, v))
    return flash_attention(*batched, causal=True, target=target)[0].swapaxes(0, 1)


def _xla_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    batched = (x.swapaxes(0, 1)[None] for x in (q, k, v))
    return jax.nn.dot_product_attention(*batched, is_causal=True)[0].swapaxes(0, 1)


def _xla_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    s = x.astype(tk.accumulator(x.dtype))
    return (s * jax.lax.rsqrt((s * s).mean(axis=1, keepdims=True) + 1e-6) * w).astype(x.dtype)


CASES: Mapping[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], tuple[Shape, ...]]] = {
    "rms_norm": (derived_norm, rms_norm, _xla_norm, ((4096, 4096), (4096,))),
    "matmul": (derived_matmul, matmul, jnp.matmul, ((2048, 2048),) * 2),
    "attention": (derived_attention, stated_attention, _xla_attention, ((8, 2048, 64),) * 3),
}
"""For each kernel: derivatives derived, stated, by XLA; and the shapes of the arguments."""


def gradient(function: Callable[..., jax.Array], *arrays: jax.Array) -> Any:
    """The result, and the cotangents of all arguments, for a cotangent that is the first array."""
    value, pull = cast(Any, jax.vjp(function, *arrays[1:]))
    return value, pull(arrays[0])


# --- measurements -----------------------------------------------------------------------------------------------------


def measure() -> Iterator[Result]:
    """Forward and backward pass on the best backend for CPUs, beside kernels with stated rules, and beside XLA."""
    target = "cpu:xla" if host() is None else "cpu:llvm"
    for name, (derived, stated, xla, shapes) in CASES.items():
        arrays = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
        arrays = [jax.random.normal(jax.random.key(9), jax.eval_shape(xla, *arrays).shape), *arrays]
        functions = {"derived": partial(derived, target=target), "stated": partial(stated, target=target), "XLA's": xla}
        calls = {kind: jax.jit(partial(gradient, function)) for kind, function in functions.items()}
        times = take_turns({kind: clock(partial(call, *arrays)) for kind, call in calls.items()})
        ours = statistics.median(times["derived"]) * 1e3
        for peer in ("stated", "XLA's"):
            title = f"{name} and its derived gradient, {target}, against {peer}"
            baseline = statistics.median(times[peer]) * 1e3
            yield Result(title, "ms", ours, None, "ratio", baseline, by_round(times["derived"], times[peer]))


def main(chip: str = "v5e") -> None:
    """Print microseconds of the gradients of bfloat16 arrays on a TPU, with XLA's own programs around the kernels."""
    for name, (derived, stated, xla, shapes) in CASES.items():
        out = jax.eval_shape(xla, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).shape
        estimates = {
            kind: estimate(_program(function.__name__, kind, (out, *shapes), chip), chip)
            for kind, function in {"derived": derived, "stated": stated}.items()
        }
        took = {kind: sum(kernel.us for kernel in kernels) for kind, kernels in estimates.items()}
        print(f"{name}: derived {took['derived']:.0f} µs, stated {took['stated']:.0f} µs")


def _program(function: str, kind: str, shapes: tuple[Shape, ...], chip: str) -> str:
    """The source of the gradient of a function of this module, for `estimate`."""
    return f"""
import jax
from functools import partial
from bench import derived
fn = lambda *arrays: derived.gradient(partial(derived.{function}, target="tpu:{chip}"), *arrays)[1]
args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in {shapes!r}]
"""


if __name__ == "__main__":
    main(*sys.argv[1:])
