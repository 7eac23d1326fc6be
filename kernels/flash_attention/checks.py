"""The arguments of `flash_attention`, checked and brought to one form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.authoring import (
    LAUNCH_OPTIONS,
    PRECISIONS,
    at_line_of,
    carry_arrays,
    check_sizes,
    describe,
    hide_frames,
    is_array,
    is_traced,
    make_jaxpr,
    static_int,
)
from tilekern.errors import ArgumentError, TilekernError
from tilekern.kernels.api import as_int32, as_real, is_float, is_integer, narrowed
from tilekern.kernels.flash_attention.block_map import BlockMap, block_map
from tilekern.kernels.flash_attention.mods import (
    CarriedReadError,
    abstract_call,
    abstract_places,
    carried_by,
    with_carried,
)

hide_frames(__file__)

# The granularity of block maps that are made for one call; schedules choose tiles that divide it.
_MAP_BLOCK = 128

# The parameters of the user's functions.
_TAKES = {"mask_mod": "(b, n, i, j)", "score_mod": "(score, b, n, i, j)"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention: leading dims, queries T, keys S, heads N."""

    batch: tuple[int, ...]
    queries: int
    keys: int
    heads: int

    @property
    def flat(self) -> int:
        """Elements of the batch."""
        size = 1
        for n in self.batch:
            size *= n
        return size


def arrays(query: Any, key: Any, value: Any) -> tuple[int, ...]:
    """The leading dims, if the three arrays fit."""
    named = {"query": query, "key": key, "value": value}
    check_sizes("flash_attention", named)
    shapes: list[tuple[int, ...]] = [getattr(x, "shape", ()) for x in named.values()]
    fits = len(shapes[0]) >= 3 and len(shapes[0]) == len(shapes[1]) == len(shapes[2])
    if fits:
        (*batch, _, heads, width), (*batch_k, keys, groups, width_k), (*batch_v, keys_v, groups_v, _) = shapes
        fits = batch == batch_k == batch_v and width == width_k and (keys, groups) == (keys_v, groups_v)
        fits = fits and (heads % groups == 0 if groups else heads == 0)
    if fits and query.dtype == key.dtype == value.dtype and is_float(query):
        return shapes[0][:-3]
    raise ArgumentError(
        "the arrays of flash_attention do not fit",
        expected="query[*B, T, N, H], key[*B, S, K, H], value[*B, S, K, Hv] of one float dtype of at least 16 bits, "
        "K dividing N",
        got=", ".join(f"{name} = {describe(x)}" for name, x in named.items()),
        fix="the layout is batch, time, heads, width; cast with .astype",
    )


def positions(
    q_offset: Any, window: Any, causal: bool, sizes: Sizes
) -> tuple[jax.Array | None, int, tuple[int | None, int | None]]:
    """(offsets for each element of the batch or None, an offset for all, the window).

    Offsets are clamped to where all queries see all keys, or none, so that positions fit an int32.
    """
    left, right = _window(window)
    least, most = -sizes.queries - (0 if causal else right or 0), sizes.keys + (left or 0)
    if type(q_offset) is int:
        # A side that bounds no query is none.
        left = None if left is not None and sizes.queries - 1 + q_offset <= left else left
        right = None if right is not None and q_offset + right >= sizes.keys - 1 else right
        return None, max(least, min(q_offset, most)), (left, right)
    if not is_integer(q_offset) or q_offset.shape not in ((), sizes.batch):
        raise ArgumentError(
            "q_offset of flash_attention must be an integer, or integers",
            expected=f"an int, or an integer array of shape () or {list(sizes.batch)}",
            got=f"q_offset = {describe(q_offset)}",
            fix="one offset for all of the batch, or one for each element of it",
        )
    clamped = jnp.clip(as_int32(q_offset), least, most)
    return jnp.broadcast_to(clamped, sizes.batch).reshape(-1), 0, (left, right)


