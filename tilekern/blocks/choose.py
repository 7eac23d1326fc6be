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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from tilekern import _jax
from tilekern.blocks.reader import tiling
from tilekern.blocks.tiling import Loop, Number, Tiling
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
_TRACED = 8
"""The first combinations whose seconds come from a trace of their own, if a loop visits a part of its tiles.

The part is no sum of what each block contributes: causal attention visits the tiles up to the longer block's.
"""
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


def by_speed(
    programs: Programs, start: Blocks, free: Sequence[str], model: Model, *, takes_extents: bool = False
) -> Iterator[dict[str, int]]:
    """Sizes of the free blocks, the fastest first, by the model; sizes of equal speed by their distance from the start.

    Args:
      programs: the Funcs of a call with given blocks, whose seconds add up.
      start: sizes of all blocks, with which the body can be traced.
      free: the blocks to choose.
      model: the model of the target.
      takes_extents: `Backend.takes_extents` of the target.
    """
    regimes = _regimes(programs, start, free, takes_extents)
    rows = [row for regime in regimes for row in regime.rows(start)]
    columns = np.array(rows, np.int64).reshape(len(rows), len(regimes[0].sizes))
    with np.errstate(all="ignore"):
        seconds = np.concatenate([regime.seconds(start, model) for regime in regimes])
    names = list(regimes[0].sizes)
    distances = (abs(np.log2(columns[:, n] / start[name])) for n, name in enumerate(names))
    steps = sum(distances, start=np.zeros(len(columns)))
    grades = np.floor(np.log(seconds / np.nanmin(seconds)) / np.log(_ALIKE))
    order = np.lexsort((seconds, steps, grades))
    ranked = ({name: int(size) for name, size in zip(names, columns[best], strict=True)} for best in order)
    if any(loop.part != 1 for loop in _folds(tilings(programs(start)))):
        first = list(itertools.islice(ranked, _TRACED))
        yield from sorted(first, key=lambda sizes: _seconds_of(programs, {**start, **sizes}, model))
    yield from ranked


def _seconds_of(programs: Programs, blocks: Blocks, model: Model) -> float:
    """The seconds by the model, from a trace with these blocks; infinite if the body does not take them."""
    try:
        return float(sum(map(model, tilings(programs(blocks)))))
    except BodyError:
        return math.inf


type _Slope = list[tuple[str, float]]
"""For each number of a tiling how it depends on a block: "times" or "over" with 1, "plus" with the slope."""


@dataclass(frozen=True)
class _Regime:
    """Sizes of blocks for which a body has the same ops.

    Attributes:
      base: blocks with which the body was traced.
      leaves, tree: the tilings of that trace.
      slopes: for each free block how the numbers of the tilings depend on it.
      sizes: the sizes of each free block.
    """

    base: Blocks
    leaves: Sequence[Any]
    tree: Any
    slopes: Mapping[str, _Slope]
    sizes: Mapping[str, Sequence[int]]

    def rows(self, start: Blocks) -> list[tuple[int, ...]]:
        """All combinations of sizes, at most `_MOST`."""
        sizes = {name: list(of_name) for name, of_name in self.sizes.items()}
        while math.prod(map(len, sizes.values())) > _MOST:
            longest = max(sizes, key=lambda name: len(sizes[name]))
            sizes[longest] = [size for size in sizes[longest][::2] if size != start[longest]] + [start[longest]]
        return list(itertools.product(*sizes.values()))

    def seconds(self, start: Blocks, model: Model) -> Any:
        """An array of the seconds of all rows."""
        rows = self.rows(start)
        columns = np.array(rows, np.int64).reshape(len(rows), len(self.sizes))
        candidates = {name: columns[:, n] for n, name in enumerate(self.sizes)}
        numbers = _tilings_of(candidates, self.base, self.leaves, self.tree, self.slopes)
        return np.broadcast_to(sum(map(model, numbers)), len(rows))


