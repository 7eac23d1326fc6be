"""The arguments of the public functions, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, static_int
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import (
    as_int32,
    as_real,
    is_float,
    is_integer,
    refusal,
    require,
    scale_of_scores,
    sinks_of_heads,
    softcap_of_scores,
)
from tilekern.kernels.paged_attention.arguments import Cache, Settings, Tables, Terms

hide_frames(__file__)

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The dtypes of caches beside that of the queries."""

PACKED = ("int4", "float4_e2m1fn")
"""The dtypes of numbers in caches of bytes."""


def packed_dtype(function: str, cache_dtype: Any) -> str | None:
    """The name of the dtype of 4-bit numbers; None for None.

    Raises:
      ArgumentError: it is another dtype, or none.
    """
    if cache_dtype is None:
        return None
    try:
        name = jnp.dtype(cache_dtype).name
    except TypeError:
        name = ""
    if name in PACKED:
        return name
    expected = f"{' or '.join(map(repr, PACKED))}, for kv_pages of uint8, or None"
    raise refusal(function, "cache_dtype", expected, cache_dtype, "kv_pages of any other dtype need no cache_dtype")


def cache(function: str, query: Any, kv_pages: Any, packed: str | None = None, name: str = "query") -> Cache:
    """The cache, whose arrays fit query[T, N, H]; `name` is that of the argument.

    `packed` is the dtype of 4-bit numbers in bytes, None if a cache of bytes is refused.

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    pair = cast(Sequence[Any], kv_pages if isinstance(kv_pages, (tuple, list)) else (kv_pages, None))
    pages = Cache(*pair) if len(pair) == 2 else Cache(kv_pages, None)
    named = {name: query, "kv_pages": pages.keys} | ({} if pages.values is None else {"values": pages.values})
    fits = is_float(query) and query.ndim == 3 and (pages.values is not None or pages.keys is kv_pages)
    fits = fits and all(getattr(a, "ndim", 0) == 4 and _holds(query, a, packed) for a in pages if a is not None)
    fits = fits and pages.keys.shape[3] == query.shape[2] and pages.keys.shape[1] > 0
    if packed is not None:
        fits = fits and pages.values is None
    elif fits and pages.values is None:
        fits = pages.keys.shape[2] % 2 == 0
    elif fits:
        keys, values = pair
        fits = keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
    fits = fits and (query.shape[1] % pages.heads == 0 if pages.heads else query.shape[1] == 0)
    if fits:
        return pages
    raise ArgumentError(
        f"the arrays of {function} do not fit",
        expected=f"{name}[T, N, H] of a float dtype, and kv_pages[pages, page, 2 K, H], or a pair of keys[pages, page, "
        f"K, H] and values[pages, page, K, Hv], of the query's dtype or {', '.join(QUANTIZED)}; or with cache_dtype="
        f"{' or '.join(map(repr, PACKED))} uint8[pages, page, K, H]; K divides N",
        got=", ".join(f"{n} = {describe(x)}" for n, x in named.items())
        + ("" if packed is None else f", cache_dtype = {packed!r}"),
        fix=_remedy(name, pages),
    )


def _remedy(name: str, pages: Cache) -> str:
    if any(str(getattr(x, "dtype", None)) in PACKED for x in pages):
        # XLA holds such arrays as each platform does, and makes bytes of a whole array for a program.
        return (
            "an array of 4-bit numbers would be copied by each call: give a byte for each key and its value, "
            "jax.lax.bitcast_convert_type(jnp.stack([keys, values], axis=-1), jnp.uint8), and cache_dtype"
        )
    return f"cast {name} with .astype; one array has the keys of head g at 2 g, its values at 2 g + 1"


def written(function: str, new_keys: Any, new_values: Any, kv_pages: Any, packed: str | None) -> Cache:
    """The cache, whose arrays fit new_keys[T, K, H] and new_values[T, K, Hv].

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    pages = cache(function, new_keys, kv_pages, packed, "new_keys")
    shape = *new_keys.shape[:2], pages.width
    require(
        pages.heads == new_keys.shape[1] and is_float(new_values) and new_values.shape == shape
        and new_values.dtype == new_keys.dtype,
        function,
        expected=f"new_keys[T, {pages.heads}, {pages.keys.shape[3]}] and new_values[T, {pages.heads}, {pages.width}] "
        "of one float dtype, for the heads of kv_pages",
        fix="one array has the keys of head g at 2 g, its values at 2 g + 1; cast with .astype",
        new_keys=new_keys,
        new_values=new_values,
        kv_pages=pages.keys,
    )  # fmt: skip
    return pages


def scale_of_written(function: str, name: str, scale: Any, pages: Cache) -> None:
    """Check a scale of keys or values that are written.

    Raises:
      ArgumentError: it is of another shape or dtype, or each key has a scale in a cache of floats.
    """
    _scale(function, name, scale, pages)
    if getattr(scale, "ndim", 0) == 3 and not pages.is_packed and str(pages.keys.dtype) not in QUANTIZED:
        expected = f"a scale for all or for each head, for kv_pages of {pages.keys.dtype}"
        dtypes = ", ".join((*QUANTIZED, *PACKED))
        raise refusal(function, name, expected, scale, f"scales of each key need a cache of {dtypes}")


