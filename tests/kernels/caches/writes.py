"""Writes to pools between guard pages, in a process of its own: `python -m tests.kernels.caches.writes PART`.

The pools fill whole pages of the machine, so both ends are guarded. Tables, lengths and numbers of pages are random,
many of them outside of the pools.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.kernels import (
    copy_pages,
    mla_attention,
    paged_attention,
    ragged_paged_attention,
    select_keys,
    write_index_keys,
    write_latents,
    write_pages,
)

PARTS = 9
"""Every ninth kind of write is a part: a cache has four kinds of writes, so that each part has all kinds."""

PAGES, PAGE, GROUPS, WIDTH, TABLE = 32, 8, 2, 32, 5
TOKENS, SEQUENCES, ROUNDS = 12, 4, 6
LATENT, ROPE = 24, 8
EXTREMES = (-(2**31), -PAGES, -1, 0, PAGES - 1, PAGES, 2**31 - 1)


def tables(random: np.random.Generator) -> list[np.ndarray]:
    """Lengths, pages, starts and the number of sequences; lengths from below 0 to behind the table."""
    lengths = random.integers(-3, PAGE * TABLE + 9, SEQUENCES)
    numbers = random.integers(-2, PAGES + 2, (SEQUENCES, TABLE))
    numbers = np.where(random.random(numbers.shape) < 0.3, random.choice(EXTREMES, numbers.shape), numbers)
    starts = np.sort(random.integers(0, TOKENS + 1, SEQUENCES + 1))
    starts[0] = 0
    return [x.astype(np.int32) for x in (lengths, numbers, starts, np.array([SEQUENCES - random.integers(0, 2)]))]


def pool(*shape: int, dtype: Any = "float32") -> jax.Array:
    """Zeros of whole pages of the machine, in memory of XLA."""
    zeros = jnp.zeros((PAGES, PAGE, *shape), dtype)
    assert zeros.nbytes % mmap.PAGESIZE == 0
    return zeros


def rows(random: np.random.Generator, count: int, *shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal((count, *shape)), jnp.float32)


def scales() -> dict[str, Any]:
    """Scales of a quantised cache: one for each key, and one for all values."""
    return {"key_scale": pool(4 * GROUPS)[:, :, :GROUPS], "value_scale": jnp.float32(0.5)}


def caches() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, cache, keywords of `write_pages`)."""
    yield "one array", pool(2 * GROUPS, WIDTH), {}
    yield "a pair", (pool(GROUPS, WIDTH), pool(GROUPS, WIDTH)), {}
    yield "int8", pool(2 * GROUPS, WIDTH, dtype="int8"), scales()
    yield "float8", pool(2 * GROUPS, WIDTH, dtype="float8_e4m3fn"), scales()
    yield "int4", pool(GROUPS, WIDTH, dtype="uint8"), {**scales(), "cache_dtype": "int4"}
    yield "float4", pool(GROUPS, WIDTH, dtype="uint8"), {**scales(), "cache_dtype": "float4_e2m1fn"}


Step = Callable[..., tuple[Any, Any]]


def steps(random: np.random.Generator) -> Iterator[tuple[str, Any, Step, Callable[[], tuple[Any, ...]]]]:
    """(name, cache, a function of the cache and of more arrays that returns it first, a draw of these arrays)."""
    new = partial(rows, random)
    for name, cache, keywords in caches():

        def attend(cache: Any, query: Any, keys: Any, values: Any, *tables: Any, keywords: Any = keywords) -> Any:
            new_rows = {"new_keys": keys, "new_values": values, "target": "cpu:llvm"}
            out, pages = ragged_paged_attention(query, cache, *tables, **keywords, **new_rows)
            return pages.kv_pages, (out, pages)

        def decode(cache: Any, query: Any, keys: Any, values: Any, *tables: Any, keywords: Any = keywords) -> Any:
            new_rows = {"new_keys": keys, "new_values": values, "target": "cpu:llvm"}
            out, pages = paged_attention(query, cache, *tables, **keywords, **new_rows)
            return pages.kv_pages, (out, pages)

        def write(cache: Any, keys: Any, values: Any, *tables: Any, keywords: Any = keywords) -> Any:
            pages = write_pages(cache, keys, values, *tables, **keywords, theta=100.0)
            return pages.kv_pages, pages

        def of_tokens(count: int) -> list[jax.Array]:
            return [new(count, GROUPS, WIDTH), new(count, GROUPS, WIDTH)]

        yield (
            f"{name}, new keys of any tokens",
            cache,
            attend,
            lambda: (new(TOKENS, 4, WIDTH), *of_tokens(TOKENS), *tables(random)),
        )
        yield (
            f"{name}, new keys of a step",
            cache,
            decode,
            lambda: (new(SEQUENCES, 4, WIDTH), *of_tokens(SEQUENCES), *tables(random)[:2]),
        )
        yield f"{name}, write_pages", cache, write, lambda: (*of_tokens(TOKENS), *tables(random))
        yield f"{name}, copy_pages", cache, _copied, partial(_pairs, random)
    yield from _steps_of_latents(random)
    yield from _steps_of_the_indexer(random)


