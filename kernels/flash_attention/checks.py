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
    describe,
    hide_frames,
    is_array,
    is_traced,
    make_jaxpr,
    static_int,
)
from tilekern.errors import ArgumentError, TilekernError
from tilekern.kernels.checks import as_int32, is_float, is_integer, narrowed, refusal
from tilekern.kernels.conventions import no_keyword
from tilekern.kernels.flash_attention.block_map import BlockMap, block_map
from tilekern.kernels.flash_attention.mods import (
    CarriedReadError,
    abstract_call,
    abstract_places,
    carried_by,
    with_carried,
)

hide_frames(__file__)

_refusal = partial(refusal, "flash_attention")

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
    """The leading dims *B of query, key and value, after a check that the three shapes and dtypes fit."""
    named = {"query": query, "key": key, "value": value}
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
    """(offsets, int32[B] or None; an int offset for the whole batch; the window).

    Offsets are clamped where further ones would change no mask, so that positions fit an int32.
    """
    left, right = _window(window)
    least, most = -sizes.queries - (0 if causal else right or 0), sizes.keys + (left or 0)
    if type(q_offset) is int:
        # A side that masks no key of any query counts as unbounded.
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


def _window(window: Any) -> tuple[int | None, int | None]:
    """(left, right); a side of 2³⁰ or more counts as unbounded, because no array is that long."""
    if window is None:
        return None, None
    pair = cast(tuple[Any, ...], window) if isinstance(window, tuple) else ()
    if len(pair) != 2 or not all(n is None or (type(n) is int and n >= 0) for n in pair):
        raise ArgumentError(
            "the window of flash_attention is not one",
            expected="(left, right): ints that are not negative, or None for unbounded",
            got=f"window = {window!r}",
            fix="(1023, 0) lets each query see itself and the 1023 keys before it",
        )
    left, right = (None if n is None or n >= 1 << 30 else n for n in pair)
    return left, right


def masks(
    mask: Any, mask_mod: Any, user_map: Any, sizes: Sizes, blocks: Mapping[str, Any]
) -> tuple[Any, Any, BlockMap | None]:
    """The mask as bool[B or 1, N or 1, T or 1, S or 1], the `mask_mod`, and the block map of either; None if absent."""
    mask = None if mask is None else _as_scores("mask", mask, sizes)
    mask_mod = None if mask_mod is None else _closed("mask_mod", mask_mod, partial(_mod, "mask_mod", sizes=sizes))
    if user_map is not None:
        _check_map(user_map, mask, mask_mod, sizes)
        for dim, name in (("queries", "block_q"), ("keys", "block_k")):
            for block in _user_blocks(name, blocks):
                user_map.parts(dim, block)
        return mask, mask_mod, user_map
    if min(sizes.queries, sizes.keys) <= _MAP_BLOCK or (mask is None) is (mask_mod is None):
        return mask, mask_mod, None
    tiles = {name: _map_block(_user_blocks(name, blocks)) for name in ("block_q", "block_k")}
    tiles |= {"queries": sizes.queries, "keys": sizes.keys}
    if mask_mod is None:
        return mask, None, block_map(mask, **tiles)
    b, n = _depends(mask_mod)
    batch, heads = sizes.flat if b else 1, sizes.heads if n else 1
    return None, mask_mod, block_map(mask_mod, **tiles, batch=batch, heads=heads)


def _user_blocks(name: str, blocks: Mapping[str, Any]) -> list[int]:
    """The sizes that the call passes for a block, of the forward kernel and of the derivatives' kernels."""
    arguments = {key: blocks.get(key) for key in (name, f"backward_{name}")}
    return [static_int(size, key, 1) for key, size in arguments.items() if size is not None]


def _map_block(blocks: Sequence[int]) -> int:
    """A block size for the map of one call: a multiple of each of the call's blocks."""
    unit = math.lcm(*blocks)
    return unit * max(1, _MAP_BLOCK // unit)


def _check_map(user_map: Any, mask: Any, mask_mod: Any, sizes: Sizes) -> None:
    one_mask = (mask is None) is not (mask_mod is None)
    if isinstance(user_map, BlockMap) and one_mask:
        fits = user_map.live_keys.shape[2:] == (tk.cdiv(sizes.queries, user_map.block_q),)
        fits = fits and user_map.live_queries.shape[2:] == (tk.cdiv(sizes.keys, user_map.block_k),)
        fits = fits and all(
            n in (1, m) for n, m in zip(user_map.live_keys.shape, (sizes.flat, sizes.heads), strict=False)
        )
        if fits:
            return
    raise ArgumentError(
        "the block_map of flash_attention is not one of its mask",
        expected=f"block_map(mask, queries={sizes.queries}, keys={sizes.keys}, ...) of the only mask, an array or a "
        "mask_mod",
        got=f"block_map = {describe(user_map)}"
        if not isinstance(user_map, BlockMap)
        else f"live_keys = {describe(user_map.live_keys)} for tiles of {user_map.block_q} queries "
        f"and {user_map.block_k} keys, "
        f"mask {'given' if mask is not None else 'None'}, mask_mod {'given' if mask_mod is not None else 'None'}",
        fix="put both conditions into one mask_mod, and make the map of that",
    )


def _depends(mask_mod: Any) -> tuple[bool, bool]:
    """Two bools: the function's result depends on b, and on n."""
    scalar, i, j = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (8, 1), (1, 8)))
    jaxpr = make_jaxpr(mask_mod, scalar, scalar, i, j).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return id(jaxpr.invars[0]) in used, id(jaxpr.invars[1]) in used


