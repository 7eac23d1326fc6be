"""Random attentions with any of the features at once, and the check of their values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.tree_util import Partial

from tilekern.ir.types import kind_of
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close

# --- functions of scores and positions ------------------------------------------------------------------------------


def alibi(slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    """Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409."""
    return s + slopes[n] * (j - i)


def relative(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s - 0.125 * abs(i - j)


def gated(gates: Any, shifts: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s * gates[i] + shifts[j]


def tabled(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[n, i, j]


def tempered(temperatures: Any, least: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s * temperatures[b, n] + least


def prefix(b: Any, n: Any, i: Any, j: Any) -> Any:
    return (j < 5) | (j <= i)


def checkerboard(b: Any, n: Any, i: Any, j: Any) -> Any:
    return (i + j + n) % 2 == 0


def prefixes(lengths: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return (j < lengths[b]) | (j <= i)


def kept_keys(kept: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return jnp.asarray(kept)[j] & (i >= 0)


def nothing(b: Any, n: Any, i: Any, j: Any) -> Any:
    return i + j < 0


# --- random problems ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Featured:
    """`flash_attention(q, k, v, **arrays, **statics)` and `reference` of the same are both valid.

    All arrays are NumPy's, but for typed keys. Functions that carry arrays are among these, the others among `statics`.
    Equal to itself alone, so that caches tell one from another.
    """

    q: Any
    k: Any
    v: Any
    arrays: dict[str, Any] = field(default_factory=dict)
    statics: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        """All arrays by name, a pytree."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.arrays}


@dataclass(frozen=True)
class _Sizes:
    """Sizes and random numbers that the strategies below share."""

    batch: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    dtype: Any
    random: np.random.Generator

    def normal(self, *shape: int, dtype: Any = None) -> Any:
        return self.random.standard_normal(shape).astype(dtype or self.dtype)

    @property
    def wide(self) -> Any:
        """The dtype of tables."""
        return np.float64 if self.dtype == np.float64 else np.float32

    def broadcast(self, draw: Any) -> tuple[int, ...]:
        """The shape of a bias or a mask: some dims are 1."""
        full = *self.batch, self.heads, self.queries, self.keys
        return tuple(1 if draw(st.booleans()) else size for size in full)


@st.composite
def features(draw: Any, dtype: Any = "float32", longest: int = 70) -> Featured:
    """Any combination of features, so few at a time that most rows attend to something; lengths up to `longest`."""
    lengths = sorted({n for n in (0, 1, 2, 5, 16, 17, 31, 32, 33, 48, 64, 67, 70, longest) if n <= longest})
    batch = draw(st.sampled_from([(2,), ()]))
    queries, keys = (draw(st.sampled_from(lengths[::-1])) for _ in range(2))
    heads, groups = draw(st.sampled_from([(4, 2), (1, 1), (2, 2), (2, 1), (4, 1), (4, 4)]))
    width, value_width = (draw(st.sampled_from([8, 4, 20])) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    sizes = _Sizes(batch, queries, keys, heads, jnp.dtype(dtype), random)
    q, k, v = (
        sizes.normal(*batch, length, count, size)
        for length, count, size in ((queries, heads, width), (keys, groups, width), (keys, groups, value_width))
    )
    least = draw(st.sampled_from([0, 2, 4]))
    chosen = draw(st.lists(st.sampled_from(sorted(_STRATEGIES)), unique=True, min_size=least, max_size=7))
    found = {name: draw(_STRATEGIES[name](sizes)) for name in chosen}
    if "dropout_key" in found:
        found["dropout_rate"] = draw(st.sampled_from([0.25, 0.1, 0.5]))
        found["dropout_broadcast"] = draw(st.booleans())
    if "bias" in found and "score_mod" in found:  # 0 * -inf would be the derivative by what a score is multiplied with
        found["bias"] = np.where(np.isinf(found["bias"]), np.zeros_like(found["bias"]), found["bias"])
    if draw(st.booleans()):
        q = _spoiled(q, found.get("q_lengths"))
        k, v = (_spoiled(x, found.get("kv_lengths")) for x in (k, v))
    arrays = {name: value for name, value in found.items() if _has_arrays(value)}
    return Featured(q, k, v, arrays, {name: value for name, value in found.items() if name not in arrays})


def _has_arrays(value: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))


def _spoiled(x: Any, lengths: Any) -> Any:
    """x[*B, T, N, H] with NaN in its padding."""
    if lengths is None:
        return x
    padding = np.arange(x.shape[-3]) >= lengths[..., None]
    return np.where(padding[..., None, None], np.asarray(np.nan, x.dtype), x)


@st.composite
def _biases(draw: Any, sizes: _Sizes) -> Any:
    """Of the inputs' dtype or of float32; some elements are -inf, which masks unless a softcap follows."""
    bias = sizes.normal(*sizes.broadcast(draw), dtype=draw(st.sampled_from([sizes.dtype, sizes.wide])))
    masked = sizes.random.random(bias.shape) < draw(st.sampled_from([0.0, 0.1]))
    return np.where(masked, np.asarray(-np.inf, bias.dtype), bias)


