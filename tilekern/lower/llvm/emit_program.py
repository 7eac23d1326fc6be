"""Emits a legal Func as a module: a function for a program of the grid, another for a task of several programs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from tilekern.debug_options import debug_options
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value, round_up, unknown_op
from tilekern.ir.debug import Assert, Print
from tilekern.ir.dynamic import DynamicUpdateSlice, Take
from tilekern.ir.memory import Atomic, Load, Store
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.quote import visible
from tilekern.ir.shape import Concatenate, Pad, Reshape
from tilekern.lower.llvm.element_index import Index, is_virtual
from tilekern.lower.llvm.element_types import register_type
from tilekern.lower.llvm.emit import atomics, data_movement, debug_ops, loop_nests, reductions, sorts
from tilekern.lower.llvm.emit.atomics import UpdateTarget
from tilekern.lower.llvm.emit.elements import Elements
from tilekern.lower.llvm.gemm import dots
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I64, PTR, VOID, Reg
from tilekern.lower.llvm.plan.buffers import assign_offsets
from tilekern.lower.llvm.plan.loop_fusion import fuse_loops
from tilekern.lower.llvm.plan.steps import BufferCopies, Expressions, LoopNest, Plan, Step
from tilekern.lower.llvm.plan.task_partition import (
    ALIGNMENT,
    PrivateCopy,
    Runs,
    TaskPartition,
    axis_groups,
    is_float_sum,
    partition_tasks,
)
from tilekern.lower.llvm.plan.verify_plan import verify_plan
from tilekern.lower.llvm.program import TASK, Program
from tilekern.lower.llvm.runtime.machine import Machine

if TYPE_CHECKING:
    from tilekern.lower.llvm.debug_lines import DebugLines

_PROGRAM = "program"

# With `TILEKERN_DEBUG=poison`, all bytes of scratch memory where a program begins: NaN in every float, -1 in integers.
_POISON = 0xFF


def make_plan(func: Func, machine: Machine) -> Plan:
    """The plan of a legal Func: its steps, and the offsets of its buffers. `TILEKERN_DEBUG=verify` verifies it."""
    planned = fuse_loops(func, partial(_scratch_of, machine))
    assign_offsets(func, planned)
    if "verify" in debug_options():
        verify_plan(func, planned)
    return planned


def emit(func: Func, planned: Plan, machine: Machine) -> Program:
    """The program of a legal Func.

    Its arguments are the Func's inputs. Its results are the Func's outputs, the partial sums of `partial_sums_of`, and
    the number of an assertion that failed if there are assertions.
    """
    module = Module(machine, _debug_lines(func))
    partition = partition_tasks(func)
    body, runs = _ProgramEmitter(func, planned, partition), partition.runs
    parameters = [("buffers", PTR), ("number", I64), ("scratch", PTR)]

    def task(code: Code, addresses: Reg, number: Reg, scratch: Reg) -> None:
        begin, end = _run(code, runs, code.binary("udiv", number, partition.slices) if partition.slices > 1 else number)

        def run(n: Reg) -> None:
            code.call(_PROGRAM, VOID, addresses, n, number, scratch)

        with body.private_copies(code, addresses, scratch):
            if runs.length == 1:
                run(begin)
            else:
                code.loop(begin, end, 1, run)
        code.ret()

    of_program = [("buffers", PTR), ("number", I64), ("task", I64), ("scratch", PTR)]
    module.function(_PROGRAM, of_program, body.run, own_lines=True)
    module.function(TASK, parameters, task, attributes="", own_lines=True)
    outputs = func.outputs
    zeroed = [n for n, p in enumerate(outputs) if p.ref.role in ("zeros", "sum")]
    checks = body.checks
    zeroed += range(len(outputs), len(outputs) + len(partition.partial_sums) + bool(checks))
    scratch = _private_begin(planned) + partition.private_bytes if partition.private else planned.scratch
    prints = any(isinstance(op, Print) for op in func.walk())
    tasks = runs.count * partition.slices
    return Program(visible(func.name), module, tasks, scratch, tuple(zeroed), checks, prints, func.loc)


def _debug_lines(func: Func) -> DebugLines | None:
    if "perf" not in debug_options():
        return None
    from tilekern.lower.llvm.debug_lines import DebugLines  # which few processes need

    return DebugLines(func.loc)


def _scratch_of(machine: Machine, op: Op, expressions: Expressions) -> tuple[int, Any]:
    match op:
        case Dot():
            return dots.scratch_and_packing(op, expressions, machine)
        case Sort() | TopK():
            return sorts.scratch_bytes(op, machine), None
        case Print():
            return debug_ops.scratch_bytes(op), None
        case _:
            return 0, None


def _private_begin(planned: Plan) -> int:
    """The offset of the private copies in scratch memory."""
    return round_up(planned.scratch, ALIGNMENT)


class _ProgramEmitter:
    """Emits the function of one program of the grid."""

    def __init__(self, func: Func, planned: Plan, partition: TaskPartition) -> None:
        self._func, self._plan, self._partition = func, planned, partition
        self.checks = tuple(op for op in func.walk() if isinstance(op, Assert))
        self._array_numbers = {p: n for n, p in enumerate(func.inputs)}
        self._array_numbers |= {p: len(func.inputs) + n for n, p in enumerate(func.outputs)}

    @contextmanager
    def private_copies(self, code: Code, addresses: Reg, scratch: Reg) -> Generator[None]:
        """Fill private copies before the code that is emitted inside, and merge them after it."""
        copies = list(self._private(code, scratch))
        for private, base in copies:
            atomics.fill_private_copy(code, private, base)
        yield
        if copies:
            atomics.merge_private_copies(
                code,
                [
                    (private, base, self._array(code, addresses, self._array_numbers[private.ref]))
                    for private, base in copies
                ],
            )

    def _private(self, code: Code, scratch: Reg) -> Iterator[tuple[PrivateCopy, Reg]]:
        for private in self._partition.private:
            yield private, code.gep(scratch, _private_begin(self._plan) + private.offset)

    def _array(self, code: Code, addresses: Reg, number: int) -> Reg:
        return code.load(PTR, code.gep(addresses, number, "ptr"))

    def _set_update_targets(
        self, code: Code, addresses: Reg, task: Reg, arrays: dict[Value, Reg], scratch: Reg
    ) -> None:
        """Set the memory that a task updates for each array."""
        slices, first = self._partition.slices, len(self._func.inputs) + len(self._func.outputs)
        number, column = (code.binary(name, task, slices) for name in ("udiv", "urem")) if slices > 1 else (task, None)
        copy = _copy(code, self._partition, number)
        self._update_targets = {
            ref: UpdateTarget(arrays[ref], ref.ref.dtype, slices, column) for ref in self._partition.in_place
        }
        for n, sums in enumerate(self._partition.partial_sums):
            base = self._array(code, addresses, first + n)
            size = prod(sums.ref.ref.shape) * sums.dtype.itemsize
            base = code.gep(base, code.binary("mul nsw", copy, size)) if copy is not None else base
            self._update_targets[sums.ref] = UpdateTarget(base, sums.dtype, slices, column)
        if self.checks:
            self._failed = self._array(code, addresses, first + len(self._partition.partial_sums))
        self._private_refs = {private.ref for private in self._partition.private}
        self._update_targets |= {
            private.ref: UpdateTarget(base, private.ref.ref.dtype) for private, base in self._private(code, scratch)
        }

    def run(self, code: Code, addresses: Reg, number: Reg, task: Reg, scratch: Reg) -> None:
        """Emit the function of one program.

        Args:
          code: the function.
          addresses: points to the addresses of all arrays.
          number: the program's number.
          task: the number of its task.
          scratch: the scratch memory of the thread.
        """
        func = self._func
        arrays = {p: self._array(code, addresses, n) for p, n in self._array_numbers.items()}
        self._set_update_targets(code, addresses, task, arrays, scratch)
        if self._plan.scratch and "poison" in debug_options():
            code.fill(scratch, _POISON, self._plan.scratch)
        self._code = code
        self._e = Elements(code, func, arrays, scratch)
        for arg, index in zip(func.body.args, _decode(code, self._partition.axes, number), strict=True):
            self._e.registers[arg] = code.cast("trunc", index, "i32")
        self._block(func.body)
        code.ret()

    # --- blocks ---

    def _block(self, block: Block) -> None:
        """Emit a block in the present scope."""
        e = self._e
        with e.expressions.inside(self._plan.live_in[block]):
            for step in self._plan.steps[block]:
                e.targets = dict(step.produces)
                match step:
                    case LoopNest():
                        loop_nests.emit(e, step)
                    case BufferCopies():
                        self._copy(step)
                    case Step():
                        with self._code.at(step.op.loc):
                            self._step(step)
                e.expressions.buffers.update(step.produces)

    def _inner(self, block: Block) -> list[Reg]:
        """Emit a block in a scope of its own; returns its scalar results."""
        with self._e.scope():
            self._block(block)
            return [self._e.element(v, ()) for v in block.results if not v.tile.shape]

    def _copy(self, step: BufferCopies) -> None:
        e, code = self._e, self._code
        for source, target in step.moves:
            if source.root is not target.root and source.nbytes:
                code.copy(e.buffer_address(target), e.buffer_address(source), source.nbytes)

    def _step(self, step: Step) -> None:
        op, e = step.op, self._e
        match op:
            case Fold():
                self._fold(op)
            case While():
                self._while(op)
            case Switch():
                self._switch(op)
            case Dot():
                dots.emit(e, step)
            case Reduce():
                reductions.reduce(e, op)
            case Scan():
                reductions.scan(e, op)
            case LinearScan():
                reductions.linear_scan(e, op)
            case ArgReduce():
                reductions.arg_reduce(e, op)
            case Sort() | TopK():
                sorts.emit(e, step)
            case Concatenate():
                data_movement.concatenate(e, op)
            case Pad():
                data_movement.pad(e, op)
            case DynamicUpdateSlice():
                data_movement.update(e, op)
            case Take():
                data_movement.take(e, op)
            case Atomic():
                atomics.emit(
                    e,
                    op,
                    self._update_targets.get(op.ref) if op.ref in self._private_refs or is_float_sum(op) else None,
                )
            case Print():
                debug_ops.emit_print(e, step)
            case Assert():
                number = len(self.checks) - self.checks.index(op)
                debug_ops.emit_check(e, op.operands[0], number, self._failed)
            case Store():
                e.store_access(op, e.element(op.value, ()), (), op.mask)
            case Load() if not is_virtual(op) and op.result.tile.shape:
                self._load(op)
            case Load():
                e.registers[op.result] = e.load_access(op, ())
            case Reshape() if not is_virtual(op):  # of a tile of one element
                (x,) = op.operands
                e.registers[op.result] = e.element(x, tuple(Index() for _ in x.tile.shape))
            case _ if is_virtual(op):
                e.registers[op.result] = e.element(op.result, ())
            case _:
                raise unknown_op(op, __name__)

    def _load(self, op: Load) -> None:
        """Load a tile of an array that the program stores to."""
        e = self._e
        loop_nests.for_each_vector(
            e, op.result.tile.shape, lambda at, lanes: e.write(op.result, e.load_access(op, at, lanes), at)
        )

    # --- control ---

    def _fold(self, op: Fold) -> None:
        e, code, axis = self._e, self._code, op.axis
        first = self._tiles(op.start, axis, up=False)
        last = self._tiles(op.stop, axis, up=True)
        index, *carries = op.body.args
        scalars = [c for c in carries if not c.tile.shape]
        inits = [e.element(v, ()) for v in op.inits if not v.tile.shape]

        def body(i: Reg, *values: Reg) -> list[Reg]:
            turned = i
            if op.reverse:
                turned = code.binary("sub", code.binary("add", code.binary("sub", last, 1), first), i)
            outer, e.loops = e.loops, {index: -1 if op.reverse else 1}
            with e.scope():
                e.registers[index] = code.cast("trunc", turned, "i32")
                e.registers.update(zip(scalars, values, strict=True))
                yielded = self._inner(op.body)
            e.loops = outer
            return yielded

        finals = code.loop(_number(first), _number(last), 1, body, *inits)
        e.registers.update(zip((r for r in op.results if not r.tile.shape), finals, strict=True))

    def _tiles(self, bound: Value, axis: Axis, up: bool) -> Reg:
        """A bound of a fold in tiles, i64, rounded up or down."""
        wide = self._e.index_value(self._e.clamped_index(bound, axis.extent))
        if up:
            wide = self._code.binary("add", wide, axis.block - 1)
        return self._code.binary("udiv", wide, axis.block) if axis.block > 1 else wide

    def _while(self, op: While) -> None:
        e, code = self._e, self._code
        scalars = [n for n, v in enumerate(op.operands) if not v.tile.shape]
        cells = [code.alloca(register_type(op.operands[n].tile.dtype)) for n in scalars]
        for n, at in zip(scalars, cells, strict=True):
            code.store(e.element(op.operands[n], ()), at)
        head, then, done = code.fresh("while"), code.fresh("then"), code.fresh("done")
        code.branch(head)
        code.label(head)
        with e.scope():
            for region in op.regions:
                e.registers.update(
                    (region.args[n], code.load(register_type(region.args[n].tile.dtype), at))
                    for n, at in zip(scalars, cells, strict=True)
                )
                results = self._inner(region)
                if region is op.condition:
                    code.branch_if(results[0], then, done)
                    code.label(then)
                else:
                    for x, at in zip(results, cells, strict=True):
                        code.store(x, at)
        code.branch(head)
        code.label(done)
        for n, at in zip(scalars, cells, strict=True):
            e.registers[op.results[n]] = code.load(register_type(op.results[n].tile.dtype), at)

    def _switch(self, op: Switch) -> None:
        e, code = self._e, self._code
        scalars = [r for r in op.results if not r.tile.shape]
        if len(op.regions) == 1:
            self._block(op.regions[0])
            e.registers.update(
                (r, e.element(v, ()))
                for r, v in zip(op.results, op.regions[0].results, strict=True)
                if not r.tile.shape
            )
            return
        cells = [code.alloca(register_type(r.tile.dtype)) for r in scalars]
        labels, done = [code.fresh("case") for _ in op.regions], code.fresh("done")
        number = code.cast("trunc", e.index_value(e.clamped_index(op.operands[0], len(op.regions) - 1)), "i32")
        cases = " ".join(f"i32 {n}, label %{label}" for n, label in enumerate(labels))
        code.do(f"switch {number}, label %{labels[-1]} [{cases}]")
        for region, label in zip(op.regions, labels, strict=True):
            code.label(label)
            for x, at in zip(self._inner(region), cells, strict=True):
                code.store(x, at)
            code.branch(done)
        code.label(done)
        e.registers.update(
            (r, code.load(register_type(r.tile.dtype), at)) for r, at in zip(scalars, cells, strict=True)
        )


def _number(x: Reg) -> Reg | int:
    return x if x.text.startswith("%") else int(x.text)


# --- the grid --------------------------------------------------------------------------------------------------------


def _run(code: Code, runs: Runs, number: Reg) -> tuple[Reg, Reg]:
    """The number of the first program of a run, and that behind its last."""
    if runs.groups == 1:
        begin = code.binary("mul nsw", number, runs.length)
        return begin, code.intrinsic("llvm.smin", code.binary("add nsw", begin, runs.length), runs.group)
    first = code.binary("mul nsw", code.binary("udiv", number, runs.in_group), runs.group)
    within = code.binary("mul nsw", code.binary("urem", number, runs.in_group), runs.length)
    end = code.intrinsic("llvm.smin", code.binary("add nsw", within, runs.length), runs.group)
    return code.binary("add nsw", first, within), code.binary("add nsw", first, end)


def _copy(code: Code, partition: TaskPartition, run: Reg) -> Reg | None:
    """The number of the partial sum of a run; None if there is one."""
    total: Reg | None = None
    for digit in partition.copy_digits:
        part = code.binary("udiv", run, digit.div) if digit.div > 1 else run
        if digit.div * digit.mod < partition.runs.count:
            part = code.binary("urem", part, digit.mod)
        part = code.binary("mul nsw", part, digit.stride) if digit.stride > 1 else part
        total = part if total is None else code.binary("add nsw", total, part)
    return total


def _decode(code: Code, axes: tuple[Axis, ...], number: Reg) -> list[Reg]:
    """The tile index along each axis of program `number`, i64.

    The last axis runs fastest. A descending axis is counted from its end. The tiles of a group of an axis run before
    the next axis advances, so that programs that run at about the same time load the same tiles.
    """
    indices: dict[int, Reg] = {}
    undecoded = number
    for numbers in reversed(axis_groups(axes)):
        count, last = max(prod(axes[n].tiles for n in numbers), 1), numbers[-1]
        within = code.binary("urem", undecoded, count)
        if len(numbers) == 2:
            indices[last - 1], indices[last] = _grouped(code, axes[last - 1], axes[last], within)
        else:
            indices[last] = _turned(code, axes[last], within)
        undecoded = code.binary("udiv", undecoded, count)
    return [indices[n] for n in range(len(axes))]


def _turned(code: Code, axis: Axis, index: Reg) -> Reg:
    return code.binary("sub", axis.tiles - 1, index) if axis.descending else index


def _grouped(code: Code, first: Axis, second: Axis, within: Reg) -> tuple[Reg, Reg]:
    """The indices along two axes, of which the first is grouped. The last group may have fewer tiles."""
    members = max(first.group * second.tiles, 1)
    group, place = code.binary("udiv", within, members), code.binary("urem", within, members)
    begin = code.binary("mul", group, first.group)
    size = code.intrinsic("llvm.smin", code.binary("sub", first.tiles, begin), first.group)
    index = code.binary("add", begin, code.binary("urem", place, size))
    return _turned(code, first, index), _turned(code, second, code.binary("udiv", place, size))
