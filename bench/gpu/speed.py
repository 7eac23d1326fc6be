"""The kernels against their peers: comparisons, their sizes and their aims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from bench import overhead
from bench.cross_entropy import naive as naive_cross_entropy
from bench.gpu import peers
from bench.gpu.clock import Contestant, by_host, measure
from bench.gpu.gradients import loss_gradients
from bench.gpu.item import Item, Record, lowerings_of
from bench.gpu.kernels import product as product_of
from bench.gpu.peers import Peer, by_jax
from bench.gpu.warp_specialised import GLUON
from bench.timing import dispatch_medians
from tilekern.kernels import cross_entropy, flash_attention, layer_norm, ragged_dot, rms_norm, rope, softmax, swiglu
from tilekern.kernels.cross_entropy.cases import CASES as LOSSES
from tilekern.kernels.layer_norm import reference as layer_norm_reference
from tilekern.kernels.ragged_dot.cases import CASES as GROUPS
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.swiglu import reference as swiglu_reference
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target

OURS = "tilekern"
SET_BYTES = 256 << 20
"""Bytes of all input sets together, at least: several times the L2 cache, so that no call finds its inputs there."""

MAX_SETS = 8
TOKENS, HIDDEN = 16384, 2048  # of attention at all lengths, the setting of the papers on FlashAttention
AGREE = 0.03
"""Limit of ‖ours - peer‖ / ‖peer‖ for the nearest peer: several times the usual difference of bfloat16 results."""


@dataclass(frozen=True)
class Comparison(Item):
    """One kernel on one size.

    Attributes:
      name: unique name in the plan.
      ours: tilekern's function; None for a comparison of peers alone.
      arrays: makes inputs from a key; an input may be a tree of arrays.
      peers: makes the peers for input sets.
      flops: floating-point operations of one call.
      aim: the speed that we want, relative to the best of the peers whose name contains `aim_of`; if `aim_of` is
        "copy", relative to the bandwidth of a copy.
      seconds: estimate of its time.
      tags: more entries of the record.
      contestant: makes a contestant of a name, tilekern's function and the input sets.
    """

    name: str
    ours: Callable[..., Any] | None
    arrays: Callable[[jax.Array], Sequence[jax.Array]]
    peers: Callable[[Sequence[Sequence[jax.Array]]], Iterator[Peer]]
    flops: float = 0.0
    aim: float | None = None
    aim_of: str = ""
    seconds: float = 10.0
    tags: Record = field(default_factory=dict)
    contestant: Callable[..., Contestant] = by_jax

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        if self.ours is not None:
            yield from lowerings_of(self.ours, jax.eval_shape(self.arrays, jax.random.key(0)), target)

    def run(self, seed: int, prepared: Any) -> Record:
        types = jax.eval_shape(self.arrays, jax.random.key(0))
        input_bytes = _nbytes(types)
        count = max(2, min(MAX_SETS, math.ceil(SET_BYTES / input_bytes)))
        key = jax.random.key(crc32(self.name.encode()) ^ (seed & 0xFFFFFFFF))
        arrays = jax.jit(self.arrays)
        sets = jax.block_until_ready([arrays(k) for k in jax.random.split(key, count)])
        contestants = [_made(peer) for peer in self._contestants(sets)]
        differences = _differences(contestants)
        if self.tags and contestants[0].error.startswith("ResourceError"):
            # A variant too large for the GPU is no failure.
            return {"refused": contestants[0].error, **self.tags}
        measure([c for c in contestants if not c.error])
        record: Record = {
            "flops": self.flops,
            "bytes": input_bytes + self._output_bytes(types, contestants[0]),
            "aim": self.aim,
            "aim_of": self.aim_of,
            "contestants": {c.name: c.record() for c in contestants},
            "differences": differences,
            **self.tags,
        }
        if self.ours is not None and contestants[0].error:
            record |= {"ok": False, "text": contestants[0].error}
        elif differences:
            record["ok"] = bool(min(differences.values()) <= AGREE)
        return record

    def launch(self, seed: int) -> None:
        if self.ours is not None:
            error = replace(self, peers=lambda sets: iter(())).run(seed, None).get("text")
            if error:
                raise RuntimeError(error)

    def _contestants(self, sets: Sequence[Sequence[jax.Array]]) -> Iterator[Peer]:
        if self.ours is not None:
            yield Peer(OURS, partial(self.contestant, OURS, self.ours, sets))
        yield from self.peers(sets)

    def _output_bytes(self, types: Sequence[Any], ours: Contestant) -> int:
        """Bytes of the output; bytes of the input for a copy, and for a function that failed."""
        if self.ours is None or ours.error:
            return _nbytes(types)
        return _nbytes(jax.eval_shape(self.ours, *types))


@dataclass(frozen=True)
class Clocks(Item):
    """A matrix product, timed by the profiler and by the host's clock; if they disagree, trust no number."""

    name: str = "clocks"
    size: int = 8192

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        yield from ()

    def run(self, seed: int, prepared: Any) -> Record:
        x = jax.random.normal(jax.random.key(seed & 0xFFFFFFFF), (self.size, self.size), jnp.bfloat16)
        contestant = peers.by_jax("xla", jnp.matmul, [[x, x]])
        measure([contestant])
        return {"by_method_us": {contestant.method: 1e6 * contestant.median, "host": 1e6 * by_host(contestant, 4)}}

    def launch(self, seed: int) -> None:
        """Nothing of tilekern runs."""


