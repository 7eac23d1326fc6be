"""Packing of a dot's operands into panels of words."""

from __future__ import annotations

from collections.abc import Callable

from tilekern.ir.core import round_up
from tilekern.lower.llvm.element_index import ZERO, Coords, Index
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import loop_over, tail_pieces
from tilekern.lower.llvm.gemm.shapes import DotShape
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type, constant

Words = Callable[[Index, Index, int], Reg]
"""Maps (k, free index, lanes) to word number k of a vector of rows or columns, or of one if `lanes` is 0."""


def word_loader(e: Elements, shape: DotShape, side: int, batch: Coords) -> Words:
    """The function that computes the words of one operand."""

    def element(k: Index, free: Index, lanes: int) -> Reg:
        return e.element(shape.op.operands[side], shape.coords(side, batch, k, free), lanes)

    def words(k: Index, free: Index, lanes: int) -> Reg:
        if shape.per_word == 1:
            return element(k, free, lanes)
        is_last = shape.depth % shape.per_word and k == Index(const=shape.words - 1)
        word: Reg | None = None
        for n in range(shape.depth % shape.per_word if is_last else shape.per_word):
            x = e.code.cast("zext", element(k.times(shape.per_word).shifted(n), free, lanes), "i32")
            x = e.code.binary("shl", x, 32 // shape.per_word * n) if n else x
            word = x if word is None else e.code.binary("or", word, x)
        assert word is not None
        return word

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


def pack_tiles(e: Elements, shape: DotShape, batch: Coords, base: Reg) -> None:
    """Pack the left operand tile after tile; tiles of the same rows follow each other.

    A tile is a square of words. Words of a tile beyond the operand's rows and words have no meaning.
    """
    lanes = e.code.module.machine.lanes
    bands, last_rows = divmod(shape.rows, lanes)
    contiguous_along_k = shape.contract[0] == len(shape.op.operands[0].tile.shape) - 1
    band = _band_by_rows if contiguous_along_k else _band_by_columns

    def at(above: Index, rows: int) -> None:
        first = above.times(round_up(shape.words, lanes) * lanes)
        band(e, shape, batch, e.code.gep(base, e.index_value(first), "i32"), above.times(lanes), rows)

    loop_over(e, (bands,), lambda n: at(n[0], lanes))
    if last_rows:
        at(Index(const=bands), last_rows)


def _band_by_rows(e: Elements, shape: DotShape, batch: Coords, base: Reg, first: Index, rows: int) -> None:
    """Pack a row of tiles of an operand that is contiguous along k: vectors of its rows."""
    code, lanes = e.code, e.code.module.machine.lanes
    words, vector = word_loader(e, shape, 0, batch), lanes * shape.per_word

    def put(row: Index, k: Index, at: int, width: int) -> None:
        """Store elements of a row; `at` counts the elements before, besides `k` words."""
        along = k.times(shape.per_word).shifted(at).plus(Index(step=1 if width else 0))
        x = e.element(shape.op.operands[0], shape.coords(0, batch, along, first.plus(row)), width)
        place = k.plus(row).times(vector).shifted(at // vector * vector * lanes + at % vector)
        code.store(x, code.gep(base, e.index_value(place), x.type.scalar))

    def whole(n: Coords) -> None:
        loop_over(e, (rows,), lambda row: put(row[0], n[0].times(lanes), 0, vector))

    def tail(row: Coords) -> None:
        for at, width in tail_pieces(shape.per_word * shape.whole_words, vector):
            put(row[0], ZERO, at, width)
        if shape.words > shape.whole_words:
            k = shape.whole_words
            place = row[0].times(lanes).shifted(k // lanes * lanes**2 + k % lanes)
            code.store(words(Index(const=k), first.plus(row[0]), 0), code.gep(base, e.index_value(place), "i32"))

    loop_over(e, (shape.whole_words // lanes,), whole)
    if shape.words % lanes or shape.words > shape.whole_words:
        loop_over(e, (rows,), tail)


def _band_by_columns(e: Elements, shape: DotShape, batch: Coords, base: Reg, first: Index, rows: int) -> None:
    """Pack a row of tiles of an operand that is contiguous along its rows: squares of words, transposed."""
    code, lanes = e.code, e.code.module.machine.lanes
    words = word_loader(e, shape, 0, batch)

    def square(k: Index, count: int) -> None:
        columns = [words(k.shifted(n), Index(first.terms, first.const, 1), lanes) for n in range(count)]
        zeros = [constant(0, columns[0].type)] * (lanes - count)
        for row, x in enumerate(transpose(code, [*columns, *zeros])):
            code.store(x, code.gep(base, e.index_value(k.times(lanes).shifted(row * lanes)), "i32"))

    def word(row: Index, k: Index, n: Index) -> None:
        place = k.times(lanes).plus(row.times(lanes)).plus(n)
        code.store(words(k.plus(n), first.plus(row), 0), code.gep(base, e.index_value(place), "i32"))

    def tile(k: Index, count: int) -> None:
        if rows == lanes:
            square(k, count)
            return
        # The last word of an odd depth is computed in its own way, which its constant index tells.
        odd = count if k.terms or k.const + count < shape.words or shape.words == shape.whole_words else count - 1
        loop_over(e, (rows, odd), lambda c: word(c[0], k, c[1]))
        if odd < count:
            loop_over(e, (rows,), lambda c: word(c[0], k, Index(const=odd)))

    tiles = shape.whole_words // lanes
    loop_over(e, (tiles,), lambda n: tile(n[0].times(lanes), lanes))
    if shape.words > tiles * lanes:
        with e.scope():
            tile(Index(const=tiles * lanes), shape.words - tiles * lanes)


def pack(e: Elements, shape: DotShape, batch: Coords, spare: Reg, lanes: int, width: int) -> None:
    """Pack the right operand into panels of `width` columns."""
    whole, last_columns = divmod(shape.columns, width)
    contracted = shape.contract[1]
    transposes = contracted == len(shape.op.operands[1].tile.shape) - 1

    def panel(j: Index, columns: int) -> None:
        base = e.code.gep(spare, e.index_value(j.times(shape.words * width * shape.word_bytes)))
        padded = round_up(columns, lanes)
        (_pack_transposed if transposes else _pack_rows)(e, shape, batch, j.times(width), columns, base, padded)

    loop_over(e, (whole,), lambda j: panel(j[0], width))
    if last_columns:
        panel(Index(const=whole), last_columns)


def _pack_rows(e: Elements, shape: DotShape, batch: Coords, first: Index, columns: int, base: Reg, row: int) -> None:
    """Pack a panel of an operand whose columns are contiguous."""
    words = word_loader(e, shape, 1, batch)

    def shifted(k: Index, free: Index, lanes: int) -> Reg:
        return words(k, free.plus(first), lanes)

    whole = shape.whole_words
    wide = 2 * e.code.module.machine.lanes

    def line(k: Coords) -> None:
        if shape.per_word == 2 and columns % wide == 0:
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
    even, odd = (e.element(shape.op.operands[1], (*batch, k.times(2).shifted(n), free), 2 * lanes) for n in (0, 1))
    for n, words in enumerate(interleave(code, even, odd)):
        code.store(words, code.gep(code.gep(base, at, "i32"), n * lanes, "i32"))


def interleave(code: Code, even: Reg, odd: Reg) -> list[Reg]:
    """Vectors of words, each a 16-bit element of `even` and one of `odd`, which have one or two vectors' lanes."""
    lanes = min(even.type.lanes, code.module.machine.lanes)

    def words(first: int) -> Reg:
        order = [n + side * even.type.lanes for n in range(first, first + lanes) for side in (0, 1)]
        return code.emit(Type("i32", lanes), f"bitcast {code.shuffle(even, odd, order)} to <{lanes} x i32>")

    return [words(first) for first in range(0, even.type.lanes, lanes)]


def _pack_transposed(
    e: Elements, shape: DotShape, batch: Coords, first: Index, columns: int, base: Reg, row: int
) -> None:
    """Pack a panel of an operand that is contiguous along k: load squares of words by rows, and transpose them."""
    code, value = e.code, shape.op.operands[1]
    lanes = shape.lanes(code.module.machine)
    words, per_word = word_loader(e, shape, 1, batch), shape.per_word
    whole = shape.depth // (lanes * per_word) * lanes

    def square(column: Index, count: int, k: Index) -> None:
        vectors: list[Reg] = []
        for n in range(count):
            along = Index(k.terms, k.const).times(per_word).plus(Index(step=1))
            x = e.element(value, shape.coords(1, batch, along, first.plus(column).shifted(n)), lanes * per_word)
            if per_word > 1:
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
