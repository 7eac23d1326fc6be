"""Barriers, branches, and copies that run beside the program.

Semantics: PTX ISA 9.0, sections 9.7.9.25, 9.7.12 and 9.7.13.

A copy runs at once, or as late as the program allows (`Machine.late`): when a thread waits for it. A program without
races computes the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.records import record
from tilekern.lower.triton.ptx.machine import SHARED_BASE, WARP, Execute, Machine
from tilekern.lower.triton.ptx.memory import load_bytes, parameter_at, store_bytes
from tilekern.lower.triton.ptx.parse import Instruction, Memory, Number, PtxError, Symbol
from tilekern.lower.triton.ptx.products import swizzled


@record
class TensorMap:
    """A TMA descriptor.

    Attributes:
      base: address of the array.
      shape, strides: of the array, outermost dim first; strides in bytes.
      box: shape of a copy.
      swizzle: width of the swizzle in bytes, 16 for none.
      itemsize: bytes of an element.
    """

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.itemsize


@dataclass
class Barrier:
    """An mbarrier: its phase ends when `count` threads arrived and no bytes are outstanding."""

    count: int
    left: int
    outstanding: int = 0
    phase: int = 0


# --- branches and bar.sync ---


def _branch(machine: Machine, instruction: Instruction, ids: Array) -> list[tuple[int, Array]]:
    (label,) = instruction.operands
    assert isinstance(label, Symbol)
    return [(machine.entry.labels[label.name], ids)]


def _branch_by_table(machine: Machine, instruction: Instruction, ids: Array) -> list[tuple[int, Array]]:
    """`brx.idx`: (address, threads) for each label of the table whose number a thread holds."""
    number, table = instruction.operands
    assert isinstance(table, Symbol)
    labels = machine.entry.targets[table.name]
    numbers = machine.read(number, ids, 32)
    if (numbers >= len(labels)).any():
        raise PtxError(f"label {numbers.max()} of {len(labels)} is not there")
    return [(machine.entry.labels[labels[n]], ids[numbers == n]) for n in np.unique(numbers)]


def _end(machine: Machine, instruction: Instruction, ids: Array) -> list[tuple[int, Array]]:
    return []


def _trap(machine: Machine, instruction: Instruction, ids: Array) -> Any:
    raise PtxError("the program traps")


def _barrier(machine: Machine, instruction: Instruction, ids: Array) -> list[tuple[int, Array]] | None:
    """`bar.sync`: threads wait until the operand's number of threads, by default all of the block, have arrived.

    Returns:
      None if all threads of the launch arrive at once; else the (address, threads) that go on, none if all wait.
    """
    operands = instruction.operands
    if ids is machine.all and len(operands) < 2:
        if machine.races is not None:
            machine.races.meet(ids)
        return None
    number = machine.read(operands[0], ids, 32)
    counts = machine.read(operands[1], ids, 32) if len(operands) > 1 else np.full(len(ids), machine.threads)
    goes_on: list[tuple[int, Array]] = []
    for key in {(int(b), int(n)) for b, n in zip(machine.cta[ids], number, strict=True)}:
        some = ids[(machine.cta[ids] == key[0]) & (number == key[1])]
        arrived = machine.arrived.setdefault(key, [])
        arrived.append((machine.pc + 1, some))
        total = sum(len(threads) for _, threads in arrived)
        count = int(counts[np.flatnonzero((machine.cta[ids] == key[0]) & (number == key[1]))[0]])
        if total > count:
            raise PtxError(f"{total} threads meet at barrier {key[1]}, which is for {count}")
        if total == count:
            goes_on += machine.arrived.pop(key)
            if machine.races is not None:
                machine.races.meet(
                    np.concatenate([threads for _, threads in goes_on if (machine.cta[threads] == key[0]).all()])
                )
    return goes_on


# --- mbarrier ---


def _init(machine: Machine, instruction: Instruction, ids: Array) -> None:
    where, count = instruction.operands
    for key, number in zip(_keys(machine, where, ids, first=True), machine.read(count, ids, 32), strict=True):
        machine.mbarriers[key] = Barrier(int(number), int(number))


def _keys(machine: Machine, where: Any, ids: Array, first: bool = False) -> list[tuple[int, int]]:
    """For each thread (block, address) of an mbarrier. `first` is True for the instruction that initializes it."""
    addresses = machine.addresses(where, ids)
    places = machine.places_in_shared(addresses, ids, 8)
    if machine.races is not None:
        (machine.races.write if first else machine.races.use)(places, 8, ids)
    return [(int(block), int(address)) for block, address in zip(machine.cta[ids], addresses, strict=True)]


def _barrier_at(machine: Machine, key: tuple[int, int]) -> Barrier:
    if key not in machine.mbarriers:
        raise PtxError(f"there is no mbarrier at {key[1] - SHARED_BASE} of shared memory")
    return machine.mbarriers[key]


def _invalidate(machine: Machine, instruction: Instruction, ids: Array) -> None:
    for key in _keys(machine, instruction.operands[0], ids):
        _barrier_at(machine, key)
        del machine.mbarriers[key]


def _arrive(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`mbarrier.arrive`, also `.expect_tx`, which expects bytes of copies first."""
    operands = instruction.operands
    where = next(o for o in operands if isinstance(o, Memory))
    behind = operands[operands.index(where) + 1 :]
    numbers = machine.read(behind[0], ids, 32) if behind else np.ones(len(ids), np.uint32)
    expects = "expect_tx" in instruction.modifiers
    for key, number, thread in zip(_keys(machine, where, ids), numbers, ids, strict=True):
        barrier = _barrier_at(machine, key)
        if machine.races is not None:
            machine.races.arrive(key, int(thread))
        barrier.outstanding += int(number) if expects else 0
        barrier.left -= 1 if expects else int(number)
        if barrier.left < 0:
            raise PtxError(f"more than {barrier.count} threads arrive in a phase of an mbarrier")
        _finish(machine, key, barrier)


