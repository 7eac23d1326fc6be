"""Tuning: variants of blocks, warps and stages, each timed against the same peer, from which schedules are chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from bench.gpu import peers
from bench.gpu.peers import Peer
from bench.gpu.speed import Comparison, attention, attention_gradient, product
from bench.gpu.warp_specialised import GLUON, has_gluon
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.backward import flash_attention_backward_key, flash_attention_backward_query
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.matmul import matmul
from tilekern.lower.triton.compile.toolchain import has_clusters

ATTENTION = {"block_q": (64, 128), "block_k": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
BACKWARD = {"block_q": (32, 64, 128), "block_k": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)}
BACKWARDS = {"query": (flash_attention_backward_query, 1.5), "key": (flash_attention_backward_key, 2.0)}
"""The kernels of the backward pass, and their flops relative to the forward pass."""

MATMUL = {
    "block_m": (64, 128, 256),
    "block_n": (128, 256),
    "block_k": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 4, 5),
}
# For the Gluon emitter: blocks of one warpgroup, and warps of all that compute.
GLUON_ATTENTION = {"block_q": (64,), "block_k": (64, 128), "num_warps": (8, 12), "num_stages": (2, 3)}
GLUON_MATMUL = {
    "block_m": (64, 128),
    "block_n": (128, 256),
    "block_k": (64, 128),
    "num_warps": (8, 12),
    "num_stages": (2, 3, 4),
}
# On clusters of two thread blocks, which divide the rows.
GLUON_CLUSTERS = {**GLUON_MATMUL, "block_m": (128,), "num_ctas": (2,)}
LENGTHS, WIDTHS, SIZES = (1024, 4096, 16384), (64, 128, 256), (4096, 8192)


def variants(kernel: str) -> Iterator[Comparison]:
    """All variants on all sizes: choose with --only, e.g. "d128 s4096 causal"."""
    if kernel == "matmul":
        of_clusters = _of_gluon(GLUON_CLUSTERS) if has_clusters() else ()
        for size, options in itertools.product(SIZES, (*_options(MATMUL), *_of_gluon(GLUON_MATMUL), *of_clusters)):
            yield _variant(product(size), partial(_product, options=options), options, _first_product)
        return
    if kernel == "backward":
        yield from _backwards()
        return
    for length, width, causal in itertools.product(LENGTHS, WIDTHS, (False, True)):
        for options in (*_options(ATTENTION), *_of_gluon(GLUON_ATTENTION)):
            ours = partial(_forward, causal=causal, options=options)
            peer = partial(_first_cudnn, causal=causal)
            yield _variant(attention(length, width, causal), ours, options, peer)


def _backwards() -> Iterator[Comparison]:
    """Each backward kernel alone, without peers: backward kernels of other libraries cannot be timed alone."""
    for length, width, causal in itertools.product(LENGTHS, WIDTHS, (False, True)):
        forward, base = attention(length, width, causal), attention_gradient(length, width, causal)
        for (name, (_, share)), options in itertools.product(BACKWARDS.items(), _options(BACKWARD)):
            alone = replace(base, name=f"{base.name} {name}", flops=share * forward.flops)
            yield _variant(alone, partial(_backward, name=name, causal=causal, options=options), options, _no_peers)


def _of_gluon(choices: dict[str, tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """Variants of the Gluon emitter, on GPUs that it emits for."""
    for options in _options(choices) if has_gluon() else ():
        yield {**options, "target": GLUON}


def _variant(base: Comparison, ours: Callable[..., Any], options: dict[str, Any], peer: Any) -> Comparison:
    name = " ".join(f"{name.removeprefix('block_').removeprefix('num_')}{value}" for name, value in options.items())
    tags = {"tuned": base.name, **options}
    return Comparison(f"tune {base.name} {name}", ours, base.arrays, peer, base.flops, seconds=3.0, tags=tags)


def _options(choices: dict[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _product(x: Any, w: Any, *, options: dict[str, Any]) -> Any:
    return matmul(x, w, **options)


def _first_product(sets: Any) -> Iterator[Peer]:
    return itertools.islice(peers.matmul(sets), 1)


def _forward(query: Any, key: Any, value: Any, *, causal: bool, options: dict[str, Any]) -> Any:
    """The forward kernel itself, because the public function takes blocks, but no warps and stages."""
    out, _, _ = flash_attention_forward(
        *(query, key, value, Extras()),
        config=Config(scale=1 / math.sqrt(query.shape[-1]), causal=causal),
        return_logsumexp=False,
        **options,
    )
    return out


def _backward(
    query: Any, key: Any, value: Any, cotangent: Any, *, name: str, causal: bool, options: dict[str, int]
) -> Any:
    """A backward kernel itself, with the residuals of rows whose scores are all equal."""
    kernel, _ = BACKWARDS[name]
    base = jnp.full(query.shape[:3], math.log2(key.shape[1]))
    return kernel(
        *(query, key, value, Extras(), Residuals(jnp.zeros_like(base), base), cotangent, jnp.zeros_like(base)),
        config=Config(scale=1 / math.sqrt(query.shape[-1]), causal=causal),
        **options,
    )


def _no_peers(sets: Any) -> Iterator[Peer]:
    del sets
    yield from ()


def _first_cudnn(sets: Any, causal: bool) -> Iterator[Peer]:
    return itertools.islice(peers.attention(sets, causal), 2)
