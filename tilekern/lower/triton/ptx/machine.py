"""The state of a launch: threads, registers, memory, barriers; and the loop that runs instructions.

All threads of all thread blocks run in lockstep, as lanes of NumPy arrays. Threads that take different ways at a
branch form groups. The group whose next instruction has the least address runs first, and groups that meet run on
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.parse import (
    Entry,
    Instruction,
    Memory,
    Negated,
    Number,
    Operand,
    OutsideError,
    PtxError,
    Register,
    Symbol,
    Vector,
)
from tilekern.lower.triton.ptx.races import Races

WARP = 32
SHARED_BASE = 1024
"""The address of shared memory in its window; a descriptor's swizzle needs 1024 as its alignment."""

MOST_STEPS = 20_000_000
"""Instructions after which a program is taken to run for ever."""

PARAMETER_STEP = 4096
PARAMETER_BASE = 1 << 20

_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(bool),
    **{width: np.dtype(f"u{width // 8}") for width in (8, 16, 32, 64)},
    128: np.dtype("V16"),
}

type Execute = Callable[[Machine, Instruction, Array], Any]
"""Runs an instruction for some threads, given by their numbers. Returns None to go on; see `Machine.run`."""


class Arena:
    """Bytes at an address, with a map of the bytes that may be accessed.

    Attributes:
      bytes: all bytes; memory that nobody wrote holds 0xff, which is NaN in every float.
      open: for each byte, True if an access is allowed.
      owners: for each byte, the thread block that stored it last, -1 for none.
    """

    def __init__(self, name: str, base: int, size: int) -> None:
        self.name, self.base = name, base
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self.open = np.zeros(self.bytes.size, bool)
        self.owners = np.full(self.bytes.size, -1, np.int32)

    def view(self, width: int) -> Array:
        """The bytes as numbers of a width in bits."""
        return self.bytes.view(_DTYPES[width])


class InFlight:
    """Work that threads began and did not wait for, in the groups in which each thread committed it."""

    def __init__(self, threads: int) -> None:
        self._committed = np.zeros(threads, np.int64)
        self._works: list[tuple[Array, Array, Any]] = []

    def begin(self, ids: Array, work: Any) -> None:
        """Threads begin a work, a part of each thread."""
        self._works.append((ids, self._committed[ids], work))

    def commit(self, ids: Array) -> None:
        """What the threads began becomes a group."""
        self._committed[ids] += 1

    def wait(self, ids: Array, most: int) -> list[tuple[Array, Any]]:
        """The works that end when threads wait for all but `most` groups, in the order of their begin.

        Returns:
          For each the places of the threads whose part ends, among the threads that began it; and the work.
        """
        limit = np.full(len(self._committed), -1, np.int64)
        limit[ids] = self._committed[ids] - most
        ended, works = list[tuple[Array, Any]](), list[tuple[Array, Array, Any]]()
        for threads, groups, work in self._works:
            ends = groups < limit[threads]
            if ends.any():
                ended.append((np.flatnonzero(ends), work))
            if not ends.all():
                # A part that ended counts as behind every limit.
                works.append((threads, np.where(ends, np.iinfo(np.int64).max, groups), work))
        self._works = works
        return ended


