"""Elements of tiles, computed where they are used: one element, or a vector along one dim.

Computed elements are cached by their coordinates. `scope` limits the cache: values of a loop's body or of a branch are
forgotten at its end, where they need not have been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from math import prod
from typing import Any

from tilekern.ir.analysis.ranges import analyze, digit_interval
from tilekern.ir.compute import Constant
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import Load, MemoryOp, Position, Term
from tilekern.ir.shape import Iota
from tilekern.ir.types import DType, strides_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Coords, Index, Request, is_virtual, linear, operand_coords, register
from tilekern.lower.llvm.element_types import element_constant, from_memory, memory_type, to_memory
from tilekern.lower.llvm.emit import elementwise
from tilekern.lower.llvm.emit.digits import digit_of
from tilekern.lower.llvm.emit.lookups import Lookups
from tilekern.lower.llvm.emit.turns import turns_of_dots
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I32, I64, Reg, Type, constant, vector_constant
from tilekern.lower.llvm.plan.steps import Buffer, Expressions

_LINE = 64
"""Bytes of a cache line."""


class Elements:
    """Emits code that computes, loads and stores elements.

    Attributes:
      code: the function that is emitted.
      expressions: the definitions of values, and the tiles in memory.
      registers: the scalars that have been computed.
      targets: the buffers of the present step's results.
      loops: the index of the innermost fold, and its change from one iteration to the next.
      lookups: the tiles that are looked up.
      turns: of each dot that shares its data with others, the number of its turn, and the number of turns.
    """

    def __init__(self, code: Code, func: Func, arrays: Mapping[Value, Reg], scratch: Reg) -> None:
        self.code, self.scratch = code, scratch
        self.expressions = Expressions(func)
        self.registers: dict[Value, Reg] = {}
        self.targets: dict[Value, Buffer] = {}
        self.loops: dict[Value, int] = {}
        self._arrays = arrays
        self._ranges = analyze(func)
        self._scopes: list[dict[Any, Reg]] = [{}]
        self._data: dict[Value, Reg] = {}
        self._flushing = elementwise.may_flush(func)
        self.lookups = Lookups(func, code.module.machine)
        self.turns = turns_of_dots(func, self.expressions.definition)

    # --- the cache ---

    @contextmanager
    def scope(self) -> Generator[None]:
        """Cache elements that are computed inside until its end."""
        self._scopes.append({})
        yield
        self._scopes.pop()

    def cached(self, key: Any, make: Callable[[], Reg]) -> Reg:
        """The number of a key, which `make` computes unless it is known."""
        element = self._known(key)
        if element is None:
            element = self._scopes[-1][key] = make()
        return element

    # --- elements ---

    def element(self, value: Value, coords: Coords, lanes: int = 0) -> Reg:
        """The element at some coordinates, or a vector of `lanes` elements. Scalars have no coordinates: ().

        Operands come first, by a stack of its own: of hundreds of fused ops Python's would overflow.
        """
        first = Request.of(value, coords, lanes)
        if (element := self._known(first)) is not None:
            return element
        pending = [(first, iter(self._operands(first)))]
        while pending:
            request, operands = pending[-1]
            missing = next((x for x in operands if self._known(x) is None), None)
            if missing is not None:
                pending.append((missing, iter(self._operands(missing))))
                continue
            pending.pop()
            element = self._scopes[-1][request] = self._element(request)
        assert element is not None
        return element

    def _known(self, key: Any) -> Reg | None:
        return next((scope[key] for scope in self._scopes if key in scope), None)

    def _operands(self, request: Request) -> list[Request]:
        """The elements of which one op makes an element; none for an element that is read from memory."""
        value, coords, lanes = request
        if request.is_splat:
            return [Request.of(value, coords)]
        if value in self.registers or value in self.expressions.buffers:
            return []
        op = self.expressions.definition[value]
        if isinstance(op, Load):
            return []
        if (lookup := self.lookups.of(request)) is not None:
            return [Request.of(lookup.leaf, coords, lanes)]
        return [Request.of(x, where, lanes) for x, where in operand_coords(op, coords, self.clamped_index)]

    def hoist(self, values: Iterable[Value], outer: Coords, inner: str) -> None:
        """Compute the elements that do not depend on the register `inner`, the index of the last dim."""
        pending = [(value, (*outer, register(inner, 1))) for value in values]
        seen = set[tuple[Value, Coords]]()
        while pending:
            value, coords = pending.pop()
            if (value, coords) in seen:
                continue
            seen.add((value, coords))
            if not any(index.step or index.mentions(inner) for index in coords):
                self.element(value, coords)
            elif not self.expressions.is_available(value):
                pending += operand_coords(self.expressions.definition[value], coords, self.clamped_index)

    def _element(self, request: Request) -> Reg:
        value, coords, lanes = request
        if request.is_splat:
            return self.code.splat(self.element(value, coords), lanes)
        if value in self.registers:
            return self.registers[value]
        if value in self.expressions.buffers:
            return self.load(
                self.buffer_address(self.expressions.buffers[value]), value.tile.shape, value.tile.dtype, coords, lanes
            )
        op = self.expressions.definition[value]
        assert is_virtual(op), op.name
        with self.code.at(op.loc):
            return self._computed(op, request)

    def _computed(self, op: Op, request: Request) -> Reg:
        """An element that one op computes of its operands' elements."""
        value, coords, lanes = request
        match op:
            case Constant():
                return self._constant(op, coords, lanes)
            case Iota():
                return self._iota(coords[op.dim], lanes)
            case Load():
                return self.load_access(op, coords, lanes)
            case _:
                operands = [self.element(*x) for x in self._operands(request)]
                if (lookup := self.lookups.of(request)) is not None:
                    return lookup.emit(self.code, operands[0])
                if not isinstance(op, elementwise.KINDS):
                    return operands[0]
                return elementwise.emit(self.code, op, operands, value in self._flushing)

    def _constant(self, op: Constant, coords: Coords, lanes: int) -> Reg:
        if not op.array.shape or op.array.size == 1:
            return element_constant(op.array.reshape(-1)[0], op.array.dtype, lanes)
        if op.result not in self._data:
            self._data[op.result] = self.code.module.data("table", op.array)
        return self.load(self._data[op.result], op.shape, op.array.dtype, coords, lanes)

    def _iota(self, index: Index, lanes: int) -> Reg:
        first = self.code.cast("trunc", self.index_value(Index(index.terms, index.const)), "i32")
        return (
            self.code.binary("add", self.code.splat(first, lanes), _steps(index.step, I32, lanes)) if lanes else first
        )

    # --- numbers ---

    def index_value(self, index: Index) -> Reg:
        """The value of an index for lane 0, i64."""
        return self.cached(("number", index.terms, index.const), lambda: self._sum(index))

    def _sum(self, index: Index) -> Reg:
        total: Reg | None = None
        for name, stride in index.terms:
            term = Reg(name, I64) if stride == 1 else self.code.binary("mul nsw", Reg(name, I64), stride)
            total = term if total is None else self.code.binary("add nsw", total, term)
        if total is None:
            return constant(index.const, I64)
        return self.code.binary("add nsw", total, index.const) if index.const else total

    def lane_indices(self, index: Index, lanes: int) -> Reg:
        """The values of an index for all lanes, i64."""
        first = self.code.splat(self.index_value(index), lanes)
        return self.code.binary("add nsw", first, _steps(index.step, I64, lanes)) if index.step else first

    def clamped_index(self, value: Value, most: int) -> Index:
        """An int32 scalar, limited to 0 .. `most`, as an index."""

        def make() -> Reg:
            low = self.code.intrinsic("llvm.smax", self.registers[value], 0)
            return self.code.cast("zext", self.code.intrinsic("llvm.smin", low, most), "i64")

        return register(self.cached(("clamped", value, most), make).text)

    def position(self, op: MemoryOp, position: Position) -> Index:
        """The scalar terms of a position of an access."""
        total = Index(const=position.const)
        for term in position.terms:
            value = op.positions[term.operand]
            if not value.tile.shape:
                digit = self.cached(("digit", value, term.div, term.mod), lambda t=term, v=value: self._digit(t, v))
                total = total.plus(index_of(digit).times(term.stride))
        return total

    def _digit(self, term: Term, value: Value) -> Reg:
        interval = self._ranges.get(value)
        wide = self.code.cast("sext", self.registers[value], "i64")
        return digit_of(self.code, term, wide, negative=interval is None or interval.low < 0)

    # --- memory ---

    def buffer_address(self, buffer: Buffer) -> Reg:
        """The address of a buffer."""
        return self.cached(("slot", buffer.root), lambda: self.code.gep(self.scratch, buffer.root.offset))

    def load(self, base: Reg, shape: Sequence[int], dtype: DType, coords: Coords, lanes: int = 0) -> Reg:
        """Load elements of a tile that is dense in memory."""
        return self._load_at(base, linear(coords, strides_of(tuple(shape))), dtype, lanes)

    def write(self, value: Value, x: Reg, coords: Coords) -> None:
        """Store elements of a result of the present step; a scalar stays in its register."""
        if value.tile.shape:
            self.store(x, self.buffer_address(self.targets[value]), value.tile.shape, value.tile.dtype, coords)
        else:
            self.registers[value] = x

    def store(self, x: Reg, base: Reg, shape: Sequence[int], dtype: DType, coords: Coords) -> None:
        """Store elements of a tile that is dense in memory."""
        self._store_at(to_memory(self.code, x, dtype), base, linear(coords, strides_of(tuple(shape))), dtype, None)

    def address(self, base: Reg, index: Index, dtype: DType) -> Reg:
        """The address of the element of the first lane."""
        return self.code.gep(base, self.index_value(index), memory_type(dtype).scalar)

    def _load_at(self, base: Reg, index: Index, dtype: DType, lanes: int) -> Reg:
        code, type = self.code, memory_type(dtype, lanes)
        if not lanes or index.step == 1:
            return from_memory(code, code.load(type, self.address(base, index, dtype)), dtype)
        if index.step == -1:
            last = code.load(type, self.address(base, index.shifted(1 - lanes), dtype))
            return from_memory(code, code.shuffle(last, last, range(lanes)[::-1]), dtype)
        if not index.step:
            return code.splat(self._load_at(base, index, dtype, 0), lanes)
        addresses = self._addresses(base, self.lane_indices(index, lanes), dtype)
        return from_memory(code, code.gather(type, addresses), dtype)

    def _store_at(self, x: Reg, base: Reg, index: Index, dtype: DType, mask: Reg | None) -> None:
        """Store elements of memory type; with a mask, only its lanes."""
        code, lanes = self.code, x.type.lanes
        if not lanes:
            address = self.address(base, index, dtype)
            if mask is None:
                code.store(x, address)
                return
            with code.when(mask):
                code.store(x, address)
        elif index.step == 1:
            address = self.address(base, index, dtype)
            code.store(x, address) if mask is None else code.masked_store(x, address, mask)
        else:
            code.scatter(x, self._addresses(base, self.lane_indices(index, lanes), dtype), mask)

    def _addresses(self, base: Reg, numbers: Reg, dtype: DType) -> Reg:
        return self.code.emit(
            Type("ptr", numbers.type.lanes),
            f"getelementptr inbounds {memory_type(dtype).scalar}, ptr {base.text}, {numbers}",
        )

    def gather(self, value: Value, coords: Coords, dim: int, numbers: Reg) -> Reg:
        """Gather elements of a tile in memory.

        Args:
          value: the tile.
          coords: the coordinates; 0 along `dim`.
          dim: the dim that each lane has an index for.
          numbers: the index of each lane, i64.
        """
        code, shape = self.code, value.tile.shape
        strides = strides_of(shape)
        offsets = self.lane_indices(linear(coords, strides), numbers.type.lanes)
        total = code.binary("add nsw", code.binary("mul nsw", numbers, strides[dim]), offsets)
        addresses = self._addresses(self.buffer_address(self.expressions.buffers[value]), total, value.tile.dtype)
        loaded = code.gather(memory_type(value.tile.dtype, numbers.type.lanes), addresses)
        return from_memory(code, loaded, value.tile.dtype)

    # --- accesses ---

    def load_access(self, op: Load, coords: Coords, lanes: int = 0) -> Reg:
        """Load elements of an array. Elements that are masked or out of bounds are the fill."""
        code, dtype = self.code, op.ref.ref.dtype
        index, gathered, mask = self._resolve(op, coords, lanes, op.mask)
        base = self._arrays[op.ref]
        if gathered is None and mask is None:
            return self._load_at(base, index, dtype, lanes)
        type = memory_type(dtype, lanes)
        fill = element_constant(0, dtype) if op.fill is None else self.registers[op.fill]
        fill = code.splat(to_memory(code, fill, dtype), lanes)
        if gathered is None and mask is not None and not mask.type.lanes and self._chooses_address(index, lanes):
            address = code.select(mask, self.address(base, index, dtype), code.module.zeros())
            loaded = code.load(type, address)
            return from_memory(code, loaded if op.fill is None else code.select(mask, loaded, fill), dtype)
        if mask is not None and not mask.type.lanes:
            mask = code.splat(mask, lanes)
        if gathered is None and index.step == 1:
            address = self.address(base, index, dtype)
            return from_memory(code, code.masked_load(type, address, mask or constant(1, type.of("i1")), fill), dtype)
        numbers = self.lane_indices(index, lanes) if gathered is None else gathered
        loaded = code.gather(type, self._addresses(base, numbers, dtype), mask, fill)
        return from_memory(code, loaded, dtype)

    def _chooses_address(self, index: Index, lanes: int) -> bool:
        """True if a vector whose lanes are all in bounds, or none, is loaded from its address or from zeros.

        AVX-512 has masked loads of all dtypes; elsewhere a masked load of 8 or 16 bits is a branch for each lane.
        """
        return not lanes or (index.step == 1 and self.code.module.machine.vector_bytes < 64)

    def prefetch(self, op: Load, coords: Coords, distance: Index) -> None:
        """Prefetch an element of the array that is so many elements behind an element of a load."""
        index, _, _ = self._resolve(op, coords, 0, None)
        self.code.prefetch(self.address(self._arrays[op.ref], index.plus(distance), op.ref.ref.dtype))

    def load_near(self, op: Load, distance: Index) -> Reg:
        """The number that is so many elements behind a loaded scalar; beyond the array's ends its last ones count."""
        index, _, _ = self._resolve(op, (), 0, None)
        place = self.code.intrinsic("llvm.smin", self.index_value(index.plus(distance)), prod(op.ref.ref.shape) - 1)
        place = self.code.intrinsic("llvm.smax", place, 0)
        return self._load_at(self._arrays[op.ref], index_of(place), op.ref.ref.dtype, 0)

    def prefetch_vectors(self, value: Value, coords: Coords, width: int) -> None:
        """Prefetch the data of which `width` elements along the last dim are computed, from some coordinates on.

        Only the first lines of loads at fixed steps are prefetched. The coordinates may lie beyond the tile.
        """
        op = self.expressions.definition.get(value)
        if value in self.expressions.buffers or op is None:
            return
        if isinstance(op, elementwise.KINDS):
            for operand in op.operands:
                self.prefetch_vectors(operand, coords, width)
        elif isinstance(op, Load) and op.access.lanes[-1] == len(coords) - 1:
            if any(dim.kind not in ("block", "index") for dim in op.access.dims):
                return
            first = Index()
            sizes = zip(op.access.dims, op.access.lanes, strides_of(op.extents), strict=True)
            for dim, lane, stride in sizes:
                index = self.position(op, dim.position)
                first = first.plus((index if lane is None else index.plus(coords[lane])).times(stride))
            step = _LINE // op.ref.ref.dtype.itemsize
            for at in range(0, width, step)[: calibration.PREFETCHED_LINES]:
                self.code.prefetch(self.address(self._arrays[op.ref], first.shifted(at), op.ref.ref.dtype))

    def store_access(self, op: MemoryOp, x: Reg, coords: Coords, mask: Value | None) -> None:
        """Store elements to an array, except elements that are masked or out of bounds."""
        code, dtype, lanes = self.code, op.ref.ref.dtype, x.type.lanes
        index, gathered, where = self._resolve(op, coords, lanes, mask)
        stored_as = to_memory(code, x, dtype)
        if where is not None and lanes and not where.type.lanes:
            where = code.splat(where, lanes)
        if gathered is None:
            self._store_at(stored_as, self._arrays[op.ref], index, dtype, where)
        else:
            code.scatter(stored_as, self._addresses(self._arrays[op.ref], gathered, dtype), where)

    def access_address(
        self,
        op: MemoryOp,
        coords: Coords,
        mask: Value | None,
        base: Reg | None = None,
        dtype: DType | None = None,
        lanes: int = 0,
    ) -> tuple[Reg, Reg | None]:
        """The address of one element of an access, or of the first of a vector, and the mask of the lanes in bounds.

        The mask is None if all lanes are in bounds. `base` and `dtype` stand for another array of the same shape.
        """
        index, gathered, where = self._resolve(op, coords, lanes, mask)
        assert gathered is None and index.step == (lanes > 0)
        return self.address(base or self._arrays[op.ref], index, dtype or op.ref.ref.dtype), where

    def first_address(self, op: Load) -> Reg:
        """The address of the first element of a load that is in bounds."""
        index = Index()
        for dim, stride in zip(op.access.dims, strides_of(op.extents), strict=True):
            index = index.plus(self.position(op, dim.position).times(stride))
        return self.address(self._arrays[op.ref], index, op.ref.ref.dtype)

    def _resolve(
        self, op: MemoryOp, coords: Coords, lanes: int, mask: Value | None
    ) -> tuple[Index, Reg | None, Reg | None]:
        """The linear index of an access; the indices of all lanes, unless affine; the mask of lanes in bounds."""
        code = self.code
        total, gathered, conditions = Index(), None, list[Reg]()
        sizes = zip(op.extents, strides_of(op.extents), strict=True)
        for dim, lane, (length, stride) in zip(op.access.dims, op.access.lanes, sizes, strict=True):
            index = self.position(op, dim.position)
            numbers: Reg | None = None
            if lane is not None and dim.kind == "block":
                index = index.plus(coords[lane])
            elif lane is not None:
                numbers = self._vector_of(op, dim.position, coords[lane], lanes)
                if not numbers.type.lanes:
                    index, numbers = index.plus(index_of(numbers)), None
            if numbers is not None:
                numbers = code.binary("add nsw", numbers, self.lane_indices(index, lanes))
                inside = self._inside(numbers, length)
                numbers = code.binary("mul nsw", numbers, stride)
                gathered = numbers if gathered is None else code.binary("add nsw", gathered, numbers)
            else:
                total = total.plus(index.times(stride))
                inside = None if dim.in_bounds else self._within(op, dim.position, index, length, lanes)
            if not dim.in_bounds and inside is not None:
                conditions.append(inside)
        if mask is not None:
            conditions.append(self.element(mask, coords, lanes))
        if gathered is not None:
            gathered = code.binary("add nsw", gathered, self.lane_indices(total, lanes))
        return total, gathered, self._all(conditions, lanes)

    def _vector_of(self, op: MemoryOp, position: Position, index: Index, lanes: int) -> Reg:
        """The sum of the vector terms of a gathered position, i64: one number if all lanes have the same index."""
        code, total = self.code, None
        lanes = lanes if index.step else 0
        for term in position.terms:
            value = op.positions[term.operand]
            if value.tile.shape:
                number = code.cast("sext", self.element(value, (index,), lanes), "i64")
                number = code.binary("mul nsw", digit_of(self.code, term, number, negative=True), term.stride)
                total = number if total is None else code.binary("add nsw", total, number)
        return total if total is not None else constant(0, I64)

    def _inside(self, numbers: Reg, length: int) -> Reg:
        return self.code.compare("icmp ult", numbers, length)

    def _within(self, op: MemoryOp, position: Position, index: Index, length: int, lanes: int) -> Reg | None:
        """The mask of lanes in bounds along a dim: one bool if all lanes have the same index."""
        code = self.code
        if not index.step or not lanes:
            return self._inside(self.index_value(index), length)
        if abs(index.step) != 1:
            return self._inside(self.lane_indices(index, lanes), length)
        # Lane n has index first + n. It is in bounds if -first <= n < length - first; both limits are clamped to
        # 0 .. lanes.
        first = self.index_value(index)
        if index.step == -1:
            return self._inside(self.lane_indices(index, lanes), length)
        until = self._limited(code.binary("sub nsw", length, first), lanes)
        inside = code.compare("icmp slt", _steps(1, I32, lanes), code.splat(until, lanes))
        if self._is_negative(op, position):
            begin = self._limited(code.binary("sub nsw", 0, first), lanes)
            inside = code.binary(
                "and", inside, code.compare("icmp sge", _steps(1, I32, lanes), code.splat(begin, lanes))
            )
        return inside

    def _limited(self, number: Reg, lanes: int) -> Reg:
        low = self.code.intrinsic("llvm.smax", number, 0)
        return self.code.cast("trunc", self.code.intrinsic("llvm.smin", low, lanes), "i32")

    def _is_negative(self, op: MemoryOp, position: Position) -> bool:
        """True if a position may be negative."""
        low = position.const
        for term in position.terms:
            value = op.positions[term.operand]
            interval = digit_interval(term, self._ranges.get(value))
            if interval is None:
                return True
            low += min(term.stride * interval.low, term.stride * interval.high)
        return low < 0

    def _all(self, conditions: list[Reg], lanes: int) -> Reg | None:
        if not conditions:
            return None
        if any(c.type.lanes for c in conditions):
            conditions = [c if c.type.lanes else self.code.splat(c, lanes) for c in conditions]
        return reduce(partial(self.code.binary, "and"), conditions)


def index_of(number: Reg, step: int = 0) -> Index:
    """A register or a constant as an index, plus `step` times the lane's number."""
    return register(number.text, step) if number.text.startswith("%") else Index((), int(number.text), step)


def _steps(step: int, type: Type, lanes: int) -> Reg:
    """0, step, 2 * step, ..."""
    return vector_constant([step * n for n in range(lanes)], Type(type.scalar, lanes))
