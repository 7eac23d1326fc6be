"""Contestants: other implementations at their best settings. Libraries are imported only when a contestant is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.clock import Contestant
from bench.gpu.gradients import loss_gradients

Arrays = Sequence[jax.Array]

STRIDE = 97
"""Distance between the elements of a result that are compared between contestants."""

# (block_q, block_kv, max_concurrent_steps) of JAX's Mosaic GPU attention by head width: the largest that fit 227 KiB.
MOSAIC_CONFIGS = {
    64: ((64, 256, 2), (64, 128, 4), (128, 128, 2)),
    128: ((64, 128, 2), (64, 64, 4)),
    256: ((64, 64, 2),),
}


MAX_SCORES = 1 << 31
"""Scores beyond which XLA is no peer: it holds several matrices of scores at a time, of 4 bytes a score."""


class Peer(NamedTuple):
    """A contestant that is made later, which may fail on this machine."""

    name: str
    make: Callable[[], Contestant]


def by_jax(name: str, function: Callable[..., Any], sets: Sequence[Arrays]) -> Contestant:
    """A jitted function of JAX arrays."""
    jitted = jax.jit(function)
    return Contestant(name, lambda n: jitted(*sets[n % len(sets)]), fetch=_sample)


def in_place(name: str, function: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Contestant:
    """A jitted function (weight, state, gradient) -> (weight, state), whose first two arguments are donated.

    Each call on a set takes the weight and state that the last call on it returned. So results of earlier calls are
    gone, and not waited for: the device runs calls in order.
    """
    jitted = jax.jit(function, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, [weight, state]) for weight, state, _ in sets]

    def call(n: int) -> Any:
        mine, (_, _, gradient) = held[n % len(held)], sets[n % len(held)]
        mine[:] = jitted(*mine, gradient)
        return tuple(mine)

    def wait(results: Any) -> None:
        jax.block_until_ready([x for x in jax.tree.leaves(results) if not x.is_deleted()])

    return Contestant(name, call, wait, fetch=lambda results: _sample(results[0]))


def by_torch(
    name: str, function: Callable[..., Any], sets: Sequence[Sequence[Any]], back: Callable[[Any], Any] = lambda x: x
) -> Contestant:
    """A function of PyTorch tensors; `back` brings its results into our layout, for comparison."""
    import torch

    return Contestant(
        name,
        lambda n: function(*sets[n % len(sets)]),
        wait=lambda _: torch.cuda.synchronize(),
        fetch=lambda results: _sample(jax.tree.map(lambda tensor: tensor.float().cpu().numpy(), back(results))),
        events=partial(torch.cuda.Event, enable_timing=True),
    )


def attention(sets: Sequence[Arrays], causal: bool) -> Iterator[Peer]:
    """The peers of flash attention on query, key and value [B, T, N, H] in bfloat16."""
    cudnn = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    yield Peer("jax cudnn", partial(by_jax, "jax cudnn", cudnn, sets))
    for name, backend in (("torch cudnn", "CUDNN_ATTENTION"), ("torch flash", "FLASH_ATTENTION")):
        yield Peer(name, partial(_sdpa, name, backend, sets, causal))
    for config in MOSAIC_CONFIGS[sets[0][0].shape[-1]]:
        name = "mosaic {}/{}/{}".format(*config)
        yield Peer(name, partial(_mosaic, name, sets, causal, config))


def attention_gradient(sets: Sequence[Arrays], causal: bool) -> Iterator[Peer]:
    """The peers of a training step: gradients by query, key and value, for a cotangent of the result."""
    query, key, *_ = sets[0]
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[1]
    for implementation in ("cudnn", "xla"):
        if implementation == "xla" and scores > MAX_SCORES:
            continue
        attention = partial(jax.nn.dot_product_attention, is_causal=causal, implementation=implementation)
        name = f"jax {implementation}"
        yield Peer(name, partial(by_jax, name, partial(loss_gradients, attention), sets))


def matmul(sets: Sequence[Arrays]) -> Iterator[Peer]:
    """The peers of a matrix product: cuBLAS (or a kernel of its own) by XLA's choice, and cuBLAS by PyTorch's."""
    yield Peer("xla", partial(by_jax, "xla", jnp.matmul, sets))
    yield Peer("torch", partial(_on_tensors, "torch", lambda x, w: x @ w, sets))


def copy(sets: Sequence[Arrays]) -> Iterator[Peer]:
    """Copies of one array; the fastest one measures the memory's bandwidth."""
    yield Peer("xla", partial(by_jax, "xla", jnp.copy, sets))
    yield Peer("torch", partial(_on_tensors, "torch", lambda x: x.clone(), sets))


def xla(function: Callable[..., Any], sets: Sequence[Arrays]) -> Iterator[Peer]:
    """The peer "xla": a formula, compiled by XLA."""
    yield from named({"xla": function}, sets)


def named(functions: Mapping[str, Callable[..., Any]], sets: Sequence[Arrays]) -> Iterator[Peer]:
    """Functions of JAX arrays, by name."""
    for name, function in functions.items():
        yield Peer(name, partial(by_jax, name, function, sets))


def _on_tensors(name: str, function: Callable[..., Any], sets: Sequence[Arrays]) -> Contestant:
    return by_torch(name, function, [[tensor(x) for x in arrays] for arrays in sets])


def _mosaic(name: str, sets: Sequence[Arrays], causal: bool, config: tuple[int, int, int]) -> Contestant:
    """JAX's Mosaic GPU kernel. It takes only float16 (jax 0.11.2) and no scale, so the query is scaled before."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    block_q, block_kv, steps = config
    tuning = attention_mgpu.TuningConfig(block_q, block_kv, steps, causal=causal)
    half = [
        [(q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(jnp.float16), *(x.astype(jnp.float16) for x in kv)]
        for q, *kv in sets
    ]
    return by_jax(name, lambda q, k, v: attention_mgpu.attention(q, k, v, tuning), half)


def _sdpa(name: str, backend: str, sets: Sequence[Arrays], causal: bool) -> Contestant:
    """PyTorch's attention, in its own layout [B, N, T, H]."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = [[tensor(x).transpose(1, 2).contiguous() for x in arrays] for arrays in sets]

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return by_torch(name, call, tensors, lambda tensor: tensor.transpose(1, 2))


def tensor(array: jax.Array) -> Any:
    """A PyTorch tensor on the same memory."""
    import torch

    if array.dtype == jnp.float8_e4m3fn:  # as bytes, which every version of PyTorch takes
        return tensor(jax.lax.bitcast_convert_type(array, jnp.uint8)).view(torch.float8_e4m3fn)
    return torch.from_dlpack(jax.block_until_ready(array))


def _sample(result: Any) -> np.ndarray:
    """float32[n] of every `STRIDE`th element of all results."""
    flat = [np.asarray(x).reshape(-1)[::STRIDE].astype(np.float32) for x in jax.tree.leaves(result)]
    return np.concatenate(flat)
