"""Dots of a few rows, without packing: each element of the right operand is used only once for each row.

Pairs of bfloat16 are multiplied where the CPU has them (AVX512-BF16) and the right operand is bfloat16 in memory: then
no element is cast. If columns are contiguous, the elements of two rows are interleaved in registers. Ends that are no
whole vector, and the last element of an odd depth, are multiplied in float32.
"""

from __future__ import annotations

from tilekern.ir.core import Value
from tilekern.ir.shape import Reshape, Slice, Transpose
from tilekern.ir.types import F32, DType, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import ZERO, Coords, Index, operand_coords
from tilekern.lower.llvm.element_types import element_constant
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.elementwise import convert
from tilekern.lower.llvm.emit.lookups import BYTE_LANES, PairsOfBytes
from tilekern.lower.llvm.emit.loop_nests import reduce_lanes, reduce_vectors, tail_pieces
from tilekern.lower.llvm.gemm.microkernel import accumulate
from tilekern.lower.llvm.gemm.packing import interleave
from tilekern.lower.llvm.gemm.prefetch import Prefetcher
from tilekern.lower.llvm.gemm.shapes import DotShape
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type
from tilekern.lower.llvm.runtime.machine import Machine

_Widths = list[tuple[int, int]]
"""Vectors side by side: for each its first column, and its lanes; 0 lanes for one element."""


def emit(e: Elements, shape: DotShape, batch: Coords, out: Reg, adds: bool) -> None:
    """Emit a product of a few rows; if `adds`, it is added to the values at `out`."""
    if shape.contract[1] != len(shape.op.operands[1].tile.shape) - 1:
        _by_depth(e, shape, batch, out, adds)
    else:
        _by_columns(e, shape, batch, out, adds)


def _element(e: Elements, shape: DotShape, side: int, batch: Coords, k: Index, free: Index, lanes: int) -> Reg:
    return e.element(shape.op.operands[side], shape.coords(side, batch, k, free), lanes)


def _wide(code: Code, shape: DotShape, x: Reg) -> Reg:
    """Elements in the dtype of the sums."""
    return x if shape.per_word == 1 else convert(code, x, shape.dtype, F32)


def _add(code: Code, dtype: DType, x: Reg, y: Reg) -> Reg:
    return code.binary("fadd" if kind_of(dtype) == "float" else "add", x, y)


def _store_sum(e: Elements, shape: DotShape, total: Reg, row: int, column: Index, out: Reg, adds: bool) -> None:
    matrix, coords = (shape.rows, shape.columns), (Index(const=row), column)
    if adds:
        before = e.load(out, matrix, shape.sum_dtype, coords, total.type.lanes)
        total = _add(e.code, shape.sum_dtype, before, total)
    e.store(total, out, matrix, shape.sum_dtype, coords)


# --- an operand that is contiguous along k ---------------------------------------------------------------------------


def _by_columns(e: Elements, shape: DotShape, batch: Coords, out: Reg, adds: bool) -> None:
    """Multiply by an operand that is contiguous along k: vectors along k, several columns at once."""
    prefetcher = Prefetcher(e, shape.op.operands[1], ZERO, 1)

    def several(n: Reg) -> None:
        with e.scope():
            for column in range(calibration.ACCUMULATORS):
                at = shape.coords(1, batch, ZERO, index_of(n).shifted(column))
                prefetcher.prefetch_row(at, shape.depth, shape.op)
            _columns(e, shape, batch, index_of(n), calibration.ACCUMULATORS, out, adds)

    even = shape.columns // calibration.ACCUMULATORS * calibration.ACCUMULATORS
    e.code.loop(0, even, calibration.ACCUMULATORS, several)
    for n in range(even, shape.columns):
        with e.scope():
            _columns(e, shape, batch, Index(const=n), 1, out, adds)