class Machine:
    """A launch.

    Args:
      constants: the addresses of the arrays of the module.

    Attributes:
      entry: the program.
      threads: the number of threads of a thread block.
      cta, lane, tid: for each thread: its block, its number in its warp, its number in the block.
      all: the numbers of all threads.
    """

    def __init__(
        self,
        entry: Entry,
        blocks: int,
        shared_bytes: int,
        memory: Arena,
        parameters: Sequence[Any],
        table: Mapping[str, Execute],
        late: bool = False,
        races: bool = False,
        constants: Mapping[str, int] | None = None,
    ) -> None:
        self.entry, self.blocks, self.threads, self.memory, self.late = entry, blocks, entry.threads, memory, late
        count = blocks * self.threads
        self.all = np.arange(count)
        self.cta, self.tid = self.all // self.threads, self.all % self.threads
        self.lane = self.tid % WARP
        self.shared_size = -(-max(shared_bytes, 16) // 1024) * 1024
        self.shared = Arena("shared", SHARED_BASE, blocks * self.shared_size)
        self.shared_limit = shared_bytes
        self._constants = constants or {}
        self.parameters = dict(zip(entry.parameters, parameters, strict=True))
        self.places = {name: PARAMETER_BASE + n * PARAMETER_STEP for n, name in enumerate(entry.parameters)}
        self.registers = {name: np.zeros(count, _DTYPES[width]) for name, width in entry.widths.items()}
        self.special = {
            "%tid.x": self.tid, "%tid.y": self.tid * 0, "%tid.z": self.tid * 0,
            "%ctaid.x": self.cta, "%ctaid.y": self.cta * 0, "%ctaid.z": self.cta * 0,
            "%ntid.x": np.full(count, self.threads), "%nctaid.x": np.full(count, blocks),
            "%laneid": self.lane, "%warpid": self.tid // WARP, "%cluster_ctarank": self.cta * 0,
            "%clusterid.x": self.cta, "%clock": self.cta * 0,
        }  # fmt: skip
        self.local = np.full((count, -(-max(entry.local_bytes, 1) // 8) * 8), 0xFF, np.uint8)
        self.carry = np.zeros(count, bool)
        self.executes = [_execute_of(table, instruction) for instruction in entry.instructions]
        # mbarriers by (block, address); threads that wait at `bar.sync` by (block, number).
        self.mbarriers: dict[tuple[int, int], Any] = {}
        self.arrived: dict[tuple[int, int], list[tuple[int, Array]]] = {}
        # Tensor copies that did not run yet, by the mbarrier where they arrive.
        self.tensor_loads: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.copies, self.products, self.tensor_stores = InFlight(count), InFlight(count), InFlight(count)
        self.parked: list[tuple[int, Array]] = []
        self._groups: dict[int, Array] = {}
        self.steps = self.pc = 0
        self.races = Races(blocks, self.threads, self.shared_size, self.describe) if races else None

    # --- operands ---

    def read(self, operand: Operand, ids: Array, width: int) -> Array:
        """The bits of an operand, as unsigned numbers of a width."""
        match operand:
            case Register(name) if name in self.registers:
                values = self.registers[name]
                return values if ids is self.all else values[ids]
            case Register(name) if name in self.special:
                return self.special[name][ids].astype(_DTYPES[width])
            case Number(bits):
                if width == 1:
                    return np.full(len(ids), bool(bits))
                return np.full(len(ids), bits & ((1 << width) - 1), _DTYPES[width])
            case Symbol(name) if name in self.entry.shared:
                return np.full(len(ids), SHARED_BASE + self.entry.shared[name], _DTYPES[width])
            case Symbol(name) if name in self.entry.local:
                return np.full(len(ids), self.entry.local[name], _DTYPES[width])
            case Symbol(name) if name in self.places:
                return np.full(len(ids), self.places[name], _DTYPES[width])
            case Symbol(name) if name in self._constants:
                return np.full(len(ids), self._constants[name], _DTYPES[width])
            case Negated(register):
                return ~self.read(register, ids, 1)
            case _:
                raise PtxError(f"operand {operand} is not known")

    def write(self, operand: Operand, ids: Array, values: Array) -> None:
        """Set a register; `_` takes anything."""
        if isinstance(operand, Symbol):
            assert operand.name == "_", operand
            return
        assert isinstance(operand, Register)
        register = self.registers[operand.name]
        if values.dtype != register.dtype:
            assert values.dtype.itemsize == register.dtype.itemsize, (operand, values.dtype, register.dtype)
            values = values.view(register.dtype)
        register[ids] = values

    def addresses(self, operand: Operand, ids: Array) -> Array:
        """The addresses in brackets, int64."""
        assert isinstance(operand, Memory)
        width = 64 if isinstance(operand.base, Register) and self.entry.widths.get(operand.base.name) == 64 else 32
        return self.read(operand.base, ids, width).astype(np.int64) + operand.offset

    def coordinates(self, operand: Operand, ids: Array) -> Array:
        """int64[threads, dims] of a tensor's coordinates, innermost dim first."""
        assert isinstance(operand, Memory) and operand.coordinates is not None
        return np.stack([self.read(p, ids, 32).view(np.int32) for p in operand.coordinates.parts], 1).astype(np.int64)

    # --- memory ---

    def places_in_shared(self, addresses: Array, ids: Array, nbytes: int) -> Array:
        """Offsets into the bytes of shared memory, checked."""
        offsets = addresses - SHARED_BASE
        wrong = (
            (offsets < 0) | (offsets + nbytes > self.shared_limit) | (offsets % nbytes != 0 if nbytes <= 16 else False)
        )
        if np.any(wrong):
            n = int(np.argmax(wrong))
            raise OutsideError(
                f"thread {int(self.tid[ids[n]])} of block {int(self.cta[ids[n]])} accesses {nbytes} bytes at "
                f"{int(offsets[n])} of shared memory, which has {self.shared_limit} bytes, or out of alignment"
            )
        return offsets + self.cta[ids] * self.shared_size

    def places_in_memory(self, addresses: Array, ids: Array, nbytes: int) -> Array:
        """Offsets into the bytes of global memory, checked."""
        memory = self.memory
        offsets = addresses - memory.base
        inside = (offsets >= 0) & (offsets + nbytes <= memory.open.size) & (offsets % nbytes == 0)
        safe = np.where(inside, offsets, 0)
        inside &= memory.open[safe] & memory.open[safe + nbytes - 1]
        if not inside.all():
            n = int(np.argmin(inside))
            raise OutsideError(
                f"thread {int(self.tid[ids[n]])} of block {int(self.cta[ids[n]])} accesses {nbytes} bytes at offset "
                f"{int(offsets[n])} of global memory, outside of every array, or out of alignment"
            )
        return offsets

    # --- the loop ---

    def run(self) -> None:
        """Run all threads to their end.

        An instruction returns None to go on with the next instruction, or a list of (address, threads): where threads
        go on. Threads in no entry wait, or have ended.

        Raises:
          PtxError: a fault of the program, with the line of the PTX and of the Triton source.
        """
        self._groups = {0: self.all}
        while self._groups or self.parked or self.arrived:
            if not self._groups and not self._run_tensor_loads():
                raise self._deadlock()
            if not self._groups:
                continue
            pc = min(self._groups)
            ids = self._groups.pop(pc)
            instruction = self.entry.instructions[pc]
            try:
                self._count_step()
                after = self._step(pc, instruction, ids)
            except PtxError as error:
                error.at, error.source = self.describe(pc), instruction.source
                raise
            for address, some in [(pc + 1, ids)] if after is None else after:
                self.resume(address, some)

    def _run_tensor_loads(self) -> bool:
        """Run the loads that were put off, now that all threads wait; True if there were any."""
        loads, self.tensor_loads = self.tensor_loads, {}
        for load in (load for of_barrier in loads.values() for load in of_barrier):
            load()
        return bool(loads)

    def _deadlock(self) -> PtxError:
        """The error of threads that wait for ever: behind a barrier, or for an mbarrier."""
        waiting = [pc for pc, _ in self.parked] + [pc - 1 for threads in self.arrived.values() for pc, _ in threads]
        error = PtxError(f"deadlock: threads wait at {'; '.join(map(self.describe, sorted(set(waiting))[:4]))}")
        error.at, error.source = self.describe(waiting[0]), self.entry.instructions[waiting[0]].source
        return error

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise PtxError(f"more than {MOST_STEPS} steps")

    def _step(self, pc: int, instruction: Instruction, ids: Array) -> Any:
        self.pc = pc
        if self.races is not None:
            self.races.pc = pc
        if instruction.guard is None:
            return self.executes[pc](self, instruction, ids)
        holds = self.read(instruction.guard, ids, 1)
        if holds.all():
            return self.executes[pc](self, instruction, ids)
        if not holds.any():
            return None
        after = self.executes[pc](self, instruction, ids[holds])
        return None if after is None else [*after, (pc + 1, ids[~holds])]

    def resume(self, address: int, ids: Array) -> None:
        """Let threads go on at an address, together with threads that wait at it."""
        if not len(ids):
            return
        if address in self._groups:
            ids = np.union1d(self._groups[address], ids)
        self._groups[address] = self.all if len(ids) == len(self.all) else ids

    def unpark(self) -> None:
        """Let threads that wait for a barrier look at it again."""
        parked, self.parked = self.parked, []
        for address, ids in parked:
            self.resume(address, ids)

    def describe(self, pc: int) -> str:
        """The instruction at an address in words: "PTX line 92, source line 19, bar.sync"."""
        instruction = self.entry.instructions[pc]
        return f"PTX line {instruction.line}, source line {instruction.source}, {instruction.opcode}"


def _execute_of(table: Mapping[str, Execute], instruction: Instruction) -> Execute:
    """The function for an instruction: by the longest beginning of its opcode."""
    parts = (instruction.name, *instruction.modifiers)
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in table:
            return table[name]

    def unknown(machine: Machine, instruction: Instruction, ids: Array) -> None:
        raise PtxError("this instruction is not known")

    return unknown


__all__ = ["Arena", "Execute", "Machine", "Vector"]
