"""Resources of a program on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton import samples
from tilekern.errors import ResourceError
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.compile.resources import allocations, check_fits, check_launch_options, measure, occupancy
from tilekern.lower.triton.vendor import NVIDIA

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

HOPPER = CHIPS["cuda:sm_90"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize(
    ("chip", "registers", "shared", "threads", "programs"),
    [
        ("cuda:sm_80", 182, 0, 64, 4),
        ("cuda:sm_80", 66, 46600, 64, 3),
        ("cuda:sm_80", 205, 84276, 256, 1),
        ("cuda:sm_80", 45, 0, 32, 32),
        ("cuda:sm_90", 129, 223282, 64, 1),
        ("cuda:sm_90", 97, 0, 512, 1),
        ("cuda:sm_90", 179, 85951, 128, 2),
        ("cuda:sm_90", 152, 46468, 64, 4),
        ("cuda:sm_100", 25, 102272, 32, 2),
        ("cuda:sm_100", 74, 212261, 512, 1),
        ("cuda:sm_100", 16, 0, 1024, 2),
        ("cuda:sm_100", 109, 0, 256, 2),
        ("cuda:sm_86", 45, 0, 32, 16),
        ("cuda:sm_86", 66, 30000, 64, 3),
        ("cuda:sm_86", 40, 0, 256, 6),
        ("cuda:sm_89", 45, 0, 32, 24),
        ("cuda:sm_89", 152, 46468, 64, 2),
        ("cuda:sm_103", 66, 30000, 64, 7),
        ("cuda:sm_120", 128, 33000, 128, 3),
        ("cuda:sm_120", 205, 84276, 256, 1),
    ],
)
def test_occupancy_is_that_of_nvidias_calculator(
    chip: str, registers: int, shared: int, threads: int, programs: int
) -> None:
    """The last column is computed by `cudaOccMaxActiveBlocksPerMultiprocessor` of the CUDA toolkit 12.8."""
    limit = CHIPS[chip].threads_per_core
    assert occupancy(registers, shared, threads, CHIPS[chip]) == programs * threads / limit


@pytest.mark.parametrize(("columns", "programs"), [(0, 8), (32, 8), (128, 4), (256, 2), (512, 1)])
def test_programs_share_512_columns_of_tensor_memory(columns: int, programs: int) -> None:
    """8 programs by threads: 2048 // 256."""
    assert occupancy(32, 16384, 256, CHIPS["cuda:sm_100"], columns) == programs * 256 / 2048


@given(
    chip=st.sampled_from([chip for chip in CHIPS.values() if chip.vendor is NVIDIA]),
    registers=st.integers(1, 255),
    shared=st.integers(0, 227 << 10),
    warps=st.sampled_from([1, 2, 4, 8, 16, 32]),
    more=st.integers(0, 100),
    columns=st.sampled_from([0, 32, 64, 128, 256]),
)
def test_who_takes_more_is_resident_less(
    chip, registers: int, shared: int, warps: int, more: int, columns: int
) -> None:
    here = occupancy(registers, shared, 32 * warps, chip, columns)
    assert 0 <= here <= 1
    assert occupancy(registers + more, shared, 32 * warps, chip, columns) <= here
    assert occupancy(registers, shared + 1024 * more, 32 * warps, chip, columns) <= here
    assert occupancy(registers, shared, 32 * warps, chip, 2 * columns) <= here


def test_resources_of_programs() -> None:
    pytest.importorskip("triton", reason="needs triton")
    small = measure(compile_program(samples.add(), HOPPER), HOPPER)
    assert (small.spills, small.shared_bytes, small.threads, small.occupancy) == (0, 0, 128, 1.0)
    assert 0 < small.registers <= 32
    product = measure(compile_program(samples.matmul(num_warps=8), HOPPER), HOPPER)
    assert (product.spills, product.threads) == (0, 256)
    assert product.shared_bytes >= 3 * (128 * 64 + 64 * 128) * 2
    assert product.occupancy == 2 * 256 / 2048  # two programs by shared memory


