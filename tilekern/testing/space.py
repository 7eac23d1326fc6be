"""The random calls of a function: shapes that are awkward for tiles, dtypes, blocks, numbers, batches, gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tilekern.errors import ArgumentError
from tilekern.ir.types import DTYPES, FOUR_BITS, DType, kind_of
from tilekern.kernel.choice import Tunable
from tilekern.testing.calls import Call
from tilekern.testing.layouts import (
    Layout,
    Trial,
    block_names,
    blocks_in,
    found_layouts,
    known_to,
    layout_of_case,
    loops_without_bounds,
    static_choices,
    values_of_choices,
)
from tilekern.testing.strategies import awkward, hypothesis_strategies
from tilekern.testing.values import NUMBERS, Numbers

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

type _Pick = Callable[[Sequence[Any]], Any]

# An array has no more elements than this, so that interpreters end.
_ELEMENTS = 1 << 14
_LARGEST_BLOCK = 128
_BLOCKS = (4, 8, 16, 5)
_FLOATS = ("f32", "bf16", "f16", "f64")

# Sums of so many positive numbers are wrong in bfloat16, and in float16: one dim of a call is as long.
_LONG = (1000, 1024)
_NARROW = ("bf16", "bf16", "f16", "f32")
_LONG_BLOCKS = (16, 8)


@dataclass(frozen=True)
class Space:
    """The calls that a check draws from.

    Attributes:
      layouts: of the arguments.
      statics: values of static arguments.
      blocks: names of blocks, and sizes of tiles.
      floats: the dtypes of floats.
      trial: whether a call is taken.
      batches, gradients: whether calls are batched and differentiated.
      long: whether calls may have one long dim, and numbers that show what long sums lose.
      numbers: the kinds of numbers in arrays.
      choices: for each choice, by its name, the values it may have.
    """

    layouts: Sequence[Layout]
    statics: Mapping[str, Sequence[Any]]
    blocks: tuple[str, ...]
    tiles: Sequence[int]
    trial: Trial
    batches: bool = True
    gradients: bool = True
    long: bool = True
    numbers: tuple[Numbers, ...] = NUMBERS
    choices: Mapping[str, Sequence[Tunable]] = field(default_factory=dict[str, Sequence[Tunable]])

    def strategy(self, rejected: Counter[str] | None = None) -> SearchStrategy[Call]:
        """Calls that the function takes; a call that it refuses is counted in `rejected`."""
        st = hypothesis_strategies()
        from hypothesis import reject

        def make(draw: Any) -> Call:
            def pick(values: Sequence[Any]) -> Any:
                return draw(st.sampled_from(list(values)))

            layout = pick(self.layouts)
            short_numbers = [kind for kind in self.numbers if kind != "positive"]
            numbers = pick((*self.numbers, "positive") if self.long else short_numbers)
            long = numbers == "positive" and layout.sizes
            keywords = {n: pick(values) for n, values in self.statics.items()}
            keywords |= self._blocks(pick, _LONG_BLOCKS if long else _BLOCKS)
            chosen = {name: pick((None, *values)) for name, values in self.choices.items()}
            keywords |= {name: value for name, value in chosen.items() if value is not None}
            sizes = self._long_sizes(pick, layout) if long else [pick(self._sizes(size)) for size in layout.sizes]
            types = layout.types(sizes, self._dtypes(pick, layout.dtypes, _NARROW if long else _FLOATS))
            if any(prod(t.shape) > _ELEMENTS for t in types):
                reject()
            call = Call(layout.tree, types, keywords, numbers, draw(st.integers(0, 999)))
            if refusal := self.trial.refusal(call.tree, types, call.keywords):
                if rejected is not None:
                    rejected[refusal] += 1
                reject()
            return call if long else self._transformed(pick, call)

        return st.composite(make)()

    def _sizes(self, size: int) -> list[int]:
        """Sizes of a dim: first the size that is always taken, then sizes near it, and awkward ones for the tiles."""
        near = [size, 2 * size, 3 * size, max(size // 2, 1)]
        return list(dict.fromkeys([*near[:1], *(n for b in self.tiles for n in awkward(b)), *near[1:]]))

    def _long_sizes(self, pick: _Pick, layout: Layout) -> list[int]:
        """Sizes that are taken for sure, but for one, which is long, or as long as arrays may have elements."""
        sizes = list(layout.sizes)
        long: int = pick(range(len(sizes)))
        sizes[long] = 1
        types = layout.types(sizes)
        most = max(prod(t.shape) for t, dims in zip(types, layout.dims, strict=True) if long in dims)
        sizes[long] = min(pick(_LONG), max(_ELEMENTS // max(most, 1), layout.sizes[long]))
        return sizes

    def _blocks(self, pick: _Pick, sizes: Sequence[int]) -> dict[str, int]:
        """No blocks, so that the schedule's are taken; or small ones, so that small arrays have many tiles."""
        if not self.blocks or pick((False, True, True)) is False:
            return {}
        return {name: pick(sizes) for name in self.blocks}

    def _dtypes(self, pick: _Pick, dtypes: Sequence[DType], names: Sequence[str]) -> list[DType]:
        floats = DTYPES[pick(names)]
        return [floats if kind_of(d) == "float" and d not in FOUR_BITS else d for d in dtypes]

    def _transformed(self, pick: _Pick, call: Call) -> Call:
        way = pick(("call", "call", *["batch"] * self.batches, *["gradient"] * self.gradients))
        if way == "batch" and call.types:
            axes = tuple(pick([0, None, len(t.shape)]) for t in call.types)
            axes = axes if any(a is not None for a in axes) else (0, *axes[1:])
            return replace(call, in_axes=axes, size=pick((2, 1, 3)))
        # At ordinary numbers: at corners and infinities a derivative is what a rule says.
        floats = any(kind_of(np.dtype(t.dtype)) == "float" for t in call.types)
        return replace(call, gradient=True, numbers="normal") if way == "gradient" and floats else call


