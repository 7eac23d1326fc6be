"""Sorting networks for 64-bit integers in memory, in descending order, by vectors and without branches.

Batcher's bitonic network sorts blocks of 1, 2, 4, ... numbers. Two sorted halves are merged by comparing each
number with its mirror image in the block, then with numbers at half the distance, and so on. Distances below the width
of a vector are shuffles.

    Batcher, "Sorting networks and their applications", AFIPS 1968
"""

from __future__ import annotations

from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I64, PTR, VOID, Reg, Type, constant
from tilekern.lower.llvm.runtime.machine import Machine

LEAST = -(2**63)
"""Pads blocks: the last number in descending order."""


def width_of(machine: Machine) -> int:
    """Numbers in a vector, the smallest size of a network."""
    return machine.vector_bytes // 8


def sort(code: Code, words: Reg, count: int) -> None:
    """Sort `count` numbers: a power of two, at least `width_of` the machine."""
    code.call(_sort(code.module), VOID, words, constant(count, I64))


def merge(code: Code, words: Reg, count: int) -> None:
    """Merge the sorted halves of `count` numbers: a power of two, at least twice the `width_of` the machine."""
    level = constant(count.bit_length() - 1, I64)
    code.call(_merge(code.module), VOID, words, constant(count, I64), level)


def _sort(module: Module) -> str:
    """`void sort_words(words, count)`."""
    width = width_of(module.machine)

    def build(code: Code, words: Reg, count: Reg) -> None:
        def within(at: Reg) -> None:
            address = code.gep(words, at, "i64")
            x, size = code.load(Type("i64", width), address), 2
            while size <= width:
                x = _exchanged(code, x, size - 1)
                x = _halved(code, x, size // 4)
                size *= 2
            code.store(x, address)

        code.loop(0, count, width, within)
        levels, name = code.binary("add", _exponent(code, count), 1), _merge(module)

        def merge(level: Reg) -> None:
            code.call(name, VOID, words, count, level)

        code.loop(width.bit_length(), levels, 1, merge)
        code.ret()

    return module.function("sort_words", [("words", PTR), ("count", I64)], build, inline=False)


def _merge(module: Module) -> str:
    """`void merge_words(words, count, level)`: in each block of 2 ** level numbers, merge the halves."""
    width = width_of(module.machine)

    def build(code: Code, words: Reg, count: Reg, level: Reg) -> None:
        size = code.binary("shl", 1, level)
        half, pairs = code.binary("lshr", size, 1), code.binary("lshr", count, 1)

        def mirror(at: Reg) -> None:
            block, place = _split(code, at, half)
            low = code.gep(words, code.binary("add", block, place), "i64")
            last = code.binary("sub", code.binary("add", block, size), width)
            high = code.gep(words, code.binary("sub", last, place), "i64")
            x, y = code.load(Type("i64", width), low), _reversed(code, code.load(Type("i64", width), high))
            code.store(code.intrinsic("llvm.smax", x, y), low)
            code.store(_reversed(code, code.intrinsic("llvm.smin", x, y)), high)

        def halves(number: Reg) -> None:
            distance = code.binary("lshr", half, code.binary("add", number, 1))

            def compare(at: Reg) -> None:
                block, place = _split(code, at, distance)
                low = code.gep(words, code.binary("add", block, place), "i64")
                high = code.gep(low, distance, "i64")
                x, y = (code.load(Type("i64", width), address) for address in (low, high))
                code.store(code.intrinsic("llvm.smax", x, y), low)
                code.store(code.intrinsic("llvm.smin", x, y), high)

            code.loop(0, pairs, width, compare)

        def within(at: Reg) -> None:
            address = code.gep(words, at, "i64")
            code.store(_halved(code, code.load(Type("i64", width), address), width // 2), address)

        code.loop(0, pairs, width, mirror)
        code.loop(0, code.binary("sub", level, width.bit_length()), 1, halves)
        code.loop(0, count, width, within)
        code.ret()

    parameters = [("words", PTR), ("count", I64), ("level", I64)]
    return module.function("merge_words", parameters, build, inline=False)


def _split(code: Code, at: Reg, half: Reg) -> tuple[Reg, Reg]:
    """For the pair number `at` of numbers that are `half` apart: its block's start, and its offset in the block."""
    place = code.binary("and", at, code.binary("sub", half, 1))
    return code.binary("shl", code.binary("sub", at, place), 1), place


def _reversed(code: Code, x: Reg) -> Reg:
    return code.shuffle(x, x, range(x.type.lanes)[::-1])


def _halved(code: Code, x: Reg, distance: int) -> Reg:
    """Compare and exchange lanes at a distance, then at half of it, and so on."""
    while distance:
        x, distance = _exchanged(code, x, distance), distance // 2
    return x


def _exchanged(code: Code, x: Reg, bits: int) -> Reg:
    """Compare and exchange lanes whose numbers differ in these bits: the greater lane comes first."""
    lanes = range(x.type.lanes)
    partner = code.shuffle(x, x, [n ^ bits for n in lanes])
    great, small = (code.intrinsic(f"llvm.s{name}", x, partner) for name in ("max", "min"))
    return code.shuffle(great, small, [n if n < n ^ bits else n + x.type.lanes for n in lanes])


def _exponent(code: Code, power: Reg) -> Reg:
    """The exponent of a power of two."""
    return code.call_external("llvm.cttz.i64", I64, power, constant(1, Type("i1")))