def _window(given: Any) -> tuple[int | None, int | None]:
    """(left, right); from 2³⁰ on, which no array reaches, a side is unbounded."""
    if given is None:
        return None, None
    pair = cast(tuple[Any, ...], given) if isinstance(given, tuple) else ()
    if len(pair) != 2 or not all(n is None or (type(n) is int and n >= 0) for n in pair):
        raise ArgumentError(
            "the window of flash_attention is not one",
            expected="(left, right): ints that are not negative, or None for unbounded",
            got=f"window = {given!r}",
            fix="(1023, 0) lets each query see itself and the 1023 keys before it",
        )
    left, right = (None if n is None or n >= 1 << 30 else n for n in pair)
    return left, right


def masks(
    mask: Any, mask_mod: Any, given: Any, sizes: Sizes, blocks: Mapping[str, Any]
) -> tuple[Any, Any, BlockMap | None]:
    """The mask as an array [B or 1, N or 1, T or 1, S or 1], the function, and the map of the one or the other."""
    mask = None if mask is None else _as_scores("mask", mask, sizes)
    mask_mod = None if mask_mod is None else _closed("mask_mod", mask_mod, partial(_mod, "mask_mod", sizes=sizes))
    if given is not None:
        _check_map(given, mask, mask_mod, sizes)
        for what, name in (("queries", "block_q"), ("keys", "block_k")):
            for block in _given_blocks(name, blocks):
                given.parts(what, block)
        return mask, mask_mod, given
    if min(sizes.queries, sizes.keys) <= _MAP_BLOCK or (mask is None) is (mask_mod is None):
        return mask, mask_mod, None
    tiles = {name: _map_block(_given_blocks(name, blocks)) for name in ("block_q", "block_k")}
    tiles |= {"queries": sizes.queries, "keys": sizes.keys}
    if mask_mod is None:
        return mask, None, block_map(mask, **tiles)
    b, n = _depends(mask_mod)
    batch, heads = sizes.flat if b else 1, sizes.heads if n else 1
    return None, mask_mod, block_map(mask_mod, **tiles, batch=batch, heads=heads)


def _given_blocks(name: str, blocks: Mapping[str, Any]) -> list[int]:
    """The sizes that the call gives for a block, of the forward kernel and of the derivatives' kernels."""
    found = {key: blocks.get(key) for key in (name, f"backward_{name}")}
    return [static_int(size, key, 1) for key, size in found.items() if size is not None]


def _map_block(blocks: Sequence[int]) -> int:
    """A block for a map of one call, which those of the call divide."""
    unit = math.lcm(*blocks)
    return unit * max(1, _MAP_BLOCK // unit)


def _check_map(given: Any, mask: Any, mask_mod: Any, sizes: Sizes) -> None:
    one = (mask is None) is not (mask_mod is None)
    if isinstance(given, BlockMap) and one:
        fits = given.live_keys.shape[2:] == (tk.cdiv(sizes.queries, given.block_q),)
        fits = fits and given.live_queries.shape[2:] == (tk.cdiv(sizes.keys, given.block_k),)
        fits = fits and all(n in (1, m) for n, m in zip(given.live_keys.shape, (sizes.flat, sizes.heads), strict=False))
        if fits:
            return
    raise ArgumentError(
        "the block_map of flash_attention is not one of its mask",
        expected=f"block_map(mask, queries={sizes.queries}, keys={sizes.keys}, ...) of the only mask, an array or a "
        "mask_mod",
        got=f"block_map = {describe(given)}"
        if not isinstance(given, BlockMap)
        else f"live_keys = {describe(given.live_keys)} for tiles of {given.block_q} queries and {given.block_k} keys, "
        f"mask {'given' if mask is not None else 'None'}, mask_mod {'given' if mask_mod is not None else 'None'}",
        fix="put both conditions into one mask_mod, and make the map of that",
    )


def _depends(mask_mod: Any) -> tuple[bool, bool]:
    """Two bools: a function depends on b, it depends on n."""
    one, i, j = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (8, 1), (1, 8)))
    jaxpr = make_jaxpr(mask_mod, one, one, i, j).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return id(jaxpr.invars[0]) in used, id(jaxpr.invars[1]) in used