@st.composite
def _masks(draw: Any, sizes: _Sizes) -> Any:
    return sizes.random.random(sizes.broadcast(draw)) < draw(st.sampled_from([0.7, 0.1, 1.0]))


@st.composite
def _offsets(draw: Any, sizes: _Sizes) -> Any:
    """An int, one for all of the batch, or one for each element of it."""
    shape = draw(st.sampled_from([None, (), sizes.batch]))
    offset = sizes.random.integers(-sizes.queries - 1, sizes.keys + 2, shape or (), np.int32)
    return int(offset) if shape is None else np.asarray(offset)


@st.composite
def _windows(draw: Any, sizes: _Sizes) -> Any:
    sides = st.sampled_from([None, 0, 1, 9, 40])
    return draw(sides), draw(sides)


@st.composite
def _segments(draw: Any, sizes: _Sizes) -> Any:
    """Packed sequences, whose ids ascend; or any ids."""
    ids = [sizes.random.integers(0, 4, (*sizes.batch, size), np.int32) for size in (sizes.queries, sizes.keys)]
    if draw(st.booleans()):
        ids = [np.sort(x, axis=-1) for x in ids]
    return ids[0] if sizes.queries == sizes.keys and draw(st.booleans()) else tuple(ids)


def _lengths(size: int, batch: tuple[int, ...], random: np.random.Generator) -> st.SearchStrategy[Any]:
    """Of each element of the batch; beyond the end is all."""
    return st.builds(lambda: np.asarray(random.integers(0, size + 3, batch, np.int32)))


@st.composite
def _sinks(draw: Any, sizes: _Sizes) -> Any:
    return sizes.normal(sizes.heads, dtype=draw(st.sampled_from([sizes.wide, sizes.dtype])))


@st.composite
def _keys(draw: Any, sizes: _Sizes) -> Any:
    """Raw or typed."""
    key = jax.random.key(draw(st.integers(0, 2**16)), impl="threefry2x32")
    return key if draw(st.booleans()) else np.asarray(jax.random.key_data(key))


@st.composite
def _score_mods(draw: Any, sizes: _Sizes) -> Any:
    batch = int(np.prod(sizes.batch))
    kind = draw(st.sampled_from([relative, alibi, gated, tabled, tempered]))
    carried = {
        relative: lambda: (),
        alibi: lambda: (abs(sizes.normal(sizes.heads, dtype=sizes.wide)) / 4,),
        gated: lambda: (sizes.normal(sizes.queries), sizes.normal(sizes.keys, dtype=sizes.wide)),
        tabled: lambda: (sizes.normal(sizes.heads, sizes.queries, sizes.keys),),
        tempered: lambda: (1 + sizes.random.random((batch, sizes.heads)).astype(sizes.wide), sizes.wide(0.5)),
    }
    arrays = carried[kind]()
    return Partial(kind, *map(np.asarray, arrays)) if arrays else kind


@st.composite
def _mask_mods(draw: Any, sizes: _Sizes) -> Any:
    batch = int(np.prod(sizes.batch))
    kind = draw(st.sampled_from([prefix, checkerboard, prefixes, kept_keys, nothing]))
    carried = {
        prefixes: lambda: sizes.random.integers(0, sizes.keys + 1, batch, np.int32),
        kept_keys: lambda: sizes.random.random(sizes.keys) < 0.7,
    }
    return Partial(kind, carried[kind]()) if kind in carried else kind


_STRATEGIES: dict[str, Callable[[_Sizes], st.SearchStrategy[Any]]] = {
    "bias": _biases,
    "mask": _masks,
    "scale": lambda sizes: st.sampled_from([0.25, 1.0, -0.5]),
    "causal": lambda sizes: st.just(True),
    "q_offset": _offsets,
    "window": _windows,
    "segment_ids": _segments,
    "q_lengths": lambda sizes: _lengths(sizes.queries, sizes.batch, sizes.random),
    "kv_lengths": lambda sizes: _lengths(sizes.keys, sizes.batch, sizes.random),
    "softcap": lambda sizes: st.sampled_from([2.0, 10.0]),
    "sinks": _sinks,
    "mask_mod": _mask_mods,
    "score_mod": _score_mods,
    "dropout_key": _keys,
}


# --- values and gradients, and their check --------------------------------------------------------------------------


def values(function: Callable[..., Any], featured: Featured, **more: Any) -> dict[str, Any]:
    """Out and logsumexp as NumPy arrays.

    `function` takes what `flash_attention` takes and `more`, and returns (out, logsumexp): `reference` itself, or
    `partial(flash_attention, return_logsumexp=True)`.
    """
    loss, arguments, _ = loss_of(function, featured, **more)
    with jax.enable_x64(featured.q.dtype == np.float64):
        _, (out, logsumexp) = jax.jit(loss, compiler_options=_QUICK)(*arguments)
    return {"out": np.asarray(out), "logsumexp": np.asarray(logsumexp)}


