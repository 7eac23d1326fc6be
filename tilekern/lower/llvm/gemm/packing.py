"""Packing of a dot's operands into panels of words."""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.core import round_up
from tilekern.lower.llvm.element_index import ZERO, Coords, Index
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import loop_over, tail_pieces
from tilekern.lower.llvm.gemm.shapes import DotShape
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type

Words = Callable[[Index, Index, int], Reg]
"""Maps (k, free index, lanes) to word number k of a vector of rows or columns, or of one if `lanes` is 0."""


def word_loader(e: Elements, shape: DotShape, side: int, batch: Coords) -> Words:
    """The function that computes the words of one operand."""

    def element(k: Index, free: Index, lanes: int) -> Reg:
        return e.element(shape.op.operands[side], shape.coords(side, batch, k, free), lanes)

    def words(k: Index, free: Index, lanes: int) -> Reg:
        if not shape.paired:
            return element(k, free, lanes)
        low = e.code.cast("zext", element(k.times(2), free, lanes), "i32")
        if shape.depth % 2 and k == Index(const=shape.words - 1):
            return low
        high = e.code.cast("zext", element(k.times(2).shifted(1), free, lanes), "i32")
        return e.code.binary("or", low, e.code.binary("shl", high, 16))

    return words


def pack_row(e: Elements, words: Words, k: Index, count: int, base: Reg, row: int, offset: Index) -> None:
    """Store word number k of `count` rows or columns, contiguously."""
    code, lanes = e.code, e.code.module.machine.lanes

    def put(free: Index, width: int) -> None:
        x = words(k, free, width)
        index = k.times(row).plus(Index(free.terms, free.const)).plus(offset)
        code.store(x, code.gep(base, e.index_value(index), x.type.scalar))

    def body(i: Reg) -> None:
        with e.scope():
            put(index_of(i, 1), lanes)

    code.loop(0, count // lanes * lanes, lanes, body)
    for at, width in tail_pieces(count, lanes):
        with e.scope():
            put(Index((), at, 1 if width else 0), width)


def pack_left_rows(e: Elements, shape: DotShape, batch: Coords, base: Reg, row: int) -> None:
    """Pack the left operand row after row, `row` words apart; a vector of words along k is stored whole."""
    code, lanes = e.code, e.code.module.machine.lanes
    words = word_loader(e, shape, 0, batch)
    along = shape.contract[0] == len(shape.op.operands[0].tile.shape) - 1

    def address(free: Index, k: Index) -> Reg:
        return code.gep(base, e.index_value(free.times(row).plus(k)), "i32")

    def line(free: Index, k: Index) -> None:
        """A vector along k of one row."""
        elements = shape.coords(0, batch, Index(k.terms, k.const).times(2).plus(Index(step=1)), free)
        x = e.element(shape.op.operands[0], elements, 2 * lanes)
        code.store(code.emit(Type("i32", lanes), f"bitcast {x} to <{lanes} x i32>"), address(free, k))

    def square(free: Index, k: Index) -> None:
        """A square of words of an operand that is contiguous along its rows."""
        vectors = [words(k.shifted(n), Index(free.terms, free.const, 1), lanes) for n in range(lanes)]
        for n, x in enumerate(transpose(code, vectors)):
            code.store(x, address(free.shifted(n), k))

    def strip(k: Index) -> None:
        if along:
            loop_over(e, (shape.rows,), lambda free: line(free[0], k))
        else:
            loop_over(e, (shape.rows // lanes,), lambda n: square(n[0].times(lanes), k))
            rest(range(shape.rows // lanes * lanes, shape.rows), [k.shifted(n) for n in range(lanes)])

    def rest(rows: range, ks: list[Index]) -> None:
        """Word by word."""

        def words_of(free: Index) -> None:
            for k in ks:
                code.store(words(k, free, 0), address(free, k))

        loop_over(e, (len(rows),), lambda n: words_of(n[0].shifted(rows.start)))

    whole = shape.whole_words // lanes
    loop_over(e, (whole,), lambda n: strip(n[0].times(lanes)))
    ks = [Index(const=k) for k in range(whole * lanes, shape.words)]
    if ks:
        rest(range(shape.rows), ks)


def pack(e: Elements, shape: DotShape, batch: Coords, spare: Reg, lanes: int, width: int) -> None:
    """Pack the right operand into panels of `width` columns."""
    whole, rest = divmod(shape.columns, width)
    contracted = shape.contract[1]
    transposes = contracted == len(shape.op.operands[1].tile.shape) - 1

    def panel(j: Index, columns: int) -> None:
        base = e.code.gep(spare, e.index_value(j.times(shape.words * width * shape.word_bytes)))
        padded = round_up(columns, lanes)
        (_pack_transposed if transposes else _pack_rows)(e, shape, batch, j.times(width), columns, base, padded)

    loop_over(e, (whole,), lambda j: panel(j[0], width))
    if rest:
        panel(Index(const=whole), rest)


def _pack_rows(e: Elements, shape: DotShape, batch: Coords, first: Index, columns: int, base: Reg, row: int) -> None:
    """Pack a panel of an operand whose columns are contiguous."""
    words = word_loader(e, shape, 1, batch)

    def shifted(k: Index, free: Index, lanes: int) -> Reg:
        return words(k, free.plus(first), lanes)

    whole = shape.whole_words
    wide = 2 * e.code.module.machine.lanes

    def line(k: Coords) -> None:
        if shape.paired and columns % wide == 0:
            for n in range(0, columns, wide):
                _interleave_rows(
                    e, shape, batch, k[0], first.shifted(n), e.index_value(k[0].times(row).shifted(n)), base
                )
        else:
            pack_row(e, shifted, k[0], columns, base, row, ZERO)

    loop_over(e, (whole,), line)
    if shape.words > whole:
        pack_row(e, shifted, Index(const=whole), columns, base, row, ZERO)


def _interleave_rows(e: Elements, shape: DotShape, batch: Coords, k: Index, first: Index, at: Reg, base: Reg) -> None:
    """Store word number k of two vectors of columns: interleave the elements of two rows."""
    code, lanes = e.code, e.code.module.machine.lanes
    free = Index(first.terms, first.const, 1)
    one, two = (e.element(shape.op.operands[1], (*batch, k.times(2).shifted(n), free), 2 * lanes) for n in (0, 1))
    for half in (0, 1):
        order = [n + side * 2 * lanes for n in range(half * lanes, (half + 1) * lanes) for side in (0, 1)]
        words = code.emit(Type("i32", lanes), f"bitcast {code.shuffle(one, two, order)} to <{lanes} x i32>")
        code.store(words, code.gep(code.gep(base, at, "i32"), half * lanes, "i32"))


def _pack_transposed(
    e: Elements, shape: DotShape, batch: Coords, first: Index, columns: int, base: Reg, row: int
) -> None:
    """Pack a panel of an operand that is contiguous along k: load squares of words by rows, and transpose them."""
    code, value = e.code, shape.op.operands[1]
    lanes = shape.lanes(code.module.machine)
    words, per_word = word_loader(e, shape, 1, batch), 1 + shape.paired
    whole = shape.depth // (lanes * per_word) * lanes

    def square(column: Index, count: int, k: Index) -> None:
        vectors: list[Reg] = []
        for n in range(count):
            along = Index(k.terms, k.const).times(per_word).plus(Index(step=1))
            x = e.element(value, shape.coords(1, batch, along, first.plus(column).shifted(n)), lanes * per_word)
            if shape.paired:
                x = code.emit(Type("i32", lanes), f"bitcast {x} to <{lanes} x i32>")
            vectors.append(x)
        turned = transpose(code, [*vectors, *[Reg("poison", vectors[0].type)] * (lanes - count)])
        for n, x in enumerate(turned):
            coords = k.shifted(n).times(row).plus(column)
            code.store(x, code.gep(base, e.index_value(coords), x.type.scalar))

    def strip(column: Index, count: int) -> None:
        def body(k: Reg) -> None:
            with e.scope():
                square(column, count, index_of(k))

        code.loop(0, whole, lanes, body)

    over_columns = columns // lanes
    loop_over(e, (over_columns,), lambda c: strip(c[0].times(lanes), lanes))
    if columns % lanes:
        strip(Index(const=over_columns * lanes), columns % lanes)

    def shifted(k: Index, free: Index, width: int) -> Reg:
        return words(k, free.plus(first), width)

    for k in range(whole, shape.words):
        with e.scope():
            pack_row(e, shifted, Index(const=k), columns, base, row, ZERO)


def transpose(code: Code, rows: list[Reg]) -> list[Reg]:
    """Transpose a square of vectors: exchange blocks of 1, 2, 4, ... lanes across the diagonal."""
    count, width = len(rows), 1
    while width < count:
        turned = list(rows)
        for n in range(count):
            if n & width:
                continue
            low = [m if not m & width else count + (m ^ width) for m in range(count)]
            high = [m | width if not m & width else count + m for m in range(count)]
            turned[n] = code.shuffle(rows[n], rows[n | width], low)
            turned[n | width] = code.shuffle(rows[n], rows[n | width], high)
        rows, width = turned, 2 * width
    return rows