@dataclass(frozen=True)
class Dispatch(Item):
    """The host's part of a call: a kernel of one small program against a plain jitted function."""

    name: str = "dispatch"

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        x = jax.ShapeDtypeStruct((8,), jnp.float32)
        yield from lowerings_of(overhead.add, [x, x], target)

    def run(self, seed: int, prepared: Any) -> Record:
        x, y = jnp.arange(8.0), jnp.ones(8)
        plain, jitted = jax.jit(lambda x, y: x + y), jax.jit(overhead.add)
        calls = {"plain": plain, "eager": overhead.add, "jitted": jitted}
        seconds = dispatch_medians({name: partial(f, x, y) for name, f in calls.items()}, rounds=30)
        return {"dispatch_us": {name: 1e6 * s for name, s in seconds.items()}}

    def launch(self, seed: int) -> None:
        self.run(seed, None)


def _made(peer: Peer) -> Contestant:
    try:
        return peer.make()
    except Exception as error:
        return Contestant(peer.name, call=lambda n: None, error=f"{type(error).__name__}: {error}"[:500])


def _differences(contestants: Sequence[Contestant]) -> dict[str, float]:
    """`‖ours - peer‖ / ‖peer‖` for each peer; a contestant that fails is not timed."""
    results: dict[str, np.ndarray] = {}
    for c in contestants:
        try:
            if not c.error:
                results[c.name] = c.fetch(c.call(0))
        except Exception as error:
            c.error = f"{type(error).__name__}: {error}"[:500]
    ours = results.pop(OURS, None)
    if ours is None:
        return {}
    return {name: _relative(ours, peer) for name, peer in results.items() if peer.shape == ours.shape}


def _relative(ours: np.ndarray, peer: np.ndarray) -> float:
    difference = float(np.linalg.norm(ours - peer) / np.linalg.norm(peer))
    return difference if math.isfinite(difference) else 1e9


def _nbytes(types: Any) -> int:
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in jax.tree.leaves(types))


# --- comparisons ------------------------------------------------------------------------------------------------------