def bias(array: Any, sizes: Sizes) -> Any:
    """The bias as float[B or 1, N or 1, T or 1, S or 1]; None if absent."""
    return None if array is None else _as_scores("bias", array, sizes)


def _as_scores(name: str, array: Any, sizes: Sizes) -> jax.Array:
    """An array [*B, N, T, S] as [B or 1, N or 1, T or 1, S or 1]: dims of size 1 stay."""
    shape: tuple[int, ...] = getattr(array, "shape", ())
    lead, tail = shape[:-3], shape[-3:]
    kind = is_float(array) if name == "bias" else getattr(array, "dtype", None) == jnp.bool_
    fits = kind and len(tail) == 3 and (lead == sizes.batch or all(n == 1 for n in lead))
    if fits and all(n in (1, m) for n, m in zip(tail, (sizes.heads, sizes.queries, sizes.keys), strict=True)):
        return jnp.asarray(array).reshape(sizes.flat if lead == sizes.batch else 1, *tail)
    whole = [*sizes.batch, sizes.heads, sizes.queries, sizes.keys]
    fault = "cannot be broadcast to the scores" if kind else f"is no array of {'floats' if name == 'bias' else 'bools'}"
    raise ArgumentError(
        f"the {name} of flash_attention {fault}",
        expected=f"{'float' if name == 'bias' else 'bool'}{whole}, or 1 in place of N, T, S, or of all leading dims",
        got=f"{name} = {describe(array)}",
        fix="the order is batch, heads, queries, keys; give every dim, of size 1 where all are alike"
        + ("" if name == "bias" else "; True means attend, and what is added goes into bias"),
    )


def segments(ids: Any, sizes: Sizes) -> Any:
    """The ids of queries and keys, int32[B, T] and int32[B, S]; None if absent."""
    if ids is None:
        return None
    pair = cast(tuple[Any, ...], ids) if isinstance(ids, tuple) else (ids, ids)
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
    """Each id as int32: its rank among all ids, so that equal ids stay equal. Shapes stay."""
    traced = isinstance(of_queries, jax.Array) or isinstance(of_keys, jax.Array)
    library: Any = jnp if traced else np
    common = np.promote_types(of_queries.dtype, of_keys.dtype)
    common = jax.dtypes.canonicalize_dtype(common) if traced else common
    pair = of_queries, of_keys
    if not all(np.can_cast(x.dtype, common) for x in pair) or not np.issubdtype(common, np.integer):
        raise _refusal(
            "segment_ids",
            "ids of queries and keys that one integer dtype holds",
            pair,
            "give both the same dtype",
            got=f"segment_ids = {', '.join(describe(x) for x in pair)}, jax_enable_x64 = {jax.config.jax_enable_x64}",
        )
    in_order = library.sort(library.concatenate([x.astype(common).reshape(-1) for x in pair]))
    first, second = (library.searchsorted(in_order, x.astype(common)).astype(np.int32) for x in pair)
    return jnp.asarray(first), jnp.asarray(second)


def lengths(name: str, array: Any, sizes: Sizes) -> Any:
    """The lengths as int32[B], clamped to the arrays' lengths; None if absent."""
    if array is None:
        return None
    if not is_integer(array) or array.shape != sizes.batch:
        raise _refusal(
            name, f"integers {list(sizes.batch)}, one for each element of the batch", array, "count elements"
        )
    least = 0 if is_traced(array) or not array.size else int(np.asarray(array).min())
    if least < 0:
        expected = "lengths that are not negative"
        raise _refusal(name, expected, array, "0 masks everything", got=f"a length of {least}")
    most = sizes.queries if name == "q_lengths" else sizes.keys
    return jnp.clip(as_int32(array), 0, most).reshape(-1)


def causal(argument: Any) -> bool:
    """The argument `causal`, checked."""
    if isinstance(argument, bool):
        return argument
    raise _refusal("causal", "True or False", argument, "it is static; mask_mod takes what is traced")


def dropout_broadcast(argument: Any) -> bool:
    """The argument `dropout_broadcast`, checked."""
    if isinstance(argument, bool):
        return argument
    raise _refusal("dropout_broadcast", "True or False", argument, "it is static")