def _columns(e: Elements, shape: DotShape, batch: Coords, first: Index, count: int, out: Reg, adds: bool) -> None:
    """Multiply all rows by `count` columns."""
    code, lanes = e.code, e.code.module.machine.lanes
    dtype, vector = shape.sum_dtype, _at_once(e, shape)
    sums = [(r, n) for r in range(shape.rows) for n in range(count)]

    def products(k: Index, width: int, totals: list[Reg]) -> list[Reg]:
        left = [_element(e, shape, 0, batch, k, Index(const=r), width) for r in range(shape.rows)]
        right = [_element(e, shape, 1, batch, k, first.shifted(n), width) for n in range(count)]
        if shape.per_word > 1 and width and width % (lanes * shape.per_word) == 0:
            return [_add_words(code, shape, t, left[r], right[n]) for t, (r, n) in zip(totals, sums, strict=True)]
        left, right = ([_wide(code, shape, x) for x in side] for side in (left, right))
        return [accumulate(code, dtype, t, left[r], right[n]) for t, (r, n) in zip(totals, sums, strict=True)]

    def body(k: Reg, *totals: Reg) -> list[Reg]:
        with e.scope():
            return products(index_of(k, 1), vector, list(totals))

    whole, zero = shape.depth // vector * vector, element_constant(0, dtype, lanes)
    results = _rows_of_sums(code, dtype, code.loop(0, whole, vector, body, *[zero] * len(sums)), count)
    for at, width in tail_pieces(shape.depth, vector):
        with e.scope():
            zero = element_constant(0, dtype, min(width, lanes))
            tail = products(Index((), at, 1 if width else 0), width, [zero] * len(sums))
            tail = _rows_of_sums(code, dtype, tail, count)
            results = [_add(code, dtype, x, y) for x, y in zip(results, tail, strict=True)]
    for r, x in enumerate(results):
        _store_sum(e, shape, x, r, Index(first.terms, first.const, 1 if x.type.lanes else 0), out, adds)


def _at_once(e: Elements, shape: DotShape) -> int:
    """Elements along k that are loaded at once: a vector of words, or as many bytes as are looked up."""
    lanes = e.code.module.machine.lanes * shape.per_word
    return BYTE_LANES if shape.per_word > 1 and _is_looked_up(e, shape.op.operands[1]) else lanes


def _is_looked_up(e: Elements, value: Value) -> bool:
    """True if elements of a value are looked up by bytes, and at most moved after it."""
    coords = tuple(ZERO for _ in value.tile.shape)
    return _lookup_of_bytes(e, value, coords) is not None


def _lookup_of_bytes(e: Elements, value: Value, coords: Coords) -> tuple[PairsOfBytes, Coords] | None:
    """The lookup by bytes of elements that are at most moved after it, and their coordinates in the tile of bytes."""
    while not e.expressions.is_available(value):
        if (lookup := e.lookups.of_bytes(value)) is not None:
            return lookup, coords
        op = e.expressions.definition[value]
        if not isinstance(op, (Transpose, Reshape, Slice)):
            return None
        ((value, coords),) = operand_coords(op, coords, e.clamped_index)
    return None


def _add_words(code: Code, shape: DotShape, total: Reg, x: Reg, y: Reg) -> Reg:
    """Register like `total`: total plus the products of one or more vectors of words."""
    size = total.type.lanes * shape.per_word
    for first in range(0, x.type.lanes, size):
        parts = (v if v.type.lanes == size else code.shuffle(v, v, range(first, first + size)) for v in (x, y))
        total = accumulate(code, shape.dtype, total, *parts)
    return total


def _rows_of_sums(code: Code, dtype: DType, vectors: list[Reg], count: int) -> list[Reg]:
    """The totals of each `count` vectors, in one vector: a few shuffles add up the lanes of many vectors at once."""
    if count == 1:
        return [reduce_lanes(code, "sum", dtype, x) for x in vectors]
    vectors = [_with_lanes(code, dtype, x, count) for x in vectors]
    rows, lanes = len(vectors) // count, vectors[0].type.lanes
    at_once = next(n for n in (4, 2, 1) if rows % n == 0 and n * count <= lanes)
    totals: list[Reg] = []
    for first in range(0, rows, at_once):
        x = reduce_vectors(code, "sum", dtype, vectors[first * count : (first + at_once) * count])
        totals += [code.shuffle(x, x, range(n * count, (n + 1) * count)) for n in range(at_once)]
    return totals


def _with_lanes(code: Code, dtype: DType, x: Reg, least: int) -> Reg:
    """A vector with zeros in further lanes, if it has less than `least`."""
    if not x.type.lanes:
        return code.insert(element_constant(0, dtype, least), x, 0)
    if x.type.lanes >= least:
        return x
    zero = element_constant(0, dtype, x.type.lanes)
    return code.shuffle(x, zero, [min(n, x.type.lanes) for n in range(least)])


# --- an operand whose columns are contiguous -------------------------------------------------------------------------


