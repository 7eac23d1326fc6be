"""The programs of `ragged_paged_attention` for GPUs and TPUs: nothing spills, and no program copies the cache."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.gpu.item import lowerings_of
from tilekern.kernels.paged_attention import ragged_paged_attention
from tilekern.lower.target import resolve

pytestmark = pytest.mark.one_backend


def lowered(target: str, dtype: str, page: int, cache_dtype: str | None = None) -> Any:
    """The lowerings of both kernels, for Llama 3 8B: 512 tokens of 64 sequences, up to 8,192 keys each."""
    query = jax.ShapeDtypeStruct((512, 32, 128), dtype)
    cache = jax.ShapeDtypeStruct((64 * 8192 // page, page, 16, 128), cache_dtype or dtype)
    tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64,), (64, 8192 // page), (65,), (1,)))
    return lowerings_of(ragged_paged_attention, [query, cache, *tables], resolve(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float32", None), ("bfloat16", "int8")])
def test_nothing_spills(target: str, dtypes: tuple[str, str | None]) -> None:
    pytest.importorskip("triton", reason="needs triton")
    for lowering in lowered(target, dtypes[0], 16, dtypes[1]):
        assert lowering.compile().resources.spills == 0


@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v6e"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page", [16, 128])
def test_the_cache_is_read_as_it_lies_in_memory(target: str, dtype: str, page: int) -> None:
    for lowering in lowered(target, dtype, page):
        (line, *_) = [line for line in str(lowering.plan).splitlines() if " cache.keys[" in line]
        assert "in HBM, blocks" in line and "XLA" not in line, line
