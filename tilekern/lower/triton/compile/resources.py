"""Resources of a compiled program: registers, shared memory, threads; refusal of programs that do not fit."""

from __future__ import annotations

import re
from math import prod

from tilekern import source
from tilekern.errors import ResourceError
from tilekern.ir.core import cdiv, round_up
from tilekern.ir.records import record
from tilekern.lower.resources import Resources
from tilekern.lower.triton.chip import MAX_THREADS, Chip
from tilekern.lower.triton.compile import amd_resources
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.program import Program
from tilekern.lower.triton.vendor import AMD
from tilekern.source import Loc

TENSOR_COLUMNS = 512
"""Columns of tensor memory of a multiprocessor: PTX ISA, "Tensor Memory Addressing"."""

_BILLED = 6  # allocations that an error lists by themselves


@record
class Allocation:
    """One buffer in shared memory.

    Attributes:
      shape: shape in elements; the first dim counts stages if the loads of a loop are pipelined.
      dtype: dtype in MLIR's notation.
      nbytes: size in bytes.
      line: line of the generated source, 0 if unknown.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    line: int


def measure(binary: Binary, chip: Chip) -> Resources:
    """The resources of a binary. For NVIDIA it takes another run of the assembler, whose report Triton drops."""
    if chip.vendor is AMD:
        return amd_resources.measure(binary, chip)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", binary.report)
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", binary.report))
    threads, columns = 32 * binary.num_warps, binary.tensor_columns
    return Resources(
        registers=registers,
        spills=sum(max(int(stored), int(loaded)) for stored, loaded in spills),
        shared_bytes=binary.shared_bytes,
        threads=threads,
        serialized="C7515" in binary.report if chip.matrix_unit == "wgmma" else None,
        occupancy=occupancy(registers, binary.shared_bytes, threads, chip, columns),
        tensor_columns=columns if chip.matrix_unit == "tcgen05" else None,
    )


def occupancy(registers: int, shared_bytes: int, threads: int, chip: Chip, tensor_columns: int = 0) -> float:
    """The fraction of the threads of a multiprocessor of NVIDIA that programs of this size can fill.

    The rules follow `cuda_occupancy.h` of the CUDA toolkit for capabilities 8.x to 10.x. Warps get registers in
    units of 256, from four equal parts of the register file. Programs get shared memory in units of 128 bytes, and the
    system takes 1 KiB for each program. A program waits where it allocates tensor memory that other programs hold
    (PTX ISA, "tcgen05.alloc").
    """
    warps = cdiv(threads, 32)
    of_warp = round_up(registers * 32, 256)
    warps_by_registers = 4 * (chip.registers_per_core // 4 // of_warp)
    programs = min(
        chip.programs_per_core,
        chip.threads_per_core // 32 // warps,
        warps_by_registers // warps,
        chip.shared_bytes_per_core // round_up(shared_bytes + 1024, 128),
        TENSOR_COLUMNS // max(1, tensor_columns),
    )
    return programs * warps * 32 / chip.threads_per_core


def check_launch_options(program: Program, chip: Chip) -> None:
    """Refuse numbers of warps and stages that the GPU does not have."""
    allowed = [1 << n for n in range(chip.largest_warps.bit_length())]
    with source.at(program.loc):
        if program.num_warps not in allowed:
            raise ResourceError(
                f"`{program.name}` cannot run with this number of warps",
                expected=f"num_warps = {', '.join(map(str, allowed[:-1]))} or {allowed[-1]}",
                got=f"num_warps={program.num_warps}",
                fix="4 suits most kernels, 8 large matrix products",
            )
        if program.num_stages < 1:
            raise ResourceError(
                f"`{program.name}` cannot run with this number of stages",
                expected="num_stages of at least 1",
                got=f"num_stages={program.num_stages}",
                fix="2 to 4 suit most kernels; 1 turns pipelining off",
            )


def lacks_shared(binary: Binary, chip: Chip) -> bool:
    """True if a program needs more shared memory than the chip has."""
    return binary.shared_bytes > chip.shared_bytes


def check_fits(binary: Binary, program: Program, chip: Chip) -> None:
    """Refuse a program that exceeds the limits of the chip.

    Raises:
      ResourceError: with a bill of the shared memory, and the line of its largest buffer.
    """
    name, columns, loc = program.name, binary.tensor_columns, program.loc
    if (threads := chip.vendor.lanes * binary.num_warps) > MAX_THREADS:
        raise _too_much(name, chip, "threads", threads, MAX_THREADS, loc, f"lower num_warps={program.num_warps}")
    if columns > TENSOR_COLUMNS:
        raise _too_much(name, chip, "columns of tensor memory", columns, TENSOR_COLUMNS, loc, "make the blocks smaller")
    if lacks_shared(binary, chip):
        users = sorted(allocations(binary.text("ttgir")), key=lambda user: -user.nbytes)
        bill = [*(_item(user, program) for user in users[:_BILLED]), _unlisted(users, binary.shared_bytes)]
        loc = program.lines.get(users[0].line, loc) if users else loc
        fix = "make the blocks smaller"
        if program.num_stages > 1:
            fix += f", or have fewer loads in flight than num_stages={program.num_stages}"
        raise _too_much(
            name, chip, "bytes of shared memory", binary.shared_bytes, chip.shared_bytes, loc, fix, "\n    ".join(bill)
        )


def _too_much(
    name: str, chip: Chip, unit: str, used: int, limit: int, loc: Loc, fix: str, bill: str = ""
) -> ResourceError:
    with source.at(loc):
        return ResourceError(
            f"a program of `{name}` needs more {unit} than {chip.name} allows",
            expected=f"at most {limit:,} {unit}",
            got=f"{used:,}" + (f":\n    {bill}" if bill else ""),
            fix=fix,
        )


def _item(user: Allocation, program: Program) -> str:
    """One line of the bill, such as "32,768 bytes: 128 × 64 bf16 at kernel.py:7"; without a place if it is unknown."""
    shape = " × ".join(map(str, user.shape))
    place = f" at {program.lines[user.line]}" if user.line in program.lines else ""
    return f"{user.nbytes:,} bytes: {shape} {user.dtype}{place}"


def _unlisted(users: list[Allocation], shared_bytes: int) -> str:
    """The last line of the bill: the difference between the sum of the lines above and the total."""
    unlisted_bytes = shared_bytes - sum(user.nbytes for user in users[:_BILLED])
    if unlisted_bytes < 0:
        return "(buffers that are never in use together share their place)"
    return f"{unlisted_bytes:,} bytes: smaller buffers, reductions, changes of layout"


def allocations(ttgir: str) -> list[Allocation]:
    """The buffers in shared memory that a program allocates, in program order."""
    locs = dict(re.findall(r"^(#loc\d*) = (loc\(.*)$", ttgir, re.MULTILINE))
    buffers = re.findall(
        r"= ttg\.local_alloc .*!ttg\.memdesc<((?:\d+x)+)(\w+),.* loc\((#loc\d*)\)$", ttgir, re.MULTILINE
    )
    return [_allocation(shape, dtype, _line(loc, locs)) for shape, dtype, loc in buffers]


def _allocation(shape: str, dtype: str, line: int) -> Allocation:
    dims = tuple(int(dim) for dim in shape.split("x")[:-1])
    bits = re.search(r"\d+", dtype)
    nbytes = cdiv(int(bits[0]), 8) if bits else 1
    return Allocation(dims, dtype, prod(dims) * nbytes, line)


def _line(name: str, locs: dict[str, str]) -> int:
    """The line of the generated source that a location `name` refers to, directly or through other locations."""
    loc = locs.get(name, "")
    if place := re.search(r'"<tilekern [^"]*":(\d+):', loc):
        return int(place[1])
    lines = (_line(inner, locs) for inner in re.findall(r"#loc\d*", loc))
    return next((line for line in lines if line), 0)
