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
from tilekern.ir.types import BF16, F32, F64, I32, DType, strides_of
from tilekern.lower.llvm.code import I64, PTR, Code, Module, Operand, Reg, Type, constant, lanes_of
from tilekern.lower.llvm.elements import Elements, index_of
from tilekern.lower.llvm.groups import over, pieces
from tilekern.lower.llvm.index import ZERO, Index, Place
from tilekern.lower.llvm.machine import Machine
from tilekern.lower.llvm.plan import Closures, Step, addressable

# The bytes of a panel that stay in the first-level cache while all rows pass by.
_PANEL = 32 << 10
_ALIGNMENT = 64


@dataclass(frozen=True)
class Shape:
    """A canonical dot: `batch` products of [rows, depth] by [depth, columns].

    Attributes:
      dtype: of the operands.
      contract: which dim of each operand is contracted.
    """

    op: Dot
    batch: int
    rows: int
    columns: int
    depth: int
    dtype: DType
    contract: tuple[int, int]

    @property
    def stacked(self) -> bool:
        """Whether there is a batch dim."""
        return bool(self.op.batch[0])

    @property
    def pairs(self) -> bool:
        """Whether a word is two elements."""
        return self.dtype.itemsize == 2

    @property
    def words(self) -> int:
        """The depth in words."""
        return cdiv(self.depth, 2) if self.pairs else self.depth

    @property
    def sums(self) -> DType:
        """The dtype of the result."""
        return self.op.result.tile.dtype

    def lanes(self, machine: Machine) -> int:
        """The columns in one register."""
        return machine.vector_bytes // self.sums.itemsize

    def padded_columns(self, machine: Machine) -> int:
        """The columns in whole registers."""
        return cdiv(self.columns, self.lanes(machine)) * self.lanes(machine)


def shape_of(op: Dot) -> Shape:
    """The sizes of a canonical dot."""
    left, right = (x.tile for x in op.operands)
    stacked = len(op.batch[0])
    (over_left,), (over_right,) = op.contract
    free = [next(d for d in (stacked, stacked + 1) if d != over) for over in (over_left, over_right)]
    batch = left.shape[0] if stacked else 1
    depth = left.shape[over_left]
    return Shape(op, batch, left.shape[free[0]], right.shape[free[1]], depth, left.dtype, (over_left, over_right))


@dataclass(frozen=True)
class Form:
    """Which operands are copied before they are multiplied."""

    packs_left: bool
    packs_right: bool


def needs(op: Dot, closures: Closures, machine: Machine) -> tuple[int, Form]:
    """The bytes of the packed operands, and which they are."""
    shape = shape_of(op)
    form = Form(_packs_left(shape, closures), not _is_direct(shape, closures, machine))
    total = shape.words * shape.padded_columns(machine) * _word(shape) if form.packs_right else 0
    if form.packs_left:
        total = cdiv(total, _ALIGNMENT) * _ALIGNMENT + shape.words * shape.rows * _word(shape)
    return total, form


def _word(shape: Shape) -> int:
    return shape.sums.itemsize


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
    width = _vectors(machine) * shape.lanes(machine)
    fits = distances[shape.contract[1]] == shape.columns <= width and shape.columns % shape.lanes(machine) == 0
    return distances[len(right.tile.shape) - 1] == 1 and (shape.rows <= 16 or fits)


def _distances(value: Value, closures: Closures) -> list[int]:
    """How many elements apart neighbours along each dim of an addressable tile lie."""
    if closures.kept(value):
        return list(strides_of(value.tile.shape))
    op = closures.definition[value]
    if isinstance(op, Reshape):
        inner = iter(d for d, n in zip(_distances(op.operands[0], closures), op.operands[0].tile.shape, strict=True) if n != 1)
        return [0 if n == 1 else next(inner) for n in op.shape]
    assert isinstance(op, Load)
    strides = strides_of(op.ref.ref.shape)
    return [s for s, dim in zip(strides, op.access.dims, strict=True) if dim.kind != "index"]


def _base(e: Elements, value: Value) -> Reg:
    """The address of the first element of an addressable tile."""
    if value in e.closures.slots:
        return e.slot(e.closures.slots[value])
    op = e.closures.definition[value]
    if isinstance(op, Reshape):
        return _base(e, op.operands[0])
    assert isinstance(op, Load)
    return e.origin(op)


