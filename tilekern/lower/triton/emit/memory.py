"""Buffers of a kernel, and the statements that load, store and update their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import Atomic, Dim, Load, MemoryOp, Store
from tilekern.ir.types import F64, DType, accumulator, kind_of
from tilekern.lower.triton.emit.addresses import Addresses
from tilekern.lower.triton.emit.expressions import complete, number, typed, whole
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.source_text import Expr, Writer, dtype_text, shape_text
from tilekern.lower.triton.plan.access_order import barriers
from tilekern.lower.triton.plan.partial_sums import PartialSums, plan_partial_sums
from tilekern.lower.triton.plan.tma import TmaCopy
from tilekern.lower.triton.program import Argument, Result


class Host(Protocol):
    """The part of the emitter that memory ops use."""

    writer: Writer
    names: Names
    ranges: dict[Value, Interval]

    def expr(self, value: Value) -> Expr:
        """The expression of a value."""
        ...

    def bind(self, hint: str, text: str) -> str:
        """The variable of an expression."""
        ...


class Memory:
    """The buffers of a kernel, and the statements that access them.

    Attributes:
      arguments: parameters of the entry function, operands first.
      operands: for each operand, the number of its input.
      results: results of the call, one for each output of the Func.
    """

    def __init__(self, func: Func, copies: Mapping[Op, TmaCopy], names: Names) -> None:
        self._func, self._copies = func, copies
        self.arguments: list[Argument] = []
        self.operands: list[int] = []
        self.results: list[Result] = []
        self._pointers: dict[Value, str] = {}
        self._descriptors: dict[tuple[Value, TmaCopy], str] = {}
        self._partial_sums: dict[Value, PartialSums] = {}
        self._add_operands(names)
        self._add_results(names)
        self._barriers = frozenset[Op]().union(*barriers(func).values())

    # --- buffers ---

    def _add_operands(self, names: Names) -> None:
        for place, param in enumerate(self._func.inputs):
            users = [op for op in self._func.walk() if isinstance(op, MemoryOp) and op.ref is param]
            copies = dict.fromkeys(self._copies.get(op) for op in users)
            if param.ref.role == "inout":
                # The result's buffer starts as a copy of this operand, which the kernel itself does not access.
                self._operand(place, Argument(names.fresh(f"{param.name}_before"), param.ref.dtype))
                continue
            for copy in copies:
                if copy is None:
                    self._pointers[param] = names.fresh(f"{param.name}_ptr")
                    self._operand(place, Argument(self._pointers[param], param.ref.dtype))
                else:
                    name = names.fresh(f"{param.name}_desc")
                    self._descriptors[param, copy] = name
                    self._operand(place, Argument(name, param.ref.dtype, copy.descriptor))

    def _operand(self, place: int, argument: Argument) -> None:
        self.operands.append(place)
        self.arguments.append(argument)

    def _add_results(self, names: Names) -> None:
        for param in self._func.outputs:
            ref = param.ref
            alias = None
            shape, dtype = ref.shape, ref.dtype
            if ref.role == "inout":
                alias = self.operands.index(self._func.inputs.index(param))
            zeroed = ref.role == "zeros"
            if ref.role == "sum":
                sums = self._partial_sums[param] = plan_partial_sums(self._func, param)
                dtype = accumulator(dtype) if kind_of(dtype) == "float" else dtype
                shape, zeroed = (sums.count(self._func), *shape), not sums.whole
            self.results.append(Result(shape, dtype, ref.dtype, zeroed, alias, partial_sums=ref.role == "sum"))
            copy = next((c for op, c in self._copies.items() if isinstance(op, Store) and op.ref is param), None)
            if copy is None:
                self._pointers[param] = names.fresh(f"{param.name}_ptr")
                self.arguments.append(Argument(self._pointers[param], dtype))
            else:
                self._descriptors[param, copy] = names.fresh(f"{param.name}_desc")
                self.arguments.append(Argument(self._descriptors[param, copy], dtype, copy.descriptor))

    def begin(self, host: Host) -> None:
        """Emit the pointers to the program's own partial sums, in front of the body."""
        grid, indices = self._func.grid, self._func.body.args
        for param, sums in self._partial_sums.items():
            partial = ""
            for n in sums.axes:
                if grid[n] > 1:
                    index = host.expr(indices[n]).text
                    partial = f"({partial}) * {grid[n]} + {index}" if partial else index
            if partial:
                size = prod(param.ref.shape)
                wide = ".to(tl.int64)" if size * sums.count(self._func) >= 2**31 else ""
                place = f"{partial if partial.isidentifier() else f'({partial})'}{wide} * {size}"
                self._pointers[param] = host.bind(f"{param.name}_slot", f"{self._pointers[param]} + {place}")

    # --- accesses ---

    def load(self, host: Host, op: Load) -> Expr:
        """The expression of a load."""
        tile = op.result.tile
        copy = self._copies.get(op)
        if copy is not None:
            box = f"{self._descriptors[op.ref, copy]}.load([{self.coordinates(host, op, copy)}])"
            same = copy.descriptor.block == tile.shape
            return Expr(box if same else f"{box}.reshape({', '.join(map(str, tile.shape))})", tile.shape)
        if self._addresses(host, op).all_out_of_bounds:
            fill = host.expr(op.fill) if op.fill is not None else number(0, tile)
            return complete(fill, tile)
        pointer, mask = self.address(host, op)
        text = f"tl.load({pointer})"
        if mask:
            fill_expr = host.expr(op.fill) if op.fill is not None else None
            text = f"tl.load({pointer}, mask={mask}, other={_fill_text(fill_expr, tile.dtype)})"
        return Expr(text, tile.shape)

    def write(self, host: Host, op: Store | Atomic) -> None:
        """Emit the statement of a store or an atomic update."""
        value = whole(host.expr(op.value), op.value.tile)
        copy = self._copies.get(op)
        if copy is not None:
            block = copy.descriptor.block
            same = block == op.value.tile.shape
            box = value if same else f"tl.reshape({value}, {shape_text(block)})"
            name = self._descriptors[op.ref, copy]
            host.writer.line(f"{name}.store([{self.coordinates(host, op, copy)}], {box})", op.loc)
            return
        if self._addresses(host, op).all_out_of_bounds:
            return
        if isinstance(op, Atomic) and op.ref.ref.role == "sum":
            self._accumulate(host, op, value)
            return
        pointer, mask = self.address(host, op)
        masked = f", mask={mask}" if mask else ""
        if isinstance(op, Store):
            host.writer.line(f"tl.store({pointer}, {value}{masked})", op.loc)
        else:
            host.writer.line(f'tl.atomic_{op.kind}({pointer}, {value}{masked}, sem="relaxed")', op.loc)

    def _accumulate(self, host: Host, op: Atomic, value: str) -> None:
        """Add to the program's partial sum, or store if an element gets one summand.

        Gathered lanes take turns, because two lanes may name the same element.
        """
        pointer, mask = self.address(host, op)
        wide = self.results[self._func.outputs.index(op.ref)].dtype
        gathers = [n for n, d in enumerate(_tile_dims(op)) if d.kind == "gather"]
        value = f"({value}).to({dtype_text(wide)})" if wide != op.ref.ref.dtype else value
        masked = f", mask={mask}" if mask else ""
        if self._partial_sums[op.ref].stored:
            host.writer.line(f"tl.store({pointer}, {value}{masked})", op.loc)
            return
        host.writer.line("tl.debug_barrier()", op.loc)
        if not gathers:
            fill = ", other=0" if mask else ""
            host.writer.line(f"tl.store({pointer}, tl.load({pointer}{masked}{fill}) + {value}{masked})", op.loc)
            return
        shape = op.value.tile.shape
        turns = [host.names.fresh("turn") for _ in gathers]
        tile = host.names.fresh("addend")
        host.writer.line(f"{tile} = {value}", op.loc)
        conditions = [mask] if mask else []
        for turn, dim in zip(turns, gathers, strict=True):
            index = ", ".join(":" if d == dim else "None" for d in range(len(shape)))
            lanes = f"tl.arange(0, {shape[dim]})" + (f"[{index}]" if len(shape) > 1 else "")
            conditions.append(f"({lanes} == {turn})")
        only = " & ".join(conditions)
        self._turns(host, op, list(zip(turns, gathers, strict=True)), pointer, tile, only)

    def _turns(
        self, host: Host, op: Atomic, turns: Sequence[tuple[str, int]], pointer: str, tile: str, only: str
    ) -> None:
        if not turns:
            host.writer.line(
                f"tl.store({pointer}, tl.load({pointer}, mask={only}, other=0) + {tile}, mask={only})", op.loc
            )
            host.writer.line("tl.debug_barrier()")
            return
        (turn, dim), *rest = turns
        host.writer.line(f"for {turn} in range({op.value.tile.shape[dim]}):", op.loc)
        with host.writer.indented():
            self._turns(host, op, rest, pointer, tile, only)

    def order(self, host: Host, op: Op) -> None:
        """Emit the barrier in front of an op, if it needs one: behind it, threads see what all others wrote before."""
        if op in self._barriers:
            host.writer.line("tl.debug_barrier()", op.loc)

    def _addresses(self, host: Host, op: MemoryOp) -> Addresses:
        # A gather needs a full vector, where an expression that is constant along its dim would be a scalar.
        vectors = {v: complete(host.expr(v), v.tile) for v in op.positions if v.tile.shape}
        operands = [vectors.get(v) or host.expr(v) for v in op.positions]
        return Addresses(op, operands, host.ranges, host.bind)

    def address(self, host: Host, op: MemoryOp) -> tuple[str, str]:
        """The pointers to all lanes, and the mask; "" for no mask."""
        addresses = self._addresses(host, op)
        pointer = self._pointers[op.ref]
        scalar, lanes = addresses.offset()
        if scalar and lanes:
            place = scalar if " + " not in scalar and " - " not in scalar else f"({scalar})"
            pointer = host.bind(f"{op.ref.name}_at", f"{pointer} + {place}")
        text = " + ".join(part for part in (pointer, lanes or scalar) if part)
        conditions = [addresses.mask()]
        if op.mask is not None:
            conditions.append(host.expr(op.mask).operand)
        shape = op.access.shape
        if shape and prod(shape) == 1 and not lanes:
            text = (
                f"{text} + tl.arange(0, 1)" if len(shape) == 1 else f"{text} + tl.zeros({shape_text(shape)}, tl.int32)"
            )
        return text, " & ".join(c for c in conditions if c)

    def descriptor(self, op: MemoryOp) -> str:
        """The name of the descriptor by which an access is copied."""
        return self._descriptors[op.ref, self._copies[op]]

    def coordinates(self, host: Host, op: MemoryOp, copy: TmaCopy) -> str:
        """The place of a copy's box in the array, one position for each dim of its descriptor."""
        addresses = self._addresses(host, op)
        return ", ".join(addresses.coordinate(d) for d in copy.dims)


def _tile_dims(op: MemoryOp) -> list[Dim]:
    return [op.access.dims[n] for n in op.access.kept]


def _fill_text(fill: Expr | None, dtype: DType) -> str:
    """The value of lanes that are masked off."""
    if fill is None:
        return "0.0" if kind_of(dtype) == "float" else "0"
    # A literal takes the dtype of the array. Triton has no literals of 8-bit floats, and rounds float64 to float32.
    return typed(fill, dtype) if dtype.itemsize == 1 or dtype == F64 else fill.text