def test_spills_are_registers_in_memory_and_not_local_arrays() -> None:
    """Triton 3.6 leaves a local array of 32 bytes in a sine, which is a stack frame but no spill."""
    pytest.importorskip("triton", reason="needs triton")
    assert measure(compile_program(samples.sine(), HOPPER), HOPPER).spills == 0
    spilling = measure(compile_program(samples.spill(), HOPPER), HOPPER)
    assert spilling.spills > 0
    assert spilling.registers == HOPPER.registers_per_thread


def test_the_bill_of_too_much_shared_memory() -> None:
    pytest.importorskip("triton", reason="needs triton")
    program = samples.matmul(256, 128, num_warps=8, num_stages=4)
    binary = compile_program(program, HOPPER)
    with pytest.raises(ResourceError) as caught:
        check_fits(binary, program, HOPPER)
    error = caught.value
    place = f"at {samples.USER}"
    assert f"got: {binary.shared_bytes:,}:\n    262,144 bytes: 4 × 256 × 128 bf16 {place}:4\n" in str(error)
    assert f"    262,144 bytes: 4 × 128 × 256 bf16 {place}:5\n" in str(error)
    assert "at most 232,448 bytes of shared memory" in error.expected
    assert error.fix == "make the blocks smaller, or have fewer loads in flight than num_stages=4"
    assert (error.loc.file, error.loc.line) == (str(samples.USER), 4)
    check_fits(compile_program(samples.matmul(num_warps=8), HOPPER), samples.matmul(num_warps=8), HOPPER)


def test_too_many_threads_or_columns() -> None:
    """Warp specialization adds warps to the requested ones."""
    pytest.importorskip("triton", reason="needs triton")
    program = samples.add()
    binary = compile_program(program, HOPPER)
    with pytest.raises(ResourceError, match=r"more threads than cuda:sm_90 allows(.|\n)*got: 1,152") as threads:
        check_fits(replace(binary, num_warps=36), program, HOPPER)
    assert threads.value.loc == program.loc
    with pytest.raises(ResourceError, match=r"columns of tensor memory(.|\n)*at most 512") as columns:
        check_fits(replace(binary, tensor_columns=1024), program, HOPPER)
    assert columns.value.loc == program.loc


@pytest.mark.parametrize("launch", [{"num_warps": 3}, {"num_warps": 64}, {"num_warps": 0}, {"num_stages": 0}])
def test_a_launch_that_no_gpu_has(launch: dict[str, int]) -> None:
    program = samples.add(**launch)
    ((name, value),) = launch.items()
    with pytest.raises(ResourceError, match=f"got: {name}={value}") as caught:
        check_launch_options(program, HOPPER)
    assert caught.value.loc == program.loc


def test_allocations_find_their_line_through_names_and_calls() -> None:
    text = """
#loc = loc(unknown)
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x128x64xbf16, #shared, #smem, mutable> loc(#loc5)
    %b = ttg.local_alloc %1 : (tensor<8x8xf8E4M3FN, #mma>) -> !ttg.memdesc<8x8xf8E4M3FN, #shared, #smem> loc(#loc6)
    %c = ttg.local_alloc : () -> !ttg.memdesc<2xi1, #shared, #smem, mutable> loc(#loc)
#loc1 = loc("<tilekern f 12>":7:3)
#loc4 = loc("/site-packages/triton/language/standard.py":9:3)
#loc5 = loc("a"(#loc1))
#loc6 = loc(callsite(#loc4 at #loc1))
"""
    found = [(a.shape, a.dtype, a.nbytes, a.line) for a in allocations(text)]
    assert found == [((3, 128, 64), "bf16", 49152, 7), ((8, 8), "f8E4M3FN", 64, 7), ((2,), "i1", 2, 0)]