def space(
    function: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    cases: Sequence[Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    *,
    batches: bool = True,
    gradients: bool = True,
) -> Space:
    """The calls of a function, from cases or by trial.

    Static arguments that the reference has no parameter for keep their defaults.

    Raises:
      ArgumentError: no arguments are found, or a case is refused.
    """
    if not callable(function):
        raise ArgumentError(
            "only functions can be checked",
            expected="a kernel, an op, or a function that calls some",
            got=f"{function!r}",
            fix="give the kernel itself, not its result",
        )
    fixed_keywords = keywords or {}
    trial = Trial((function,) if reference is None else (function, reference))
    statics = static_choices(function, fixed_keywords)
    if reference is not None:
        taken_names = known_to(reference, statics)
        statics = {name: values if name in taken_names else values[:1] for name, values in statics.items()}
    simplest = {name: values[0] for name, values in statics.items()}
    if cases is None:
        layouts = found_layouts(trial, simplest)
    else:
        layouts = [layout_of_case(trial, tuple(case), simplest) for case in map(_as_case, cases)]
    tiles = {b for layout in layouts for b in _tiles(trial, layout, simplest)}
    blocks = tuple(name for name in block_names(function) if name not in fixed_keywords)
    tiles = {4, 8} | tiles if blocks or not tiles else tiles
    integers = any(kind_of(d) in ("signed", "unsigned") for layout in layouts for d in layout.dtypes)
    long = not integers or not any(loops_without_bounds(trial, layout, simplest) for layout in layouts)
    choices = {name: values for name, values in values_of_choices(function).items() if name not in fixed_keywords}
    return Space(layouts, statics, blocks, sorted(tiles), trial, batches, gradients, long, choices=choices)


def _tiles(trial: Trial, layout: Layout, keywords: Mapping[str, Any]) -> list[int]:
    return [b for b in blocks_in(trial, layout, keywords) if 1 < b <= _LARGEST_BLOCK]


def _as_case(case: Any) -> Sequence[Any]:
    if isinstance(case, tuple | list):
        return case  # pyright: ignore[reportUnknownVariableType] -- the user's
    raise ArgumentError(
        "a case is no tuple",
        expected="cases=[(x, y), ...]: for each case a tuple of arrays or jax.ShapeDtypeStructs",
        got=f"case = {case!r}",
        fix="put the arguments into a tuple, also a single one: (x,)",
    )