def bias(given: Any, sizes: Sizes) -> Any:
    """The bias as [B or 1, N or 1, T or 1, S or 1]."""
    return None if given is None else _as_scores("bias", given, sizes)


def _as_scores(name: str, given: Any, sizes: Sizes) -> jax.Array:
    """An array [*B, N, T, S], dims of size 1 broadcast, with leading dims as one."""
    shape: tuple[int, ...] = getattr(given, "shape", ())
    lead, tail = shape[:-3], shape[-3:]
    kind = is_float(given) if name == "bias" else getattr(given, "dtype", None) == jnp.bool_
    fits = kind and len(tail) == 3 and (lead == sizes.batch or all(n == 1 for n in lead))
    if fits and all(n in (1, m) for n, m in zip(tail, (sizes.heads, sizes.queries, sizes.keys), strict=True)):
        return jnp.asarray(given).reshape(sizes.flat if lead == sizes.batch else 1, *tail)
    whole = [*sizes.batch, sizes.heads, sizes.queries, sizes.keys]
    raise ArgumentError(
        f"the {name} of flash_attention cannot be broadcast to the scores",
        expected=f"{'float' if name == 'bias' else 'bool'}{whole}, or 1 in place of N, T, S, or of all leading dims",
        got=f"{name} = {describe(given)}",
        fix="the order is batch, heads, queries, keys; give every dim, of size 1 where all are alike"
        + ("" if name == "bias" else "; True means attend, and what is added goes into bias"),
    )


def segments(given: Any, sizes: Sizes) -> Any:
    """The ids of queries and keys, int32[B, T] and int32[B, S]."""
    if given is None:
        return None
    pair = cast(tuple[Any, ...], given) if isinstance(given, tuple) else (given, given)
    shapes = (*sizes.batch, sizes.queries), (*sizes.batch, sizes.keys)
    if len(pair) != 2 or any(not is_integer(x) or x.shape != s for x, s in zip(pair, shapes, strict=True)):
        raise ArgumentError(
            "the segment_ids of flash_attention do not fit",
            expected=f"integers {list(shapes[0])} for queries and {list(shapes[1])} for keys, a pair",
            got=f"segment_ids = {', '.join(describe(x) for x in pair)}",
            fix="one array may stand for both where there are as many queries as keys",
        )
    of_queries, of_keys = (narrowed(x.reshape(sizes.flat, s[-1])) for x, s in zip(pair, shapes, strict=True))
    if of_queries.dtype == of_keys.dtype == np.int32:
        return jnp.asarray(of_queries), jnp.asarray(of_keys)
    return _ranked(of_queries, of_keys)


def _ranked(of_queries: Any, of_keys: Any) -> tuple[jax.Array, jax.Array]:
    """Ids as int32 that are equal where the ids are: their places among all ids in order."""
    traced = isinstance(of_queries, jax.Array) or isinstance(of_keys, jax.Array)
    library: Any = jnp if traced else np
    common = np.promote_types(of_queries.dtype, of_keys.dtype)
    common = jax.dtypes.canonicalize_dtype(common) if traced else common
    pair = of_queries, of_keys
    if not all(np.can_cast(x.dtype, common) for x in pair) or not np.issubdtype(common, np.integer):
        raise _wrong(
            "segment_ids",
            "ids of queries and keys that one integer dtype holds",
            f"segment_ids = {', '.join(describe(x) for x in pair)}, jax_enable_x64 = {jax.config.jax_enable_x64}",
            "give both the same dtype",
        )
    in_order = library.sort(library.concatenate([x.astype(common).reshape(-1) for x in pair]))
    first, second = (library.searchsorted(in_order, x.astype(common)).astype(np.int32) for x in pair)
    return jnp.asarray(first), jnp.asarray(second)


