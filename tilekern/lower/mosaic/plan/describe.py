"""A plan in words: what became of each loop and each array, at which of the user's lines, and what it takes of VMEM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

from tilekern.ir.control import Fold
from tilekern.ir.core import Op, Value
from tilekern.ir.quote import visible
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.plan_kernel import Plan

_KINDS = {
    "at": "one place",
    "tiled": "a tile of {size}",
    "static": "all",
    "aligned": "all, read in tiles of {size}",
    "rows": "all, read row by row",
}


def describe(plan: Plan) -> str:
    """The plan, for people to read."""
    return "\n".join(map(visible, _lines(plan)))


def _lines(plan: Plan) -> Iterator[str]:
    func = plan.func
    taken, there = plan.vmem / 2**20, plan.chip.vmem_budget / 2**20
    yield f"{func.name} on {plan.chip.name}: {taken:.2f} MiB of {there:.1f} MiB VMEM"
    yield "grid"
    names = [func.axes[n].name for n in plan.order]
    if plan.serial is not None:
        names.append("step" if plan.serial.table is not None else plan.serial.chain[0].axis.name)
    for name, steps, meaning in zip(names, plan.grid, plan.semantics, strict=False):
        yield f"  {name}: {steps} steps, {meaning}"
    folds = [op for op in func.walk() if isinstance(op, Fold)]
    if folds:
        yield "loops"
        yield from (f"  {_place(op)}{op.axis.name}: {_loop(plan, op)}" for op in folds)
    yield "arrays"
    for param in func.params:
        yield from _array(plan, param)
    yield "VMEM"
    for name, size in sorted(plan.buffers, key=lambda b: -b[1]):
        if size:
            yield f"  {name}: {size / 2**10:.0f} KiB"


def _place(op: Op) -> str:
    name = os.path.basename(op.loc.file)
    return f"{name}:{op.loc.line} " if op.loc.line else ""


def _loop(plan: Plan, op: Fold) -> str:
    axis = f"{op.axis.extent} by {op.axis.block}"
    if op in plan.pipes:
        return f"{axis}, a pipeline inside of the kernel fetches its tiles: its arrays do not fit VMEM as a whole"
    if plan.serial is None or op not in plan.serial.chain:
        at_once = plan.rounds[op].at_once
        several = f", {at_once} tiles at once" if at_once > 1 else ""
        return f"{axis}, inside of the kernel{several}: all that it reads is in VMEM"
    if plan.serial.table is not None:
        return f"{axis}, steps of the grid, {plan.serial.steps} that run, by a table in scalar memory"
    return f"{axis}, the last axis of the grid: its arrays do not fit VMEM as a whole"


def _array(plan: Plan, param: Value) -> Iterator[str]:
    ops = [op for op in plan.layouts if op.ref is param]
    where = ", ".join(dict.fromkeys(_place(op).strip() for op in ops if _place(op)))
    head = f"  {param.name}{list(param.ref.shape)} ({param.ref.role}{', ' + where if where else ''}): "
    if param in plan.scalars.tables:
        computed = plan.func.inputs[len(plan.func.inputs) - len(plan.ahead) :]
        made = "computed ahead by XLA, " if param in computed else ""
        yield f"{head}{made}prefetched into scalar memory, {4 * max(1, prod(param.ref.shape))} B"
        return
    seen = dict.fromkeys(found for op in ops if (found := plan.layouts[op]) is not None)
    if not seen:
        yield f"{head}not in VMEM, for no program of the kernel reads or writes it"
    for found in seen:
        yield head + _layout(plan, found)


def _layout(plan: Plan, found: Layout) -> str:
    roles = [_KINDS[r.kind].format(size=r.size) for r in found.window.roles]
    param = found.window.param
    piped = found in plan.far or param in plan.piped
    if found in plan.fetched:
        return "in HBM, each row that is read is copied by itself: it does not fit VMEM as a whole"
    kind = "in HBM, blocks" if piped else "resident" if _is_whole(found) else "blocked"
    text = f"{kind} {list(found.buffer)}; along its dims {', '.join(roles) or 'nothing'}"
    size = prod(found.shape) * param.ref.dtype.itemsize
    if found.moves:
        text += f"; XLA rearranges it to {list(found.shape)} around the call: {2 * size} B read and written"
    elif found.folds:
        text += f"; a reshape by XLA to {list(found.shape)}: nothing if it cancels with another, else {2 * size} B"
    return text


def _is_whole(found: Layout) -> bool:
    return all(v.length <= v.block for v in found.dims)