def scale_of_written_rows(
    function: str, name: str, scale: Any, pages: str, places: tuple[int, ...], cache_dtype: Any
) -> None:
    """Check a scale of rows that are written to argument `pages`, an array [*places, W] of `cache_dtype`.

    Raises:
      ArgumentError: it is of another shape or dtype, or each key has a scale in a cache of floats.
    """
    scale_of_cache(function, name, scale, [places], "a scale for all, or for each key")
    if getattr(scale, "ndim", 0) == 2 and str(cache_dtype) not in QUANTIZED:
        expected = f"a scale for all, for {pages} of {cache_dtype}"
        raise refusal(function, name, expected, scale, f"scales of each key need a cache of {', '.join(QUANTIZED)}")


def tables(
    function: str, tokens: int, kv_lens: Any, page_indices: Any, cu_q_lens: Any = None, num_seqs: Any = None
) -> Tables:
    """The tables as arrays of int32; without `cu_q_lens` each sequence has one token.

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    named = {"kv_lens": kv_lens, "page_indices": page_indices}
    named |= {} if cu_q_lens is None else {"cu_q_lens": cu_q_lens}
    fits = all(map(is_integer, named.values())) and kv_lens.ndim == 1 and page_indices.ndim == 2
    fits = fits and page_indices.shape[0] == kv_lens.shape[0]
    if fits:
        fits = kv_lens.shape[0] == tokens if cu_q_lens is None else cu_q_lens.shape == (kv_lens.shape[0] + 1,)
    if not fits:
        rows = f"kv_lens[{tokens}], a length for each query, and page_indices[{tokens}, P]"
        ragged = "kv_lens[S], page_indices[S, P] and cu_q_lens[S + 1]"
        raise ArgumentError(
            f"the tables of {function} do not fit",
            expected=f"{rows if cu_q_lens is None else ragged}, of integers",
            got=", ".join(f"{name} = {describe(x)}" for name, x in named.items()),
            fix="give each sequence a row of page_indices; unused entries may hold anything",
        )
    starts = jnp.arange(tokens + 1, dtype=jnp.int32) if cu_q_lens is None else as_int32(cu_q_lens)
    return Tables(starts, as_int32(kv_lens), as_int32(page_indices), _count(function, num_seqs, kv_lens.shape[0]))


def _count(function: str, num_seqs: Any, sequences: int) -> jax.Array:
    if num_seqs is None:
        return jnp.full(1, sequences, jnp.int32)
    if is_integer(num_seqs) and num_seqs.shape in ((), (1,)):
        return as_int32(num_seqs).reshape(1)
    if isinstance(num_seqs, int) and not isinstance(num_seqs, bool) and 0 <= num_seqs <= sequences:
        return jnp.full(1, num_seqs, jnp.int32)
    raise ArgumentError(
        f"{function} takes no such number of sequences",
        expected=f"an int from 0 to {sequences}, or an integer array of shape () or (1,)",
        got=f"num_seqs = {describe(num_seqs)}",
        fix="leave it out if all rows of page_indices are sequences",
    )


def settings(function: str, width: int, scale: Any, window: Any, softcap: Any, packed: str | None) -> Settings:
    """The static arguments.

    Raises:
      ArgumentError: one is not of its range.
    """
    span = None if window is None else static_int(window, "window", 1)
    return Settings(scale_of_scores(function, scale, width), span, softcap_of_scores(function, softcap), packed)


def terms(function: str, query: Any, pages: Cache, key_scale: Any, value_scale: Any, sinks: Any) -> Terms:
    """The scales as float32 arrays, and the sinks.

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    of_keys = _scale(function, "key_scale", key_scale, pages)
    of_values = _scale(function, "value_scale", value_scale, pages)
    return Terms(of_keys, of_values, sinks_of_heads(function, sinks, query.shape[1]))


def scale_of_cache(function: str, name: str, scale: Any, shapes: Sequence[tuple[int, ...]], remedy: str) -> Any:
    """A scale of cached numbers as float32, of one of the shapes, or of shape [1] for all; None if absent.

    Raises:
      ArgumentError: it is of another shape or dtype; `remedy` says what there may be.
    """
    if scale is None:
        return None
    number = as_real(scale)
    if number is not None:
        return jnp.full(1, number, jnp.float32)
    if is_float(scale) and scale.shape in ((), (1,), *shapes):
        return scale.astype(jnp.float32).reshape(scale.shape or 1)
    *first, last = "()", *(str([*shape]) for shape in shapes)
    raise refusal(function, name, f"a number, or floats of shape {', '.join(first)} or {last}", scale, remedy)


def _scale(function: str, name: str, scale: Any, pages: Cache) -> Any:
    shapes = (pages.heads,), (*pages.keys.shape[:2], pages.heads)
    return scale_of_cache(function, name, scale, shapes, "a scale for all, for each head, or for each head of each key")


def _holds(query: Any, pages: Any, packed: str | None) -> bool:
    if packed is not None:
        return pages.dtype == jnp.uint8
    return pages.dtype == query.dtype or str(pages.dtype) in QUANTIZED
