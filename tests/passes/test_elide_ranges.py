"""Comparisons of lanes with a range of whole tiles: which go, and that results stay."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import WIDE
from tilekern.ir.interpret import interpret
from tilekern.ir.verify import verify
from tilekern.passes import pipeline
from tilekern.passes.elide_ranges import elide_ranges


@tk.kernel(out_type=lambda x, *_, **how: jax.ShapeDtypeStruct((how["programs"], 2), x.dtype))
def sums(x, n, out, *, block: int, scale: tuple[int, int], shift: tuple[int, int], programs: int, own: bool):
    """The sum of a range of each program, and of its elements by an own mask."""
    p = tk.parallel(programs)
    start, stop = (p * by + at for by, at in zip(scale, shift, strict=True))
    axis = tk.serial(x.shape[0], block, start=start, stop=stop, whole_tiles=own)

    def step(t: Any, total: Any) -> Any:
        inside = (t.indices >= start) & (t.indices < stop)
        return total + jnp.stack([x[t].sum(), x.load(t, mask=inside).sum()])

    out[p] = tk.fold(axis, step, jnp.zeros(2))


def traced(extent: int, block: int, scale: Any, shift: Any, own: bool = False) -> Any:
    types = jax.ShapeDtypeStruct((extent,), np.float32), jax.ShapeDtypeStruct((), np.int32)
    return sums.trace(*types, block=block, scale=scale, shift=shift, programs=4, own=own)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("extent", "block", "scale", "shift", "masks"),
    [
        (16, 4, (4, 4), (0, 4), 0),
        (16, 4, (0, 8), (0, 8), 0),
        (16, 4, (8, 8), (-4, 12), 0),
        (14, 4, (4, 4), (0, 4), 0),
        (14, 4, (8, 8), (0, 8), 1),  # a start behind the extent
        (16, 4, (4, 4), (0, 2), 1),
        (16, 4, (4, 4), (1, 4), 1),
        (16, 4, (3, 3), (0, 3), 1),
        (14, 4, (4, 3), (0, 4), 1),
    ],
)
def test_whole_tiles_need_no_masks(extent: int, block: int, scale: Any, shift: Any, own: bool, masks: int) -> None:
    text = str(traced(extent, block, scale, shift, own))
    assert (" mask " in text) == bool(masks), text


@WIDE
@given(*[st.sampled_from([3, 8, 10, 16, 17])] + [st.sampled_from([2, 4, 5])] + [st.integers(-3, 5)] * 4, st.booleans())
def test_results_stay(extent: int, block: int, a: int, b: int, c: int, d: int, own: bool) -> None:
    """Factors that are multiples of the block, and others."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, extent).astype(np.float32)
    for factor in (1, block):
        func = traced(extent, block, (a * factor, b * factor), (c * factor, d * factor), own).ir
        wanted = interpret(func, x, np.int32(0))
        for improved in (elide_ranges(func), pipeline.run(func)):
            verify(improved)
            np.testing.assert_array_equal(interpret(improved, x, np.int32(0))[0], wanted[0])
