"""Gradients of any function, of attention with each of its features, and of losses, for checks and for timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tilekern.ir.types import kind_of
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.cases import Case
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference

Arrays = list[jax.Array]


# --- features ---------------------------------------------------------------------------------------------------------


def _alibi(slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    del b
    return s - slopes[n] * abs(i - j)


def _prefix(b: Any, n: Any, i: Any, j: Any) -> Any:
    del b, n
    return (j < 150) | (j <= i)


def _relative(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    del b, n
    return s + table[i, j]


def _normal(*dims: str) -> Callable[[Case, np.random.Generator], list[Any]]:
    """A function that makes a list of one normal float32 array, whose dims are the named sizes of a case."""

    def normal(case: Case, random: np.random.Generator) -> list[Any]:
        return [random.standard_normal([getattr(case, dim) for dim in dims], np.float32)]

    return normal


def _lengths(case: Case, random: np.random.Generator) -> list[Any]:
    """int32[B] lengths of the sequences of queries, and of keys; some sequences are full."""
    return [random.integers(1, n + 2, case.batch, np.int32).clip(max=n) for n in (case.queries, case.keys)]


def _segments(case: Case, random: np.random.Generator) -> list[Any]:
    """int32[B, T] and int32[B, S] segment ids of packed sequences, each sorted along its sequence."""
    return [np.sort(random.integers(0, 4, (case.batch, n), np.int32)) for n in (case.queries, case.keys)]


def _mask(case: Case, random: np.random.Generator) -> list[Any]:
    """A mask bool[1, T, S] with full, partial and empty tiles."""
    mask = random.random((1, case.queries, case.keys)) < 0.9
    mask[:, :128, 128:256], mask[:, 128:, :128] = False, True
    return [mask]


def _key(case: Case, random: np.random.Generator) -> list[Any]:
    del case
    return [random.integers(0, 2**32, 2, np.uint32)]


def _none(case: Case, random: np.random.Generator) -> list[Any]:
    del case, random
    return []


@dataclass(frozen=True)
class Feature:
    """A feature of attention.

    Attributes:
      arrays: makes the arrays of the feature.
      keywords: makes the keywords of `flash_attention` and its reference from these arrays.
    """

    arrays: Callable[[Case, np.random.Generator], list[Any]]
    keywords: Callable[..., dict[str, Any]]


FEATURES = {
    "": Feature(_none, dict),
    "bias": Feature(_normal("heads", "queries", "keys"), lambda x: {"bias": x[None]}),
    "mask": Feature(_mask, lambda x: {"mask": x[None]}),
    "window": Feature(_none, lambda: {"window": (100, 30), "q_offset": 17}),
    "segments": Feature(_segments, lambda *ids: {"segment_ids": ids}),
    "lengths": Feature(_lengths, lambda q, kv: {"q_lengths": q, "kv_lengths": kv}),
    "softcap": Feature(_none, lambda: {"softcap": 3.0}),
    "sinks": Feature(_normal("heads"), lambda x: {"sinks": x, "causal": True, "q_offset": -5}),
    "dropout": Feature(_key, lambda x: {"dropout_rate": 0.2, "dropout_key": x}),
    "alibi": Feature(_normal("heads"), lambda x: {"score_mod": Partial(_alibi, x)}),
    "relative": Feature(_normal("queries", "keys"), lambda x: {"score_mod": Partial(_relative, x)}),
    "prefix": Feature(_none, lambda: {"mask_mod": _prefix}),
}


@dataclass(frozen=True)
class Featured:
    """A case of attention with a feature; its arrays end with the cotangent of out and the feature's own arrays."""

    case: Case
    feature: str = ""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.case.name} {self.feature}".strip()

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of `ours` and `definition`."""
        return {"feature": self.feature} if self.feature else {**self.case.keywords, "feature": ""}

    def arrays(self, key: jax.Array, dtype: Any) -> Arrays:
        """Query, key, value, the cotangent of out, and the arrays of the feature."""
        for_case, for_cotangent = jax.random.split(key)
        q, k, v = self.case.arrays(for_case, dtype)
        cotangent = jax.random.normal(for_cotangent, (*q.shape[:-1], v.shape[-1]), dtype)
        own = FEATURES[self.feature].arrays(self.case, np.random.default_rng(crc32(self.name.encode())))
        return [q, k, v, cotangent, *map(jnp.asarray, own)]

    def small(self) -> Featured:
        """A smaller case for fast tests; one with a feature keeps the size that its tiles need."""
        return self if self.feature else Featured(self.case.small())


# --- functions --------------------------------------------------------------------------------------------------------


def gradients_of(attention: Callable[..., Any], *arrays: Any, feature: str = "", **keywords: Any) -> Arrays:
    """Compute out, logsumexp, and the gradients by query, key, value and the feature's float arrays.

    Args:
      attention: has the arguments of `flash_attention` and returns (out, logsumexp).
      *arrays: the arrays of `Featured.arrays`, the cotangent of out among them.
      feature: a name in `FEATURES`.
      **keywords: other keywords of `attention`.
    """
    q, k, v, cotangent, *own = arrays
    inputs = [q, k, v, *own]
    floats = [n for n, x in enumerate(inputs) if kind_of(x.dtype) == "float"]

    def function(*some: Any) -> Any:
        q, k, v, *own = (some[floats.index(n)] if n in floats else x for n, x in enumerate(inputs))
        return attention(q, k, v, **FEATURES[feature].keywords(*own), **keywords)

    out, pull, logsumexp = jax.vjp(function, *(inputs[n] for n in floats), has_aux=True)
    return [out, logsumexp, *pull(cotangent)]


def ours(*arrays: Any, target: str | None = None, **keywords: Any) -> Arrays:
    """The gradients of `flash_attention`."""
    return gradients_of(partial(flash_attention, return_logsumexp=True, target=target), *arrays, **keywords)


def definition(*arrays: Any, feature: str = "", causal: bool = False, q_offset: int = 0, dtype: Any = None) -> Arrays:
    """The gradients of the reference, computed in a dtype."""
    masking = {} if feature else {"causal": causal, "q_offset": q_offset}
    return gradients_of(reference, *arrays, feature=feature, **masking, dtype=dtype)


def longest_sum(query: Any, key: Any, *unused: Any) -> int:
    """Number of terms of the longest sum behind an element of the results."""
    del unused
    group = query.shape[2] // key.shape[2]
    return query.shape[3] + key.shape[1] + query.shape[1] * group


def loss_gradients(attention: Callable[..., Any], *arrays: Any, **keywords: Any) -> Any:
    """The gradients of a training step: by query, key and value, for a cotangent of out.

    Args:
      attention: returns out alone.
      *arrays: query, key, value, cotangent.
      **keywords: further arguments of `attention`.
    """
    *inputs, cotangent = arrays
    _, pull = jax.vjp(partial(attention, **keywords), *inputs)
    return pull(cotangent)


def of_loss(loss: Callable[..., Any], hidden: Any, weight: Any, labels: Any, **keywords: Any) -> Arrays:
    """Compute loss, logsumexp, and the gradients by hidden and weight for cotangents that differ between tokens.

    Args:
      loss: has the arguments of `cross_entropy` and returns (loss, logsumexp).
      hidden: the loss's hidden[T, D].
      weight: the loss's weight[D, V].
      labels: the loss's labels[T].
      **keywords: other keywords of `loss`.
    """

    def of_floats(hidden: Any, weight: Any) -> Any:
        return loss(hidden, weight, labels, **keywords)

    out, pull = jax.vjp(of_floats, hidden, weight)
    odd = jnp.arange(labels.shape[0]) % 2 == 1
    cotangents = tuple(jnp.where(odd, a, b).astype(x.dtype) for x, a, b in zip(out, (1, 0.25), (-0.5, 1), strict=True))
    return [*out, *pull(cotangents)]


# --- any function -----------------------------------------------------------------------------------------------------


def with_gradients(function: Callable[..., Any], *arrays: Any, **keywords: Any) -> Arrays:
    """Compute the results of a function, and their gradients by its float arrays, for cotangents that differ."""
    return pulled(partial(function, **keywords), arrays)


def step(function: Callable[..., Any], *arrays: Any, used: int = 1) -> Arrays:
    """Compute the first `used` results of a function, and its gradients by the float arrays.

    The last `used` arrays are the cotangents of the results.
    """
    inputs, cotangents = arrays[:-used], arrays[-used:]

    def first(*arrays: Any) -> Any:
        return jax.tree.leaves(function(*arrays))[:used]

    return pulled(first, inputs, cotangents)


def pulled(function: Callable[..., Any], arrays: Sequence[Any], cotangents: Sequence[Any] | None = None) -> Arrays:
    """Compute the results of a function, then its gradients by float arrays; None: for `_different` cotangents."""
    floats = [n for n, x in enumerate(arrays) if kind_of(x.dtype) == "float"]

    def of_floats(*some: Any) -> Any:
        return function(*(some[floats.index(n)] if n in floats else x for n, x in enumerate(arrays)))

    out, pull = jax.vjp(of_floats, *(arrays[n] for n in floats))
    results, tree = jax.tree.flatten(out)
    seeds = map(_different, results) if cotangents is None else cotangents
    return [*results, *pull(tree.unflatten([c.astype(x.dtype) for c, x in zip(seeds, results, strict=True)]))]


def _different(out: Any) -> Any:
    """Quarters from -3/4 to 3/4, which are numbers of every float dtype."""
    return ((jnp.arange(out.size) % 7 - 3) / 4).reshape(out.shape)