# --- the whole dot -----------------------------------------------------------------------------------------------------


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
    bytes_of_product = shape.rows * shape.columns * _word(shape)

    def product(b: Reg) -> None:
        with e.scope():
            index = index_of(b)
            place = (index,) if shape.stacked else ()
            spare = e.slot(step.temporary) if step.temporary is not None else e.scratch
            right, spare = _right(e, shape, step.form, place, spare)
            left = _left(e, shape, step.form, place, spare)
            out = e.code.at(target, e.number(index.times(bytes_of_product)))
            _multiply(e.code, shape, left, right, out, step.init)

    e.code.loop(0, shape.batch, 1, product)


def _left(e: Elements, shape: Shape, form: Form, batch: Place, spare: Reg) -> _Matrix:
    value, code = shape.op.operands[0], e.code
    word = _word(shape)
    if form.packs_left:
        # Word k of all rows, then the next one.
        for_k = _words_over(e, shape, 0, batch)
        over(e, (shape.words,), lambda k: _pack_row(e, for_k, k[0], shape.rows, spare, shape.rows, Index()))
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

    The last panel may be narrower: then its k lie `last` bytes apart.
    """

    base: Reg
    panel: int
    k: int
    last: int


def _right(e: Elements, shape: Shape, form: Form, batch: Place, spare: Reg) -> tuple[_Panels, Reg]:
    """The right operand in panels, packed if need be; and the memory behind."""
    machine, word = e.code.module.machine, _word(shape)
    lanes = shape.lanes(machine)
    width = _vectors(machine) * lanes
    if not form.packs_right:
        value = shape.op.operands[1]
        distances = _distances(value, e.closures)
        base = _base(e, value)
        if batch:
            base = e.code.at(base, e.number(batch[0].times(distances[0] * word)))
        row = distances[shape.contract[1]] * word
        return _Panels(base, width * word, row, row), spare
    e.prefetching = True
    _pack(e, shape, batch, spare, lanes, width)
    e.prefetching = False
    last = (shape.padded_columns(machine) % width or width) * word
    used = shape.words * shape.padded_columns(machine) * word
    panels = _Panels(spare, shape.words * width * word, width * word, last)
    return panels, e.code.at(spare, cdiv(used, _ALIGNMENT) * _ALIGNMENT)


def _multiply(code: Code, shape: Shape, left: _Matrix, right: _Panels, out: Reg, adds: bool) -> None:
    """All panels by all rows, in portions of the depth whose panels stay in the cache."""
    machine, word = code.module.machine, _word(shape)
    lanes = shape.lanes(machine)
    width = _vectors(machine) * lanes
    portion = max(8, _PANEL // (width * word))
    portions = [(at, min(portion, shape.words - at)) for at in range(0, shape.words, portion)] or [(0, 0)]
    whole, rest = divmod(shape.columns, width)
    for at, depth in portions:
        begins = adds or at > 0
        a = code.at(left.base, at * left.k)

        def panel(j: Reg | int, columns: int, k_bytes: int) -> None:
            b = code.at(right.base, _scaled(code, j, right.panel))
            b = code.at(b, at * k_bytes)
            c = code.at(out, _scaled(code, j, width * word))
            _rows(code, shape, _Matrix(a, left.row, left.k), b, k_bytes, c, columns, depth, begins)

        code.loop(0, whole, 1, lambda j: panel(j, width, right.k))
        if rest:
            panel(whole, rest, right.last)


def _scaled(code: Code, number: Reg | int, factor: int) -> Operand:
    if isinstance(number, int):
        return number * factor
    if not number.text.startswith("%"):
        return int(number.text) * factor
    return code.binary("mul nsw", number, factor)


def _rows(
    code: Code, shape: Shape, a: _Matrix, b: Reg, k_bytes: int, c: Reg, columns: int, depth: int, adds: bool
) -> None:
    """All rows by one panel."""
    block = _rows_of(code.module.machine, columns, shape.lanes(code.module.machine))
    row_bytes = shape.columns * _word(shape)
    whole = shape.rows // block * block

    def call(i: Reg | int, rows: int) -> None:
        kernel = Kernel(shape.dtype, rows, columns, a.k, k_bytes, row_bytes, adds)
        name = kernel.define(code.module)
        first = code.at(a.base, _scaled(code, i, a.row))
        target = code.at(c, _scaled(code, i, row_bytes))
        stride = constant(a.row, I64)
        code.call(name, Type("void"), first, stride, b, target, constant(depth, I64))

    code.loop(0, whole, block, lambda i: call(i, block))
    if shape.rows > whole:
        call(whole, shape.rows - whole)


# --- the innermost loop --------------------------------------------------------------------------------------------------


def _vectors(machine: Machine) -> int:
    """The registers that a row of a panel fills."""
    return 4 if machine.registers >= 32 else 3 if machine.vector_bytes == 32 else 2


def _rows_of(machine: Machine, columns: int, lanes: int) -> int:
    """The rows whose sums fit the registers, beside a row of the panel and one element."""
    vectors = cdiv(columns, lanes)
    return max(1, min(8, (machine.registers - vectors - 2) // vectors, 6 if vectors >= 4 else 8))


@dataclass(frozen=True)
class Kernel:
    """A function that multiplies a few rows by one panel.

    Attributes:
      dtype: of the elements.
      rows: how many.
      columns: of the panel.
      left_k, right_k, out_row: bytes from one k, or row, to the next.
      adds: to what is there.
    """

    dtype: DType
    rows: int
    columns: int
    left_k: int
    right_k: int
    out_row: int
    adds: bool

    def define(self, module: Module) -> str:
        """The name of the function `(left, bytes from row to row, right, out, depth in words)`."""
        sums = "adds" if self.adds else "sets"
        name = f"dot_{self.dtype}_{self.rows}x{self.columns}_{sums}_{self.left_k}_{self.right_k}_{self.out_row}"
        parameters = [("left", PTR), ("row", I64), ("right", PTR), ("out", PTR), ("depth", I64)]
        return module.function(name, parameters, self._body, attributes="internal")

    def _body(self, code: Code, left: Reg, row: Reg, right: Reg, out: Reg, depth: Reg) -> None:
        vector = _sum_type(self.dtype, code.module.machine)
        count = cdiv(self.columns, vector.lanes)
        rest = self.columns % vector.lanes
        last = lanes_of([n < rest for n in range(vector.lanes)], vector.of("i1")) if rest else None
        bytes_of_vector = vector.lanes * vector.bits // 8
        rows = [code.at(left, code.binary("mul", row, r)) if r else left for r in range(self.rows)]
        places = [code.at(out, r * self.out_row + v * bytes_of_vector) for r in range(self.rows) for v in range(count)]
        masks = [last if v == count - 1 else None for v in range(count)] * self.rows
        zero = constant(0, vector)
        sums = [zero] * len(places)
        if self.adds:
            sums = [_masked_load(code, vector, p, m) for p, m in zip(places, masks, strict=True)]

        def step(k: Reg, *now: Reg) -> list[Reg]:
            at = code.at(right, code.binary("mul nsw", k, self.right_k))
            panel = [_masked_load(code, vector, code.at(at, v * bytes_of_vector), masks[v]) for v in range(count)]
            offset = code.binary("mul nsw", k, self.left_k)
            found: list[Reg] = []
            for r in range(self.rows):
                word = code.load(vector.element, code.at(rows[r], offset), align=self.dtype.itemsize)
                x = code.splat(word, vector.lanes)
                found += [_accumulate(code, self.dtype, s, x, p) for s, p in zip(now[r * count :], panel, strict=False)]
            return found

        for x, place, mask in zip(code.loop(constant(0, I64), depth, 1, step, *sums), places, masks, strict=True):
            code.store(x, place) if mask is None else code.masked_store(x, place, mask)
        code.ret()


def _sum_type(dtype: DType, machine: Machine) -> Type:
    """A register of sums."""
    scalar = {F64: "double", F32: "float", BF16: "float"}.get(dtype, "i32")
    return Type(scalar, machine.vector_bytes // (8 if dtype == F64 else 4))


def _masked_load(code: Code, type: Type, address: Reg, mask: Reg | None) -> Reg:
    return code.load(type, address) if mask is None else code.masked_load(type, address, mask, constant(0, type))


def _accumulate(code: Code, dtype: DType, total: Reg, x: Reg, y: Reg) -> Reg:
    """total + x * y, of words."""
    if dtype in (F32, F64):
        return code.fma(x, y, total)
    if dtype == BF16:
        return code.dot_pairs("llvm.x86.avx512bf16.dpbf16ps.512", "bfloat", total, x, y)
    if dtype == I32:
        return code.binary("add", total, code.binary("mul", x, y))
    name = "llvm.x86.avx512.pmaddw.d.512" if total.type.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    return code.binary("add", total, code.products_of_pairs(name, x, y))


# --- packing -----------------------------------------------------------------------------------------------------------

_Words = Callable[[Index, Index, int], Reg]


def _words_over(e: Elements, shape: Shape, side: int, batch: Place) -> _Words:
    """A function that gives word number k of the free places from an index on, as a vector, or as one element."""
    value, contracted = shape.op.operands[side], shape.contract[side]
    inner_first = contracted == len(batch)

    def element(k: Index, free: Index, lanes: int) -> Reg:
        return e.at(value, (*batch, k, free) if inner_first else (*batch, free, k), lanes)

    def words(k: Index, free: Index, lanes: int) -> Reg:
        if not shape.pairs:
            return element(k, free, lanes)
        low = e.code.cast("zext", element(k.times(2), free, lanes), "i32")
        if shape.depth % 2 and k == Index(const=shape.words - 1):
            return low
        high = e.code.cast("zext", element(k.times(2).shifted(1), free, lanes), "i32")
        return e.code.binary("or", low, e.code.binary("shl", high, 16))

    return words


def _pack_row(e: Elements, words: _Words, k: Index, count: int, base: Reg, row: int, offset: Index) -> None:
    """Store word number k of `count` free places, one behind the other."""
    code, lanes = e.code, e.code.module.machine.lanes

    def put(free: Index, width: int) -> None:
        x = words(k, free, width)
        index = k.times(row).plus(Index(free.terms, free.const)).plus(offset)
        code.store(x, code.at(base, e.number(index), x.type.scalar))

    def body(i: Reg) -> None:
        with e.scope():
            put(index_of(i, 1), lanes)

    code.loop(0, count // lanes * lanes, lanes, body)
    for at, width in pieces(count, lanes):
        with e.scope():
            put(Index((), at, 1 if width else 0), width)


def _pack(e: Elements, shape: Shape, batch: Place, spare: Reg, lanes: int, width: int) -> None:
    """Pack the right operand."""
    whole, rest = divmod(shape.columns, width)
    contracted = shape.contract[1]
    transposes = contracted == len(shape.op.operands[1].tile.shape) - 1

    def panel(j: Index, columns: int) -> None:
        base = e.code.at(spare, e.number(j.times(shape.words * width * _word(shape))))
        padded = cdiv(columns, lanes) * lanes
        (_transposed if transposes else _interleaved)(e, shape, batch, j.times(width), columns, base, padded)

    over(e, (whole,), lambda j: panel(j[0], width))
    if rest:
        panel(Index(const=whole), rest)


def _interleaved(e: Elements, shape: Shape, batch: Place, first: Index, columns: int, base: Reg, row: int) -> None:
    """A panel of an operand whose columns are neighbours."""
    words = _words_over(e, shape, 1, batch)

    def shifted(k: Index, free: Index, lanes: int) -> Reg:
        return words(k, free.plus(first), lanes)

    whole = shape.depth // 2 if shape.pairs else shape.depth
    over(e, (whole,), lambda k: _pack_row(e, shifted, k[0], columns, base, row, ZERO))
    if shape.words > whole:
        _pack_row(e, shifted, Index(const=whole), columns, base, row, ZERO)


def _transposed(e: Elements, shape: Shape, batch: Place, first: Index, columns: int, base: Reg, row: int) -> None:
    """A panel of an operand whose words along k are neighbours: squares of words are loaded by rows, and turned."""
    code, value = e.code, shape.op.operands[1]
    lanes = shape.lanes(code.module.machine)
    words, per_word = _words_over(e, shape, 1, batch), 1 + shape.pairs
    whole = shape.depth // (lanes * per_word) * lanes

    def square(column: Index, count: int, k: Index) -> None:
        vectors: list[Reg] = []
        for n in range(count):
            x = e.at(value, (*batch, first.plus(column).shifted(n), Index(k.terms, k.const, 1)), lanes * per_word)
            if shape.pairs:
                x = code.emit(Type("i32", lanes), f"bitcast {x} to <{lanes} x i32>")
            vectors.append(x)
        turned = transpose(code, [*vectors, *[Reg("poison", vectors[0].type)] * (lanes - count)])
        for n, x in enumerate(turned):
            index = k.times(1) if not shape.pairs else _halved(k)
            place = index.shifted(n).times(row).plus(column)
            code.store(x, code.at(base, e.number(place), x.type.scalar))

    def strip(column: Index, count: int) -> None:
        def body(k: Reg) -> None:
            with e.scope():
                square(column, count, index_of(k).times(per_word))

        code.loop(0, whole, lanes, body)

    over_columns = columns // lanes
    over(e, (over_columns,), lambda c: strip(c[0].times(lanes), lanes))
    if columns % lanes:
        strip(Index(const=over_columns * lanes), columns % lanes)

    def shifted(k: Index, free: Index, width: int) -> Reg:
        return words(k, free.plus(first), width)

    for k in range(whole, shape.words):
        with e.scope():
            _pack_row(e, shifted, Index(const=k), columns, base, row, ZERO)


def _halved(k: Index) -> Index:
    return Index(tuple((n, s // 2) for n, s in k.terms), k.const // 2)


def transpose(code: Code, rows: list[Reg]) -> list[Reg]:
    """The columns of a square of vectors: blocks of 1, 2, 4, ... lanes change places across the diagonal."""
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