def _regimes(programs: Programs, start: Blocks, free: Sequence[str], takes_extents: bool) -> list[_Regime]:
    """The regimes of a body.

    One is that of small blocks. Bodies often have another one for a block that holds an axis which they loop over
    otherwise: then they read the axis once.
    """
    base, leaves, tree = _base(programs, start, free)
    slopes = {name: slope for name in free if (slope := _slopes(programs, base, name, leaves, tree)) is not None}
    extents = {name: _extent(slope, leaves, tree, _loops) for name, slope in slopes.items()}
    sizes = {name: _sizes(start[name], extent, takes_extents) for name, extent in extents.items()}
    regimes: list[_Regime] = []
    for name, slope in slopes.items():
        extent = _extent(slope, leaves, tree, _folds)
        whole = {**base, name: max(sizes[name])}
        if extent <= base[name] or max(sizes[name]) < extent:
            continue
        with suppress(BodyError):
            of_whole, whole_tree = _jax.flatten(tilings(programs(whole)))
            if whole_tree != tree:
                varied = {n: _slopes(programs, whole, n, of_whole, whole_tree) for n in slopes if n != name}
                constant = [("plus", 0.0)] * len(of_whole)
                whole_slopes = {n: constant if n == name else varied[n] or constant for n in slopes}
                own = {n: [whole[n]] if whole_slopes[n] is constant else sizes[n] for n in slopes}
                regimes.append(_Regime(whole, of_whole, whole_tree, whole_slopes, own))
                sizes[name] = [size for size in sizes[name] if size < extent]
    return [_Regime(base, leaves, tree, slopes, sizes), *regimes]


def _base(programs: Programs, start: Blocks, free: Sequence[str]) -> tuple[Blocks, list[Any], Any]:
    """Blocks around which each free one is varied, with the numbers and the tree of their tilings.

    The sizes of two blocks differ by a factor of 4 or more. With equal sizes the constants of two axes would be one
    constant (`cse`), so no trace with other sizes would have the same ops.
    """
    base = {name: size for name, size in start.items() if name not in free}
    for name in free:
        taken = [size for size in base.values() if isinstance(size, int) and size]
        halves = (start[name] >> n for n in range(start[name].bit_length()))
        apart = (size for size in halves if all(abs(math.log2(size / used)) >= 2 for used in taken))
        base[name] = next(apart, start[name])
    base = {name: base[name] for name in start}
    try:
        return base, *_jax.flatten(tilings(programs(base)))
    except BodyError:
        return start, *_jax.flatten(tilings(programs(start)))


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
    line = "plus", (second - first) / (varied_size - size)
    if isinstance(first, float) or first == second:
        return line
    if second * size == first * varied_size:
        return "times", 1.0
    if abs(second * varied_size - first * size) <= max(size, varied_size):
        return "over", 1.0
    return line


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
        if number is not leaf:
            number = np.clip(number, 0, 1) if isinstance(leaf, float) else np.maximum(np.rint(number), 0)
        numbers.append(number)
    return jax.tree.unflatten(tree, numbers)


def _extent(
    slope: _Slope, leaves: Sequence[Any], tree: Any, loops_of: Callable[[Sequence[Tiling]], Sequence[Loop]]
) -> int:
    """The longest axis of some loops whose tiles are as large as a block; 0 if there is none."""
    marked: list[Tiling] = jax.tree.unflatten(tree, [how == "times" for how, _ in slope])
    plain: list[Tiling] = jax.tree.unflatten(tree, leaves)
    loops = zip(loops_of(marked), loops_of(plain), strict=True)
    return max((loop.extent for mark, loop in loops if mark.block), default=0)


def _loops(of: Sequence[Tiling]) -> list[Loop]:
    return [loop for tiling in of for loop in tiling.grid] + _folds(of)


def _folds(of: Sequence[Tiling]) -> list[Loop]:
    return [loops[-1] for tiling in of for loops in tiling.folds]


def _sizes(start: int, extent: int, takes_extents: bool) -> list[int]:
    """The powers of two up to the first one that holds the axis, and its extent where a target takes it, and `start`.

    Without an axis `start` alone.
    """
    if not extent:
        return [start]
    powers = {1 << n for n in range(max(extent - 1, 0).bit_length() + 1)}
    return sorted(powers | {start} | ({extent} if takes_extents else set()))
