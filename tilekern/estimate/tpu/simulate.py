"""Simulation of the scalar unit: executions of each bundle, bytes of the DMAs, cycles of waiting for them.

A bundle takes one cycle, even an empty one. Loops, `pl.when`, the pipeline's prefetch and dynamic bounds are all scalar
code, so the count of bundles is exact. The wait for a DMA is a model: one HBM of fixed bandwidth serves requests in
order, with a latency.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tilekern.estimate.tpu.bundles import Bundle, DumpError, Instruction, Terms
from tilekern.estimate.tpu.chips import Chip
from tilekern.estimate.tpu.scalar import Unknown, Value, rule, signed

GRANULE = 32  # bytes; DMAs count in granules (`dma_granule_size_bytes` of JAX's TpuInfo)
_SPACING = 44  # bits between pointers to different memories
_IGNORED = ("sfence", "strace", "vtrace", "shalt", "compiler-scheduling-barrier", "snop", "sdelay")
_MAX_STEPS = 50_000_000


class SimulationError(Exception):
    """The simulation cannot follow the program; the message tells the reason and the bundle."""


@dataclass(frozen=True)
class Run:
    """One execution of a kernel on one core.

    Attributes:
      bundles: the executed bundles, one for each cycle.
      stall: cycles of waiting for DMAs.
      executed: the number of executions of each bundle.
      read: bytes from HBM.
      written: bytes to HBM.
      dmas: the DMAs started.
      stored: by the operand's number, the words of SMEM that were copied into it, if all words are known.
    """

    bundles: int
    stall: int
    executed: tuple[int, ...]
    read: int
    written: int
    dmas: int
    stored: Mapping[int, Sequence[int]]


def simulate(
    bundles: Sequence[Bundle],
    chip: Chip,
    operands: Mapping[int, Sequence[int]] | None = None,
    smem: Mapping[str, int] | None = None,
) -> Run:
    """Run a kernel's bundles from the first until they end.

    Args:
      bundles: the program.
      chip: the machine.
      operands: the words of the operands that the kernel copies into SMEM (scalar prefetch), in the order of memory.
      smem: the words of SMEM that the runtime has set, by symbol.

    Raises:
      SimulationError: a branch or a DMA depends on a value that is not known, or a wait would not end.
      DumpError: an instruction is not known.
    """
    return _Core(bundles, chip, operands or {}, smem or {}).run()


class _Core:
    def __init__(
        self, bundles: Sequence[Bundle], chip: Chip, operands: Mapping[int, Sequence[int]], smem: Mapping[str, int]
    ) -> None:
        self.chip = chip
        self.operands = operands
        self.bases: dict[str, int] = {}
        self.registers: dict[str, Value] = {}
        self.memory: dict[int, Value] = {self.base(symbol): value for symbol, value in smem.items()}
        self.quotients: dict[str, deque[Value]] = {}
        self.writes: list[tuple[str, Value]] = []
        self.branch: int | None = None
        self.cycle = self.stall = self.here = 0
        self.engine = 0.0  # when the HBM is done with all requests
        self.flags: defaultdict[int, int] = defaultdict(int)
        self.flights: defaultdict[int, deque[tuple[float, int]]] = defaultdict(deque)
        self.read = self.written = self.dmas = 0
        self.stored: dict[int, list[int]] = {}
        self.program = [[self.compiled(i) for i in bundle if not i.op.startswith(_IGNORED)] for bundle in bundles]

    # --- control ------------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Execute all bundles in order; consecutive bundles without scalar instructions take one step."""
        n = len(self.program)
        following = [n] * (n + 1)  # the next bundle with work, from each
        for i in reversed(range(n)):
            following[i] = i if self.program[i] else following[i + 1]
        starts = [0] * (n + 1)  # +1 where a stretch begins, -1 after its end
        at = steps = 0
        pending: tuple[int, int] | None = None  # where a branch goes, and bundles until then
        while at < n:
            end = at + 1 if self.program[at] else following[at]
            if pending is not None:
                end = min(end, at + pending[1])
            starts[at] += 1
            starts[end] -= 1
            self.step(at)
            self.cycle += end - at
            pending = self.following_branch(pending, end - at)
            at = end
            if pending is not None and pending[1] == 0:
                at, pending = pending[0], None
            steps += 1
            if steps > _MAX_STEPS:
                raise self.error(f"the program does not end within {_MAX_STEPS} steps")
        executed = tuple(accumulate(starts[:-1]))
        return Run(self.cycle, self.stall, executed, self.read, self.written, self.dmas, self.stored)

    def step(self, at: int) -> None:
        """Execute one bundle; registers are written after all of its instructions have read their operands."""
        self.here, self.branch = at, None
        for instruction in self.program[at]:
            instruction()
        for target, value in self.writes:
            self.registers[target] = value
        self.writes.clear()

    def following_branch(self, pending: tuple[int, int] | None, passed: int) -> tuple[int, int] | None:
        """The pending branch, as (its target, bundles until then), after `passed` bundles; None if none is pending."""
        if pending is None:
            return None if self.branch is None else (self.branch, self.chip.delay_slots)
        if self.branch is not None:
            raise self.error("a branch in the delay slots of another")
        return pending[0], pending[1] - passed

    def error(self, message: str) -> SimulationError:
        """The error with the number of the bundle."""
        return SimulationError(f"bundle {self.here:#x}: {message}")

    # --- instructions -------------------------------------------------------------------------------------------------

    def compiled(self, i: Instruction) -> Callable[[], None]:
        """The instruction as a function without arguments."""
        action = self.action(i)
        if not i.predicate:
            return action
        registers, predicate, needed = self.registers, i.predicate, not i.negated
        undefined = Unknown(f"register {predicate} before it is set")

        def guarded() -> None:
            value = registers.get(predicate, undefined)
            if value.__class__ is not int:
                return self.undecided(i, value)
            return action() if bool(value) is needed else None

        return guarded

    def undecided(self, i: Instruction, predicate: Value) -> None:
        """Execute an instruction whose predicate is unknown: the word or register that it writes becomes unknown."""
        assert isinstance(predicate, Unknown)
        if i.op == "sst":
            self.memory[self.known(self.operand(i.operands[0]), i)] = predicate
        elif i.target and i.target[0] in "sp":
            self.writes.append((i.target, predicate))
        else:
            raise self.error(f"{i.op} depends on an unknown value: {predicate.reason}")

    def action(self, i: Instruction) -> Callable[[], None]:
        """The effect of the instruction if its predicate holds."""
        operands = [self.operand(terms) for terms in i.operands]
        stem = i.op.partition(".")[0]
        if stem == "sbr":
            return lambda: self.jump(i.operands[0][0])
        if i.op.startswith("dma.done"):
            return lambda: self.wait(*(self.known(read, i) for read in operands[:2]))
        if stem == "dma":
            return lambda: self.transfer(i, *operands[:4])
        if stem in ("vsyncadd", "vsyncpa"):
            return lambda: self.signal(stem == "vsyncadd", *(self.known(read, i) for read in operands[:2]))
        if stem == "sst":
            return lambda: self.memory.__setitem__(self.known(operands[0], i), operands[1]())
        if stem == "sdivrem":
            return lambda: self.divide(i.target, *(read() for read in operands))
        if i.target and i.target[0] in "sp":
            return self.assignment(i, operands)
        raise DumpError(f"no rule for the instruction {i.op!r}")

    def assignment(self, i: Instruction, operands: Sequence[Callable[[], Value]]) -> Callable[[], None]:
        """An instruction that only writes a register."""
        writes, target = self.writes, i.target
        if i.op.startswith("inlined_call_operand"):
            number = i.operands[0][0]
            # Without a memory space it is a number, which comes in the register.
            value = self.base(f"operand {number}") if i.op.rpartition(".")[2] else self.number(number)
            return lambda: writes.append((target, value))
        if i.op == "sld":
            return lambda: writes.append((target, self.load(operands[0]())))
        if i.op == "spop.drf":
            name = str(i.operands[0][0])
            return lambda: writes.append((target, self.quotients[name].popleft()))
        function = rule(i.op)
        if function is None:
            unknown = Unknown(f"{target} of {i.op}")
            return lambda: writes.append((target, unknown))
        if len(operands) == 2:
            first, second = operands
            return lambda: writes.append((target, function(first(), second())))
        return lambda: writes.append((target, function(*[read() for read in operands])))

    def jump(self, target: int | str) -> None:
        assert isinstance(target, int)
        self.branch = target

    def divide(self, target: str, dividend: Value, divisor: Value) -> None:
        """Queue the quotient, then the remainder, of a division for pops."""
        if isinstance(dividend, Unknown) or isinstance(divisor, Unknown):
            unknown = dividend if isinstance(dividend, Unknown) else divisor
            self.quotients[target] = deque((unknown, unknown))
        elif divisor == 0:
            raise self.error("a division by zero")
        else:
            self.quotients[target] = deque(divmod(dividend, divisor))

    # --- values -------------------------------------------------------------------------------------------------------

    def base(self, symbol: str) -> int:
        """The pointer of a symbol: an odd multiple of a power of two, so that no left shift gives another pointer."""
        if symbol not in self.bases:
            self.bases[symbol] = (2 * len(self.bases) + 1) << _SPACING
        return self.bases[symbol]

    def operand(self, terms: Terms) -> Callable[[], Value]:
        """A function that reads the operand."""
        constant = sum(self.base(t) if isinstance(t, str) else signed(t) for t in terms if not _is_register(t))
        names = [t for t in terms if isinstance(t, str) and _is_register(t)]
        if not names:
            return lambda: constant
        registers = self.registers
        undefined = {name: Unknown(f"register {name} before it is set") for name in names}
        if len(names) == 1 and len(terms) == 1:
            name = names[0]
            return lambda: registers.get(name, undefined[name])

        def total() -> Value:
            result = constant
            for name in names:
                value = registers.get(name, undefined[name])
                if isinstance(value, Unknown):
                    return value
                result += value
            return result

        return total

    def known(self, read: Callable[[], Value], i: Instruction) -> int:
        """The operand of an instruction that needs its value."""
        value = read()
        if isinstance(value, Unknown):
            raise self.error(f"{i.op} depends on an unknown value: {value.reason}")
        return value

    def load(self, address: Value) -> Value:
        """A word of SMEM."""
        if isinstance(address, Unknown):
            return address
        word = self.memory.get(address)
        if word is not None:
            return word
        names = {base: symbol for symbol, base in self.bases.items()}
        name = names.get(address >> _SPACING << _SPACING, "an unknown address")
        return Unknown(f"a word of SMEM that nothing has set, in {name}")

    # --- DMAs ---------------------------------------------------------------------------------------------------------

    def transfer(self, i: Instruction, *operands: Callable[[], Value]) -> None:
        """Start a DMA (source, granules, target, flag)."""
        source, granules, target, flag = (self.known(read, i) for read in operands)
        size = granules * GRANULE
        start = float(self.cycle + self.stall)
        if "hbm" in i.spaces:
            self.engine = start = max(self.engine, start) + size * i.spaces.count("hbm") / self.chip.bytes_per_cycle
        self.read += size * (i.spaces[0] == "hbm")
        self.written += size * (i.spaces[1] == "hbm")
        self.dmas += 1
        if i.spaces[1] == "smem":
            self.fill(source, target, size // 4)
        if i.spaces[0] == "smem":
            self.store(source, target, size // 4)
        self.flights[flag].append((start + self.chip.latency, granules))

    def fill(self, source: int, target: int, words: int) -> None:
        """Copy an operand's words into SMEM; the words of an operand without values are unknown."""
        number = self.operand_at(source)
        if number is None:
            for k in range(words):
                self.memory[target + k] = Unknown("a copy into SMEM from the middle of an array")
            return
        values = self.operands.get(number)
        unknown = _not_given(number)
        for k in range(words):
            self.memory[target + k] = unknown if values is None else int(values[k]) if k < len(values) else 0

    def number(self, operand: int | str) -> Value:
        """The value of an operand that is one word."""
        assert isinstance(operand, int)
        words = self.operands.get(operand)
        return words[0] if words else _not_given(operand)

    def store(self, source: int, target: int, words: int) -> None:
        """Copy words of SMEM into an operand."""
        number, values = self.operand_at(target), [self.memory.get(source + k, 0) for k in range(words)]
        if number is not None and not any(isinstance(word, Unknown) for word in values):
            self.stored[number] = [word for word in values if not isinstance(word, Unknown)]

    def operand_at(self, pointer: int) -> int | None:
        """The number of the operand that begins at a pointer; None if none does."""
        for symbol, base in self.bases.items():
            if symbol.startswith("operand ") and pointer in (base << shift for shift in (0, 4, 5)):
                return int(symbol.split()[1])
        return None

    def wait(self, flag: int, granules: int) -> None:
        """Wait until that many granules have arrived."""
        flights = self.flights[flag]
        while self.flags[flag] < granules:
            if not flights:
                raise self.error("a wait for a DMA that was never started")
            arrival, size = flights.popleft()
            self.flags[flag] += size
            self.stall = max(self.stall, int(arrival) - self.cycle)

    def signal(self, add: bool, flag: int, amount: int) -> None:
        """Add to a flag, or set it."""
        self.flags[flag] = signed(amount) + (self.flags[flag] if add else 0)


def _not_given(operand: int) -> Unknown:
    return Unknown(f"operand {operand}: pass its values, a NumPy array, among the arguments")


def _is_register(term: int | str) -> bool:
    return isinstance(term, str) and not term.startswith("#")
