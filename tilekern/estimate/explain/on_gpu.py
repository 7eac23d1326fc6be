"""What a GPU's program makes of each line, from the Triton or Gluon source, and each line's part of the work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tilekern.errors import EstimateError
from tilekern.estimate import on_gpu
from tilekern.estimate.explain import listings
from tilekern.estimate.explain.explainer import Forecast
from tilekern.estimate.explain.explanation import Listing
from tilekern.estimate.explain.lines import Place, Words, accesses, add, shares
from tilekern.ir.core import Array, Value
from tilekern.lower.target import Target
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.lower.triton.program import Program
from tilekern.source import UNKNOWN, Loc

SHARES_OF = "cycles for which the line's machine code keeps units busy, all units together"

_DESCRIPTOR = re.compile(r"\b(\w+_desc)(?:\.(load|store|atomic_\w+)\(|,)")
_POINTER = re.compile(r"\btl\.(load|store|atomic_\w+)\((\w+)_ptr")
_TILE = re.compile(r"\b(load_tile|store_tile)\((\w+_desc)")
_REDUCTION = re.compile(r"\b(?:tl|gl)\.(sum|max|min|reduce|associative_scan|cumsum|sort|argmax|argmin|topk)\(")
_SPECIAL = re.compile(r"\b(?:tl|gl|libdevice)\.(?:math\.)?(exp2|exp|log2|log|sqrt|rsqrt|sin|cos|tanh|erf)\(")
_WAIT = re.compile(r"\bmbarrier\.wait\(")


def became(lowering: TritonLowering) -> Words:
    """What the program makes of each of the user's lines. Its source says which accesses have masks."""
    program, said = lowering.program, accesses(lowering.func, masks=False)
    boxes = {a.name: list(a.descriptor.block) for a in program.arguments if a.descriptor is not None}
    for number, line in enumerate(program.text.splitlines(), 1):
        loc = program.lines.get(number)
        if loc is not None:
            add(said, loc, *_words(line, boxes, lowering.chip.matrix_unit))
    return said


def _words(line: str, boxes: Mapping[str, list[int]], matrix_unit: str) -> list[str]:
    said: list[str] = []
    for kind, name in _TILE.findall(line):
        said.append(f"{name.removesuffix('_desc')}: TMA {kind.partition('_')[0]} of {boxes.get(name, '')}")
    for name, kind in _DESCRIPTOR.findall(line):
        if kind:
            said.append(f"{name.removesuffix('_desc')}: TMA {kind} of {boxes.get(name, '')}")
    for kind, name in _POINTER.findall(line):
        said.append(f"{name}: {kind} through pointers{', masked' if 'mask=' in line else ', without a mask'}")
    if re.search(r"\btl\.dot(_scaled)?\(|\bwarpgroup_mma\(|\btcgen05_mma", line):
        said.append(f"matrix units ({matrix_unit})")
    if _REDUCTION.search(line):
        said.append("reduction across threads")
    if functions := dict.fromkeys(_SPECIAL.findall(line)):
        said.append(f"special functions: {', '.join(functions)}")
    if re.match(r"\s*(for|while)\b", line):
        said.append("loop")
    if _WAIT.search(line):
        said.append("waits for copies")
    return said


def forecast(lowering: TritonLowering, target: Target, values: Mapping[Value, Array]) -> Forecast:
    """The estimate, and each line's part of the work; no part where the compiler names no line."""
    del target  # the lowering knows it
    on_gpu.check_model(lowering)
    compiled = lowering.compile()
    cubin = compiled.asm["cubin"]
    if not cubin:
        raise EstimateError(
            f"there is no machine code of {lowering.program.name}",
            expected="a target that names a GPU",
            got="portable code, which the driver compiles",
            fix='lower for "cuda:sm_90", say',
        )
    sass = toolchain.disassemble(cubin, lines=True)
    estimate, launch = on_gpu.of_machine_code(lowering, values, compiled.resources, sass)
    return Forecast(estimate, shares(_by_place(lowering.program, launch.spent)), SHARES_OF)


def _by_place(program: Program, spent: Mapping[int, float]) -> Iterator[tuple[Loc, float]]:
    for line, cycles in spent.items():
        loc = program.lines.get(line, UNKNOWN)
        yield loc if loc.line else program.loc, cycles  # what no line asks for is the kernel's


def memory(lowering: TritonLowering) -> dict[str, str]:
    """The memory bill of one program."""
    resources, chip = lowering.compile().resources, lowering.chip
    bill = {
        "registers": f"{resources.registers} of {chip.registers_per_thread} a thread",
        "spilled": f"{resources.spills or 0:,} bytes a thread",
        "shared memory": f"{resources.shared_bytes or 0:,} of {chip.shared_bytes:,} bytes",
    }
    program = lowering.launched
    if program.num_stages < lowering.program.num_stages:
        wish = f"{lowering.program.num_stages} do not fit shared memory"
        bill["iterations in flight"] = f"{program.num_stages}: the tiles of {wish}"
    if resources.tensor_columns is not None:
        bill["tensor memory"] = f"{resources.tensor_columns} of 512 columns"
    return bill


def programs(lowering: TritonLowering, numbers: Mapping[Place, int]) -> dict[str, Listing]:
    """Triton or Gluon source, and the instructions of the GPU."""
    cubin = lowering.compile().asm.get("cubin")
    sass = toolchain.disassemble(cubin, lines=True) if cubin else ""
    return {
        "program": listings.of_triton(lowering, numbers),
        "assembly": listings.of_sass(lowering, sass, numbers),
    }
