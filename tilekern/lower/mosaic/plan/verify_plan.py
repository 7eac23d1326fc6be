"""Verifies the plan of a kernel: each step reads whole values, in their places, before they are overwritten.

1. **Carries.** A loop, a step of a grid loop and an op read from a scratch buffer the carry, or the saved value, that
   was written there last. All values of one buffer have one type, and one form if they are vectors.
2. **Steps.** A step of a grid loop uses values of its own, saved values, and values that it computes again from inputs.
3. **Windows.** A window contains the elements of each access to it: at the same place, or the whole dim. Arrays in HBM
   are read inside of the pipelined loop that fetches their blocks.
4. **Blocks of outputs.** Steps that have one block are consecutive, whether their tiles run or not. Only the first
   step initialises the block. Cores share no block. Blocks that no step has begin as zeros.
5. **Pipelined outputs.** Each iteration writes its whole block.
6. **Tables.** Scalars that are computed before the kernel depend on inputs alone.

The verifier enumerates the steps of the grid, and follows the buffers of carries in the order of the emitter. It shares
no code with the choice of windows, of buffers, of grid loops and of pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilekern import source
from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.memory import Load, MemoryOp
from tilekern.lower.mosaic.plan.grid_loops import GridLoop
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.plan_rules import require
from tilekern.lower.mosaic.plan.scratch_contents import check_carries
from tilekern.lower.mosaic.plan.step_blocks import check_output_blocks, check_pipelined_outputs
from tilekern.lower.mosaic.plan.windows import WindowDim


def verify_plan(plan: KernelPlan) -> None:
    """Raise unless a plan obeys the rules above.

    Raises:
      PlanError: the plan breaks a rule.
    """
    with source.at(plan.func.loc):
        check_carries(plan)
        if plan.grid_loop is not None:
            _check_steps(plan, plan.grid_loop)
        _check_windows(plan)
        check_output_blocks(plan)
        check_pipelined_outputs(plan)
        _check_tables(plan)


# --- steps of a grid loop ---------------------------------------------------------------------------------------------


def _check_steps(plan: KernelPlan, grid_loop: GridLoop) -> None:
    """Rule 2."""
    args = plan.func.body.args
    before = {result: op for op in grid_loop.before for result in op.results}
    recomputed = {*before, *args, *plan.func.params}
    for fold in grid_loop.chain:
        _check_uses(fold.body, {*recomputed, *fold.body.args, fold.start, fold.stop})
    last = Block(args, tuple(grid_loop.after), ())
    _check_uses(last, {*recomputed, *grid_loop.chain[-1].results})
    later = [*(op for fold in grid_loop.chain for op in fold.body.ops), *grid_loop.after]
    used = [*(v for op in later for v in op.uses()), *(v for fold in grid_loop.chain for v in fold.body.results)]
    for op in backward_slice(grid_loop.before, used, set(grid_loop.saved)):
        for inner in op.walk():
            pure = inner.ref.ref.role == "in" if isinstance(inner, Load) else inner.pure
            require(pure, "each step computes an op again", "an op that reads inputs alone", inner.name)


def _check_uses(block: Block, available: set[Value]) -> None:
    """Check that the ops of a block use only their own results, and available values."""
    usable = {*available, *(result for op in block.walk() for result in op.results)}
    usable |= {arg for op in block.walk() for region in op.regions for arg in region.args}
    for value in (*(v for op in block.ops for v in op.uses()), *block.results):
        require(
            value in usable, "a step uses a value of another step", "a carry of its own, or a saved value", _of(value)
        )


def _of(value: Value) -> str:
    return f"{value.name or 'a value'}: {value.type}"


# --- windows ----------------------------------------------------------------------------------------------------------


def _check_windows(plan: KernelPlan) -> None:
    """Rule 3."""
    for op, layout in plan.layouts.items():
        if layout is None:
            continue
        with source.at(op.loc):
            require(layout.window.param is op.ref, "an access has the window of another array", _of(op.ref), "another")
            for number, window_dim in enumerate(layout.window.dims):
                _check_dim(plan, op, number, window_dim)
                if layout not in plan.row_dma_inputs:  # of which no block is in VMEM
                    _check_block(layout, number, window_dim)
    for fold in [op for op in plan.func.body.ops if isinstance(op, Fold)]:
        _check_fetched(plan, fold.body.walk(), plan.pipelines[fold].inputs if fold in plan.pipelines else ())
    _check_fetched(plan, (op for op in plan.func.body.ops if not isinstance(op, Fold)), ())


def _check_dim(plan: KernelPlan, op: MemoryOp, number: int, window_dim: WindowDim) -> None:
    dim = op.access.dims[number]
    if window_dim.kind in ("at", "tiled"):
        key = plan.scalars.position_key(dim.position, op.positions)
        is_tile = dim.kind == "block" and dim.size == window_dim.size and dim.position.is_multiple_of(dim.size)
        fits = key is not None and key == window_dim.key and (is_tile if window_dim.kind == "tiled" else dim.size == 1)
    elif window_dim.kind == "static":
        fits = dim.kind in ("block", "index") and not dim.position.terms
    elif window_dim.kind == "aligned":
        fits = dim.kind == "block" and dim.size == window_dim.size and dim.position.is_multiple_of(dim.size)
    else:
        fits = True
    place = f"dim {number} of {op.name}: {dim.kind} of {dim.size} at {dim.position}"
    require(fits or 0 in op.ref.ref.shape, "an access is outside of its window", _dim_words(window_dim), place)


def _dim_words(window_dim: WindowDim) -> str:
    place = f" at {window_dim.position}" if window_dim.kind in ("at", "tiled") else ""
    return f"{window_dim.kind} dim of {window_dim.size or 'all'} elements{place}"


def _check_block(layout: Layout, number: int, window_dim: WindowDim) -> None:
    """A block holds a tile of a "tiled" dim, one element of an "at" dim, and all elements of any other dim."""
    length = layout.window.param.ref.shape[number]
    dims = [d for d in layout.dims if d.dim == number]
    held = 1
    for dim in dims:
        if dim.use != "place" and not (dim.use == "tile" and window_dim.kind == "tiled"):
            held *= dim.block
    needed = {"at": 1, "tiled": window_dim.size}.get(window_dim.kind, length)
    got = f"{held} of dim {number} of {layout.window.param.name}"
    require(held >= needed or not dims, "a block lacks elements of its window", f"{needed} elements", got)


def _check_fetched(plan: KernelPlan, ops: Iterable[Op], fetched: Sequence[object]) -> None:
    """Check that arrays in HBM are accessed only by the loop that fetches them, and by copies of rows."""
    for op in ops:
        layout = plan.layouts.get(op) if isinstance(op, MemoryOp) else None
        if layout in plan.hbm_inputs and layout not in plan.row_dma_inputs:
            is_fetched = layout.window in fetched
            require(is_fetched, "a block in HBM is read", "an access inside of the loop that fetches it", op.name)


# --- tables -----------------------------------------------------------------------------------------------------------


def _check_tables(plan: KernelPlan) -> None:
    """Rule 6."""
    inputs = [param for param in plan.func.inputs if param.ref.role == "in"]
    for program in plan.table_programs:
        table = program.outputs[-1]  # behind the donated inputs
        loads = [op for op in program.walk() if isinstance(op, Load)]
        outputs = [op.ref for op in loads if op.ref.ref.role != "in"]
        require(not outputs, "a table depends on an output", "inputs", ", ".join(map(_of, outputs)))
        shapes = [param.ref.shape for param in inputs]
        require(table.ref.shape in shapes, "a table is no input", f"an input of {table.ref.shape}", str(shapes))
