"""Instructions that load and store. Semantics: PTX ISA 9.0, section 9.7.9, and ldmatrix, stmatrix of 9.7.15."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.arithmetic import dtype_of, last_type, set_value, value
from tilekern.lower.triton.ptx.machine import PARAMETER_BASE, PARAMETER_STEP, WARP, Execute, Machine
from tilekern.lower.triton.ptx.parse import (
    ConflictError,
    Instruction,
    Memory,
    Operand,
    PtxError,
    Symbol,
    Vector,
)


def _is_shared(instruction: Instruction) -> bool:
    return any(m.startswith("shared") for m in instruction.modifiers)


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def load_bytes(machine: Machine, shared: bool, addresses: Array, ids: Array, nbytes: int) -> Array:
    """uint8[threads, nbytes] at the addresses of threads."""
    arena = machine.shared if shared else machine.memory
    places = (machine.places_in_shared if shared else machine.places_in_memory)(addresses, ids, nbytes)
    if shared and machine.races is not None:
        machine.races.read(places, nbytes, ids)
    if nbytes in (1, 2, 4, 8):
        return arena.view(nbytes * 8)[places // nbytes].view(np.uint8).reshape(len(ids), nbytes)
    return arena.bytes[places[:, None] + np.arange(nbytes)]


def store_bytes(machine: Machine, shared: bool, addresses: Array, ids: Array, data: Array) -> None:
    """Store uint8[threads, nbytes]."""
    nbytes = data.shape[1]
    arena = machine.shared if shared else machine.memory
    places = (machine.places_in_shared if shared else machine.places_in_memory)(addresses, ids, nbytes)
    if shared and machine.races is not None:
        machine.races.write(places, nbytes, ids)
    where = cast(Array, places[:, None] + np.arange(nbytes))
    if not shared:
        _own(machine, where, ids)
    arena.bytes[where] = data


def _own(machine: Machine, where: Array, ids: Array) -> None:
    """Note which thread blocks store to bytes uint8[threads, nbytes] of global memory; refuse two for one byte."""
    blocks, owners = machine.cta[ids][:, None], machine.memory.owners[where]
    if ((owners >= 0) & (owners != blocks)).any():
        n = int(np.argmax(((owners >= 0) & (owners != blocks)).any(1)))
        raise ConflictError(f"block {blocks[n, 0]} stores where block {owners[n].max()} has stored")
    machine.memory.owners[where] = blocks
    if (machine.memory.owners[where] != blocks).any():
        raise ConflictError("two blocks store to one place")


def _load(machine: Machine, instruction: Instruction, ids: Array) -> None:
    into, source = instruction.operands
    dtype = dtype_of(last_type(instruction))
    assert isinstance(source, Memory)
    if "param" in instruction.modifiers:
        assert isinstance(source.base, Symbol)
        bits = machine.parameters[source.base.name]
        set_value(machine, into, ids, np.full(len(ids), bits, f"u{dtype.itemsize}"))
        return
    registers = _parts(into)
    addresses, nbytes = machine.addresses(source, ids), dtype.itemsize * len(registers)
    if "local" in instruction.modifiers:
        data = machine.local[ids[:, None], _local(machine, addresses, nbytes)]
    else:
        data = load_bytes(machine, _is_shared(instruction), addresses, ids, nbytes)
    for register, column in zip(registers, np.split(data, len(registers), 1), strict=True):
        set_value(machine, register, ids, np.ascontiguousarray(column).view(dtype)[:, 0])


def _store(machine: Machine, instruction: Instruction, ids: Array) -> None:
    target, source = instruction.operands
    dtype = dtype_of(last_type(instruction))
    columns = [
        np.ascontiguousarray(value(machine, part, ids, dtype)).view(np.uint8).reshape(len(ids), -1)
        for part in _parts(source)
    ]
    addresses, data = machine.addresses(target, ids), np.concatenate(columns, 1)
    if "local" in instruction.modifiers:
        machine.local[ids[:, None], _local(machine, addresses, data.shape[1])] = data
    else:
        store_bytes(machine, _is_shared(instruction), addresses, ids, data)


def _local(machine: Machine, addresses: Array, nbytes: int) -> Array:
    """int64[threads, nbytes] places in the local memory of each thread."""
    if (addresses < 0).any() or (addresses + nbytes > machine.entry.local_bytes).any():
        raise PtxError(f"an access of local memory, which has {machine.entry.local_bytes} bytes, is outside of it")
    return addresses[:, None] + np.arange(nbytes)


def _atomic(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`atom` and `red`: thread by thread, as their order is open."""
    has_result = instruction.name == "atom"
    into = instruction.operands[0] if has_result else None
    target, *operands = instruction.operands[has_result:]
    name = last_type(instruction)
    packed = name.endswith("x2")
    dtype = dtype_of(name.removesuffix("x2"))
    shared = _is_shared(instruction)
    width = dtype.itemsize * (2 if packed else 1)
    addresses = machine.addresses(target, ids)
    places = (machine.places_in_shared if shared else machine.places_in_memory)(addresses, ids, width)
    arena = (machine.shared if shared else machine.memory).bytes
    columns = [
        [machine.read(p, ids, width * 8) if packed else value(machine, p, ids, dtype) for p in _parts(o)]
        for o in operands
    ]
    function = next(m for m in instruction.modifiers if m in _ATOMICS)
    old_values = [np.zeros(len(ids), f"u{width}") for _ in columns[0]]
    for n, place in enumerate(places):
        for part, xs in enumerate(zip(*columns, strict=True)):
            cell = arena[place + part * width : place + (part + 1) * width].view(dtype)
            old_values[part][n] = cell.copy().view(f"u{width}")[0]
            with np.errstate(all="ignore"):
                values = [np.array([x[n]]).view(dtype) for x in xs]
                cell[:] = _ATOMICS[function](cell, *values)
    if into is not None:
        for register, column in zip(_parts(into), old_values, strict=True):
            set_value(machine, register, ids, column.view(dtype) if not packed else column)


