"""Plan a Func for a TPU core: the first candidate that fits VMEM, in the order of expected speed.

resident    loops run inside of the kernel, over arrays that are in VMEM as a whole
grid loop   one chain of loops is the last axis of the grid: Pallas' pipeline fetches the arrays tile by tile
pipelines   loops inside of the kernel, each with a pipeline that fetches its tiles
row DMA     loops inside of the kernel; arrays that are read row by row stay in HBM
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from tilekern import source
from tilekern.debug_options import debug_options
from tilekern.errors import ResourceError
from tilekern.ir.analysis.ranges import analyze
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.records import record
from tilekern.lower.mosaic.calibration import EXPOSED_BYTES, RESIDENT_GAIN
from tilekern.lower.mosaic.chip import Chip
from tilekern.lower.mosaic.plan.grid_loops import GridLoop, find_grid_loop, with_step_table
from tilekern.lower.mosaic.plan.hbm_layout import Layout, check_blocks, layout_of
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.output_blocks import OutputBlocks
from tilekern.lower.mosaic.plan.output_windows import place_outputs
from tilekern.lower.mosaic.plan.pipelined_loops import Pipeline, add_loop_indices, find_pipelines
from tilekern.lower.mosaic.plan.row_dma import row_dma_layout, row_dma_windows
from tilekern.lower.mosaic.plan.scalar_prefetch import ScalarPrefetch, prefetch_scalars
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.scratch_buffers import allocate_scratch
from tilekern.lower.mosaic.plan.vector_forms import VectorForms
from tilekern.lower.mosaic.plan.verify_plan import verify_plan
from tilekern.lower.mosaic.plan.windows import Window, WindowDim, merge, resident_dim, window_of
from tilekern.lower.rewrite.constant_inputs import constants_as_inputs


def plan_kernel(func: Func, chip: Chip) -> KernelPlan:
    """The first candidate plan of a legal Func that fits the chip's VMEM. `TILEKERN_DEBUG=verify` verifies the plan.

    Raises:
      ResourceError: no candidate fits.
      TargetError: a block is not aligned to the tiles of VMEM.
    """
    refused = list[KernelPlan]()
    for candidate in candidates(func, chip):
        if candidate.vmem_bytes <= chip.vmem_budget:
            _check_blocks(candidate)
            if "verify" in debug_options():
                verify_plan(candidate)
            return candidate
        refused.append(candidate)
    raise _too_large(min(refused, key=lambda p: p.vmem_bytes))


def candidates(func: Func, chip: Chip) -> Iterator[KernelPlan]:
    """The candidate plans of a legal Func, in the order of expected speed."""
    closed = constants_as_inputs(func, "constant")
    planner = _Planner(prefetch_scalars(closed.func, chip.table_bytes), closed.constants, chip)
    resident = planner.plan()
    scalars = resident.scalars
    inputs = _resident_inputs(resident)
    grid_loop = find_grid_loop(planner.func)
    if grid_loop is not None and _fetches_alone(resident) and _is_static(grid_loop, scalars):
        yield planner.plan(grid_loop)
    if inputs:
        yield planner.complete(scalars, resident=inputs)
    yield resident
    dynamic = False
    if grid_loop is not None and _has_known_bounds(grid_loop, scalars):
        tabled = with_step_table(planner.func, grid_loop, scalars)
        if tabled is not None:
            yield planner.plan(tabled)
        # Bounds read from arrays may leave many steps without a tile: pipelines have none, and come first.
        dynamic = not _is_static(grid_loop, scalars)
        if not dynamic:
            yield planner.plan(grid_loop)
    pipelined = planner.plan_pipelines()
    if pipelined is not None:
        yield pipelined
    if grid_loop is not None and dynamic:
        yield planner.plan(grid_loop)
    by_rows = row_dma_windows(_windows(planner.func, scalars))
    if by_rows:
        yield planner.complete(scalars, row_dma=by_rows)


def _fetches_alone(resident: KernelPlan) -> bool:
    """True for a single program whose arrays take long to fetch: no other program computes meanwhile."""
    return prod(resident.grid) == 1 and resident.vmem_bytes >= EXPOSED_BYTES


def _is_static(grid_loop: GridLoop, scalars: Scalars) -> bool:
    """True if the bounds of a chain of loops are computed without arrays."""
    bounds = [b for fold in grid_loop.chain for b in (fold.start, fold.stop)]
    return _has_known_bounds(grid_loop, scalars) and not any(map(scalars.reads_array, bounds))


@record
class _Planner:
    """Completes the plans of one Func: chosen loops in, layouts and buffers out."""

    prefetch: ScalarPrefetch
    constants: tuple[Array, ...]
    chip: Chip

    @property
    def func(self) -> Func:
        return self.prefetch.func

    def plan(self, grid_loop: GridLoop | None = None) -> KernelPlan:
        """The plan whose loops are all inside of the kernel, except the loops of `grid_loop`."""
        scalars = Scalars(self.func, self.chip.table_bytes)
        if grid_loop is not None:
            for fold in grid_loop.chain:
                scalars.add_loop_index(fold.body.args[0], grid_loop.index)
        return self.complete(scalars, grid_loop)

    def plan_pipelines(self) -> KernelPlan | None:
        """The plan in which each loop of the top level has a pipeline of its own."""
        scalars = Scalars(self.func, self.chip.table_bytes)
        add_loop_indices(self.func, scalars)
        pipelines = find_pipelines(self.func, _windows(self.func, scalars), scalars, analyze(self.func))
        return None if pipelines is None else self.complete(scalars, pipelines=pipelines)

    def complete(
        self,
        scalars: Scalars,
        grid_loop: GridLoop | None = None,
        pipelines: Mapping[Fold, Pipeline] | None = None,
        row_dma: frozenset[Window] = frozenset(),
        resident: frozenset[Window] = frozenset(),
    ) -> KernelPlan:
        """The plan with these loops.

        Args:
          scalars: the scalars that index maps can compute.
          grid_loop: the chain of loops that is the last axis of the grid.
          pipelines: the loops with a pipeline of their own.
          row_dma: the windows of inputs whose rows are fetched from HBM one by one.
          resident: the windows of inputs of which all dims indexed by arrays shall be in VMEM as a whole.
        """
        func, loops = self.func, pipelines or {}
        windows = _windows(func, scalars)
        windows = {op: _resident_where_read(w, scalars) if w in resident else w for op, w in windows.items()}
        written = {p: merge(accessed) for p in func.outputs if (accessed := _windows_of(p, windows))}
        pipelined = frozenset(p for pipeline in loops.values() for p in pipeline.outputs)
        blocks = {p: w for p, w in written.items() if p not in pipelined}
        order, blocks = place_outputs(func, grid_loop, blocks, scalars)
        outputs = {p: layout_of(blocks.get(p, window), whole=p in pipelined) for p, window in written.items()}
        fetched = {w for pipeline in loops.values() for w in pipeline.inputs} | row_dma
        layouts, inputs = _layouts(windows, outputs, scalars, fetched, row_dma)
        forms, ranges = VectorForms(func), analyze(func)
        stepped = grid_loop.chain if grid_loop else tuple(loops)
        scratch_index, scratch = allocate_scratch(func, stepped, grid_loop.saved if grid_loop else (), forms, ranges)
        return KernelPlan(
            func=func,
            chip=self.chip,
            ranges=ranges,
            constants=self.constants,
            table_programs=self.prefetch.programs,
            scalars=scalars,
            order=order,
            grid_loop=grid_loop,
            pipelines=loops,
            layouts=layouts,
            inputs=tuple(layout for window, layout in inputs.items() if window not in fetched),
            hbm_inputs=tuple(layout for window, layout in inputs.items() if window in fetched),
            row_dma_inputs=frozenset(layout for window, layout in inputs.items() if window in row_dma),
            outputs=outputs,
            output_blocks=OutputBlocks(func, grid_loop, order, scalars, blocks),
            forms=forms,
            scratch_index=scratch_index,
            scratch=scratch,
        )


def _layouts(
    windows: Mapping[MemoryOp, Window],
    outputs: Mapping[Value, Layout],
    scalars: Scalars,
    fetched: set[Window],
    row_dma: frozenset[Window],
) -> tuple[dict[MemoryOp, Layout | None], dict[Window, Layout]]:
    """The layout of each access's array, and the layouts of inputs by their windows."""
    layouts: dict[MemoryOp, Layout | None] = {}
    inputs: dict[Window, Layout] = {}
    for op, window in windows.items():
        if op.ref in outputs:
            layouts[op] = outputs[op.ref]
            if op.ref.ref.role == "inout":
                inputs[outputs[op.ref].window] = outputs[op.ref]
        elif 0 in op.ref.ref.shape or op.ref in scalars.tables:
            layouts[op] = None
        else:
            if window not in inputs:
                inputs[window] = row_dma_layout(window) if window in row_dma else layout_of(window, window in fetched)
            layouts[op] = inputs[window]
    return layouts, inputs


