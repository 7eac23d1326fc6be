"""Programs of latent attention: nothing spills on GPUs, and a TPU copies each latent once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.gpu.item import lowerings_of
from tilekern.kernels.mla_attention import mla_attention
from tilekern.lower.target import resolve

pytestmark = pytest.mark.one_backend


def lowered(target: str, heads: int, page: int, dtype: str = "bfloat16", cache_dtype: str | None = None) -> Any:
    """The lowerings of both kernels: 512 tokens of 16 sequences, up to 8,192 keys each, in a pool for 64 sequences."""
    query = jax.ShapeDtypeStruct((512, heads, 576), dtype)
    cache = jax.ShapeDtypeStruct((64 * 8192 // page, page, 576), cache_dtype or dtype)
    tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((16,), (16, 8192 // page), (17,)))
    return lowerings_of(partial(mla_attention, scale=0.1), [query, cache, *tables], resolve(target))


@pytest.mark.parametrize(
    ("target", "heads", "page", "dtype", "cache_dtype"),
    [
        ("cuda:sm_90", 128, 64, "bfloat16", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("cuda:sm_90", 128, 1024, "bfloat16", None),
                ("cuda:sm_90", 128, 8, "bfloat16", None),
                ("cuda:sm_90", 16, 64, "bfloat16", None),
                ("cuda:sm_90", 128, 64, "bfloat16", "int8"),
                ("cuda:sm_90", 128, 64, "bfloat16", "float8_e4m3fn"),
                ("cuda:sm_90", 128, 64, "float32", None),
                ("cuda:sm_80", 128, 64, "bfloat16", None),
                ("cuda:sm_89", 128, 16, "bfloat16", None),
                ("cuda:sm_100", 128, 64, "bfloat16", None),
            ]
        ),
    ],
)
def test_nothing_spills(target: str, heads: int, page: int, dtype: str, cache_dtype: str | None) -> None:
    pytest.importorskip("triton", reason="needs triton")
    for lowering in lowered(target, heads, page, dtype, cache_dtype):
        assert lowering.compile().resources.spills == 0


def test_all_products_of_64_rows_are_those_of_warpgroups() -> None:
    """Queries in registers would spill; a select of latents would, too."""
    pytest.importorskip("triton", reason="needs triton")
    for lowering in lowered("cuda:sm_90", 128, 64):
        asm = lowering.compile().asm
        assert "wgmma" in asm["ptx"] and "mma.sync" not in asm["ptx"] and "cp.async" in asm["ptx"]


@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v6e"])
@pytest.mark.parametrize(("heads", "page"), [(16, 8), (128, 16), (128, 64), (64, 1024)])
@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float32", None), ("bfloat16", "int8")])
def test_a_latent_is_copied_once_as_it_lies_in_memory(
    target: str, heads: int, page: int, dtypes: tuple[str, str | None]
) -> None:
    """Each page of a tile is one copy of whole rows, for scores and values."""
    for lowering in lowered(target, heads, page, *dtypes):
        lines = [line for line in str(lowering.plan).splitlines() if " cache.latent[" in line]
        assert len(lines) == max(1, min(256, 16 * page) // page)
        assert all("in HBM, blocks" in line and ", 576]" in line and "XLA" not in line for line in lines), lines