def grads(function: Callable[..., Any], featured: Featured, **more: Any) -> dict[str, Any]:
    """Like `values`, and the gradients of a loss with respect to all float arrays, by name."""
    loss, arguments, names = loss_of(function, featured, **more)
    with jax.enable_x64(featured.q.dtype == np.float64):
        gradients, (out, logsumexp) = jax.jit(jax.grad(loss, has_aux=True), compiler_options=_QUICK)(*arguments)
    found = {"out": out, "logsumexp": logsumexp, **dict(zip(names, gradients, strict=True))}
    return {name: np.asarray(x) for name, x in found.items()}


# Most of the time of a small problem is XLA's compilation, which this halves.
_QUICK = {"xla_backend_optimization_level": 0}


def loss_of(
    function: Callable[..., Any], featured: Featured, **more: Any
) -> tuple[Callable[..., Any], tuple[list[Any], list[Any], Any], list[str]]:
    """A random weighted sum of all results, and these; its arguments, the first of them all float arrays; their names.

    A row that attends to nothing counts with its zeros only.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(featured.inputs)
    names = ["gradient of " + jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    floats = [place for place, leaf in enumerate(leaves) if _is_float(leaf)]

    # Integers are arguments, too: as constants, NumPy's arrays could not be indexed with traced positions.
    def loss(floating: list[Any], leaves: list[Any], cotangents: Any) -> Any:
        replaced = dict(zip(floats, floating, strict=True))
        inputs = jax.tree.unflatten(tree, [replaced.get(place, leaf) for place, leaf in enumerate(leaves)])
        q, k, v = (inputs.pop(name) for name in "qkv")
        out, logsumexp = function(q, k, v, **inputs, **featured.statics, **more)
        of_out, of_logsumexp = (x.astype(logsumexp.dtype) for x in cotangents)
        finite = jnp.where(jnp.isfinite(logsumexp), logsumexp, 0)
        total = jnp.sum(out.astype(logsumexp.dtype) * of_out) + jnp.sum(finite * of_logsumexp)
        return total, (out, logsumexp)

    arguments = [leaves[place] for place in floats], leaves, cotangents(featured)
    return loss, arguments, [names[place] for place in floats]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and kind_of(leaf.dtype) == "float"


def cotangents(featured: Featured) -> tuple[Any, Any]:
    """Exact in all dtypes, and such that the products of values and cotangents are of size 1."""
    random = np.random.default_rng(0)
    dtype, (*rows, value_width) = featured.q.dtype, (*featured.q.shape[:-1], featured.v.shape[-1])
    of_out = random.standard_normal((*rows, value_width)) / np.sqrt(max(value_width, 1))
    return of_out.astype(dtype), random.standard_normal(rows).astype(dtype)


def in_float64(featured: Featured) -> Featured:
    """The same with all float arrays in float64."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(np.float64) if _is_float(leaf) else leaf

    return Featured(
        *map(widen, (featured.q, featured.k, featured.v)), jax.tree.map(widen, featured.arrays), featured.statics
    )


def judge_all(found: dict[str, Any], featured: Featured) -> None:
    """Check results of `values` or `grads` by the rule: twice the naive error for values, three times for gradients."""
    oracle, low = _expected(featured, grads if len(found) > 2 else values)
    assert found.keys() == oracle.keys() == low.keys()
    width, keys = featured.q.shape[-1], featured.k.shape[-3]
    scores = oracle["logsumexp"].size * keys
    for name in found:
        gradient = name.startswith("gradient")
        length = width + keys + (scores // max(found[name].size, 1) if gradient else 0)
        try:
            assert_close(found[name], oracle[name], low[name], length=length, factor=3.0 if gradient else 2.0)
        except AssertionError as error:
            error.add_note(f"{name} of {describe(featured)}")
            raise
    nothing = np.isneginf(oracle["logsumexp"])
    assert (found["out"][nothing] == 0).all() and np.isneginf(found["logsumexp"][nothing]).all()


@lru_cache(maxsize=1)
def _expected(featured: Featured, of: Callable[..., dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The oracle and the naive computation; compiling them takes longer than any result that is judged by them."""
    dtype = featured.q.dtype
    oracle, low = of(reference, in_float64(featured)), of(reference, featured, dtype=dtype)
    if dtype.itemsize == 2:  # of such inputs, too, the logsumexp is in float32
        low["logsumexp"] = values(reference, featured)["logsumexp"]
    return oracle, low


def describe(featured: Featured) -> str:
    """Names, shapes and dtypes, for messages."""
    arrays = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", featured.inputs)
    return f"{arrays}, {featured.statics}"