def _windows(func: Func, scalars: Scalars) -> dict[MemoryOp, Window]:
    ops = [op for op in func.walk() if isinstance(op, MemoryOp)]
    return {op: window_of(op, scalars) for op in ops}


def _windows_of(param: Value, windows: Mapping[MemoryOp, Window]) -> list[Window]:
    return [w for op, w in windows.items() if op.ref is param and prod(param.ref.shape)]


def _has_known_bounds(grid_loop: GridLoop, scalars: Scalars) -> bool:
    """True if the index maps can compute the bounds of all loops of a chain."""
    return all(scalars.key(b) is not None for fold in grid_loop.chain for b in (fold.start, fold.stop))


# --- inputs in VMEM as a whole ---


def _resident_inputs(plan: KernelPlan) -> frozenset[Window]:
    """The windows whose blocks an array chooses, of each input that moves fewer bytes if it is in VMEM as a whole."""

    def moved(window: Window) -> int:
        axes = zip(plan.output_blocks.moving_axes(window), plan.grid, strict=True)
        last = max((n for n, (moves, steps) in enumerate(axes, 1) if moves and steps > 1), default=0)
        return prod(plan.grid[:last]) * layout_of(window).block_bytes

    chosen: dict[Value, list[Window]] = {}
    for block in plan.inputs:
        is_input = block.window.param.ref.role == "in"
        if is_input and _resident_where_read(block.window, plan.scalars) != block.window:
            chosen.setdefault(block.window.param, []).append(block.window)
    resident = frozenset[Window]()
    for windows in chosen.values():
        whole = {_resident_where_read(w, plan.scalars) for w in windows}
        if RESIDENT_GAIN * sum(map(moved, whole)) <= sum(map(moved, windows)):
            resident |= frozenset(windows)
    return resident


