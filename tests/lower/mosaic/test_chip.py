"""Our facts about TPUs, against those of JAX and libtpu."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tests.lower.mosaic.pallas_kernels import TILE, fetched, large, looked_up, needs_libtpu, scratch
from tilekern import _jax
from tilekern.errors import ResourceError
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, I32
from tilekern.lower.mosaic.chip import CHIPS, LANES, PORTABLE, SUBLANES, Chip, padded_bytes, tile_rows
from tilekern.lower.mosaic.compile.ahead_of_time import compile_ahead, vmem_used
from tilekern.lower.target import TARGETS

each_chip = pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda c: c.name)
CHIP = st.sampled_from(list(CHIPS.values()))
DTYPE = st.sampled_from([DTYPES[name] for name in ("f32", "i32", "bf16", "i16", "i8", "u8", "f8e4m3fn", "bool")])
LENGTH = st.sampled_from([1, 2, 3, 5, 8, 9, 16, 17, 40])
WIDTH = st.sampled_from([1, 7, 100, 128, 129, 300])
# Every example is compiled by libtpu, in a tenth of a second.
COMPILED = settings(max_examples=24)


def allocated(function: Any, types: list[Any], chip: Chip) -> int:
    """The vector memory that a kernel takes."""
    return vmem_used(compile_ahead(function, types, chip))


def test_every_tpu_target_has_its_chip() -> None:
    assert {name for name, target in TARGETS.items() if target.platform == "tpu"} == set(CHIPS)
    assert all(name == chip.name for name, chip in CHIPS.items())


@each_chip
def test_chips_are_those_of_jax(chip: Chip) -> None:
    with _jax.abstract_tpu(chip.device_kind, chip.cores):
        info = pltpu.get_tpu_info()
    assert f"tpu:{info.chip_version}" == chip.name
    assert (info.num_cores, info.is_megacore) == (chip.cores, chip.cores == 2)
    assert (info.num_lanes, info.num_sublanes) == (LANES, SUBLANES)
    assert (info.mxu_column_size, info.num_mxus) == (chip.matrix_size, chip.matrix_units)
    assert info.vmem_capacity_bytes == chip.vmem_bytes
    assert chip.table_bytes < info.smem_capacity_bytes
    assert info.bf16_ops_per_second == pytest.approx(chip.bf16_flops, rel=0.01)
    # JAX counts 11 % less than the documentation for v5p.
    assert info.mem_bw_bytes_per_second == pytest.approx(chip.hbm_bandwidth, rel=0.12)


def test_the_portable_chip_is_no_better_than_any() -> None:
    for chip in CHIPS.values():
        assert PORTABLE.vmem_budget <= chip.vmem_budget < chip.vmem_limit
        assert PORTABLE.table_bytes <= chip.table_bytes
        assert PORTABLE.bf16_vectors <= chip.bf16_vectors


# --- what the compiler grants ---------------------------------------------------------------------------------------


@needs_libtpu
@each_chip
def test_all_vector_memory_may_be_asked_for(chip: Chip) -> None:
    assert allocated(large(chip.vmem_limit, chip.vmem_limit), [TILE], chip) == chip.vmem_limit
    with pytest.raises(ResourceError):
        allocated(large(chip.vmem_bytes + 4096, 1 << 30), [TILE], chip)


@needs_libtpu
@each_chip
def test_vector_memory_without_asking(chip: Chip) -> None:
    assert allocated(large(chip.vmem_default), [TILE], chip) == chip.vmem_default
    with pytest.raises(ResourceError, match="vmem_limit_bytes"):
        allocated(large(chip.vmem_default + 4096), [TILE], chip)


@needs_libtpu
@each_chip
def test_scalar_memory(chip: Chip) -> None:
    for shape in ((chip.table_bytes // 4,), (chip.table_bytes // 512, 3)):
        assert padded_bytes(shape, I32) == chip.table_bytes
        allocated(looked_up(shape), [jax.ShapeDtypeStruct(shape, I32), TILE], chip)
    rows = 2 * chip.table_bytes // 512 + 8
    with pytest.raises(ResourceError, match="smem"):
        allocated(looked_up((rows, 3)), [jax.ShapeDtypeStruct((rows, 3), I32), TILE], chip)


# --- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "f32", "bf16", "i8"), [(1, 1, 2, 4), (2, 2, 2, 4), (3, 4, 4, 4), (5, 8, 8, 8), (8, 8, 8, 8), (17, 8, 8, 8)]
)
def test_rows_of_tiles(rows: int, f32: int, bf16: int, i8: int) -> None:
    assert [tile_rows(rows, DTYPES[name]) for name in ("f32", "bf16", "i8", "bool")] == [f32, bf16, i8, f32]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((), F32, 512),
        ((1,), F32, 512),
        ((129,), F32, 1024),
        ((129,), BF16, 512),
        ((8, 128), F32, 4096),
        ((8, 128), BF16, 2048),
        ((8, 128), BOOL, 4096),
        ((1, 128), BF16, 512),
        ((17, 129), F32, 24 * 256 * 4),
        ((2, 3, 128), F32, 2 * 4 * 512),
        ((0, 128), F32, 0),
    ],
)
def test_padding(shape: tuple[int, ...], dtype: Any, expected: int) -> None:
    assert padded_bytes(shape, dtype) == expected


@needs_libtpu
@COMPILED
@given(CHIP, st.one_of(st.tuples(WIDTH), st.tuples(LENGTH, WIDTH), st.tuples(LENGTH, LENGTH, WIDTH)), DTYPE)
def test_the_compiler_pads_buffers_so(chip: Chip, shape: tuple[int, ...], dtype: Any) -> None:
    assert allocated(scratch(shape, dtype), [TILE], chip) == padded_bytes(shape, dtype)


@needs_libtpu
@COMPILED
@given(CHIP, st.one_of(st.tuples(LENGTH, WIDTH), st.tuples(LENGTH, LENGTH, WIDTH)), DTYPE, st.booleans())
def test_blocks_have_two_such_buffers(chip: Chip, shape: tuple[int, ...], dtype: Any, moves: bool) -> None:
    """One, if it is the same block at all steps; in whole KiB."""
    operand = jax.ShapeDtypeStruct((4, *shape), dtype)
    expected = -(-(1 + moves) * padded_bytes(shape, dtype) // 1024) * 1024
    assert allocated(fetched(shape, moves), [operand], chip) == expected


def test_no_tpu_has_64_bits() -> None:
    with pytest.raises(AssertionError, match="float64"):
        padded_bytes((8,), jnp.dtype("float64"))
