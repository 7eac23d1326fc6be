"""Mean iterations of folds against a count over all programs."""

from __future__ import annotations

import numpy as np
import pytest

from tilekern.ir.analysis.iterations import Iterations, _mean
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis
from tilekern.ir.parse import parse

_FOLD = """
func @f(%x: ref<f32[{extent}], in>, %n: ref<i32[1], in>, %w: ref<i32[{extent}], in>, %out: ref<f32[40], out>) {{
  grid %h in h[{heads} by 1], %i in i[40 by 4]
  %zero = constant 0.0 : f32[]
  %c0 = constant 0 : i32[]
  %four = constant 4 : i32[]
  %most = constant {most} : i32[]
  %at = mul(%i, %four) : i32[]
  %after = add(%at, %most) : i32[]
  %before = sub(%at, %most) : i32[]
  %data = load %n[0!] : i32[]
  %positive = max(%data, %c0) : i32[]
  %bounded = min(%positive, %four) : i32[]
  %some = load %w[0 +: 3] : i32[3]
  %zeros = broadcast(%c0) {{dims=[]}} : i32[3]
  %signs = gt(%some, %zeros) : bool[3]
  %ones = convert(%signs) : i32[3]
  %few = reduce(%ones) {{monoid="sum", dims=[0]}} : i32[]
  %sum = fold %k in k[{extent} by 8] from {start} to {stop} with %total = %zero do {{
    %tile = load %x[8*%k +: 8] : f32[8]
    %s = reduce(%tile) {{monoid="sum", dims=[0]}} : f32[]
    %next = add(%total, %s) : f32[]
    yield %next
  }} : f32[]
  %row = broadcast(%sum) {{dims=[]}} : f32[4]
  store %row to %out[4*%i +: 4!]
}}
"""


def mean(start: str, stop: str, *, extent: int = 40, most: int = 10, heads: int = 1) -> float:
    func = parse(_FOLD.format(start=start, stop=stop, extent=extent, most=most, heads=heads))
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    return Iterations(func).of(fold)


def counted(start: int, stop: int, extent: int) -> float:
    """The tiles of 8 of one program, the last one by its part."""
    return sum(min(extent - t, 8) / 8 for t in range(max(start, 0) // 8 * 8, min(stop, extent), 8))


@pytest.mark.parametrize("extent", [40, 37])
@pytest.mark.parametrize(("start", "stop"), [("%c0", "%after"), ("%before", "%after"), ("%before", "%at")])
def test_bounds_by_indices_of_the_grid_are_counted_program_by_program(start: str, stop: str, extent: int) -> None:
    bounds = {
        "%c0": lambda i: 0,
        "%at": lambda i: 4 * i,
        "%after": lambda i: 4 * i + 10,
        "%before": lambda i: 4 * i - 10,
    }
    expected = np.mean([counted(bounds[start](i), bounds[stop](i), extent) for i in range(10)])
    # Axes on which no bound depends need no samples.
    assert mean(start, stop, extent=extent, heads=1000) == pytest.approx(expected)


def test_no_tile_runs_between_bounds_in_the_wrong_order() -> None:
    assert mean("%after", "%before") == 0


def test_a_long_axis_is_sampled() -> None:
    """A triangle of 1250 programs and 5000 elements, more than there are samples: half of its tiles."""
    text = _FOLD.replace("40 by 4", "5000 by 4").replace("f32[40]", "f32[5000]")
    func = parse(text.format(start="%c0", stop="%after", extent=5000, most=4, heads=1))
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    expected = np.mean([counted(0, 4 * i + 4, 5000) for i in range(1250)])
    assert Iterations(func).of(fold) == pytest.approx(expected, rel=1e-3)


def test_data_without_a_proof_are_drawn_from_the_axis() -> None:
    assert mean("%c0", "%data") == pytest.approx(np.mean([counted(0, n, 40) for n in range(41)]))
    # At most 4 elements: one tile, but for a length of 0.
    assert mean("%c0", "%bounded") == pytest.approx(40 / 41)


def test_data_are_drawn_from_what_is_proved_about_them() -> None:
    # %few, the sum of 3 bools, is in 0 to 3.
    assert mean("%c0", "%few") == pytest.approx(3 / 4)


def test_samples_are_the_same_in_each_process() -> None:
    assert len({mean("%before", "%data", extent=4000, heads=7) for _ in range(3)}) == 1


def test_sums_of_given_arrays_are_known() -> None:
    func = parse(_FOLD.format(start="%c0", stop="%few", extent=40, most=10, heads=1))
    (fold,) = (op for op in func.walk() if isinstance(op, Fold))
    (param,) = (p for p in func.params if p.name == "w")
    assert not Iterations(func).is_known(fold)
    # Of the first three elements so many are positive.
    for first, expected in (([0, 0, 0], 0.0), ([5, 0, 0], 1.0), ([5, 1, 2], 1.0)):
        array = np.array(first + [1] * 37, np.int32)
        iterations = Iterations(func, {param: array})
        assert iterations.is_known(fold) and iterations.of(fold) == expected


def test_bounds_beyond_32_bits_end_at_the_axis() -> None:
    far = np.int64(1) << 40
    assert _mean(Axis("k", 64, 8), np.array([-far]), np.array([far])) == 8
