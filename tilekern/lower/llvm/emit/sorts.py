"""Sorts and top-k: the positions of elements, ordered by integer keys.

A 32-bit key and its position form a 64-bit *word*: the key in the upper half, the inverted position in the lower one,
so that the first of equal keys is the greatest word. Sorting networks sort words. Longer keys, or several keys, are
sorted by a merge sort of positions.
"""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.types import kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Coords, Index, insert_index
from tilekern.lower.llvm.emit import sorting_networks
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import compute
from tilekern.lower.llvm.emit.loop_nests import loop_over, tail_pieces
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I32, I64, VOID, Reg, Type, constant
from tilekern.lower.llvm.plan.loop_fusion import sorts_words
from tilekern.lower.llvm.plan.steps import Step
from tilekern.lower.llvm.runtime.machine import Machine


def scratch_bytes(op: Sort | TopK, machine: Machine) -> int:
    """The scratch memory of a line: its words, or two lines of positions."""
    length = op.operands[0].tile.shape[op.dim]
    if isinstance(op, TopK) and not _is_short(op, machine):
        return 8 * 2 * _kept_words(op, machine)
    return 8 * (_padded(length, machine) if sorts_words(op) else length)


def emit(e: Elements, step: Step) -> None:
    """Emit a sort or a top-k, one line at a time."""
    op = step.op
    assert isinstance(op, (Sort, TopK)) and step.temporary is not None
    memory = e.buffer_address(step.temporary)

    def line(coords: Coords) -> None:
        if isinstance(op, TopK) and not _is_short(op, e.code.module.machine):
            _top_words(e, op, coords, memory)
        elif isinstance(op, TopK) or sorts_words(op):
            _sort_words(e, op, coords, memory)
        else:
            _merge_sort(e, op, coords, memory)

    shape = op.operands[0].tile.shape
    loop_over(e, (*shape[: op.dim], *shape[op.dim + 1 :]), line)


def _padded(length: int, machine: Machine) -> int:
    """The size of the network that sorts `length` words."""
    return max(1 << (length - 1).bit_length(), sorting_networks.width_of(machine))


def _kept_words(op: TopK, machine: Machine) -> int:
    """The words of a line that a top-k keeps sorted; as many candidates have room after them."""
    return max(_padded(op.k, machine), calibration.MIN_TOP_K_VECTORS * machine.lanes)


def _is_short(op: TopK, machine: Machine) -> bool:
    """True if all words of a line are sorted, since it is short."""
    return op.operands[0].tile.shape[op.dim] <= 2 * _kept_words(op, machine)


# --- words -----------------------------------------------------------------------------------------------------------


def _key(e: Elements, op: Sort | TopK, coords: Coords, index: Index, lanes: int) -> Reg:
    """Keys as signed integers in descending order."""
    key = op.operands[0]
    bits = e.element(key, insert_index(coords, op.dim, index), lanes)
    if kind_of(key.tile.dtype) == "unsigned":
        bits = e.code.binary("xor", bits, -(2**31))
    return e.code.binary("xor", bits, -1) if isinstance(op, Sort) else bits


def _words(e: Elements, key: Reg, index: Index) -> Reg:
    """Words of keys and their positions."""
    code, lanes = e.code, key.type.lanes
    position = e.lane_indices(index, lanes) if lanes else e.index_value(index)
    high = code.binary("shl", code.cast("sext", key, "i64"), 32)
    return code.binary("or", high, code.binary("xor", position, 2**32 - 1))


