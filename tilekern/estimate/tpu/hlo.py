"""The optimized HLO that libtpu dumps: the kernels of a program, and the constants that they copy into SMEM."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilekern.estimate.tpu.bundles import DumpError

PALLAS = "tpu_custom_call"

FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"),
    *("ConcatBitcast", "AllocateBuffer"),
)
"""Instructions that do nothing at run time; of custom calls, their targets."""

CONTROL = ("conditional", "call")

LOOP = "while"

COPIES = ("copy-start", "slice-start")
"""Asynchronous copies, from HBM to VMEM or back, which XLA schedules beside the kernels."""

DONE = ("copy-done", "slice-done")

FORMATS = "sparse-core-data-format-call"
"""Prefix of the names of asynchronous calls in which SparseCores change an array's layout in HBM, on 7x."""

_LAYOUT = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::T\(([\d,]+)\))?((?:\([\d,]+\))*)[^}]*\})?")
_TRUTH = {"true": "1", "false": "0"}
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}


@dataclass(frozen=True)
class HloInstruction:
    """A line of a computation.

    Attributes:
      name: unique, also in the names of the dumps.
      opcode: the opcode of HLO; of a custom call, its target.
      shape: the shape with the layout, as text.
      operands: the names of the operands.
      body: the text between the parentheses.
      attributes: the text after the parentheses, without names, metadata and sharding.
      root: True if it is the result of its computation.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    body: str
    attributes: str
    root: bool = False


def entry(text: str) -> dict[str, HloInstruction]:
    """The instructions of the ENTRY computation, in order, by name.

    Raises:
      DumpError: there is none.
    """
    return _computation(text, "ENTRY ", "an ENTRY computation")


def called(instruction: HloInstruction, attribute: str, text: str) -> dict[str, HloInstruction]:
    """The instructions of the computation that an attribute names."""
    match = re.search(rf"\b{attribute}=%([^\s,]+)", instruction.attributes)
    if match is None:
        raise DumpError(f"{instruction.name} without {attribute}")
    return _computation(text, f"%{match[1]} ", f"the computation {match[1]}")


def _computation(text: str, head: str, name: str) -> dict[str, HloInstruction]:
    body = _body(text, head)
    if body is None:
        raise DumpError(f"HLO without {name}")
    lines = re.split(r"\n(?=  (?:ROOT )?%)", body)
    return {instruction.name: instruction for instruction in map(_instruction, lines)}


def _body(text: str, head: str) -> str | None:
    """The lines of the computation whose first line begins with `head`; None if there is none."""
    match = re.search(rf"^{re.escape(head)}.*?\{{\n(.*?)^\}}$", text, re.DOTALL | re.MULTILINE)
    return None if match is None else match[1]


def _instruction(line: str) -> HloInstruction:
    match = re.match(r"\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(", line)
    if match is None:
        raise DumpError(f"an HLO instruction of unknown form: {line.strip()[:200]}")
    body = line[match.end() :].partition("), ")[0] if match[3] != "constant" else line[match.end() :]
    operands = tuple(re.findall(r"%([^\s,)]+)", body)) if match[3] != "constant" else ()
    call = re.search(r'custom_call_target="(\w+)"', line)
    return HloInstruction(
        match[1],
        call[1] if call else match[3],
        match[2],
        operands,
        body,
        _attributes(line[match.end() :]),
        line.lstrip().startswith("ROOT"),
    )


def _attributes(line_end: str) -> str:
    """The attributes after an instruction's operands that affect its meaning: without metadata and sharding."""
    text = line_end.partition("), ")[2]
    return re.sub(r"(metadata|sharding)=\{(?:[^{}]|\{[^{}]*\})*\},? ?", "", text)


def twins(name: str, instructions: Mapping[str, HloInstruction], text: str) -> list[str]:
    """The names of other instructions of the same meaning and operand shapes, of which XLA compiles only one."""

    def kind(i: HloInstruction) -> tuple[object, ...]:
        shapes = tuple(instructions[operand].shape for operand in i.operands)
        return i.opcode, i.shape, shapes, _without_names(i.attributes, text)

    meaning = kind(instructions[name])
    return [i.name for i in instructions.values() if i.name != name and kind(i) == meaning]


