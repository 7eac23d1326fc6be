"""How a Func runs on a TPU core: its grid, what of its arrays is in VMEM when, and where its loops' carries are.

A loop is run inside of the kernel, over arrays that are in VMEM as a whole (*resident*), if they fit; otherwise it
becomes the last axis of the grid (`serial`), so that Pallas' pipeline brings the arrays tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations, takewhile
from math import prod
from typing import Literal

from tilekern import source
from tilekern.errors import ResourceError
from tilekern.ir.analysis.ranges import Interval, analyze
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.types import DType
from tilekern.lower.mosaic.chip import LANES, Chip, padded_bytes
from tilekern.lower.mosaic.emit.row_dma import fetchable, fetched_bytes, layout_in_place
from tilekern.lower.mosaic.emit.vectors import Forms, is_vector, shape_in
from tilekern.lower.mosaic.plan.grid_loops import Serial, as_pairs, serial_of
from tilekern.lower.mosaic.plan.hbm_layout import Layout, check_blocks, layout
from tilekern.lower.mosaic.plan.output_blocks import Visits
from tilekern.lower.mosaic.plan.pipelined_loops import Pipe, count_loops, pipes_of
from tilekern.lower.mosaic.plan.scalar_prefetch import Ahead, compute_ahead
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.unroll import Rounds, rounds_of, trips
from tilekern.lower.mosaic.plan.vmem_estimate import spilled_bytes
from tilekern.lower.mosaic.plan.windows import Role, Window, axes_of, merge, opened, opened_role, window_of
from tilekern.lower.mosaic.storage import stored_dtype, widened
from tilekern.lower.rewrite.constant_inputs import constants_as_inputs

_MOST_AXES = 6  # of a grid whose orders are tried
_A_ROW = 16  # operations that read or write one, at least


@dataclass(frozen=True)
class Scratch:
    """A buffer that lives as long as the kernel runs: in VMEM, of a scalar in scalar memory."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, eq=False)
