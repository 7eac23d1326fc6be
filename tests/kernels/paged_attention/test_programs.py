"""Programs of paged attention: nothing spills on GPUs, and no program copies the cache, on CPUs, GPUs or TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.gpu.item import lowerings_of
from tilekern.kernels.paged_attention import paged_attention, ragged_paged_attention
from tilekern.lower.target import resolve

pytestmark = pytest.mark.one_backend


def lowered(target: str, dtype: str, page: int, cache_dtype: str | None = None) -> Any:
    """The lowerings of both kernels, for Llama 3 8B: 512 tokens of 64 sequences, up to 8,192 keys each."""
    query = jax.ShapeDtypeStruct((512, 32, 128), dtype)
    packed = cache_dtype in ("int4", "float4_e2m1fn")
    heads, numbers = (8, "uint8") if packed else (16, cache_dtype or dtype)
    cache = jax.ShapeDtypeStruct((64 * 8192 // page, page, heads, 128), numbers)
    tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64,), (64, 8192 // page), (65,), (1,)))
    call = partial(ragged_paged_attention, cache_dtype=cache_dtype) if packed else ragged_paged_attention
    return lowerings_of(call, [query, cache, *tables], resolve(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16", None), ("float32", None), ("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", "float4_e2m1fn")],
)
def test_nothing_spills(target: str, dtypes: tuple[str, str | None]) -> None:
    pytest.importorskip("triton", reason="needs triton")
    for lowering in lowered(target, dtypes[0], 16, dtypes[1]):
        assert lowering.compile().resources.spills == 0


@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v6e"])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16", None), ("float32", None), ("bfloat16", "int4"), ("float32", "float4_e2m1fn")]
)
@pytest.mark.parametrize("page", [16, 128])
def test_the_cache_is_read_as_it_lies_in_memory(target: str, dtypes: tuple[str, str | None], page: int) -> None:
    for lowering in lowered(target, dtypes[0], page, dtypes[1]):
        (line, *_) = [line for line in str(lowering.plan).splitlines() if " cache.keys[" in line]
        assert "in HBM, blocks" in line and "XLA" not in line, line


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("is_donated", [True, False])
def test_a_cache_that_is_taken_over_is_written_in_place(dtype: str, is_donated: bool) -> None:
    """Of a cache that is not taken over, XLA copies all pages, which the test must see."""

    def step(pages: jax.Array, query: jax.Array, new: jax.Array, where: jax.Array, tables: Any) -> Any:
        pages = pages.at[where[0], where[1]].set(new, mode="drop")
        return pages, paged_attention(query, pages, *tables)

    pages, new = (jax.ShapeDtypeStruct((*lead, 4, 64), dtype) for lead in ((512, 16), (3,)))
    query = jax.ShapeDtypeStruct((3, 4, 64), "float32" if dtype == "int8" else dtype)
    where, lengths, table = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 3), (3,), (3, 9)))
    run = jax.jit(step, donate_argnums=(0,) if is_donated else ())
    compiled = run.lower(pages, query, new, where, (lengths, table)).compile()
    copies = [line for line in compiled.as_text().splitlines() if "[512,16,4,64]" in line and " copy(" in line]
    aliased = compiled.memory_analysis().alias_size_in_bytes
    whole = pages.size * pages.dtype.itemsize
    assert (not copies, aliased) == (is_donated, whole if is_donated else 0)
