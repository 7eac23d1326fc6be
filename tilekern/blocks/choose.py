"""The fastest blocks by an analytic model, from a few traces of the body and without compiling one.

Each block that nobody chose is varied alone, once. Of every number of a `Tiling` this tells how it depends on that
block: not at all, in proportion, inversely, or as a straight line. So one evaluation of the model on arrays has the
seconds of all combinations of blocks.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from tilekern import _jax
from tilekern.blocks.tiling import Loop, Number, Tiling, tiling
from tilekern.ir.core import Func
from tilekern.lower.target import Target, backend_of
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce

type Blocks = Mapping[str, Any]
"""Sizes of blocks and values of choices, by name."""
type Programs = Callable[[Blocks], Sequence[Func]]
"""Returns the Funcs that a call runs, for sizes of all blocks; raises `BodyError` for sizes that the body refuses."""
type Model = Callable[[Tiling], Number]
_MODELS = {"CPU": "on_cpu", "GPU": "on_gpu", "TPU": "on_tpu"}
"""The module of the model, by `Backend.hardware`. It imports constants of the backend, so only the one needed is."""
_MOST = 20_000  # combinations
_ALIKE = 1.03
"""Combinations whose seconds differ by less are equally good: the one with the fewest changes comes first."""


class BodyError(Exception):
    """The body of a kernel raised an error for sizes of blocks, or its trace with them is refused."""


def model_of(target: Target) -> Model | None:
    """Seconds of a tiling on a target; None if there is no model of it."""
    backend = backend_of(target)
    if backend.hardware not in _MODELS:
        return None
    module = importlib.import_module(f"tilekern.blocks.{_MODELS[backend.hardware]}")
    return partial(module.seconds, backend.device(target))


def tilings(funcs: Iterable[Func]) -> list[Tiling]:
    """The tilings of Funcs, after passes by which no op is computed twice or in vain."""
    return [tiling(cse(dce(func))) for func in funcs]


def by_speed(programs: Programs, start: Blocks, free: Sequence[str], model: Model) -> Iterator[dict[str, int]]:
    """Sizes of the free blocks, the fastest first, by the model; sizes of equal speed by their distance from the start.

    Args:
      programs: the Funcs of a call with given blocks, whose seconds add up.
      start: sizes of all blocks, with which the body can be traced.
      free: the blocks to choose.
      model: the model of the target.
    """
    leaves, tree = _jax.flatten(tilings(programs(start)))
    slopes = {name: slope for name in free if (slope := _slopes(programs, start, name, leaves, tree)) is not None}
    sizes = {name: _sizes(start[name], _extent(slope, leaves, tree)) for name, slope in slopes.items()}
    while math.prod(map(len, sizes.values())) > _MOST:
        longest = max(sizes, key=lambda name: len(sizes[name]))
        sizes[longest] = [size for size in sizes[longest][::2] if size != start[longest]] + [start[longest]]
    rows = list(itertools.product(*sizes.values()))
    columns = np.array(rows, np.int64).reshape(len(rows), len(sizes))
    candidates = {name: columns[:, n] for n, name in enumerate(sizes)}
    with np.errstate(all="ignore"):
        numbers = _tilings_of(candidates, start, leaves, tree, slopes)
        seconds = np.broadcast_to(sum(map(model, numbers)), len(columns))
    steps = sum((abs(np.log2(c / start[name])) for name, c in candidates.items()), start=np.zeros(len(columns)))
    grades = np.floor(np.log(seconds / np.nanmin(seconds)) / np.log(_ALIKE))
    for best in np.lexsort((seconds, steps, grades)):
        yield {name: int(column[best]) for name, column in candidates.items()}


type _Slope = list[tuple[str, float]]
"""For each number of a tiling how it depends on a block: "times" or "over" with 1, "plus" with the slope."""


def _slopes(programs: Programs, start: Blocks, name: str, leaves: Sequence[Any], tree: Any) -> _Slope | None:
    """The dependence of all numbers on a block; None if the body does not take another size, or becomes another one."""
    size = start[name]
    for varied_size in (size // 2, 2 * size):
        if varied_size < 1:
            continue
        try:
            varied, varied_tree = _jax.flatten(tilings(programs({**start, name: varied_size})))
        except BodyError:
            continue
        if varied_tree == tree:
            return [_slope(*pair, size, varied_size) for pair in zip(leaves, varied, strict=True)]
    return None


def _slope(first: Any, second: Any, size: int, varied_size: int) -> tuple[str, float]:
    if isinstance(first, float) or first == second:
        return "plus", 0.0
    if second * size == first * varied_size:
        return "times", 1.0
    if abs(second * varied_size - first * size) <= max(size, varied_size):
        return "over", 1.0
    return "plus", (second - first) / (varied_size - size)


def _tilings_of(
    candidates: Mapping[str, Any], start: Blocks, leaves: Sequence[Any], tree: Any, slopes: Mapping[str, _Slope]
) -> list[Tiling]:
    """The tilings with an array in the place of each number, with an element for each choice of blocks."""
    numbers: list[Any] = []
    for n, leaf in enumerate(leaves):
        number: Any = leaf
        for name, column in candidates.items():
            how, slope = slopes[name][n]
            if how == "times":
                number = number * (column / start[name])
            elif how == "over":
                number = np.ceil(number * (start[name] / column))
            elif slope:
                number = number + slope * (column - start[name])
        numbers.append(number if number is leaf else np.maximum(np.rint(number), 0))
    return jax.tree.unflatten(tree, numbers)


def _extent(slope: _Slope, leaves: Sequence[Any], tree: Any) -> int:
    """The longest axis whose tiles are as large as a block; 0 if there is none."""
    marked: list[Tiling] = jax.tree.unflatten(tree, [how == "times" for how, _ in slope])
    plain: list[Tiling] = jax.tree.unflatten(tree, leaves)
    loops = zip(_loops(marked), _loops(plain), strict=True)
    return max((loop.extent for mark, loop in loops if mark.block), default=0)


def _loops(of: Sequence[Tiling]) -> list[Loop]:
    return [loop for tiling in of for loop in (*tiling.grid, *(loops[-1] for loops in tiling.folds))]


def _sizes(start: int, extent: int) -> list[int]:
    """The powers of two up to the first one that holds the axis; `start` alone for a block without an axis."""
    return sorted({1 << n for n in range(max(extent - 1, 0).bit_length() + 1)} | {start}) if extent else [start]
