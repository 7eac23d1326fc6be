"""A recorded launch against the Func, the plan and the machine code: each check reads another source than `call.py`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from math import prod

import numpy as np

from tests.lower.triton.recording.driver import Call, Recorded, addresses
from tilekern.ir.core import round_up
from tilekern.ir.types import BF16
from tilekern.lower.triton.call_message import Int32, Int64, Pointer, TensorMap
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.lower.triton.program import Argument, Descriptor

# Dynamic shared memory that needs no opt-in (CUDA C++ Programming Guide, "Shared Memory").
_WITHOUT_OPT_IN = 48 << 10

# CUtensorMapDataType of cuda.h, by kind and bytes.
_ELEMENT_TYPES = {("u", 1): 0, ("u", 2): 1, ("u", 4): 2, ("i", 4): 3, ("u", 8): 4, ("i", 8): 5}
_ELEMENT_TYPES |= {("f", 2): 6, ("f", 4): 7, ("f", 8): 8}
_BF16 = 9

# Bytes of a row of swizzled shared memory, by CUtensorMapSwizzle.
_SWIZZLE = {0: 2**32, 1: 32, 2: 64, 3: 128}

_PASSED = {Pointer: 8, TensorMap: 128, Int32: 4, Int64: 8}
"""Bytes of parameters."""

_PTX_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


def check(lowering: TritonLowering, recorded: Recorded) -> None:
    """Assert that a launch is what the machine code expects, and what the Func means."""
    assert recorded.error is None, recorded.error
    assert all(call.get("status", 0) == 0 for call in recorded.calls), recorded.calls
    _check_image(lowering, recorded)
    _check_size(lowering, recorded)
    _check_parameters(lowering, recorded)
    _check_fills(lowering, recorded)
    _check_aliases(lowering, addresses(lowering.program))


def _check_image(lowering: TritonLowering, recorded: Recorded) -> None:
    """The driver got the cubin of Triton, byte for byte, and the entry function of its text."""
    code = lowering.compile().asm["cubin"]
    (launch,) = recorded.of("launch")
    assert launch["checksum"] == zlib.crc32(code)
    for module in recorded.of("module"):
        assert (module["size"], module["checksum"]) == (len(code), zlib.crc32(code))
        assert module["architecture"] == lowering.chip.capability
    assert launch["function"] == _entry(lowering)[0] == lowering.program.name


def _check_size(lowering: TritonLowering, recorded: Recorded) -> None:
    """Grid, block, cluster and shared memory; the opt-in comes before the first launch of a function."""
    compiled, (launch,) = lowering.compile(), recorded.of("launch")
    warps, shared = _warps(compiled.asm["ttgir"]), compiled.resources.shared_bytes
    program = lowering.program
    assert launch["cluster"] == [program.cluster, 1, 1] == [_cluster(compiled.asm["ptx"]), 1, 1]
    # In Gluon thread blocks take programs in turn.
    programs = program.programs * program.cluster if program.language == "gluon" else prod(lowering.func.grid)
    assert launch["grid"] == [programs, 1, 1]
    assert launch["block"] == [32 * warps, 1, 1] == [_entry(lowering)[2], 1, 1]
    assert launch["shared"] == shared
    if recorded.of("module"):
        assert bool(recorded.of("opt-in")) == (shared > _WITHOUT_OPT_IN)
    for opt_in in recorded.of("opt-in"):
        assert opt_in["function"] == launch["function"] and opt_in["bytes"] >= shared


def _check_parameters(lowering: TritonLowering, recorded: Recorded) -> None:
    """As many parameters as the PTX declares, of its sizes, with the values that the arguments stand for."""
    (launch,) = recorded.of("launch")
    maps = {call["number"]: call for call in recorded.of("map")}
    # jaxlib appends scratch memory, of the programs and of profilers.
    passed = [_PASSED[type(parameter)] for parameter in recorded.asked.parameters] + [8, 8]
    assert launch["sizes"] == _entry(lowering)[1] == passed
    values, tiles = iter(launch["values"]), []
    for argument, address in zip(lowering.program.arguments, addresses(lowering.program), strict=True):
        value = next(values)
        if argument.descriptor is None:
            assert value == address, f"{argument.name}: {value:#x} instead of {address:#x}"
            continue
        assert value["aligned"], f"{argument.name}: the map is not aligned to 64 bytes"
        call = maps.pop(value["map"])
        _check_map(call, argument, address, _shape(lowering, argument), lowering.program.cluster)
        tiles.append((argument.descriptor.block, call["swizzle"]))
        for number in (*argument.descriptor.shape, *argument.descriptor.strides):
            assert next(values) == number, argument
    assert list(values) == [0, 0]  # scratch memory: the library needs none
    assert not maps
    assert tiles == _tiles(lowering.compile().asm["ttgir"])


def _check_map(call: Call, argument: Argument, address: int, shape: Sequence[int], cluster: int) -> None:
    """A TMA descriptor covers elements of its array only, in boxes that the hardware can copy.

    The box is the part of one thread block, where those of a cluster divide a tile.
    """
    box, size, descriptor = call["box"], argument.dtype.itemsize, argument.descriptor
    assert descriptor is not None
    key = (argument.dtype.kind if argument.dtype.kind in "iuf" else "u", size)
    assert call["type"] == (_BF16 if argument.dtype == BF16 else _ELEMENT_TYPES[key]), argument
    assert call["address"] == address and call["fill"] == 0
    assert call["dims"] == list(descriptor.shape[::-1])
    assert call["strides"] == [size * stride for stride in descriptor.strides[-2::-1]]
    assert all(stride % 16 == 0 for stride in call["strides"])
    _check_elements(descriptor, shape)
    # The code copies a tile in as few boxes as the hardware takes: no side above 256, no row longer than the swizzle.
    part = [size // (cluster if dim == descriptor.divided else 1) for dim, size in enumerate(descriptor.block)]
    inner, *others = part[::-1]
    assert box == [min(inner, 256, _SWIZZLE[call["swizzle"]] // size), *(min(side, 256) for side in others)]
    assert box[0] * size % 16 == 0
    assert call["steps"] == [1] * len(box) and call["interleave"] == 0


def _check_elements(descriptor: Descriptor, shape: Sequence[int]) -> None:
    """The elements of a descriptor are all elements of its array, each once: its dims are those of the array."""
    natural = [prod(shape[n + 1 :]) for n in range(len(shape))]
    mine = {(size, stride) for size, stride in zip(descriptor.shape, descriptor.strides, strict=True) if size > 1}
    theirs = {(size, stride) for size, stride in zip(shape, natural, strict=True) if size > 1}
    assert prod(descriptor.shape) == prod(shape)
    last = sum((size - 1) * stride for size, stride in mine)
    assert last == sum((size - 1) * stride for size, stride in theirs), (descriptor, shape)


def _check_fills(lowering: TritonLowering, recorded: Recorded) -> None:
    """Outputs that start at 0 are filled, whole, and no others; sums not where each program stores sums of its own."""
    program = lowering.program
    buffers = addresses(program)[len(program.operands) :]
    roles = [param.ref.role for param in lowering.func.outputs]
    wanted = [
        (buffer, prod(result.shape) * result.dtype.itemsize)
        for buffer, result, role in zip(buffers, program.results, roles, strict=True)
        if (role == "zeros" or (role == "sum" and result.zeroed)) and prod(result.shape)
    ]
    assert [(fill["address"], fill["bytes"]) for fill in recorded.of("fill")] == wanted
    assert all(fill["value"] == 0 for fill in recorded.of("fill"))
    for param, result in zip(lowering.func.outputs, program.results, strict=True):
        assert result.shape[result.partial_sums :] == param.ref.shape


def _check_aliases(lowering: TritonLowering, buffers: Sequence[int]) -> None:
    """An output that is an input, too, has the buffer of this input; all others have buffers of their own."""
    func, program = lowering.func, lowering.program
    for n, param in enumerate(func.outputs, len(program.operands)):
        same = [
            program.operands[place]
            for place, other in enumerate(buffers[: len(program.operands)])
            if other == buffers[n]
        ]
        assert same == ([func.inputs.index(param)] if param.ref.role == "inout" else []), param.name


def _shape(lowering: TritonLowering, argument: Argument) -> Sequence[int]:
    """The shape of the array behind an argument."""
    func, program = lowering.func, lowering.program
    place = program.arguments.index(argument)
    if place >= len(program.operands):
        return program.results[place - len(program.operands)].shape
    array = program.operands[place]
    given = [param.ref.shape for param in func.inputs]
    return given[array] if array < len(given) else np.shape(program.constants[array - len(given)])


def _entry(lowering: TritonLowering) -> tuple[str, list[int], int]:
    """Name, sizes of parameters and threads of a block, as PTX declares the entry function."""
    ptx = lowering.compile().asm["ptx"]
    found = re.search(r"\.entry\s+(\w+)\(\s*(.*?)\)\s*\.reqntid\s+(\d+)", ptx, re.DOTALL)
    assert found, ptx[:2000]
    sizes = []
    for line in found[2].split(",\n"):
        array = re.search(r"\.b8 \w+\[(\d+)\]", line)
        scalar = re.search(r"\.[ubsf](8|16|32|64)\b", line)
        assert array or scalar, line
        sizes.append(int(array[1]) if array else _PTX_SIZES[scalar[1]])  # type: ignore[index]
    return found[1], sizes, int(found[3])


def _tiles(ttgir: str) -> list[tuple[tuple[int, ...], int]]:
    """The tile that each descriptor of the compiler's module copies, and its swizzle, as a CUtensorMapSwizzle."""
    signature = ttgir[ttgir.index("tt.func public") :].partition("attributes")[0]
    layouts = dict(re.findall(r"^(#shared\d*) = #ttg\.nvmma_shared<{swizzlingByteWidth = (\d+)", ttgir, re.MULTILINE))
    found = re.findall(r": !tt\.tensordesc<(?:tensor<)?((?:\d+x)+)\w+, (#shared\d*)>", signature)
    numbers = {"0": 0, "32": 1, "64": 2, "128": 3}
    return [(tuple(map(int, sizes.split("x")[:-1])), numbers[layouts[layout]]) for sizes, layout in found]


def _warps(ttgir: str) -> int:
    """The warps of a program, as the compiler's module says; those of roles beside it in whole warpgroups."""
    found = re.search(r'"ttg\.num-warps" = (\d+) : i32', ttgir)
    assert found, ttgir[:2000]
    beside = sum(map(int, re.findall(r"^ *partition\d+\(.*\) num_warps\((\d+)\)", ttgir, re.MULTILINE)))
    return int(found[1]) + round_up(beside, 4)


def _cluster(ptx: str) -> int:
    """The thread blocks of a cluster that PTX declares."""
    found = re.search(r"\.reqnctapercluster\s+(\d+)", ptx)
    return int(found[1]) if found else 1
