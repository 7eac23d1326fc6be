"""Index maps: from the place of a step in the grid to its program, its tile of the grid loop, and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.analysis.ranges import Interval, position_interval
from tilekern.ir.core import Value
from tilekern.ir.records import record
from tilekern.lower.mosaic.emit.scalars import evaluate
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.windows import WindowDim
from tilekern.lower.positions import locate, tile_range


@record
class GridStep:
    """One step of the grid.

    Attributes:
      plan: the plan of the kernel.
      indices: the index along each axis of the Func, and of the grid loop.
      tables: the arrays in scalar memory.
      tile: the tile of the grid loop; None without one.
      first, last: True in the first and in the last step of a program.
      live: False if the step table says that no tile runs in this step.
    """

    plan: KernelPlan
    indices: Mapping[Value, Any]
    tables: Mapping[Value, Any]
    tile: Any = None
    first: Any = True
    last: Any = True
    live: Any = True

    def evaluate(self, value: Value) -> Any:
        """The value of a known scalar."""
        return evaluate(self.plan.scalars, value, self.indices, self.tables)


def decode_step(plan: KernelPlan, ids: Sequence[Any], tables: Mapping[Value, Any], steps: Any) -> GridStep:
    """The step at a place of the grid.

    Args:
      plan: the plan of the kernel.
      ids: the place.
      tables: the arrays in scalar memory.
      steps: the step table, or None.
    """
    args, grid_loop = plan.func.body.args, plan.grid_loop
    indices = {args[n]: ids[k] for k, n in enumerate(plan.order)}
    if grid_loop is None:
        return GridStep(plan, indices, tables)
    place = ids[-1]
    if grid_loop.table is None:
        count = grid_loop.steps
        tile = count - 1 - place if grid_loop.reverse else place
        indices[grid_loop.index] = tile
        return GridStep(plan, indices, tables, tile, place == 0, place == count - 1, True)
    columns = [steps[n, place] for n in range(2 + len(grid_loop.table_axes))]
    tile, flags = columns[:2]
    indices[grid_loop.index] = tile
    indices.update({args[n]: x for n, x in zip(grid_loop.table_axes, columns[2:], strict=True)})
    first, last, live = (flags & np.int32(bit) != 0 for bit in (1, 2, 4))
    return GridStep(plan, indices, tables, tile, first, last, live)


def live_step(step: GridStep) -> GridStep:
    """The step whose blocks the index maps fetch: a dead step fetches the blocks of the next live step.

    A dead step before the first tile fetches the first tile. A dead step behind the last tile fetches the tile with
    which the next program's axis starts.
    """
    grid_loop = step.plan.grid_loop
    if grid_loop is None or grid_loop.table is not None:
        return step
    axis = grid_loop.chain[0].axis
    ranges = [tile_range(step.evaluate(f.start), step.evaluate(f.stop), axis) for f in grid_loop.chain]
    low = reduce(jnp.minimum, (first for first, _ in ranges))
    high = reduce(jnp.maximum, (last for _, last in ranges))
    tile = step.tile
    if grid_loop.reverse:
        live_tile = jnp.where(tile >= low, jnp.minimum(tile, high - 1), grid_loop.steps - 1)
    else:
        live_tile = jnp.where(tile < high, jnp.maximum(tile, low), 0)
    live_tile = jnp.clip(live_tile, 0, max(axis.tiles - 1, 0))
    return GridStep(step.plan, {**step.indices, grid_loop.index: live_tile}, step.tables, live_tile)


def block_index(layout: Layout, step: GridStep) -> tuple[Any, ...]:
    """The block of an array in a step, as an index of blocks along each dim."""
    window_dims = layout.window.dims
    index: list[Any] = []
    for view in layout.dims:
        window_dim = window_dims[view.dim - (view.use == "fold")] if view.dim >= 0 else None
        moves = window_dim is not None and (
            view.use == "fold" or window_dim.kind == ("at" if view.use == "place" else "tiled")
        )
        if window_dim is None or not moves or (view.use == "lane" and view.length == view.block):
            index.append(0)
            continue
        intervals = _intervals(step.plan, window_dim)
        place = locate(window_dim.position, _operands(step, window_dim), intervals)
        count = view.length if view.use in ("place", "tile") else -(-view.length // view.block)
        size = window_dim.size if window_dim.kind == "tiled" else 1
        number = lax.div(place, np.int32(size)) if size > 1 else place
        interval = position_interval(window_dim.position, intervals)
        inside = interval is not None and interval.within(0, count * size - 1)
        index.append(number if inside else jnp.clip(number, 0, count - 1))
    return tuple(index)


def _operands(step: GridStep, window_dim: WindowDim) -> list[Any]:
    """The operands of a position as int32; an operand that no term uses may be unknown, and is 0."""
    used = {t.operand for t in window_dim.position.terms}
    return [jnp.asarray(step.evaluate(v) if n in used else 0, jnp.int32) for n, v in enumerate(window_dim.operands)]


def _intervals(plan: KernelPlan, window_dim: WindowDim) -> list[Interval | None]:
    """For each operand of a position, the interval of its values in all steps, both ends included; None if unknown.

    An operand of no term has no interval either. The ranges of the Func hold in live steps only.
    """
    folds = (*plan.pipelines, *(plan.grid_loop.chain if plan.grid_loop else ()))
    loops = {fold.body.args[0]: Interval(0, max(0, fold.axis.tiles - 1)) for fold in folds}
    grid = frozenset(plan.func.body.args)
    used = {t.operand for t in window_dim.position.terms}
    intervals: list[Interval | None] = []
    for n, value in enumerate(window_dim.operands):
        holds = n in used and plan.scalars.axes(value) <= grid
        intervals.append(loops.get(value, plan.ranges.get(value) if holds else None))
    return intervals


def when(*conditions: Any) -> Callable[[Callable[[], None]], Any]:
    """`pl.when` of all conditions; the body runs unconditionally if all are True."""
    undecided = [c for c in conditions if c is not True]
    if not undecided:
        return lambda body: body()
    return pl.when(reduce(lambda x, y: x & y, undecided))
