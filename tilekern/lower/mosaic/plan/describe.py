"""A plan as text: the form of each loop and array with the user's lines, and the VMEM that each buffer takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

from tilekern.ir.control import Fold
from tilekern.ir.core import Op, Value
from tilekern.ir.quote import visible
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan

_KINDS = {
    "at": "one place",
    "tiled": "a tile of {size}",
    "static": "all",
    "aligned": "all, read in tiles of {size}",
    "rows": "all, read row by row",
}


def describe(plan: KernelPlan) -> str:
    """The text of a plan."""
    return "\n".join(map(visible, _lines(plan)))


def _lines(plan: KernelPlan) -> Iterator[str]:
    func = plan.func
    used, budget = plan.vmem_bytes / 2**20, plan.chip.vmem_budget / 2**20
    yield f"{func.name} on {plan.chip.name}: {used:.2f} MiB of {budget:.1f} MiB VMEM"
    yield "grid"
    names = [func.axes[n].name for n in plan.order]
    if plan.grid_loop is not None:
        names.append("step" if plan.grid_loop.table is not None else plan.grid_loop.chain[0].axis.name)
    for name, steps, meaning in zip(names, plan.grid, plan.semantics, strict=False):
        yield f"  {name}: {steps} steps, {meaning}"
    folds = [op for op in func.walk() if isinstance(op, Fold)]
    if folds:
        yield "loops"
        yield from (f"  {_line(op)}{op.axis.name}: {loop_words(plan, op)}" for op in folds)
    yield "arrays"
    for param in func.params:
        yield from _array(plan, param)
    yield "VMEM"
    for name, size in sorted(plan.vmem_buffers, key=lambda b: -b[1]):
        if size:
            yield f"  {name}: {size / 2**10:.0f} KiB"


def _line(op: Op) -> str:
    name = os.path.basename(op.loc.file)
    return f"{name}:{op.loc.line} " if op.loc.line else ""


def loop_words(plan: KernelPlan, op: Fold) -> str:
    """The form of a loop."""
    axis = f"{op.axis.extent} by {op.axis.block}"
    if op in plan.pipelines:
        return f"{axis}, a pipeline inside of the kernel fetches its tiles: its arrays do not fit VMEM as a whole"
    if plan.grid_loop is None or op not in plan.grid_loop.chain:
        factor = plan.unrollings[op].factor
        several = f", {factor} tiles at once" if factor > 1 else ""
        return f"{axis}, inside of the kernel{several}: all that it reads is in VMEM"
    if plan.grid_loop.table is not None:
        return f"{axis}, steps of the grid, {plan.grid_loop.steps} that run, by a table in scalar memory"
    return f"{axis}, the last axis of the grid: its arrays do not fit VMEM as a whole"


def _array(plan: KernelPlan, param: Value) -> Iterator[str]:
    ops = [op for op in plan.layouts if op.ref is param]
    lines = ", ".join(dict.fromkeys(_line(op).strip() for op in ops if _line(op)))
    head = f"  {param.name}{list(param.ref.shape)} ({param.ref.role}{', ' + lines if lines else ''}): "
    if param in plan.scalars.tables:
        computed = plan.func.inputs[len(plan.func.inputs) - len(plan.table_programs) :]
        origin = "computed ahead by XLA, " if param in computed else ""
        yield f"{head}{origin}prefetched into scalar memory, {4 * max(1, prod(param.ref.shape))} B"
        return
    layouts = dict.fromkeys(layout for op in ops if (layout := plan.layouts[op]) is not None)
    if not layouts:
        yield f"{head}not in VMEM, for no program of the kernel reads or writes it"
    for layout in layouts:
        yield head + layout_words(plan, layout)


def layout_words(plan: KernelPlan, layout: Layout) -> str:
    """The place of an array, and the way of its elements to vector memory."""
    window_dims = [_KINDS[r.kind].format(size=r.size) for r in layout.window.dims]
    param = layout.window.param
    pipelined = layout in plan.hbm_inputs or param in plan.pipelined_outputs
    if layout in plan.row_dma_inputs:
        return "in HBM, each row that is read is copied by itself: it does not fit VMEM as a whole"
    kind = "in HBM, blocks" if pipelined else "resident" if _is_resident(layout) else "blocked"
    text = f"{kind} {list(layout.buffer)}; along its dims {', '.join(window_dims) or 'nothing'}"
    size = prod(layout.shape) * param.ref.dtype.itemsize
    if layout.needs_copy:
        text += f"; XLA rearranges it to {list(layout.shape)} around the call: {2 * size} B read and written"
    elif layout.has_folded_dim:
        text += f"; a reshape by XLA to {list(layout.shape)}: nothing if it cancels with another, else {2 * size} B"
    return text


def _is_resident(layout: Layout) -> bool:
    return all(v.length <= v.block for v in layout.dims)
