"""The plan of a Func for a TPU core: its grid, its loops, the layouts of its arrays, and the VMEM that these take."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Literal

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import MemoryOp
from tilekern.ir.records import record
from tilekern.lower.mosaic.calibration import OPS_PER_ROW, VMEM_LIMIT_FACTOR, VMEM_LIMIT_SLACK
from tilekern.lower.mosaic.chip import LANES, Chip, padded_bytes
from tilekern.lower.mosaic.plan.grid_loops import GridLoop
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.output_blocks import OutputBlocks
from tilekern.lower.mosaic.plan.pipelined_loops import Pipeline
from tilekern.lower.mosaic.plan.row_dma import row_buffer_bytes
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.scratch_buffers import Scratch
from tilekern.lower.mosaic.plan.unroll import Unrolling, unrolling_of
from tilekern.lower.mosaic.plan.vector_forms import VectorForms
from tilekern.lower.mosaic.plan.vmem_estimate import spilled_bytes


@record(eq=False)
class KernelPlan:
    """The plan of one Pallas kernel.

    Attributes:
      func: the Func. Its last inputs are the constant arrays, then the tables of prefetched scalars.
      chip: the TPU.
      ranges: the known intervals of integers.
      constants: the values of the constant arrays.
      table_programs: the Funcs that compute the tables, one for each.
      scalars: the scalars that index maps can compute.
      order: the axes of the Func, by number, in the order of the grid, outermost first, without
        the axes in `grid_loop.table_axes`.
      grid_loop: the chain of loops that is the last axis of the grid, if there is one.
      pipelines: the loops with a pipeline of their own.
      layouts: the layout of each access's array; None for an access that reads and writes nothing in VMEM.
      inputs: the layouts of the inputs whose blocks Pallas fetches, one operand each.
      hbm_inputs: the layouts of the inputs that stay in HBM until a pipeline, or a copy of rows, fetches them.
      row_dma_inputs: the layouts in `hbm_inputs` whose rows are fetched one by one, each by a DMA.
      outputs: the layout of each output that is written.
      output_blocks: the output blocks that each step of the grid writes.
      forms: the forms of vectors.
      scratch_index: the scratch buffer of each value that has one, by its number.
      scratch: the scratch buffers.
    """

    func: Func
    chip: Chip
    ranges: Mapping[Value, Interval]
    constants: tuple[Array, ...]
    table_programs: tuple[Func, ...]
    scalars: Scalars
    order: tuple[int, ...]
    grid_loop: GridLoop | None
    pipelines: Mapping[Fold, Pipeline]
    layouts: Mapping[MemoryOp, Layout | None]
    inputs: tuple[Layout, ...]
    hbm_inputs: tuple[Layout, ...]
    row_dma_inputs: frozenset[Layout]
    outputs: Mapping[Value, Layout]
    output_blocks: OutputBlocks
    forms: VectorForms
    scratch_index: Mapping[Value, int]
    scratch: tuple[Scratch, ...]

    @cached_property
    def unrollings(self) -> Mapping[Fold, Unrolling]:
        """The unrolling of each loop inside of the kernel. A pipelined loop is not unrolled."""
        stepped = self.grid_loop.chain if self.grid_loop else ()
        inside = (op for op in self.func.walk() if isinstance(op, Fold) and op not in stepped)
        return {op: Unrolling() if op in self.pipelines else unrolling_of(op, self.ranges) for op in inside}

    @property
    def unrolled_ops(self) -> Mapping[Op, int]:
        """The number of operations that each access becomes; an access by rows becomes several for each row."""
        counts = dict[Op, int]()
        for op, layout in self.layouts.items():
            window_dims = () if layout is None else layout.window.dims
            rows = prod(d.size for d, seen in zip(op.access.dims, window_dims, strict=False) if seen.kind == "rows")
            counts[op] = rows * OPS_PER_ROW if rows > 1 else 1
        return counts

    @property
    def pipelined_outputs(self) -> frozenset[Value]:
        """The outputs that pipelines write."""
        return frozenset(p for pipeline in self.pipelines.values() for p in pipeline.outputs)

    @property
    def zeroed_outputs(self) -> tuple[Value, ...]:
        """The outputs that begin as arrays of zeros in HBM, for the grid does not initialise each of their blocks."""
        zeros = (p for p in self.outputs if p.ref.role in ("zeros", "sum"))
        return tuple(p for p in zeros if not self.output_blocks.covers_array(p))

    def skips_dead_steps(self, layout: Layout) -> bool:
        """True if a dead step of a grid loop has the block of the next live step, which is fetched early.

        A block of an output would be written to HBM once more, with stale elements, and nothing would initialise the
        blocks of dead steps.
        """
        return layout.window.param not in self.outputs

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of steps along each axis of the grid."""
        steps = (self.grid_loop.steps,) if self.grid_loop else ()
        return (*(self.func.grid[n] for n in self.order), *steps)

    @property
    def semantics(self) -> tuple[Literal["parallel", "arbitrary"], ...]:
        """Pallas' semantics of each axis of the grid: two cores may share the steps of a parallel one."""
        if self.pipelined_outputs or not self.grid:
            return ("arbitrary",) * max(1, len(self.grid))
        return tuple("parallel" if free else "arbitrary" for free in self.output_blocks.independent_axes())

    @cached_property
    def vmem_buffers(self) -> tuple[tuple[str, int], ...]:
        """The name and the bytes of each buffer in VMEM; both buffers of a double-buffered block count.

        The last entry, "values", estimates the values that do not fit the registers.
        """
        blocks = (*self.inputs, *(b for p, b in self.outputs.items() if p not in self.pipelined_outputs))
        buffers = [(b.window.param.name, self._copies(b) * b.block_bytes) for b in blocks]
        buffers += [(b.window.param.name, 2 * b.block_bytes) for b in self._largest_pipeline()]
        rows = [op for op, layout in self.layouts.items() if layout in self.row_dma_inputs]
        buffers += [(op.ref.name, row_buffer_bytes(op)) for op in rows]
        carries = [s for n, s in enumerate(self.scratch) if s.shape and n not in self._register_carries]
        buffers += [("carries", padded_bytes(s.shape, s.dtype)) for s in carries]
        return (*buffers, ("values", spilled_bytes(self.func.body, self.chip, self.unrollings, self.layouts)))

    @property
    def vmem_bytes(self) -> int:
        """The bytes of all buffers in VMEM."""
        return sum(size for _, size in self.vmem_buffers)

    @property
    def vmem_limit(self) -> int:
        """The bytes of VMEM that the compiler may give the kernel; XLA uses the rest around the call."""
        return min(
            max(int(self.vmem_bytes * VMEM_LIMIT_FACTOR) + VMEM_LIMIT_SLACK, self.chip.vmem_default),
            self.chip.vmem_limit,
        )

    def _largest_pipeline(self) -> list[Layout]:
        """The layouts of the pipeline with the largest blocks: pipelines run one after the other."""
        pipeline_layouts = (
            [b for b in self.hbm_inputs if b.window in pipeline.inputs] + [self.outputs[p] for p in pipeline.outputs]
            for pipeline in self.pipelines.values()
        )
        return max(pipeline_layouts, key=lambda layouts: sum(b.block_bytes for b in layouts), default=list[Layout]())

    @property
    def _register_carries(self) -> frozenset[int]:
        """The numbers of the scratch buffers whose carries stay in registers, for their loop is unrolled whole."""
        unrolled = {op for op, unrolling in self.unrollings.items() if not unrolling.is_loop}
        folds = [op for op in self.func.walk() if isinstance(op, Fold)]
        carried = {op: {self.scratch_index[r] for r in op.results if r in self.scratch_index} for op in folds}
        in_memory = {n for op in folds if op not in unrolled for n in carried[op]}
        in_registers = {n for op in unrolled for n in carried[op]} - in_memory
        # The compiler forwards a store to a load only where the store writes all lanes of the registers.
        return frozenset(n for n in in_registers if self.scratch[n].shape and self.scratch[n].shape[-1] % LANES == 0)

    def _copies(self, layout: Layout) -> int:
        """The number of buffers of a block: two if another block ever follows it on a core, else one."""
        if prod(self.grid) <= self.chip.cores and "parallel" in self.semantics:
            return 1
        axes = zip(self.output_blocks.moving_axes(layout.window), self.grid, strict=True)
        return 1 + any(moves and steps > 1 for moves, steps in axes)