def lengths(name: str, given: Any, sizes: Sizes) -> Any:
    """The lengths, int32[B]."""
    if given is None:
        return None
    if not is_integer(given) or given.shape != sizes.batch:
        raise _wrong(name, f"integers {list(sizes.batch)}, one for each element of the batch", given, "count elements")
    least = 0 if is_traced(given) or not given.size else int(np.asarray(given).min())
    if least < 0:
        raise _wrong(name, "lengths that are not negative", f"a length of {least}", "0 masks everything")
    most = sizes.queries if name == "q_lengths" else sizes.keys
    return jnp.clip(as_int32(given), 0, most).reshape(-1)


def sinks(given: Any, sizes: Sizes) -> Any:
    """The sinks, float [N]."""
    if given is None or (is_float(given) and given.shape == (sizes.heads,)):
        return given
    raise _wrong("sinks", f"float[{sizes.heads}], a logit for each head", given, "cast with .astype")


def scale(given: Any, width: int) -> float:
    """The scale of dot products of a width; one over its root, if None."""
    if given is None:
        return 1 / math.sqrt(max(width, 1))
    number = as_real(given)
    if number is not None:
        return number
    raise _wrong("scale", "a number, or None", given, "it is static; multiply the query by one that is traced")


def causal(given: Any) -> bool:
    """The argument `causal`, checked."""
    if isinstance(given, bool):
        return given
    raise _wrong("causal", "True or False", given, "it is static; mask_mod takes what is traced")


def softcap(given: Any) -> float | None:
    """The softcap, checked; beyond 1e30, scores over it would be subnormal numbers, which may be 0."""
    if given is None:
        return None
    number = as_real(given)
    if number is not None and given is not True and 1e-30 <= number <= 1e30:
        return number
    raise _wrong("softcap", "a number from 1e-30 to 1e30, or None", given, "leave it out: it bounds the scores")


def dropout(rate: Any, key: Any) -> float:
    """The rate of dropout, checked."""
    if not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise _wrong("dropout_rate", "a number from 0 to 1", rate, "0 drops nothing")
    if rate and key is None:
        raise _wrong("dropout_key", "a key of jax.random, as dropout_rate is not 0", key, "jax.random.key(step)")
    return float(rate)


def key_data(key: Any) -> jax.Array:
    """The two words of a key."""
    typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data: Any = jax.random.key_data(key) if typed else key
    if getattr(data, "shape", None) == (2,) and data.dtype == jnp.uint32:
        return data
    fix = 'make it with jax.random.key(seed, impl="threefry2x32")'
    raise _wrong("dropout_key", "a threefry key of jax.random, or its data, uint32[2]", key, fix)


def precision(given: Any) -> tuple[str | None, str | None]:
    """The precisions of the two products."""
    pair = cast(tuple[Any, ...], given) if isinstance(given, tuple) else (given, given)
    named = tuple("ieee" if p == "highest" else p for p in pair)
    if len(named) == 2 and all(p is None or p in PRECISIONS for p in named):
        return named
    known = ", ".join(map(repr, ("highest", *PRECISIONS)))
    raise _wrong("precision", f"None, one of {known}, or a pair of these", given, "leave it out for exact products")