def _by_depth(e: Elements, shape: DotShape, batch: Coords, out: Reg, adds: bool) -> None:
    """Multiply by an operand whose columns are contiguous: several vectors of columns at once, in a loop over k."""
    lanes = e.code.module.machine.lanes
    vectors_at_once = max(1, _sums(e.code.module.machine) // shape.rows)
    step = vectors_at_once * lanes

    def several(n: Reg) -> None:
        with e.scope():
            widths = [(v * lanes, lanes) for v in range(vectors_at_once)]
            _vectors(e, shape, batch, index_of(n), widths, out, adds)

    even = shape.columns // step * step
    e.code.loop(0, even, step, several)
    vectors = [(at, lanes) for at in range(even, shape.columns - lanes + 1, lanes)]
    with e.scope():
        widths = [*vectors, *tail_pieces(shape.columns, lanes)]
        if widths:
            _vectors(e, shape, batch, Index(), widths, out, adds)


def _vectors(e: Elements, shape: DotShape, batch: Coords, first: Index, widths: _Widths, out: Reg, adds: bool) -> None:
    """Multiply all rows by some vectors of columns."""
    sums = [(r, at, width) for r in range(shape.rows) for at, width in widths]
    zeros = [element_constant(0, shape.sum_dtype, width) for _, _, width in sums]
    totals = _over_depth(e, shape, batch, first, widths, zeros)
    if columns := _columns_of_fours(e, shape, widths):
        totals = _in_order(e.code, totals, len(widths), len(columns))
    for x, (r, at, width) in zip(totals, sums, strict=True):
        _store_sum(e, shape, x, r, _lanes(first, at, width), out, adds)


def _over_depth(
    e: Elements, shape: DotShape, batch: Coords, first: Index, widths: _Widths, totals: list[Reg]
) -> list[Reg]:
    """The sums of all rows, and of some vectors of columns, plus the products of all elements along k."""
    prefetcher = Prefetcher(e, shape.op.operands[1], ZERO, 1)
    products = _products if shape.per_word == 1 else _products_of_words
    begin, count = first.shifted(widths[0][0]), sum(width or 1 for _, width in widths)

    def body(k: Reg, *totals: Reg) -> list[Reg]:
        with e.scope():
            index = index_of(k).times(shape.per_word)
            for n in range(shape.per_word):
                prefetcher.prefetch_row(shape.coords(1, batch, index.shifted(n), begin), count, shape.op)
            return products(e, shape, batch, index, first, widths, list(totals))

    totals = e.code.loop(0, shape.whole_words, 1, body, *totals)
    if shape.words == shape.whole_words:
        return totals
    with e.scope():
        return _products(e, shape, batch, Index(const=shape.depth - 1), first, widths, totals)


def _products(
    e: Elements, shape: DotShape, batch: Coords, k: Index, first: Index, widths: _Widths, totals: list[Reg]
) -> list[Reg]:
    """The sums of all rows, and of some vectors of columns, plus the products of element k."""
    code = e.code
    left = [_wide(code, shape, _element(e, shape, 0, batch, k, Index(const=r), 0)) for r in range(shape.rows)]
    columns = _columns_of_fours(e, shape, widths) if shape.per_word == 1 else []
    right = _fours(e, shape, batch, k, first, columns)
    for at, width in widths:
        if at not in right:
            right[at] = _wide(code, shape, _element(e, shape, 1, batch, k, _lanes(first, at, width), width))
    sums = [(x, at, width) for x in left for at, width in widths]
    return [
        accumulate(code, shape.sum_dtype, t, code.splat(x, width), right[at])
        for t, (x, at, width) in zip(totals, sums, strict=True)
    ]


def _columns_of_fours(e: Elements, shape: DotShape, widths: _Widths) -> list[int]:
    """The first columns of vectors that are looked up by fours, a multiple of four vectors; their lanes lie apart.

    Vector n of four has columns n, n + 4, n + 8, ... of 64 columns. Elements of an odd depth are not all in pairs.
    """
    if shape.depth % shape.per_word or e.lookups.of_half(shape.op.operands[1]) is None:
        return []
    whole = [at for at, width in widths if width == e.code.module.machine.lanes]
    return whole[: len(whole) // 4 * 4]


def _fours(e: Elements, shape: DotShape, batch: Coords, k: Index, first: Index, columns: list[int]) -> dict[int, Reg]:
    """The vectors of element k, or of words from it on, that are looked up by fours, by their first column."""
    vectors, lookup = dict[int, Reg](), e.lookups.of_half(shape.op.operands[1])
    for n in range(0, len(columns), 4):
        assert lookup is not None
        free = _lanes(first, columns[n], BYTE_LANES)
        rows = [
            e.element(lookup.leaf, shape.coords(1, batch, k.shifted(row), free), BYTE_LANES)
            for row in range(shape.per_word)
        ]
        vectors |= dict(zip(columns[n : n + 4], lookup.of_fours(e.code, *rows), strict=True))
    return vectors


def _in_order(code: Code, totals: list[Reg], vectors: int, fours: int) -> list[Reg]:
    """The totals with columns in their order. A row is `vectors` vectors; lanes of the first `fours` lie apart."""
    ordered: list[Reg] = []
    for row in range(0, len(totals), vectors):
        for at in range(row, row + fours, 4):
            lanes = totals[at].type.lanes
            pairs = [
                [
                    code.shuffle(a, b, [n + side * lanes for n in range(low, low + lanes // 2) for side in (0, 1)])
                    for low in (0, lanes // 2)
                ]
                for a, b in (totals[at : at + 2], totals[at + 2 : at + 4])
            ]
            for n in range(4):
                low, high = (pair[n // 2] for pair in pairs)
                begin = n % 2 * lanes // 2
                order = [
                    m + side * lanes + i for m in range(begin, begin + lanes // 2, 2) for side in (0, 1) for i in (0, 1)
                ]
                ordered.append(code.shuffle(low, high, order))
        ordered += totals[row + fours : row + vectors]
    return ordered


def _products_of_words(
    e: Elements, shape: DotShape, batch: Coords, k: Index, first: Index, widths: _Widths, totals: list[Reg]
) -> list[Reg]:
    """`totals` plus the products of elements k and k + 1; whole vectors of columns are multiplied by words."""
    code, lanes = e.code, e.code.module.machine.lanes
    words = _fours(e, shape, batch, k, first, _columns_of_fours(e, shape, widths))
    whole = [at for at, width in widths if width == lanes and at not in words]
    words |= _right_words(e, shape, batch, k, first, whole)
    left = [_left_word(e, shape, batch, k, r) for r in range(shape.rows)] if words else []
    sums = [(r, at) for r in range(shape.rows) for at, _ in widths]
    results = [
        accumulate(code, shape.dtype, t, code.splat(left[r], lanes), words[at]) if at in words else t
        for t, (r, at) in zip(totals, sums, strict=True)
    ]
    narrow = [(at, width) for at, width in widths if at not in words]
    places = [n for n, (_, at) in enumerate(sums) if at not in words]
    for n in (0, 1) if narrow else ():
        tails = _products(e, shape, batch, k.shifted(n), first, narrow, [results[p] for p in places])
        results = [tails[places.index(p)] if p in places else x for p, x in enumerate(results)]
    return results


def _right_words(
    e: Elements, shape: DotShape, batch: Coords, k: Index, first: Index, columns: list[int]
) -> dict[int, Reg]:
    """Words of elements k and k + 1 of vectors of columns, by their first column; several are loaded at once."""
    lanes, words = e.code.module.machine.lanes, dict[int, Reg]()
    for at in columns:
        if at not in words:
            counts = (_at_once(e, shape) // lanes, 2, 1)
            count = next(n for n in counts if at + (n - 1) * lanes in columns)
            pairs = _pairs(e, shape, batch, k, _lanes(first, at, lanes), count * lanes)
            words |= {at + n * lanes: x for n, x in enumerate(pairs)}
    return words


def _pairs(e: Elements, shape: DotShape, batch: Coords, k: Index, free: Index, width: int) -> list[Reg]:
    """Vectors of words of elements k and k + 1 of `width` columns."""
    places = [shape.coords(1, batch, k.shifted(n), free) for n in (0, 1)]
    lookups = [_lookup_of_bytes(e, shape.op.operands[1], at) for at in places] if width == BYTE_LANES else [None]
    if all(x is not None and x[1][-1].step == 1 for x in lookups):
        (lookup, even), (_, odd) = (x for x in lookups if x is not None)
        return lookup.of_rows(e.code, *(e.element(lookup.leaf, at, width) for at in (even, odd)))
    return interleave(e.code, *(_element(e, shape, 1, batch, k.shifted(n), free, width) for n in (0, 1)))


def _left_word(e: Elements, shape: DotShape, batch: Coords, k: Index, row: int) -> Reg:
    """Elements k and k + 1 of a row, as an i32."""
    code, pair = e.code, Index(k.terms, k.const, 1)
    return code.emit(Type("i32"), f"bitcast {_element(e, shape, 0, batch, pair, Index(const=row), 2)} to i32")


def _sums(machine: Machine) -> int:
    """Registers of sums. Many columns side by side are long pieces of each row, which the CPU prefetches."""
    return machine.registers // 2


def _lanes(first: Index, at: int, width: int) -> Index:
    """The index of a vector of neighbouring columns."""
    return Index(first.terms, first.const + at, 1 if width else 0)