def _without_names(attributes: str, text: str) -> str:
    """Attributes with the instructions of the computations that they name, in the place of their names."""

    def whole(match: re.Match[str]) -> str:
        body = _body(text, f"%{match[2]} ")
        return match[0] if body is None else f"{match[1]}={re.sub(r'%[^ ,)]+', '%', _bare(body))}"

    return re.sub(r"\b(calls|to_apply)=%([^\s,]+)", whole, attributes)


def _bare(body: str) -> str:
    return re.sub(r", (metadata|sharding|backend_config)=\{.*", "", body)


def vmem(text: str) -> dict[str, int]:
    """The bytes of VMEM that each kernel of a compiled module takes for windows and scratch."""
    used = r'%(\S+) = .*"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"'
    lines = re.split(r"\n(?=  (?:ROOT )?%)", text)
    matches = (re.search(used, line, re.DOTALL) for line in lines)
    return {match[1]: int(match[2]) for match in matches if match}


def constant(i: HloInstruction) -> np.ndarray[Any, Any]:
    """The elements of a constant of integers or of truth values."""
    dims = layout(i.shape)[1]
    words: list[str] = re.findall(r"true|false|-?\d+", i.body.partition(")")[0])
    if len(words) != math.prod(dims):
        raise DumpError(f"constant {i.name} of {math.prod(dims)} elements is dumped as {len(words)}")
    return np.array([int(_TRUTH.get(x, x)) for x in words], np.int64).reshape(dims)


def layout(shape: str) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The dtype, dims, order of dims (minor first) and tile of `s32[3,300]{1,0:T(4,128)}`."""
    match = _LAYOUT.match(shape)
    if match is None:
        raise DumpError(f"a shape of unknown form: {shape[:100]}")
    dims, order, tile = (tuple(int(x) for x in (part or "").split(",") if x) for part in (match[2], match[3], match[4]))
    return match[1], dims, order, tile


def copied(copy: HloInstruction) -> tuple[int, bool]:
    """The bytes of an asynchronous copy, and True if VMEM is its target."""
    # copy-start: (target, source, context); slice-start: ((source), target, context).
    target = re.sub(r"^\(\(.*?\}\), |^\(", "", copy.shape)
    return nbytes(target), "S(1)" in target.partition("}")[0]


def is_scalar(instruction: HloInstruction) -> bool:
    """True if it computes one number by itself: the scalar unit does, and no kernel is dumped."""
    kernels = ("fusion", "reduce", PALLAS)
    return not (instruction.shape.startswith("(") or instruction.opcode in kernels or layout(instruction.shape)[1])


def reformatted(instructions: Mapping[str, HloInstruction]) -> list[int]:
    """The bytes of each array whose layout SparseCores change; of a call's start, update and done, the last counts."""
    calls = (i for i in instructions.values() if i.name.startswith(FORMATS))
    return [nbytes(i.shape) for i in calls if i.opcode.endswith("-done")]


def nbytes(shape: str) -> int:
    """The bytes of an array, without padding."""
    dtype, dims, _, _ = layout(shape)
    return math.prod(dims) * _BYTES.get(dtype, 1 if dtype.startswith("f8") else 4)


def tiled(array: np.ndarray[Any, Any], shape: str) -> list[int]:
    """The elements in the order of memory, for `shape` with its layout: tiles of the last dims, padded with zeros."""
    _, dims, order, tile = layout(shape)
    if order != tuple(reversed(range(len(dims)))):
        raise DumpError(f"an operand in SMEM whose dims are not in order: {shape}")
    if not tile or not dims:
        return [int(x) for x in array.reshape(-1)]
    padding = [(0, 0)] * (len(dims) - len(tile)) + [(0, -d % t) for d, t in zip(dims[-len(tile) :], tile, strict=True)]
    padded = np.pad(array, padding)
    split: list[int] = [*padded.shape[: -len(tile)]]
    for d, t in zip(padded.shape[-len(tile) :], tile, strict=True):
        split += [d // t, t]
    lead, k = len(dims) - len(tile), len(tile)
    axes = [*range(lead), *(lead + 2 * i for i in range(k)), *(lead + 2 * i + 1 for i in range(k))]
    return [int(x) for x in padded.reshape(split).transpose(axes).reshape(-1)]