def _add(old: Array, x: Array) -> Array:
    return (old.astype(np.float32) + x.astype(np.float32)).astype(old.dtype) if old.dtype.itemsize == 2 else old + x


def _exchange(old: Array, x: Array) -> Array:
    return x


def _compare_and_swap(old: Array, expected: Array, x: Array) -> Array:
    return np.where(old == expected, x, old)


_ATOMICS: dict[str, Any] = {
    "add": _add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": _exchange,
    "cas": _compare_and_swap,
}


def _matrix_rows(machine: Machine, instruction: Instruction, ids: Array, operand: Operand, count: int) -> Array:
    """int64[warps, count, 8] places of the rows of `count` matrices of 8 rows of 16 bytes, by the lanes' addresses."""
    if len(ids) % WARP or (ids.reshape(-1, WARP) % WARP != np.arange(WARP)).any():
        raise PtxError("not all threads of a warp take part")
    addresses = machine.addresses(operand, ids).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
    threads = ids.reshape(-1, WARP)[:, : 8 * count].reshape(-1)
    places = machine.places_in_shared(addresses, threads, 16)
    if machine.races is not None:
        (machine.races.read if instruction.name == "ldmatrix" else machine.races.write)(places, 16, threads)
    return places.reshape(-1, count, 8)


def _load_matrix(machine: Machine, instruction: Instruction, ids: Array) -> None:
    into, source = instruction.operands
    registers = _parts(into)
    rows = _matrix_rows(machine, instruction, ids, source, len(registers))
    data = machine.shared.bytes[rows[..., None] + np.arange(16)].view(np.uint16)  # [warps, count, 8, 8]
    if "trans" in instruction.modifiers:
        data = data.swapaxes(2, 3)
    pairs = np.ascontiguousarray(data).reshape(len(rows), len(registers), WARP, 2).view(np.uint32)[..., 0]
    for n, register in enumerate(registers):
        machine.write(register, ids, pairs[:, n].reshape(-1))


def _store_matrix(machine: Machine, instruction: Instruction, ids: Array) -> None:
    target, source = instruction.operands
    registers = _parts(source)
    rows = _matrix_rows(machine, instruction, ids, target, len(registers))
    pairs = np.stack([machine.read(r, ids, 32).reshape(-1, WARP) for r in registers], 1)
    data = np.ascontiguousarray(pairs).view(np.uint16).reshape(len(rows), len(registers), 8, 8)
    if "trans" in instruction.modifiers:
        data = data.swapaxes(2, 3)
    machine.shared.bytes[rows[..., None] + np.arange(16)] = np.ascontiguousarray(data).view(np.uint8)


def parameter_at(machine: Machine, operand: Operand, ids: Array) -> list[Any]:
    """For each thread the parameter whose address is in brackets."""
    numbers = (machine.addresses(operand, ids) - PARAMETER_BASE) // PARAMETER_STEP
    names = machine.entry.parameters
    return [machine.parameters[names[int(n)]] for n in numbers]


TABLE: dict[str, Execute] = {
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
}