def _finish(machine: Machine, key: tuple[int, int], barrier: Barrier) -> None:
    if barrier.left == 0 and barrier.outstanding == 0:
        if machine.races is not None:
            machine.races.end_phase(key)
        barrier.phase, barrier.left = barrier.phase ^ 1, barrier.count
        machine.unpark()


def _try_wait(machine: Machine, instruction: Instruction, ids: Array) -> Any:
    """`mbarrier.try_wait.parity`: writes True for threads whose phase, named by its parity, has ended; others wait.

    `test_wait` writes False for the others, and no thread waits.
    """
    into, where, parity = instruction.operands[:3]
    keys, parities = _keys(machine, where, ids), machine.read(parity, ids, 32) & 1
    for key in dict.fromkeys(keys):
        _run_copies(machine, key)
    done = np.array([_barrier_at(machine, k).phase != int(p) for k, p in zip(keys, parities, strict=True)])
    machine.write(into, ids, done)
    if machine.races is not None:
        for key in dict.fromkeys(k for k, d in zip(keys, done, strict=True) if d):
            own = ids[np.array([k == key for k in keys]) & done]
            machine.races.wait(key, np.unique(machine.tid[own] // 32))
    if done.all() or "test_wait" in instruction.name:
        return None
    machine.parked.append((machine.pc, ids[~done]))
    return [(machine.pc + 1, ids[done])] if done.any() else []


def _run_copies(machine: Machine, key: tuple[int, int]) -> None:
    for load in machine.tensor_loads.pop(key, []):
        load()


# --- cp.async ---


def _copy(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`cp.async`: some bytes to shared memory, zeros behind the last of `src-size` bytes."""
    target, source, size, *rest = instruction.operands
    assert isinstance(size, Number)
    used = machine.read(rest[0], ids, 32).astype(np.int64) if rest else np.full(len(ids), size.bits)
    if not np.isin(used, (0, size.bits)).all():
        raise PtxError("a copy of a part of its bytes is not known")
    places = machine.places_in_shared(machine.addresses(target, ids), ids, size.bits)
    copy = _Copy(places, machine.addresses(source, ids), ids, size.bits, used > 0)
    if machine.races is not None:
        machine.races.begin_copy(places, size.bits, ids)
    if not machine.late:
        _run_copy(machine, copy)
    machine.copies.begin(ids, copy)


@record
class _Copy:
    """`cp.async` of some threads.

    Attributes:
      places: for each thread an offset into the bytes of shared memory.
      source: for each thread an address in global memory.
      ids: the threads.
      nbytes: bytes of each.
      reads: for each thread False for zeros.
    """

    places: Array
    source: Array
    ids: Array
    nbytes: int
    reads: Array


def _run_copy(machine: Machine, copy: _Copy) -> None:
    data, reads = np.zeros((len(copy.ids), copy.nbytes), np.uint8), copy.reads
    if reads.any():
        data[reads] = load_bytes(machine, False, copy.source[reads], copy.ids[reads], copy.nbytes)
    machine.shared.bytes[copy.places[:, None] + np.arange(copy.nbytes)] = data


def _copy_commit(machine: Machine, instruction: Instruction, ids: Array) -> None:
    machine.copies.commit(ids)


def _most(instruction: Instruction) -> int:
    """The operand of an instruction that waits: how many groups may still run; 0 if there is no operand."""
    numbers = [operand.bits for operand in instruction.operands if isinstance(operand, Number)]
    return numbers[0] if numbers else 0


def _copy_wait(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`cp.async.wait_group`, and `wait_all`, which also waits for what no group has."""
    if not instruction.operands:
        machine.copies.commit(ids)
    for part, copy in machine.copies.wait(ids, _most(instruction)):
        own = _Copy(copy.places[part], copy.source[part], copy.ids[part], copy.nbytes, copy.reads[part])
        if machine.late:
            _run_copy(machine, own)
        if machine.races is not None:
            machine.races.end_copy(own.places, own.nbytes, own.ids)


# --- TMA ---


def _tensor_copy(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`cp.async.bulk.tensor`: a box between an array and shared memory, one for each thread that takes part."""
    loads = "global" in instruction.modifiers and instruction.modifiers.index("global") > [
        m.startswith("shared") for m in instruction.modifiers
    ].index(True)
    for thread in ids:
        own = np.array([thread])
        if loads:
            target, source, barrier, *_ = instruction.operands
            item = (
                *_box(machine, source, own),
                int(machine.addresses(target, own)[0]),
                _keys(machine, barrier, own)[0],
                int(machine.tid[thread]) // 32,
            )
            load = partial(_tensor_load, machine, *item)
            if machine.late:
                machine.tensor_loads.setdefault(item[-2], []).append(load)
            else:
                load()
        else:
            target, source = instruction.operands
            if "reduce" in instruction.modifiers:
                raise PtxError("a reduction by a tensor copy is not known")
            store = _store_of(machine, *_box(machine, target, own), int(machine.addresses(source, own)[0]), int(thread))
            if not machine.late:
                _run_store(machine, store)
            machine.tensor_stores.begin(own, store)


def _box(machine: Machine, operand: Any, own: Array) -> tuple[TensorMap, Array]:
    (tensor,) = parameter_at(machine, operand, own)
    if not isinstance(tensor, TensorMap):
        raise PtxError("the operand is no descriptor")
    return tensor, machine.coordinates(operand, own)[0][::-1]


def _box_places(machine: Machine, tensor: TensorMap, start: Array, shared: int) -> tuple[Array, Array, Array]:
    """For each element of a box: its address in memory, True if it is inside, and its address in shared memory."""
    grid = np.indices(tensor.box).reshape(len(tensor.box), -1)
    positions = grid + start[:, None]
    inside = ((positions >= 0) & (positions < np.array(tensor.shape)[:, None])).all(0)
    memory = tensor.base + (positions * np.array(tensor.strides)[:, None]).sum(0)
    if shared % 128:
        raise PtxError(f"a box lies at {shared - SHARED_BASE} of shared memory, which is no multiple of 128")
    return memory, inside, swizzled(shared + np.arange(grid.shape[1]) * tensor.itemsize, tensor.swizzle)


def _tensor_load(
    machine: Machine, tensor: TensorMap, start: Array, shared: int, key: tuple[int, int], warp: int
) -> None:
    memory, inside, places = _box_places(machine, tensor, start, shared)
    threads = np.full(len(memory), key[0] * machine.threads)
    data = np.zeros((len(memory), tensor.itemsize), np.uint8)
    data[inside] = load_bytes(machine, False, memory[inside], threads[inside], tensor.itemsize)
    offsets = machine.places_in_shared(places, threads, tensor.itemsize)
    if machine.races is not None:
        machine.races.write_beside(machine.races.words_of(offsets, tensor.itemsize), key[0], warp, key)
    machine.shared.bytes[offsets[:, None] + np.arange(tensor.itemsize)] = data
    barrier = _barrier_at(machine, key)
    barrier.outstanding -= tensor.nbytes
    _finish(machine, key, barrier)


@record
class _Store:
    """A tensor copy to global memory: the offsets of its elements in shared memory, and where they go."""

    offsets: Array
    inside: Array
    memory: Array
    itemsize: int
    thread: int


def _store_of(machine: Machine, tensor: TensorMap, start: Array, shared: int, thread: int) -> _Store:
    memory, inside, places = _box_places(machine, tensor, start, shared)
    offsets = machine.places_in_shared(places, np.full(len(memory), thread), tensor.itemsize)
    if machine.races is not None:
        words = machine.races.words_of(offsets, tensor.itemsize)
        machine.races.read_beside(words, int(machine.cta[thread]), int(machine.tid[thread]) // WARP)
    return _Store(offsets, inside, memory, tensor.itemsize, thread)


def _run_store(machine: Machine, store: _Store) -> None:
    data, threads = machine.shared.bytes[store.offsets[:, None] + np.arange(store.itemsize)], store.inside
    store_bytes(machine, False, store.memory[threads], np.full(threads.sum(), store.thread), data[threads])


def _store_commit(machine: Machine, instruction: Instruction, ids: Array) -> None:
    machine.tensor_stores.commit(ids)


def _store_wait(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`cp.async.bulk.wait_group`: shared memory was read; without `.read` the stores are done, too."""
    for _, store in machine.tensor_stores.wait(ids, _most(instruction)):
        if machine.late:
            _run_store(machine, store)
        if machine.races is not None:
            words = machine.races.words_of(store.offsets, store.itemsize)
            machine.races.end_reads(words, int(machine.cta[store.thread]), int(machine.tid[store.thread]) // WARP)


def _proxy_fence(machine: Machine, instruction: Instruction, ids: Array) -> None:
    if machine.races is not None:
        machine.races.fence(ids)


def _nothing(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """Fences, hints and registers handed on: nothing to do where instructions run in order."""


TABLE: dict[str, Execute] = {
    "bra": _branch,
    "brx.idx": _branch_by_table,
    "ret": _end,
    "exit": _end,
    "trap": _trap,
    "bar.sync": _barrier,
    "bar.warp": _nothing,
    "barrier.sync": _barrier,
    "mbarrier.init": _init,
    "mbarrier.inval": _invalidate,
    "mbarrier.arrive": _arrive,
    "mbarrier.try_wait": _try_wait,
    "cp.async.ca": _copy,
    "cp.async.cg": _copy,
    "cp.async.commit_group": _copy_commit,
    "cp.async.wait_group": _copy_wait,
    "cp.async.wait_all": _copy_wait,
    "cp.async.bulk.tensor": _tensor_copy,
    "cp.async.bulk.commit_group": _store_commit,
    "cp.async.bulk.wait_group": _store_wait,
    "fence": _nothing,
    "fence.proxy.async": _proxy_fence,
    "membar": _nothing,
    "prefetch": _nothing,
    "prefetchu": _nothing,
    "setmaxnreg": _nothing,
    "griddepcontrol": _nothing,
    "nanosleep": _nothing,
}