def _steps_of_latents(random: np.random.Generator) -> Iterator[tuple[str, Any, Step, Callable[[], tuple[Any, ...]]]]:
    new = partial(rows, random)
    settings: dict[str, Any] = {"value_width": LATENT}
    for name, cache in {
        "latents": pool(LATENT + ROPE),
        "latents of int8": pool(LATENT + ROPE, dtype="int8"),
        "a pair of latents": (pool(2 * LATENT // 3), pool(LATENT // 3)),
    }.items():
        is_pair = isinstance(cache, tuple)
        width = {"value_width": 16} if is_pair else settings

        def attend(cache: Any, query: Any, latents: Any, *tables: Any, width: Any = width) -> Any:
            options = {**width, "scale": 0.1, "new_latents": latents, "target": "cpu:llvm"}
            out, pages = mla_attention(query, cache, *tables, **options)
            return pages.kv_pages, out

        def write(cache: Any, latents: Any, *tables: Any, width: Any = width) -> Any:
            pages = write_latents(cache, latents, *tables, **width, theta=100.0)
            return pages.kv_pages, pages

        numbers = LATENT if is_pair else LATENT + ROPE
        yield (
            f"{name}, new latents",
            cache,
            attend,
            lambda numbers=numbers: (new(TOKENS, 4, numbers), new(TOKENS, numbers), *tables(random)),
        )
        yield f"{name}, write_latents", cache, write, lambda numbers=numbers: (new(TOKENS, numbers), *tables(random))
        yield f"{name}, copy_pages", cache, _copied, partial(_pairs, random)


def _steps_of_the_indexer(
    random: np.random.Generator,
) -> Iterator[tuple[str, Any, Step, Callable[[], tuple[Any, ...]]]]:
    new = partial(rows, random)
    for name, cache, scale in (
        ("the indexer's keys", pool(WIDTH), None),
        ("the indexer's int8", pool(WIDTH, dtype="int8"), jnp.zeros((PAGES, PAGE))),
        ("the indexer's float8", pool(WIDTH, dtype="float8_e4m3fn"), jnp.zeros((PAGES, PAGE))),
    ):

        def select(cache: Any, keys: Any, query: Any, weights: Any, *tables: Any, scale: Any = scale) -> Any:
            pages = write_index_keys(cache, keys, *tables, key_scale=scale)
            options = {"key_scale": pages.key_scale, "num_keys": 7, "target": "cpu:llvm"}
            return pages.key_pages, (pages, select_keys(query, weights, pages.key_pages, *tables, **options))

        yield (
            f"{name}, new keys",
            cache,
            select,
            lambda: (new(TOKENS, WIDTH), new(TOKENS, 4, WIDTH), new(TOKENS, 4), *tables(random)),
        )


def _copied(cache: Any, *pairs: Any) -> Any:
    return copy_pages(cache, *pairs), 0


def _pairs(random: np.random.Generator) -> tuple[Any, ...]:
    numbers = random.integers(-2, PAGES + 2, (2, 9))
    return tuple(np.where(random.random((2, 9)) < 0.3, random.choice(EXTREMES, (2, 9)), numbers).astype(np.int32))


def places(cache: Any) -> list[int]:
    """The addresses of the arrays of a cache."""
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]


def main() -> None:
    """Run the steps of a part, each on pools that stay where they are."""
    library = ctypes.CDLL(None)
    library.is_guarded.argtypes = [ctypes.c_void_p]
    part, random = int(sys.argv[1]), np.random.default_rng(0)
    for name, cache, step, draw in islice(steps(random), part, None, PARTS):
        run = jax.jit(step, donate_argnums=0)
        cache = jax.tree.map(jnp.copy, cache)  # `copy_pages` and others take the same pools
        before = places(cache)
        for _ in range(ROUNDS):
            cache, results = run(cache, *draw())
            jax.block_until_ready((cache, results))
        assert places(cache) == before, f"{name}: a pool was copied"
        assert all(map(library.is_guarded, before)), f"{name}: a pool has no guards"
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