def _resident_where_read(window: Window, scalars: Scalars) -> Window:
    """The window with all of the dims in VMEM whose positions are read from arrays."""
    return replace(window, dims=tuple(resident_dim(d) if _reads_array(d, scalars) else d for d in window.dims))


def _reads_array(dim: WindowDim, scalars: Scalars) -> bool:
    return any(scalars.reads_array(dim.operands[t.operand]) for t in dim.position.terms)


# --- plans that are refused ---


def _check_blocks(plan: KernelPlan) -> None:
    for op, layout in plan.layouts.items():
        if layout is not None and layout not in plan.row_dma_inputs:
            with source.at(op.loc):
                check_blocks(layout)


def _too_large(best: KernelPlan) -> ResourceError:
    largest = sorted(best.vmem_buffers, key=lambda buffer: -buffer[1])[:6]
    bill = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in largest)
    with source.at(best.func.loc):
        return ResourceError(
            f"{best.func.name} needs more VMEM than a core of {best.chip.name} has",
            expected=f"at most {best.chip.vmem_budget / 2**20:.1f} MiB in all; "
            "a block that another one follows counts twice",
            got=f"{best.vmem_bytes / 2**20:.1f} MiB: {bill}",
            fix=f"take smaller blocks, or loop over what is loaded as a whole{_cause(best)}",
        )


def _cause(best: KernelPlan) -> str:
    """The end of the fix: names the access that makes the largest block hold all of a dim; "" if no access does."""
    accesses = [(op, layout) for op, layout in best.layouts.items() if layout and layout not in best.row_dma_inputs]
    op, largest = max(accesses, key=lambda pair: pair[1].block_bytes, default=(None, None))
    kinds = {dim.kind for dim in largest.window.dims} if largest else set[str]()
    if op is None or not kinds & {"rows", "aligned"}:
        return ""
    line = f" for its access at line {op.loc.line}" if op.loc.line else ""
    start = f"; {op.ref.name} is there as a whole{line}"
    if "rows" in kinds:
        return f"{start}, at any place: take tiles at multiples of their sizes"
    return f"{start}, of a tile that is known only while the program runs"