class Plan:
    """How a Func runs.

    Attributes:
      func: the Func; its last inputs are constant arrays, then tables of scalars.
      ranges: what is known of integers.
      constants: their values.
      ahead: what fills the tables.
      scalars: which scalars are known before a program runs.
      order: the numbers of the Func's axes in the order of the grid, outermost first; without those of `serial.pairs`.
      serial: the chain of loops that is the last axis of the grid, if one is.
      pipes: the loops that have pipelines of their own.
      layouts: for each access, how it sees its array; None where there is nothing to see.
      inputs: what Pallas fetches, one operand each.
      far: what stays in HBM, for pipelines to fetch.
      fetched: of that, what is read row by row, each by a copy of its own.
      outputs: what it writes back, or a pipeline does.
      visits: which blocks of an output are written when.
      forms: the forms of vectors.
      slots: the number of the scratch buffer that holds a value.
      scratch: the buffers.
    """

    func: Func
    chip: Chip
    ranges: Mapping[Value, Interval]
    constants: tuple[Array, ...]
    ahead: tuple[Func, ...]
    scalars: Scalars
    order: tuple[int, ...]
    serial: Serial | None
    pipes: Mapping[Fold, Pipe]
    layouts: Mapping[MemoryOp, Layout | None]
    inputs: tuple[Layout, ...]
    far: tuple[Layout, ...]
    fetched: frozenset[Layout]
    outputs: Mapping[Value, Layout]
    visits: Visits
    forms: Forms
    slots: Mapping[Value, int]
    scratch: tuple[Scratch, ...]

    @cached_property
    def rounds(self) -> Mapping[Fold, Rounds]:
        """How the loops inside of the kernel are written out."""
        outside = {*(self.serial.chain if self.serial else ()), *self.pipes}
        inside = (op for op in self.func.walk() if isinstance(op, Fold) and op not in outside)
        return {op: rounds_of(op, self.ranges) for op in inside}

    @property
    def written_out(self) -> Mapping[Op, int]:
        """The operations of accesses that are made row by row."""
        found = dict[Op, int]()
        for op, seen in self.layouts.items():
            roles = () if seen is None else seen.window.roles
            rows = prod(d.size for d, role in zip(op.access.dims, roles, strict=False) if role.kind == "rows")
            found[op] = rows * _A_ROW if rows > 1 else 1
        return found

    @property
    def piped(self) -> frozenset[Value]:
        """The outputs that pipelines write."""
        return frozenset(p for pipe in self.pipes.values() for p in pipe.outputs)

    @property
    def grid(self) -> tuple[int, ...]:
        """The steps along each axis of the grid."""
        steps = (self.serial.steps,) if self.serial else ()
        return (*(self.func.grid[n] for n in self.order), *steps)

    @cached_property
    def buffers(self) -> tuple[tuple[str, int], ...]:
        """What takes VMEM: a name and bytes each. A block that another one follows has two buffers.

        "values" are those that do not fit the registers, an estimate.
        """
        blocks = (*self.inputs, *(b for p, b in self.outputs.items() if p not in self.piped))
        found = [(b.window.param.name, self._copies(b) * _block_bytes(b)) for b in blocks]
        in_turn = [
            [b for b in self.far if b.window in pipe.inputs] + [self.outputs[p] for p in pipe.outputs]
            for pipe in self.pipes.values()
        ]
        most = max(in_turn, key=lambda bs: sum(map(_block_bytes, bs)), default=list[Layout]())
        found += [(b.window.param.name, 2 * _block_bytes(b)) for b in most]
        rows = [op for op, found in self.layouts.items() if found in self.fetched]
        found += [(op.ref.name, fetched_bytes(op)) for op in rows]
        kept = [s for n, s in enumerate(self.scratch) if s.shape and n not in self._forwarded]
        found += [("carries", padded_bytes(s.shape, s.dtype)) for s in kept]
        return (*found, ("values", spilled_bytes(self.func.body, self.chip, self.rounds, self.layouts)))

    @property
    def semantics(self) -> tuple[Literal["parallel", "arbitrary"], ...]:
        """Of each axis of the grid, whether two cores may share its steps out."""
        if self.piped or not self.grid:
            return ("arbitrary",) * max(1, len(self.grid))
        return tuple("parallel" if free else "arbitrary" for free in self.visits.separate())

    @property
    def vmem_limit(self) -> int:
        """What the compiler is told to stay below: what is not granted to a kernel, XLA may use around it."""
        return min(max(self.vmem * 3 // 2 + (4 << 20), self.chip.vmem_default), self.chip.vmem_limit)

    @property
    def _forwarded(self) -> frozenset[int]:
        """Buffers of carries that the compiler does without: all iterations are written out, all lanes are stored."""
        written_out = {op for op, rounds in self.rounds.items() if not rounds.repeated}
        folds = [op for op in self.func.walk() if isinstance(op, Fold)]
        carried = {op: {self.slots[r] for r in op.results if r in self.slots} for op in folds}
        there = {n for op in folds if op not in written_out for n in carried[op]}
        gone = {n for op in written_out for n in carried[op]} - there
        return frozenset(n for n in gone if self.scratch[n].shape and self.scratch[n].shape[-1] % LANES == 0)

    def _copies(self, found: Layout) -> int:
        """How many buffers a block has: two, if another one ever follows it on a core."""
        if prod(self.grid) <= self.chip.cores and "parallel" in self.semantics:
            return 1
        changes = zip(self.visits.changes(found.window), self.grid, strict=True)
        return 1 + any(moves and steps > 1 for moves, steps in changes)

    @property
    def vmem(self) -> int:
        """The bytes of all buffers."""
        return sum(size for _, size in self.buffers)


def _block_bytes(found: Layout) -> int:
    """The compiler counts in units of 1 KiB."""
    size = padded_bytes(found.buffer, found.window.param.ref.dtype)
    return -(-size // 1024) * 1024


def plan(func: Func, chip: Chip) -> Plan:
    """The best plan for a legal Func that fits the chip.

    Raises:
      ResourceError: none fits.
    """
    found = list[Plan]()
    for candidate in candidates(func, chip):
        if candidate.vmem <= chip.vmem_budget:
            _check_blocks(candidate)
            return candidate
        found.append(candidate)
    raise _too_large(min(found, key=lambda p: p.vmem))


def _check_blocks(found: Plan) -> None:
    for op, seen in found.layouts.items():
        if seen is not None and seen not in found.fetched:
            with source.at(op.loc):
                check_blocks(seen)


def candidates(func: Func, chip: Chip) -> Iterator[Plan]:
    """The plans in the order in which they are fast."""
    closed = constants_as_inputs(func, "constant")
    ahead = compute_ahead(closed.func, chip.table_bytes)
    planned = partial(_planned, ahead, closed.constants, chip)
    resident = planned()
    held = _held(resident)
    if held:
        yield _completed(ahead, closed.constants, chip, resident.scalars, None, {}, held=held)
    yield resident
    serial, scalars = serial_of(ahead.func), resident.scalars
    dynamic = False
    if serial is not None and _is_known(serial, scalars):
        paired = as_pairs(ahead.func, serial, scalars)
        if paired is not None:
            yield planned(paired)
        dynamic = any(scalars.reads(b) for fold in serial.chain for b in (fold.start, fold.stop))
        if not dynamic:
            yield planned(serial)
    piped = _planned_pipes(ahead, closed.constants, chip)
    if piped is not None:
        yield piped
    if serial is not None and dynamic:
        yield planned(serial)
    far = fetchable(_windows(ahead.func, scalars))
    if far:
        yield _completed(ahead, closed.constants, chip, scalars, None, {}, far)


def _held(found: Plan) -> frozenset[Window]:
    """The windows of inputs whose blocks an array chooses, where fetching these moves more than to hold all of them.

    It is twice the bytes at least, for what is held is fetched before the first program runs, and not beside it.
    """

    def moved(window: Window) -> int:
        changes = zip(found.visits.changes(window), found.grid, strict=True)
        last = max((n for n, (moves, steps) in enumerate(changes, 1) if moves and steps > 1), default=0)
        return prod(found.grid[:last]) * _block_bytes(layout(window))

    chosen: dict[Value, list[Window]] = {}
    for block in found.inputs:
        if block.window.param.ref.role == "in" and _held_open(block.window, found.scalars) != block.window:
            chosen.setdefault(block.window.param, []).append(block.window)
    kept = frozenset[Window]()
    for windows in chosen.values():
        held = {_held_open(w, found.scalars) for w in windows}
        if 2 * sum(map(moved, held)) <= sum(map(moved, windows)):
            kept |= frozenset(windows)
    return kept


def _held_open(window: Window, scalars: Scalars) -> Window:
    """The window with all of the dims in VMEM whose places are read from arrays."""
    return replace(window, roles=tuple(opened_role(r) if _reads(r, scalars) else r for r in window.roles))


def _reads(role: Role, scalars: Scalars) -> bool:
    return any(scalars.reads(role.operands[t.operand]) for t in role.position.terms)


def _is_known(serial: Serial, scalars: Scalars) -> bool:
    """Whether the index maps can compute where the loop starts and stops."""
    return all(scalars.key(b) is not None for fold in serial.chain for b in (fold.start, fold.stop))


def _too_large(best: Plan) -> ResourceError:
    bill = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in sorted(best.buffers, key=lambda b: -b[1])[:6])
    there = best.chip.vmem_budget / 2**20
    with source.at(best.func.loc):
        return ResourceError(
            f"{best.func.name} needs more VMEM than a core of {best.chip.name} has",
            expected=f"at most {there:.1f} MiB in all; a block that another one follows counts twice",
            got=f"{best.vmem / 2**20:.1f} MiB: {bill}",
            fix=f"take smaller blocks, or loop over what is loaded as a whole{_cause(best)}",
        )


def _cause(best: Plan) -> str:
    """The access because of which the largest buffer holds all of a dim, and what would help."""
    seen = [(op, found) for op, found in best.layouts.items() if found is not None and found not in best.fetched]
    op, found = max(seen, key=lambda pair: _block_bytes(pair[1]), default=(None, None))
    kinds = {role.kind for role in found.window.roles} if found else set[str]()
    if op is None or not kinds & {"rows", "aligned"}:
        return ""
    start = f"; {op.ref.name} is there as a whole" + (f" for its access at line {op.loc.line}" if op.loc.line else "")
    if "rows" in kinds:
        return f"{start}, at any place: take tiles at multiples of their sizes"
    return f"{start}, of a tile that is known only while the program runs"


def _planned(ahead: Ahead, constants: tuple[Array, ...], chip: Chip, serial: Serial | None = None) -> Plan:
    scalars = Scalars(ahead.func, chip.table_bytes)
    if serial is not None:
        for fold in serial.chain:
            scalars.count(fold.body.args[0], serial.index)
    return _completed(ahead, constants, chip, scalars, serial, {})


def _planned_pipes(ahead: Ahead, constants: tuple[Array, ...], chip: Chip) -> Plan | None:
    """The plan in which all loops of the top level have pipelines of their own."""
    scalars = Scalars(ahead.func, chip.table_bytes)
    count_loops(ahead.func, scalars)
    pipes = pipes_of(ahead.func, _windows(ahead.func, scalars), scalars)
    return None if pipes is None else _completed(ahead, constants, chip, scalars, None, pipes)


def _completed(
    ahead: Ahead,
    constants: tuple[Array, ...],
    chip: Chip,
    scalars: Scalars,
    serial: Serial | None,
    pipes: Mapping[Fold, Pipe],
    fetched: frozenset[Window] = frozenset(),
    held: frozenset[Window] = frozenset(),
) -> Plan:
    func = ahead.func
    windows = {op: _held_open(w, scalars) if w in held else w for op, w in _windows(func, scalars).items()}
    piped = frozenset(p for pipe in pipes.values() for p in pipe.outputs)
    followed = {w for pipe in pipes.values() for w in pipe.inputs} | fetched
    outputs = {p: merge(_of(p, windows)) for p in func.outputs if _of(p, windows)}
    blocks = {p: w for p, w in outputs.items() if p not in piped}
    order = _order(func, serial, list(blocks.values()), scalars)
    if not all(Visits(func, serial, order, scalars, blocks).in_a_row(param) for param in blocks):
        order = _order_of_least(func, serial, order, list(blocks.values()), scalars)
    for param, window in list(blocks.items()):
        for wider in (window, _in_a_row(func, serial, order, window, scalars), opened(window, scalars)):
            outputs[param] = blocks[param] = wider
            if Visits(func, serial, order, scalars, {param: wider}).in_a_row(param):
                break
    placed = {param: layout(window, param in piped) for param, window in outputs.items()}
    layouts: dict[MemoryOp, Layout | None] = {}
    inputs: dict[Window, Layout] = {}
    for op, window in windows.items():
        if op.ref in placed:
            layouts[op] = placed[op.ref]
            if op.ref.ref.role == "inout":
                inputs[placed[op.ref].window] = placed[op.ref]
        elif 0 in op.ref.ref.shape or op.ref in scalars.tables:
            layouts[op] = None
        else:
            if window not in inputs:
                inputs[window] = layout_in_place(window) if window in fetched else layout(window, window in followed)
            layouts[op] = inputs[window]
    forms = Forms(func)
    ranges = analyze(func)
    stepped = serial.chain if serial else tuple(pipes)
    slots, scratch = _scratch(func, stepped, serial.kept if serial else (), forms, ranges)
    return Plan(
        func=func,
        chip=chip,
        ranges=ranges,
        constants=constants,
        ahead=ahead.programs,
        scalars=scalars,
        order=order,
        serial=serial,
        pipes=pipes,
        layouts=layouts,
        inputs=tuple(found for window, found in inputs.items() if window not in followed),
        far=tuple(found for window, found in inputs.items() if window in followed),
        fetched=frozenset(found for window, found in inputs.items() if window in fetched),
        outputs=placed,
        visits=Visits(func, serial, order, scalars, blocks),
        forms=forms,
        slots=slots,
        scratch=scratch,
    )


def _windows(func: Func, scalars: Scalars) -> dict[MemoryOp, Window]:
    ops = [op for op in func.walk() if isinstance(op, MemoryOp)]
    return {op: window_of(op, scalars) for op in ops}


def _of(param: Value, windows: Mapping[MemoryOp, Window]) -> list[Window]:
    return [w for op, w in windows.items() if op.ref is param and prod(param.ref.shape)]


def _order(func: Func, serial: Serial | None, outputs: Sequence[Window], scalars: Scalars) -> tuple[int, ...]:
    """Axes on which more outputs depend are further out, so that a block is written in consecutive steps."""
    args = func.body.args
    counts = [0] * len(args)
    for window in outputs:
        depends = axes_of(window, scalars)
        for n, arg in enumerate(args):
            counts[n] += arg in depends
    paired = serial.pairs if serial else ()
    free = [n for n in range(len(args)) if n not in paired]
    return tuple(sorted(free, key=lambda n: (func.grid[n] == 1, -counts[n], n)))


def _order_of_least(
    func: Func, serial: Serial | None, order: tuple[int, ...], outputs: Sequence[Window], scalars: Scalars
) -> tuple[int, ...]:
    """The order in which outputs that are not written in consecutive steps take the least when they are opened."""

    def cost(order: tuple[int, ...]) -> int:
        return sum(_block_bytes(layout(_in_a_row(func, serial, order, w, scalars))) for w in outputs)

    moving = [n for n in order if func.grid[n] > 1]
    if len(moving) > _MOST_AXES:
        return order
    still = tuple(n for n in order if func.grid[n] <= 1)
    return min(((*moved, *still) for moved in permutations(moving)), key=cost)


def _in_a_row(func: Func, serial: Serial | None, order: Sequence[int], window: Window, scalars: Scalars) -> Window:
    """The window opened along the axes further in than one on which it does not depend: there, blocks would return."""
    args = func.body.args
    axes = [frozenset([args[n]]) for n in order if func.grid[n] > 1]
    if serial is not None:
        axes.append(frozenset([serial.index, *(args[n] for n in serial.pairs)]))
    depends = axes_of(window, scalars)
    outer = list(takewhile(lambda axis: axis & depends, axes))
    return opened(window, scalars, frozenset[Value]().union(*axes[len(outer) :]))


def _scratch(
    func: Func, stepped: Sequence[Fold], kept: Sequence[Value], forms: Forms, ranges: Mapping[Value, Interval]
) -> tuple[dict[Value, int], tuple[Scratch, ...]]:
    """A buffer for each carry, one for all folds that hand it on, and for values that are kept.

    Scalars are carried as they are, but by the loops of which Pallas takes the steps (`stepped`). All others that run
    once are no loops.
    """
    slots: dict[Value, int] = {}
    buffers: list[Scratch] = []

    def add(value: Value) -> int:
        tile = value.tile
        if not tile.shape:
            buffers.append(Scratch((), widened(tile.dtype)))
            return len(buffers) - 1
        shape = shape_in(forms.carried(value), *tile.shape) if is_vector(value) else tile.shape
        buffers.append(Scratch(shape, stored_dtype(tile.dtype)))
        return len(buffers) - 1

    for op in func.walk():
        if isinstance(op, Fold) and (op in stepped or trips(op, ranges) not in (0, 1)):
            for init, result in zip(op.inits, op.results, strict=True):
                if result.tile.size and (result.tile.shape or op in stepped):
                    slots[result] = slots[init] if init in slots else add(result)
    for value in kept:
        slots[value] = add(value)
    return slots, tuple(buffers)