def _vectors(e: Elements, begin: int, end: int, body: Callable[[Index, int], None]) -> None:
    """Emit `body(index, lanes)` for every vector of a range, tails included; `begin` is a multiple of the lanes."""
    lanes = e.code.module.machine.lanes

    def vector(i: Reg) -> None:
        with e.scope():
            body(index_of(i, 1), lanes)

    e.code.loop(begin, end // lanes * lanes, lanes, vector)
    for at, width in tail_pieces(end, lanes):
        with e.scope():
            body(Index((), at, 1 if width else 0), width)


def _fill(e: Elements, op: Sort | TopK, coords: Coords, words: Reg, length: int, size: int) -> None:
    """Store the words of the first `length` elements of a line, padded to `size`."""

    def vector(index: Index, lanes: int) -> None:
        packed = _words(e, _key(e, op, coords, index, lanes), index)
        e.code.store(packed, e.code.gep(words, e.index_value(Index(index.terms, index.const)), "i64"))

    _vectors(e, 0, length, vector)
    _clear(e.code, words, length, size)


def _clear(code: Code, words: Reg, begin: int, end: int) -> None:
    def clear(i: Reg) -> None:
        code.store(constant(sorting_networks.LEAST, I64), code.gep(words, i, "i64"))

    code.loop(begin, end, 1, clear)


def _write_positions(e: Elements, op: Sort | TopK, coords: Coords, words: Reg) -> None:
    """Write the positions of the first words to the result."""
    code = e.code

    def vector(index: Index, lanes: int) -> None:
        address = code.gep(words, e.index_value(Index(index.terms, index.const)), "i64")
        positions = code.binary("xor", code.load(Type("i64", lanes), address), -1)
        e.write(op.result, code.cast("trunc", positions, "i32"), insert_index(coords, op.dim, index))

    _vectors(e, 0, op.result.tile.shape[op.dim], vector)


def _sort_words(e: Elements, op: Sort | TopK, coords: Coords, words: Reg) -> None:
    """Sort all words of a line."""
    length = op.operands[0].tile.shape[op.dim]
    size = _padded(length, e.code.module.machine)
    _fill(e, op, coords, words, length, size)
    sorting_networks.sort(e.code, words, size)
    _write_positions(e, op, coords, words)


# --- top-k -----------------------------------------------------------------------------------------------------------


def _top_words(e: Elements, op: TopK, coords: Coords, words: Reg) -> None:
    """Find the greatest words of a long line.

    The greatest words so far are kept sorted. Keys above the least of the k greatest are *candidates*. They are
    collected after the sorted words, and merged into them when there is no room for another vector. Equal keys are no
    candidates, since their positions are greater.
    """
    code, machine = e.code, e.code.module.machine
    size, length = _kept_words(op, machine), op.operands[0].tile.shape[op.dim]
    count, least = code.alloca(I64), code.alloca(I32)
    more = code.gep(words, size, "i64")

    def begin() -> None:
        code.store(constant(0, I64), count)
        _clear(code, more, 0, size)
        last = code.load(I64, code.gep(words, op.k - 1, "i64"))
        code.store(code.cast("trunc", code.binary("ashr", last, 32), "i32"), least)

    def merge() -> None:
        sorting_networks.sort(code, more, size)
        sorting_networks.merge(code, words, 2 * size)
        begin()

    def look(index: Index, lanes: int) -> None:
        key = _key(e, op, coords, index, lanes)
        better = code.compare("icmp sgt", key, code.splat(code.load(I32, least), lanes))
        with code.when(_any(code, better)), e.scope():
            _collect(code, _words(e, key, index), better, more, count)
            with code.when(code.compare("icmp sgt", code.load(I64, count), size - machine.lanes)):
                merge()

    _fill(e, op, coords, words, size, size)
    sorting_networks.sort(code, words, size)
    begin()
    _vectors(e, size, length, look)
    with code.when(code.compare("icmp ne", code.load(I64, count), 0)):
        merge()
    _write_positions(e, op, coords, words)


def _any(code: Code, mask: Reg) -> Reg:
    if not mask.type.lanes:
        return mask
    bits = Type(f"i{mask.type.lanes}")
    return code.compare("icmp ne", code.emit(bits, f"bitcast {mask} to {bits}"), 0)


def _collect(code: Code, words: Reg, mask: Reg, base: Reg, count: Reg) -> None:
    """Append the words of the mask to the candidates."""
    before = code.load(I64, count)
    address = code.gep(base, before, "i64")
    if not words.type.lanes:
        code.store(words, address)
        code.store(code.binary("add", before, 1), count)
        return
    name, bits = f"llvm.masked.compressstore.{words.type.suffix}", Type(f"i{mask.type.lanes}")
    code.call_external(name, VOID, words, address, mask)
    number = code.intrinsic("llvm.ctpop", code.emit(bits, f"bitcast {mask} to {bits}"))
    code.store(code.binary("add", before, code.cast("zext", number, "i64")), count)


# --- merge sort ------------------------------------------------------------------------------------------------------


def _merge_sort(e: Elements, op: Sort, coords: Coords, now: Reg) -> None:
    """Sort positions by merging runs, which begin as single elements."""
    code, length = e.code, op.result.tile.shape[op.dim]
    spare = code.gep(now, 4 * length)

    def begin(i: Reg) -> None:
        code.store(code.cast("trunc", i, "i32"), code.gep(now, i, "i32"))

    code.loop(0, length, 1, begin)
    width = 1
    while width < length:
        _merge_runs(e, op, coords, now, spare, width)
        now, spare, width = spare, now, 2 * width

    def finish(i: Reg) -> None:
        with e.scope():
            position = code.load(I32, code.gep(now, i, "i32"))
            e.write(op.result, position, insert_index(coords, op.dim, index_of(i)))

    code.loop(0, length, 1, finish)


def _merge_runs(e: Elements, op: Sort, coords: Coords, source: Reg, target: Reg, width: int) -> None:
    """Merge neighbouring runs of `width` positions."""
    code, length = e.code, op.result.tile.shape[op.dim]

    def pair(left: Reg) -> None:
        with e.scope():
            middle = code.intrinsic("llvm.smin", code.binary("add", left, width), length)
            end = code.intrinsic("llvm.smin", code.binary("add", left, 2 * width), length)

            def step(at: Reg, i: Reg, j: Reg) -> list[Reg]:
                with e.scope():
                    first, second = (_position(e, source, n, length) for n in (i, j))
                    smaller = _less(e, op, coords, second, first)
                    out = code.compare("icmp sge", j, end)
                    stays = code.binary("or", out, code.binary("xor", smaller, 1))
                    takes = code.binary("and", code.compare("icmp slt", i, middle), stays)
                    code.store(code.select(takes, first, second), code.gep(target, at, "i32"))
                    taken = code.cast("zext", takes, "i64")
                    return [code.binary("add", i, taken), code.binary("add", j, code.binary("sub", 1, taken))]

            code.loop(left, end, 1, step, left, middle)

    code.loop(0, length, 2 * width, pair)


def _position(e: Elements, source: Reg, at: Reg, length: int) -> Reg:
    """Load a position; any position if `at` is beyond the end."""
    inside = e.code.intrinsic("llvm.smin", at, length - 1)
    return e.code.load(I32, e.code.gep(source, inside, "i32"))


def _less(e: Elements, op: Sort, coords: Coords, a: Reg, b: Reg) -> Reg:
    """True if the keys at position `a` come before the keys at `b`: the first key that differs decides."""
    code = e.code
    result: Reg | None = None
    for key in reversed(op.operands[: op.num_keys]):
        first, second = (
            e.element(key, insert_index(coords, op.dim, index_of(code.cast("sext", p, "i64")))) for p in (a, b)
        )
        less = compute(code, "lt", key.tile.dtype, first, second)
        equal = code.compare("icmp eq", first, second)
        result = less if result is None else code.binary("or", less, code.binary("and", equal, result))
    assert result is not None
    assert all(kind_of(key.tile.dtype) in ("signed", "unsigned") for key in op.operands)
    return result
