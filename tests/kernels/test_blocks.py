import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tilekern as tk
from tilekern.ir.core import cdiv
from tilekern.kernels.blocks import copies_well, depth, power_of_two, soonest, takes_registers, tiled
from tilekern.kernels.flash_attention.arguments import Config, Extras
from tilekern.kernels.flash_attention.kernel import _cuda as attention_schedule
from tilekern.kernels.matmul.kernel import cuda_blocks as matmul_schedule
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.rows import PER_THREAD, gpu_blocks
from tilekern.lower.target import TARGETS, on_platform
from tilekern.lower.triton.chip import CHIPS

pytestmark = pytest.mark.one_backend

TILES = ((128, 256), (128, 128), (64, 128), (64, 64))
sizes = st.integers(0, 200_000)
powers = st.integers(0, 12).map(lambda n: 1 << n)
targets = st.sampled_from(sorted(CHIPS))
floats = st.sampled_from(["bfloat16", "float16", "float32", "float64"])


def is_power(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


@given(extent=sizes, limit=powers, least=powers)
def test_a_power_of_two_holds_what_it_may(extent: int, limit: int, least: int) -> None:
    block = power_of_two(extent, limit, min(least, limit))
    assert is_power(block) and min(least, limit) <= block <= limit
    assert block == limit or block >= extent
    assert block == min(least, limit) or block < 2 * extent


@given(rows=sizes, columns=sizes, target=targets)
def test_programs_of_the_soonest_tile_are_done_no_later_than_others(rows: int, columns: int, target: str) -> None:
    """By waves alone, leaving out what loads take: no other tile needs less than half of the time."""

    def products(tile: tuple[int, int]) -> int:
        return cdiv(cdiv(rows, tile[0]) * cdiv(columns, tile[1]), tk.device(target).cores) * tile[0] * tile[1]

    chosen = soonest(rows, columns, TILES, tk.device(target).cores)
    assert products(chosen) <= 2 * min(map(products, TILES))


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (8192, 8192, (128, 256)),  # many waves: what loads least
        (2048, 2048, (128, 256)),  # one wave of 128 programs for 132 processors
        (1024, 1024, (64, 128)),  # larger tiles would leave half of the processors without work
        (64, 64, (64, 64)),
    ],
)
def test_the_soonest_tile_on_an_h200(rows: int, columns: int, tile: tuple[int, int]) -> None:
    assert soonest(rows, columns, TILES, tk.device("cuda:sm_90").cores) == tile


@given(inner=sizes, itemsize=st.sampled_from([1, 2, 4, 8]))
def test_a_tile_is_no_deeper_than_a_line(inner: int, itemsize: int) -> None:
    assert is_power(depth(inner, itemsize)) and 16 <= depth(inner, itemsize) <= max(16, 128 // itemsize)


def test_rows_that_start_at_multiples_of_sixteen_bytes_copy_well() -> None:
    assert copies_well(1000, 2) and copies_well(4, 4) and not copies_well(50257, 2) and not copies_well(2, 4)


@given(rows=sizes, columns=sizes, target=targets)
def test_rows_fit_the_registers_of_their_warps(rows: int, columns: int, target: str) -> None:
    chosen = gpu_blocks(jax.ShapeDtypeStruct((rows, columns), jnp.float32), device=tk.device(target))
    elements = chosen["block_rows"] * chosen["block_columns"]
    assert elements <= 2 * PER_THREAD * 32 * chosen["num_warps"]
    assert chosen["block_columns"] >= columns or columns > 16384


@pytest.mark.parametrize(("rows", "warps"), [(1, 16), (264, 16), (265, 8), (528, 8), (529, 4), (10**6, 4)])
def test_many_long_rows_leave_warps_to_each_other(rows: int, warps: int) -> None:
    chosen = gpu_blocks(jax.ShapeDtypeStruct((rows, 50257), jnp.float32), device=tk.device("cuda:sm_90"))
    assert chosen == {"block_rows": 1, "block_columns": 512 * warps, "num_warps": warps}


@given(m=sizes, k=sizes, n=sizes, dtype=st.sampled_from(["int8", "int32", "bfloat16", "float32"]), target=targets)
def test_the_stages_of_a_matmul_fit_the_shared_memory(m: int, k: int, n: int, dtype: str, target: str) -> None:
    x, w = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    chosen = matmul_schedule(x, w, tk.device(target))
    assert all(is_power(chosen[name]) and chosen[name] >= 16 for name in ("block_m", "block_n", "block_k"))
    stage = (chosen["block_m"] + chosen["block_n"]) * chosen["block_k"] * jnp.dtype(dtype).itemsize
    held = max(1, chosen["num_stages"] - takes_registers(tk.device(target)))  # one stage may be in registers
    assert held * stage < CHIPS[target].shared_bytes


@example(queries=1, keys=4096, heads=8, width=192, dtype="bfloat16", target="cuda:sm_120")  # one token is decoded
@given(queries=sizes, keys=sizes, heads=st.integers(0, 128), width=st.integers(0, 512), dtype=floats, target=targets)
def test_the_stages_of_attention_fit_the_shared_memory(
    queries: int, keys: int, heads: int, width: int, dtype: str, target: str
) -> None:
    """One stage, and the queries, are in registers if products take operands from there; few queries have wide rows."""
    query, key = (jax.ShapeDtypeStruct((1, length, heads, width), dtype) for length in (queries, keys))
    chosen = attention_schedule(query, key, key, Extras(), config=Config(1.0), device=tk.device(target))
    assert is_power(chosen["block_q"]) and 16 <= chosen["block_q"] <= 128
    registers = takes_registers(tk.device(target))
    held = 2 * max(1, chosen["num_stages"] - registers) * chosen["block_k"] + (0 if registers else chosen["block_q"])
    padded = power_of_two(width, 512) if registers and queries <= 32 and query.dtype.itemsize == 2 else width
    if width * query.dtype.itemsize <= 2048:
        assert held * padded * query.dtype.itemsize <= CHIPS[target].shared_bytes


@given(st.integers(0, 200_000), st.sampled_from([8, 128]), st.integers(1, 64))
def test_blocks_of_tpus_are_whole_or_aligned(extent: int, unit: int, units: int) -> None:
    limit = unit * units
    block = tiled(extent, limit, unit)
    assert block == max(1, extent) or (block % unit == 0 and block <= limit)
    tiles = -(-extent // block)
    assert tiles <= 1 or tiles == -(-extent // limit)


@pytest.mark.parametrize("inner", [128, 8192, 9000, 10240, 10880, 14336, 53248])
def test_products_fit_what_every_tpu_has(inner: int) -> None:
    """Code for TPUs that are not here is for the least vector memory of all."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, inner), (inner, 4096)))
    portable = on_platform("tpu", None)
    assert portable.portable
    for target in (portable, *(t for name, t in TARGETS.items() if name.startswith("tpu:"))):
        lowering = matmul.trace(x, w)._kernel.lowered(target)
        assert lowering.planned.vmem_bytes <= lowering.planned.chip.vmem_budget
