"""The order of the grid's axes, and the windows of outputs that make all writes to a block consecutive.

Pallas writes a block back to HBM when a step with another block comes (see `output_blocks`). So the axes that most
outputs depend on come first. Where that is not enough, a window is widened: more dims of the output are in VMEM as a
whole, and fewer axes of the grid change its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import permutations, takewhile

from tilekern.ir.core import Func, Value
from tilekern.lower.mosaic.calibration import MAX_PERMUTED_AXES
from tilekern.lower.mosaic.plan.grid_loops import GridLoop
from tilekern.lower.mosaic.plan.hbm_layout import layout_of
from tilekern.lower.mosaic.plan.output_blocks import OutputBlocks
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.lower.mosaic.plan.windows import Window, axes_of, make_resident


def place_outputs(
    func: Func, grid_loop: GridLoop | None, windows: Mapping[Value, Window], scalars: Scalars
) -> tuple[tuple[int, ...], dict[Value, Window]]:
    """The order of the axes, and the windows of outputs, so that the writes to each block are consecutive.

    Args:
      func: the Func.
      grid_loop: the loop that is the last axis of the grid, if there is one.
      windows: the narrowest window of each output.
      scalars: the scalars that index maps can compute.
    """
    order = _by_outputs(func, grid_loop, windows.values(), scalars)
    blocks = OutputBlocks(func, grid_loop, order, scalars, windows)
    if not all(blocks.is_consecutive(param) for param in windows):
        order = _cheapest(func, grid_loop, order, windows.values(), scalars)
    widen = partial(_widened, func, grid_loop, order, scalars)
    return order, {param: widen(param, window) for param, window in windows.items()}


def _widened(
    func: Func, grid_loop: GridLoop | None, order: Sequence[int], scalars: Scalars, param: Value, window: Window
) -> Window:
    """The first of three ever wider windows under which the writes to each block are consecutive, else the widest."""
    inner = _resident_along_inner_axes(func, grid_loop, order, window, scalars)
    whole = make_resident(window, scalars)
    for wider in (window, inner):
        if OutputBlocks(func, grid_loop, order, scalars, {param: wider}).is_consecutive(param):
            return wider
    return whole


def _by_outputs(func: Func, grid_loop: GridLoop | None, outputs: Iterable[Window], scalars: Scalars) -> tuple[int, ...]:
    """The numbers of the axes, outermost first: by the outputs that depend on an axis; axes with one step come last."""
    args = func.body.args
    counts = [0] * len(args)
    for window in outputs:
        depends = axes_of(window, scalars)
        for n, arg in enumerate(args):
            counts[n] += arg in depends
    in_table = grid_loop.table_axes if grid_loop else ()
    free = [n for n in range(len(args)) if n not in in_table]
    return tuple(sorted(free, key=lambda n: (func.grid[n] == 1, -counts[n], n)))


def _cheapest(
    func: Func, grid_loop: GridLoop | None, order: tuple[int, ...], outputs: Iterable[Window], scalars: Scalars
) -> tuple[int, ...]:
    """The order of axes in which the widened windows of outputs take the fewest bytes."""
    windows = list(outputs)

    def cost(order: tuple[int, ...]) -> int:
        wider = (_resident_along_inner_axes(func, grid_loop, order, w, scalars) for w in windows)
        return sum(layout_of(w).block_bytes for w in wider)

    moving = [n for n in order if func.grid[n] > 1]
    if len(moving) > MAX_PERMUTED_AXES:
        return order
    still = tuple(n for n in order if func.grid[n] <= 1)
    return min(((*axes, *still) for axes in permutations(moving)), key=cost)


def _resident_along_inner_axes(
    func: Func, grid_loop: GridLoop | None, order: Sequence[int], window: Window, scalars: Scalars
) -> Window:
    """The window with each dim whole in VMEM that moves along an axis inside of an axis that does not move the window.

    Along the inner axis the blocks would return: once for each step of the outer axis.
    """
    args = func.body.args
    axes = [frozenset([args[n]]) for n in order if func.grid[n] > 1]
    if grid_loop is not None:
        axes.append(frozenset([grid_loop.index, *(args[n] for n in grid_loop.table_axes)]))
    depends = axes_of(window, scalars)
    outer = list(takewhile(lambda axis: axis & depends, axes))
    return make_resident(window, scalars, frozenset[Value]().union(*axes[len(outer) :]))
