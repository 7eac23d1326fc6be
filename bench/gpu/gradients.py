"""Gradients of attention with any of its features: what is checked, and what is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tilekern.ir.types import kind_of
from tilekern.kernels.flash_attention import flash_attention, reference
from tilekern.kernels.flash_attention.cases import Case

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
    """One normal float32 array of some of a case's sizes."""

    def made(case: Case, random: np.random.Generator) -> list[Any]:
        return [random.standard_normal([getattr(case, dim) for dim in dims], np.float32)]

    return made


def _lengths(case: Case, random: np.random.Generator) -> list[Any]:
    """Of each sequence of the batch, some of them all of it."""
    return [random.integers(1, n + 2, case.batch, np.int32).clip(max=n) for n in (case.queries, case.keys)]


def _segments(case: Case, random: np.random.Generator) -> list[Any]:
    """Packed sequences."""
    return [np.sort(random.integers(0, 4, (case.batch, n), np.int32)) for n in (case.queries, case.keys)]


def _mask(case: Case, random: np.random.Generator) -> list[Any]:
    """With tiles that are full, partial and dead."""
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
      arrays: makes the arrays that it takes.
      keywords: what of these, and of constants, `flash_attention` and its reference are given.
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
    """An attention with a feature, like a `Case`; its arrays end with the cotangent of out, and the feature's own."""

    case: Case
    feature: str = ""

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.case.name} {self.feature}".strip()

    @property
    def keywords(self) -> dict[str, Any]:
        """Of the functions of `gradients_of`."""
        return {"feature": self.feature} if self.feature else {**self.case.keywords, "feature": ""}

    def arrays(self, key: jax.Array, dtype: Any) -> Arrays:
        """Query, key, value, the cotangent of out, and what the feature takes."""
        for_case, for_cotangent = jax.random.split(key)
        q, k, v = self.case.arrays(for_case, dtype)
        cotangent = jax.random.normal(for_cotangent, (*q.shape[:-1], v.shape[-1]), dtype)
        own = FEATURES[self.feature].arrays(self.case, np.random.default_rng(crc32(self.name.encode())))
        return [q, k, v, cotangent, *map(jnp.asarray, own)]

    def small(self) -> Featured:
        """The same for fast tests; a feature stays at the size that its tiles need."""
        return self if self.feature else Featured(self.case.small())


# --- functions --------------------------------------------------------------------------------------------------------


def gradients_of(attention: Callable[..., Any], *arrays: Any, feature: str = "", **keywords: Any) -> Arrays:
    """Out, logsumexp, and for a cotangent of out the gradients by query, key, value and the feature's float arrays.

    Args:
      attention: takes what `flash_attention` takes and returns (out, logsumexp).
      *arrays: those of `Featured.arrays`.
      feature: a name of `FEATURES`.
      **keywords: more of `attention`.
    """
    q, k, v, cotangent, *own = arrays
    inputs = [q, k, v, *own]
    floats = [n for n, x in enumerate(inputs) if kind_of(x.dtype) == "float"]

    def function(*some: Any) -> Any:
        q, k, v, *own = (some[floats.index(n)] if n in floats else x for n, x in enumerate(inputs))
        return attention(q, k, v, **FEATURES[feature].keywords(*own), **keywords)

    out, pull, logsumexp = jax.vjp(function, *(inputs[n] for n in floats), has_aux=True)
    return [out, logsumexp, *pull(cotangent)]


def ours(*arrays: Any, **keywords: Any) -> Arrays:
    """The gradients of `flash_attention`."""
    return gradients_of(partial(flash_attention, return_logsumexp=True), *arrays, **keywords)


def definition(*arrays: Any, feature: str = "", causal: bool = False, q_offset: int = 0, dtype: Any = None) -> Arrays:
    """The gradients of the reference, computed in a dtype."""
    known = {} if feature else {"causal": causal, "q_offset": q_offset}
    return gradients_of(reference, *arrays, feature=feature, **known, dtype=dtype)


def longest_sum(query: Any, key: Any, *others: Any) -> int:
    """The terms of the longest sum behind an element of the results."""
    del others
    group = query.shape[2] // key.shape[2]
    return query.shape[3] + key.shape[1] + query.shape[1] * group


def loss_gradients(attention: Callable[..., Any], *arrays: Any) -> Any:
    """The gradients by query, key and value alone of an attention that returns out, for a cotangent of it: a step."""
    *inputs, cotangent = arrays
    _, pull = jax.vjp(attention, *inputs)
    return pull(cotangent)