def attention_arrays(key: jax.Array, *, length: int, width: int) -> list[jax.Array]:
    """Query, key and value [B, T, N, H] in bfloat16, with the same B·T and N·H at all lengths and widths."""
    shape = (TOKENS // length, length, HIDDEN // width, width)
    return [jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(key, 3)]


def attention_flops(length: int, causal: bool) -> float:
    """Flops of the forward pass: two products of every query with every key; half as many if causal."""
    return 4.0 * TOKENS * length * HIDDEN * (0.5 if causal else 1.0)


def attention(length: int, width: int, causal: bool) -> Comparison:
    """Flash attention, forward."""
    aimed = width == 128 and length >= 4096
    return Comparison(
        f"attention d{width} s{length} {'causal' if causal else 'full'}",
        partial(flash_attention, causal=causal),
        partial(attention_arrays, length=length, width=width),
        partial(peers.attention, causal=causal),
        attention_flops(length, causal),
        0.65 if aimed else None,
        "cudnn",
    )


def gradient_arrays(key: jax.Array, *, length: int, width: int) -> list[jax.Array]:
    """The arrays of `attention_arrays`, and a cotangent of the result."""
    for_arrays, for_cotangent = jax.random.split(key)
    query, *kv = attention_arrays(for_arrays, length=length, width=width)
    return [query, *kv, jax.random.normal(for_cotangent, query.shape, query.dtype)]


def attention_gradient(length: int, width: int, causal: bool) -> Comparison:
    """Flash attention, forward and backward; the backward pass has five products where the forward pass has two."""
    forward = attention(length, width, causal)
    return Comparison(
        f"{forward.name} gradient",
        partial(loss_gradients, partial(flash_attention, causal=causal)),
        partial(gradient_arrays, length=length, width=width),
        partial(peers.attention_gradient, causal=causal),
        3.5 * forward.flops,
    )


def product_arrays(key: jax.Array, *, size: int) -> list[jax.Array]:
    """Two square matrices in bfloat16."""
    return [jax.random.normal(k, (size, size), jnp.bfloat16) for k in jax.random.split(key)]


def product(size: int) -> Comparison:
    """A matrix product."""
    arrays = partial(product_arrays, size=size)
    return Comparison(f"matmul {size}", product_of, arrays, peers.matmul, 2.0 * size**3, 0.85, "")


def by_gluon(base: Comparison) -> Comparison:
    """The comparison with warp-specialised programs in the place of ours, without an aim."""
    assert base.ours is not None
    return replace(base, name=f"{base.name} by gluon", ours=partial(base.ours, target=GLUON), aim=None)


def normal(key: jax.Array, *, shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """Standard normal arrays."""
    return [jax.random.normal(k, s, dtype) for k, s in zip(jax.random.split(key, len(shapes)), shapes, strict=True)]


def against_xla(name: str, ours: Any, theirs: Any, *shapes: tuple[int, ...], aim: float | None = 0.8) -> Comparison:
    """A memory-bound kernel against the same formula compiled by XLA."""
    return Comparison(
        f"{name} {'×'.join(map(str, shapes[0]))}",
        ours,
        partial(normal, shapes=shapes),
        partial(peers.xla, theirs),
        aim=aim,
        aim_of="copy",
    )


def rows() -> list[Comparison]:
    """Memory-bound kernels of rows: rows that fit a tile, then longer ones."""
    wide, long = (16384, 4096), (1024, 50257)
    softmaxes = [against_xla("softmax", softmax, jax.nn.softmax, shape) for shape in (wide, long)]
    return [
        softmaxes[0],
        against_xla("rms_norm", rms_norm, rms_norm_reference, wide, wide[1:]),
        against_xla("layer_norm", layer_norm, layer_norm_reference, wide, wide[1:], wide[1:]),
        against_xla("swiglu", swiglu, swiglu_reference, (8192, 14336), (8192, 14336)),
        against_xla("rope", rope, rope_reference, (4, 4096, 32, 128)),
        softmaxes[1],
    ]


def ceilings() -> list[Item]:
    """The limits of the machine: bandwidth of a copy, and a matrix product."""
    copy = Comparison("ceiling copy", None, lambda key: [jax.random.bits(key, (1 << 28,))], peers.copy)
    return [copy, Clocks()]


def mean_gradients(loss: Any, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
    """The gradients by hidden and weight of the mean of a loss."""
    return jax.grad(lambda h, w: loss(h, w, labels).mean(dtype=jnp.float32), (0, 1))(hidden, weight)


def others() -> list[Comparison]:
    """Grouped products and the loss, at sizes of real models."""
    (groups,) = (case for case in GROUPS if case.name == "mixtral_8x7b_up")
    (loss,) = (case for case in LOSSES if case.name == "llama2_7b")
    return [
        Comparison(
            f"ragged_dot {groups.name}",
            ragged_dot,
            partial(groups.arrays, dtype=jnp.bfloat16),
            partial(peers.xla, jax.lax.ragged_dot),
            2.0 * groups.rows * groups.inner * groups.columns,
        ),
        Comparison(
            f"cross_entropy {loss.name}",
            cross_entropy,
            partial(loss.arrays, dtype=jnp.bfloat16),
            partial(peers.xla, naive_cross_entropy),
            2.0 * loss.tokens * loss.width * loss.vocabulary,
        ),
        Comparison(
            f"cross_entropy {loss.name} gradient",
            partial(mean_gradients, cross_entropy),
            partial(loss.arrays, dtype=jnp.bfloat16),
            partial(peers.xla, partial(mean_gradients, naive_cross_entropy)),
            6.0 * loss.tokens * loss.width * loss.vocabulary,
        ),
    ]