def backward_blocks(blocks: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The blocks of the kernels of derivatives."""
    names = ("block_q", "block_k")
    known = (*names, "block_n", *(f"backward_{name}" for name in names), *LAUNCH_OPTIONS)
    for name in blocks:
        if name not in known:
            raise ArgumentError(
                f"flash_attention has no keyword argument {name!r}",
                expected=f"one of its parameters, or of {', '.join(known)}",
                got=f"{name} = {blocks[name]!r}",
                fix="see help(flash_attention)",
            )
    given = ((name, blocks.get(f"backward_{name}")) for name in names)
    return tuple((name, static_int(size, f"backward_{name}", 1)) for name, size in given if size is not None)


def score_mod(given: Any, sizes: Sizes, wide: Any) -> Any:
    """The function as a `Partial`; it must return scores, and index what it carries."""
    return None if given is None else _closed("score_mod", given, partial(_score_mod, sizes=sizes, wide=wide))


def _closed(name: str, given: Any, check: Callable[[Any], Any]) -> Any:
    """The result of `check` for a function, made to carry the traced and the large arrays that it closes over.

    If the function reads one of them in a way that tiles do not allow, it is checked as it is. Then the forward kernel
    can still read the arrays, and derivatives are refused.
    """
    mod = carry_arrays(given) if callable(given) else None
    if isinstance(given, jax.tree_util.Partial) or not carried_by(mod):
        return check(given)
    _check_arity(name, jax.tree_util.Partial(given))
    try:
        return check(mod)
    except CarriedReadError:
        return check(given)


def _score_mod(given: Any, sizes: Sizes, wide: Any) -> Any:
    mod = _mod("score_mod", given, sizes, wide)
    for place in abstract_places(mod):
        shown = ", ".join(e if isinstance(e, str) else "…" for e in place.entries)
        if place.has("i") and place.has("j") and place.is_scattered:
            raise CarriedReadError(
                "score_mod reads an array at i, j and something that is made of b or n",
                expected="of an array that is read at i and j, b and n themselves or static integers",
                got=f"array {place.array}, indexed [{shown}]",
                fix="index the array outside, so that it has a dim for b or n itself",
            )
    return mod


def _mod(name: str, given: Any, sizes: Sizes, wide: Any = None) -> Any:
    """A function of positions (with `wide`, of scores of that dtype, too) as a `Partial`, checked."""
    kind, wanted = (jnp.bool_, "bool") if wide is None else (jnp.floating, "a float score")
    if not callable(given):
        raise _wrong(
            name, f"a function of {_TAKES[name]}", given, "jax.tree_util.Partial(function, *arrays) carries arrays"
        )
    mod: Any = given if isinstance(given, jax.tree_util.Partial) else jax.tree_util.Partial(given)
    mod = with_carried(mod, [jnp.asarray(x) for x in carried_by(mod)])
    check_sizes("flash_attention", {f"array {k} of {name}": x for k, x in enumerate(carried_by(mod))})
    extents = {"b": sizes.flat, "n": sizes.heads, "i": sizes.queries, "j": sizes.keys}
    _check_arity(name, mod)
    try:
        found = abstract_call(mod, extents, *(() if wide is None else (wide,)))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, ValueError) as error:
        if isinstance(error, TilekernError) or (type(error) is ValueError and "truth value" not in str(error)):
            raise
        with at_line_of(error):
            raise _wrong(
                name,
                "a function of whole tiles of positions, without Python's `if`, `and`, `or`, `not`, int and float",
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                "use jnp.where, &, | and ~",
            ) from error
    shape: tuple[int, ...] = getattr(found, "shape", (0,))
    fits = len(shape) <= 2 and all(n in (1, m) for n, m in zip(shape[::-1], (3, 2), strict=False))
    if fits and jnp.issubdtype(found.dtype, kind):
        return mod
    raise _wrong(
        name,
        f"{wanted} of a shape that broadcasts to that of i and j together, [T, S]",
        f"{name}(...) = {describe(found)} for i = int32[2, 1], j = int32[1, 3]",
        "compare, or .astype; use elementwise functions only",
    )


def _check_arity(name: str, mod: Any) -> None:
    """Refuse a function that does not take the arguments that it is called with."""
    takes = _TAKES[name]
    try:
        parameters = inspect.signature(mod.func)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    try:
        parameters.bind(*mod.args, *takes.split(","), **mod.keywords)
    except TypeError as error:
        carried = f" after {len(mod.args)} that it carries" if mod.args else ""
        got = f"a function of {parameters}: {error}"
        raise _wrong(name, f"a function of {takes}{carried}", got, f"take all of {takes}, in this order") from error


def _wrong(name: str, expected: str, given: Any, fix: str) -> ArgumentError:
    got = given if isinstance(given, str) and " " in given else f"{name} = {describe(given)}"
    return ArgumentError(f"flash_attention cannot take this {name}", expected=expected, got=got, fix=fix)
