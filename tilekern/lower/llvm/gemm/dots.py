"""Dots: products of register blocks of the left operand by packed panels of the right one.

    for each panel of columns:          as wide as `Kernel.vectors` registers
        for each block of rows:         `ROWS` of them; all their sums are in registers
            for each k:                 sums += left[rows, k] * panel[k, columns]

The right operand is packed: panel after panel, the rows of a panel one behind the other, so that each k takes the next
few vectors. What is packed is computed on the way, so that a cast, say, needs no pass of its own. The left one is read
element by element, wherever it lies.

Elements of 16 bits are multiplied in pairs, two neighbours along k at once: a *word* is such a pair, or one element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilekern.ir.compute import Dot
from tilekern.ir.core import Value, cdiv
from tilekern.ir.memory import Load
from tilekern.ir.shape import Reshape
from tilekern.ir.types import strides_of
from tilekern.lower.llvm.element_index import ZERO, Index, Place
from tilekern.lower.llvm.emit.elements import Elements, index_of
from tilekern.lower.llvm.emit.loop_nests import over
from tilekern.lower.llvm.gemm import gemv
from tilekern.lower.llvm.gemm.microkernel import Kernel, rows_of, vectors_of
from tilekern.lower.llvm.gemm.packing import pack, pack_row, words_over
from tilekern.lower.llvm.gemm.prefetch import Ahead
from tilekern.lower.llvm.gemm.shapes import Shape, shape_of
from tilekern.lower.llvm.ir_builder import I64, VOID, Reg, constant
from tilekern.lower.llvm.plan.steps import Closures, Step, addressable
from tilekern.lower.llvm.runtime.machine import Machine

# The bytes of a panel that stay in the first-level cache while all rows pass by.
_PANEL = 32 << 10
_ALIGNMENT = 64


@dataclass(frozen=True)
class Form:
    """Which operands are copied before they are multiplied."""

    packs_left: bool
    packs_right: bool


def needs(op: Dot, closures: Closures, machine: Machine) -> tuple[int, Form | None]:
    """The bytes of the packed operands, and which they are; None if there are too few rows for that."""
    shape = shape_of(op)
    if shape.rows <= gemv.ROWS:
        return 0, None
    form = Form(_packs_left(shape, closures), not _is_direct(shape, closures, machine))
    total = shape.words * shape.padded_columns(machine) * shape.word if form.packs_right else 0
    if form.packs_left:
        total = cdiv(total, _ALIGNMENT) * _ALIGNMENT + shape.words * shape.rows * shape.word
    return total, form


def _packs_left(shape: Shape, closures: Closures) -> bool:
    """Whether the left operand has to be copied: its pairs must be neighbours, and the last one whole."""
    if not addressable(shape.op.operands[0], closures):
        return True
    neighbours = _distances(shape.op.operands[0], closures)[shape.contract[0]] == 1
    return shape.pairs and not (neighbours and shape.depth % 2 == 0)


def _is_direct(shape: Shape, closures: Closures, machine: Machine) -> bool:
    """Whether the right operand is read where it lies: it is used for few rows only, or lies as if it were packed."""
    right = shape.op.operands[1]
    if shape.pairs or not addressable(right, closures) or shape.contract[1] == len(right.tile.shape) - 1:
        return False
    distances = _distances(right, closures)
    width = vectors_of(machine) * shape.lanes(machine)
    fits = distances[shape.contract[1]] == shape.columns <= width and shape.columns % shape.lanes(machine) == 0
    return distances[len(right.tile.shape) - 1] == 1 and (shape.rows <= 16 or fits)


def _distances(value: Value, closures: Closures) -> list[int]:
    """How many elements apart neighbours along each dim of an addressable tile lie."""
    if closures.kept(value):
        return list(strides_of(value.tile.shape))
    op = closures.definition[value]
    if isinstance(op, Reshape):
        inner = iter(
            d for d, n in zip(_distances(op.operands[0], closures), op.operands[0].tile.shape, strict=True) if n != 1
        )
        return [0 if n == 1 else next(inner) for n in op.shape]
    assert isinstance(op, Load)
    strides = strides_of(op.extents)
    return [strides[n] for n in op.access.kept]


def _base(e: Elements, value: Value) -> Reg:
    """The address of the first element of an addressable tile."""
    if value in e.closures.slots:
        return e.slot(e.closures.slots[value])
    op = e.closures.definition[value]
    if isinstance(op, Reshape):
        return _base(e, op.operands[0])
    assert isinstance(op, Load)
    return e.origin(op)


# --- the whole dot ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    """Words in memory: the address, and the bytes from one row, and from one k, to the next."""

    base: Reg
    row: int
    k: int


def emit(e: Elements, step: Step) -> None:
    """Emit a dot; its result is added to what its slot holds if the step has an `init`."""
    assert isinstance(step.op, Dot)
    shape = shape_of(step.op)
    target = e.slot(e.targets[step.op.result])
    bytes_of_product = shape.rows * shape.columns * shape.word

    def product(b: Reg) -> None:
        with e.scope():
            index = index_of(b)
            place = (index,) if shape.stacked else ()
            out = e.code.at(target, e.number(index.times(bytes_of_product)))
            if step.form is None:
                gemv.emit(e, shape, place, out, step.init)
                return
            spare = e.slot(step.temporary) if step.temporary is not None else e.scratch
            right, spare = _right(e, shape, step.form, place, spare)
            left = _left(e, shape, step.form, place, spare)
            _multiply(e, shape, left, right, out, step.init)

    e.code.loop(0, shape.batch, 1, product)


def _left(e: Elements, shape: Shape, form: Form, batch: Place, spare: Reg) -> _Matrix:
    value, code = shape.op.operands[0], e.code
    word = shape.word
    if form.packs_left:
        # Word k of all rows, then the next one.
        for_k = words_over(e, shape, 0, batch)
        over(e, (shape.whole_words,), lambda k: pack_row(e, for_k, k[0], shape.rows, spare, shape.rows, Index()))
        if shape.words > shape.whole_words:
            pack_row(e, for_k, Index(const=shape.whole_words), shape.rows, spare, shape.rows, Index())
        return _Matrix(spare, word, shape.rows * word)
    distances, item = _distances(value, e.closures), shape.dtype.itemsize
    contracted = shape.contract[0]
    free = next(d for d in range(len(batch), len(distances)) if d != contracted)
    base = _base(e, value)
    if batch:
        base = code.at(base, e.number(batch[0].times(distances[0] * item)))
    return _Matrix(base, distances[free] * item, distances[contracted] * item * (1 + shape.pairs))


@dataclass(frozen=True)
class _Panels:
    """The right operand: the address, and the bytes from one panel, and from one k, to the next.

    The last panel may be narrower: then its k lie `last` bytes apart. If it was packed, `ahead` is what the next
    iteration will pack.
    """

    base: Reg
    panel: int
    k: int
    last: int
    ahead: Ahead | None = None


def _right(e: Elements, shape: Shape, form: Form, batch: Place, spare: Reg) -> tuple[_Panels, Reg]:
    """The right operand in panels, packed if need be; and the memory behind."""
    machine, word = e.code.module.machine, shape.word
    lanes = shape.lanes(machine)
    width = vectors_of(machine) * lanes
    if not form.packs_right:
        value = shape.op.operands[1]
        distances = _distances(value, e.closures)
        base = _base(e, value)
        if batch:
            base = e.code.at(base, e.number(batch[0].times(distances[0] * word)))
        row = distances[shape.contract[1]] * word
        return _Panels(base, width * word, row, row), spare
    pack(e, shape, batch, spare, lanes, width)
    last = (shape.padded_columns(machine) % width or width) * word
    used = shape.words * shape.padded_columns(machine) * word
    ahead = Ahead(e, shape.op.operands[1], batch[0] if batch else ZERO, shape.batch)
    panels = _Panels(spare, shape.words * width * word, width * word, last, ahead)
    return panels, e.code.at(spare, cdiv(used, _ALIGNMENT) * _ALIGNMENT)


def _multiply(e: Elements, shape: Shape, left: _Matrix, right: _Panels, out: Reg, adds: bool) -> None:
    """All panels by all rows, in portions of the depth whose panels stay in the cache."""
    machine, word = e.code.module.machine, shape.word
    lanes = shape.lanes(machine)
    width = vectors_of(machine) * lanes
    portion = max(8, _PANEL // (width * word))
    portions = [(at, min(portion, shape.words - at)) for at in range(0, shape.words, portion)] or [(0, 0)]
    for at, depth in portions:
        _portion(e, shape, left, right, out, at, depth, adds or at > 0)


def _portion(
    e: Elements, shape: Shape, left: _Matrix, right: _Panels, out: Reg, at: int, depth: int, adds: bool
) -> None:
    """All panels by all rows, from word number `at` on; the first portion fetches what is packed next."""
    code, width = e.code, vectors_of(e.code.module.machine) * shape.lanes(e.code.module.machine)
    whole, rest = divmod(shape.columns, width)
    a = _Matrix(code.at(left.base, at * left.k), left.row, left.k)

    def panel(j: Index, columns: int, k_bytes: int) -> None:
        b = code.at(right.base, e.number(j.times(right.panel).shifted(at * k_bytes)))
        c = code.at(out, e.number(j.times(width * shape.word)))

        def fetch(block: Index, blocks: int) -> None:
            if right.ahead is not None and at == 0:
                right.ahead.fetch(j.times(blocks).plus(block), cdiv(shape.columns, width) * blocks)

        _rows(e, shape, a, b, k_bytes, c, columns, depth, adds, fetch)

    over(e, (whole,), lambda j: panel(j[0], width, right.k))
    if rest:
        panel(Index(const=whole), rest, right.last)


def _rows(
    e: Elements,
    shape: Shape,
    a: _Matrix,
    b: Reg,
    k_bytes: int,
    c: Reg,
    columns: int,
    depth: int,
    adds: bool,
    fetch: Callable[[Index, int], None],
) -> None:
    """All rows by one panel; `fetch(n, of so many)` comes before each whole block of rows."""
    code = e.code
    block = rows_of(code.module.machine, shape.rows, columns, shape.lanes(code.module.machine))
    row_bytes = shape.columns * shape.word
    blocks, rest = divmod(shape.rows, block)

    def call(i: Index, rows: int) -> None:
        unroll = next(n for n in (4, 2, 1) if depth % n == 0)
        kernel = Kernel(shape.dtype, rows, columns, a.k, k_bytes, row_bytes, adds, unroll)
        name = kernel.define(code.module)
        first = code.at(a.base, e.number(i.times(a.row)))
        target = code.at(c, e.number(i.times(row_bytes)))
        stride = constant(a.row, I64)
        code.call(name, VOID, first, stride, b, target, constant(depth, I64))

    def whole_block(n: Index) -> None:
        fetch(n, blocks)
        call(n.times(block), block)

    over(e, (blocks,), lambda n: whole_block(n[0]))
    if rest:
        call(Index(const=blocks * block), rest)