def dropout(rate: Any, key: Any) -> float:
    """The rate of dropout, checked."""
    if not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise _refusal("dropout_rate", "a number from 0 to 1", rate, "0 drops nothing")
    if rate and key is None:
        raise _refusal("dropout_key", "a key of jax.random, as dropout_rate is not 0", key, "jax.random.key(step)")
    return float(rate)


def key_data(key: Any) -> jax.Array:
    """The two words of a key, uint32[2]."""
    typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data: Any = jax.random.key_data(key) if typed else key
    if getattr(data, "shape", None) == (2,) and data.dtype == jnp.uint32:
        return data
    fix = 'make it with jax.random.key(seed, impl="threefry2x32")'
    raise _refusal("dropout_key", "a threefry key of jax.random, or its data, uint32[2]", key, fix)


def precision(argument: Any) -> tuple[str | None, str | None]:
    """The precisions of (query key, weights value)."""
    pair = cast(tuple[Any, ...], argument) if isinstance(argument, tuple) else (argument, argument)
    named = tuple("ieee" if p == "highest" else p for p in pair)
    if len(named) == 2 and all(p is None or p in PRECISIONS for p in named):
        return named
    names = ", ".join(map(repr, ("highest", *PRECISIONS)))
    raise _refusal(
        "precision", f"None, one of {names}, or a pair of these", argument, "leave it out for exact products"
    )


def backward_blocks(blocks: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The blocks of the kernels of derivatives, as pairs of name and size. Refuses keywords of no block or option."""
    names = ("block_q", "block_k")
    keywords = (*names, "block_n", *(f"backward_{name}" for name in names), *LAUNCH_OPTIONS)
    for name in blocks:
        if name not in keywords:
            raise no_keyword("flash_attention", name, blocks[name], keywords)
    sizes = ((name, blocks.get(f"backward_{name}")) for name in names)
    return tuple((name, static_int(size, f"backward_{name}", 1)) for name, size in sizes if size is not None)


def score_mod(function: Any, sizes: Sizes, wide: Any) -> Any:
    """The function as a `Partial`, after a check that it returns scores and only indexes the arrays it carries."""
    return None if function is None else _closed("score_mod", function, partial(_score_mod, sizes=sizes, wide=wide))


def _closed(name: str, function: Any, check: Callable[[Any], Any]) -> Any:
    """The result of `check` for a function, made to carry the traced and the large arrays that it closes over.

    If tiles do not allow the way in which the function reads such an array, `check` gets the function unchanged. Then
    the forward kernel can still read the arrays, and derivatives are refused.
    """
    mod = carry_arrays(function) if callable(function) else None
    if isinstance(function, jax.tree_util.Partial) or not carried_by(mod):
        return check(function)
    _check_arity(name, jax.tree_util.Partial(function))
    try:
        return check(mod)
    except CarriedReadError:
        return check(function)


def _score_mod(function: Any, sizes: Sizes, wide: Any) -> Any:
    mod = _mod("score_mod", function, sizes, wide)
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


def _mod(name: str, function: Any, sizes: Sizes, wide: Any = None) -> Any:
    """A function of positions (with `wide`, of scores of that dtype, too) as a `Partial`, checked."""
    kind, result_text = (jnp.bool_, "bool") if wide is None else (jnp.floating, "a float score")
    if not callable(function):
        raise _refusal(
            name, f"a function of {_TAKES[name]}", function, "jax.tree_util.Partial(function, *arrays) carries arrays"
        )
    mod: Any = function if isinstance(function, jax.tree_util.Partial) else jax.tree_util.Partial(function)
    mod = with_carried(mod, [jnp.asarray(x) for x in carried_by(mod)])
    extents = {"b": sizes.flat, "n": sizes.heads, "i": sizes.queries, "j": sizes.keys}
    _check_arity(name, mod)
    try:
        result = abstract_call(mod, extents, *(() if wide is None else (wide,)))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, ValueError) as error:
        if isinstance(error, TilekernError) or (type(error) is ValueError and "truth value" not in str(error)):
            raise
        with at_line_of(error):
            raise _refusal(
                name,
                "a function of whole tiles of positions, without Python's `if`, `and`, `or`, `not`, int and float",
                function,
                "use jnp.where, &, | and ~",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            ) from error
    shape: tuple[int, ...] = getattr(result, "shape", (0,))
    fits = len(shape) <= 2 and all(n in (1, m) for n, m in zip(shape[::-1], (3, 2), strict=False))
    if fits and jnp.issubdtype(result.dtype, kind):
        return mod
    raise _refusal(
        name,
        f"{result_text} of a shape that broadcasts to that of i and j together, [T, S]",
        function,
        "compare, or .astype; use elementwise functions only",
        got=f"{name}(...) = {describe(result)} for i = int32[2, 1], j = int32[1, 3]",
    )


def _check_arity(name: str, mod: Any) -> None:
    """Refuse a function whose parameters do not fit the arguments of the call."""
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
        fix = f"take all of {takes}, in this order"
        raise _refusal(name, f"a function of {takes}{carried}", mod, fix, got=got) from error
