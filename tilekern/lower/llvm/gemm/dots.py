"""Dots: products of blocks of rows of the left operand by packed panels of columns of the right operand.

    for each panel of columns:          `panel_vectors` registers wide
        for each block of rows:         `register_rows` rows; all their sums are in registers
            for each k:                 sums += left[rows, k] * panel[k, columns]

The right operand is packed: panel after panel, and within a panel row after row, so that each k reads the next few
vectors. Packing computes the elements, so that a cast, for example, needs no pass over memory. The left operand is
read in place, element by element.

16-bit elements are multiplied in pairs of neighbours along k, and 8-bit elements in fours.
A *word* is such a pair or four, or one wider element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value, cdiv, round_up
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.ir.shape import Reshape
from tilekern.ir.types import strides_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import ZERO, Coords, Index
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import loop_over
from tilekern.lower.llvm.gemm import gemv, tiles
from tilekern.lower.llvm.gemm.microkernel import Microkernel
from tilekern.lower.llvm.gemm.packing import pack, pack_row, pack_tiles, word_loader
from tilekern.lower.llvm.gemm.prefetch import Prefetcher
from tilekern.lower.llvm.gemm.shapes import DotShape, dot_shape
from tilekern.lower.llvm.gemm.tiles import TileKernel
from tilekern.lower.llvm.ir_values import I64, VOID, Reg, constant
from tilekern.lower.llvm.plan.steps import Expressions, Step, is_addressable
from tilekern.lower.llvm.runtime.machine import Machine

_ALIGNMENT = 64


@record
class Packing:
    """The operands that are packed before they are multiplied."""

    packs_left: bool
    packs_right: bool


def scratch_and_packing(op: Dot, expressions: Expressions, machine: Machine) -> tuple[int, Packing | None]:
    """The bytes of the packed operands, and which operands they are; None for a dot of few rows, which packs none."""
    shape = dot_shape(op)
    if shape.rows <= calibration.MAX_GEMV_ROWS:
        return 0, None
    packing = Packing(_packs_left(shape, expressions, machine), not _is_unpacked(shape, expressions, machine))
    total = shape.words * shape.padded_columns(machine) * shape.word_bytes if packing.packs_right else 0
    if shape.has_offsets(machine):
        total = round_up(total, _ALIGNMENT) + shape.padded_columns(machine) * shape.word_bytes
    if packing.packs_left:
        total = round_up(total, _ALIGNMENT) + shape.packed_left_words(machine) * shape.word_bytes
    return total, packing


def _packs_left(shape: DotShape, expressions: Expressions, machine: Machine) -> bool:
    """True if the left operand is packed.

    It is packed if it has no address, or if the elements of a word are no neighbours, or missing in the last word. It
    is packed, too, if several panels read it, and its words along k are in pages of their own, or the rows of a tile
    drive each other out of the first-level cache.
    """
    if not is_addressable(shape.op.operands[0], expressions):
        return True
    distances, contracted = _element_strides(shape.op.operands[0], expressions), shape.contract[0]
    several = shape.columns >= calibration.MIN_PACKED_PANELS * shape.panel_columns(machine)
    if shape.per_word == 1:
        return several and distances[contracted] * shape.dtype.itemsize >= calibration.FAR_WORD_BYTES
    if distances[contracted] != 1 or shape.depth % shape.per_word:
        return True
    row = distances[_free(shape, 0)] * shape.dtype.itemsize
    return several and shape.uses_tiles(machine) and row % calibration.CONFLICTING_ROW_BYTES == 0


def _free(shape: DotShape, side: int) -> int:
    """The dim of an operand that is neither a batch nor contracted."""
    return next(d for d in (shape.has_batch, shape.has_batch + 1) if d != shape.contract[side])


def _is_unpacked(shape: DotShape, expressions: Expressions, machine: Machine) -> bool:
    """True if the right operand is read in place: few rows use it, or it lies in memory like one panel."""
    right = shape.op.operands[1]
    if shape.per_word > 1 or not is_addressable(right, expressions) or shape.contract[1] == len(right.tile.shape) - 1:
        return False
    distances = _element_strides(right, expressions)
    width = shape.panel_columns(machine)
    fits = distances[shape.contract[1]] == shape.columns <= width and shape.columns % shape.lanes(machine) == 0
    return distances[len(right.tile.shape) - 1] == 1 and (shape.rows <= calibration.MAX_UNPACKED_ROWS or fits)


def _element_strides(value: Value, expressions: Expressions) -> list[int]:
    """The strides of an addressable tile, in elements."""
    if expressions.is_available(value):
        return list(strides_of(value.tile.shape))
    op = expressions.definition[value]
    if isinstance(op, Reshape):
        inner = iter(
            d
            for d, n in zip(_element_strides(op.operands[0], expressions), op.operands[0].tile.shape, strict=True)
            if n != 1
        )
        return [0 if n == 1 else next(inner) for n in op.shape]
    assert isinstance(op, Load)
    strides = strides_of(op.extents)
    return [strides[n] for n in op.access.kept]


def _first_element(e: Elements, value: Value) -> Reg:
    """The address of the first element of an addressable tile."""
    if value in e.expressions.buffers:
        return e.buffer_address(e.expressions.buffers[value])
    op = e.expressions.definition[value]
    if isinstance(op, Reshape):
        return _first_element(e, op.operands[0])
    assert isinstance(op, Load)
    return e.first_address(op)


# --- the whole dot ---------------------------------------------------------------------------------------------------


@record
class _Matrix:
    """A matrix of words: its address, and the strides along rows and along k, in bytes.

    A matrix of packed tiles has the strides from tile to tile, divided by the rows or words of a tile, and `tile_row`
    is the stride of rows inside of a tile.
    """

    base: Reg
    row: int
    k: int
    tile_row: int = 0


def emit(e: Elements, step: Step) -> None:
    """Emit a dot. If the step accumulates, its products are added to the values in its buffer."""
    assert isinstance(step.op, Dot)
    shape = dot_shape(step.op)
    target = e.buffer_address(e.targets[step.op.result])
    bytes_of_product = shape.rows * shape.columns * shape.word_bytes

    def product(b: Reg) -> None:
        with e.scope():
            index = index_of(b)
            coords = (index,) if shape.has_batch else ()
            out = e.code.gep(target, e.index_value(index.times(bytes_of_product)))
            if step.packing is None:
                gemv.emit(e, shape, coords, out, step.accumulates)
                return
            spare = e.buffer_address(step.temporary) if step.temporary is not None else e.scratch
            right, spare = _right(e, shape, step.packing, coords, spare)
            if shape.has_offsets(e.code.module.machine):
                right, spare = _with_offsets(e, shape, right, spare)
            left = _left(e, shape, step.packing, coords, spare)
            if step.packing.packs_left and shape.uses_tiles(e.code.module.machine):
                right = replace(right, prefetchers=(*right.prefetchers, _prefetcher(e, shape, 0, coords)))
            _multiply(e, shape, left, right, out, step.accumulates)

    e.code.loop(0, shape.batch, 1, product)
    if step.packing is not None and shape.uses_tiles(e.code.module.machine):
        tiles.release(e.code)


def _left(e: Elements, shape: DotShape, packing: Packing, batch: Coords, spare: Reg) -> _Matrix:
    value, code = shape.op.operands[0], e.code
    word = shape.word_bytes
    if packing.packs_left and shape.uses_tiles(code.module.machine):
        pack_tiles(e, shape, batch, spare)
        return _Matrix(spare, round_up(shape.words, tiles.TILE) * word, tiles.TILE * word, tiles.TILE * word)
    if packing.packs_left:
        # The layout is [words, rows].
        for_k = word_loader(e, shape, 0, batch)
        loop_over(e, (shape.whole_words,), lambda k: pack_row(e, for_k, k[0], shape.rows, spare, shape.rows, Index()))
        if shape.words > shape.whole_words:
            pack_row(e, for_k, Index(const=shape.whole_words), shape.rows, spare, shape.rows, Index())
        return _Matrix(spare, word, shape.rows * word)
    distances, item = _element_strides(value, e.expressions), shape.dtype.itemsize
    contracted, free = shape.contract[0], _free(shape, 0)
    base = _first_element(e, value)
    if batch:
        base = code.gep(base, e.index_value(batch[0].times(distances[0] * item)))
    return _Matrix(base, distances[free] * item, distances[contracted] * item * shape.per_word)


@record
class _Panels:
    """The right operand: its address, and the strides from panel to panel and along k, in bytes.

    The last panel may be narrower; its stride along k is `last`. `prefetchers` prefetch the data that the next
    iteration packs. `offsets` is the address of the offset of each column, if sums have offsets.
    """

    base: Reg
    panel: int
    k: int
    last: int
    prefetchers: tuple[Prefetcher, ...] = ()
    offsets: Reg | None = None


def _right(e: Elements, shape: DotShape, packing: Packing, batch: Coords, spare: Reg) -> tuple[_Panels, Reg]:
    """The right operand as panels, and the scratch memory that is left after packing."""
    machine, word = e.code.module.machine, shape.word_bytes
    lanes = shape.lanes(machine)
    width = shape.panel_columns(machine)
    if not packing.packs_right:
        value = shape.op.operands[1]
        distances = _element_strides(value, e.expressions)
        base = _first_element(e, value)
        if batch:
            base = e.code.gep(base, e.index_value(batch[0].times(distances[0] * word)))
        row = distances[shape.contract[1]] * word
        return _Panels(base, width * word, row, row), spare
    pack(e, shape, batch, spare, lanes, width)
    last = (shape.padded_columns(machine) % width or width) * word
    used = shape.words * shape.padded_columns(machine) * word
    panels = _Panels(spare, shape.words * width * word, width * word, last, (_prefetcher(e, shape, 1, batch),))
    return panels, e.code.gep(spare, round_up(used, _ALIGNMENT))


def _with_offsets(e: Elements, shape: DotShape, right: _Panels, spare: Reg) -> tuple[_Panels, Reg]:
    """The panels with the offsets of their columns, the sums for a row of zeros; and the memory behind them."""
    code, word = e.code, shape.word_bytes
    width = shape.panel_columns(code.module.machine)
    whole, last_columns = divmod(shape.columns, width)
    zeros, depth = code.module.data("zeros", np.zeros(word, np.uint8)), constant(shape.words, I64)

    def panel(j: Index, columns: int, k_bytes: int) -> None:
        kernel = Microkernel(shape.dtype, 1, columns, 0, k_bytes, 0, adds=False, corrects=False, unroll=1)
        first = code.gep(right.base, e.index_value(j.times(right.panel)))
        place = code.gep(spare, e.index_value(j.times(width * word)))
        code.call(kernel.define(code.module), VOID, zeros, constant(0, I64), first, place, depth)

    loop_over(e, (whole,), lambda j: panel(j[0], width, right.k))
    if last_columns:
        panel(Index(const=whole), last_columns, right.last)
    used = shape.padded_columns(code.module.machine) * word
    return replace(right, offsets=spare), code.gep(spare, round_up(used, _ALIGNMENT))


def _prefetcher(e: Elements, shape: DotShape, side: int, batch: Coords) -> Prefetcher:
    return Prefetcher(e, shape.op.operands[side], batch[0] if batch else ZERO, shape.batch)


def _multiply(e: Elements, shape: DotShape, left: _Matrix, right: _Panels, out: Reg, adds: bool) -> None:
    """Multiply all panels by all rows, in portions of the depth whose panels stay in the first-level cache."""
    for at, depth in shape.portions(e.code.module.machine):
        _portion(e, shape, left, right, out, at, depth, adds or at > 0)


def _portion(
    e: Elements, shape: DotShape, left: _Matrix, right: _Panels, out: Reg, at: int, depth: int, adds: bool
) -> None:
    """Multiply all panels by all rows for one portion. The first portion prefetches the data that is packed next."""
    code, width = e.code, shape.panel_columns(e.code.module.machine)
    whole, last_columns = divmod(shape.columns, width)
    a = replace(left, base=code.gep(left.base, at * left.k))

    def panel(j: Index, columns: int, k_bytes: int) -> None:
        b = code.gep(right.base, e.index_value(j.times(right.panel).shifted(at * k_bytes)))
        c = code.gep(out, e.index_value(j.times(width * shape.word_bytes)))

        def prefetch(block: Index, blocks: int) -> None:
            for prefetcher in right.prefetchers if at == 0 else ():
                prefetcher.prefetch(j.times(blocks).plus(block), cdiv(shape.columns, width) * blocks)

        offsets = right.offsets if at == 0 else None
        if offsets is not None:
            offsets = code.gep(offsets, e.index_value(j.times(width * shape.word_bytes)))
        _rows(e, shape, a, b, k_bytes, c, columns, depth, adds, offsets, prefetch)

    loop_over(e, (whole,), lambda j: panel(j[0], width, right.k))
    if last_columns:
        panel(Index(const=whole), last_columns, right.last)


def _rows(
    e: Elements,
    shape: DotShape,
    a: _Matrix,
    b: Reg,
    k_bytes: int,
    c: Reg,
    columns: int,
    depth: int,
    adds: bool,
    offsets: Reg | None,
    prefetch: Callable[[Index, int], None],
) -> None:
    """Multiply all rows by one panel, and subtract the offsets, if there are any.

    `prefetch(n, count)` is emitted before each whole block of rows.
    """
    code, machine = e.code, e.code.module.machine
    block = shape.block_rows(machine, columns)
    row_bytes = shape.columns * shape.word_bytes
    blocks, last_rows = divmod(shape.rows, block)

    def kernel(rows: int) -> Microkernel | TileKernel:
        if shape.uses_tiles(machine):
            strides = tiles.Strides(a.row * tiles.TILE, a.k, k_bytes, row_bytes)
            return TileKernel(shape.dtype, rows, columns, min(depth, tiles.TILE), strides, adds)
        unroll = next(n for n in (4, 2, 1) if depth % n == 0)
        return Microkernel(shape.dtype, rows, columns, a.k, k_bytes, row_bytes, adds, offsets is not None, unroll)

    def call(i: Index, rows: int) -> None:
        name = kernel(rows).define(code.module)
        first = code.gep(a.base, e.index_value(i.times(a.row)))
        target = code.gep(c, e.index_value(i.times(row_bytes)))
        extra = () if offsets is None else (offsets,)
        code.call(name, VOID, first, constant(a.tile_row or a.row, I64), b, target, constant(depth, I64), *extra)

    def whole_block(n: Index) -> None:
        prefetch(n, blocks)
        call(n.times(block), block)

    kernel(block).configure(code)
    loop_over(e, (blocks,), lambda n: whole_block(n[0]))
    if last_rows:
        kernel(last_rows).configure(code)
        call(Index(const=blocks * block), last_rows)
